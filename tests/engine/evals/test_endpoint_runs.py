"""Runs against a scripted endpoint: retries, truncation, errors, judging, and a log that survives kill -9."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError
from deepinfer_engine.evals.endpoint import EndpointBackend
from deepinfer_engine.evals.items import Item, ItemSet
from deepinfer_engine.evals.judge import Judge
from deepinfer_engine.evals.log import LogContent, SampleLog, choose_log, digest_of, read_log
from deepinfer_engine.evals.prompt import Plan
from deepinfer_engine.evals.report import compared, document, summary_of
from deepinfer_engine.evals.run import Job, run
from deepinfer_engine.evals.score import Sample
from deepinfer_engine.evals.task import LoadedTask, Sampling, find_task
from deepinfer_engine.remote.client import Client, Endpoint, check_url
from tests.engine.evals.scripted_endpoint import Script, Turn, serving

ROOT = Path(__file__).resolve().parents[3]


def arithmetic(count: int) -> ItemSet:
    items = tuple(Item(f"q{i}", f"{i}+{i}?", str(2 * i)) for i in range(count))
    return ItemSet("made", None, "0" * 64, items)


def right(text: str) -> str:
    return f"\\boxed{{{2 * int(text.split('+')[0])}}}"


def perfect(text: str, seed: int, before: int) -> Turn:
    return Turn(right(text))


def quiet(done: int, total: int, correct: int, graded: int) -> None:
    pass


def task(name: str = "nano-arith") -> LoadedTask:
    return find_task(name)


class Runner:
    """One way to run ``count`` questions against a script, with short waits."""

    def __init__(self, folder: Path, count: int = 6, k: int = 1):
        self.job = Job(task(), arithmetic(count), Plan(Sampling(), tuple(range(k))))
        self.log = folder / "log.jsonl"

    def backend(self, url: str, **changes: Any) -> EndpointBackend:
        settings: dict[str, Any] = {"timeout_s": 5.0, "attempts": 4, "first_wait_s": 0.01} | changes
        concurrency = settings.pop("concurrency", 4)
        extra = settings.pop("extra", {})
        client = Client(Endpoint(url, "scripted", **settings))
        return EndpointBackend(client, self.job.plan.sampling, concurrency=concurrency, extra=extra)

    def run(self, url: str, **changes: Any) -> LogContent:
        backend = self.backend(url, **changes)
        # the address of a test server changes, the deployment it stands for does not
        identity = self.job.identity(backend.identity() | {"url": "scripted"})
        with SampleLog(self.log, identity) as log:
            return run(self.job, backend, log, quiet)


def outcomes(content: LogContent) -> dict[str, int]:
    return {name: n for name, n in summary_of(content).outcomes.items() if n}


def keys_in(log: Path) -> list[str]:
    records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()[1:]]
    return [f"{r['item']}/{r['sample']}" for r in records]


def test_a_perfect_model_scores_all_and_every_sample_is_asked_once(tmp_path: Path):
    runner = Runner(tmp_path, count=10, k=3)
    with serving(perfect) as endpoint:
        content = runner.run(endpoint.url, concurrency=4)
    assert outcomes(content) == {"correct": 30}
    assert set(endpoint.asked.values()) == {1} and len(endpoint.asked) == 30
    assert 2 <= endpoint.most_in_flight <= 4
    assert sorted(keys_in(runner.log)) == sorted(f"q{i}/{j}" for i in range(10) for j in range(3))
    body = endpoint.bodies[0]
    assert body["temperature"] == 1.0 and body["reasoning_effort"] == "high" and body["stream"] is False
    assert {b["seed"] for b in endpoint.bodies} == {0, 1, 2}


@pytest.mark.parametrize(
    "first",
    [
        Turn(status=429),
        Turn(status=429, headers={"Retry-After": "0"}),
        Turn(status=500),
        Turn(status=503),
        Turn(drop=True),
        Turn(wait_s=3.0),
    ],
    ids=["429", "429-retry-after", "500", "503", "dropped", "time-out"],
)
def test_what_may_pass_is_tried_again(tmp_path: Path, first: Turn):
    def flaky(text: str, seed: int, before: int) -> Turn:
        return first if before == 0 else perfect(text, seed, before)

    runner = Runner(tmp_path, count=4)
    with serving(flaky) as endpoint:
        content = runner.run(endpoint.url, timeout_s=0.3)
    assert outcomes(content) == {"correct": 4}
    assert set(endpoint.asked.values()) == {2}
    assert {r["attempts"] for r in content.records.values()} == {2}


def mixed(text: str, seed: int, before: int) -> Turn:
    number = int(text.split("+")[0])
    return {
        0: Turn(right(text)),
        1: Turn("\\boxed{7}"),
        2: Turn("I would say it is about four."),
        3: Turn(f"first {right(text)}", finish="length"),
        4: Turn(status=400),
        5: Turn(status=500),
        6: Turn("<think>so \\boxed{12}"),
        7: Turn(None, reasoning="\\boxed{14}"),
        8: Turn(right(text), finish="content_filter"),
        9: Turn(raw=b"not json"),
        10: Turn(raw=b'{"choices": []}'),
    }[number]


def test_outcomes_are_counted_apart_and_add_up(tmp_path: Path):
    runner = Runner(tmp_path, count=11)
    with serving(mixed) as endpoint:
        content = runner.run(endpoint.url)
    assert outcomes(content) == {"correct": 1, "wrong": 1, "unparsed": 3, "truncated": 1, "errored": 5}
    found = document(content, runner.log)
    assert sum(found["outcomes"].values()) == found["samples"] == 11
    assert found["avg_at_k"]["of"] == 6, "errored samples are not in the score, truncated and unparsed ones are"
    errors = {r["item"]: r["error"] for r in content.records.values() if r["outcome"] == "errored"}
    assert "status 400: scripted status 400" in errors["q4"]
    assert endpoint.asked["4+4?", 0] == 1, "a refusal is not repeated"
    assert endpoint.asked["5+5?", 0] == 4
    assert "not JSON" in errors["q9"] and "exactly one choice" in errors["q10"] and "content_filter" in errors["q8"]


def test_errored_samples_are_tried_again_and_nothing_else_is(tmp_path: Path):
    runner = Runner(tmp_path, count=11)
    with serving(mixed) as endpoint:
        runner.run(endpoint.url)
    with serving(perfect) as endpoint:
        content = runner.run(endpoint.url)
    assert sorted(text for text, _ in endpoint.asked) == ["10+10?", "4+4?", "5+5?", "8+8?", "9+9?"]
    assert outcomes(content) == {"correct": 6, "wrong": 1, "unparsed": 3, "truncated": 1}
    assert outcomes(read_log(runner.log)) == outcomes(content)


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_every_request_would_meet_ends_the_run(tmp_path: Path, status: int):
    with serving(lambda *_: Turn(status=status)) as endpoint, pytest.raises(NotReadyError) as caught:
        Runner(tmp_path, count=50).run(endpoint.url)
    assert caught.value.exit_code == 3
    assert sum(endpoint.asked.values()) <= 8


def test_an_endpoint_that_is_not_there_ends_the_run(tmp_path: Path):
    with pytest.raises(NotReadyError, match="cannot connect"):
        Runner(tmp_path).run("http://127.0.0.1:9/v1", attempts=2)


def test_the_key_is_sent_and_kept_out_of_the_log(tmp_path: Path):
    runner = Runner(tmp_path)
    with serving(perfect) as endpoint:
        runner.run(endpoint.url, key="secret-key", extra={"thinking": None, "top_k": 20})
    assert endpoint.keys == {"Bearer secret-key"}
    assert "secret-key" not in runner.log.read_text()
    assert "secret-key" not in repr(runner.backend("http://x/v1", key="secret-key")._client.endpoint)
    assert all("thinking" not in b and b["top_k"] == 20 for b in endpoint.bodies)


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", "http://me:pw@host/v1", "http://host/v1?x=1"])
def test_urls_that_are_no_base_url_are_refused(url: str):
    with pytest.raises(UsageError):
        check_url(url)


def test_redirects_are_not_followed(tmp_path: Path):
    with serving(lambda *_: Turn(status=307, headers={"Location": "http://127.0.0.1:9/"})) as endpoint:
        content = Runner(tmp_path, count=1).run(endpoint.url, key="secret-key")
    assert outcomes(content) == {"errored": 1}


# ----------------------------------------------------------------------- log


def test_a_half_written_line_is_cut_off_and_its_sample_runs_again(tmp_path: Path):
    runner = Runner(tmp_path, count=6)
    with serving(perfect) as endpoint:
        runner.run(endpoint.url)
    whole = runner.log.read_bytes()
    lines = whole.splitlines(keepends=True)
    for cut in (len(lines[0]) // 2, len(lines[0]), len(whole) - 1, len(whole) - 40, len(b"".join(lines[:4])) + 1):
        runner.log.write_bytes(whole[:cut])
        with serving(perfect) as endpoint:
            content = runner.run(endpoint.url)
        assert outcomes(content) == {"correct": 6}
        assert sorted(keys_in(runner.log)) == sorted(f"q{i}/0" for i in range(6))
        kept = max(0, whole[:cut].count(b"\n") - 1)
        assert sum(endpoint.asked.values()) == 6 - kept


def test_a_log_of_another_run_is_not_continued(tmp_path: Path):
    runner = Runner(tmp_path)
    with serving(perfect) as endpoint:
        runner.run(endpoint.url)
        runner.job = Job(task(), arithmetic(6), Plan(Sampling(temperature=0.5), (0,)))
        with pytest.raises(UsageError, match="belongs to another run; sampling differ"):
            runner.run(endpoint.url)


def test_two_processes_cannot_write_one_log(tmp_path: Path):
    identity = {"task": "t", "items": 1, "seeds": [0]}
    with SampleLog(tmp_path / "log", identity), pytest.raises(UsageError, match="another process"):
        SampleLog(tmp_path / "log", identity)


def test_a_file_that_is_no_log_is_left_alone(tmp_path: Path):
    path = tmp_path / "notes"
    for text in ("my notes", "my notes\n"):
        path.write_text(text)
        with pytest.raises((UsageError, ArtefactError)):
            SampleLog(path, {"task": "t", "items": 1, "seeds": [0]})
        assert path.read_text() == text


def test_a_damaged_line_is_named(tmp_path: Path):
    path = tmp_path / "log"
    with SampleLog(path, {"task": "t", "items": 1, "seeds": [0]}) as log:
        log.append({"item": "q", "sample": 0, "outcome": "splendid"})
    with pytest.raises(ArtefactError, match="log:2: not a sample"):
        read_log(path)


def test_the_unfinished_log_is_found_again_and_a_complete_one_is_not(tmp_path: Path):
    identity = {"task": "t", "items": 2, "seeds": [0]}
    first = choose_log(tmp_path, identity, "20260101-000000")
    assert digest_of(identity)[:8] in first.name
    with SampleLog(first, identity) as log:
        log.append({"item": "a", "sample": 0, "outcome": "correct"})
    assert choose_log(tmp_path, identity, "20260101-000001") == first
    with SampleLog(first, identity) as log:
        log.append({"item": "b", "sample": 0, "outcome": "wrong"})
    later = choose_log(tmp_path, identity, "20260101-000001")
    assert later != first and not later.exists()
    assert choose_log(tmp_path, identity, "20260101-000000") != first, "same second, another name"
    assert choose_log(tmp_path, identity | {"items": 3}, "20260101-000001") != first


def test_a_killed_run_goes_on_without_loss_or_doubles(tmp_path: Path):
    """kill -9 at different moments of a run in its own process; every sample ends up in the log once."""
    questions = tmp_path / "q.jsonl"
    questions.write_text(
        "".join(json.dumps({"id": f"q{i}", "question": f"{i}+{i}?", "answer": str(2 * i)}) + "\n" for i in range(40))
    )

    def slow(text: str, seed: int, before: int) -> Turn:
        return Turn(right(text), wait_s=0.03)

    log = tmp_path / "log.jsonl"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))}
    with serving(slow) as endpoint:
        command = [
            sys.executable, "-m", "deepinfer_cli", "eval", "nano-arith", "--data", str(questions), "--endpoint",
            endpoint.url, "--k", "2", "--temperature", "1", "--log", str(log), "--concurrency", "4", "--format", "json",
        ]  # fmt: skip
        for wanted in (5, 30):
            process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            deadline = time.monotonic() + 30
            while lines_of(log) < wanted + 1 and time.monotonic() < deadline:
                time.sleep(0.005)
            process.send_signal(signal.SIGKILL)
            process.communicate(timeout=10)
            assert process.returncode == -signal.SIGKILL
            assert wanted <= lines_of(log) - 1 < 80
        safe = set(keys_in_torn(log))
        asked = Counter(endpoint.asked)
        done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["samples"] == 80 and found["outcomes"]["correct"] == 80 and found["avg_at_k"]["value"] == 1.0
    assert "continuing" in done.stderr
    keys = keys_in(log)
    assert len(keys) == len(set(keys)) == 80
    again = {f"q{text.split('+')[0]}/{seed}" for (text, seed), n in endpoint.asked.items() if n > asked[text, seed]}
    assert again.isdisjoint(safe) and again | safe == set(keys)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def keys_in_torn(path: Path) -> list[str]:
    whole = path.read_bytes().rpartition(b"\n")[0].splitlines()[1:]
    return [f"{r['item']}/{r['sample']}" for r in map(json.loads, whole)]


def test_an_interrupt_ends_a_run_at_once_though_answers_hang(tmp_path: Path):
    log = tmp_path / "log.jsonl"
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))}

    def one_then_none(text: str, seed: int, before: int) -> Turn:
        return Turn("\\boxed{29}", wait_s=0 if text == "10+19?" else 60)

    with serving(one_then_none) as endpoint:
        command = [
            sys.executable, "-m", "deepinfer_cli", "eval", "nano-arith", "--endpoint", endpoint.url, "--log", str(log)
        ]  # fmt: skip
        process = subprocess.Popen(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        deadline = time.monotonic() + 30
        while lines_of(log) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=10)
    assert process.returncode == 130
    assert b"interrupted; finished samples are in" in stderr and b"the same command continues" in stderr
    assert keys_in(log) == ["10+19/0"]


# --------------------------------------------------------------------- judge


def judged(tmp_path: Path, script: Script, answers: Sequence[Turn]) -> tuple[LogContent, list[dict[str, Any]]]:
    items = ItemSet("made", None, "0" * 64, tuple(Item(f"q{i}", f"Why {i}?", "because") for i in range(len(answers))))
    with serving(lambda text, *_: answers[int(text.split()[1].split("?")[0])]) as endpoint, serving(script) as judge:
        judge_client = Client(Endpoint(judge.url, "referee", attempts=2, first_wait_s=0.01))
        job = Job(task("hle"), items, Plan(Sampling(), (0,)), Judge(judge_client))
        client = Client(Endpoint(endpoint.url, "scripted", attempts=2, first_wait_s=0.01))
        backend = EndpointBackend(client, Sampling(), concurrency=4, extra={})
        with SampleLog(tmp_path / "log", job.identity(backend.identity())) as log:
            return run(job, backend, log, quiet), judge.bodies


def test_a_judge_decides_and_its_silence_is_an_error(tmp_path: Path):
    def referee(text: str, seed: int, before: int) -> Turn:
        answer = text.split("Response:\n")[1].split("\n")[0]
        return {
            "yes": Turn('```json\n{"final_answer": "because", "correct": true}\n```'),
            "no": Turn('{"final_answer": "never", "correct": false}'),
            "hm": Turn('{"final_answer": "", "correct": false}'),
            "odd": Turn("It is correct, I think."),
            "text": Turn('{"final_answer": "x", "correct": "true"}'),
            "broken": Turn(status=500),
        }[answer]

    answers = [Turn(t) for t in ("yes", "no", "hm", "odd", "text", "broken")]
    content, bodies = judged(tmp_path, referee, [*answers, Turn("cut", finish="length"), Turn("")])
    assert outcomes(content) == {"correct": 1, "wrong": 1, "unparsed": 2, "truncated": 1, "errored": 3}
    assert all(b["temperature"] == 0 and b["model"] == "referee" for b in bodies)
    assert {r["error"] for r in content.records.values() if r["outcome"] == "errored"} == {
        "judge: the reply holds no verdict",
        "judge: status 500: scripted status 500",
    }
    assert content.identity["judge"]["model"] == "referee"


def test_without_a_judge_answers_stay_ungraded(tmp_path: Path):
    items = ItemSet("made", None, "0" * 64, (Item("q0", "Why?", "because"),))
    job = Job(task("hle"), items, Plan(Sampling(), (0,)))
    with serving(lambda *_: Turn("Answer: because")) as endpoint:
        client = Client(Endpoint(endpoint.url, "scripted"))
        backend = EndpointBackend(client, Sampling(), concurrency=1, extra={})
        with SampleLog(tmp_path / "log", job.identity(backend.identity())) as log:
            content = run(job, backend, log, quiet)
    assert outcomes(content) == {"ungraded": 1}
    assert document(content, tmp_path / "log")["avg_at_k"]["value"] is None


# ----------------------------------------------------------------- comparing


def test_runs_over_other_questions_are_not_compared(tmp_path: Path):
    def content(**changes: Any) -> LogContent:
        base = {"task": "t", "task_digest": "d", "data_sha256": "s", "judge": None, "items": 1, "seeds": [0]}
        return LogContent(base | changes, {"q/0": {"item": "q", "sample": 0, "outcome": "correct"}}, 0)

    assert compared(content(), content(backend="other")).same == 1
    for key in ("task", "task_digest", "data_sha256"):
        with pytest.raises(UsageError, match=f"differ in {key}"):
            compared(content(), content(**{key: "x"}))
    assert content().samples() == [Sample("q", 0, "correct")]


def test_asking_an_endpoint_needs_no_torch():
    code = (
        "import sys, deepinfer_cli.commands.eval, deepinfer_engine.evals.run, deepinfer_engine.evals.endpoint, "
        "deepinfer_engine.evals.report; sys.exit('torch' in sys.modules)"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))}
    assert subprocess.run([sys.executable, "-c", code], env=env, timeout=60, check=False).returncode == 0
