"""The recipe that times decode steps on the CPU: what it counts as touched is what is stored; pages get its rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from recipes.kernels import cpu_decode, cpu_steps

LAYERS, CHOICES = 8, 6  # of nano


def test_a_step_of_one_row_touches_its_records_and_as_many_experts_as_it_chose(kernel_cache: Path, tmp_path: Path):
    found = []
    for cache in (tmp_path, kernel_cache):
        with cpu_decode.decoding(cache, 1, 40) as engine:
            bank, kv = engine.runner.model.weights.layers[0].ffn.bank, engine.runner.kv
            expert = sum(t.nbytes for w in (bank.w1, bank.w3, bank.w2) for t in (w.data, w.scale) if t is not None)
            ops = dict(vars(engine.runner.ops))
            found.append(cpu_decode.touched(engine, 4))
            assert found[-1]["experts"] == LAYERS * CHOICES * expert // len(bank.w1.data)
            assert dict(vars(engine.runner.ops)) == ops, "as it was"
            windows = LAYERS * kv.layout.window * kv.layout.window_row_bytes
            assert windows < found[-1]["records"] < 2 * windows
            assert bool(cpu_decode.not_built(engine)) == (cache == tmp_path)
    dense, packed = found
    assert packed["experts"] * 64 == dense["experts"] * 17, "bytes as loaded, not as published"
    assert packed["records"] == dense["records"] and packed["dense"] == dense["dense"]


def test_many_rows_touch_an_expert_once_and_records_each_of_their_own(kernel_cache: Path):
    with cpu_decode.decoding(kernel_cache, 1, 40) as one, cpu_decode.decoding(kernel_cache, 8, 40) as many:
        alone, together = cpu_decode.touched(one, 4), cpu_decode.touched(many, 4)
    assert alone["experts"] < together["experts"] < 8 * alone["experts"]
    assert 7 < together["records"] / alone["records"] <= 8.1
    assert alone["dense"] == together["dense"]


def test_rows_are_kept_and_pages_get_the_table(kernel_cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    page, out = tmp_path / "page.md", tmp_path / "rows.jsonl"
    page.write_text("before\n<!-- cpu-steps -->\nold\n<!-- end cpu-steps -->\nafter\n")
    arguments = ["--rows", "1", "2", "--threads", "1", "--quads", "1", "--cache", str(kernel_cache)]
    cpu_steps.main([*arguments, "--out", str(out), "--markdown", str(page)])
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    assert [(line["rows"], line["threads"], line["hardware"]["threads"]) for line in lines] == [(1, 1, 1), (2, 1, 1)]
    for line in lines:
        touched = line["dense_bytes"] + line["experts_bytes"] + line["records_bytes"]
        assert line["floor_ms"] == pytest.approx(touched / line["copy_gb_s"] / 1e6, rel=2e-3)
        assert line["times_floor"] == pytest.approx(line["compiled_ms"] / line["floor_ms"], rel=1e-2)
    text = page.read_text()
    assert "old" not in text and text.startswith("before\n") and text.endswith("\nafter\n")
    assert text.count("\n| ") == 4 and "| rows | threads | torch, tok/s |" in text
    shown = capsys.readouterr().out.splitlines()
    assert [row.split()[0] for row in shown] == ["rows", "1", "2"]

    cpu_steps.main(["--read", str(out), "--markdown", str(page)])
    assert page.read_text() == text


@pytest.mark.parametrize("text", ["", "<!-- cpu-steps -->\n", "<!-- cpu-steps -->\n<!-- end cpu-steps -->\n" * 2])
def test_a_page_without_one_block_is_refused_before_anything_is_measured(text: str, tmp_path: Path, capsys):
    page = tmp_path / "page.md"
    page.write_text(text)
    with pytest.raises(SystemExit) as refused:
        cpu_steps.main(["--markdown", str(page)])
    assert refused.value.code == 2 and "expected one" in capsys.readouterr().err


def test_what_is_not_compiled_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as refused:
        cpu_steps.main(["--rows", "1", "--threads", "1", "--quads", "1", "--cache", str(tmp_path)])
    assert refused.value.code == 3
    assert "hint: deepinfer build-kernels --target cpu" in capfd.readouterr().err
