"""Times of vendor libraries beside this repository's kernels, at V4.1-Flash's shapes and on the same device.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.vendors`` prints a table of what is installed and fits the
device. Ours reads the official weights and records; a vendor's numbers are for the operands it takes, which are named:
DeepGEMM's Hopper products want FP8 with scales of 128, which these weights do not have, or BF16; FlashMLA's sparse
attention wants BF16 rows, which are four times a record. ``--warm I/N`` compiles every Nth case from the Ith.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_kernels.triton import attention, cache, hyper, index, linear, moe, norm
from deepinfer_kernels.vendor import deep_gemm, flash_mla, libraries, tile_kernels
from recipes.kernels.bench import (
    DECODE,
    NUM,
    OL,
    PREFILL,
    QL,
    Call,
    D,
    E,
    G,
    H,
    I,
    K,
    N,
    bank,
    bf,
    ceilings,
    fp8,
    timed,
)

#: (library, what is timed, bytes, operations, ours, theirs)
Case = tuple[str, str, int, int, Callable[[], Call] | None, Callable[[], Call]]


def _e4m3(*shape: int) -> Tensor:
    return (torch.randn(*shape, device="cuda") * 64).clamp(-448, 448).to(torch.float8_e4m3fn)


def _ones(*shape: int) -> Tensor:
    return torch.ones(*shape, device="cuda")


def _products(T: int, outs: int, inner: int) -> Iterator[Case]:
    weight = fp8(outs, inner)
    work = (outs * inner + 2 * T * (inner + outs), 2 * T * outs * inner)

    def ours() -> Call:
        x, w = bf(T, inner), replace(weight, data=weight.data.clone())
        return lambda: linear.linear(NUM, x, w)

    def wide() -> Call:
        a, b, d = bf(T, inner), bf(outs, inner), bf(T, outs)
        call = libraries.function("deep_gemm", "bf16_gemm_nt")
        return lambda: call(a, b, d)

    def small() -> Call:
        a, b = (_e4m3(T, inner), _ones(T, inner // 128)), (_e4m3(outs, inner), _ones(-(-outs // 128), inner // 128))
        d = bf(T, outs)
        call = libraries.function("deep_gemm", "fp8_fp4_gemm_nt")
        return lambda: call(a, b, d, recipe=(1, 128, 128))

    yield "deep_gemm", f"linear T{T} {outs}x{inner}: bf16", *work, ours, wide
    yield "deep_gemm", f"linear T{T} {outs}x{inner}: fp8 scales of 128", *work, ours, small


def _grouped_projection(T: int) -> Iterator[Case]:
    inner, weight = N * D // G, fp8(G, OL, N * D // G)

    def ours() -> Call:
        x, w = bf(T, G, inner), replace(weight, data=weight.data.clone())
        return lambda: linear.linear_grouped(NUM, x, w)

    def theirs() -> Call:
        a, b, d = bf(T, G, inner), bf(G, OL, inner), bf(T, G, OL)
        call = libraries.function("deep_gemm", "einsum")
        return lambda: call("bhr,hdr->bhd", a, b, d)

    size = G * OL * inner
    yield "deep_gemm", f"linear_grouped T{T}: bf16", size + 2 * T * G * (inner + OL), 2 * T * size, ours, theirs


def _experts(T: int, ranks: int) -> Iterator[Case]:
    slots, M = E // ranks, T * K
    share = torch.ones(slots)
    share[::8] = 3
    counts = (share / share.sum() * M).floor().long()
    counts[0] += M - int(counts.sum())
    bytes_, flops = int((counts > 0).sum()) * 3 * H * I * 17 // 32 + 4 * M * H, 6 * M * H * I
    name = f"moe_experts EP{ranks} T{T} M{M}"

    def ours() -> Call:
        x, c, w, mine = bf(M, H), counts.cuda(), torch.rand(M, device="cuda"), bank(slots)
        return lambda: moe.moe_experts(NUM, x, c, mine, w, 10.0)

    def contiguous(small: bool) -> Call:
        align = libraries.function("deep_gemm", "get_mk_alignment_for_contiguous_layout")()
        _, ends, total = deep_gemm.spread(counts.cuda(), M, align)
        call = libraries.function(
            "deep_gemm", f"m_grouped_{'fp8_fp4' if small else 'bf16'}_gemm_nt_contiguous"
        )  # fmt: skip
        x, a, y = _operand(small, total, H), _operand(small, total, I), (bf(total, I), bf(total, I), bf(total, H))
        w1, w3, w2 = _experts_of(small, slots, I, H), _experts_of(small, slots, I, H), _experts_of(small, slots, H, I)
        extra: dict[str, Any] = {"recipe": (1, 128, 128)} if small else {}

        def run() -> Tensor:  # products and the activation; rows are already apart, as a dispatch would leave them
            call(x, w1, y[0], ends, use_psum_layout=True, **extra)
            call(x, w3, y[1], ends, use_psum_layout=True, **extra)
            F.silu(y[0]).mul_(y[1])
            call(a, w2, y[2], ends, use_psum_layout=True, **extra)
            return y[2]

        return run

    def masked() -> Call:
        most = -(-int(counts.max()) // 64) * 64
        call = libraries.function("deep_gemm", "m_grouped_fp8_fp4_gemm_nt_masked")
        x, a = ((_e4m3(slots, most, n), _ones(slots, most, n // 128)) for n in (H, I))
        y = (bf(slots, most, I), bf(slots, most, I), bf(slots, most, H))
        w1, w3, w2 = _experts_of(True, slots, I, H), _experts_of(True, slots, I, H), _experts_of(True, slots, H, I)
        rows, mean = counts.int().cuda(), max(1, M // slots)

        def run() -> Tensor:
            call(x, w1, y[0], rows, mean, recipe=(1, 128, 128))
            call(x, w3, y[1], rows, mean, recipe=(1, 128, 128))
            F.silu(y[0]).mul_(y[1])
            call(a, w2, y[2], rows, mean, recipe=(1, 128, 128))
            return y[2]

        return run

    yield "deep_gemm", f"{name}: bf16 grouped", bytes_, flops, ours, partial(contiguous, False)
    yield "deep_gemm", f"{name}: fp8 grouped, scales of 128", bytes_, flops, ours, partial(contiguous, True)
    if T == DECODE:
        yield "deep_gemm", f"{name}: fp8 masked, scales of 128", bytes_, flops, ours, masked


def _operand(small: bool, rows: int, width: int) -> Any:
    return (_e4m3(rows, width), _ones(rows, width // 128)) if small else bf(rows, width)


def _experts_of(small: bool, slots: int, outs: int, inner: int) -> Any:
    if small:
        return _e4m3(slots, outs, inner), _ones(slots, -(-outs // 128), inner // 128)
    return bf(slots, outs, inner)


def _scores(B: int, C: int, n: int) -> Iterator[Case]:
    bytes_, flops = B * n * (256 + 4 * C), 2 * B * C * 32 * n * 128

    def ours() -> Call:
        q, w, keys = bf(B, C, 32, 128), bf(B, C, 32), bf(B, n, 128)
        visible = torch.full((B, C), n, device="cuda")
        return lambda: index.index_scores(NUM, q, w, keys, visible)

    def theirs() -> Call:
        q, kv, w = (_e4m3(B * C, 32, 128), None), (_e4m3(B * n, 128), _ones(B * n)), torch.rand(B * C, 32).cuda()
        first = torch.arange(B, device="cuda", dtype=torch.int32).mul_(n).repeat_interleave(C)
        call = libraries.function("deep_gemm", "fp8_fp4_mqa_logits")
        return lambda: call(q, kv, w, first, first + n, clean_logits=False, max_seqlen_k=n)

    yield "deep_gemm", f"index_scores B{B} C{C} n{n}: fp8 rows", bytes_, flops, ours, theirs


def _mixes(T: int) -> Iterator[Case]:
    fn, base, scale = torch.randn(24, 4 * H, device="cuda"), torch.randn(24).cuda(), torch.rand(3).cuda()
    options: dict[str, Any] = dict(rms_eps=1e-20, hc_eps=1e-6, iters=20)

    def ours() -> Call:
        X = bf(T, 4, H)
        return lambda: hyper.mhc_mixes(NUM, X, fn, base, scale, **options)

    def theirs() -> Call:
        X, d, s = bf(T, 4 * H), torch.empty(T, 24, device="cuda"), torch.empty(T, device="cuda")
        call = libraries.function("deep_gemm", "tf32_hc_prenorm_gemm")
        return lambda: call(X, fn, d, s)

    bytes_ = 8 * T * H + 96 * 4 * H
    yield "deep_gemm", f"mhc_mixes T{T}: tf32 product alone", bytes_, 2 * T * 96 * H, ours, theirs


def _attend(T: int, prefill: bool) -> Iterator[Case]:
    rows = 4 * 134 if prefill else T * 134
    ring, entries = cache.pack_rows(NUM, bf(rows, D), "window"), cache.pack_rows(NUM, bf(65536, D), "global")
    sink = torch.randn(N, device="cuda")
    places = torch.arange(T, device="cuda").unsqueeze(1) - torch.arange(127, -1, -1, device="cuda")
    window = torch.where(places >= 0, places, places - 1) if prefill else -2 - torch.randint(0, rows, (T, 128)).cuda()
    slots = torch.stack([torch.randperm(65536, device="cuda")[:512].sort().values for _ in range(T)])

    def ours() -> Call:
        q, local, store, mine = bf(T, N, D), bf(T, D), ring.clone(), entries if prefill else entries.clone()
        return lambda: attention.attend_cached(NUM, q, local, window, store, slots, mine, sink, D**-0.5)

    def gathered() -> Call:
        q, local = bf(T, N, D), bf(T, D)
        kv, at = flash_mla._rows(NUM, local, window, ring, slots, entries)
        kv, at = kv.bfloat16().unsqueeze(1).contiguous(), at.to(torch.int32).unsqueeze(1).contiguous()
        call = libraries.function("flash_mla", "flash_mla_sparse_fwd")
        return lambda: call(q, kv, at, D**-0.5, attn_sink=sink)

    def adapter() -> Call:
        q, local = bf(T, N, D), bf(T, D)
        return lambda: flash_mla.attend_cached(NUM, q, local, window, ring, slots, entries, sink, D**-0.5)

    records = T * D * 2 + 4 * 134 * 528 if prefill else T * 128 * 528
    records += 65536 * 288 if prefill else T * 512 * 288
    work = (records + 4 * T * N * D, 4 * T * N * D * 640)
    name = f"attend_cached {'prefill' if prefill else 'decode'} T{T}"
    yield "flash_mla", f"{name}: bf16 rows already widened", *work, ours, gathered
    yield "flash_mla", f"{name}: widened each call", *work, ours, adapter


def _rows(T: int) -> Iterator[Case]:
    cos, sin = torch.rand(T, 32, device="cuda"), torch.rand(T, 32, device="cuda")
    pairs: list[tuple[str, int, Callable[[Any], Call]]] = [
        (f"rope T{T} {N}x{D}", 4 * T * N * D, lambda m: partial(m.rope, NUM, bf(T, N, D), cos, sin)),
        (f"pack_rows window T{T}", T * D * 3, lambda m: partial(m.pack_rows, NUM, bf(T, D), "window")),
        (f"pack_rows global T{T}", T * (2 * D + 288), lambda m: partial(m.pack_rows, NUM, bf(T, D), "global")),
        (
            f"mhc_expand T{T}",
            18 * T * H,
            lambda m: partial(
                m.mhc_expand, NUM, bf(T, 4, H), bf(T, H), torch.rand(T, 4).cuda(), torch.rand(T, 4, 4).cuda()
            ),
        ),
    ]
    ours_of = {"rope": norm, "pack": cache, "mhc_": hyper}
    for name, bytes_, make in pairs:
        yield "tile_kernels", name, bytes_, 0, partial(make, ours_of[name[:4]]), partial(make, tile_kernels)


def cases() -> Iterator[Callable[[], Iterator[Case]]]:
    for T in (DECODE, PREFILL):
        for ranks in (8, 64):
            yield partial(_experts, T, ranks)
    yield partial(_attend, DECODE, False)
    yield partial(_attend, PREFILL, True)
    yield partial(_scores, 64, 1, 16384)
    yield partial(_scores, 1, 1024, 16384)
    for T in (DECODE, PREFILL):
        yield from (partial(_products, T, *shape) for shape in ((N * D, QL), (H, G * OL)))
        yield partial(_grouped_projection, T)
        yield partial(_mixes, T)
        yield partial(_rows, T)


def _safely(fn: Callable[[], Any]) -> Any:
    """The result, or what went wrong in one line: one failing case must not lose the others."""
    try:
        return fn()
    except Exception as exc:
        return f"{type(exc).__name__}: {(str(exc).splitlines() or [''])[0][:120]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    parser.add_argument("--warm", help="I/N: compile every Nth case from the Ith, measure nothing")
    args = parser.parse_args()
    torch.manual_seed(0)
    absent = {name: libraries.missing(name, ()) for name in ("deep_gemm", "flash_mla", "tile_kernels")}
    todo = list(cases())
    if args.warm:
        first, step = (int(part) for part in args.warm.split("/"))
        for make in todo[first::step]:
            for library, _, _, _, ours, theirs in make():
                for side in (ours, None if absent[library] else theirs):
                    if side is not None:
                        _safely(lambda side=side: side()())
            gc.collect()
            torch.cuda.empty_cache()
        return
    copy, product = ceilings()
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s; {absent}")
    rows: list[dict[str, Any]] = [{"copy_gb_s": copy / 1e9, "bf16_tflop_s": product / 1e12, "absent": absent}]
    known: dict[str, Any] = {}
    for make in todo:
        for library, name, bytes_, flops, ours, theirs in make():
            what = name.partition(":")[0]
            if what not in known and ours is not None:
                known[what] = _safely(lambda ours=ours, n=bytes_: timed(ours, n))
            us = absent[library] or _safely(lambda theirs=theirs, n=bytes_: timed(theirs, n))
            bound = max(bytes_ / copy, flops / product) * 1e6
            row = {"library": library, "name": name, "bound_us": bound, "ours_us": known.get(what), "theirs_us": us}
            rows.append(row)
            shown = [f"{v:9.1f}" if isinstance(v, float) else str(v) for v in (known.get(what), us)]
            print(f"{library:12s} {name:52s} bound {bound:8.1f}  ours {shown[0]}  theirs {shown[1]}", flush=True)
        gc.collect()
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
