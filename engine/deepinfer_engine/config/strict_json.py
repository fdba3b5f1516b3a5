"""JSON that was handed to us, read strictly: a regular file, bounded, UTF-8, no duplicate keys, no unpaired
surrogates, finite numbers and integers of 64 bits.

``describe_bytes`` recognises what people get instead of the file they wanted (a Git LFS pointer, a web page).
"""

from __future__ import annotations

import json
import math
import stat
from pathlib import Path
from typing import Any

from deepinfer_engine.errors import ArtefactError

#: The index of a 96,085-tensor checkpoint is 7 MB; ten times that is no index any more.
MAX_JSON_BYTES = 128 * 1024 * 1024

_SIGNATURES = (
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
    (b"<!doctype html", "an HTML page, not the file itself"),
    (b"<html", "an HTML page, not the file itself"),
    (b"<?xml", "an XML document, not the file itself"),
    (b"pk\x03\x04", "a ZIP archive (a PyTorch file?)"),
    (b"\x80\x02", "a Python pickle"),
    (b"\x1f\x8b", "gzip data"),
    (b"gguf", "a GGUF file"),
    (b"%pdf", "a PDF document"),
)


def describe_bytes(start: bytes) -> str | None:
    """Name of the well-known wrong thing that begins with ``start``, None when nothing is recognised."""
    text = start.lstrip(b"\xef\xbb\xbf \t\r\n").lower() if not start.startswith(b"\x80") else start
    for signature, name in _SIGNATURES:
        if text.startswith(signature):
            return name
    return None


def printable(text: str, limit: int = 120) -> str:
    """``text`` fit for a terminal: control and unpaired surrogate characters escaped, long names shortened."""
    if not text.isprintable():
        text = text.encode("unicode_escape", "backslashreplace").decode("ascii")
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def parse_json(data: bytes | str) -> Any:
    """The value of a strict JSON document; raises ``ValueError`` with one sentence."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_no_constant, parse_int=_int64, parse_float=_finite
        )
        if "\\ud" in text.lower():  # escapes of surrogates: only pairs mean a character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeDecodeError as exc:
        raise ValueError(f"not UTF-8 at byte {exc.start}") from None
    except UnicodeEncodeError:
        raise ValueError("a string holds half of a surrogate pair") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
    except json.JSONDecodeError as exc:
        raise ValueError(f"{exc.msg} at line {exc.lineno} column {exc.colno}") from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise ValueError(f"key {printable(key)!r} appears twice")
            seen.add(key)
    return out


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")


def _int64(text: str) -> int:
    if len(text) < 19:  # most of them; 18 digits and a sign always fit
        return int(text)
    if len(text) > 20 or not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"integer {printable(text, 24)} does not fit 64 bits")
    return int(text)


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {printable(text, 24)} is not finite")
    return value


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object stored at ``path``; raises ``ArtefactError`` naming the file and what is wrong with it."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtefactError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


def read_json(path: Path) -> Any:
    """The JSON value stored at ``path``; raises ``ArtefactError`` naming the file and what is wrong with it."""
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):
            raise ArtefactError(f"{path}: not a regular file")
        if status.st_size > MAX_JSON_BYTES:
            raise ArtefactError(
                f"{path}: {status.st_size} bytes, a JSON file of a checkpoint has at most {MAX_JSON_BYTES}"
            )
        data = path.read_bytes()
    except FileNotFoundError:
        raise ArtefactError(f"{path}: no such file") from None
    except (OSError, ValueError) as exc:
        raise ArtefactError(f"{path}: cannot be read ({exc})") from None
    if found := describe_bytes(data[:64]):
        raise ArtefactError(f"{path}: this is {found}", hint="download the file again")
    try:
        return parse_json(data)
    except ValueError as exc:
        raise ArtefactError(f"{path}: not valid JSON ({exc})") from None
