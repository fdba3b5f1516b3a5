"""What the grammar library says against a source, as a sentence with the place in what the user wrote. No torch."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

from deepinfer_engine.sample.pattern_check import place

_LOCATED = re.compile(
    r"(Regex parsing|EBNF parser|EBNF lexer) error at (?:line (\d+), column (\d+)|position (\d+)): (.*)"
)


def sentence(kind: str, source: str, text: str, try_pattern: Callable[[str], object]) -> str:
    """The library's ``text`` about a ``source`` of ``kind``; ``try_pattern`` raises what it says of a pattern alone."""
    said = " ".join(text.split())
    found = _LOCATED.search(said)
    if found is None:
        head, _, tail = said.partition(": ")
        return (tail if ".cc:" in head else said)[:500]
    if kind == "regex":
        return _about_pattern(source, found)
    if kind == "json_schema":
        return _about_schema(json.loads(source), try_pattern) or _plain(found)
    return f"line {found[2]}, column {found[3]}: {_plain(found)}" if found[2] else _plain(found)


def _about_pattern(pattern: str, found: re.Match[str]) -> str:
    if found[4]:
        return f"{place(pattern, int(found[4]) - 1)}: {_plain(found)}"
    try:  # the place is one in the library's translation; Python's parser finds most such faults where they are
        re.compile(pattern)
    except re.error as exc:
        if exc.pos is not None:
            return f"{place(pattern, exc.pos)}: {exc.msg}"
    return f"the pattern is not valid: {_plain(found)}"


def _about_schema(schema: Any, try_pattern: Callable[[str], object]) -> str | None:
    for pointer, pattern in patterns(schema, "#"):
        try:
            try_pattern(pattern)
        except Exception as exc:  # whatever the library raises: it is what is looked for
            return f"{pointer}: {sentence('regex', pattern, str(exc), try_pattern)}"
    return None


def patterns(value: Any, at: str) -> Iterator[tuple[str, str]]:
    """(JSON pointer, pattern) of every pattern in a schema."""
    if isinstance(value, dict):
        if isinstance(value.get("pattern"), str):
            yield f"{at}/pattern", value["pattern"]
        keyed = value.get("patternProperties")
        for pattern in keyed if isinstance(keyed, dict) else ():
            yield f"{at}/patternProperties", pattern
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from patterns(inner, f"{at}/{str(key).replace('~', '~0').replace('/', '~1')}")


def _plain(found: re.Match[str]) -> str:
    """The library's words, as the end of a sentence of ours."""
    text = found[5].strip().rstrip(".")[:500]
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
