"""``deepinfer eval`` from the command line: results, exit codes, the shipped replacement, the matrix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from deepinfer_cli.commands.eval_output import Meter
from deepinfer_cli.main import main
from deepinfer_engine import launch
from deepinfer_engine.evals import hub, matrix
from deepinfer_engine.evals.log import LogContent
from deepinfer_engine.evals.matrix import AXES, Cell, cells, judge
from tests.engine.evals.scripted_endpoint import Turn, serving
from tests.tiny_model import write_tiny_model

ROOM = ["--set", "sched.max_context_tokens=2048", "--max-tokens", "8"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny", max_position_embeddings=2048)


@pytest.fixture(autouse=True)
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are written to the current folder."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(data: object) -> Path:
        raise hub.DataUnreachable("the hub cannot be reached", hint="give the questions with --data FILE")

    monkeypatch.setattr(hub, "fetch", fetch)
    monkeypatch.setattr(hub, "cached", lambda data: None)


HELP = Path(__file__).parent / "texts" / "help_eval.txt"
Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    def run(*args: str) -> tuple[int, str, str]:
        code = main(["eval", *map(str, args)])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run


def logs(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("eval-*.jsonl"))


def test_help_text_is_the_kept_one(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    """``python -m deepinfer_cli eval --help > tests/cli/texts/help_eval.txt`` writes it anew."""
    monkeypatch.setenv("COLUMNS", "100")
    assert cli("--help")[1] == HELP.read_text(encoding="utf-8")


def arithmetic_answer(text: str) -> str:
    expression = text.rstrip("?")
    sign = "-" if "-" in expression else "+"
    a, b = map(int, expression.split(sign))
    return str(a + b if sign == "+" else a - b)


def calculator(text: str, seed: int, before: int) -> Turn:
    return Turn(f"{text.rstrip('?')}={arithmetic_answer(text)}")


def wrong_where(test: Callable[[str], bool]):
    return lambda text, seed, before: Turn("\\boxed{1000}") if test(text) else calculator(text, seed, before)


# ------------------------------------------------------------------- listing


def test_list_shows_every_task_in_every_form(cli: Cli):
    code, out, _ = cli("list")
    assert code == 0
    for name in ("aime26", "gpqa", "hle", "math500", "gsm8k", "nano-arith", "nano-retrieval", "nano-json", "aime-form"):
        assert f"\n{name} " in out
    rows = json.loads(cli("list", "--format", "json")[1])["rows"]
    assert {r["task"]: r["questions"] for r in rows}["aime-form"] == 30
    assert cli("list", "--format", "csv")[1].startswith("task,aliases,questions")


# ----------------------------------------------------------------- endpoints


def test_a_right_deployment_passes_and_says_so(cli: Cli, tmp_path: Path):
    with serving(calculator) as endpoint:
        code, out, err = cli("nano-arith", "--endpoint", endpoint.url, "--expect", ">=0.9")
    assert code == 0, err
    assert "nano-arith: 100.0 % (avg@1, 200 of 200 samples), 95 % 98.1 to 100.0 %" in out
    assert "inside the interval" in out and "seeds      0" in out
    assert [name.startswith("eval-nano-arith-") for name in logs(tmp_path)] == [True]


def test_json_is_strict_and_holds_the_identity(cli: Cli):
    with serving(calculator) as endpoint:
        _, out, _ = cli("nano-arith", "--endpoint", endpoint.url, "--limit", "20", "--format", "json", "--quiet")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert found["schema"] == "deepinfer/eval/1"
    assert found["avg_at_k"] == {
        "value": 1.0,
        "low": pytest.approx(0.8389, abs=1e-4),
        "high": 1.0,
        "hits": 20,
        "of": 20,
    }
    assert found["identity"]["backend"] == {"kind": "endpoint", "url": endpoint.url, "model": "scripted", "body": {}}
    assert sum(found["outcomes"].values()) == found["samples"] == 20


def test_a_score_outside_the_interval_is_exit_6_and_goes_before_errors(cli: Cli):
    with serving(wrong_where(lambda text: "-" in text)) as endpoint:
        args = ("nano-arith", "--endpoint", endpoint.url, "--limit", "30")
        code, _, err = cli(*args, "--log", "one.jsonl", "--expect", "0.99")
        assert code == 6 and "lies below 99.0 %" in err
        code, _, err = cli("report", "--log", "one.jsonl", "--expect", "0.01")
        assert code == 6 and "lies above 1.0 %" in err

    def broken(text: str, seed: int, before: int) -> Turn:
        return Turn(status=400) if "-" in text else Turn("\\boxed{1000}")

    with serving(broken) as endpoint:
        args = ("nano-arith", "--endpoint", endpoint.url, "--limit", "30")
        assert cli(*args, "--log", "two.jsonl", "--expect", "0.99")[0] == 6
        assert cli("report", "--log", "two.jsonl")[0] == 5


def test_errored_samples_are_exit_5_and_the_same_command_heals_them(cli: Cli, tmp_path: Path):
    sick = [True]

    def script(text: str, seed: int, before: int) -> Turn:
        return Turn(status=400) if text < "12" and sick[0] else calculator(text, seed, before)

    with serving(script) as endpoint:
        code, out, err = cli("nano-arith", "--endpoint", endpoint.url, "--limit", "60")
        assert code == 5 and "samples errored" in err and "status 400" in out
        sick[0] = False
        asked = sum(endpoint.asked.values())
        code, out, err = cli("nano-arith", "--endpoint", endpoint.url, "--limit", "60")
        assert code == 0 and "continuing" in err and "60 of 60" in out
        assert asked < sum(endpoint.asked.values()) < asked + 50
    assert len(logs(tmp_path)) == 1


def test_a_complete_log_is_reported_but_never_taken_for_a_new_run(cli: Cli):
    with serving(calculator) as endpoint:
        args = ("nano-arith", "--endpoint", endpoint.url, "--limit", "5")
        assert cli(*args, "--log", "mine.jsonl")[0] == 0
        code, _, err = cli(*args, "--log", "mine.jsonl")
        assert code == 2 and "nothing would be run" in err
        before = sum(endpoint.asked.values())
        assert cli(*args)[0] == 0
        assert sum(endpoint.asked.values()) == before + 5
        code, out, _ = cli("report", "--log", "mine.jsonl", "--expect", ">=0.5")
        assert code == 0 and "5 of 5 samples" in out
        assert cli("report", "--log", "mine.jsonl", "--expect", "0.1")[0] == 6
        assert sum(endpoint.asked.values()) == before + 5
    assert cli("report")[0] == 2
    assert cli("report", "--log", "none.jsonl")[0] == 2


def test_a_change_that_hurts_is_found_by_pairing(cli: Cli):
    with serving(calculator) as endpoint:
        args = ("nano-arith", "--endpoint", endpoint.url, "--limit", "40")
        assert cli(*args, "--log", "before.jsonl")[0] == 0
        code, out, _ = cli(*args, "--log", "same.jsonl", "--compare", "before.jsonl")
        assert code == 0 and "no difference beyond luck" in out
    with serving(wrong_where(lambda text: text < "12")) as endpoint:
        args = ("nano-arith", "--endpoint", endpoint.url, "--limit", "40")
        code, out, err = cli(*args, "--log", "after.jsonl", "--compare", "before.jsonl")
    assert code == 6 and "worse than before.jsonl" in err and "McNemar exact" in err
    assert "this run is worse" in out and "backend.url" in out
    code, _, err = cli("report", "--log", "before.jsonl", "--compare", "after.jsonl")
    assert code == 0, "better is no failure"


def test_a_comparison_that_cannot_pair_is_refused_before_anything_is_asked(cli: Cli):
    with serving(calculator) as endpoint:
        assert cli("nano-arith", "--endpoint", endpoint.url, "--limit", "2", "--log", "a.jsonl")[0] == 0
        before = sum(endpoint.asked.values())
        code, _, err = cli("nano-json", "--endpoint", endpoint.url, "--compare", "a.jsonl")
        assert code == 2 and "differ in task" in err
        assert cli("nano-arith", "--endpoint", endpoint.url, "--compare", "missing.jsonl")[0] == 2
        assert sum(endpoint.asked.values()) == before


def test_progress_shows_the_running_score_and_its_interval(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    meter = Meter("nano-arith", quiet=False)
    meter(0, 4, 0, 0)
    meter(4, 4, 3, 4)
    meter.end()
    err = capsys.readouterr().err
    assert "nano-arith 0/4  no score yet" in err
    assert "nano-arith 4/4  75.0 % so far, 95 % 30.1 to 95.4\n" in err
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    quick = Meter("nano-arith", quiet=False)
    quick(4, 4, 3, 4)
    quick.end()
    assert capsys.readouterr().err == "", "a short run in a pipe needs no line"


def test_several_samples_give_pass_and_consensus(cli: Cli):
    def two_of_three(text: str, seed: int, before: int) -> Turn:
        return Turn("\\boxed{1000}") if seed == 2 else calculator(text, seed, before)

    with serving(two_of_three) as endpoint:
        args = ("nano-arith", "--endpoint", endpoint.url, "--k", "3", "--temperature", "1", "--limit", "10")
        found = json.loads(cli(*args, "--format", "json")[1])
    assert found["avg_at_k"]["hits"] == 20 and found["avg_at_k"]["of"] == 30
    assert found["pass_at_k"]["value"] == found["cons_at_k"]["value"] == 1.0
    assert found["seeds"] == [0, 1, 2]


def test_rows_by_question_for_spreadsheets(cli: Cli):
    with serving(calculator) as endpoint:
        out = cli("nano-arith", "--endpoint", endpoint.url, "--limit", "2", "--format", "csv")[1]
    assert out.splitlines()[0] == "question,correct,samples,gold,extracted"
    assert len(out.splitlines()) == 3


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("nano-arit",), "nearest is 'nano-arith'"),
        (("nano-arith", "--body", "top_k=1"), "--body: only with --endpoint"),
        (("nano-arith", "--api-key-env", "X"), "--api-key-env: only with --endpoint"),
        (("nano-arith", "--concurrency", "4", "--timeout-s", "3"), "--concurrency: only with --endpoint"),
        (("nano-arith", "--timeout-s", "3"), "--timeout-s: only with --endpoint or --judge"),
        (("nano-arith", "--endpoint", "http://x/v1", "--profile", "cpu-nano"), "--profile: not with --endpoint"),
        (("list", "--k", "3"), "--k: not used by eval list"),
        (("report", "--log", "x", "--limit", "3"), "--limit: not used by eval report"),
        (("nano-arith", "--matrix", "--dump-prompt"), "--dump-prompt: not with --matrix"),
        (("nano-arith", "--endpoint", "http://x/v1", "--set", "sched.max_rows_per_rank=1"), "another engine"),
        (("nano-arith", "--endpoint", "http://x/v1", "--endpoint-model", "m", "--body", "n=2"), "cannot be set"),
        (("nano-arith", "--endpoint", "http://x/v1", "--endpoint-model", "m", "--body", "a"), "--body a"),
        (("nano-arith", "--expect", "vendor"), "no score for nano-arith is published"),
        (("aime24", "--data", "one.jsonl", "--expect", "vendor"), "no score for aime24 is published"),
        (("aime", "--data", "one.jsonl", "--expect", "vendor"), "only some are asked"),
        (("nano-arith", "--expect", "93"), "write 93% for per cent"),
        (("nano-arith", "--judge", "http://x/v1"), "is graded by integer"),
        (("nano-arith", "--judge-model", "m"), "--judge-model: only with --judge"),
        (("nano-arith", "--k", "2"), "all samples of a question would be equal"),
        (("nano-arith", "--top-p", "0"), "--top-p is 0"),
        (("nano-arith", "--matrix", "--expect", "0.5"), "--matrix"),
        (("nano-arith", "--data", "missing.jsonl"), "no such file"),
        (("nano-arith", "--format", "text"), "has no --format text"),
    ],
)
def test_what_cannot_be_honoured_is_refused(cli: Cli, args: tuple[str, ...], message: str):
    Path("one.jsonl").write_text('{"problem": "1+1?", "answer": 2}\n')
    code, _, err = cli(*args)
    assert code == 2 and message in err


def test_a_missing_key_or_endpoint_is_exit_3(cli: Cli, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    code, _, err = cli("nano-arith", "--endpoint", "http://127.0.0.1:9/v1", "--api-key-env", "NO_SUCH_KEY")
    assert code == 3 and "NO_SUCH_KEY is not set" in err
    assert cli("nano-arith", "--endpoint", "http://127.0.0.1:9/v1")[0] == 3


def test_a_dry_run_and_a_dumped_prompt_ask_and_write_nothing(cli: Cli, tmp_path: Path, offline: None):
    with serving(calculator) as endpoint:
        code, out, _ = cli("aime", "--endpoint", endpoint.url, "--endpoint-model", "m", "--dry-run")
        assert code == 0 and "would be downloaded" in out and "d2de22f3" in out
        code, out, _ = cli("nano-arith", "--endpoint", endpoint.url, "--endpoint-model", "m", "--dump-prompt")
        assert code == 0 and json.loads(out)["messages"] == [{"role": "user", "content": "10+19?"}]
        assert not endpoint.asked
    assert list(tmp_path.iterdir()) == []


# ------------------------------------------------------------ published sets


def rows_of(path: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


@pytest.mark.parametrize(
    ("task", "file", "question", "limit"),
    [
        ("aime24", "aime24", "problem", 30),
        ("aime25", "aime25", "problem", 30),
        ("math500", "math500", "problem", 40),
        ("gsm8k", "gsm8k", "question", 60),
    ],
)
def test_a_perfect_model_scores_all_on_published_questions(
    cli: Cli, shared_dir: Path, task: str, file: str, question: str, limit: int
):
    if task == "math500":
        pytest.importorskip("math_verify", reason="math-verify is not installed (extra eval)")
    data = shared_dir / "data" / "questions" / f"{file}.jsonl"
    rows = rows_of(data)[:limit]
    answers = {row[question]: row["answer"] for row in rows}

    def perfect(text: str, seed: int, before: int) -> Turn:
        asked = text.rpartition("\n\nPlease reason")[0]
        return Turn(f"So it is $\\boxed{{{answers[asked]}}}$.", reasoning="\\boxed{7}")

    with serving(perfect) as endpoint:
        args = (task, "--data", data, "--endpoint", endpoint.url, "--k", "1", "--limit", limit, "--format", "json")
        code, out, err = cli(*args, "--expect", ">=1")
    assert code == 0, err
    found = json.loads(out)
    assert found["task"] == task
    assert found["outcomes"]["correct"] == found["samples"] == len(rows)
    assert len(endpoint.asked) == len(rows)


@pytest.mark.parametrize("task", ["aime24", "aime25"])
def test_published_questions_run_on_our_engine(cli: Cli, shared_dir: Path, tiny: Path, task: str):
    """An untrained model: an honest score near 0, with every sample accounted for."""
    data = shared_dir / "data" / "questions" / f"{task}.jsonl"
    args = (task, "--data", data, "--model", tiny, "--k", "1", "--temperature", "0", *ROOM, "--format", "json")
    code, out, err = cli(*args, "--limit", "4")
    assert code == 0, err
    found = json.loads(out)
    assert found["samples"] == 4 and sum(found["outcomes"].values()) == 4
    assert found["outcomes"]["correct"] == found["outcomes"]["errored"] == 0
    assert found["reproducible"] is False, "greedy, but batches may differ"
    assert found["identity"]["backend"]["kind"] == "engine" and found["prompt_tokens"] > 4 * 50


# ---------------------------------------------------------------- our engine


def test_our_engine_answers_the_same_whatever_shares_the_batch(cli: Cli, tiny: Path):
    texts = []
    for rows in (1, 4):
        log = Path(f"rows{rows}.jsonl")
        args = ("nano-arith", "--model", tiny, "--limit", "4", *ROOM, "--log", log, "--quiet")
        code, _, err = cli(*args, "--set", f"sched.max_rows_per_rank={rows}", "--set", "numerics.mode=float")
        assert code == 0, err
        records = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()[1:]]
        texts.append({r["item"]: (r["content"], r["reasoning"], r["outcome"]) for r in records})
        assert {r["outcome"] for r in records} <= {"truncated", "unparsed", "wrong"}
    assert texts[0] == texts[1]


def test_an_answer_length_without_room_for_a_prompt_is_refused_before_loading(cli: Cli, tiny: Path):
    code, _, err = cli("nano-arith", "--model", tiny, *ROOM[:2], "--max-tokens", "2048")
    assert code == 2 and "every sample needs 1 prompt + 2048 new tokens, the model has 2048 positions" in err


def test_a_prompt_that_is_too_long_is_an_error_of_its_sample(cli: Cli, tiny: Path):
    rows = [
        {"id": "a", "question": "1+1?", "answer": "2"},
        {"id": "b", "question": "1+" * 3000 + "1?", "answer": "3001"},
    ]
    Path("q.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    code, out, _ = cli("nano-arith", "--data", "q.jsonl", "--model", tiny, *ROOM, "--format", "json")
    found = json.loads(out)
    assert code == 5 and found["outcomes"]["errored"] == 1
    assert "the model has 2048 positions" in next(iter(found["errors"]))


def test_the_prompt_is_the_vendors_rendering(cli: Cli, tiny: Path):
    code, out, err = cli("nano-arith", "--model", tiny, *ROOM, "--dump-prompt")
    assert code == 0 and "message sha256" in err
    assert "<｜User｜>10+19?<｜Assistant｜><think>" in out
    out = cli("nano-arith", "--model", tiny, *ROOM, "--mode", "non-think", "--dump-prompt")[1]
    assert out.rstrip().endswith("<｜User｜>10+19?<｜Assistant｜></think>")


@pytest.fixture
def embedded(tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tiny model stands in for the embedded one."""
    monkeypatch.setattr(launch, "embedded_dir", lambda name: tiny)


