"""What Triton computes, family by family, and whether it can here; imports no triton."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepinfer_kernels.cpp import default_cache

#: family → its operations; a row has the same bits in any batch unless named in ``BATCH_DEPENDENT``
FAMILIES: dict[str, tuple[str, ...]] = {
    "norm": ("rms_norm", "rope"),
    "cache": ("pack_rows", "unpack_rows", "load_rows", "store_rows", "quantise_index_query"),
    "linear": ("prepare_weight", "linear", "linear_grouped"),
    "hyper": ("mhc_mixes", "mhc_collapse", "mhc_expand"),
    "index": ("index_scores",),
    "attention": ("attend_cached",),
    "moe": ("gate_topk", "moe_experts", "shared_expert", "moe_combine"),
}
#: the tile of these follows the number of rows, and with it the order of their sums; those with True have a second
#: form on one tile, named ``<operation>_invariant``
BATCH_DEPENDENT = {
    "linear": True,
    "linear_grouped": True,
    "gate_topk": False,
    "attend_cached": True,
    "moe_experts": True,
    "shared_expert": True,
}

#: releases whose kernels were compiled and compared here
OLDEST, NEWEST = (3, 6), (3, 9)


#: where kernels that were compiled for this device are kept; None until an engine has asked
folder: Path | None = None


def missing(cache: Path | None = None) -> str | None:
    """What keeps Triton from running here, in one sentence with the next step; None when nothing does."""
    global folder
    reason = _missing()
    if reason is None:
        import torch

        major, minor = torch.cuda.get_device_capability()
        folder = (cache or default_cache()) / f"sm{major}{minor}" / "triton"
    return reason


def unusable() -> str | None:
    """What keeps Triton from compiling here, which takes no device; None when nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'deepinfer-cli[cuda]'"
    version = importlib.metadata.version("triton")
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < NEWEST:
        return f"triton {version} is not between 3.6 and 3.8: pip install 'deepinfer-cli[cuda]'"
    return None


@functools.cache
def _missing() -> str | None:
    reason = unusable()
    if reason is not None:
        return reason
    import torch

    return None if torch.cuda.is_available() else "there is no CUDA device"


def operation(family: str, name: str, reference: Callable[..., Any]) -> Callable[..., Any]:
    """The operation ``name`` with the signature of its reference; its module is imported at the first call."""
    made: list[Callable[..., Any]] = []

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(getattr(importlib.import_module(f"deepinfer_kernels.triton.{family}"), name))
        return made[0](*args, **kwargs)

    return call
