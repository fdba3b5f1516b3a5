"""``run --nproc``: finished lines survive a lost rank, and the run goes on with those that are left."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.tiny_model import write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}", "OMP_NUM_THREADS": "1"}
#: equal answers in other batches are promised under invariance alone: torch's operations depend on the rows beside
ALONE = ["--set", "sched.max_context_tokens=1024", "--set", "numerics.batch_invariant=true"]
RANKS = ["--set", "parallel.redundant_experts_per_rank=4", *ALONE]

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model, and requests of which the first are short and the last are long."""
    write_tiny_model(tmp_path / "model")
    lines = [
        {"id": i, "token_ids": [4 + i, 9, 30 + i], "max_tokens": 4 if i < 3 else 300, "ignore_eos": True}
        for i in range(6)
    ]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def run(folder: Path, out: str, *args: str) -> list[str]:
    files = ["-f", str(folder / "in.jsonl"), "--out", str(folder / out), "--model", str(folder / "model")]
    return [sys.executable, "-m", "deepinfer_cli", "run", *files, *args]


def answers(path: Path) -> list[tuple[int, str]]:
    return [(line["id"], line["content"]) for line in map(json.loads, path.read_text().splitlines())]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kept(folder: Path) -> int:
    part = folder / "out.jsonl.part"
    return max(0, part.read_text().count("\n") - 1) if part.exists() else 0


def test_a_killed_rank_ends_with_7_keeps_lines_and_the_rest_goes_on(folder: Path):
    mesh = [*RANKS, "--set", "parallel.ep=2", "--set", "parallel.dp=2"]
    process = subprocess.Popen(
        run(folder, "out.jsonl", "--nproc", "2", *mesh), env=ENVIRONMENT, stderr=subprocess.PIPE, text=True
    )
    ends = time.monotonic() + 120
    while kept(folder) < 3 and process.poll() is None and time.monotonic() < ends:
        time.sleep(0.05)
    child = children(process.pid)[0]
    os.kill(child, signal.SIGKILL)
    killed = time.monotonic()
    _, said = process.communicate(timeout=60)
    assert time.monotonic() - killed < 30
    assert process.returncode == 7, said
    assert f"rank 1 (process {child} on 127.0.0.1) was lost: killed by SIGKILL" in said
    assert "of 6 lines are kept in" in said
    assert 3 <= kept(folder) < 6
    assert "with --resume --healthy N goes on over N ranks" in said

    same = run(folder, "out.jsonl", "--nproc", "2", "--healthy", "1", "--resume", *mesh)
    refused = subprocess.run(same, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2
    assert "--healthy 1: 1 of 2 ranks are left, which do not divide over 2 processes" in refused.stderr
    assert "hint: --nproc 1" in refused.stderr

    again = run(folder, "out.jsonl", "--healthy", "1", "--resume", *mesh)
    done = subprocess.run(again, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "re-formed: 1 of 2 ranks" in done.stderr and "resuming: 3 of 6 lines are done" in done.stderr
    alone = subprocess.run(run(folder, "alone.jsonl", *ALONE), env=ENVIRONMENT, capture_output=True, timeout=120)
    assert alone.returncode == 0
    assert answers(folder / "out.jsonl") == answers(folder / "alone.jsonl")


@pytest.mark.slow
def test_torchrun_starts_the_run_again_with_three_of_four_ranks(folder: Path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=3:4", "--nproc-per-node=1"]
    torchrun += ["--max-restarts=3", "--rdzv-backend=c10d", "--rdzv-id=test", "--monitor-interval=0.2"]
    torchrun += [f"--rdzv-endpoint=localhost:{port}", "--rdzv-conf=last_call_timeout=8,keep_alive_interval=1"]
    mesh = [*RANKS, "--set", "parallel.ep=4", "--set", "parallel.dp=4", "--healthy", "world", "--resume"]
    command = [*torchrun, *run(folder, "out.jsonl", *mesh)[1:]]
    agents: list[subprocess.Popen[str]] = [
        subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    ]
    time.sleep(4)  # the first agent hosts the rendezvous
    agents += [
        subprocess.Popen(command, env=ENVIRONMENT, stderr=subprocess.DEVNULL, text=True, start_new_session=True)
        for _ in range(3)
    ]
    ends = time.monotonic() + 120
    while kept(folder) < 3 and time.monotonic() < ends:
        time.sleep(0.1)
    for pid in (agents[3].pid, *children(agents[3].pid)):  # the host is lost: the agent with its worker
        os.kill(pid, signal.SIGKILL)
    _, said = agents[0].communicate(timeout=150)
    assert agents[0].returncode == 0, said
    assert "re-formed: 3 of 4 ranks" in said and "resuming: 3 of 6 lines are done" in said
    for agent in agents[1:3]:
        agent.wait(30)
    alone = subprocess.run(run(folder, "alone.jsonl", *ALONE), env=ENVIRONMENT, capture_output=True, timeout=120)
    assert alone.returncode == 0
    assert answers(folder / "out.jsonl") == answers(folder / "alone.jsonl")
