"""An OpenAI-compatible streaming server in this process whose answers a test scripts, request by request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Turn:
    """What to do with a request.

    ``tokens`` chunks of ``per_chunk`` tokens, ``gap_s`` apart after ``wait_s``; ``cut_after`` chunks the connection
    closes without an end; ``raw`` is sent instead of chunks; ``usage`` False leaves token counts out; ``running``
    counts along in every chunk; ``status`` other than 200 is an error page.
    """

    tokens: int = 4
    per_chunk: int = 1
    wait_s: float = 0.0
    gap_s: float = 0.0
    cut_after: int | None = None
    raw: bytes | None = None
    usage: bool = True
    running: bool = False
    status: int = 200
    content_type: str = "text/event-stream"
    finish: str | None = "length"
    prompt_tokens: int = 7
    cached_tokens: int | None = None


#: (number of the request, its body) to what happens
Script = Callable[[int, dict[str, Any]], Turn]


class Server:
    """``url`` to ask, and the bodies that were asked."""

    def __init__(self, script: Script):
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.lock = threading.Lock()
        self.answering: set[int] = set()
        self.most_in_flight = 0
        self.released = threading.Event()
        server = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # the body ends with the connection, as a cut stream does too

            def do_POST(self) -> None:
                server.answer(self)

            def do_GET(self) -> None:
                data = json.dumps({"data": [{"id": "scripted"}]}).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args: Any) -> None:
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        with self.lock:
            number = len(self.bodies)
            self.bodies.append(body)
            self.paths.append(request.path)
            self.answering.add(number)
            self.most_in_flight = max(self.most_in_flight, len(self.answering))
        try:
            done = self._send(request, self.script(number, body), request.path.endswith("/chat/completions"))
            with self.lock:
                self.answering.discard(number)  # before the client can know that the answer is over
            request.wfile.write(done)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up, as some tests want
        finally:
            with self.lock:
                self.answering.discard(number)

    def _send(self, request: BaseHTTPRequestHandler, turn: Turn, chat: bool) -> bytes:
        """Everything but what ends the answer, which is returned."""
        request.send_response(turn.status)
        request.send_header("Content-Type", turn.content_type if turn.status == 200 else "application/json")
        request.end_headers()
        out = request.wfile
        if turn.status != 200:
            return json.dumps({"error": {"message": f"scripted status {turn.status}"}}).encode()
        self.released.wait(turn.wait_s)
        if turn.raw is not None:
            return turn.raw
        if chat:
            out.write(event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}))
        sent = 0
        for number in range(-(-turn.tokens // turn.per_chunk)):
            if turn.cut_after == number:
                return b""
            if number:
                self.released.wait(turn.gap_s)
            sent = min(turn.tokens, sent + turn.per_chunk)
            choice = {"index": 0, "delta": {"content": "a "}} if chat else {"index": 0, "text": "a "}
            usage = {"usage": counts(turn, sent)} if turn.running else {}
            out.write(event({"choices": [choice], **usage}))
            out.flush()
        last = {"index": 0, "delta": {}, "finish_reason": turn.finish}
        out.write(event({"choices": [last if chat else {"index": 0, "text": "", "finish_reason": turn.finish}]}))
        if turn.usage:
            out.write(event({"choices": [], "usage": counts(turn, turn.tokens)}))
        return b"data: [DONE]\n\n"


def counts(turn: Turn, generated: int) -> dict[str, Any]:
    out: dict[str, Any] = {"prompt_tokens": turn.prompt_tokens, "completion_tokens": generated}
    if turn.cached_tokens is not None:
        out["prompt_tokens_details"] = {"cached_tokens": turn.cached_tokens}
    return out


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@contextmanager
def serving(script: Script) -> Iterator[Server]:
    """A running server; waiting answers are released at the end."""
    server = Server(script)
    thread = threading.Thread(target=server.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.released.set()
        deadline = time.monotonic() + 5
        while server.answering and time.monotonic() < deadline:
            time.sleep(0.01)
        server.http.shutdown()
        server.http.server_close()
        thread.join()
