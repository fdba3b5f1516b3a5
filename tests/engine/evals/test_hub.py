"""The hub's own client against a stand-in for the hub: pinned download, cache, gate, no network."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from deepinfer_engine.evals.task import find_task

ROOT = Path(__file__).resolve().parents[3]
PINNED = find_task("aime25").task.data
GATED = find_task("gpqa").task.data
FILE = b'{"problem": "1+1?", "answer": "2", "id": 1}\n'

PROGRAM = """
import sys
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.evals.hub import fetch
from deepinfer_engine.evals.task import find_task
try:
    print(fetch(find_task(sys.argv[1]).task.data).read_text(), end="")
except DeepInferError as exc:
    print(type(exc).__name__, exc.message, exc.hint, sep="|")
"""


class Hub(BaseHTTPRequestHandler):
    """Serves one file at one commit, and a repository whose terms were not accepted."""

    asked: list[str]

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        self.asked.append(f"{self.command} {self.path}")
        status, data, headers = 200, b"", {}
        if self.path == f"/datasets/{PINNED.hub}/resolve/{PINNED.revision}/{PINNED.file}":
            data = FILE
            headers = {"X-Repo-Commit": str(PINNED.revision), "ETag": f'"{hashlib.sha1(FILE).hexdigest()}"'}
        elif str(GATED.hub) in self.path:
            status, data = 403, json.dumps({"error": "gated"}).encode()
            headers = {"X-Error-Code": "GatedRepo", "X-Error-Message": "Access to this dataset is restricted"}
        elif self.path not in ("/", ""):
            status = 404
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("OneHub", (Hub,), {"asked": asked}))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", asked
    server.shutdown()
    server.server_close()
    thread.join()


def fetch(task: str, home: Path, endpoint: str, **more: str) -> str:
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, task],
        env=env | {"PYTHONPATH": paths, "HF_HUB_DISABLE_XET": "1"} | more,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_pinned_file_is_downloaded_once(tmp_path: Path, hub: tuple[str, list[str]]):
    endpoint, asked = hub
    assert fetch("aime25", tmp_path, endpoint) == FILE.decode()
    assert any(str(PINNED.revision) in line for line in asked)
    asked.clear()
    assert fetch("aime25", tmp_path, endpoint) == FILE.decode()
    assert not [line for line in asked if "/datasets/" in line], "a pinned file in the cache is not asked for"
    assert fetch("aime25", tmp_path, "http://127.0.0.1:9", HF_HUB_OFFLINE="1") == FILE.decode()


def test_a_gated_set_is_refused_before_its_file_is_asked_for(tmp_path: Path, hub: tuple[str, list[str]]):
    endpoint, asked = hub
    kind, message, hint = fetch("gpqa", tmp_path, endpoint, HF_TOKEN="hf_x").strip().split("|", 2)
    assert kind == "NotReadyError" and "gated, and this account has no access" in message
    assert "https://huggingface.co/datasets/Idavidrein/gpqa" in hint and "--data" in hint
    assert not any("/resolve/" in line for line in asked)


@pytest.mark.parametrize("mode", [{}, {"HF_HUB_OFFLINE": "1"}], ids=["refused", "offline-mode"])
def test_without_a_network_the_hint_names_data(tmp_path: Path, mode: dict[str, str]):
    kind, message, hint = fetch("aime25", tmp_path, "http://127.0.0.1:9", **mode).strip().split("|", 2)
    assert kind == "DataUnreachable" and "cannot be reached" in message and "--data FILE" in hint
