"""``build_command``: what compiles the kernels of a profile and a model, as an operator would type it."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.resources import model_dir
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.sim.models import EMBEDDED

#: keys that decide which kernels are made, and where they are kept
_KEYS = (
    "hardware.gpus",
    "parallel.ep",
    "parallel.dp",
    "parallel.redundant_experts_per_rank",
    "numerics.batch_invariant",
    "kernels.cache_dir",
)


def build_command(profile: Profile, model: Path | None = None) -> str:
    """``deepinfer build-kernels`` with the model (None: the embedded one) and what the profile of that name lacks."""
    platform = profile.hardware.platform
    if platform not in ("sm90", "sm100"):
        kept = profile.kernels.cache_dir
        return f"deepinfer build-kernels --target {platform}" + (f" --set kernels.cache_dir={kept}" if kept else "")
    embedded = model is None or model.resolve() == model_dir(EMBEDDED).resolve()
    named = "" if embedded else f" --model {shlex.quote(str(model))}"
    try:
        shipped: Profile | None = load_profile(profile.name).profile
    except DeepInferError:  # a file's: its own values hold
        shipped = None
    changed = [] if shipped is None else [key for key in _KEYS if _value(shipped, key) != _value(profile, key)]
    sets = "".join(f" --set {key}={shlex.quote(_text(_value(profile, key)))}" for key in changed)
    return f"deepinfer build-kernels --target {platform}{named} --profile {profile.name}{sets}"


def _value(profile: Profile, key: str) -> Any:
    group, _, name = key.partition(".")
    return getattr(getattr(profile, group), name)


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
