"""Arguments of the operations that are compiled for CPUs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deepinfer_kernels.cpu.moe import prepare_weight
from deepinfer_kernels.reference import quantise
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS

H, C, E, K, WIDTH, N, D = 160, 4, 12, 3, 64, 5, 64


def bf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def weight(*shape: int) -> Weight:
    return Weight(bf(*shape, scale=shape[-1] ** -0.5), "fp8")


def experts(slots: int, out: int, inner: int, low: int = 119, high: int = 123) -> Weight:
    """Random MXFP4 weights in panels, of scales from 2^(low - 127) to 2^(high - 128)."""
    codes = torch.randint(0, 256, (slots, out, inner // 2), dtype=torch.uint8)
    scales = torch.randint(low, high, (slots, out, inner // 32), dtype=torch.uint8)
    return prepare_weight(NUMERICS["fast"], codes, scales, "fp4")


def rows_of(T: int, width: int) -> Tensor:
    """Random rows, of magnitudes from 2^-40 to 2^20, the first one zero and the last one with equal values."""
    x = bf(T, width) * torch.exp2(torch.randint(-40, 20, (T, 1)).float()).bfloat16()
    if T > 2:
        x[0], x[-1] = 0, 0.75
    return x


def make(name: str, T: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of an operation for T rows; whatever belongs to rows comes first and has T rows."""
    torch.manual_seed(T)
    if name == "linear":
        return (bf(T, H), weight(100, H)), {}
    if name == "linear_grouped":
        return (bf(T, 2, 96), weight(2, 33, 96)), {}
    if name == "head_logits":
        return (bf(T, H), weight(515, H)), {}
    if name == "rms_norm":
        return (rows_of(T, 200), torch.rand(200).bfloat16(), 1e-20), {}
    if name == "rope":
        angle = torch.rand(T, 8) * 100
        return (bf(T, N, D), angle.cos(), angle.sin()), {}
    if name == "mhc_mixes":
        fn = torch.randn(C * (C + 2), C * H) * 0.05
        return (bf(T, C, H), fn, torch.randn(C * (C + 2)), torch.rand(3)), dict(rms_eps=1e-20, hc_eps=1e-6, iters=20)
    if name == "mhc_collapse":
        return (bf(T, C, H), torch.rand(T, C)), {}
    if name == "mhc_expand":
        return (bf(T, C, H), bf(T, H), torch.rand(T, C), torch.rand(T, C, C)), {}
    if name == "gate_topk":
        choice = dict(k=K, normalise=True, scale=1.5, temperature=1.0)
        return (bf(T, H), torch.randn(E, H) * 0.1, torch.rand(E)), choice
    if name == "moe_experts":
        counts = torch.bincount(torch.randint(0, E, (T * K,)), minlength=E)
        bank = ExpertBank(experts(E, WIDTH, H), experts(E, WIDTH, H), experts(E, H, WIDTH))
        return (bf(T * K, H, scale=4), counts, bank, torch.rand(T * K), 2.0), {}
    if name == "shared_expert":
        return (bf(T, H, scale=4), weight(WIDTH, H), weight(WIDTH, H), weight(H, WIDTH), 2.0), {}
    if name == "moe_combine":
        return (bf(T * K, H), torch.randperm(T * K), bf(T, H), K), {}
    if name == "dispatch_permute":
        return (torch.randint(0, E, (T, K)), E), {}
    if name == "attend_cached":
        window = torch.randint(-52, T, (T, 33))  # rows of this step, hidden, and 50 rows of the ring
        window[0] = -1
        slots = torch.randint(-3, 40, (T, 9)).clamp(min=-1)
        ring, entries = quantise.pack_window(rows_of(51, D)), quantise.pack_global(rows_of(40, D))
        return (bf(T, N, D), bf(T, D), window, ring, slots, entries, torch.randn(N), D**-0.5), {}
    if name == "pack_rows":
        return (rows_of(T, D), "window"), {}
    if name == "unpack_rows":
        return (quantise.pack_global(rows_of(T, D)), "global"), {}
    if name == "load_rows":
        return (quantise.pack_window(rows_of(50, D)), torch.randint(-1, 50, (T, 6)), "window"), {}
    if name == "store_rows":
        return (
            torch.zeros(100, 33, dtype=torch.uint8),
            1 + torch.randperm(99)[:T],
            quantise.pack_window(rows_of(T, 32)),
        ), {}
    if name == "quantise_index_query":
        return (rows_of(T * 4, 32).view(T, 4, 32),), {}
    if name == "index_scores":
        return (bf(T, 2, 4, 32), bf(T, 2, 4), bf(T, 37, 32), torch.randint(0, 38, (T, 2))), {}
    if name == "select_topk":
        scores = torch.randint(-3, 4, (T, 2, 37)).float()  # many ties
        return (scores.masked_fill(torch.rand(T, 2, 37) < 0.4, float("-inf")),), dict(k=12)
    if name == "engram_hash":
        classes = torch.randint(-1, 50, (T, 4))
        primes = torch.tensor([[97, 101], [103, 107], [109, 113]])
        return (classes, 2, torch.tensor([3, 5, 2**40 + 1, 11]), primes, torch.arange(6).view(3, 2) * 200), {}
    if name == "dequantise_table":
        return tuple(quantise.quantise_q8(rows_of(T, D))), {}
    if name == "engram_gate":
        dead = torch.rand(T) < 0.3
        return (bf(T, C, H), bf(T, (C + 1) * H), torch.rand(C, H), torch.rand(C, H), dead, 1e-20), {}
    if name == "mhc_collapse_norm":
        return (bf(T, C, H), torch.rand(T, C), torch.rand(H).bfloat16(), 1e-20), {}
    if name in ("window_rows", "store_entries"):
        angle = torch.rand(T, 8) * 100
        rows = (rows_of(T, D), torch.rand(D).bfloat16(), 1e-20, angle.cos(), angle.sin())
        store = (torch.zeros(100, 36, dtype=torch.uint8), 1 + torch.randperm(99)[:T], "global")
        return (rows if name == "window_rows" else (*rows, *store)), {}
    if name == "store_pairs":
        return (torch.zeros(100, 2, 33), 1 + torch.randperm(99)[:T], torch.randn(T, 33), torch.randn(T, 33)), {}
    if name == "pool_pairs":
        return ((torch.randn(T, 41), torch.randn(T, 41) * 9), (torch.randn(T, 41), torch.randn(T, 41) * 9)), {}
    if name == "pool_cached":
        at = torch.arange(T)
        values = (torch.randn(T, 41), torch.randn(T, 41) * 9, torch.randn(50, 2, 41))
        return (*values, at, (at - 1).clamp(min=0), torch.randint(-1, 50, (T,)), torch.rand(T) < 0.5), {}
    if name == "dispatch_rows":
        return (bf(T, H), torch.randint(0, E, (T, K)), torch.rand(T, K), E), {}
    if name == "entry_slots":
        entries = torch.randint(-1, 40, (T, 9))
        return (entries, torch.randint(0, 5, (T,)), torch.randperm(20).view(5, 4)), dict(per_block=8, count=9)
    if name == "window_places":
        spans = torch.tensor([[0, 3, 0], [-1, 30, 20], [25, 40, 41]])
        row = torch.randint(0, 3, (T,))
        position = spans[row, 1] + torch.randint(0, 12, (T,))
        return (position, row, spans, torch.tensor([4, 0, 9])), dict(width=17, ring=22)
    if name == "pair_places":
        drawn = [torch.randint(low, high, (T,)) for low, high in ((0, 90), (0, 5), (-1, 400))]
        second, old = torch.randint(0, T, (T,)), torch.rand(T) < 0.5
        return (second, old, drawn[0], drawn[1], torch.randperm(5), drawn[2]), dict(ring=7)
    if name == "embed":
        return (torch.randint(0, 50, (T,)), bf(50, H)), {}
    if name == "embed_streams":
        return (torch.randint(0, 50, (T,)), bf(50, H), C), {}
    if name == "token_classes":
        return (torch.randint(-2, 50, (T, 4)), torch.randint(0, 30, (50,)), 7), {}
    if name == "engram_lookup":
        return (*quantise.quantise_q8(rows_of(50, D)), torch.randint(0, 50, (T, 3))), {}
    raise AssertionError(f"no inputs for {name}")
