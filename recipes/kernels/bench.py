"""Times of the GPU kernels at V4.1-Flash's shapes, beside what torch offers for the same work.

``PYTHONPATH=.:engine:kernels python -m recipes.kernels.bench --out FILE.json`` prints a table. A case is captured in a
CUDA graph that cycles over copies of its inputs larger than the L2 cache; the time is the median of its replays. The
bound of a case is the larger of its bytes over the measured copy rate and its operations over the measured rate of a
large bf16 product; "share" is bound over time. ``--warm I/N`` compiles every Nth case without timing, so that several
processes fill Triton's cache first. ``--backend tilelang`` times the operations that TileLang has, with Triton's
beside them; they have to be in the kernel cache (``build-kernels --target sm90 --model deepseek-v4.1-flash``).
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from deepinfer_kernels.kernel_cache import default_cache
from deepinfer_kernels.reference import attention as ref_attention
from deepinfer_kernels.reference import index as ref_index
from deepinfer_kernels.reference import norm as ref_norm
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.tilelang import families as tilelang
from deepinfer_kernels.triton import attention, cache, hyper, index, linear, moe, norm, places
from deepinfer_kernels.triton import router as choose
from deepinfer_kernels.triton.linear import Tile

#: torch's products of FP8 operands, which have no public name
_scaled_mm, _scaled_grouped_mm = (getattr(torch, name) for name in ("_scaled_mm", "_scaled_grouped_mm"))

#: compiled at its first call
_flex = torch.compile(flex_attention, dynamic=False)

NUM = NUMERICS["fast"]
#: V4.1-Flash: hidden, heads, head dim, query latent, output groups and their rank, experts, choices, expert width
H, N, D, QL, G, OL, E, K, I = 5120, 64, 512, 1280, 8, 1024, 384, 6, 2304  # noqa: E741
DECODE, PREFILL = 64, 2048  # tokens of a rank in a step
L2_BYTES = 60 << 20

Call = Callable[[], Any]


@dataclass
class Case:
    """One operation at one shape: its work, our call and others' for the same, each made for a fresh set of inputs."""

    name: str
    bytes: int
    flops: int
    ours: Callable[[], Call]
    others: dict[str, Callable[[], Call]] = field(default_factory=dict)


