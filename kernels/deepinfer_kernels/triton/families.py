"""What Triton computes, module by module, and whether it can here; imports no triton."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_kernels.kernel_cache import default_cache
from deepinfer_kernels.spec import Tolerance

if TYPE_CHECKING:
    from deepinfer_kernels.shapes import Shapes

#: module → its operations; a row has the same bits in any batch unless named in ``BATCH_DEPENDENT``
FAMILIES: dict[str, tuple[str, ...]] = {
    "norm": ("rms_norm", "rope"),
    "cache": ("pack_rows", "unpack_rows", "load_rows", "store_rows", "quantise_index_query"),
    "linear": ("prepare_weight", "linear", "linear_grouped"),
    "hyper": ("mhc_mixes", "mhc_collapse", "mhc_expand"),
    "index": ("index_scores", "index_scores_cached"),
    "attention": ("attend_cached",),
    "router": ("gate_topk",),
    "moe": ("moe_experts", "shared_expert", "moe_combine"),
    "permute": ("dispatch_permute", "dispatch_rows", "count_choices"),
    "select": ("candidate_blocks", "restrict_to_candidates", "select_topk", "index_weights"),
    "engram": ("token_classes", "engram_hash", "dequantise_table", "engram_lookup", "engram_gate"),
    "rows": ("window_rows", "store_entries"),
    "places": ("entry_slots", "window_places", "pair_places", "rope_angles", "embed", "embed_streams"),
    "streams": ("mhc_collapse_norm",),
    "move": ("copy_rows",),
    "compress": ("pool_pairs", "pool_cached", "store_pairs"),
    "head": ("head_logits",),
    "sample": ("next_tokens", "draft_sample"),
    "adjust": ("adjust_logits", "adjust_verify_logits", "token_logprobs"),
    "speculate": ("dspark_confidence", "dspark_split", "accept_drawn", "truncate_emitted"),
    "reject": ("accept_rejection",),
    "commit": ("settle_rows", "sampled_rows", "commit_rows"),
}
#: the tile of these follows the number of rows, and with it the order of their sums; those with True have a second
#: form on one tile, named ``<operation>_invariant``
BATCH_DEPENDENT = {
    "linear": True,
    "linear_grouped": True,
    "mhc_mixes": True,
    "attend_cached": True,
    "moe_experts": True,
    "shared_expert": True,
}

#: how a kernel may differ from the reference where its operation's tolerance is not meant for it: tensor cores keep
#: about 24 bits of a sum of bf16 products, and short sums were seen to differ by 1.0e-6
TOLERANCES = {"head_logits": Tolerance(relative=3e-6)}

#: names of the kernels compiled in this process because no cache held them; does not grow once all shapes were met
compiled: list[str] = []

#: Triton's cache while an operation of an engine runs, None: Triton's own; other engines may have others, in other
#: threads
folder: ContextVar[str | None] = ContextVar("folder", default=None)
#: releases whose kernels were compiled and compared here
OLDEST, NEWEST = (3, 6), (3, 9)


def missing(cache: Path | None = None) -> str | None:
    """What keeps Triton from running here, in one sentence with the next step; None when nothing does.

    Kernels have to be in the kernel cache: compiling them in the first steps would stop the answers for a minute.
    """
    platform = _platform()
    if not platform.startswith("sm"):
        return platform
    if next(((cache or default_cache()) / platform).glob("*.cubin"), None) is None:
        return f"not built for this device: deepinfer build-kernels --target {platform}"
    return None


def lacks(op: str, invariant: bool, shapes: Shapes, platform: str, cache: Path) -> str | None:
    """Which kernels of an operation Triton would compile while a model of these sizes is served; None without any."""
    from deepinfer_kernels.triton import build

    folder = cache / platform
    stamps = tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in (folder, folder / "triton"))
    absent = build.absent(shapes, platform, cache, invariant, stamps)
    if op not in absent:
        return None
    names, total = absent[op], len({job for jobs in absent.values() for job in jobs})
    moved = next((job.moved for job in names if job.moved), None)
    why = f", those there were made in {moved}" if moved else ""
    return (
        f"{len(names)} of its kernels are not built for the sizes of this model, first {names[0].name} "
        f"({total} of all operations){why}"
    )


def unusable() -> str | None:
    """What keeps Triton from compiling here, which takes no device; None when nothing does."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'deepinfer-cli[cuda]'"
    version = importlib.metadata.version("triton")
    if not OLDEST <= tuple(int(part) for part in version.split(".")[:2]) < NEWEST:
        return f"triton {version} is not between 3.6 and 3.8: pip install 'deepinfer-cli[cuda]'"
    return None


@functools.cache
def _platform() -> str:
    """The platform of the current device, or why there is none."""
    reason = unusable()
    if reason is not None:
        return reason
    import torch

    if not torch.cuda.is_available():
        return "there is no CUDA device"
    major, minor = torch.cuda.get_device_capability()
    return f"sm{major}{minor}"


def operation(
    module: str, name: str, reference: Callable[..., Any], package: str = "deepinfer_kernels.triton"
) -> Callable[..., Any]:
    """The operation ``name`` with the signature of its reference; its module is imported at the first call."""
    made: list[Callable[..., Any]] = []

    @functools.wraps(reference)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not made:
            made.append(getattr(importlib.import_module(f"{package}.{module}"), name))
        return made[0](*args, **kwargs)

    return call


def reading(fn: Callable[..., Any], cache: Path) -> Callable[..., Any]:
    """``fn``, with kernels that this process has not loaded yet taken from ``cache``."""
    here = str(cache / _platform() / "triton")

    @functools.wraps(fn)
    def call(*args: Any, **kwargs: Any) -> Any:
        before = folder.set(here)
        try:
            return fn(*args, **kwargs)
        finally:
            folder.reset(before)

    return call
