"""An OpenAI-compatible server in this process whose behaviour a test scripts, request by request."""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(frozen=True)
class Turn:
    """What to do with a request: an answer, or a status, after an optional wait; ``drop`` closes the connection."""

    content: str | None = ""
    reasoning: str | None = None
    finish: str = "stop"
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    wait_s: float = 0.0
    drop: bool = False
    raw: bytes | None = None


#: (text of the user message, seed, how often this was asked before) to what happens.
Script = Callable[[str, int, int], Turn]


class Endpoint:
    """``url`` to ask, and what was asked: bodies in order, and requests by (text, seed)."""

    def __init__(self, script: Script):
        self.script = script
        self.bodies: list[dict[str, Any]] = []
        self.asked: Counter[tuple[str, int]] = Counter()
        self.keys: set[str | None] = set()
        self.in_flight = 0
        self.most_in_flight = 0
        self.lock = threading.Lock()
        self.released = threading.Event()
        endpoint = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                endpoint.answer(self)

            def do_GET(self) -> None:
                send(self, 200, json.dumps({"data": [{"id": "scripted"}]}).encode(), {})

            def log_message(self, *args: Any) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}/v1"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        body = json.loads(request.rfile.read(int(request.headers["Content-Length"])))
        text, seed = body["messages"][-1]["content"], body.get("seed", 0)
        with self.lock:
            before = self.asked[text, seed]
            self.asked[text, seed] += 1
            self.bodies.append(body)
            self.keys.add(request.headers.get("Authorization"))
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            turn = self.script(text, seed, before)
            if turn.wait_s:
                self.released.wait(turn.wait_s)
            if turn.drop:
                request.close_connection = True
                return
            send(request, turn.status, turn.raw if turn.raw is not None else payload(turn), turn.headers)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client gave up, as some tests want
        finally:
            with self.lock:
                self.in_flight -= 1


def payload(turn: Turn) -> bytes:
    if turn.status != 200:
        return json.dumps({"error": {"message": f"scripted status {turn.status}"}}).encode()
    message = {"role": "assistant", "content": turn.content, "reasoning_content": turn.reasoning}
    choice = {"index": 0, "message": message, "finish_reason": turn.finish}
    return json.dumps({"choices": [choice], "usage": {"prompt_tokens": 7, "completion_tokens": 3}}).encode()


def send(request: BaseHTTPRequestHandler, status: int, data: bytes, headers: dict[str, str]) -> None:
    request.send_response(status)
    for name, value in {"Content-Type": "application/json", "Content-Length": str(len(data)), **headers}.items():
        request.send_header(name, value)
    request.end_headers()
    request.wfile.write(data)


@contextmanager
def serving(script: Script) -> Iterator[Endpoint]:
    """A running endpoint; hanging answers are released at the end."""
    endpoint = Endpoint(script)
    thread = threading.Thread(target=endpoint.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield endpoint
    finally:
        endpoint.released.set()
        deadline = time.monotonic() + 5
        while endpoint.in_flight and time.monotonic() < deadline:
            time.sleep(0.01)
        endpoint.server.shutdown()
        endpoint.server.server_close()
        thread.join()
