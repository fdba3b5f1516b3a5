"""The command line: texts kept in files, stdout against stderr, exit codes, and what ``--help`` may import."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from deepinfer_cli import main as cli
from deepinfer_cli import options, render
from deepinfer_cli.commands import VERBS
from deepinfer_cli.options import OutputFormat
from deepinfer_engine import errors

ROOT = Path(__file__).resolve().parents[2]
TEXTS = Path(__file__).parent / "texts"
HELP = {
    "help": ["--help"],
    "help_profile": ["profile", "--help"],
    **{f"help_profile_{verb}": ["profile", verb, "--help"] for verb in ("list", "show", "validate", "diff")},
}


def run(args, capsys):
    code = cli.main(args)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def process(*args: str, **options) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}", "COLUMNS": "100"}
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, env=env, timeout=60, **options)


def compare(name: str, text: str) -> None:
    """Equal to the kept text; ``python tests/cli/test_profile_command.py`` writes the texts anew."""
    assert text == (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", HELP)
def test_help_text_is_the_kept_one(name, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "100")
    code, out, err = run(HELP[name], capsys)
    assert (code, err) == (0, "")
    compare(name, out)


def test_profile_list_is_the_kept_one(capsys):
    code, out, err = run(["profile", "list"], capsys)
    assert (code, err) == (0, "")
    compare("profile_list", out)


def test_profile_show_is_the_kept_one(capsys):
    code, out, _ = run(["profile", "show", "prefill-ep8-ascend950"], capsys)
    assert code == 0
    compare("profile_show", out)


def test_help_imports_neither_torch_nor_pydantic_nor_a_verb():
    code = (
        "import sys; from deepinfer_cli.main import main; rc = main(['--help']);"
        "bad = {'torch', 'pydantic', 'numpy', 'rich', 'yaml'} & set(sys.modules);"
        "bad |= {m for m in sys.modules if m.startswith('deepinfer_cli.commands.')};"
        "print(rc, sorted(bad), file=sys.stderr)"
    )
    assert process("-c", code).stderr == "0 []\n"


def test_no_arguments_print_the_help(capsys):
    assert run([], capsys)[:2] == run(["--help"], capsys)[:2]


def test_version_is_the_engines(capsys):
    from deepinfer_engine import __version__

    assert run(["--version"], capsys) == (0, f"deepinfer {__version__}\n", "")


def test_every_verb_of_the_table_is_importable_and_has_help(capsys):
    for verb in VERBS:
        code, out, _ = run([verb.name, "--help"], capsys)
        assert code == 0 and out.startswith("Usage: deepinfer " + verb.name)


@pytest.mark.parametrize(
    ("args", "message", "hint"),
    [
        (["profil"], "there is no verb 'profil'; nearest is 'profile'", "deepinfer --help"),
        (["xyzzy"], "there is no verb 'xyzzy'", "deepinfer --help"),
        (["profile"], "missing command", "deepinfer profile --help"),
        (["profile", "show"], "missing argument 'NAME|PATH'", "deepinfer profile show --help"),
        (["--nope"], "no such option: --nope", "deepinfer --help"),
        (["profile", "list", "--format", "xml"], "'xml' is not one of", "deepinfer profile list --help"),
        (["profile", "list", "--format", "text"], "profile list has no --format text", "use one of table, json"),
        (["profile", "show", "decode-ep46"], "nearest is 'decode-ep64'", "deepinfer profile list"),
        (["profile", "show", "cpu-nano", "--set", "sched.x=1"], "unknown key 'x' in sched", None),
        (["profile", "show", "./missing.yaml"], "missing.yaml: no such file", "check the path"),
        (["profile", "diff", "cpu-nano", "cpu-nan"], "nearest is 'cpu-nano'", "deepinfer profile list"),
    ],
)  # fmt: skip
def test_usage_errors_end_with_2_and_keep_stdout_clean(args, message, hint, capsys):
    code, out, err = run(args, capsys)
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and message.lower() in err.lower()
    if hint:
        assert f"\n\nhint: {hint}" in err


def test_show_resolved_with_origins_names_every_source(capsys):
    flags = ["--resolved", "--origin", "--set", "sched.max_rows_per_rank=3", "--format", "json"]
    code, out, _ = run(["profile", "show", "decode-ep8", *flags], capsys)
    content = json.loads(out)
    assert code == 0 and content["schema"] == "deepinfer/profile-show/1"
    assert content["values"]["sched.max_rows_per_rank"] == 3
    assert content["origins"]["sched.max_rows_per_rank"] == "--set"
    assert content["origins"]["deadlines.step_s"] == "default"
    assert content["origins"]["eplb.window_steps"].startswith("decode-ep64.yaml:")
    assert content["values"].keys() == content["origins"].keys()


def test_resolved_yaml_written_to_a_file_is_a_profile_of_the_same_digest(tmp_path, capsys):
    target = tmp_path / "mine.yaml"
    args = ["profile", "show", "prefill-ep4", "--resolved", "--set", "sched.max_rows_per_rank=3", "--out", str(target)]
    assert run(args, capsys) == (0, "", "")
    assert [p.name for p in tmp_path.iterdir()] == ["mine.yaml"], "no temporary file is left"
    digest = target.read_text().splitlines()[0].split()[-1]
    code, out, _ = run(["profile", "validate", str(target), "--format", "json"], capsys)
    assert code == 0
    assert json.loads(out)["rows"][0]["digest"] == digest
    code, out, _ = run(["profile", "diff", "prefill-ep4", str(target), "--format", "csv"], capsys)
    assert [row["key"] for row in csv.DictReader(io.StringIO(out))] == ["sched.max_rows_per_rank"]


def test_out_into_a_missing_folder_is_a_usage_error(tmp_path, capsys):
    code, out, err = run(["profile", "list", "--out", str(tmp_path / "no" / "list.txt")], capsys)
    assert (code, out) == (2, "") and "list.txt: its folder does not exist" in err


def test_validate_reports_every_file_and_ends_with_2_if_one_is_bad(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text("schema_version: 1\nname: bad\nrole: x\n")
    code, out, err = run(["profile", "validate", "cpu-nano", str(bad), "nope", "h200x8"], capsys)
    assert code == 2
    assert [line.split()[1] for line in out.splitlines()[1:]] == ["ok", "invalid", "invalid", "ok"]
    assert "bad.yaml:3:7: role is the text 'x'" in err and "no shipped profile is called 'nope'" in err


def test_validate_against_a_model_names_its_limits(tmp_path, capsys):
    code, _, err = run(["profile", "validate", "cpu-nano", "--model", str(tmp_path)], capsys)
    assert code == 4 and "config.json: no such file" in err


def test_jsonl_and_csv_have_one_record_per_profile(capsys):
    lines = run(["profile", "list", "--format", "jsonl"], capsys)[1].splitlines()
    rows = list(csv.DictReader(io.StringIO(run(["profile", "list", "--format", "csv"], capsys)[1])))
    assert [json.loads(line)["name"] for line in lines] == [row["name"] for row in rows]
    assert {row["name"]: row["ep"] for row in rows}["decode-ep64"] == "64"


def _raise(exc: BaseException):
    def command(*args, **kwargs):
        raise exc

    return command


@pytest.mark.parametrize(
    ("exc", "code", "text"),
    [
        (errors.UsageError("u", hint="h"), 2, "error: u\n\nhint: h\n"),
        (errors.CapacityError("need 2, have 1"), 3, "error: need 2, have 1\n"),
        (errors.CheckpointError("m", ["a"]), 4, "error: m: 1 problem\n  a\n"),
        (errors.PartialFailure("p"), 5, "error: p\n"),
        (errors.CheckFailed("c"), 6, "error: c\n"),
        (errors.PeerLost("l"), 7, "error: l\n"),
        (errors.Interrupted("i"), 130, "error: i\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
    ],
)
def test_exceptions_become_exit_codes(exc, code, text, monkeypatch, capsys):
    monkeypatch.setattr("deepinfer_engine.config.resources.profile_names", _raise(exc))
    assert run(["profile", "list"], capsys) == (code, "", text)


def test_a_bug_keeps_its_traceback_in_a_file_and_ends_with_1(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("deepinfer_engine.config.resources.profile_names", _raise(ZeroDivisionError("oops")))
    code, out, err = run(["profile", "list"], capsys)
    assert (code, out) == (1, "")
    assert "this is a bug in deepinfer: ZeroDivisionError: oops" in err and "Traceback" not in err
    (kept,) = tmp_path.iterdir()
    assert str(kept) in err
    assert "ZeroDivisionError: oops" in kept.read_text() and "Traceback" in kept.read_text()


def test_a_reader_that_goes_away_is_no_traceback():
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}"}
    command = [sys.executable, "-m", "deepinfer_cli", "profile", "show", "cpu-nano", "--resolved"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert child.stderr.read() == b""
    assert child.wait(timeout=60) == 130


def test_module_entry_returns_the_exit_code():
    done = process("-m", "deepinfer_cli", "profile", "show", "nope")
    assert (done.returncode, done.stdout) == (2, "")


def test_completion_offers_verbs_and_profile_names():
    env = {"_DEEPINFER_COMPLETE": "complete_bash", "COMP_WORDS": "deepinfer profile show cpu", "COMP_CWORD": "3"}
    old = {key: os.environ.get(key) for key in env}
    os.environ.update(env)
    try:
        assert process("-m", "deepinfer_cli").stdout.split() == ["cpu-nano"]
    finally:
        for key, value in old.items():
            os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


def test_json_is_strict_and_undefined_cells_are_dashes_or_null():
    with pytest.raises(ValueError):
        render.json_text({"x": float("nan")})
    columns, rows = ("name", "tok_s"), [("a", None), ("b", 12.5)]
    assert render.table(columns, rows) == "name  tok_s\na         -\nb      12.5\n"
    assert json.loads(render.rows_text(OutputFormat.json, "t", columns, rows))["rows"][0] == {
        "name": "a",
        "tok_s": None,
    }
    assert render.rows_text(OutputFormat.csv, "t", columns, rows) == "name,tok_s\na,\nb,12.5\n"
    assert render.table(columns, []) == "name  tok_s\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colour_only_on_a_terminal_without_no_color(monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys, "stderr", _Terminal())
    render.error("x", "y")
    assert "\x1b[" in sys.stderr.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stderr", _Terminal())
    render.error("x", "y")
    assert sys.stderr.getvalue() == "error: x\n\nhint: y\n"


def test_quiet_silences_notes_before_or_after_the_verb(monkeypatch, capsys):
    app = typer.Typer(rich_markup_mode=None)

    @app.callback()
    def root(ctx: typer.Context, quiet: bool = False) -> None:
        ctx.obj = options.Session(quiet=quiet)

    @app.command()
    def speak(quiet: options.Quiet = False) -> None:
        render.note("story", quiet=quiet)

    for args, err in ((["speak"], "story\n"), (["speak", "-q"], ""), (["--quiet", "speak"], "")):
        app(args, standalone_mode=False)
        assert capsys.readouterr().err == err


def _write_texts() -> None:
    """Write the kept texts from what the command prints now."""
    TEXTS.mkdir(exist_ok=True)
    lines = {**HELP, "profile_list": ["profile", "list"], "profile_show": ["profile", "show", "prefill-ep8-ascend950"]}
    for name, args in lines.items():
        (TEXTS / f"{name}.txt").write_text(process("-m", "deepinfer_cli", *args).stdout, encoding="utf-8")


if __name__ == "__main__":
    _write_texts()
