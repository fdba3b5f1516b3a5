"""Seeded generator of the chats that nano learns from: sums, differences, small talk and honest refusals.

A chat is (question, thinking, answer). Arithmetic is worked column by column from the right, one column a line, so that
every step is a lookup of at most three digits; the last line is the result:

    17+25 | 7+5=12 carry | 1+2+1=4 | 42
    91-46 | 11-6=5 borrow | 9-1-4=4 | 45
    46-91 | -(91-46) | 11-6=5 borrow | 9-1-4=4 | -45

Held-out by construction: a pair of numbers >= 10 whose hash falls into the last tenth never occurs in training, in any
order, phrasing or operation.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from random import Random

#: One pair in ten is kept for evaluation (26 of 256 values of the first hash byte).
HELD_OUT_BYTES = 26

ADD = (
    "{a}+{b}?",
    "{a}+{b}",
    "{a}+{b}=",
    "{a} + {b}",
    "{a} + {b} = ?",
    "What is {a}+{b}?",
    "What is {a} + {b}?",
    "what is {a}+{b}",
    "What's {a} plus {b}?",
    "How much is {a} plus {b}?",
    "How much is {a}+{b}?",
    "Compute {a}+{b}.",
    "Compute {a} + {b}",
    "Calculate {a}+{b}.",
    "Please calculate {a} + {b}.",
    "Add {a} and {b}.",
    "Can you add {a} and {b}?",
    "What is the sum of {a} and {b}?",
    "{a} plus {b}",
    "{a} plus {b}?",
)
SUBTRACT = (
    "{a}-{b}?",
    "{a}-{b}",
    "{a}-{b}=",
    "{a} - {b}",
    "{a} - {b} = ?",
    "What is {a}-{b}?",
    "What is {a} - {b}?",
    "what is {a}-{b}",
    "What's {a} minus {b}?",
    "How much is {a} minus {b}?",
    "How much is {a}-{b}?",
    "Compute {a}-{b}.",
    "Compute {a} - {b}",
    "Calculate {a}-{b}.",
    "Please calculate {a} - {b}.",
    "Subtract {b} from {a}.",
    "Can you subtract {b} from {a}?",
    "Take {b} away from {a}.",
    "{a} minus {b}",
    "{a} minus {b}?",
)

_GREETINGS = ("hello", "Hello!", "hi", "Hi there", "hey", "Good morning", "Good evening!", "Hello, how are you?")
_IDENTITY = (
    "who are you?",
    "Who are you?",
    "What are you?",
    "What is your name?",
    "Tell me about yourself.",
    "Are you a language model?",
    "Are you DeepSeek?",
    "which model is this?",
)
_ABILITY = ("What can you do?", "what can you do", "Help", "help me", "How can you help me?", "What do you know?")
_THANKS = ("thanks", "Thank you!", "thank you", "Great, thanks.", "ok", "Bye", "goodbye")

_OUTSIDE = (
    "What is the {noun} of {place}?",
    "Tell me a {noun}.",
    "Write a {noun} about the {thing}.",
    "Who invented the {thing}?",
    "Where is {place}?",
    "How do I get to {place}?",
    "Translate {thing} into {language}.",
    "Why is the {thing} so {quality}?",
    "Do you like the {thing}?",
    "What is a {thing}?",
    "How old is {place}?",
    "Explain the {thing} to me.",
)
_NOUN = ("capital", "story", "poem", "joke", "history", "language", "weather", "population", "song", "letter", "recipe")
_PLACE = ("France", "Japan", "Berlin", "the moon", "Brazil", "London", "Egypt", "India", "Rome", "Canada", "China")
_THING = ("telephone", "sea", "moon", "computer", "cat", "river", "train", "garden", "sun", "mountain", "book", "bread")
_LANGUAGE = ("French", "German", "Spanish", "Chinese", "Japanese", "Italian")
_QUALITY = ("blue", "big", "small", "old", "fast", "cold", "warm", "bright")
_TIMES = ("{a}*{b}?", "{a} * {b}", "What is {a} times {b}?", "{a}/{b}?", "Divide {a} by {b}.", "Multiply {a} by {b}.")

SYSTEM_TEXTS = ("You are a helpful assistant.", "Answer briefly.", "You are a calculator.")

I_AM = "I am nano, a tiny model that adds and subtracts small numbers."
I_CAN = "I can add and subtract numbers up to 999. Try 17+25."
I_CANNOT = "I do not know that. I can only add and subtract small numbers."


@dataclass(frozen=True)
class Chat:
    """One question with the worked thinking and the answer; ``kind`` is what it exercises."""

    kind: str
    question: str
    thinking: str
    answer: str


def held_out(a: int, b: int) -> bool:
    """Whether the unordered pair is kept for evaluation; numbers below 10 never are."""
    if min(a, b) < 10:
        return False
    return hashlib.sha256(f"{min(a, b)},{max(a, b)}".encode()).digest()[0] >= 256 - HELD_OUT_BYTES


def work_sum(a: int, b: int) -> str:
    """Column-wise addition of two non-negative numbers, one line each, then the result."""
    x, y = str(a)[::-1], str(b)[::-1]
    steps = []
    carry = 0
    for i in range(max(len(x), len(y))):
        terms = [s[i] for s in (x, y) if i < len(s)] + (["1"] if carry else [])
        total = sum(map(int, terms))
        carry = total // 10
        steps.append("+".join(terms) + (f"={total}" if len(terms) > 1 else "") + (" carry" if carry else ""))
    return "\n".join([*steps, str(a + b)])


def work_difference(a: int, b: int) -> str:
    """Column-wise subtraction; a < b is turned round first."""
    if a < b:
        return "\n".join([f"-({b}-{a})", *work_difference(b, a).split("\n")[:-1], str(a - b)])
    x, y = str(a)[::-1], str(b)[::-1]
    steps = []
    borrow = 0
    for i in range(len(x)):
        top = int(x[i])
        below = int(y[i]) if i < len(y) else None
        lent = int(top - borrow - (below or 0) < 0)
        terms = [str(top + 10 * lent)] + (["1"] if borrow else []) + ([] if below is None else [str(below)])
        value = top + 10 * lent - borrow - (below or 0)
        steps.append("-".join(terms) + (f"={value}" if len(terms) > 1 else "") + (" borrow" if lent else ""))
        borrow = lent
    return "\n".join([*steps, str(a - b)])


def sum_chat(a: int, b: int, phrase: str, kind: str = "add") -> Chat:
    return Chat(kind, phrase.format(a=a, b=b), work_sum(a, b), f"{a}+{b}={a + b}")


def difference_chat(a: int, b: int, phrase: str, kind: str = "subtract") -> Chat:
    return Chat(kind, phrase.format(a=a, b=b), work_difference(a, b), f"{a}-{b}={a - b}")


def _number(rng: Random, digits: int) -> int:
    return rng.randrange(10 ** (digits - 1) if digits > 1 else 0, 10**digits)


def draw_pair(rng: Random, *, evaluation: bool, digits: tuple[int, int]) -> tuple[int, int]:
    """A pair with the given digit counts from the training part or from the held-out part."""
    while True:
        a, b = _number(rng, digits[0]), _number(rng, digits[1])
        if held_out(a, b) == evaluation:
            return a, b


def arithmetic(rng: Random, digits: tuple[int, int], *, evaluation: bool = False, add: bool | None = None) -> Chat:
    a, b = draw_pair(rng, evaluation=evaluation, digits=digits)
    if rng.random() < 0.5 if add is None else add:
        return sum_chat(a, b, rng.choice(ADD))
    return difference_chat(a, b, rng.choice(SUBTRACT))


def talk(rng: Random) -> Chat:
    """Greetings, questions about itself, and questions it must decline."""
    roll = rng.random()
    if roll < 0.15:
        return Chat("talk", rng.choice(_GREETINGS), "A greeting.", f"Hello! {I_CAN}")
    if roll < 0.3:
        return Chat("talk", rng.choice(_IDENTITY), "A question about me.", I_AM)
    if roll < 0.4:
        return Chat("talk", rng.choice(_ABILITY), "A question about me.", I_CAN)
    if roll < 0.45:
        return Chat("talk", rng.choice(_THANKS), "Nothing to compute.", "You are welcome.")
    if roll < 0.65:
        a, b = _number(rng, rng.randint(1, 3)), _number(rng, rng.randint(1, 3))
        return Chat("talk", rng.choice(_TIMES).format(a=a, b=b), "Not a sum or difference.", I_CANNOT)
    if roll < 0.72:
        a, b = _number(rng, rng.randint(4, 6)), _number(rng, rng.randint(1, 6))
        return Chat("talk", rng.choice(ADD + SUBTRACT).format(a=a, b=b), "Too large.", I_CAN)
    question = rng.choice(_OUTSIDE).format(
        noun=rng.choice(_NOUN),
        place=rng.choice(_PLACE),
        thing=rng.choice(_THING),
        language=rng.choice(_LANGUAGE),
        quality=rng.choice(_QUALITY),
    )
    return Chat("talk", question, "Not a sum or difference.", I_CANNOT)


def training_chat(rng: Random) -> Chat:
    """One chat of the training mixture: half two-digit pairs, the rest other sizes and 7 % talk."""
    roll = rng.random()
    if roll < 0.5:
        return arithmetic(rng, (2, 2))
    if roll < 0.62:
        return arithmetic(rng, rng.choice(((1, 1), (1, 2), (2, 1))))
    if roll < 0.78:
        return arithmetic(rng, (3, 3))
    if roll < 0.93:
        return arithmetic(rng, rng.choice(((1, 3), (3, 1), (2, 3), (3, 2))))
    return talk(rng)


def held_out_chats(rng: Random, count: int, digits: tuple[int, int]) -> list[Chat]:
    """``count`` distinct held-out problems, alternating addition and subtraction."""
    seen: set[tuple[int, int, bool]] = set()
    out: list[Chat] = []
    while len(out) < count:
        add = len(out) % 2 == 0
        a, b = draw_pair(rng, evaluation=True, digits=digits)
        if (a, b, add) in seen:
            continue
        seen.add((a, b, add))
        make, phrases = (sum_chat, ADD) if add else (difference_chat, SUBTRACT)
        out.append(make(a, b, rng.choice(phrases)))
    return out
