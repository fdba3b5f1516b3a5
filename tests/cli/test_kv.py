"""``deepinfer kv``: plans with reasons, and a store that is inspected, checked and cleaned."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deepinfer_cli import main as cli
from deepinfer_engine.cache.store.interface import StoreOptions, TrafficClass, open_store
from deepinfer_engine.cache.store.record import PAGE
from deepinfer_engine.cache.tiers import Payload

TINY = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"
REPLAY = ["--set", "replay.decoder=bounded", "--set", "cache.prefix=true", "--set", "replay.encoder=bounded"]


def run(args, capsys):
    code = cli.main([str(a) for a in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def explained(args, capsys):
    code, out, err = run(["kv", "explain", *args, "--format", "json"], capsys)
    assert (code, err) == (0, "")
    content = json.loads(out)
    assert content["schema"] == "deepinfer/kv-explain/1"
    return {row["field"]: (row["value"], row["reason"]) for row in content["rows"]}


def test_explain_prints_every_field_with_its_reason(capsys):
    fields = explained(["--length", 1000, "--hit", 896, "--no-swa", "--model", "deepseek-v4.1-flash", *REPLAY], capsys)
    values = {name: value for name, (value, _) in fields.items()}
    assert values["mode"] == "replay" and values["L1"] == 768 and values["replayed"] == 128
    assert (values["start"], values["pivot"], values["floor_encoder"], values["floor_decoder"]) == (640, 872, 640, 872)
    assert fields["chunks"] == (1, "sched.prefill_chunk_tokens 2048: [640, 1000)")
    assert all(reason for _, reason in fields.values())


def test_explain_follows_windows_model_and_profile(capsys):
    at_hand = explained(["--length", 1000, "--hit", 896, "--model", "deepseek-v4.1-flash", *REPLAY], capsys)
    assert at_hand["mode"][0] == "exact" and at_hand["start"][0] == 768
    off = explained(["--length", 1000, "--hit", 896, "--no-swa", "--model", "deepseek-v4.1-flash"], capsys)
    assert off["mode"] == ("cold", "no window KV ends at 768 and replay.encoder is off")
    tiny = explained(["--length", 1000, "--model", TINY, *REPLAY], capsys)
    assert tiny["cap"][0] == 896 and tiny["pivot"][0] == 984


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["kv", "explain", "--length", "0"], "at least one token, found 0"),
        (["kv", "explain", "--length", "9", "--hit", "5"], "whole 128-token blocks, found 5"),
        (["kv", "explain", "--length", "9", "--set", "replay.decoder=bounded", "--set",
          "sched.prefill_chunk_tokens=200"], "a chunk of 200 tokens is too small, replay needs 262"),
        (["kv", "stat"], "the profile has no store"),
        (["kv", "bench", "--path", ".", "--backend", "redis"], "expected segment or posix"),
    ],
)  # fmt: skip
def test_usage_errors_name_the_number(args, message, capsys):
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "") and message in err


@pytest.fixture(params=["segment", "posix"])
def filled(request, tmp_path):
    """A store of ten blocks, two of them long expired."""
    ttl: dict[TrafficClass, int] = {"agent": 3600, "chat": 360_000}
    for first, count, age in ((0, 8, 0), (8, 2, 100_000)):
        clock = time.time() - age
        store = open_store(StoreOptions(tmp_path, ttl, namespace=bytes(32)), request.param, lambda at=clock: at)
        for n in range(first, first + count):
            store.put(n.to_bytes(32, "little"), Payload(bytes([n]) * 1000), "agent")
        store.close()
    return tmp_path


def test_stat_verify_and_gc_of_a_store(filled, capsys):
    ttl = ["--set", "cache.store.ttl_s.agent=3600"]
    code, out, _ = run(["kv", "stat", "--path", filled, *ttl, "--format", "jsonl"], capsys)
    stat = json.loads(out)
    assert code == 0 and (stat["blocks"], stat["expired"]) == (10, 2)
    assert run(["kv", "verify", "--path", filled, *ttl], capsys)[0] == 0
    victim = next(p for p in sorted(filled.rglob("*")) if p.suffix in (".seg", ".kv"))
    data = bytearray(victim.read_bytes())
    data[PAGE + 3] ^= 4
    victim.write_bytes(data)
    code, out, err = run(["kv", "verify", "--path", filled, *ttl, "--format", "csv"], capsys)
    assert code == 6 and "payload CRC differs" in out and "1 of 10 blocks are wrong" in err and "--repair" in err
    code, out, err = run(["kv", "verify", "--path", filled, *ttl, "--format", "csv", "--repair"], capsys)
    assert code == 0 and "payload CRC differs" in out and "1 of 10 blocks were wrong and are deleted" in err
    code, out, err = run(["kv", "verify", "--path", filled, *ttl], capsys)
    assert code == 0 and "9 blocks are right" in err
    code, out, _ = run(["kv", "gc", "--path", filled, *ttl, "--format", "jsonl"], capsys)
    assert code == 0 and json.loads(out)["blocks"] in (1, 2)
    code, out, _ = run(["kv", "stat", "--path", filled, *ttl, "--format", "jsonl"], capsys)
    assert json.loads(out)["blocks"] in (7, 8) and json.loads(out)["expired"] == 0


def test_a_folder_without_a_store_is_refused(tmp_path, capsys):
    code, _, err = run(["kv", "gc", "--path", tmp_path], capsys)
    assert code == 2 and "no KV store here" in err


@pytest.mark.parametrize("backend", ["segment", "posix"])
def test_bench_measures_both_sides_and_leaves_nothing(backend, tmp_path, capsys):
    args = ["kv", "bench", "--path", tmp_path, "--backend", backend, "--rounds", "1", "--blocks", "16", "--depth", "2"]
    code, out, err = run([*args, "--format", "json"], capsys)
    assert code == 0 and "rounds of 16 blocks" in err
    names = [row["what"] for row in json.loads(out)["rows"]]
    assert names[:5] == ["fresh", "rewrite", "put", "read", "get"] and "ratio get / read" in names
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_bench_leaves_nothing(number, tmp_path):
    command = [sys.executable, "-m", "deepinfer_cli", "kv", "bench", "--path", tmp_path, "--rounds", "1000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob(".deepinfer-kv-*/plain-*")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err) == (130, "", "error: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("what", ["nowhere", "file"])
def test_a_bench_needs_a_folder(what, tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    code, out, err = run(["kv", "bench", "--path", tmp_path / what], capsys)
    assert (code, out) == (2, "") and "is not a folder" in err


@pytest.mark.bench
@pytest.mark.timeout(300)
def test_store_speed_beside_plain_io(tmp_path, capsys):
    code, out, _ = run(["kv", "bench", "--path", tmp_path, "--format", "json"], capsys)
    assert code == 0
    medians = {row["what"]: row["median"] for row in json.loads(out)["rows"]}
    print(out)
    assert medians["ratio get / read"] >= 0.8
    assert medians["ratio put / fresh"] >= 0.6