def bf(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def u8(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, device="cuda", dtype=torch.uint8)


def tiled(kind: Literal["fp8", "fp4"], *shape: int) -> Weight:
    """Random codes but NaN and scales around 2^-8, in the tiles of prepare_weight."""
    count = shape[0] if len(shape) > 2 else 1
    made = [_one(kind, *shape[-2:]) for _ in range(count)]
    if len(shape) == 2:
        return made[0]
    data, scale = (torch.stack(parts) for parts in zip(*((w.data, w.scale) for w in made), strict=True))
    return replace(made[0], data=data, scale=scale)


def _one(kind: Literal["fp8", "fp4"], outs: int, inner: int) -> Weight:
    code = u8(outs, inner if kind == "fp8" else inner // 2)
    if kind == "fp8":
        code = torch.where((code & 0x7F) == 0x7F, code & 0xF8, code)
    rows = -(-outs // 32) if kind == "fp8" else outs
    scale = torch.randint(117, 121, (rows, inner // 32), device="cuda", dtype=torch.uint8)
    return linear.prepare_weight(NUM, code, scale, kind)


def fp8(*shape: int) -> Weight:
    return tiled("fp8", *shape)


def fp4(*shape: int) -> Weight:
    return tiled("fp4", *shape)


def bank(slots: int) -> ExpertBank:
    return ExpertBank(fp4(slots, I, H), fp4(slots, I, H), fp4(slots, H, I))


def _linear(T: int, outs: int, inner: int, groups: int = 1) -> Case:
    weight = fp8(groups, outs, inner) if groups > 1 else fp8(outs, inner)
    shape = (T, groups, inner) if groups > 1 else (T, inner)

    def ours() -> Call:
        x, w = bf(*shape), replace(weight, data=weight.data.clone())
        fn = linear.linear_grouped if groups > 1 else linear.linear
        return lambda: fn(NUM, x, w)

    def dense() -> Call:
        x, w = bf(*shape), bf(groups, outs, inner) if groups > 1 else bf(outs, inner)
        if groups > 1:
            return lambda: torch.einsum("tgi,goi->tgo", x, w)
        return lambda: F.linear(x, w)

    def scaled() -> Call:
        x, w = bf(*shape).to(torch.float8_e4m3fn), weight.stored[0].view(torch.float8_e4m3fn)
        a, b = torch.ones(T, 1, device="cuda"), torch.ones(1, outs, device="cuda")
        return lambda: _scaled_mm(x, w.mT, a, b, out_dtype=torch.bfloat16, use_fast_accum=True)

    others = {"bf16 matmul": dense} if groups > 1 else {"bf16 matmul": dense, "_scaled_mm fp8 rowwise": scaled}
    work = groups * outs * inner
    name = f"linear fp8 T{T} {f'{groups}x' if groups > 1 else ''}{outs}x{inner}"
    return Case(name, work + 2 * T * groups * (inner + outs), 2 * T * work, ours, others)


def _experts(T: int, ranks: int) -> Case:
    """The rows that reach one of ``ranks`` ranks when each sends T tokens, evenly over the experts but one in eight."""
    slots, M = E // ranks, T * K
    share = torch.ones(slots)
    share[::8] = 3
    counts = (share / share.sum() * M).floor().long()
    counts[0] += M - int(counts.sum())
    active = int((counts > 0).sum())
    weights = bank(slots)

    def ours() -> Call:
        x, c, w = bf(M, H), counts.cuda(), torch.rand(M, device="cuda")
        mine = ExpertBank(*(replace(v, data=v.data.clone()) for v in (weights.w1, weights.w3, weights.w2)))
        return lambda: moe.moe_experts(NUM, x, c, mine, w, 10.0)

    def grouped() -> Call:
        x, ends = bf(M, H), counts.cumsum(0).int().cuda()
        w1, w3, w2 = bf(slots, I, H), bf(slots, I, H), bf(slots, H, I)

        def run() -> Tensor:
            g, u = F.grouped_mm(x, w1.mT, offs=ends), F.grouped_mm(x, w3.mT, offs=ends)
            return F.grouped_mm(F.silu(g) * u, w2.mT, offs=ends)

        return run

    def scaled() -> Call:
        x, ends = bf(M, H).to(torch.float8_e4m3fn), counts.cumsum(0).int().cuda()
        w = [u8(slots, a, b).bitwise_and(0x77).view(torch.float8_e4m3fn) for a, b in ((I, H), (I, H), (H, I))]
        rows = torch.ones(M, device="cuda")
        wide, high = torch.ones(slots, I, device="cuda"), torch.ones(slots, H, device="cuda")

        def mm(a: Tensor, b: Tensor, s: Tensor) -> Tensor:
            return _scaled_grouped_mm(a, b.mT, rows, s, offs=ends, out_dtype=torch.bfloat16, use_fast_accum=True)

        def run() -> Tensor:
            g, u = mm(x, w[0], wide), mm(x, w[1], wide)
            return mm((F.silu(g) * u).to(torch.float8_e4m3fn), w[2], high)

        return run

    others = {"grouped_mm bf16": grouped, "scaled_grouped_mm fp8 rowwise": scaled}
    work = active * 3 * H * I * 17 // 32 + 4 * M * H
    return Case(f"moe_experts EP{ranks} T{T} M{M}", work, 6 * M * H * I, ours, others)


def _shared(T: int) -> Case:
    weights = (fp8(I, H), fp8(I, H), fp8(H, I))

    def ours() -> Call:
        x, (w1, w3, w2) = bf(T, H), (replace(v, data=v.data.clone()) for v in weights)
        return lambda: moe.shared_expert(NUM, x, w1, w3, w2, 10.0)

    def dense() -> Call:
        x, w1, w3, w2 = bf(T, H), bf(I, H), bf(I, H), bf(H, I)
        return lambda: F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)

    return Case(f"shared_expert T{T}", 3 * H * I + 4 * T * H, 6 * T * H * I, ours, {"bf16 matmuls": dense})


def _attend(T: int, prefill: bool) -> Case:
    rows = 4 * 134 if prefill else T * 134
    ring, entries = cache.pack_rows(NUM, bf(rows, D), "window"), cache.pack_rows(NUM, bf(65536, D), "global")
    sink = torch.randn(N, device="cuda")
    at = torch.arange(T, device="cuda").unsqueeze(1) - torch.arange(127, -1, -1, device="cuda")
    window = torch.where(at >= 0, at, at - 1) if prefill else -2 - torch.randint(0, rows, (T, 128)).cuda()

    def ours() -> Call:
        q, local, store = bf(T, N, D), bf(T, D), ring.clone()
        slots = torch.stack([torch.randperm(65536, device="cuda")[:512].sort().values for _ in range(T)])
        mine = entries if prefill else entries.clone()
        return lambda: attention.attend_cached(NUM, q, local, window, store, slots, mine, sink, D**-0.5)

    def dense() -> Call:
        q, keys = bf(T, 1, N, D), bf(T, 1, 640, D)
        return lambda: F.scaled_dot_product_attention(q, keys, keys)

    def flex() -> Call:
        q, keys = bf(T, 1, N, D), bf(T, 1, 640, D)
        options: Any = {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 1}  # what fits for this width
        return lambda: _flex(q, keys, keys, scale=D**-0.5, kernel_options=options)

    def plain() -> Call:
        q, local = bf(T, N, D), bf(T, D)
        slots = torch.randint(0, 65536, (T, 512), device="cuda")
        return lambda: ref_attention.attend_cached(NUM, q, local, window, ring, slots, entries, sink, D**-0.5)

    # the records of a prefill chunk are shared by its queries; at worst every query of a decode step reads its own
    records = T * D * 2 + 4 * 134 * 528 if prefill else T * 128 * 528
    records += 65536 * 288 if prefill else T * 512 * 288
    others = {"SDPA of gathered bf16 keys": dense, "flex_attention of gathered bf16 keys": flex}
    others |= {} if prefill else {"plain torch": plain}
    what = "prefill" if prefill else "decode"
    return Case(f"attend_cached {what} T{T} 128+512", records + 4 * T * N * D, 4 * T * N * D * 640, ours, others)


def _scores(B: int, C: int, n: int) -> Case:
    def ours() -> Call:
        q, w, keys = bf(B, C, 32, 128), bf(B, C, 32), bf(B, n, 128)
        visible = torch.full((B, C), n, device="cuda")
        return lambda: index.index_scores(NUM, q, w, keys, visible)

    def plain() -> Call:
        q, w, keys = bf(B, C, 32, 128), bf(B, C, 32), bf(B, n, 128)
        visible = torch.full((B, C), n, device="cuda")
        return lambda: ref_index.index_scores(NUM, q, w, keys, visible)

    others = {"plain torch": plain} if B * C * n <= 1 << 20 else {}
    return Case(f"index_scores B{B} C{C} n{n}", B * n * (256 + 4 * C), 2 * B * C * 32 * n * 128, ours, others)


def _cached_scores(B: int, C: int, n: int) -> Case:
    """Scores of stored records; beside it what three operations do: slots of entries, keys of slots, scores of keys."""

    def given() -> tuple[tuple[Tensor, ...], dict[str, int]]:
        store = u8(B * n, 68)
        store[:, 64:] = store[:, 64:] % 8 + 120  # scales around 1
        table = torch.randperm(B * n // 128, device="cuda").view(B, n // 128)
        rows, visible = torch.arange(B, device="cuda"), torch.full((B, C), n, device="cuda")
        return (bf(B, C, 32, 128), bf(B, C, 32), store, rows, table, visible), {"per_block": 128, "count": n}

    def ours() -> Call:
        args, sizes = given()
        return lambda: index.index_scores_cached(NUM, *args, **sizes)

    def composed() -> Call:
        (q, w, store, rows, table, visible), sizes = given()

        def run() -> Tensor:
            slots = places.entry_slots(NUM, None, rows, table, **sizes)
            return index.index_scores(NUM, q, w, cache.load_rows(NUM, store, slots, "index"), visible)

        return run

    others = {"entry_slots + load_rows + index_scores": composed}
    return Case(f"index_scores_cached B{B} C{C} n{n}", B * n * (68 + 4 * C), 2 * B * C * 32 * n * 128, ours, others)


def _rows(T: int) -> Iterator[Case]:
    w = bf(H)

    def normed() -> Call:
        x = bf(T, H)
        return lambda: norm.rms_norm(NUM, x, w, 1e-20)

    def torch_norm() -> Call:
        x = bf(T, H)
        return lambda: F.rms_norm(x, (H,), w, 1e-20)

    yield Case(f"rms_norm T{T} H{H}", 4 * T * H, 4 * T * H, normed, {"F.rms_norm": torch_norm})
    cos, sin = torch.rand(T, 32, device="cuda"), torch.rand(T, 32, device="cuda")

    def turned() -> Call:
        x = bf(T, N, D)
        return lambda: norm.rope(NUM, x, cos, sin)

    def plain_turned() -> Call:
        x = bf(T, N, D)
        return lambda: ref_norm.rope(NUM, x, cos, sin)

    yield Case(f"rope T{T} {N}x{D}", 4 * T * N * D, 0, turned, {"plain torch": plain_turned})
    for kind in ("window", "global"):

        def packed(kind: str = kind) -> Call:
            x = bf(T, D)
            return lambda: cache.pack_rows(NUM, x, kind)

        yield Case(f"pack_rows {kind} T{T} D{D}", T * D * (2 + (1 if kind == "window" else 0)) + T * 288, 0, packed)
    fn, base, scale = torch.randn(24, 4 * H, device="cuda"), torch.randn(24).cuda(), torch.rand(3).cuda()

    def mixed() -> Call:
        X = bf(T, 4, H)
        return lambda: hyper.mhc_mixes(NUM, X, fn, base, scale, rms_eps=1e-20, hc_eps=1e-6, iters=20)

    yield Case(f"mhc_mixes T{T}", 8 * T * H + 96 * 4 * H, 2 * T * 24 * 4 * H, mixed)

    def collapsed() -> Call:
        X, pre = bf(T, 4, H), torch.rand(T, 4, device="cuda")
        return lambda: hyper.mhc_collapse(NUM, X, pre)

    def expanded() -> Call:
        X, y = bf(T, 4, H), bf(T, H)
        post, comb = torch.rand(T, 4, device="cuda"), torch.rand(T, 4, 4, device="cuda")
        return lambda: hyper.mhc_expand(NUM, X, y, post, comb)

    yield Case(f"mhc_collapse T{T}", 10 * T * H, 8 * T * H, collapsed)
    yield Case(f"mhc_expand T{T}", 18 * T * H, 40 * T * H, expanded)
    router, bias = torch.randn(E, H, device="cuda"), torch.rand(E, device="cuda")

    def routed() -> Call:
        x = bf(T, H)
        return lambda: choose.gate_topk(NUM, x, router, bias, k=K, normalise=True, scale=1.5, temperature=1.0)

    yield Case(f"gate_topk T{T} E{E}", 4 * E * H + 2 * T * H, 2 * T * E * H, routed)

    def combined() -> Call:
        y, shared = bf(T * K, H), bf(T, H)
        order = torch.randperm(T * K, device="cuda")
        return lambda: moe.moe_combine(NUM, y, order, shared, K)

    yield Case(f"moe_combine T{T}", 2 * T * (K + 2) * H, T * K * H, combined)


def cases() -> Iterator[Callable[[], Case]]:
    """Every case, made only when it is its turn: their weights do not fit together."""
    for T in (DECODE, PREFILL):
        for outs, inner in ((N * D, QL), (H, G * OL), (QL, H), (D, H)):
            yield lambda T=T, outs=outs, inner=inner: _linear(T, outs, inner)
        yield lambda T=T: _linear(T, OL, N * D // G, G)
        yield lambda T=T: _shared(T)
        for ranks in (8, 64):
            yield lambda T=T, ranks=ranks: _experts(T, ranks)
        yield lambda T=T: _attend(T, T == PREFILL)
    yield lambda: _attend(4, False)
    yield lambda: _scores(64, 1, 16384)
    yield lambda: _scores(1, 1024, 16384)
    for B, C in ((64, 1), (1, 1), (1, 1024)):
        yield lambda B=B, C=C: _cached_scores(B, C, 16384)
    for T in (DECODE, PREFILL):
        yield from (lambda case=case: case for case in _rows(T))


def sweeps() -> Iterator[tuple[str, Callable[[], Case], Callable[[], None]]]:
    """(label, case, what to set) of tiles to try; ``linear.tile``, ``moe.tiles`` and ``attention.TILE`` are set."""
    few = [(128, 64, 128, 8, 3), (64, 64, 128, 4, 3), (128, 64, 128, 4, 3), (128, 64, 64, 8, 5), (64, 64, 256, 4, 2)]
    many = [
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 4),
        (128, 256, 64, 8, 4),
        (128, 128, 128, 8, 3),
        (64, 256, 64, 4, 4),
    ]
    slim = [(64, 16, 256, 4, 3), (64, 16, 128, 4, 4), (128, 16, 128, 8, 3), (128, 16, 256, 8, 2), (128, 16, 128, 4, 3)]
    slim += [(64, 16, 512, 4, 2), (64, 32, 256, 4, 3)]
    wide = [(64, 128, 128, 8, 3), (64, 64, 128, 4, 3), (128, 128, 64, 8, 3), (128, 64, 128, 8, 3), (64, 128, 128, 4, 3)]
    wide += [(64, 256, 64, 8, 3), (64, 64, 64, 4, 4), (128, 128, 128, 8, 2)]
    products: dict[str, Callable[[int], Case]] = {
        "linear": lambda T: _linear(T, N * D, QL),
        "moe": lambda T: _experts(T, 8),
    }
    order = (("moe", DECODE, slim), ("linear", DECODE, few), ("moe", PREFILL, wide), ("linear", PREFILL, many))
    for what, T, tiles in order:
        for t in tiles:
            yield f"{what} T{T} {t}", partial(products[what], T), partial(_use, Tile(*t))
    for T in (DECODE, PREFILL):
        for tile in [(32, 8, 2), (64, 8, 2), (64, 8, 1), (32, 8, 1), (32, 8, 3)]:
            yield f"attend T{T} {tile}", partial(_attend, T, T == PREFILL), partial(setattr, attention, "TILE", tile)


def _use(tile: Tile) -> None:
    """Make every product take this tile."""
    linear.tile = lambda T, N: tile
    moe.tiles = lambda rows, slots: (tile, tile)


def timed(make: Callable[[], Call], set_bytes: int, repeats: int = 7) -> float:
    """Median microseconds of one call, inside a graph over as many input sets as leave the cache."""
    sets = max(1, min(8, -(-L2_BYTES // max(1, set_bytes))))
    calls = [make() for _ in range(sets)]
    for call in calls:
        call()
    torch.cuda.synchronize()
    loops = max(1, 24 // sets)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(loops):
            for call in calls:
                call()
    graph.replay()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3 / (loops * sets))
    del graph, calls
    return median(times)


def ceilings() -> tuple[float, float]:
    """(bytes per second of a large copy, read plus written; bf16 operations per second of a large product)."""
    x = bf(1 << 29)
    y = torch.empty_like(x)
    copy = 4 * x.numel() / timed(lambda: lambda: torch.neg(x, out=y), 1 << 31) * 1e6  # faster than a plain copy
    a, b = bf(8192, 8192), bf(8192, 8192)
    product = 2 * 8192**3 / timed(lambda: lambda: a @ b, 1 << 31, 3) * 1e6
    return copy, product


def _safely(fn: Callable[[], Any]) -> Any:
    """The result, or what went wrong in one line: one failing case must not lose the others."""
    try:
        return fn()
    except Exception as exc:
        torch.cuda.synchronize()
        return f"{type(exc).__name__}: {str(exc).splitlines()[0][:160]}" if str(exc) else type(exc).__name__


@contextmanager
def tilelang_in_place(cache: Path | None) -> Iterator[set[str]]:
    """Cases call TileLang's forms of these operations while this holds. Raises SystemExit where they cannot run."""
    homes = {"attend_cached": attention, "moe_experts": moe, "shared_expert": moe, "index_scores": index}
    before = {name: getattr(homes[name], name) for names in tilelang.FAMILIES.values() for name in names}
    for module, names in tilelang.FAMILIES.items():
        reason = tilelang.missing(module, cache)
        if reason is not None:
            raise SystemExit(f"{module} of tilelang: {reason}")
        made = importlib.import_module(f"deepinfer_kernels.tilelang.{module}")
        for name in names:
            setattr(homes[name], name, tilelang.reading(getattr(made, name), cache or default_cache()))
    try:
        yield set(before)
    finally:
        for name, fn in before.items():
            setattr(homes[name], name, fn)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="JSON file of all rows")
    parser.add_argument(
        "--backend", choices=("triton", "tilelang"), default="triton", help="whose operations are timed"
    )
    parser.add_argument("--cache", type=Path, help="folder of compiled TileLang kernels; the user's without it")
    parser.add_argument("--warm", help="I/N: compile every Nth case from the Ith, measure nothing")
    parser.add_argument("--only", default="", help="cases whose name holds one of these words, separated by commas")
    parser.add_argument("--sweep", action="store_true", help="tiles instead of cases")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    args = parser.parse_args()
    began = time.monotonic()
    torch.manual_seed(0)
    todo = list(sweeps()) if args.sweep else [("", case, lambda: None) for case in cases()]
    if args.warm:
        first, step = (int(part) for part in args.warm.split("/"))
        for _, case, use in todo[first::step]:
            use()
            _safely(lambda case=case: case().ours()())
            gc.collect()
            torch.cuda.empty_cache()
        return
    copy, product = ceilings()
    rows: list[dict[str, Any]] = [{"name": "copy", "gb_s": copy / 1e9}, {"name": "bf16", "tflop_s": product / 1e12}]
    print(f"copy {copy / 1e12:.2f} TB/s, bf16 product {product / 1e12:.0f} TFLOP/s")
    for label, make, use in todo:
        if time.monotonic() - began > args.seconds:
            print(f"stopped before {label or 'the rest'}")
            break
        use()
        case = _safely(make)
        if isinstance(case, str):
            print(f"{label} {case}")
            continue
        if not any(word in case.name for word in args.only.split(",")):
            continue
        bound = max(case.bytes / copy, case.flops / product) * 1e6
        triton_us = None
        if args.backend == "tilelang":
            if case.name.split()[0] not in {name for names in tilelang.FAMILIES.values() for name in names}:
                continue
            triton_us = _safely(lambda case=case: timed(case.ours, case.bytes))
            with tilelang_in_place(args.cache):
                us = _safely(lambda case=case: timed(case.ours, case.bytes))
        else:
            us = _safely(lambda case=case: timed(case.ours, case.bytes))
        row: dict[str, Any] = {"name": label or case.name, "bytes": case.bytes, "flops": case.flops, "bound_us": bound}
        row["us"] = us
        text = us if isinstance(us, str) else f"{us:9.1f} us  {bound / us:4.0%} of {bound:.1f}"
        if triton_us is not None:
            row["others"] = {"triton": triton_us}
            text += f"  | triton {triton_us if isinstance(triton_us, str) else f'{triton_us:.1f}'}"
        elif not args.sweep:
            row["others"] = {k: _safely(lambda f=f, case=case: timed(f, case.bytes)) for k, f in case.others.items()}
            others = [f"{k} {v if isinstance(v, str) else f'{v:.1f}'}" for k, v in row["others"].items()]
            text += "  | " + ", ".join(others)
        rows.append(row)
        print(f"{row['name']:40s} {text}", flush=True)
        del case
        gc.collect()
        torch.cuda.empty_cache()
    if args.out:
        args.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
