"""Streamed completions: server-sent events of the chat and text interfaces, each stamped when its line was read.

A measurement never retries: a second attempt would hide the failure and start a new clock. What goes wrong becomes a
``StreamFailed`` with a group (a word to count by) and a sentence.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import time
import urllib.parse
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.remote.client import Endpoint, error_detail

Interface = Literal["chat", "completions"]

#: Longest line of a stream; a chunk of text is a few hundred bytes.
_MAX_LINE = 1024 * 1024


class StreamFailed(DeepInferError):
    """One streamed request failed; ``group`` is a word to count by."""

    exit_code = 5

    def __init__(self, group: str, message: str):
        super().__init__(message)
        self.group = group


@dataclass(frozen=True)
class Piece:
    """One event of a stream. ``text`` empty: it carried no token (a role, a finish reason, usage).

    ``usage``: (prompt, generated, cached) tokens so far where the event says so.
    """

    at_s: float
    text: str
    finish: str | None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    cached_tokens: int | None = None


class Stream:
    """One request on a connection of its own, without retries, redirects or proxies. ``close`` from another thread
    ends it."""

    def __init__(self, endpoint: Endpoint, interface: Interface):
        self._endpoint = endpoint
        self._interface: Interface = interface
        self._socket: socket.socket | None = None

    def pieces(self, body: Mapping[str, Any]) -> Iterator[Piece]:
        """Send a body with ``stream: true`` and yield its events. ``StreamFailed`` when it does not end well."""
        data = json.dumps(body, allow_nan=False).encode()
        connection = self._connect()
        try:
            path = urllib.parse.urlsplit(self._endpoint.url).path
            verb = "/chat/completions" if self._interface == "chat" else "/completions"
            connection.request("POST", path + verb, data, self._headers())
            with connection.getresponse() as response:
                self._check(response)
                yield from self._events(response)
        except TimeoutError:
            raise StreamFailed("timeout", f"nothing came for {self._endpoint.timeout_s:g} s") from None
        except (OSError, http.client.HTTPException) as exc:
            raise StreamFailed("connection_lost", f"the connection broke: {exc or type(exc).__name__}") from None
        finally:
            connection.close()

    def close(self) -> None:
        """End the request; whoever reads it meets a broken connection."""
        if self._socket is not None:
            with contextlib.suppress(OSError):  # it is gone already
                self._socket.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> http.client.HTTPConnection:
        parts = urllib.parse.urlsplit(self._endpoint.url)
        assert parts.hostname is not None
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=self._endpoint.timeout_s)
        try:
            connection.connect()
        except TimeoutError:
            raise StreamFailed("timeout", f"no connection within {self._endpoint.timeout_s:g} s") from None
        except OSError as exc:
            raise StreamFailed("unreachable", f"cannot connect: {exc}") from None
        self._socket = connection.sock
        return connection

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self._endpoint.key is not None:
            headers["Authorization"] = f"Bearer {self._endpoint.key}"
        return headers

    def _check(self, response: http.client.HTTPResponse) -> None:
        if response.status != 200:
            text = response.read(2000).decode("utf-8", "replace")
            message = f"status {response.status}: {printable(error_detail(text) or response.reason, 300)}"
            raise StreamFailed(f"http_{response.status}", message)
        kind = response.headers.get_content_type()
        if kind != "text/event-stream":
            raise StreamFailed("not_a_stream", f"the answer is {printable(kind, 60)}, expected text/event-stream")

    def _events(self, response: Any) -> Iterator[Piece]:
        data: list[str] = []
        finished = False
        while line := response.readline(_MAX_LINE + 1):
            at_s = time.perf_counter()
            if len(line) > _MAX_LINE:
                raise StreamFailed("malformed_stream", f"a line of the stream is longer than {_MAX_LINE} bytes")
            text = line.decode("utf-8", "replace").rstrip("\r\n")
            if text.startswith("data:"):
                data.append(text[5:].removeprefix(" "))
            elif not text and data:
                payload, data = "\n".join(data), []
                if payload.strip() == "[DONE]":
                    return
                piece = self._piece(payload, at_s)
                finished = finished or piece.finish is not None
                yield piece
            elif text and not text.startswith((":", "event:", "id:", "retry:")):
                raise StreamFailed("malformed_stream", f"not a line of an event stream: {printable(text, 80)}")
        if not finished:
            raise StreamFailed("stream_cut", "the stream ended before the answer did")

    def _piece(self, payload: str, at_s: float) -> Piece:
        try:
            value = parse_json(payload)
        except ValueError as exc:
            raise StreamFailed("malformed_stream", f"an event is not JSON ({exc})") from None
        if not isinstance(value, dict):
            raise StreamFailed("malformed_stream", "an event is not a JSON object")
        if value.get("error") is not None:
            raise StreamFailed("error_in_stream", printable(error_detail(payload), 300))
        prompt, generated, cached = _usage(value.get("usage"))
        choices = value.get("choices")
        if not isinstance(choices, list) or len(choices) > 1:
            raise StreamFailed("malformed_stream", "an event does not hold one choice or none")
        if not choices:
            return Piece(at_s, "", None, prompt, generated, cached)
        choice = choices[0]
        text = self._text(choice) if isinstance(choice, dict) else None
        finish = choice.get("finish_reason") if isinstance(choice, dict) else None
        if text is None or not (finish is None or isinstance(finish, str)):
            raise StreamFailed("malformed_stream", "the choice of an event is not of the interface's form")
        return Piece(at_s, text, finish, prompt, generated, cached)

    def _text(self, choice: Mapping[str, Any]) -> str | None:
        """All text of a choice, reasoning included; None when it has another form."""
        if self._interface == "completions":
            text = choice.get("text", "")
            return text if isinstance(text, str) else None
        delta = choice.get("delta", {})
        if not isinstance(delta, dict):
            return None
        parts = [delta.get(name) or "" for name in ("reasoning_content", "reasoning", "content")]
        if not all(isinstance(p, str) for p in parts):
            return None
        return "".join(parts)


def _usage(value: Any) -> tuple[int | None, int | None, int | None]:
    """(prompt, generated, cached) tokens of a usage object; what it does not say is None."""
    if not isinstance(value, dict):
        return None, None, None
    details = value.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    return _count(value.get("prompt_tokens")), _count(value.get("completion_tokens")), _count(cached)


def _count(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
