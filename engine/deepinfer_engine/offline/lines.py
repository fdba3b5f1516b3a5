"""Request files: one JSON object per line, read and checked before anything is loaded. No torch.

Two forms, which may be mixed. A chat-completions batch line:

    {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": [...], ...}}

and a plain line with exactly one of prompt (text), messages (a conversation) and token_ids:

    {"id": "b", "prompt": "17+25?", "temperature": 0.7, "seed": 3}
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import UsageError
from deepinfer_engine.sample.params import SAMPLING_KEYS, sampling_from
from deepinfer_engine.types import GrammarSpec, SamplingParams

#: problems shown of a bad file; the rest is counted
_SHOWN = 20
#: one line holds one request; a million-token prompt has about 5 MB
_MAX_LINE_BYTES = 64 * 1024 * 1024

_GRAMMARS = ("json_schema", "regex", "ebnf")
_CHAT_KEYS = frozenset({"thinking", "reasoning_effort", "tools", "tool_choice", "response_format"})
_PLAIN_KEYS = frozenset({"id", "prompt", "messages", "token_ids", *_GRAMMARS}) | _CHAT_KEYS | SAMPLING_KEYS
_BATCH_KEYS = frozenset({"custom_id", "method", "url", "body"})
_BODY_KEYS = frozenset({"model", "messages", "prompt", "stream", "user", "metadata"}) | _CHAT_KEYS | SAMPLING_KEYS
_URLS = {"/v1/chat/completions": "messages", "/v1/completions": "prompt"}


@dataclass(frozen=True)
class Item:
    """One request of a file. ``key`` is its id as written; ``content`` is the prompt text, messages or token ids.

    ``raw``: the text is continued as it is. ``options`` are the keys of a conversation besides its messages.
    """

    line: int
    key: str | int
    form: Literal["batch", "plain"]
    kind: Literal["prompt", "messages", "token_ids"]
    content: Any
    raw: bool
    options: dict[str, Any]
    sampling: SamplingParams
    grammar: GrammarSpec | None
    model: str | None


def read_items(path: Path, defaults: SamplingParams, *, thinking: bool | None, raw: bool = False) -> list[Item]:
    """All requests of a file. Settings that a line leaves out are ``defaults``; its seed is shifted by the line.

    ``thinking`` is what a plain conversation does that says nothing of it; None leaves that to whoever renders it.

    ``UsageError`` with every bad line and every id that appears twice, by line number.
    """
    items: list[Item] = []
    problems: list[str] = []
    first: dict[str, int] = {}
    try:
        with path.open("rb") as stream:
            number = 0
            for data in iter(lambda: stream.readline(_MAX_LINE_BYTES + 1), b""):
                number += 1
                if not data.strip():
                    continue
                try:
                    item = _item(number, data, defaults, thinking=thinking, raw=raw)
                except (UsageError, ValueError) as exc:
                    problems.append(f"line {number}: {exc}")
                    item = None
                key = _key_of(data) if item is None else item.key
                seen = number if key is None else first.setdefault(json.dumps(key), number)
                if seen != number:
                    problems.append(f"line {number}: id {key!r} is already on line {seen}")
                if item is not None:
                    items.append(item)
    except OSError as exc:
        raise UsageError(f"{path}: {exc.strerror}") from None
    if problems:
        raise bad_lines(path, problems)
    if not items:
        raise UsageError(f"{path}: no requests in it")
    return items


def bad_lines(path: Path, problems: list[str]) -> UsageError:
    """The error for a file with these problems."""
    noun = "problem" if len(problems) == 1 else "problems"
    shown = [f"  {p}" for p in problems[:_SHOWN]]
    if len(problems) > _SHOWN:
        shown.append(f"  … and {len(problems) - _SHOWN} more")
    return UsageError("\n".join([f"{path}: {len(problems)} {noun}", *shown]), hint="nothing was run; correct the lines")


def _item(line: int, data: bytes, defaults: SamplingParams, *, thinking: bool | None, raw: bool) -> Item:
    if len(data) > _MAX_LINE_BYTES:
        raise UsageError(f"longer than {_MAX_LINE_BYTES} bytes")
    value = parse_json(data.removeprefix(b"\xef\xbb\xbf").strip())
    if not isinstance(value, dict):
        raise UsageError(f"expected a JSON object, found {type(value).__name__}")
    if defaults.seed is not None:
        defaults = replace(defaults, seed=(defaults.seed + line - 1) % 2**64)
    return _batch(line, value, defaults) if "custom_id" in value else _plain(line, value, defaults, thinking, raw)


def _key_of(data: bytes) -> str | int | None:
    """The id of a line that is wrong elsewhere, if it can be read: one run of the check names all double ids."""
    try:
        value = parse_json(data.removeprefix(b"\xef\xbb\xbf").strip())
    except ValueError:
        return None
    key = value.get("custom_id", value.get("id")) if isinstance(value, dict) else None
    return key if isinstance(key, str | int) and not isinstance(key, bool) and key != "" else None


def _batch(line: int, value: dict[str, Any], defaults: SamplingParams) -> Item:
    _known(value, _BATCH_KEYS, "")
    key, body = value["custom_id"], value.get("body")
    if not isinstance(key, str) or not key:
        raise UsageError(f"custom_id is {key!r}, expected a non-empty string")
    if not isinstance(body, dict):
        raise UsageError("body is missing, expected a JSON object")
    if value.get("method", "POST") != "POST":
        raise UsageError(f"method is {value['method']!r}, expected POST")
    kind = "prompt" if "prompt" in body else "messages"
    url = value.get("url")
    if url is not None and _URLS.get(url) != kind:
        raise UsageError(f"url is {printable(str(url))!r} for a body with {kind}, expected one of {', '.join(_URLS)}")
    _known(body, _BODY_KEYS, "body.")
    if body.get("stream"):
        raise UsageError("body.stream is true; a batch has no streams")
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise UsageError(f"body.model is {model!r}, expected a string")
    _exactly_one(body, ("messages", "prompt"))
    content = _content(body, kind)
    return Item(
        line=line,
        key=key,
        form="batch",
        kind=kind,
        content=content,
        raw=kind == "prompt",
        options={k: body[k] for k in _CHAT_KEYS & body.keys() if body[k] is not None},
        sampling=sampling_from(body, defaults),
        grammar=None,
        model=model,
    )


def _plain(line: int, value: dict[str, Any], defaults: SamplingParams, thinking: bool | None, raw: bool) -> Item:
    _known(value, _PLAIN_KEYS, "")
    key = value.get("id")
    if isinstance(key, bool) or not isinstance(key, str | int) or key == "":
        raise UsageError(f"id is {key!r}, expected a string or an integer")
    kind = _exactly_one(value, ("prompt", "messages", "token_ids"))
    options = {k: value[k] for k in _CHAT_KEYS & value.keys() if value[k] is not None}
    unconversational = kind == "token_ids" or (kind == "prompt" and raw)
    if unconversational and options:
        raise UsageError(f"{', '.join(sorted(options))} belongs to a conversation, this line has {kind}")
    if isinstance(options.get("thinking"), bool):
        options["thinking"] = {"type": "enabled" if options["thinking"] else "disabled"}
    elif "thinking" not in options and not unconversational and thinking is not None:
        options["thinking"] = {"type": "enabled" if thinking else "disabled"}
    return Item(
        line=line,
        key=key,
        form="plain",
        kind=kind,
        content=_content(value, kind),
        raw=unconversational,
        options=options,
        sampling=sampling_from(value, defaults),
        grammar=_grammar(value),
        model=None,
    )


def _known(value: Mapping[str, Any], keys: frozenset[str], prefix: str) -> None:
    for key in value:
        if key not in keys:
            near = get_close_matches(key, keys, n=1)
            hint = f"; nearest is {near[0]!r}" if near else ""
            raise UsageError(f"unknown key {prefix}{printable(key)}{hint}")


def _exactly_one(value: Mapping[str, Any], names: tuple[str, ...]) -> Any:
    given = [n for n in names if value.get(n) is not None]
    if len(given) != 1:
        found = f"found {' and '.join(given)}" if given else "found none"
        raise UsageError(f"expected exactly one of {', '.join(names)}, {found}")
    return given[0]


def _content(value: Mapping[str, Any], kind: str) -> Any:
    content = value[kind]
    if kind == "prompt":
        if not isinstance(content, str) or not content:
            raise UsageError(f"prompt is {printable(repr(content))}, expected a non-empty string")
        return content
    if not isinstance(content, list) or not content:
        raise UsageError(f"{kind} is {printable(repr(content))}, expected a non-empty list")
    if kind == "token_ids":
        for i, token in enumerate(content):
            if isinstance(token, bool) or not isinstance(token, int):
                raise UsageError(f"token_ids[{i}] is {printable(repr(token))}, expected an integer")
        return tuple(content)
    return content


def _grammar(value: Mapping[str, Any]) -> GrammarSpec | None:
    given = [n for n in _GRAMMARS if value.get(n) is not None]
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other")
    if not given:
        return None
    name, source = given[0], value[given[0]]
    if name == "json_schema":
        if not isinstance(source, dict | bool):
            raise UsageError("json_schema is no JSON schema, expected an object")
        return GrammarSpec("json_schema", json.dumps(source, ensure_ascii=False))
    if not isinstance(source, str) or not source:
        raise UsageError(f"{name} is {printable(repr(source))}, expected a non-empty string")
    return GrammarSpec("regex" if name == "regex" else "ebnf", source)
