"""``deepinfer fetch-weights``: what goes where, exit codes and messages, progress on a terminal and in a log."""

from __future__ import annotations

import json
import os
import pty
import random
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

from deepinfer_cli import main as cli
from deepinfer_cli.transfer_progress import Lines, duration_text, size_text
from deepinfer_engine.weights.fetch import job
from deepinfer_engine.weights.fetch.lock import destination_lock
from tests.stub_hub import REPO, Fault, StubHub

ROOT = Path(__file__).resolve().parents[2]
TEXTS = Path(__file__).parent / "texts"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def hub(monkeypatch, tmp_path):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.chdir(tmp_path)
    files = {A: random.Random(1).randbytes(150_000), B: random.Random(2).randbytes(50_000), "README.md": b"# it\n"}
    with StubHub(files) as stub:
        monkeypatch.setattr(constants, "ENDPOINT", stub.url)
        yield stub


@pytest.fixture
def run(capsys):
    def call(*args: str):
        code = cli.main(["fetch-weights", REPO, *args])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def process(hub: StubHub, *args: str, **options) -> subprocess.Popen:
    paths = os.pathsep.join(str(p) for p in (ROOT, ROOT / "engine", ROOT / "kernels"))
    env = os.environ | {"PYTHONPATH": paths, "HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1"}
    command = [sys.executable, "-m", "deepinfer_cli", "fetch-weights", REPO, *args]
    return subprocess.Popen(command, env=env, text=True, **options)


