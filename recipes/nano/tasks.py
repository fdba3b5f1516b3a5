"""Seeded generator of what nano learns: worked sums, look-ups in lists, sorting, counting, copying, JSON, tool calls.

Every chat is a ``Task``: the prompt text is a frame (what the codec puts around a conversation, see ``frames``) plus
the question; the thinking is worked so that every step is a look-up of nearby or matching tokens:

    (12+34)-56 | 12+34 | 2+4=6 | 1+3=4 | 46 | 46-56 | -(56-46) | 6-6=0 | 5-4=1 | -10
    Sort 27 12 45 17. | 1:27 | 2:7 | 3: | 4:5 | ...            units of every ten, in order

Held-out by construction: number pairs by ``chat.held_out`` (in a chain, every step's pair counts), look-ups by the hash
of "key: value", all other questions by the hash of their text. Training never contains a held-out one; evaluation asks
nothing else.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from recipes.nano import chat
from recipes.nano.chat import HELD_OUT_BYTES, Chat, work_difference, work_sum

#: Rooms and shops of the questions; the same names as in the shipped evaluation tasks.
NAMES = (
    "amber", "basil", "cedar", "delta", "ember", "fjord", "grove", "hazel", "ivory", "jasper", "kiwi", "lotus",
    "maple", "north", "olive", "pearl", "quartz", "river", "slate", "tulip", "umber", "velvet", "willow", "zinc",
)  # fmt: skip
PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry", "Ida", "Jack", "Kate", "Leo", "Mia",
          "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor")  # fmt: skip
CITIES = ("Paris", "Rome", "Berlin", "London", "Madrid", "Oslo", "Vienna", "Cairo", "Tokyo", "Lima", "Delhi", "Athens")
COLOURS = ("red", "blue", "green", "black", "white", "brown", "yellow", "grey")
#: Common words for lists, one token each; ``packing.Writer`` fills it from words.json.
WORDS: list[str] = []

I_AM = "I am nano, a tiny test model. I work with small numbers and short lists."
I_CAN = "I add and subtract numbers up to 999, look up, sort, count and copy. Try 17+25."
I_CANNOT = "I do not know that. I only work with small numbers and short lists."


@dataclass(frozen=True)
class Task:
    """One chat and where it stands: ``frame`` names the text around it, ``earlier`` is the turn before in frame "turn".

    ``weight`` is that of its learned tokens in the loss.
    """

    chat: Chat
    frame: str = "high"
    weight: float = 1.0
    earlier: Chat | None = None


def held_out_text(text: str) -> bool:
    """Whether the text's hash falls into the last tenth."""
    return hashlib.sha256(text.encode()).digest()[0] >= 256 - HELD_OUT_BYTES


def kept(draw: Callable[[], Chat], evaluation: bool) -> Chat:
    """The first drawn chat whose question is on the wanted side of the split."""
    while True:
        item = draw()
        if held_out_text(item.question) == evaluation:
            return item


def _side(a: int, b: int) -> bool:
    return chat.held_out(abs(a), abs(b))


# ------------------------------------------------------------------ arithmetic


def work_signed(a: int, sign: str, b: int) -> list[str]:
    """Lines that compute ``a sign b`` for any sign of ``a`` and b >= 0; the last line is the result."""
    if a >= 0:
        return (work_sum(a, b) if sign == "+" else work_difference(a, b)).split("\n")
    if sign == "+":  # -a + b = b - a
        return [f"{b}-{-a}", *work_difference(b, -a).split("\n")]
    lines = work_sum(-a, b).split("\n")  # -a - b = -(a + b)
    return [f"-({-a}+{b})", *lines[:-1], str(a - b)]


