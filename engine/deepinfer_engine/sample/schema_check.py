"""What of a JSON Schema is enforced, and a refusal by JSON pointer for everything that is not. No torch.

The grammar library drops what it cannot express with a warning at most, so that an answer could break its schema. Here
every keyword is known or refused. What is accepted restricts answers to a subset of what the schema allows: declared
properties in their order, a ``pattern`` that matches the whole string, and no escapes in strings of bounded length.
"""

from __future__ import annotations

import json
from typing import Any

from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sample.pattern_check import check_pattern

#: bounds of what is handed to the compiler
MAX_SOURCE = 1 << 20
_MAX_DEPTH = 64
_MAX_LENGTH = 10_000

_ANNOTATIONS = frozenset({
    "title", "description", "default", "examples", "$schema", "$id", "$comment", "deprecated", "readOnly", "writeOnly",
    "$defs", "definitions",
})  # fmt: skip
_COMBINATIONS = ("anyOf", "oneOf", "allOf", "$ref")
_BY_TYPE = {
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "object": frozenset({
        "properties", "required", "additionalProperties", "patternProperties", "propertyNames", "minProperties",
        "maxProperties",
    }),
}  # fmt: skip
_TYPED = frozenset().union(*_BY_TYPE.values())
_TYPES = frozenset({"string", "number", "integer", "boolean", "null", "array", "object"})
#: formats whose grammar was tried with a valid and an invalid string
_FORMATS = frozenset({
    "email", "date", "time", "date-time", "uuid", "ipv4", "ipv6", "uri", "hostname", "duration", "json-pointer",
    "uri-reference", "uri-template", "relative-json-pointer",
})  # fmt: skip


def checked_schema(source: str) -> str:
    """The schema as the compiler gets it. ``UsageError`` names the JSON pointer of what is not enforced."""
    if len(source) > MAX_SOURCE:
        raise UsageError(f"the JSON schema has {len(source)} characters, at most {MAX_SOURCE}")
    try:
        root = parse_json(source)
    except ValueError as exc:
        raise UsageError(f"the JSON schema is not valid JSON: {exc}") from None
    return json.dumps(_Checker(root).node(root, "#", 0), ensure_ascii=False)


