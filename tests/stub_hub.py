"""A model hub on the loopback interface: repository info, tree, resolve with redirects to a second host, and faults.

Two servers, because a redirect to another origin is where logins leak. Every byte of content that leaves the storage
host is counted per file, so that tests can prove what was fetched twice.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c0ffee" + "0" * 34
REPO = "org/model"


@dataclass(frozen=True)
class Fault:
    """What the storage host does to one request: a status instead of content, or content that goes wrong.

    ``after`` bytes are sent properly; then the connection is dropped (``drop``), goes silent (``hang``) or continues
    byte by byte (``trickle``). ``flip`` changes the bytes but not their number. ``whole`` ignores the range.
    """

    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    after: int = 0
    how: str = ""


class StubHub:
    """Use as a context manager. ``files`` may be changed between fetches."""

    def __init__(self, files: dict[str, bytes] | None = None):
        self.files = dict(files or {})
        self.revisions = {"main": COMMIT}
        self.redirect = True
        self.rate_bytes_s: float | None = None
        self.page = 1000
        #: Faults of the storage host by path, one per request; the last stays when ``forever`` holds the path.
        self.faults: defaultdict[str, list[Fault]] = defaultdict(list)
        self.forever: set[str] = set()
        #: Faults of the hub itself, one per request of any kind.
        self.api_faults: list[Fault] = []
        self.listed: dict[str, Any] = {}
        self.linked_etag: dict[str, str] = {}
        self.gate: Callable[[dict[str, str]], Fault | None] = lambda headers: None
        self.requests: list[tuple[str, str, dict[str, str]]] = []
        self.sent: Counter[str] = Counter()
        self.ranges: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self.lock = threading.Lock()
        self.over = threading.Event()
        self._servers = [_Server(("127.0.0.1", 0), _Handler), _Server(("127.0.0.1", 0), _Handler)]
        for server, role in zip(self._servers, ("hub", "storage"), strict=True):
            server.stub, server.role = self, role
        self.url, self.storage = (f"http://127.0.0.1:{s.server_address[1]}" for s in self._servers)
        self.authority = self.storage.removeprefix("http://")

    def __enter__(self) -> StubHub:
        for server in self._servers:
            threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        for server in self._servers:
            server.shutdown()
            server.server_close()

    def tree(self) -> list[dict[str, Any]]:
        """Entries as the hub lists them: shards as large files with a SHA-256, the rest as git blobs."""
        entries: list[dict[str, Any]] = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "encoding"}]
        for path, data in self.files.items():
            entry = {"type": "file", "oid": blob_id(data), "size": len(data), "path": path}
            if path.endswith(".safetensors"):
                sha256 = hashlib.sha256(data).hexdigest()
                entry |= {"lfs": {"oid": sha256, "size": len(data), "pointerSize": 134}}
            entries.append(entry | self.listed.get(path, {}))
        return entries

    def content_requests(self) -> list[str]:
        return [path for role, path, _ in self.requests if role == "storage"]


def blob_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def handle_error(self, *_: object) -> None:
        """Clients that go away are what is tested."""

    stub: StubHub
    role: str


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # header and body are written apart; together with delayed acks that costs 40 ms
    server: _Server

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        stub = self.server.stub
        headers = {k.lower(): v for k, v in self.headers.items()}
        with stub.lock:
            stub.requests.append((self.server.role, self.path, headers))
        try:
            if self.server.role == "storage":
                self._content(unquote(urlsplit(self.path).path.lstrip("/")), headers)
                return
            with stub.lock:
                fault = stub.api_faults.pop(0) if stub.api_faults else stub.gate(headers)
            if fault is not None:
                self._fault(fault, b"")
            else:
                self._hub(headers)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    # ---------------------------------------------------------------------- hub

    def _hub(self, headers: dict[str, str]) -> None:
        stub = self.server.stub
        url = urlsplit(self.path)
        if not unquote(url.path).startswith((f"/api/models/{REPO}/", f"/{REPO}/resolve/")):
            self._reply(404, [("X-Error-Code", "RepoNotFound")])
            return
        parts = url.path.split("/")
        known = set(stub.revisions.values())
        if "/revision/" not in url.path and parts[6 if parts[1] == "api" else 4] not in known:
            self._reply(404, [("X-Error-Code", "RevisionNotFound")])
        elif "/revision/" in url.path:
            commit = stub.revisions.get(unquote(parts[-1]))
            if commit is None:
                self._reply(404, [("X-Error-Code", "RevisionNotFound")])
            else:
                self._reply(200, [], json.dumps({"id": REPO, "sha": commit}).encode())
        elif "/tree/" in url.path:
            at = int(parse_qs(url.query).get("at", ["0"])[0])
            entries = stub.tree()
            more = at + stub.page < len(entries)
            link = [("Link", f'<{stub.url}{url.path}?at={at + stub.page}>; rel="next"')] if more else []
            self._reply(200, link, json.dumps(entries[at : at + stub.page]).encode())
        else:
            self._resolve(unquote("/".join(parts[5:])), headers)

    def _resolve(self, path: str, headers: dict[str, str]) -> None:
        stub = self.server.stub
        if path not in stub.files:
            self._reply(404, [("X-Error-Code", "EntryNotFound")])
        elif stub.redirect and path.endswith(".safetensors"):
            etag = stub.linked_etag.get(path, hashlib.sha256(stub.files[path]).hexdigest())
            location = f"{stub.storage}/{path}?X-Signature=very-secret"
            self._reply(302, [("Location", location), ("X-Linked-Etag", f'"{etag}"')])
        else:
            self._content(path, headers)

    # ------------------------------------------------------------------- content

    def _content(self, path: str, headers: dict[str, str]) -> None:
        stub = self.server.stub
        data = stub.files[path]
        with stub.lock:
            queue = stub.faults[path]
            fault = (queue[0] if path in stub.forever else queue.pop(0)) if queue else Fault()
        begin, end, status = 0, len(data), 200
        wanted = headers.get("range", "")
        if wanted.startswith("bytes=") and fault.how != "whole":
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            begin, end, status = int(first), min(int(last) + 1, len(data)), 206
            if begin >= len(data):
                self._reply(416, [("Content-Range", f"bytes */{len(data)}")])
                return
        body = data[begin:end]
        if fault.how == "flip":
            body = bytes(b ^ 1 for b in body)
        if fault.status:
            self._fault(fault, body)
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status == 206:
            self.send_header("Content-Range", f"bytes {begin}-{end - 1}/{len(data)}")
        self.end_headers()
        self._send(path, begin, body, fault)

    def _send(self, path: str, begin: int, body: bytes, fault: Fault) -> None:
        stub = self.server.stub
        limit = fault.after if fault.how in ("drop", "hang", "trickle") else len(body)
        at = 0
        while at < limit:
            block = body[at : min(at + 4096, limit)]
            self.wfile.write(block)
            with stub.lock:
                stub.sent[path] += len(block)
                stub.ranges[path].append((begin + at, begin + at + len(block)))
            at += len(block)
            if stub.rate_bytes_s:
                time.sleep(len(block) / stub.rate_bytes_s)
        while fault.how == "trickle" and at < len(body) and not stub.over.wait(0.02):
            self.wfile.write(body[at : at + 1])
            at += 1
        if fault.how == "hang":
            stub.over.wait(20)
        if fault.how in ("drop", "hang"):
            self.close_connection = True

    def _fault(self, fault: Fault, body: bytes) -> None:
        if fault.how == "hang":
            self.server.stub.over.wait(20)
            self.close_connection = True
            return
        self._reply(fault.status, list(fault.headers))

    def _reply(self, status: int, headers: list[tuple[str, str]], body: bytes = b"{}") -> None:
        self.send_response(status)
        for name, value in headers:
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
