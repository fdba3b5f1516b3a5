"""What serves without its kernels says so: operations that torch computes instead, and kernels compiled meanwhile."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from deepinfer_cli.announce import fallback_notes, fallback_rows
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.runtime.host import resolve_ops
from deepinfer_kernels.registry import resolve
from deepinfer_kernels.triton import families


def test_operations_in_torch_for_want_of_kernels_are_said_once_with_the_command(tmp_path, capsys):
    profile = load_profile("cpu-nano", (f"kernels.cache_dir={tmp_path}",)).profile
    ops = resolve_ops(profile)
    assert ops.fallbacks["linear"][0] == "cpu" and "not built" in ops.fallbacks["linear"][1]
    engine: Any = SimpleNamespace(
        profile=profile,
        fallbacks=ops.fallbacks,
        runner=SimpleNamespace(ops=ops),
        checkpoint=SimpleNamespace(directory=tmp_path),
    )
    fallback_notes(engine, quiet=False)
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert out == "" and said.count("operations run in torch") == 1
    assert f"{len(ops.fallbacks)} operations" in said and "deepinfer build-kernels --target cpu --set" in said
    rows = fallback_rows(engine)
    assert len(rows) == len(ops.fallbacks) and all(row["used"] != "cpu" for row in rows)


def test_what_numerics_or_a_name_ask_for_is_no_fallback(tmp_path):
    assert resolve("reference", "cpu", cache=tmp_path).fallbacks == {}
    named = resolve("fast", "cpu", {"linear": "reference"}, cache=tmp_path).fallbacks
    assert "linear" not in named and "embed" in named


def test_a_kernel_compiled_while_serving_is_counted_and_said(monkeypatch):
    monkeypatch.setattr(families, "compiled", ["loaded"])
    with Engine.open("cpu-nano", sets=["kernels.backend=reference"]) as engine:
        assert engine.compiled == () and engine.notes() == []
        families.compiled.append("_linear")
        assert engine.compiled == ("_linear",)
        (note,) = engine.notes()
    assert note.startswith("1 kernels were compiled while serving, first _linear: no kernel cache held them (deepinfer")
