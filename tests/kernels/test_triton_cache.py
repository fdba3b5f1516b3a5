"""Kernels that a model needs and a cache does not serve: counted by operation before anything is served."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deepinfer_kernels.triton import families

if (reason := families.unusable()) is not None:
    pytest.skip(f"needs another triton: {reason}", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET"):
    pytest.skip("needs Triton's compiler, and TRITON_INTERPRET is set", allow_module_level=True)

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.doctor import implementations
from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.model.kernel_shapes import kernel_shapes
from deepinfer_engine.runtime.host import resolve_ops
from deepinfer_engine.sim.models import find_model
from deepinfer_kernels import kernel_cache
from deepinfer_kernels.triton import build, shapes

NANO = find_model("nano").config


def profile(cache: Any, *sets: str) -> Any:
    return load_profile("h200x1-nano", (f"kernels.cache_dir={cache}", *sets)).profile


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A cache with the kernels of one operation alone."""
    cache = tmp_path_factory.mktemp("kernels")
    found = shapes.launches(kernel_shapes(NANO, profile(cache)), invariant=False)
    wanted = build.kernels((op, call) for op, call in found if op == "rms_norm")
    made = kernel_cache.build(build.jobs(wanted, "sm90", cache))
    assert {b.status for b in made} == {"built"}
    return cache


@pytest.fixture(autouse=True)
def on_a_device(monkeypatch):
    monkeypatch.setattr(families, "_platform", lambda: "sm90")


def checkpoint() -> Any:
    from deepinfer_engine.config.resources import model_dir

    return SimpleNamespace(config=NANO, directory=model_dir("nano"))


def test_operations_whose_kernels_are_absent_are_passed_over_one_by_one(built):
    chosen = resolve_ops(profile(built), checkpoint()).chosen
    by_triton = {op for op, i in chosen.items() if i.backend == "triton"}
    assert "rms_norm" in by_triton and by_triton.isdisjoint({"linear", "attend_cached", "index_scores", "embed"})
    (finding,) = implementations.check_implementations(profile(built), "sm90")
    assert finding.status == "warn" and (finding.fix or "").startswith(
        f"deepinfer build-kernels --target sm90 --profile h200x1-nano --set kernels.cache_dir={built}"
    )
    assert any("not triton" in d and "not built for the sizes of this model" in d for d in finding.details)


def test_triton_that_is_demanded_is_refused_with_how_many_are_absent_and_the_command(built):
    demanded = profile(built, "kernels.overrides.linear=triton")
    said = r"linear: .*\d+ of its kernels are not built.*first \S+.* \(\d+ of all"
    with pytest.raises(NotReadyError, match=said) as e:
        resolve_ops(demanded, checkpoint())
    assert "build-kernels --target sm90 --profile h200x1-nano" in (e.value.hint or "")
    resolve_ops(profile(built, "kernels.overrides.rms_norm=triton"), checkpoint())


def test_kernels_of_another_model_or_source_do_not_count(built, monkeypatch):
    sizes = kernel_shapes(NANO, profile(built))
    assert families.lacks("rms_norm", False, sizes, "sm90", built) is None
    assert "not built" in (families.lacks("rms_norm", False, replace(sizes, rows=(96,)), "sm90", built) or "")
    build.absent.cache_clear()
    key = build.Kernel.key
    monkeypatch.setattr(build.Kernel, "key", lambda self, platform: key(self, platform)[::-1])
    assert "not built" in (families.lacks("rms_norm", False, sizes, "sm90", built) or "")
    build.absent.cache_clear()


def test_a_cache_that_was_copied_or_moved_is_refused_because_triton_would_compile_again(built, tmp_path):
    sizes, copied = kernel_shapes(NANO, profile(built)), tmp_path / "copied"
    shutil.copytree(built, copied)
    reason = families.lacks("rms_norm", False, sizes, "sm90", copied) or ""
    assert reason.endswith(f"those there were made in {built}"), reason
    group = next((copied / "sm90" / "triton").glob("*/__grp__*.json"))
    assert str(built) in next(iter(json.loads(group.read_text())["child_paths"].values()))
