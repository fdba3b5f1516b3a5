"""``deepinfer inspect``: the kept text for the release, published figures, no torch, and refusals."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from deepinfer_cli import main as cli
from deepinfer_engine.config.model_v4 import load_any_config
from deepinfer_engine.errors import ArtefactError, UsageError
from deepinfer_engine.weights.summary import active_parameters, components, layer_picture

ROOT = Path(__file__).resolve().parents[2]
TEXTS = Path(__file__).parent / "texts"
VECTORS = ROOT / "tests" / "vectors"
RELEASE = VECTORS / "v41-flash-config.json"
KEPT = {
    "inspect_v41_flash": [str(RELEASE)],
    "inspect_v41_flash_ep8": [str(RELEASE), "--ep", "8"],
    "inspect_v4_flash_dspark": [str(VECTORS / "v4-flash-dspark-config.json")],
    "help_inspect": ["--help"],
}
V4_TINY = ROOT.parent / "shared" / "golden" / "v4-tiny"


def run(args: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    command = cli._load("inspect", "deepinfer_cli.commands.inspect", "")
    try:
        with command.make_context("deepinfer inspect", list(args)) as ctx:
            command.invoke(ctx)
    except typer.Exit as exc:
        assert exc.exit_code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("name", KEPT)
def test_text_is_the_kept_one(name, monkeypatch, capsys):
    """``python tests/cli/test_inspect.py`` writes the texts anew."""
    monkeypatch.setenv("COLUMNS", "100")
    assert run(KEPT[name], capsys) == (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


def test_text_fits_a_terminal_of_100_columns(capsys):
    for args in KEPT.values():
        assert max(map(len, run(args, capsys).splitlines())) <= 100


def test_active_parameters_are_those_of_the_report():
    active = active_parameters(load_any_config(RELEASE))
    assert 7.85e9 < active.prefill < 8.0e9  # report: 8 B
    assert round(active.decode / 1e9, 1) == 16.1  # report: 16 B


def test_active_parameters_by_hand():
    """The formulas with released sizes: layers, cut-layer source work, Engram projections, head."""
    attention, expert, router, hyper = 126_615_552, 35_389_440, 1_966_848, 983_094
    layer = attention + 7 * expert + router + hyper + 2 * 5120 + 64 + 1280 + 512
    pooled, keys, query = 5_243_392, 65_664, 5_406_720
    encoder = 20 * layer + 3 * (pooled + keys + query)
    decoder = 20 * layer + 2_621_952 + keys + 5 * query
    engram = 2 * (5120 * 5 * 6144 + 2 * 4 * 5120)
    head = 129_280 * 5120 + 5120
    cut_source = 512 * 5120 + 512 + 2_621_952 + keys
    active = active_parameters(load_any_config(RELEASE))
    assert active.prefill == encoder + engram + cut_source
    assert active.decode == encoder + decoder + engram + head


@pytest.mark.parametrize(("ep", "sharded_gb", "mapped_gb"), [(1, 510.3, 307.5), (4, 136.2, 85.5), (8, 73.9, 48.5)])
def test_bytes_per_rank_are_the_published_ones(ep, sharded_gb, mapped_gb):
    rows = components(load_any_config(RELEASE), ep)
    total = sum(r.rank_bytes for r in rows)
    tables = sum(r.rank_bytes for r in rows if r.name == "engram tables")
    assert (round(total / 1e9, 1), round((total - tables) / 1e9, 1)) == (sharded_gb, mapped_gb)


def test_json_is_strict_and_adds_up(capsys):
    report = json.loads(run([str(RELEASE), "--ep", "4", "--format", "json"], capsys), parse_constant=pytest.fail)
    assert report["schema"] == "deepinfer/inspect/1"
    assert report["total"]["tensors"] == 96_085 and report["total"]["bytes"] == 510_286_023_000
    for key in ("tensors", "parameters", "bytes", "fullest_rank_bytes"):
        assert sum(row[key] for row in report["components"]) == report["total"][key]
    assert [p["layer"] for p in report["layers"] if p["mode"] == "reindex"] == [24, 28, 32, 36]
    assert report["weights"] is None and report["cut"] == 20 and report["runnable"] is True


def test_long_models_wrap_and_keep_the_cut():
    config = load_any_config(RELEASE)
    narrow = layer_picture(config, width=16).splitlines()
    assert [line for line in narrow if line.startswith("keys")][:3] == [
        "keys    ..F-----F-----F-",
        "keys    ---- | F-----------",
        "keys    --------",
    ]


def test_a_checkpoint_is_validated_and_named(capsys):
    text = run([str(VECTORS / "v41-tiny-a" / "checkpoint")], capsys)
    assert "weights         3 shards, valid; groups: backbone, draft, engram, vision" in text
    assert "1,380" in text and "weights digest  none" not in text


def test_the_embedded_model_shows_its_card_by_name(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = run(["nano"], capsys)
    for words in (
        "reference\n                numerics, H200",
        "one earlier turn was trained",
        "tokenizer 11",
        "0.8 B + 0.2 A",
    ):
        assert words in text
    assert "the card is about other weights" not in text and max(map(len, text.splitlines())) <= 100
    report = json.loads(run(["nano", "--format", "json"], capsys))
    assert report["card"]["weights_digest"] == report["weights"]["digest"]
    (tmp_path / "nano").mkdir()  # a path of that name goes first
    with pytest.raises(ArtefactError):
        run(["nano"], capsys)


def test_cards_of_other_weights_and_of_other_tools(capsys, tmp_path):
    checkpoint = tmp_path / "c"
    shutil.copytree(VECTORS / "v41-tiny-a" / "checkpoint", checkpoint)
    card = {"schema": "deepinfer/card/1", "weights_digest": "0" * 64, "limits": ["one", {"a_b": [1, 2]}]}
    (checkpoint / "card.json").write_text(json.dumps(card))
    text = run([str(checkpoint)], capsys)
    assert "the card is about other weights" in text and "limits          one\n                a b 1; 2\n" in text
    (checkpoint / "card.json").write_text('{"schema": "deepinfer/card/1"}')
    with pytest.raises(ArtefactError, match="weights_digest is None, expected a text"):
        run([str(checkpoint)], capsys)
    (checkpoint / "card.json").write_text('{"made_by": "another tool"}')
    assert "limits" not in run([str(checkpoint)], capsys)


@pytest.mark.skipif(not V4_TINY.is_dir(), reason="no V4 checkpoint shared/golden/v4-tiny beside the repository")
def test_a_v4_checkpoint_is_validated_and_not_runnable(capsys):
    report = json.loads(run([str(V4_TINY / "checkpoint"), "--format", "json"], capsys))
    assert report["runnable"] is False and report["weights"]["groups_present"] == ["backbone"]


def test_refusals(tmp_path, capsys):
    with pytest.raises(ArtefactError, match="no such file"):
        run([str(tmp_path / "nothing.json")], capsys)
    with pytest.raises(UsageError, match="ep is 0, expected 1 or more"):
        run([str(RELEASE), "--ep", "0"], capsys)
    with pytest.raises(UsageError, match="inspect has no --format csv"):
        run([str(RELEASE), "--format", "csv"], capsys)
    (tmp_path / "config.json").write_bytes(RELEASE.read_bytes())
    assert "none, no weights here" in run([str(tmp_path)], capsys)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"embed.weight": "a.safetensors"}}')
    with pytest.raises(ArtefactError, match=r"shard a\.safetensors missing"):
        run([str(tmp_path)], capsys)


def test_inspect_needs_no_torch_and_less_than_100_ms():
    code = (
        "import sys, time; from pathlib import Path; from deepinfer_cli.commands.inspect import command\n"
        "times = []\n"
        "for _ in range(3):\n"
        f"    start = time.perf_counter(); command(Path({str(RELEASE)!r}), ep=8)\n"
        "    times.append(time.perf_counter() - start)\n"
        "assert 'torch' not in sys.modules and 'rich' not in sys.modules\n"
        "assert min(times) < 0.1, times\n"
    )
    env = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, ROOT / "engine", ROOT / "kernels")))}
    subprocess.run([sys.executable, "-c", code], check=True, env=env, stdout=subprocess.DEVNULL, timeout=60)


def test_read_times_every_shard_of_a_rank_beside_its_disk(capsys):
    directory = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"
    assert cli.main(["inspect", str(directory), "--ep", "4", "--read", "--rank", "1", "--format", "json"]) == 0
    shards = json.loads(capsys.readouterr().out)["read"]
    assert len(shards) == 3 and all(s["mb_s"] > 0 and s["disk_mb_s"] > 0 for s in shards)
    assert sum(s["bytes"] for s in shards) < 3_000_000  # a quarter of the experts, no tables


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--rank", "1"], "without --read it changes nothing"),
        (["--read"], "there are no weights to read"),
        (["--ep", "2", "--read", "--rank", "2"], "there are no weights to read"),
    ],
)
def test_read_options_that_cannot_be_honoured_are_refused(capsys, options, sentence):
    config = Path(__file__).resolve().parents[1] / "vectors" / "v41-flash-config.json"
    assert cli.main(["inspect", str(config), *options]) == 2
    assert sentence in capsys.readouterr().err


if __name__ == "__main__":
    import contextlib
    import io

    os.environ["COLUMNS"] = "100"
    for kept, arguments in KEPT.items():
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream), contextlib.suppress(typer.Exit):
            loaded = cli._load("inspect", "deepinfer_cli.commands.inspect", "")
            with loaded.make_context("deepinfer inspect", list(arguments)) as context:
                loaded.invoke(context)
        (TEXTS / f"{kept}.txt").write_text(stream.getvalue(), encoding="utf-8")
