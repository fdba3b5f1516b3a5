"""Patterns that the library would change are refused with their place; those it keeps as they are, are not."""

from __future__ import annotations

import pytest

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sample.grammar_fault import patterns
from deepinfer_engine.sample.pattern_check import check_pattern
from deepinfer_engine.sample.schema_check import checked_schema


@pytest.mark.parametrize(
    "pattern",
    ["^a$", "^a$|^b$", "(^a$)|(?:^b$)", r"\^a\$b", "[^a$^]b", r"[\]^$]", r"\d\W\x41\u00e4\u{1F600}\-\_\/", r"a\\", ""],
)
def test_a_pattern_without_a_meaning_to_lose_is_taken(pattern: str):
    check_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "at", "what"),
    [
        ("a^b", "character 2", r"\^ inside"),
        ("a$b", "character 2", r"\$ inside"),
        ("^^a", "character 2", r"\^ inside"),
        (r"\(^a", "character 3", r"\^ inside"),
        (r"ä\q", "character 2", "escape"),
        (r"[a\q]", "character 3", "escape"),
        (r"\Aa\Z", "character 1", "escape"),
        (r"\u12", "character 1", "escape"),
        ("[a-z]{1,5000}", "character 6", r"repeats \{1,5000\}"),
    ],
)
def test_what_would_be_ignored_is_refused_where_it_stands(pattern: str, at: str, what: str):
    with pytest.raises(UsageError, match=f"{at} of the pattern: .*{what}"):
        check_pattern(pattern)


def test_patterns_of_a_schema_are_found_and_named_by_their_pointer():
    schema = '{"type": "object", "properties": {"a": {"anyOf": [{"type": "string", "pattern": "x^y"}]}}}'
    with pytest.raises(UsageError, match=r"^#/properties/a/anyOf/0/pattern: character 2 of the pattern"):
        checked_schema(schema)
    with pytest.raises(UsageError, match=r"^#/patternProperties: character 1 of the pattern"):
        checked_schema('{"type": "object", "patternProperties": {"\\\\q": {"type": "string"}}}')
    value = {"anyOf": [{"pattern": "a"}, {"patternProperties": {"b": {"pattern": "c"}}}]}
    assert list(patterns(value, "#")) == [
        ("#/anyOf/0/pattern", "a"),
        ("#/anyOf/1/patternProperties", "b"),
        ("#/anyOf/1/patternProperties/b/pattern", "c"),
    ]
