"""``kernels.overrides``: whatever is accepted changes what a step runs, and what would not is refused by name."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import deepinfer_engine
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.schema import Backend
from deepinfer_engine.errors import ProfileError, UsageError
from deepinfer_engine.runtime.host import resolve_ops
from deepinfer_kernels import registry
from deepinfer_kernels.ops import OPS
from deepinfer_kernels.parts import INNER, PARTS

PROFILES = {"cpu": "cpu-nano", "sm90": "h200x1-nano", "sm100": "decode-ep64"}


def called_by_the_engine() -> set[str]:
    """Operations that the engine's sources call as ``ops.NAME`` or ``self.ops.NAME``."""
    found: set[str] = set()
    for path in Path(deepinfer_engine.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value).rpartition(".")[2].lstrip("_") == "ops":
                found.add(node.attr)
    return found & OPS.keys()


CALLED = called_by_the_engine()


@pytest.fixture
def all_built(monkeypatch):
    """A machine where every library and compiler is, so that only what never runs is refused."""
    asked = registry.why_not

    def why_not(implementation, *args, **given):
        return asked(replace(implementation, missing=lambda cache=None: None), *args, **given)

    monkeypatch.setattr(registry, "why_not", why_not)


def chosen(platform: str, *sets: str) -> dict[str, str]:
    """Backend of every operation under a profile with changes."""
    ops = resolve_ops(load_profile(PROFILES[platform], ["numerics.mode=fast", *sets]).profile)
    return {op: implementation.backend for op, implementation in ops.chosen.items()}


def test_every_operation_is_called_by_a_step_or_by_a_fused_one():
    assert CALLED.isdisjoint(INNER) and OPS.keys() == CALLED | INNER
    assert {part for parts in PARTS.values() for part in parts} <= CALLED | INNER


@pytest.mark.parametrize("platform", PROFILES)
def test_an_override_that_is_accepted_changes_what_runs(all_built, platform):
    walked: dict[str, set[str]] = {}
    for op in OPS:
        accepted = {}
        for backend in set(get_args(Backend)) - {"auto"}:
            try:
                accepted[backend] = chosen(platform, f"kernels.overrides.{op}={backend}")
            except (ProfileError, UsageError):
                continue
        for backend, then in accepted.items():
            assert then[op] == backend
            runs = op in CALLED or any(then[whole] == "parts" for whole, parts in PARTS.items() if op in parts)
            assert runs, f"{op}={backend} is accepted, and nothing calls {op}"
        walked[op] = set(accepted)
    assert all("reference" in walked[op] for op in OPS)


def test_a_part_whose_every_caller_has_a_backend_of_its_own_is_refused(all_built):
    sets = ["kernels.overrides.unpack_rows=reference", "kernels.overrides.window_rows=reference"]
    with pytest.raises(UsageError, match="unpack_rows has no effect: only window_rows would call it") as raised:
        chosen("cpu", *sets)
    assert raised.value.hint == "leave out kernels.overrides.unpack_rows, or kernels.overrides.window_rows"
    assert chosen("cpu", *sets[:1])["window_rows"] == "parts"


def test_a_forced_backend_takes_apart_what_it_has_only_parts_of(all_built):
    then = chosen("sm90", "kernels.backend=tilelang")
    assert (then["index_scores_cached"], then["index_scores"]) == ("parts", "tilelang")
    assert chosen("sm90")["index_scores_cached"] == chosen("sm90", "kernels.backend=triton")["index_scores_cached"]
    whole = chosen("sm90", "kernels.backend=tilelang", "kernels.overrides.index_scores_cached=triton")
    assert whole["index_scores_cached"] == "triton"


def test_a_backend_that_an_operation_does_not_have_is_refused_with_those_it_has():
    with pytest.raises(
        UsageError, match=r"^kernels.overrides.count_choices is cpu, which has no count_choices for cpu$"
    ) as raised:
        chosen("cpu", "kernels.overrides.count_choices=cpu")
    assert raised.value.hint == "use auto, reference"
    with pytest.raises(UsageError, match="embed is deep_gemm, which has no embed for sm90") as raised:
        chosen("sm90", "kernels.overrides.embed=deep_gemm")
    assert raised.value.hint == "use auto, triton, reference"