def test_aime_without_its_questions_becomes_aime_form_for_the_embedded_model_only(
    cli: Cli, tiny: Path, embedded: None, offline: None, tmp_path: Path
):
    code, out, err = cli("aime", *ROOM, "--limit", "3")
    assert code == 0, err
    assert err.count("running aime-form instead") == 1 and "--data FILE" in err
    assert out.startswith("aime-form: ") and "aime26" not in out
    assert all(name.startswith("eval-aime-form-") for name in logs(tmp_path))
    for other in (("--model", tiny), ("--endpoint", "http://127.0.0.1:9/v1"), ("--expect", "vendor")):
        code, out, err = cli("aime", *(ROOM if other[0] != "--endpoint" else ()), *other)
        assert code == 3 and "--data" in err and out == ""


def test_the_embedded_model_passes_its_own_check(cli: Cli):
    code, out, err = cli("nano-arith", "--limit", "8", "--expect", ">=0.9", "--quiet")
    assert code == 0, err
    assert "embedded weights" in out and err == ""


# -------------------------------------------------------------------- matrix


def test_matrix_runs_legal_cells_and_shows_the_validators_reasons(cli: Cli, tiny: Path):
    one = ("--set", "replay.decoder=off", "--limit", "1")  # the other two are in the dry run
    code, out, err = cli("nano-arith", "--model", tiny, *ROOM, *one, "--matrix", "--format", "json", "--quiet")
    assert code == 0, err
    rows = json.loads(out)["rows"]
    assert len(rows) == 27
    ran = [r for r in rows if r["result"] != "refused"]
    assert [r["result"] for r in ran] == ["first"] + ["agrees"] * (len(ran) - 1)
    assert {(r["numerics"], r["ep"]) for r in ran} >= {
        (n, e) for n in AXES["numerics.mode"] for e in AXES["parallel.ep"]
    }
    assert all(r["reason"] for r in rows if r["result"] == "refused")


