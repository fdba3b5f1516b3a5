"""From an answer's text to a verdict: correct, wrong, unparsed; the other outcomes come from the run itself.

``integer`` is AIME's rule: exact equality by value with an integer. ``number`` is the same for any number and takes a
per cent sign as a unit. ``math`` asks math-verify whether two expressions are equal. ``choice`` compares letters,
``json`` whole documents. ``judge`` leaves the verdict to a second model (see ``judge``).
"""

from __future__ import annotations

import importlib
import json
import logging
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from deepinfer_engine.config.strict_json import parse_json
from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.evals.choice import LETTERS, chosen
from deepinfer_engine.evals.extract import final_answer, outside_thinking
from deepinfer_engine.evals.task import GraderName
from deepinfer_engine.evals.value import one_number, shown

Outcome = Literal["correct", "wrong", "unparsed", "truncated", "errored", "ungraded"]
#: In the order of reports; the counts of a run add up to its samples.
OUTCOMES: tuple[Outcome, ...] = ("correct", "wrong", "unparsed", "truncated", "errored", "ungraded")


@dataclass(frozen=True)
class Grade:
    """A verdict. ``extracted`` is the text it rests on, ``key`` what votes with it in a consensus."""

    outcome: Outcome
    extracted: str | None = None
    key: str | None = None


def check_gold(grader: GraderName, answer: str) -> str | None:
    """Why no answer could ever match this gold answer, None when one can."""
    if grader in ("integer", "number"):
        value = one_number(answer, percent=grader == "number")
        if value is None:
            return "is not a number"
        if grader == "integer" and value.denominator != 1:
            return "is not an integer"
    if grader == "json":
        try:
            parse_json(answer)
        except ValueError as exc:
            return f"is not valid JSON ({exc})"
    return None


def require_grader(grader: GraderName) -> None:
    """Refuse (exit 3) before anything runs when the grader's library is missing."""
    if grader == "math":
        _math_verify()


def grade(grader: GraderName, text: str, gold: str, choices: Sequence[str] = (), right: int = -1) -> Grade:
    """Judge one complete answer. ``choices`` and ``right`` are the shown choices and the position of the right one."""
    if grader in ("integer", "number"):
        return _grade_number(text, gold, percent=grader == "number")
    if grader == "math":
        return _grade_math(text, gold)
    if grader == "choice":
        return _grade_choice(text, choices, right)
    if grader == "json":
        return _grade_json(text, gold)
    raise AssertionError("judged answers are graded by a judge")


def _grade_number(text: str, gold: str, *, percent: bool) -> Grade:
    found = final_answer(text)
    value = one_number(found.text, percent=percent) if found.how != "none" else None
    if value is None:
        return Grade("unparsed", found.text or None)
    expected = one_number(gold, percent=percent)
    assert isinstance(expected, Fraction)
    return Grade("correct" if value == expected else "wrong", found.text, shown(value))


def _grade_choice(text: str, choices: Sequence[str], right: int) -> Grade:
    found = final_answer(text)
    position = None if found.how == "none" else chosen(found.text, choices, boxed=found.how == "box")
    if position is None:
        return Grade("unparsed", found.text or None)
    # letters differ between samples, the text of a choice does not: it is what votes
    return Grade("correct" if position == right else "wrong", LETTERS[position], choices[position])


_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL)


def _grade_json(text: str, gold: str) -> Grade:
    """The whole answer must be one JSON document, bare or in one fence, equal to the gold one."""
    visible = outside_thinking(text).strip()
    fenced = _FENCE.fullmatch(visible)
    body = fenced.group(1) if fenced else visible
    try:
        value = parse_json(body)
    except ValueError:
        return Grade("unparsed", body[:200] or None)
    key = _canonical(value)
    return Grade("correct" if key == _canonical(parse_json(gold)) else "wrong", body, key)


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False)


# ---------------------------------------------------------------------- math


#: Seconds after which comparing two expressions is given up; a tower of powers would never end.
MATH_TIMEOUT_S = 5
_PROSE = re.compile(r"[A-Za-z]{2,}[\s,]+[A-Za-z]{2,}")


def _math_verify() -> Any:
    try:
        library = importlib.import_module("math_verify")
    except ModuleNotFoundError as exc:
        raise NotReadyError(
            f"grader math needs {exc.name}, which is not installed", hint="pip install 'deepinfer-cli[eval]'"
        ) from None
    # it logs every expression it cannot read; here that is an outcome and is counted
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)
    return library


def _grade_math(text: str, gold: str) -> Grade:
    """Equality by math-verify between gold and the extracted answer; identical text needs no algebra.

    Runs in the main thread only: the library's timer is a signal.
    """
    library = _math_verify()
    found = final_answer(text)
    if found.how == "none":
        return Grade("unparsed")
    if _tight(found.text) == _tight(gold):
        return Grade("correct", found.text, "gold")
    if _is_prose(found.text) and not _is_prose(gold):
        return Grade("unparsed", found.text)
    started = time.monotonic()
    answer = _expression(library, found.text)
    equal = bool(answer) and library.verify(_expression(library, gold), answer, timeout_seconds=MATH_TIMEOUT_S)
    if equal:
        return Grade("correct", found.text, "gold")
    if not answer or time.monotonic() - started >= MATH_TIMEOUT_S:
        return Grade("unparsed", found.text)
    return Grade("wrong", found.text, _tight(found.text))


def _expression(library: Any, text: str) -> list[Any]:
    """Parsed forms of one expression; empty when it has none."""
    return library.parse(f"\\boxed{{{text.strip().strip('$').strip()}}}", parsing_timeout=MATH_TIMEOUT_S)


def _is_prose(text: str) -> bool:
    """Two words in a row and nothing to compute."""
    plain = re.sub(r"\\(?:text|textbf|mathrm|mbox|textrm)(?![A-Za-z])", "", text)
    return _PROSE.search(plain) is not None and re.search(r"[0-9=\\^]", plain) is None


def _tight(text: str) -> str:
    """Without white space, math delimiters and commands that only size or space."""
    text = re.sub(r"\\(?:left|right|,|;|!|displaystyle)(?![A-Za-z])|\s|\$", "", text)
    return re.sub(r"\\[dt]frac", r"\\frac", text).rstrip(".")
