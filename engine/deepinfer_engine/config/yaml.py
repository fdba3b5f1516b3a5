"""Strict YAML: one document of plain data, YAML 1.2 core scalars, and the place of every key and value.

PyYAML's parser gives the events; everything that decides a meaning is here. Refused with line and column: duplicate
keys, anchors, aliases, tags, directives, several documents, keys that are not text, numbers that are not finite, and
sizes or depths no profile or recipe needs. An empty file is an error that says so. The tree is built from the events
with an explicit stack, so nesting costs no Python recursion.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from deepinfer_engine.errors import UsageError

#: Largest file in bytes: a hundred times the longest shipped profile, and still parsed in a second.
MAX_BYTES = 64 * 1024
#: Deepest nesting of sections and lists; profiles use 4, sweep recipes 6.
MAX_DEPTH = 16
#: Most digits of an integer: every unsigned 64-bit value has at most 20.
MAX_DIGITS = 20

_NULL = {"", "~", "null", "Null", "NULL"}
_TRUE = {"true", "True", "TRUE"}
_FALSE = {"false", "False", "FALSE"}
_DECIMAL = re.compile(r"[-+]?[0-9]+")
_OCTAL = re.compile(r"0o[0-7]+")
_HEX = re.compile(r"0x[0-9a-fA-F]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_NOT_FINITE = re.compile(r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")

KeyPath = tuple[str | int, ...]


@dataclass(frozen=True)
class Place:
    """Line and column, counted from 1."""

    line: int
    column: int

    def __str__(self) -> str:
        return f"{self.line}:{self.column}"


@dataclass(frozen=True)
class Document:
    """The parsed value with, for every path into it, where key and value stand and the comment on the value's line."""

    value: Any
    where: str
    keys: Mapping[KeyPath, Place]
    values: Mapping[KeyPath, Place]
    comments: Mapping[KeyPath, str]

    def at_key(self, path: KeyPath) -> str:
        """``file:line:column`` of a key (or of its nearest enclosing key that is in the file)."""
        return self._at(self.keys, path)

    def at_value(self, path: KeyPath) -> str:
        """``file:line:column`` of a value (or of its nearest enclosing key that is in the file)."""
        return self._at(self.values, path)

    def _at(self, places: Mapping[KeyPath, Place], path: KeyPath) -> str:
        while path and path not in places:
            path = path[:-1]
        return f"{self.where}:{places[path]}" if path in places else self.where


def read_yaml(path: Path, *, where: str | None = None, error: type[UsageError] = UsageError) -> Document:
    """Read and parse one file; ``where`` is the name shown in messages (default: the path as given)."""
    where = where or str(path)
    try:
        with path.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise error(f"{where}: no such file", hint="check the path") from None
    except IsADirectoryError:
        raise error(f"{where}: is a directory, expected a YAML file") from None
    except OSError as exc:
        raise error(f"{where}: cannot be read: {exc.strerror or exc}") from None
    return parse_yaml(data, where=where, error=error)


def parse_yaml(data: bytes | str, *, where: str, error: type[UsageError] = UsageError) -> Document:
    """Parse one document; raises ``error`` with ``where:line:column`` for anything outside the accepted subset."""
    builder = _parse(_decode(data, where, error) if isinstance(data, bytes) else data, where, error)
    if builder.root is None:
        raise error(f"{where}: is empty")
    return Document(builder.root, where, builder.keys, builder.values, builder.comments)