def test_help_text_is_the_kept_one(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.main(["fetch-weights", "--help"]) == 0
    assert capsys.readouterr().out == (TEXTS / "help_fetch_weights.txt").read_text(encoding="utf-8")


def test_dry_run_prints_the_table_and_writes_nothing(hub, run, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "_free_bytes", lambda dest: 2_000_000_000)
    code, out, err = run("--dry-run")
    assert code == 0
    assert out == (
        "file                              groups  state     bytes  fetch_bytes\n"
        "README.md                         -       missing       5            5\n"
        f"{A}  -       missing  150000       150000\n"
        f"{B}  -       missing   50000        50000\n"
        "\n"
        f"{REPO} at c0ffee000000 (main), everything\n"
        f"3 files, 200 kB; 200 kB to fetch, 2.00 GB free at {tmp_path / 'model'}\n"
    )
    assert err == f"groups are not known: {REPO} at c0ffee000000 holds no config.json\n"
    assert not any(tmp_path.iterdir())
    assert not hub.sent


def test_dry_run_ends_as_the_fetch_would_when_the_disk_is_too_small(hub, run, monkeypatch):
    monkeypatch.setattr(job, "_free_bytes", lambda dest: 1000)
    for args in (["--dry-run"], []):
        code, out, err = run(*args)
        assert code == 3
        assert "200 kB to fetch, 1.00 kB free" in out
        assert "need 200005 bytes (0.0 GB), have 1000 (0.0 GB) free" in err
        assert "hint: free some space" in err
    assert not hub.sent


def test_fetch_says_at_the_end_what_it_did(hub, run, tmp_path):
    code, out, err = run("--dest", "there")
    assert code == 0
    table, _, last = out.rstrip("\n").rpartition("\n")
    assert "missing  150000" in table
    where = tmp_path / "there"
    assert last == f"3 files, 200 kB, hashes as listed at c0ffee000000: 3 fetched now, 0 were there; in {where}"
    assert re.search(rf"^{A}: fetched 150 kB in \d+\.\d s$", err, re.MULTILINE)
    assert (where / A).read_bytes() == hub.files[A]
    code, out, err = run("--dest", "there", "--quiet")
    assert (code, err) == (0, "")
    assert "0 fetched now, 3 were there" in out


def test_json_is_one_document_with_the_final_states(hub, run, tmp_path):
    code, out, _ = run("--format", "json", "--quiet", "--out", "result.json")
    assert (code, out) == (0, "")
    document = json.loads((tmp_path / "result.json").read_text())
    assert document["schema"] == "deepinfer/fetch-weights/1"
    assert (document["total_bytes"], document["fetch_bytes"]) == (200_005, 0)
    assert document["selection"] == {"groups": None, "ep": None, "rank": None}
    assert {f["path"]: f["state"] for f in document["files"]} == dict.fromkeys(hub.files, "fetched")
    assert document["files"][1]["digest"].startswith("sha256:")
    assert document["files"][0]["digest"].startswith("git-sha1:")


def test_verify_and_repair(hub, run, tmp_path):
    assert run("--verify")[0] == 3
    assert not any(tmp_path.iterdir())
    assert run()[0] == 0
    code, out, _ = run("--verify")
    assert code == 0 and out.count("checked") == 3
    (tmp_path / "model" / B).write_bytes(b"x" * 50_000)
    code, out, err = run("--verify", "--quiet")
    assert code == 4
    assert f"{B}  -       wrong" in out
    assert f"  {B}: not the content that the commit lists (50000 bytes, sha256:" in err
    assert "hint: add --repair" in err
    assert run("--quiet")[0] == 4
    code, out, _ = run("--repair")
    assert code == 0 and "1 fetched now, 2 were there" in out
    assert run("--verify")[0] == 0


def test_offline_checks_and_names_what_is_missing(hub, run, tmp_path, monkeypatch):
    assert run()[0] == 0
    hub.requests.clear()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, out, _ = run()
    assert code == 0 and out.count("checked") == 3
    (tmp_path / "model" / A).unlink()
    code, _, err = run()
    assert code == 3
    assert err.endswith(f"1 of 3 files are missing, 150000 bytes to fetch\n  {A}\n\n"
                        "hint: unset HF_HUB_OFFLINE and run it again\n")  # fmt: skip
    assert run("--repair")[0] == 3
    assert run("--dest", "elsewhere")[0] == 3
    assert hub.requests == []


def test_gated_repository_names_its_page(hub, run):
    hub.gate = lambda headers: Fault(status=403, headers=(("X-Error-Code", "GatedRepo"),))
    code, out, err = run()
    assert (code, out) == (3, "")
    assert err == (
        f"error: {REPO} is gated and this account has no access (403)\n\n"
        f"hint: ask for access at {hub.url}/{REPO}, then log in with `hf auth login` or set HF_TOKEN to a token that "
        "may read it\n"
    )


def test_exit_codes_of_failures(hub, run):
    hub.faults[A] = [Fault(how="flip")]
    code, _, err = run()
    assert code == 4 and f"{A}: the fetched bytes do not have the listed hash" in err
    hub.faults[A] = [Fault(how="hang")]
    code, _, err = run("--stall-s", "1", "--retries", "0", "--quiet")
    assert code == 5 and "gave up after 1 attempts" in err
    hub.faults[A] = [Fault(how="drop")]
    code, _, err = run("--retries", "0", "--quiet")
    assert code == 3 and "what is fetched is kept: run the same command again" in err
    assert run()[0] == 0


@pytest.mark.parametrize(
    ("args", "text"),
    [
        (["--groups", "draft,body"], "no group 'body'"),
        (["--groups", ","], "no group is named"),
        (["--ep", "8"], "both --ep and --rank"),
        (["--ep", "8", "--rank", "9"], "expected 0 to 7"),
        (["--dry-run", "--verify"], "--dry-run does not hash"),
        (["--format", "csv"], "fetch-weights has no --format csv"),
        (["--connections", "0"], "--connections"),
    ],
)
def test_command_line_that_cannot_be_honoured_is_exit_2(hub, run, args, text):
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert text in err
    assert hub.requests == []


def test_second_fetch_with_no_wait_names_the_holder(hub, run, tmp_path):
    with destination_lock(tmp_path / "model", wait=False, note=print):
        code, _, err = run("--no-wait")
    assert code == 3
    assert f"is being fetched by process {os.getpid()} on" in err


def test_interrupt_is_exit_130_at_once_and_the_next_run_continues(hub, run, tmp_path):
    hub.faults[A], hub.forever = [Fault(how="hang", after=100_000)], {A}
    running = process(hub, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    while hub.sent[A] < 100_000:
        time.sleep(0.01)
    time.sleep(0.2)
    started = time.monotonic()
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=20)
    assert running.returncode == 130
    assert time.monotonic() - started < 5  # not the time-out of the connection that hangs
    assert "error: interrupted; what was fetched is kept\n\nhint: run the same command again, it continues\n" in err
    hub.faults.clear()
    assert run()[0] == 0
    assert hub.sent[A] == 150_000


def test_bars_are_on_stderr_of_a_terminal_and_the_table_on_stdout(hub, tmp_path):
    hub.rate_bytes_s = 150_000
    ours, theirs = pty.openpty()
    shown: list[bytes] = []

    def read():
        while True:
            try:
                block = os.read(ours, 65536)
            except OSError:  # the other side is closed
                return
            if not block:
                return
            shown.append(block)

    running = process(hub, cwd=tmp_path, stdout=subprocess.PIPE, stderr=theirs)
    os.close(theirs)
    reader = threading.Thread(target=read)
    reader.start()
    out, _ = running.communicate(timeout=30)
    reader.join(10)
    os.close(ours)
    text = b"".join(shown).decode(errors="replace")
    assert running.returncode == 0
    assert out.startswith("file ") and out.rstrip().endswith("model") and "total" not in out
    assert "total fetched" in text and f"fetch {A}" in text and "ETA" in text and "150.0 kB" in text


# ------------------------------------------------------------------------ lines


def test_summary_line_tells_amount_speed_and_time_left():
    lines = Lines()
    lines._past.append((100.0, 0))
    lines.expect("fetch", 510_286_023_000)
    lines.begin("fetch", A, 7_389_500_888, 0)
    lines.advance("fetch", A, 12_000_000_000)
    assert lines.summary(110.0) == "fetched 12.0 GB of 510 GB (2 %), 1.20 GB/s, ETA 6 min 55 s; 1 file open"
    lines.expect("check", 7_000_000_000)
    lines.advance("check", A, 3_500_000_000)
    assert lines.summary(120.0) == (
        "fetched 12.0 GB of 510 GB (2 %), 600 MB/s, ETA 13 min 50 s; checked 3.50 GB of 7.00 GB; 1 file open"
    )


def test_silence_shows_as_an_unknown_time_left():
    lines = Lines()
    lines._past.append((100.0, 0))
    lines.expect("fetch", 1000)
    assert "0 B/s, ETA unknown" in lines.summary(110.0)


def test_lines_come_while_nothing_arrives(capsys):
    lines = Lines(every_s=0.02)
    lines.expect("fetch", 1000)
    lines.start()
    time.sleep(0.15)
    lines.stop()
    assert capsys.readouterr().err.count("fetched 0 B of 1.00 kB (0 %)") >= 2


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (7_389_500_888, "7.39 GB"), (101_535_150_272, "102 GB")],
)
def test_sizes_are_decimal_with_three_digits(value, text):
    assert size_text(value) == text


@pytest.mark.parametrize(("value", "text"), [(45.4, "45 s"), (725, "12 min 05 s"), (12_000, "3 h 20 min")])
def test_durations(value, text):
    assert duration_text(value) == text
