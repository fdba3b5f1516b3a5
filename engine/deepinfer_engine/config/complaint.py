"""Validation errors as sentences: what was found, what is expected, and the nearest thing that would be right."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

KnownKeys = Callable[[tuple[str, ...]], list[str] | None]


@dataclass(frozen=True)
class Complaint:
    """One problem at a path; ``on_key`` when the key itself is wrong rather than its value."""

    path: tuple[str | int, ...]
    text: str
    on_key: bool = False
    hint: str | None = None


def found(value: Any) -> str:
    """A value as a reader of the file would name it."""
    if value is None:
        return "empty"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return f"the number {value}"
    if isinstance(value, str):
        return f"the text {value if len(value) <= 60 else value[:57] + '...'!r}"
    return "a section" if isinstance(value, dict) else "a list"


def nearest(word: str, known: Sequence[str]) -> str:
    """``; nearest is 'x'`` or, when nothing is near, the list of what is known."""
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"; nearest is {near[0]!r}" if near else f"; known are {', '.join(known)}"


def unknown_key(path: Sequence[str | int], known: Sequence[str]) -> str:
    """Sentence for a key the schema does not have."""
    section = ".".join(str(p) for p in path[:-1])
    return f"unknown key {str(path[-1])!r}{f' in {section}' if section else ''}{nearest(str(path[-1]), known)}"


def from_error(error: Any, known_keys: KnownKeys) -> Complaint:
    """One pydantic error as a complaint."""
    raw: tuple[str | int, ...] = tuple(error["loc"])
    kind, value, ctx = error["type"], error["input"], error.get("ctx", {})
    if raw and raw[-1] == "[key]":  # pydantic marks an error in the key of a free mapping
        path = raw[:-1]
        return Complaint(path, f"{str(path[-1])!r} is not the name of an operation", on_key=True)
    key = ".".join(str(p) for p in raw)
    if kind == "extra_forbidden":
        known = known_keys(tuple(str(p) for p in raw[:-1])) or []
        return Complaint(raw, unknown_key(raw, known), on_key=True)
    if kind == "missing":
        return Complaint(raw[:-1], f"the required key {key!r} is missing")
    if value is None:
        return Complaint(raw, f"{key} has no value; {_expected(kind, ctx)}")
    return Complaint(raw, f"{key} is {found(value)}, {_expected(kind, ctx)}{_nearest_choice(kind, ctx, value)}",
                     hint=_hint(kind, key, value))  # fmt: skip


_EXPECTED = {
    "int_type": "expected an integer",
    "int_from_float": "expected an integer",
    "float_type": "expected a number",
    "bool_type": "expected true or false",
    "string_type": "expected text",
    "model_type": "expected a section of keys",
    "model_attributes_type": "expected a section of keys",
    "dict_type": "expected a section of keys",
    "tuple_type": "expected a list",
    "finite_number": "expected a finite number",
    "string_too_short": "expected at least one character",
}


def _expected(kind: str, ctx: dict[str, Any]) -> str:
    if kind in _EXPECTED:
        return _EXPECTED[kind]
    if kind == "literal_error":
        return f"expected {ctx['expected'].replace(chr(39), '')}"
    if kind == "greater_than_equal":
        return f"expected {_number(ctx['ge'])} or more"
    if kind == "greater_than":
        return f"expected more than {_number(ctx['gt'])}"
    if kind == "less_than_equal":
        return f"expected {_number(ctx['le'])} or less"
    if kind == "string_too_long":
        return f"expected at most {ctx['max_length']} characters"
    if kind == "string_pattern_mismatch":
        return _PATTERNS.get(ctx["pattern"], f"expected text matching {ctx['pattern']}")
    raise AssertionError(f"no sentence for the validation error {kind!r}")


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else str(value)


_PATTERNS = {
    r"^[a-z0-9][a-z0-9-]{0,63}$": "expected lower-case letters, digits and hyphens, at most 64",
    r"^[0-9]+(\.[0-9]+){0,3}$": "expected a version such as \"13.0\"",
}  # fmt: skip


def _nearest_choice(kind: str, ctx: dict[str, Any], value: Any) -> str:
    if kind != "literal_error" or not isinstance(value, str):
        return ""
    choices = [c.strip(" '") for c in ctx["expected"].replace(" or ", ", ").split(",")]
    near = difflib.get_close_matches(value, choices, n=1, cutoff=0.5)
    return f"; nearest is {near[0]!r}" if near else ""


def _hint(kind: str, key: str, value: Any) -> str | None:
    if kind == "bool_type" and isinstance(value, str) and value.lower() in ("yes", "no", "on", "off", "y", "n"):
        return f"in YAML 1.2 {value} is text; write true or false"
    if kind == "string_type" and isinstance(value, int | float):
        return f'quote it: {key.rsplit(".")[-1]}: "{value}"'
    if kind in ("int_type", "float_type") and isinstance(value, str):
        return "numbers are written out without a unit; the unit stands in the key's name"
    if kind == "int_type" and isinstance(value, float):
        return "write it without a point or an exponent"
    return None
