"""One chat completion over HTTP: retries what may pass, refuses what will not, and says which it was.

Retried with doubling waits (a Retry-After header wins): 429, 500, 502, 503, 504, a time-out, a broken or refused
connection. Not retried: any other status. 401, 403 and 404 end the run (``NotReadyError``), because every further
request would meet the same. Redirects are not followed: the key would travel with them.
"""

from __future__ import annotations

import http.client
import json
import threading
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.config.strict_json import parse_json, printable
from deepinfer_engine.errors import DeepInferError, NotReadyError, UsageError

RETRIED = (429, 500, 502, 503, 504)
_FATAL = (401, 403, 404)
#: Longest single wait between attempts, also for a server that asks for more.
_MAX_WAIT_S = 60.0
#: Largest response read; a 384k-token answer is about 2 MB.
_MAX_BYTES = 64 * 1024 * 1024


class RequestFailed(DeepInferError):
    """One request got no answer after all attempts; the sample counts as errored (exit 5)."""

    exit_code = 5

    def __init__(self, message: str, attempts: int):
        super().__init__(message)
        self.attempts = attempts


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible base URL such as ``http://host:8000/v1``. ``key`` is sent, never shown or stored."""

    url: str
    model: str
    key: str | None = None
    timeout_s: float = 3600.0
    attempts: int = 6
    first_wait_s: float = 1.0

    def __repr__(self) -> str:
        return f"Endpoint({self.url!r}, {self.model!r})"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        return None


class Client:
    """Sends requests to one endpoint; safe to share between threads. ``stop`` ends waits and further attempts."""

    def __init__(self, endpoint: Endpoint):
        self.endpoint = endpoint
        self._opener = urllib.request.build_opener(_NoRedirect)
        self.stop = threading.Event()
        self._reached = False

    def chat(self, body: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
        """The parsed response to a chat-completions body, and the attempts it took. ``RequestFailed`` otherwise."""
        wait = self.endpoint.first_wait_s
        for attempt in range(1, self.endpoint.attempts + 1):
            try:
                value = self._send("/chat/completions", json.dumps(body, allow_nan=False).encode())
                self._reached = True
                return value, attempt
            except _Retry as exc:
                problem = exc
            if attempt == self.endpoint.attempts:
                break
            if self.stop.wait(min(_MAX_WAIT_S, wait if problem.after_s is None else problem.after_s)):
                raise RequestFailed("stopped", attempt)
            wait *= 2
        if problem.unreachable and not self._reached:
            raise NotReadyError(
                f"{self.endpoint.url}: {problem.message}", hint="is the endpoint up, and is the URL right?"
            )
        raise RequestFailed(problem.message, self.endpoint.attempts)

    def only_model(self) -> str:
        """The name of the one model the endpoint serves; ``UsageError`` when it serves several."""
        try:
            value = self._send("/models", None)
            names = [str(entry["id"]) for entry in value["data"]]
        except (_Retry, RequestFailed) as exc:
            raise NotReadyError(f"{self.endpoint.url}: {exc}", hint="give --endpoint-model NAME") from None
        except (KeyError, TypeError):
            raise NotReadyError(
                f"{self.endpoint.url}/models: not a list of models", hint="give --endpoint-model NAME"
            ) from None
        if len(names) != 1:
            raise UsageError(
                f"{self.endpoint.url} serves {len(names)} models: {', '.join(map(printable, names[:10]))}",
                hint="choose one with --endpoint-model NAME",
            )
        return names[0]

    def _send(self, path: str, data: bytes | None) -> dict[str, Any]:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self.endpoint.key is not None:
            headers["Authorization"] = f"Bearer {self.endpoint.key}"
        request = urllib.request.Request(self.endpoint.url + path, data=data, headers=headers)
        try:
            with self._opener.open(request, timeout=self.endpoint.timeout_s) as response:
                raw = response.read(_MAX_BYTES + 1)
        except urllib.error.HTTPError as exc:
            raise self._status_error(exc) from None
        except TimeoutError:
            raise _Retry(f"no answer within {self.endpoint.timeout_s:g} s") from None
        except urllib.error.URLError as exc:
            if isinstance(exc.reason, TimeoutError):
                raise _Retry(f"no connection within {self.endpoint.timeout_s:g} s", unreachable=True) from None
            raise _Retry(f"cannot connect: {exc.reason}", unreachable=True) from None
        except (OSError, http.client.HTTPException) as exc:
            raise _Retry(f"the connection broke: {exc or type(exc).__name__}") from None
        if len(raw) > _MAX_BYTES:
            raise RequestFailed(f"the response is larger than {_MAX_BYTES} bytes", 1)
        try:
            value = parse_json(raw)
        except ValueError as exc:
            raise RequestFailed(f"the response is not JSON ({exc})", 1) from None
        if not isinstance(value, dict):
            raise RequestFailed(f"the response is {type(value).__name__}, expected a JSON object", 1)
        return value

    def _status_error(self, exc: urllib.error.HTTPError) -> DeepInferError | _Retry:
        with exc:
            text = exc.read(2000).decode("utf-8", "replace")
        message = f"status {exc.code}: {printable(error_detail(text) or exc.reason, 300)}"
        if exc.code in RETRIED:
            return _Retry(message, after_s=_retry_after(exc.headers.get("Retry-After")))
        if exc.code in _FATAL:
            hint = "check the URL and the model's name" if exc.code == 404 else "check --api-key-env"
            return NotReadyError(f"{self.endpoint.url}: {message}", hint=hint)
        return RequestFailed(message, 1)


class _Retry(Exception):
    """An attempt that may succeed when repeated."""

    def __init__(self, message: str, *, after_s: float | None = None, unreachable: bool = False):
        super().__init__(message)
        self.message = message
        self.after_s = after_s
        self.unreachable = unreachable


def check_url(url: str) -> str:
    """A base URL without a trailing slash; ``UsageError`` for anything else, and for one that carries a password."""
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise UsageError(f"{url!r} is not an http or https URL", hint="such as http://host:8000/v1")
    if parts.username is not None or parts.password is not None:
        raise UsageError(
            "the endpoint's URL carries a user name", hint="put the key into a variable: --api-key-env NAME"
        )
    if parts.query or parts.fragment:
        raise UsageError(f"{url!r} has a query or fragment; a base URL has neither")
    return url.rstrip("/")


def error_detail(text: str) -> str:
    """The sentence inside an error body of the usual form, or its first line."""
    try:
        value = json.loads(text)
        inner = value.get("error", value)
        return str(inner.get("message", inner) if isinstance(inner, dict) else inner)
    except (ValueError, AttributeError):
        return text.strip().split("\n")[0]


def _retry_after(value: str | None) -> float | None:
    """Seconds a server asks to wait; the date form is left to our own waits."""
    return float(value) if value is not None and value.strip().isdigit() else None
