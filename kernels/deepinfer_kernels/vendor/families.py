"""Every vendor adapter: which operation through which functions, where, under which numerics, how exact, where it ran.

Imports no library; an adapter's module is imported at its first call.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_kernels.spec import EXACT, Tolerance
from deepinfer_kernels.vendor import libraries

_HOPPER, _BLACKWELL = frozenset({"sm90"}), frozenset({"sm100"})
_GPUS = _HOPPER | _BLACKWELL
_FAST, _REFERENCE = frozenset({"fast"}), frozenset({"reference"})
#: rows and records do not depend on the numerics beyond having records at all
_ROUNDED = _FAST | _REFERENCE

_BF16 = Tolerance(relative=5e-3)  # products in BF16 with f32 sums in another order
_P_BF16 = Tolerance(relative=5e-3)  # probabilities rounded to BF16 before the value product
_TF32 = Tolerance(relative=2e-3)  # 11 significant bits of one operand, through a sigmoid and a Sinkhorn
_F32 = Tolerance(relative=1e-5)  # f32 in another order, approximate exponentials


@dataclass(frozen=True)
class Adapter:
    """One operation through a library: ``form`` is the adapter's function, ``needs`` the functions that it calls.

    ``tolerance``: against the reference under the same numerics. ``verified``: platforms on which it was compared
    with the reference; elsewhere only its layouts are checked, by tests on the CPU. ``copies``: it keeps its weights
    converted, see ``operands.kept``.
    """

    op: str
    library: str
    form: str
    needs: tuple[str, ...]
    platforms: frozenset[str]
    numerics: frozenset[str]
    tolerance: Tolerance
    verified: frozenset[str] = frozenset()
    batch_invariant: bool = False
    copies: bool = False

    def missing(self, cache: Path | None = None) -> str | None:
        """What is absent here, in one sentence with the next step; None when it can run."""
        absent = libraries.missing(self.library, (), cache)
        if absent is not None and "not installed" in absent:
            return absent
        import torch

        if not torch.cuda.is_available():
            return "there is no CUDA device"
        return libraries.missing(self.library, self.needs, cache)

    def operation(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The adapter with the signature of the reference; its module is imported at the first call."""
        made: list[Callable[..., Any]] = []

        @functools.wraps(reference)
        def call(*args: Any, **kwargs: Any) -> Any:
            if not made:
                module = importlib.import_module(f"deepinfer_kernels.vendor.{self.library}")
                made.append(getattr(module, self.form))
            return made[0](*args, **kwargs)

        return call


_GROUPED = ("m_grouped_bf16_gemm_nt_contiguous", "get_mk_alignment_for_contiguous_layout")
_GROUPED_MX = ("m_grouped_fp8_fp4_gemm_nt_contiguous", "get_mk_alignment_for_contiguous_layout")

ADAPTERS: tuple[Adapter, ...] = (
    Adapter("linear", "deep_gemm", "linear", ("bf16_gemm_nt",), _GPUS, _FAST, _BF16, _HOPPER),
    Adapter("linear", "deep_gemm", "linear_quantised", ("fp8_fp4_gemm_nt",), _BLACKWELL, _REFERENCE, _BF16),
    Adapter("linear_grouped", "deep_gemm", "linear_grouped", ("einsum",), _GPUS, _FAST, _BF16, _HOPPER),
    Adapter("shared_expert", "deep_gemm", "shared_expert", ("bf16_gemm_nt",), _GPUS, _FAST, _BF16, _HOPPER),
    Adapter(
        "shared_expert", "deep_gemm", "shared_expert_quantised", ("fp8_fp4_gemm_nt",), _BLACKWELL, _REFERENCE, _BF16
    ),
    Adapter("moe_experts", "deep_gemm", "moe_experts", _GROUPED, _GPUS, _FAST, _BF16, _HOPPER, copies=True),
    Adapter("moe_experts", "deep_gemm", "moe_experts_quantised", _GROUPED_MX, _BLACKWELL, _REFERENCE, _BF16,
            copies=True),
    Adapter("index_scores", "deep_gemm", "index_scores_fp8", ("fp8_fp4_mqa_logits",), _HOPPER, _FAST, _BF16, _HOPPER),
    Adapter("index_scores", "deep_gemm", "index_scores", ("fp8_fp4_mqa_logits",), _BLACKWELL, _FAST, _BF16),
    Adapter("mhc_mixes", "deep_gemm", "mhc_mixes", ("tf32_hc_prenorm_gemm",), _GPUS, _FAST, _TF32, _HOPPER),
    Adapter(
        "attend_cached", "flash_mla", "attend_records",
        ("flash_mla_with_kvcache", "get_mla_metadata", "fused_norm_rope_attn_rope_cast"), _BLACKWELL, _FAST, _P_BF16,
    ),
    Adapter("attend_cached", "flash_mla", "attend_cached", ("flash_mla_sparse_fwd",), _GPUS, _FAST, _P_BF16, _HOPPER),
    Adapter("pack_rows", "tile_kernels", "pack_rows", ("per_token_cast",), _GPUS, _ROUNDED, EXACT, _HOPPER,
            batch_invariant=True),
    Adapter("quantise_index_query", "tile_kernels", "quantise_index_query", ("per_token_cast",), _GPUS, _ROUNDED, EXACT,
            _HOPPER, batch_invariant=True),
    Adapter("rope", "tile_kernels", "rope", ("apply_rotary",), _GPUS, _ROUNDED, _BF16, _HOPPER),
    Adapter("mhc_expand", "tile_kernels", "mhc_expand", ("mhc_post_fwd",), _GPUS, _ROUNDED, _BF16, _HOPPER),
    Adapter("gate_topk", "tile_kernels", "gate_topk", ("moe_topk_gate",), _GPUS, _ROUNDED, _F32, _HOPPER),
    Adapter("engram_hash", "tile_kernels", "engram_hash", ("engram_hash",), _GPUS, _ROUNDED, EXACT, _HOPPER,
            batch_invariant=True),
    Adapter("engram_gate", "tile_kernels", "engram_gate", ("engram_gate_fwd",), _GPUS, _ROUNDED, _BF16, _HOPPER),
)  # fmt: skip