def work_chain(
    a: int, first: str, b: int, second: str, c: int, *, right: bool
) -> tuple[str, int, list[tuple[int, int]]]:
    """(lines, result, operand pairs) of ``(a first b) second c`` or, with ``right``, ``a first (b second c)``."""
    if right:
        inner = b + c if second == "+" else b - c
        total = a + inner if first == "+" else a - inner
        lines = [f"{b}{second}{c}", *work_signed(b, second, c)]
        if inner < 0:
            sign = "-" if first == "+" else "+"
            lines += [f"{a}{sign}{-inner}", *work_signed(a, sign, -inner)]
        else:
            lines += [f"{a}{first}{inner}", *work_signed(a, first, inner)]
        return "\n".join(lines), total, [(b, c), (a, inner)]
    inner = a + b if first == "+" else a - b
    total = inner + c if second == "+" else inner - c
    lines = [f"{a}{first}{b}", *work_signed(a, first, b), f"{inner}{second}{c}", *work_signed(inner, second, c)]
    return "\n".join(lines), total, [(a, b), (inner, c)]


_CHAIN = ("{e}", "{e}?", "{e}=", "What is {e}?", "Compute {e}.", "Calculate {e}.", "How much is {e}?")


def two_step(rng: Random, *, evaluation: bool = False) -> Chat:
    """Two operations on numbers of two or three digits (some of one), with or without parentheses."""
    while True:
        a, b, c = (rng.randrange(10, 100) if rng.random() < 0.55 else rng.randrange(100, 1000) for _ in range(3))
        if rng.random() < 0.1:
            c = rng.randrange(0, 10)
        first, second = rng.choice("+-"), rng.choice("+-")
        form = rng.random()
        right = form < 0.4
        thinking, total, pairs = work_chain(a, first, b, second, c, right=right)
        if (_side(*pairs[0]) if evaluation else any(_side(*p) for p in pairs)) == evaluation:
            break
    if right:
        text = f"{a}{first}({b}{second}{c})"
    else:
        text = f"({a}{first}{b}){second}{c}" if form < 0.8 else f"{a}{first}{b}{second}{c}"
    return Chat("two_step", rng.choice(_CHAIN).format(e=text), thinking, f"{text}={total}")


# -------------------------------------------------------------------- look-ups

_ASK_ONE = (
    "Which number stands behind {k}? Answer with the number.",
    "Which number stands behind {k}?",
    "What is the number of {k}?",
    "Look up {k}.",
    "{k}?",
)
_ASK_MANY = ("Which numbers stand behind {k}?", "Look up {k}.", "Give the numbers of {k}.")
_FILLER = (
    "The list goes on.", "More rooms follow here.", "This line says nothing.", "Nothing to see here.",
    "Some rooms were left out.", "The next part of the list comes now.",
)  # fmt: skip


def _key(rng: Random, style: int) -> str:
    if style == 0:
        return f"{rng.choice(NAMES)}-{rng.randrange(10)}"
    if style == 1:
        return f"{rng.choice(NAMES)}-{rng.randrange(100)}"
    return f"{rng.choice(WORDS)}-{rng.randrange(10)}"


def lookup(
    rng: Random, pairs: int, asked: int, *, evaluation: bool = False, filler: float = 0.0, style: int | None = None
) -> Chat:
    """A list of ``pairs`` lines and ``asked`` of its keys, anywhere; ``filler`` lines per pair in between."""
    style = rng.choice((0, 0, 1, 2)) if style is None else style
    style = style if style or pairs <= 200 else 1
    table: dict[str, int] = {}
    while len(table) < pairs:
        table[_key(rng, style)] = rng.randrange(100, 1000)
    keys = [k for k, v in table.items() if held_out_text(f"{k}: {v}") == evaluation]
    if not keys:
        return lookup(rng, pairs, asked, evaluation=evaluation, filler=filler, style=style)
    picked = rng.sample(keys, min(asked, len(keys)))
    lines = []
    for k, v in table.items():
        lines.append(f"{k}: {v}")
        if filler and rng.random() < filler:
            lines.append(rng.choice(_FILLER))
    listing = "\n".join(lines)
    if len(picked) == 1:
        question = rng.choice(_ASK_ONE[:2] if rng.random() < 0.5 else _ASK_ONE).format(k=picked[0])
        answer = str(table[picked[0]])
    else:
        question = rng.choice(_ASK_MANY).format(k=" ".join(picked))
        answer = " ".join(str(table[k]) for k in picked)
    thinking = "\n".join(f"{k}: {table[k]}" for k in picked)
    return Chat("lookup", f"{listing}\n\n{question}", thinking, answer)


