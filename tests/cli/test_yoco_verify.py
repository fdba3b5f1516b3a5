"""``deepinfer yoco-verify``: what it prints, and that a failed check ends with 6."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepinfer_cli import main as cli
from deepinfer_engine.verify import yoco_subject
from deepinfer_engine.verify.yoco_subject import MUTATIONS, Mutation

TINY = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"


def run(args, capsys):
    code = cli.main([str(a) for a in args])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_level_1_mutations_are_noticed_in_both_models(capsys):
    code, out, err = run(["yoco-verify", "--model", TINY, "--mutate", "blocks-overwritten", "--format", "json"], capsys)
    assert code == 0 and "passed" in err
    content = json.loads(out)
    assert content["schema"] == "deepinfer/yoco-verify/1" and content["passed"] is True
    assert [row["model"] for row in content["rows"]] == ["checkpoint", "deepseek-v4.1-flash"]
    assert all(row["noticed by"].startswith("L1-") for row in content["rows"])


def test_a_fault_that_nothing_notices_ends_with_6(capsys, monkeypatch):
    harmless = Mutation("nothing at all", lambda subject: subject)
    monkeypatch.setitem(yoco_subject.MUTATIONS, "tail-short", harmless)
    code, out, err = run(["yoco-verify", "--model", TINY, "--mutate", "tail-short"], capsys)
    assert code == 6 and "nothing" in out and "mutation tail-short was not noticed" in err


def test_level_2_reports_equalities_and_drift_and_ends_with_6_over_budget(capsys, tmp_path):
    tokens, result = tmp_path / "ids.json", tmp_path / "result.json"
    tokens.write_text(json.dumps([(7 * i) % 300 + 2 for i in range(430)]))
    args = ["yoco-verify", "--level", "2", "--model", TINY, "--tokens", tokens, "--max-kl", "0", "--out", result]
    code, out, err = run([*args, "--format", "json", "-q"], capsys)
    assert (
        (code, out) == (6, "") and err.count("mean KL") == 2 and err.startswith("error: yoco-verify level 2: 2 failed")
    )
    content = json.loads(result.read_text())
    assert content["passed"] is False and all(row["good"] for row in content["comparisons"])
    assert len(content["comparisons"]) == 14 and all(row["largest"] == 0 for row in content["comparisons"])
    assert [row["within"] for row in content["drifts"]] == [False, False]
    assert content["prompt"] == 323 and list(content["budgets"].values()) == [
        {"kl": 0.0, "top1": 0.98, "overlap": 0.95},
        {"kl": 0.0, "top1": 0.96, "overlap": 0.95},
    ]


def test_level_2_mutations_are_noticed(capsys):
    args = ["yoco-verify", "--level", "2", "--model", TINY, "--mutate", "tail-short"]
    code, out, err = run(args, capsys)
    assert code == 0 and "the engine's own assertion" in out and "passed" in err


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (["--mutate", "everything"], "no mutation 'everything'", 2),
        (["--level", "2", "--mutate", "decoder-cached"], "changes no number that level 2 looks at", 2),
        (["--ranks", "2"], "belong to --level 2", 2),
        (["--format", "csv"], "no --format csv", 2),
        (["--level", "2", "--tokens", "{bad}"], "expected a JSON list of integers", 4),
        (["--level", "2", "--tokens", "{short}"], "the trajectory has 3 tokens, level 2 needs 430", 2),
        (["--level", "2", "--tokens", "{foreign}"], "token 999999 at position 1", 2),
    ],
)
def test_refusals(args, message, code, capsys, tmp_path):
    files = {"bad": '["a"]', "short": "[3, 4, 5]", "foreign": "[3, 999999]"}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    args = [a.format(**{name: tmp_path / name for name in files}) for a in args]
    found, out, err = run(["yoco-verify", "--model", TINY, *args], capsys)
    assert (found, out) == (code, "") and message in err


def test_every_fault_says_what_it_is():
    assert all(m.what and set(m.levels) <= {1, 2} for m in MUTATIONS.values())