class _Checker:
    """Walks one schema; ``node`` returns what is compiled for it."""

    def __init__(self, root: Any):
        self._root = root

    def node(self, schema: Any, at: str, depth: int) -> Any:
        if depth > _MAX_DEPTH:
            raise UsageError(f"{at}: nested deeper than {_MAX_DEPTH}")
        if schema is True:
            return True
        if not isinstance(schema, dict):
            what = "accepts nothing" if schema is False else f"is {type(schema).__name__}, expected an object"
            raise UsageError(f"{at}: {what}")
        for key in schema:
            if key not in _ANNOTATIONS | _TYPED and key not in (*_COMBINATIONS, "type", "enum", "const"):
                raise UsageError(f"{_child(at, key)}: keyword {printable(key)!r} is not enforced")
        out = dict(schema)
        for name in ("$defs", "definitions"):
            if name in schema:
                out[name] = self._each(schema[name], _child(at, name), depth)
        combined = [k for k in _COMBINATIONS if k in schema]
        if combined:
            self._alone(schema, combined[0], at)
            return self._combination(out, combined[0], at, depth)
        if "enum" in schema or "const" in schema:
            self._alone(schema, "enum" if "enum" in schema else "const", at, besides=("type",))
            self._values(schema, at)
            return out
        types = self._types(schema, out, at)
        if "string" in types:
            self._string(out, at)
        if "multipleOf" in schema and types != {"integer"}:
            raise UsageError(f"{at}/multipleOf: enforced for type integer only")
        if "array" in types:
            self._array(out, at, depth)
        if "object" in types:
            self._object(out, at, depth)
        return out

    def _alone(self, schema: dict[str, Any], key: str, at: str, besides: tuple[str, ...] = ()) -> None:
        beside = [k for k in schema if k != key and k not in _ANNOTATIONS and k not in besides]
        if beside:
            raise UsageError(f"{_child(at, beside[0])}: not enforced beside {key!r}; move it into the branches")

    def _each(self, value: Any, at: str, depth: int) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise UsageError(f"{at}: expected an object")
        return {k: self.node(v, _child(at, k), depth + 1) for k, v in value.items()}

    def _list(self, value: Any, at: str, depth: int) -> list[Any]:
        if not isinstance(value, list) or not value:
            raise UsageError(f"{at}: expected a non-empty list")
        return [self.node(v, f"{at}/{i}", depth + 1) for i, v in enumerate(value)]

    def _combination(self, out: dict[str, Any], key: str, at: str, depth: int) -> dict[str, Any]:
        if key == "$ref":
            self._resolve(out["$ref"], f"{at}/$ref")
            return out
        branches = self._list(out[key], _child(at, key), depth)
        if key == "allOf" and len(branches) > 1:
            raise UsageError(f"{at}/allOf: several branches are not enforced together; merge them")
        if key == "oneOf" and not _disjoint(branches):
            raise UsageError(f"{at}/oneOf: the branches may overlap, which is not enforced; use anyOf")
        return {**out, key: branches}

    def _resolve(self, ref: Any, at: str) -> None:
        if not isinstance(ref, str) or not (ref == "#" or ref.startswith("#/")):
            raise UsageError(f"{at}: {printable(repr(ref))} is not a reference into this schema")
        value = self._root
        for part in ref[2:].split("/") if ref != "#" else []:
            part = part.replace("~1", "/").replace("~0", "~")
            if not isinstance(value, dict) or part not in value:
                raise UsageError(f"{at}: {printable(repr(ref))} does not exist")
            value = value[part]

    def _types(self, schema: dict[str, Any], out: dict[str, Any], at: str) -> set[str]:
        """The node's types; a missing one is inferred from its keywords."""
        given = schema.get("type")
        typed = [name for name, keys in _BY_TYPE.items() if keys & schema.keys()]
        if given is None:
            if len(typed) > 1:
                raise UsageError(f"{at}: keywords of {' and '.join(typed)}, expected a type")
            if typed:
                out["type"] = typed[0]
            return set(typed)
        types = set(given) if isinstance(given, list) else {given}
        if not types or not types <= _TYPES:
            raise UsageError(f"{at}/type: {printable(repr(given))} is no type")
        has = {"number" if t == "integer" else t for t in types}
        for name in typed:
            if name not in has:
                key = sorted(_BY_TYPE[name] & schema.keys())[0]
                raise UsageError(f"{_child(at, key)}: has no effect on type {given}")
        return types

    def _values(self, schema: dict[str, Any], at: str) -> None:
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        if not isinstance(values, list) or not values:
            raise UsageError(f"{at}/enum: expected a non-empty list")
        given = schema.get("type")
        allowed = None if given is None else set(given) if isinstance(given, list) else {given}
        for value in values:
            if allowed is not None and not _json_types(value) & allowed:
                raise UsageError(f"{at}: {printable(json.dumps(value))} is not of type {given}")

    def _string(self, schema: dict[str, Any], at: str) -> None:
        """Check, and put lengths as a pattern: the library's own length rule lets raw control characters through."""
        rules = [k for k in ("pattern", "format", "minLength", "maxLength") if k in schema]
        if len(rules) > 1 and ("pattern" in rules or "format" in rules):
            raise UsageError(f"{_child(at, rules[1])}: not enforced beside {rules[0]!r}")
        if "format" in schema and schema["format"] not in _FORMATS:
            raise UsageError(f"{at}/format: {printable(repr(schema['format']))} is not enforced")
        if "pattern" in schema:
            if not isinstance(schema["pattern"], str):
                raise UsageError(f"{at}/pattern: expected a string")
            self._pattern(schema["pattern"], f"{at}/pattern")
        if "minLength" in schema or "maxLength" in schema:
            least, most = schema.pop("minLength", 0), schema.pop("maxLength", None)
            for key, value in (("minLength", least), ("maxLength", most)):
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
                    raise UsageError(f"{at}/{key}: expected an integer of 0 or more")
                if value is not None and value > _MAX_LENGTH:
                    raise UsageError(f"{at}/{key}: {value} is not supported, at most {_MAX_LENGTH}")
            if most is not None and most < least:
                raise UsageError(f"{at}/maxLength: {most} is below minLength {least}")
            schema["pattern"] = f"^.{{{least},{'' if most is None else most}}}$"

    def _pattern(self, pattern: str, at: str) -> None:
        try:
            check_pattern(pattern)
        except UsageError as exc:
            raise UsageError(f"{at}: {exc.message}") from None

    def _array(self, out: dict[str, Any], at: str, depth: int) -> None:
        if "prefixItems" in out:
            out["prefixItems"] = self._list(out["prefixItems"], f"{at}/prefixItems", depth)
        if "items" in out and out["items"] is not False:
            out["items"] = self.node(out["items"], f"{at}/items", depth + 1)

    def _object(self, out: dict[str, Any], at: str, depth: int) -> None:
        for key in ("properties", "patternProperties"):
            if key in out:
                out[key] = self._each(out[key], f"{at}/{key}", depth)
        for pattern in out.get("patternProperties", ()):
            self._pattern(pattern, f"{at}/patternProperties")
        for key in ("additionalProperties", "propertyNames"):
            if key in out and out[key] is not False:
                out[key] = self.node(out[key], f"{at}/{key}", depth + 1)
        required = out.get("required", [])
        if not isinstance(required, list):
            raise UsageError(f"{at}/required: expected a list")
        for name in required:
            if name not in out.get("properties", {}):
                raise UsageError(f"{at}/required: {printable(repr(name))} is not declared in properties")
        # undeclared properties are left out, but an object that declares none may have any
        if not {"properties", "patternProperties", "additionalProperties", "propertyNames"} & out.keys():
            out["additionalProperties"] = True


def _child(at: str, key: str) -> str:
    escaped = key.replace("~", "~0").replace("/", "~1")
    return f"{at}/{printable(escaped)}"


def _json_types(value: Any) -> set[str]:
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int):
        return {"integer", "number"}
    named = {str: "string", float: "number", list: "array", dict: "object", type(None): "null"}
    return {named[type(value)]}


def _disjoint(branches: list[Any]) -> bool:
    """Whether no value can match two branches: different types, or listed values that differ."""
    kinds: list[set[str]] = []
    for branch in branches:
        if not isinstance(branch, dict):
            return False
        if "enum" in branch or "const" in branch:
            values = branch["enum"] if "enum" in branch else [branch["const"]]
            kind = {f"={json.dumps(v, sort_keys=True)}" for v in values}
        elif "type" in branch:
            given = branch["type"]
            kind = {"number" if t == "integer" else t for t in (given if isinstance(given, list) else [given])}
        else:
            return False
        kinds.append(kind)
    mixed = any(k.startswith("=") for kind in kinds for k in kind) and any(
        not k.startswith("=") for kind in kinds for k in kind
    )
    total = sum(len(k) for k in kinds)
    return not mixed and len(set().union(*kinds)) == total