def _parse(text: str, where: str, error: type[UsageError]) -> _Builder:
    if len(text) > MAX_BYTES:
        raise error(f"{where}: longer than {MAX_BYTES} bytes, the most that is accepted")
    builder = _Builder(where, text, error)
    try:
        # the pure Python parser: its messages do not depend on how libyaml was built
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            builder.add(event)
    except yaml.reader.ReaderError as exc:
        place = _place_at(text, exc.position if isinstance(exc.position, int) else 0)
        raise error(f"{where}:{place}: character U+{int(exc.character):04X} is not allowed in YAML") from None
    except yaml.MarkedYAMLError as exc:
        mark = exc.problem_mark or exc.context_mark
        place = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        context = f" ({exc.context})" if exc.context else ""
        raise error(f"{where}{place}: not valid YAML: {exc.problem}{context}") from None
    except (yaml.YAMLError, ValueError, OverflowError) as exc:
        # an escape such as "\UFFFFFFFF" reaches chr() unchecked inside PyYAML
        raise error(f"{where}: not valid YAML: {exc}") from None
    return builder


def parse_scalar(text: str, *, where: str, error: type[UsageError] = UsageError) -> Any:
    """The value of a one-line YAML text, as it would be typed in a file: ``8``, ``true``, ``[1.0, 1.2]``, ``"1e5"``."""
    if not text.strip():
        raise error(f"{where}: has no value", hint="write null to clear an optional key")
    if "\n" in text or "\r" in text:
        raise error(f"{where}: the value must be one line")
    return _parse(text, where, error).root


def plain_scalar(text: str) -> Any:
    """Value of an unquoted scalar under the YAML 1.2 core schema; ValueError when it is a number we refuse.

    ``on``, ``yes`` and ``off`` are text; ``010`` is ten; ``1e5`` is the float 100000.0.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    if _DECIMAL.fullmatch(text) or _OCTAL.fullmatch(text) or _HEX.fullmatch(text):
        if len(text) > MAX_DIGITS + 2:
            raise ValueError(f"an integer of {len(text)} characters, at most {MAX_DIGITS} digits are accepted")
        return int(text, 0) if text[:2] in ("0o", "0x") else int(text)
    if _FLOAT.fullmatch(text):
        value = float(text)
        if value in (float("inf"), float("-inf")):
            raise ValueError(f"the number {text} is too large")
        return value
    if _NOT_FINITE.fullmatch(text):
        raise ValueError(f"{text} is not a finite number")
    return text


def format_scalar(value: Any) -> str:
    """One-line YAML of plain data that reads back as the same value under ``parse_yaml``."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(format_scalar(v) for v in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{format_scalar(k)}: {format_scalar(v)}" for k, v in value.items()) + "}"
    plain = re.fullmatch(r"[A-Za-z][A-Za-z0-9_./-]*", value) and plain_scalar(value) == value
    return value if plain else _quote(value)


def _quote(text: str) -> str:
    """Double-quoted form: YAML's escapes for what JSON writes as is but YAML would refuse or fold."""
    out = []
    for char in text:
        code = ord(char)
        if char in '"\\':
            out.append("\\" + char)
        elif 0x20 <= code < 0x7F or (0xA0 <= code < 0x2028 or 0x2029 < code < 0xD800 or 0xE000 <= code < 0xFFFE):
            out.append("\\uFEFF" if code == 0xFEFF else char)
        else:
            out.append(f"\\U{code:08X}")
    return '"' + "".join(out) + '"'


def _decode(data: bytes, where: str, error: type[UsageError]) -> str:
    if len(data) > MAX_BYTES:
        raise error(f"{where}: longer than {MAX_BYTES} bytes, the most that is accepted")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        line = data.count(b"\n", 0, exc.start) + 1
        raise error(f"{where}:{line}: byte {exc.start} is not UTF-8", hint="save the file as UTF-8") from None


def _place_at(text: str, position: int) -> Place:
    before = text[:position]
    return Place(before.count("\n") + 1, position - (before.rfind("\n") + 1) + 1)


@dataclass
class _Frame:
    """One open section or list while its events arrive."""

    path: KeyPath
    value: dict[str, Any] | list[Any]
    key: str | None = None


