"""``deepinfer chat`` through a pipe: turns build on each other, commands act, too long a conversation says so."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from deepinfer_cli.main import main
from deepinfer_engine.tokens.protocol import ChatCodec
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


def chat(model: Path, text: str, *args: str) -> int:
    stdin, sys.stdin = sys.stdin, io.StringIO(text)
    try:
        sets = ("--set", "sched.max_context_tokens=1024", "--set", "numerics.mode=float")
        return main(["chat", "--model", str(model), *sets, "--no-thinking", "--max-tokens", "6", *args])
    finally:
        sys.stdin = stdin


def test_turns_build_on_each_other(model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    seen: list[list[dict]] = []
    render = ChatCodec.render

    def spy(self: ChatCodec, messages: list[dict], **options):
        seen.append([dict(m) for m in messages])
        return render(self, messages, **options)

    monkeypatch.setattr(ChatCodec, "render", spy)
    assert chat(model, "hello\n\nagain\n/reset\nafresh\n/system Be brief.\nnow\n/exit\nnever read\n") == 0
    out, err = capsys.readouterr()
    turns = [
        messages for messages in seen if messages and messages[-1]["content"] in ("hello", "again", "afresh", "now")
    ]
    first, second, third, fourth = turns
    assert [m["role"] for m in first] == ["user"]
    assert [m["role"] for m in second] == ["user", "assistant", "user"]
    assert second[1]["content"] == out.split("\n")[0]
    assert [m["content"] for m in third] == ["afresh"]
    assert fourth == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "now"}]
    assert err.count("prompt + ") == 4 and "conversation forgotten" in err


def test_unknown_command_and_quiet(model: Path, capsys: pytest.CaptureFixture[str]):
    assert chat(model, "/what\nhello\n", "--quiet") == 0
    out, err = capsys.readouterr()
    assert "no command '/what'" in err and "prompt +" not in err and out.strip()


def test_conversation_that_no_longer_fits(model: Path, capsys: pytest.CaptureFixture[str]):
    assert chat(model, f"{'x ' * 900}\nhello\n") == 0
    out, err = capsys.readouterr()
    assert "the model has 1024 positions" in err and "/reset starts a new conversation" in err
    assert err.count("prompt + 6 tokens") == 1 or "prompt + " in err
    assert len(out.splitlines()) >= 1


def test_a_line_that_is_not_utf8_is_named(model: Path, capsys: pytest.CaptureFixture[str]):
    stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(b"hello\na\xff\n"), encoding="utf-8")
    try:
        sets = ("--set", "sched.max_context_tokens=1024", "--set", "numerics.mode=float")
        assert main(["chat", "--model", str(model), *sets, "--no-thinking", "--max-tokens", "6"]) == 2
    finally:
        sys.stdin = stdin
    assert "stdin: line 2 is not UTF-8 at character 2" in capsys.readouterr().err