def test_matrix_reasons_come_from_the_validator(cli: Cli, tiny: Path, monkeypatch: pytest.MonkeyPatch):
    config = launch.Checkpoint.open(tiny).config
    monkeypatch.setattr(matrix, "inactive_features", lambda profile: [])
    by_values = {c.values: c for c in cells("cpu-nano", ["parallel.dp=2"], config)}
    single = by_values["fast", "off", "off", "1"]
    assert single.loaded is None and single.refused == "dp 2 does not divide ep 1"
    assert by_values["fast", "off", "off", "2"].loaded is not None
    small = {c.values: c for c in cells("cpu-nano", ["sched.prefill_chunk_tokens=32"], config)}
    assert "too small for replay.decoder bounded" in (small["fast", "bounded", "off", "1"].refused or "")
    fixed = list(cells("cpu-nano", ["numerics.mode=float", "parallel.ep=2"], config))
    assert {(c.values[0], c.values[3]) for c in fixed} == {("float", "2")} and len(fixed) == 9


def test_a_cell_that_differs_beyond_noise_is_found():
    def content(wrong: int) -> LogContent:
        identity = {"task": "t", "task_digest": "d", "data_sha256": "s", "judge": None, "items": 60, "seeds": [0]}
        records = {
            f"q{i}/0": {"item": f"q{i}", "sample": 0, "outcome": "wrong" if i < wrong else "correct"} for i in range(60)
        }
        return LogContent(identity, records, 0)

    names = [Cell((str(i), "off", "off", "1"), None, None) for i in range(4)]
    outcomes = judge([(names[0], content(0)), (names[1], content(0)), (names[2], content(3)), (names[3], content(20))])
    assert [o.agrees for o in outcomes] == [True, True, True, False]


def test_matrix_table_groups_refusals(cli: Cli, tiny: Path):
    fewer = ("--set", "numerics.mode=fast", "--set", "parallel.dp=2")
    code, out, _ = cli("nano-arith", "--model", tiny, *ROOM, *fewer, "--matrix", "--dry-run")
    assert code == 0
    assert "refused by the validator:" in out and out.count("would run") >= 9
    assert len(out.splitlines()) < 50


def test_embedded_recipe_files_survive_a_copy(cli: Cli, tmp_path: Path):
    """A recipe is a file: copied and changed, it runs from its path."""
    source = Path(__file__).resolve().parents[2] / "recipes" / "evals"
    for name in ("nano-arith.yaml", "nano-arith.jsonl"):
        shutil.copy(source / name, tmp_path / name)
    text = (tmp_path / "nano-arith.yaml").read_text().replace("name: nano-arith", "name: mine")
    (tmp_path / "mine.yaml").write_text(text)
    with serving(calculator) as endpoint:
        code, out, _ = cli("mine.yaml", "--endpoint", endpoint.url, "--limit", "3")
    assert code == 0 and out.startswith("mine: 100.0 %")