# ----------------------------------------------------------------- short lists

_SORT = ("Sort {l}.", "Sort: {l}", "Sort these numbers: {l}", "Put in order: {l}", "Sort in ascending order: {l}")


def sorting(rng: Random, count: int | None = None, *, evaluation: bool = False) -> Chat:
    """Different two-digit numbers; the thinking collects the units of every ten."""

    def draw() -> Chat:
        numbers = rng.sample(range(10, 100), count or rng.randint(3, 10))
        work = "\n".join(f"{t}:" + "".join(str(n % 10) for n in sorted(numbers) if n // 10 == t) for t in range(1, 10))
        listing = rng.choice((" ", ", ")).join(map(str, numbers))
        return Chat("sort", rng.choice(_SORT).format(l=listing), work, " ".join(map(str, sorted(numbers))))

    return kept(draw, evaluation)


def counting(rng: Random, *, evaluation: bool = False) -> Chat:
    """How often a word occurs in a list; the thinking repeats the list with a running count."""

    def draw() -> Chat:
        kinds = rng.sample(WORDS, rng.randint(2, 4))
        items = [rng.choice(kinds) for _ in range(rng.randint(4, 12))]
        wanted = rng.choice(kinds)
        count, work = 0, []
        for item in items:
            count += item == wanted
            work.append(f" {item} {count}")
        phrase = rng.choice(("How often does {w} occur in: {l}", "Count {w} in: {l}", "How many times {w}: {l}"))
        return Chat("count", phrase.format(w=wanted, l=" ".join(items)), "".join(work), str(count))

    return kept(draw, evaluation)


def copying(rng: Random, *, evaluation: bool = False) -> Chat:
    """Words or digits repeated as they are or back to front."""

    def draw() -> Chat:
        back = rng.random() < 0.5
        if rng.random() < 0.4:
            items, joint = [str(rng.randrange(10)) for _ in range(rng.randint(3, 8))], ""
        else:
            items, joint = rng.sample(WORDS, rng.randint(3, 8)), " "
        listing = joint.join(items)
        if not back:
            return Chat(
                "copy", rng.choice(("Repeat: {l}", "Copy: {l}", "Say: {l}")).format(l=listing), "Copy.", listing
            )
        turned = joint.join(reversed(items))
        return Chat("reverse", rng.choice(("Reverse: {l}", "Back to front: {l}")).format(l=listing), "Back.", turned)

    return kept(draw, evaluation)


# ------------------------------------------------------------------------ JSON

_ONLY_JSON = " Answer with one JSON object and nothing else."


def _stores(rng: Random, evaluation: bool) -> Chat:
    first, second = rng.sample(NAMES, 2)
    a, b = chat.draw_pair(rng, evaluation=evaluation, digits=(2, 2))
    question = (
        f"Store {first} has {a} boxes and store {second} has {b} boxes. Give the keys "
        '"first" (name of the first store), "second" (name of the second store), '
        '"boxes" (list of the two numbers in that order) and "total" (their sum).'
    )
    answer = {"first": first, "second": second, "boxes": [a, b], "total": a + b}
    return Chat("json", question + _ONLY_JSON, f"{a}+{b}\n{work_sum(a, b)}", json.dumps(answer))


def _person(rng: Random) -> Chat:
    name, age, city, colour = rng.choice(PEOPLE), rng.randrange(10, 100), rng.choice(CITIES), rng.choice(COLOURS)
    fields: dict[str, str | int] = {"name": name, "age": age, "city": city, "color": colour}
    text = rng.choice(
        (
            f"{name} is {age} years old, lives in {city} and likes {colour}.",
            f"{name} from {city} likes {colour} and is {age} years old.",
            f"In {city} lives {name}, {age} years old, who likes {colour}.",
        )
    )
    keys = rng.sample(list(fields), rng.randint(2, 4))
    listed = ", ".join(f'"{k}"' for k in keys)
    return Chat(
        "json", f"{text} Give the keys {listed}.{_ONLY_JSON}", "Fields.", json.dumps({k: fields[k] for k in keys})
    )


def _order(rng: Random) -> Chat:
    number, item, amount = rng.randrange(100, 1000), rng.choice(WORDS), rng.randrange(2, 100)
    fields: dict[str, str | int] = {"order": number, "item": item, "amount": amount}
    text = rng.choice((f"Order {number}: {amount} pieces of {item}.", f"We need {amount} {item} for order {number}."))
    keys = rng.sample(list(fields), rng.randint(2, 3))
    listed = ", ".join(f'"{k}"' for k in keys)
    return Chat(
        "json", f"{text} Give the keys {listed}.{_ONLY_JSON}", "Fields.", json.dumps({k: fields[k] for k in keys})
    )


def extraction(rng: Random, *, evaluation: bool = False) -> Chat:
    """Facts in a sentence, returned as one JSON object with given keys."""
    if rng.random() < 0.5:
        return _stores(rng, evaluation)
    return kept(lambda: _person(rng) if rng.random() < 0.6 else _order(rng), evaluation)


# ------------------------------------------------------------------ tool calls


@dataclass(frozen=True)
class Tool:
    """A function the model may call: one parameter each, and the questions that want it."""

    name: str
    description: str
    parameter: str
    kind: str
    phrases: tuple[str, ...]
    values: tuple[str, ...] | range


TOOLS = (
    Tool("weather", "Weather of a city.", "city", "string", ("What is the weather in {v}?", "Weather in {v}?"), CITIES),
    Tool("timer", "Start a timer.", "minutes", "integer", ("Set a timer for {v} minutes.", "Wake me in {v} minutes."),
         range(1, 100)),
    Tool("search", "Search the documents.", "query", "string", ("Search for {v}.", "Find {v}."), ()),
    Tool("call", "Call a person.", "name", "string", ("Call {v}.", "Please phone {v}."), PEOPLE),
    Tool("light", "Set the light.", "color", "string", ("Make the light {v}.", "Turn the light {v}."), COLOURS),
)  # fmt: skip
#: Tool sets in the frames: every single tool and some pairs, by index.
TOOL_SETS: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (0, 1), (1, 0), (2, 3), (3, 4), (4, 0), (1, 2), (0, 2),
)  # fmt: skip


def call_text(name: str, parameter: str, kind: str, value: str) -> str:
    """The codec's text of an answer that is one call with one argument, from the end of the thinking on."""
    string = "true" if kind == "string" else "false"
    return (
        f'\n\n<｜DSML｜ calls>\n<｜DSML｜ invoke name="{name}">\n'
        f'<｜DSML｜ parameter name="{parameter}" string="{string}">{value}</｜DSML｜ parameter>\n'
        "</｜DSML｜ invoke>\n</｜DSML｜ calls>"
    )


def tool_use(rng: Random, *, evaluation: bool = False) -> Task:
    """A question for one of the offered tools, or one that needs none."""
    number = rng.randrange(len(TOOL_SETS))
    if rng.random() < 0.15:
        plain = chat.arithmetic(rng, (2, 2), evaluation=evaluation)
        return Task(Chat("tool", plain.question, plain.thinking, plain.answer), f"tools{number}")

    def draw() -> Chat:
        tool = TOOLS[rng.choice(TOOL_SETS[number])]
        value = str(rng.choice(tool.values or WORDS))
        question = rng.choice(tool.phrases).format(v=value)
        return Chat("tool", question, f"I call {tool.name}.", call_text(tool.name, tool.parameter, tool.kind, value))

    return Task(kept(draw, evaluation), f"tools{number}")


# --------------------------------------------------------------------- mixture


def talk(rng: Random, *, evaluation: bool = False) -> Chat:
    """Greetings, questions about itself, and questions it must decline; evaluation has the last kind only."""
    while True:
        item = chat.talk(rng)
        if item.answer != chat.I_CANNOT:  # fixed phrases are learned by heart, refusals must generalise
            if evaluation:
                continue
        elif held_out_text(item.question) != evaluation:
            continue
        answer, thinking = item.answer, item.thinking
        for old, new in ((chat.I_CANNOT, I_CANNOT), (chat.I_CAN, I_CAN), (chat.I_AM, I_AM)):
            answer = answer.replace(old, new)
        return Chat("talk", item.question, thinking.replace("Not a sum or difference.", "I cannot do that."), answer)


def arithmetic(rng: Random) -> Chat:
    """One sum or difference of the first recipe's mixture, without its small talk."""
    roll = rng.random()
    if roll < 0.55:
        return chat.arithmetic(rng, (2, 2))
    if roll < 0.65:
        return chat.arithmetic(rng, rng.choice(((1, 1), (1, 2), (2, 1))))
    return chat.arithmetic(rng, (3, 3) if roll < 0.85 else rng.choice(((1, 3), (3, 1), (2, 3), (3, 2))))


Drawer = Callable[[Random], Task]
_SHORT: Sequence[tuple[float, Drawer]] = (
    (0.20, lambda r: Task(arithmetic(r))),
    (0.26, lambda r: Task(two_step(r))),
    (0.10, lambda r: Task(sorting(r))),
    (0.14, lambda r: Task(counting(r), weight=2.0)),
    (0.07, lambda r: Task(copying(r))),
    (0.13, lambda r: Task(extraction(r))),
    (0.04, tool_use),
    (0.06, lambda r: Task(talk(r))),
)


def _short(rng: Random) -> Task:
    roll = rng.random()
    for share, draw in _SHORT:
        roll -= share
        if roll < 0:
            return draw(rng)
    return _SHORT[-1][1](rng)


def short_task(rng: Random) -> Task:
    """One task of the mixture apart from look-ups, some in another frame; answers without thinking stay sums."""
    task = _short(rng)
    if task.frame != "high":
        return task
    other = rng.random()
    if task.chat.kind in ("add", "subtract") and other < 0.12:
        return Task(task.chat, "none")
    if other > 0.92:
        frame = rng.choice(("low", "max", "system0", "system1", "system2", "turn", "turn", "turn"))
        # never a constant earlier turn: the model learns to look away from its words, wherever they stand
        earlier = rng.choice((arithmetic, sorting, talk))(rng) if frame == "turn" else None
        return Task(task.chat, frame, task.weight, earlier)
    return task


def evaluation_tasks(seed: int, count: int) -> dict[str, list[Task]]:
    """``count`` held-out tasks per set. Look-up sets are named by the length of their prompt in tokens, about."""
    rng = Random(seed)
    one = chat.held_out_chats(rng, count, (2, 2))
    return {
        "sums": [Task(c) for c in one],
        "two_step": [Task(two_step(rng, evaluation=True)) for _ in range(count)],
        "lookup_256": [Task(lookup(rng, 20, 1, evaluation=True, style=0)) for _ in range(count)],
        "lookup_1k": [Task(lookup(rng, 88, 1, evaluation=True, style=0)) for _ in range(count)],
        "lookup_4k": [Task(lookup(rng, 256, 1, evaluation=True, filler=0.38, style=1)) for _ in range(count)],
        "sort_8": [Task(sorting(rng, 8, evaluation=True)) for _ in range(count)],
        "count": [Task(counting(rng, evaluation=True)) for _ in range(count)],
        "copy_reverse": [Task(copying(rng, evaluation=True)) for _ in range(count)],
        "json": [Task(extraction(rng, evaluation=True)) for _ in range(count)],
        "tools": [tool_use(rng, evaluation=True) for _ in range(count)],
        "talk": [Task(talk(rng, evaluation=True)) for _ in range(count)],
        "second_turn": [Task(c, "turn", earlier=arithmetic(rng)) for c in one],
        "direct": [Task(c, "none") for c in one],
    }
