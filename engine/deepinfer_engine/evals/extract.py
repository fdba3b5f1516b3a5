"""Where the final answer of a text stands: the last box, else the last answer line, else the whole of a short text.

Order of evidence, first that applies:

1. the last non-empty ``\\boxed{…}`` (or ``\\fbox``); two last boxes joined by "or", "and" or a comma count as one
   answer with two values, which the graders then refuse
2. the last line that says "answer is …", "Answer: …" or "#### …"
3. the text itself, when it is one short line

Thinking is cut off first. What is returned is still text; whether it is one value is the grader's to say. Nothing is
guessed: prose that merely contains a number has no final answer.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

#: Boxes opened directly inside each other that are looked into; a model that loops writes thousands.
_MAX_NESTED = 16
#: Longest text that can be an answer as a whole: an equation such as "17+25=42", not a sentence.
SHORT = 64

_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)|\\boxed\s+(?P<bare>[0-9]+)")
_JOINED = re.compile(r"(?:[\s$\\()\[\]{}*]|\\(?:text|mathrm|quad)(?![A-Za-z]))*(?:or|and|,|;|/)[\s$\\()\[\]{}*]*")
_LINE = re.compile(
    r"(?:\banswer\b\s*(?:(?:is|are|equals)\b\s*:?|[:=：])|答案\s*(?:是|为)?\s*[:：]?|^[ \t]*####)"
    r"(?=[ \t]*(?P<value>[^\n]{0,401}))",  # looked at, not taken: a line may correct itself
    re.IGNORECASE | re.MULTILINE,
)
_EMPHASIS = re.compile(r"\*\*|__|`")


@dataclass(frozen=True)
class Found:
    """A candidate answer and where it stood; ``how`` is ``none`` when the text gives none."""

    text: str
    how: Literal["box", "line", "whole", "none"]


NOTHING = Found("", "none")


def outside_thinking(text: str) -> str:
    """What follows the last ``</think>``; nothing when thinking was opened and not closed."""
    tail = text.rpartition("</think>")[2]
    return "" if "<think>" in tail else tail


def final_answer(text: str) -> Found:
    """The final answer of a model's text as it stands there."""
    visible = outside_thinking(text)
    boxed = _last_box(visible)
    if boxed is not None:
        return Found(boxed, "box")
    plain = _EMPHASIS.sub("", visible)
    lines = [m for m in _LINE.finditer(plain) if m.group("value").strip(" \t*$.:")]
    if lines:
        return Found(_first_clause(lines[-1].group("value")), "line")
    whole = plain.strip()
    if whole and len(whole) <= SHORT and "\n" not in whole:
        return Found(whole, "whole")
    return NOTHING


def _first_clause(text: str) -> str:
    """Up to the end of the sentence; a point inside a number does not end one."""
    return re.split(r"\.(?=\s|$)|\.(?=\*)|[。]", text.strip(), maxsplit=1)[0].strip()


def _last_box(text: str) -> str | None:
    """Content of the last non-empty box; the last two joined by "or" when they stand as alternatives."""
    boxes = [(start, end, inner) for start, end, inner in _boxes(text) if inner.strip(" ~$")]
    if not boxes:
        return None
    last = boxes[-1]
    if len(boxes) > 1:
        before = boxes[-2]
        if before[2].strip() != last[2].strip() and _JOINED.fullmatch(text[before[1] : last[0]]):
            return f"{before[2]} or {last[2]}"
    return last[2]


def _boxes(text: str) -> list[tuple[int, int, str]]:
    """(start, end, content) of every box in order; nested boxes count as the outer one's content.

    A box that is still open at the end of the text holds the rest, unless the rest runs on over lines.
    """
    found = []
    position = nested_boxes = 0
    while (match := _BOX.search(text, position)) is not None:
        if match.group("bare") is not None:
            found.append((match.start(), match.end(), match.group("bare")))
            position = match.end()
            continue
        end = _closing_brace(text, match.end())
        if end is None:
            rest = text[match.end() + 1 :].rstrip(" \n$.*")
            if "\n" not in rest:
                found.append((match.start(), len(text), rest))
            break
        inner = text[match.end() + 1 : end]
        nested = _BOX.search(inner)
        directly = nested is not None and nested.start() == len(inner) - len(inner.lstrip())
        if directly and nested_boxes < _MAX_NESTED:
            nested_boxes += 1
            position = match.end() + 1  # a box directly inside a box: the inner one is the answer
            continue
        found.append((match.start(), end + 1, inner))
        position = end + 1
    return found


def _closing_brace(text: str, start: int) -> int | None:
    depth = 0
    position = start
    while position < len(text):
        char = text[position]
        if char == "\\":
            position += 2
            continue
        depth += (char == "{") - (char == "}")
        if depth == 0:
            return position
        position += 1
    return None
