"""Every schema keyword is enforced or refused by its JSON pointer; nothing is dropped in silence."""

from __future__ import annotations

import json

import pytest

from deepinfer_engine.errors import UsageError
from deepinfer_engine.sample.grammar import checked_grammar
from deepinfer_engine.sample.schema_check import checked_schema
from deepinfer_engine.types import GrammarSpec

INT = {"type": "integer"}
REFUSED = [
    ({"not": INT}, "#/not: keyword 'not'"),
    ({"type": "array", "items": INT, "uniqueItems": True}, "#/uniqueItems: keyword"),
    ({"type": "array", "items": INT, "contains": INT}, "#/contains: keyword"),
    ({"type": "object", "properties": {"a/b": {"type": "object", "dependentRequired": {}}}}, "#/properties/a~1b/dep"),
    ({"if": INT, "then": INT}, "#/if: keyword"),
    ({"type": "string", "nullable": True}, "#/nullable: keyword"),
    ({"type": "object", "unevaluatedProperties": False}, "#/unevaluatedProperties: keyword"),
    ({"allOf": [INT, {"minimum": 3}]}, "#/allOf: several branches"),
    ({"allOf": [INT], "minimum": 3}, "#/minimum: not enforced beside 'allOf'"),
    ({"type": "object", "properties": {"a": INT}, "anyOf": [INT]}, "not enforced beside 'anyOf'"),
    ({"$defs": {"a": INT}, "$ref": "#/$defs/a", "minimum": 3}, "#/minimum: not enforced beside '$ref'"),
    ({"$ref": "https://example.org/x.json"}, "#/$ref: 'https://example.org/x.json' is not a reference into"),
    ({"$ref": "#/$defs/b"}, "#/$ref: '#/$defs/b' does not exist"),
    ({"oneOf": [INT, {"type": "number"}]}, "#/oneOf: the branches may overlap"),
    ({"oneOf": [{"const": 1}, {"enum": [2, 1]}]}, "#/oneOf: the branches may overlap"),
    ({"oneOf": [{"const": 1}, {"type": "string"}]}, "#/oneOf: the branches may overlap"),
    ({"type": "object", "required": ["a"]}, "#/required: 'a' is not declared"),
    ({"type": "string", "pattern": "^a+$", "maxLength": 2}, "#/maxLength: not enforced beside 'pattern'"),
    ({"type": "string", "format": "date", "minLength": 3}, "#/minLength: not enforced beside 'format'"),
    ({"type": "string", "format": "regex"}, "#/format: 'regex' is not enforced"),
    ({"type": "string", "pattern": "[a-z]{1,5000}"}, "repeats {1,5000}"),
    ({"type": "number", "multipleOf": 0.5}, "#/multipleOf: enforced for type integer only"),
    ({"type": "integer", "enum": [1, "a"]}, '#: "a" is not of type integer'),
    ({"type": "integer", "minLength": 3}, "#/minLength: has no effect on type integer"),
    ({"enum": [1, 2], "minimum": 2}, "#/minimum: not enforced beside 'enum'"),
    ({"minimum": 3, "minLength": 2}, "keywords of number and string, expected a type"),
    ({"type": "int"}, "#/type: 'int' is no type"),
    ({"type": "array", "items": {"anyOf": [INT, {"not": {}}]}}, "#/items/anyOf/1/not: keyword"),
    ({"type": "string", "minLength": 5, "maxLength": 2}, "#/maxLength: 2 is below minLength 5"),
    ({"type": "string", "maxLength": True}, "#/maxLength: expected an integer"),
    ({"type": "string", "maxLength": 10**6}, "#/maxLength: 1000000 is not supported"),
    (False, "#: accepts nothing"),
    ([], "#: is list, expected an object"),
]


@pytest.mark.parametrize(("schema", "reason"), REFUSED, ids=[r[1][:40] for r in REFUSED])
def test_what_is_not_enforced_is_refused_by_pointer(schema: object, reason: str):
    with pytest.raises(UsageError) as caught:
        checked_schema(json.dumps(schema))
    assert reason in caught.value.message


def test_types_are_inferred_and_objects_without_properties_stay_open():
    assert json.loads(checked_schema('{"minimum": 3}')) == {"minimum": 3, "type": "number"}
    assert json.loads(checked_schema('{"type": "object"}')) == {"type": "object", "additionalProperties": True}
    assert json.loads(checked_schema('{"type": "string", "maxLength": 4}'))["pattern"] == "^.{0,4}$"
    kept = {"type": "object", "properties": {"a": {"type": ["integer", "null"], "minimum": 2}}, "required": ["a"]}
    assert json.loads(checked_schema(json.dumps(kept))) == kept
    tree = {"$defs": {"t": {"type": "array", "items": {"$ref": "#/$defs/t"}}}, "$ref": "#/$defs/t"}
    assert json.loads(checked_schema(json.dumps(tree))) == tree
    exact = {"oneOf": [{"const": 1}, {"const": 2}], "title": "pick"}
    assert json.loads(checked_schema(json.dumps(exact))) == exact


def test_hostile_sources_are_refused():
    deep = '{"type": "array", "items": ' * 70 + "true" + "}" * 70
    for source, reason in (("{", "not valid JSON"), (deep, "nested deeper than 64"), ('{"a": NaN}', "not valid JSON")):
        with pytest.raises(UsageError, match=reason):
            checked_schema(source)
    with pytest.raises(UsageError, match="at most 1048576"):
        checked_schema(" " * (1 << 21))
    with pytest.raises(UsageError, match="is empty"):
        checked_grammar(GrammarSpec("ebnf", "  "))
    tools = json.dumps([{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}])
    with pytest.raises(UsageError, match=r"tools\[0\].function.parameters: #/not"):
        checked_grammar(GrammarSpec("tools", tools))