@dataclass
class _Builder:
    """Turns parser events into the tree; every refusal of the accepted subset is raised here."""

    where: str
    text: str
    error: type[UsageError]
    stack: list[_Frame] = field(default_factory=list)
    keys: dict[KeyPath, Place] = field(default_factory=dict)
    values: dict[KeyPath, Place] = field(default_factory=dict)
    comments: dict[KeyPath, str] = field(default_factory=dict)
    documents: int = 0
    root: Any = None

    def add(self, event: yaml.Event) -> None:
        if isinstance(event, yaml.DocumentStartEvent):
            self._start_document(event)
        elif isinstance(event, yaml.AliasEvent):
            self._fail(event, f"alias *{event.anchor}: aliases are not accepted, write the value out")
        elif isinstance(event, yaml.NodeEvent):
            self._start_node(event)
        elif isinstance(event, yaml.CollectionEndEvent):
            self.stack.pop()

    def _start_document(self, event: yaml.DocumentStartEvent) -> None:
        self.documents += 1
        if self.documents > 1:
            self._fail(event, "a second document starts here, one file holds one document")
        if event.version or event.tags:
            self._fail(event, "directives are not accepted")

    def _start_node(self, event: Any) -> None:
        if event.anchor is not None:
            self._fail(event, f"anchor &{event.anchor}: anchors are not accepted, write the value out")
        if event.tag is not None:
            self._fail(event, f"tag {event.tag}: tags are not accepted")
        frame = self.stack[-1] if self.stack else None
        if frame is not None and isinstance(frame.value, dict) and frame.key is None:
            self._take_key(frame, event)
            return
        path = self._next_path(frame)
        self.values[path] = self._place(event)
        if isinstance(event, yaml.ScalarEvent):
            self._note_comment(path, event)
            self._store(frame, self._scalar(event))
            return
        if len(self.stack) == MAX_DEPTH:
            self._fail(event, f"nested deeper than {MAX_DEPTH} levels")
        value: dict[str, Any] | list[Any] = {} if isinstance(event, yaml.MappingStartEvent) else []
        self._store(frame, value)
        self.stack.append(_Frame(path, value))

    def _take_key(self, frame: _Frame, event: Any) -> None:
        if not isinstance(event, yaml.ScalarEvent):
            self._fail(event, "a key must be text, not a section or a list")
        key = self._scalar(event)
        if not isinstance(key, str):
            self._fail(event, f"the key {event.value!r} is not text; quote it if it is a name")
        path = (*frame.path, key)
        if path in self.keys:
            self._fail(event, f"the key {key!r} is given twice, first on line {self.keys[path].line}")
        self.keys[path] = self._place(event)
        frame.key = key

    def _next_path(self, frame: _Frame | None) -> KeyPath:
        if frame is None:
            return ()
        return (*frame.path, len(frame.value) if isinstance(frame.value, list) else str(frame.key))

    def _store(self, frame: _Frame | None, value: Any) -> None:
        if frame is None:
            self.root = value
        elif isinstance(frame.value, list):
            frame.value.append(value)
        else:
            assert frame.key is not None
            frame.value[frame.key] = value
            frame.key = None

    def _scalar(self, event: yaml.ScalarEvent) -> Any:
        text = event.value
        if any(0xD800 <= ord(c) < 0xE000 for c in text):  # JSON writes one character above U+FFFF as two escapes
            try:
                text = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le")
            except UnicodeDecodeError:
                self._fail(event, "an escape names half of a surrogate pair")
        if not event.implicit[0]:
            return text
        try:
            return plain_scalar(text)
        except ValueError as exc:
            self._fail(event, str(exc))

    def _note_comment(self, path: KeyPath, event: yaml.ScalarEvent) -> None:
        end = event.end_mark.index
        newline = self.text.find("\n", end)
        rest = self.text[end : newline if newline >= 0 else len(self.text)].strip()
        if rest.startswith("#"):
            self.comments[path] = rest.lstrip("#").strip()

    def _place(self, event: yaml.Event) -> Place:
        return Place(event.start_mark.line + 1, event.start_mark.column + 1)

    def _fail(self, event: yaml.Event, message: str) -> Any:
        raise self.error(f"{self.where}:{self._place(event)}: {message}")
