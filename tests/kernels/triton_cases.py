"""Cases of test_triton.py: collected in a process of its own, interpreted on the CPU or on the CUDA device."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import triton  # pyright: ignore[reportMissingImports]
from torch import Tensor

from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import quantise
from deepinfer_kernels.reference.linear import Weight, in_tiles
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import IMPLEMENTATIONS, Ops
from deepinfer_kernels.triton import families, launch, linear

DEVICE = "cpu" if launch.INTERPRETED else "cuda"
SIZES = (1, 2, 7, 40) if not launch.INTERPRETED else (2, 7, 40)
#: those with cases here; triton_step_cases.py has the others
OPERATIONS = [
    n for m in ("norm", "cache", "linear", "hyper", "index", "attention", "moe") for n in families.FAMILIES[m]
]
H, C, E, K, WIDTH, N, D = 160, 4, 12, 3, 96, 5, 64


def _loops_over_tensors() -> None:
    """The interpreter of Triton 3.6 turns loop bounds, arrays of one element, into integers in a way numpy refuses."""
    from triton.runtime import interpreter  # pyright: ignore[reportMissingImports]

    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patched


if launch.INTERPRETED:
    _loops_over_tensors()


def chosen(backend: str, *, invariant: bool = False) -> Ops:
    """Every operation of one backend, others of the reference; without asking whether there is a device."""
    picked = {}
    for name, rows in IMPLEMENTATIONS.items():
        mine = [i for i in rows if i.backend == backend and (i.batch_invariant or not invariant)]
        picked[name] = mine[0] if mine else next(i for i in rows if i.backend == "reference")
    return Ops(NUMERICS["fast"], DEVICE, picked)


TRITON, REFERENCE, INVARIANT = chosen("triton"), chosen("reference"), chosen("triton", invariant=True)


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody writes holds NaN, or the largest integer, while this holds."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def bf(*shape: int, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).bfloat16()


def fp8(*shape: int) -> Weight:
    """A weight in the bytes of the checkpoint, with tiles of very different scales."""
    w = torch.randn(*shape) * shape[-1] ** -0.5
    w = w * torch.exp2(torch.randint(-9, 3, (*shape[:-1], 1)).float())
    parts = [quantise.quantise_fp8_tiles(part) for part in w.view(-1, *shape[-2:])]
    data, scale = (torch.stack([p[i] for p in parts]) for i in (0, 1))
    return tiled(data.view(shape), scale.view(*shape[:-2], *scale.shape[1:]), "fp8")


def fp4(*shape: int) -> Weight:
    w = torch.randn(*shape) * shape[-1] ** -0.5
    return tiled(*quantise.quantise_mxfp4(w), "fp4")


def tiled(data: Tensor, scale: Tensor, kind: Any) -> Weight:
    """As prepare_weight makes it, on the CPU."""
    shape = (data.shape[-2], data.shape[-1] * (2 if kind == "fp4" else 1))
    tiles, scales = in_tiles(data, scale, kind)
    return Weight(tiles, kind, scales, shape=shape)


#: of a case at the sizes of V4.1-Flash
big = pytest.mark.skipif(launch.INTERPRETED, reason="V4.1-Flash's shapes take a device")


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
        return (bf(T, H), fp8(100, H)), {}
    if name == "linear_grouped":
        return (bf(T, 2, 96), fp8(64, 96).grouped(2)), {}
    if name == "rms_norm":
        return (rows_of(T, 200), torch.rand(200).bfloat16(), 1e-20), {}
    if name == "rope":
        angle = torch.rand(T, 8) * 100
        return (bf(T, N, D), angle.cos(), angle.sin()), {}
    if name == "gate_topk":
        choice = dict(k=K, normalise=True, scale=1.5, temperature=1.0)
        return (bf(T, H), torch.randn(E, H) * 0.1, torch.rand(E)), choice
    if name == "moe_experts":
        counts = torch.bincount(torch.randint(0, E, (T * K,)), minlength=E)
        bank = ExpertBank(fp4(E, WIDTH, H), fp4(E, WIDTH, H), fp4(E, H, WIDTH))
        return (bf(T * K, H, scale=4), counts, bank, torch.rand(T * K), 2.0), {}
    if name == "shared_expert":
        return (bf(T, H, scale=4), fp8(WIDTH, H), fp8(WIDTH, H), fp8(H, WIDTH), 2.0), {}
    if name == "moe_combine":
        return (bf(T * K, H), torch.randperm(T * K), bf(T, H), K), {}
    if name == "attend_cached":
        window = torch.randint(-52, T, (T, 33))  # rows of this step, hidden, and 50 rows of the ring
        window[0] = -1
        slots = torch.randint(-3, 40, (T, 69)).clamp(min=-1)
        slots[0] = -1 if T == 2 else slots[0]
        ring, entries = quantise.pack_window(rows_of(51, D)), quantise.pack_global(rows_of(40, D))
        return (bf(T, N, D), bf(T, D), window, ring, slots, entries, torch.randn(N), D**-0.5), {}
    if name == "index_scores":
        return (bf(T, 2, 4, 32), bf(T, 2, 4), bf(T, 137, 32), torch.randint(0, 138, (T, 2))), {}
    if name == "index_scores_cached":
        return cached(T, 2, 4, 32, 137, 64)
    if name == "mhc_mixes":
        fn = torch.randn(C * (C + 2), C * 300) * 0.05
        return (bf(T, C, 300), fn, torch.randn(C * (C + 2)), torch.rand(3)), dict(rms_eps=1e-20, hc_eps=1e-6, iters=20)
    if name == "mhc_collapse":
        return (bf(T, C, H), torch.rand(T, C)), {}
    if name == "mhc_expand":
        return (bf(T, C, H), bf(T, H), torch.rand(T, C), torch.rand(T, C, C)), {}
    if name == "pack_rows":
        return (rows_of(T, D), "window"), {}
    if name == "unpack_rows":
        return (quantise.pack_global(rows_of(T, D)), "global"), {}
    if name == "load_rows":
        return (quantise.pack_window(rows_of(50, D)), torch.randint(-1, 50, (T, 6)), "window"), {}
    if name == "quantise_index_query":
        return (rows_of(T * 4, 32).view(T, 4, 32),), {}
    raise AssertionError(f"no inputs for {name}")


def cached(B: int, C: int, heads: int, width: int, n: int, per_block: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of index_scores_cached: rows, their blocks and these in the store in any order."""
    table = torch.randperm((B + 3) * -(-n // per_block)).view(B + 3, -1)
    store = quantise.pack_index(bf(table.numel() * per_block, width))
    q, w, visible = bf(B, C, heads, width), bf(B, C, heads), torch.randint(0, n + 1, (B, C))
    return (q, w, store, torch.randperm(B + 3)[:B], table, visible), dict(per_block=per_block, count=n)


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def on_device(value: Any) -> Any:
    """The same arguments with tensors on the device."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, Weight):
        scale = None if value.scale is None else on_device(value.scale)
        return Weight(on_device(value.data), value.kind, scale, value.shape)
    if isinstance(value, ExpertBank):
        return ExpertBank(*(on_device(w) for w in (value.w1, value.w3, value.w2)))
    if isinstance(value, dict):
        return {name: on_device(v) for name, v in value.items()}
    return tuple(on_device(v) for v in value) if isinstance(value, tuple) else value


def check(name: str, got: Any, expected: Any) -> None:
    tolerance = TRITON.chosen[name].tolerance or OPS[name].tolerance
    for a, b in zip(outputs(got), outputs(expected), strict=True):
        a = a.cpu()
        assert a.dtype == b.dtype and a.shape == b.shape
        if tolerance.exact and not (name == "gate_topk" and b.dtype == torch.float32):
            assert torch.equal(a, b)
            continue
        real = b.float().isfinite()
        assert torch.equal(a.float().isfinite(), real)
        a, b = a[real].double(), b[real].double()
        # weights of chosen experts are sums and square roots in f32; which ones are chosen is compared exactly
        relative = 1e-6 if tolerance.exact else tolerance.relative
        assert (a - b).norm() <= relative * b.norm(), f"{name}: {(a - b).norm() / b.norm():.2e}"


def run(ops: Ops, name: str, args: tuple, kwargs: dict) -> Any:
    with poisoned():
        return getattr(ops, name)(*on_device(args), **kwargs)


ROW_OPERATIONS = [n for n in OPERATIONS if n not in ("store_rows", "prepare_weight")]
#: arguments whose rows may hold anything; all bytes of records are tried elsewhere
FAULTY = [(n, 0) for n in ROW_OPERATIONS if n not in ("unpack_rows", "load_rows")]
FAULTY += [("index_scores", 2), ("mhc_expand", 1), ("moe_combine", 2)]


@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_agrees_with_the_reference(name: str, T: int):
    args, kwargs = make(name, T)
    assert TRITON.chosen[name].backend == "triton"
    expected = getattr(REFERENCE, name)(*args, **kwargs)
    check(name, run(TRITON, name, args, kwargs), expected)
    if TRITON.chosen[name] is not INVARIANT.chosen[name] and INVARIANT.chosen[name].backend == "triton":
        check(name, run(INVARIANT, name, args, kwargs), expected)


#: not of rows alone; and in the interpreter numpy's matrix product, whose sums depend on the place of a row
NOT_BY_ROWS = {"moe_experts"} | ({"mhc_mixes", "gate_topk"} if launch.INTERPRETED else set())


@pytest.mark.parametrize("name", [n for n in ROW_OPERATIONS if n not in NOT_BY_ROWS])
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name: str):
    args, kwargs = make(name, 40)
    args = on_device(args)
    call = getattr(INVARIANT, name)
    assert INVARIANT.chosen[name].backend == "triton"
    whole = outputs(call(*args, **kwargs))
    shared = {"moe_combine": (0, 1), "load_rows": (0,), "attend_cached": (1, 5)}.get(name, ())
    for start, stop in ((0, 1), (5, 6), (3, 5), (10, 27), (0, 39)):
        part = [
            a[start:stop] if isinstance(a, Tensor) and a.shape[:1] == (40,) and i not in shared else a
            for i, a in enumerate(args)
        ]
        if name == "moe_combine":
            part[1] = args[1][start * K : stop * K]
            part[0] = args[0][part[1]]
            part[1] = torch.arange((stop - start) * K, device=DEVICE)
        for a, b in zip(outputs(call(*part, **kwargs)), whole, strict=True):
            assert torch.equal(a, b[start:stop]), f"rows {start}..{stop}"


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name, argument", FAULTY)
def test_a_row_that_is_no_number_stays_one_and_harms_no_other(name: str, argument: int, fault: float):
    args, kwargs = make(name, 7)
    wrong = [a.clone() if isinstance(a, Tensor) else a for a in args]
    wrong[argument][3] = fault
    results = [run(TRITON, name, a, kwargs) for a in (args, tuple(wrong))]
    expected = [getattr(REFERENCE, name)(*a, **kwargs) for a in (args, wrong)]
    for good, bad, fine, faulty in zip(*map(outputs, (*results, *expected)), strict=True):
        good, bad = good.cpu(), bad.cpu()
        assert torch.equal(bad.isnan(), faulty.isnan())
        if not faulty.is_floating_point():
            assert torch.equal(bad, faulty)
        for row in range(len(bad)):
            if torch.equal(fine[row], faulty[row]):
                assert torch.equal(good[row], bad[row]), row


def test_an_expert_row_has_the_same_bits_with_any_other_rows_of_its_slot():
    (x, _, bank, w, limit), _ = on_device(make("moe_experts", 64)[0]), None
    all_in_one = torch.zeros(E, dtype=torch.int64, device=DEVICE)
    all_in_one[7] = len(x)
    whole = INVARIANT.moe_experts(x, all_in_one, bank, w, limit)
    for start, stop in ((0, 1), (100, 103), (60, 79)):
        counts = torch.zeros_like(all_in_one)
        counts[7] = stop - start
        assert torch.equal(INVARIANT.moe_experts(x[start:stop], counts, bank, w[start:stop], limit), whole[start:stop])


@pytest.mark.parametrize("kind", ["window", "global", "index"])
def test_records_have_the_bytes_of_the_reference_and_read_back_exactly(kind: str):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    torch.manual_seed(0)
    x = torch.cat((finite, finite[torch.randperm(len(finite))], rows_of(200, D).flatten()))
    x = x[: len(x) // D * D].view(-1, D)
    stored = run(TRITON, "pack_rows", (x, kind), {})
    expected = REFERENCE.pack_rows(x, kind)
    assert torch.equal(stored.cpu(), expected)
    values = run(TRITON, "unpack_rows", (expected, kind), {})
    assert torch.equal(values.cpu().view(torch.int16), REFERENCE.unpack_rows(expected, kind).view(torch.int16))
    slots = torch.tensor([[3, -1], [0, len(x) - 1]])
    loaded = run(TRITON, "load_rows", (expected, slots, kind), {})
    assert torch.equal(loaded.cpu().view(torch.int16), values.cpu()[slots.clamp(min=0)].view(torch.int16))


def test_weights_that_kernels_cannot_read_as_they_lie_are_prepared_so_that_they_can():
    torch.manual_seed(6)
    ragged = torch.randn(40, 48).to(torch.float8_e4m3fn), torch.randint(120, 130, (2, 2), dtype=torch.uint8), "fp8"
    strided = torch.randn(40, 128).bfloat16()[:, :64], None, "bf16"
    for arguments in (ragged, strided):
        x = torch.randn(3, arguments[0].shape[1]).bfloat16()
        weight = run(TRITON, "prepare_weight", arguments, {})
        got = run(TRITON, "linear", (x, weight), {}).cpu().float()
        torch.testing.assert_close(
            got, x.float() @ REFERENCE.prepare_weight(*arguments).dense.float().mT, rtol=0.01, atol=0.5
        )


def test_a_row_of_nan_gets_experts_as_in_the_reference():
    torch.manual_seed(5)
    x = torch.randn(4, H).bfloat16()
    x[1] = float("nan")
    arguments = (x, torch.randn(E, H), torch.randn(E))
    options = dict(k=K, normalise=True, scale=1.0, temperature=1.0)
    (ids, weight), (expected, _) = (
        run(TRITON, "gate_topk", arguments, options),
        REFERENCE.gate_topk(*arguments, **options),
    )
    assert torch.equal(ids.cpu(), expected)
    assert bool(weight[1].isnan().all()) and not bool(weight[[0, 2, 3]].isnan().any())


@pytest.mark.parametrize("kind", ["window", "global", "index"])
def test_every_stored_byte_reads_as_the_reference_does(kind: str):
    torch.manual_seed(1)
    stored = torch.randint(0, 256, (4000, {"window": 66, "global": 36, "index": 34}[kind]), dtype=torch.uint8)
    got, expected = run(TRITON, "unpack_rows", (stored, kind), {}).cpu(), REFERENCE.unpack_rows(stored, kind)
    assert torch.equal(got.isnan(), expected.isnan()) and bool(expected.isnan().any())
    real = ~expected.isnan()
    assert torch.equal(got[real].view(torch.int16), expected[real].view(torch.int16))


def test_rows_are_stored_where_they_belong():
    torch.manual_seed(2)
    for width in (33, 64, 3):
        packed = quantise.pack_window(rows_of(20, 32 * 2))[:, :width].contiguous()
        slots = 1 + torch.randperm(99)[:20]
        slots[4] = -1
        store = torch.zeros(100, width, dtype=torch.uint8)
        mine = store.to(DEVICE)
        TRITON.store_rows(mine, slots.to(DEVICE), packed.to(DEVICE))
        REFERENCE.store_rows(store, slots, packed)
        assert torch.equal(mine.cpu(), store)
    pairs = torch.zeros(5, 2, 3, device=DEVICE)
    TRITON.store_rows(pairs, torch.tensor([4, 2], device=DEVICE), torch.ones(2, 2, 3, device=DEVICE))
    assert pairs.sum((1, 2)).tolist() == [0, 0, 6, 0, 6]


def test_equal_scores_go_to_the_lowest_expert():
    torch.manual_seed(2)
    x = torch.randint(-2, 3, (64, 8)).bfloat16()  # products and sums of small integers are exact in any order
    router = torch.randint(-1, 2, (16, 8)).float()
    for bias in (torch.zeros(16), torch.randint(0, 2, (64, 16)).float()):
        choice = dict(k=6, normalise=False, scale=1.0, temperature=1.0)
        got = run(TRITON, "gate_topk", (x, router, bias), choice)[0]
        assert torch.equal(got.cpu(), REFERENCE.gate_topk(x, router, bias, **choice)[0])


def test_packed_weights_are_what_any_operation_reads_as_a_matrix():
    torch.manual_seed(3)
    data, scale = quantise.quantise_fp8_tiles(torch.randn(100, 96))
    packed, plain = (o.prepare_weight(data.view(torch.float8_e4m3fn), scale, "fp8") for o in (TRITON, REFERENCE))
    assert packed.scale is not None and torch.equal(packed.dense, plain.dense)
    data, scale = quantise.quantise_mxfp4(torch.randn(3, 40, 64))
    packed, plain = (o.prepare_weight(data.view(torch.int8), scale, "fp4") for o in (TRITON, REFERENCE))
    assert packed.scale is not None and torch.equal(packed.dense, plain.dense)
    for out in (128, 64):  # a tile lies across the groups of the second
        weight = fp8(out, 96)
        groups = weight.grouped(2)
        assert (groups.scale is None) == (out == 64)
        assert torch.equal(groups.dense, weight.dense.unflatten(0, (2, -1)))
        x = bf(7, 2, 96)
        check("linear_grouped", run(TRITON, "linear_grouped", (x, groups), {}), REFERENCE.linear_grouped(x, groups))


def test_other_layouts_and_kinds():
    torch.manual_seed(4)
    x = bf(96, 7).T  # not contiguous
    f = Weight(torch.randn(20, 96), "f32")
    got, expected = run(TRITON, "linear", (x, f), {}), REFERENCE.linear(x, f)
    assert got.dtype == torch.float32 and (got.cpu() - expected).norm() < 1e-6 * expected.norm()
    for weight in (Weight(bf(16, 64), "bf16"), fp8(33, 64), fp4(16, 64)):
        cube = bf(2, 3, 64)
        check("linear", run(TRITON, "linear", (cube, weight), {}), REFERENCE.linear(cube, weight))
    assert run(TRITON, "linear", (bf(0, 64), fp8(16, 64)), {}).shape == (0, 16)
    y, cos, sin = bf(4, 64), torch.rand(4, 8), torch.rand(4, 8)
    check("rope", run(TRITON, "rope", (y, cos, sin, True), {}), REFERENCE.rope(y, cos, sin, True))
    wide = torch.rand(96)
    check("rms_norm", run(TRITON, "rms_norm", (x, wide, 1e-6), {}), REFERENCE.rms_norm(x, wide, 1e-6))
    for outs, inner in ((40, 1056), (70, 1024)):  # K in parts
        long = bf(3, inner), fp8(outs, inner)
        check("linear", run(TRITON, "linear", long, {}), REFERENCE.linear(*long))
    plain = ExpertBank(*(Weight(w.dense, "fp4") for w in (fp4(E, WIDTH, H), fp4(E, WIDTH, H), fp4(E, H, WIDTH))))
    (rows, counts, _, w, limit), _ = make("moe_experts", 7)
    got = run(TRITON, "moe_experts", (rows, counts, plain, w, limit), {})
    check("moe_experts", got, REFERENCE.moe_experts(rows, counts, plain, w, limit))


def byte_weight(kind: Any, *shape: int) -> Weight:
    """Any bytes but NaN, scales around 2^-8, prepared; made on the device."""
    size = (*shape[:-1], shape[-1] // 2) if kind == "fp4" else shape
    data = torch.randint(0, 256, size, dtype=torch.uint8, device=DEVICE)
    rows = shape[-2] if kind == "fp4" else -(-shape[-2] // 32)
    scale = torch.randint(117, 121, (*shape[:-2], rows, shape[-1] // 32), dtype=torch.uint8, device=DEVICE)
    if kind == "fp8":
        data = torch.where((data & 0x7F) == 0x7F, data & 0xF8, data).view(torch.float8_e4m3fn)
    weight = TRITON.prepare_weight(data, scale, kind)
    assert weight.scale is not None
    return weight


on_a_device = pytest.mark.skipif(launch.INTERPRETED, reason="V4.1-Flash's shapes take a device")
V41_H, V41_I = 5120, 2304


@pytest.mark.parametrize(
    "counts", [(144, 16, 0, 48, 17, 0), (0, 130, 64, 300, 128, 129), (700, 0, 128, 1), (5, 0, 0), (60, 32, 33), (0, 0)]
)
def test_every_row_of_uneven_slots_is_computed(counts: tuple[int, ...]):
    torch.manual_seed(sum(counts))
    S, M = len(counts), sum(counts)
    bank = ExpertBank(fp4(S, 64, 96), fp4(S, 64, 96), fp4(S, 96, 64))
    arguments = (bf(M, 96, scale=4), torch.tensor(counts), bank, torch.rand(M), 2.0)
    check("moe_experts", run(TRITON, "moe_experts", arguments, {}), REFERENCE.moe_experts(*arguments))


@on_a_device
@pytest.mark.parametrize(
    "counts", [(0, 1, 0), (7, 0, 3, 30), (0, 64, 48, 300, 0, 17), (1000, 5, 0, 700), (0, 0, 0, 2049)]
)
def test_experts_of_the_real_size(counts: tuple[int, ...]):
    torch.manual_seed(sum(counts))
    S, M = len(counts), sum(counts)
    bank = ExpertBank(*(byte_weight("fp4", S, *s) for s in ((V41_I, V41_H), (V41_I, V41_H), (V41_H, V41_I))))
    arguments = (bf(M, V41_H, scale=4), torch.tensor(counts), bank, torch.rand(M), 10.0)
    expected = REFERENCE.moe_experts(*on_device(arguments)).cpu()
    for ops in (TRITON, INVARIANT):
        check("moe_experts", run(ops, "moe_experts", arguments, {}), expected)


@on_a_device
@pytest.mark.parametrize("T", [1, 33, 64, 300, 2048])
def test_products_of_the_real_size(T: int):
    torch.manual_seed(T)
    shared = [byte_weight("fp8", *s) for s in ((V41_I, V41_H), (V41_I, V41_H), (V41_H, V41_I))]
    calls: list[tuple[str, tuple[Any, ...]]] = []
    calls += [("linear", (bf(T, 5120), byte_weight("fp8", n, 5120))) for n in (512, 1280)]
    calls.append(("linear", (bf(T, 1280), byte_weight("fp8", 32768, 1280))))
    calls.append(("linear_grouped", (bf(T, 8, 4096), byte_weight("fp8", 8192, 4096).grouped(8))))
    calls.append(("shared_expert", (bf(T, V41_H), *shared, 10.0)))
    for name, arguments in calls:
        expected = getattr(REFERENCE, name)(*on_device(arguments)).cpu()
        for ops in (TRITON, INVARIANT):
            check(name, run(ops, name, arguments, {}), expected)


@pytest.mark.parametrize("T", [linear.DENSE_TOKENS + 1, linear.DENSE_TOKENS + 4])
def test_many_tokens_take_the_matrix_written_out(T: int):
    torch.manual_seed(T)
    for name, arguments in (
        ("linear", (bf(T, 96), fp8(40, 96))),
        ("linear", (bf(2, T, 64), Weight(bf(40, 64), "bf16"))),
        ("linear_grouped", (bf(T, 2, 64), fp8(64, 64).grouped(2))),
        ("shared_expert", (bf(T, 64, scale=4), fp8(96, 64), fp8(96, 64), fp8(64, 96), 2.0)),
    ):
        check(name, run(TRITON, name, arguments, {}), getattr(REFERENCE, name)(*arguments))


@pytest.mark.parametrize("M", [5, 400])
@pytest.mark.parametrize("place", [0, 17])
def test_nan_of_a_row_stays_in_it_and_is_not_lost(M: int, place: int):
    torch.manual_seed(M)
    x, bank = bf(M, 64, scale=4), ExpertBank(fp4(2, 96, 64), fp4(2, 96, 64), fp4(2, 64, 96))
    x[3, place] = float("nan")
    arguments = (x, torch.tensor([2, M - 2]), bank, torch.rand(M), 2.0)
    shared = (x, fp8(96, 64), fp8(96, 64), fp8(64, 96), 2.0)
    for name, args in (("moe_experts", arguments), ("shared_expert", shared)):
        for ops in (TRITON, INVARIANT):
            wrong = run(ops, name, args, {}).cpu().isnan()
            assert bool(wrong[3].all()) and not bool(wrong[[i for i in range(M) if i != 3]].any())


def test_weights_with_nan_or_huge_scales_read_as_the_reference_reads_them():
    torch.manual_seed(8)
    data, scale = quantise.quantise_fp8_tiles(torch.randn(64, 64))
    data = data.view(torch.uint8)
    data[5, 7], data[9, 11] = 0x7F, 0xFF
    packed, scales = quantise.quantise_mxfp4(torch.randn(64, 64))
    not_a_scale, huge = scales.clone(), scales.clone()
    not_a_scale[3, 1], huge[3, 1] = 255, 200
    x = bf(3, 64)
    for arguments in ((data, scale, "fp8"), (packed, not_a_scale, "fp4"), (packed, huge, "fp4")):
        weight, plain = (o.prepare_weight(*on_device(arguments)) for o in (TRITON, REFERENCE))
        expected = REFERENCE.linear(x, Weight(plain.data.cpu(), plain.kind))
        got = run(TRITON, "linear", (x, weight), {}).cpu()
        assert torch.equal(got.isnan(), expected.isnan())
        real = ~expected.isnan()
        assert (got[real] - expected[real]).abs().max() <= 0.01 * expected[real].abs().max()


def test_every_code_and_scale_is_exact():
    codes = torch.arange(256, dtype=torch.uint8).repeat(64, 4)[:, :512]  # every pair of codes
    scales = torch.arange(64 * 32).view(64, 32).remainder(129).to(torch.uint8)
    scales[scales == 0] = 1  # 2^-127 times half is less than the smallest bf16
    weight = TRITON.prepare_weight(*on_device((codes, scales, "fp4")))
    assert weight.shape == (64, 1024)
    for first in range(0, 1024, 256):  # a row of one 1 reads a column
        x = torch.zeros(256, 1024).bfloat16()
        x[torch.arange(256), first + torch.arange(256)] = 1
        got = run(INVARIANT, "linear", (x, weight), {}).cpu()
        expected = quantise.dequantise_mxfp4(codes, scales)[:, first : first + 256].mT.bfloat16()
        same = got == expected
        assert bool((same | (expected.abs() < 2.0**-120)).all())


def test_streams_of_other_numbers():
    torch.manual_seed(5)
    for streams in (1, 2, 3, 8):
        X = bf(5, streams, 64)
        fn, base = torch.randn(streams * (streams + 2), streams * 64) * 0.1, torch.randn(streams * (streams + 2))
        arguments, constants = (X, fn, base, torch.rand(3)), dict(rms_eps=1e-6, hc_eps=1e-6, iters=5)
        check("mhc_mixes", run(TRITON, "mhc_mixes", arguments, constants), REFERENCE.mhc_mixes(*arguments, **constants))
        arguments = (X, bf(5, 64), torch.rand(5, streams), torch.rand(5, streams, streams))
        check("mhc_expand", run(TRITON, "mhc_expand", arguments, {}), REFERENCE.mhc_expand(*arguments))


@pytest.mark.parametrize("heads", [1, 70])
def test_attention_with_other_heads_and_without_stores(heads: int):
    (_, local, window, ring, slots, entries, _, _), _ = make("attend_cached", 3)
    q, sink = bf(3, heads, D), torch.randn(heads)
    for stores in ((ring, None, None), (None, slots, entries), (None, None, None), (ring, slots[:, :0], entries)):
        places = window if stores[0] is not None else window.clamp(min=-1)
        arguments = (q, local, places, *stores, sink, D**-0.5)
        for ops in (TRITON, INVARIANT):
            check("attend_cached", run(ops, "attend_cached", arguments, {}), REFERENCE.attend_cached(*arguments))
    hidden = (q, local, torch.full_like(window, -1), None, None, None, sink, 1.0)
    assert run(TRITON, "attend_cached", hidden, {}).abs().max() == 0, "no key: nothing"


def test_attention_at_the_width_of_the_release():
    """64 heads of 512 columns, a few keys of every store: the tile that only wide heads take."""
    torch.manual_seed(7)
    T, wide = 3, 512
    ring, entries = quantise.pack_window(bf(20, wide)), quantise.pack_global(bf(30, wide))
    window, slots = torch.randint(-21, T, (T, 40)), torch.randint(-1, 30, (T, 70))
    arguments = (bf(T, 64, wide), bf(T, wide), window, ring, slots, entries, torch.randn(64), wide**-0.5)
    for ops in (TRITON, INVARIANT):
        check("attend_cached", run(ops, "attend_cached", arguments, {}), REFERENCE.attend_cached(*arguments))


def test_a_nan_in_a_record_reaches_the_rows_that_read_it():
    torch.manual_seed(8)
    ring = torch.randint(0, 256, (60, D + D // 32), dtype=torch.uint8)
    ring[:, D:] = torch.randint(120, 130, (60, D // 32))
    ring[:30, :D][(ring[:30, :D] & 0x7F) == 0x7F] = 0x31
    ring[1, D] = 0  # 2^-127
    ring[59, D] = 255
    window = -2 - torch.arange(60).unsqueeze(1)
    q = bf(60, N, D, scale=0.05)
    arguments = (q, q[:, 0], window, ring, None, None, torch.zeros(N), 1e-3)
    expected = REFERENCE.attend_cached(*arguments)
    assert not expected[:30].isnan().any() and expected[30:].isnan().any() and expected[59].isnan().all()
    check("attend_cached", run(INVARIANT, "attend_cached", arguments, {}), expected)


def test_an_attended_row_has_the_same_bits_however_many_slots_are_padded():
    (q, local, window, ring, slots, entries, sink, scale), _ = on_device(make("attend_cached", 7)[0]), None
    whole = INVARIANT.attend_cached(q, local, window, ring, slots, entries, sink, scale)
    wide = torch.nn.functional.pad(slots, (0, 200), value=-1)
    assert torch.equal(INVARIANT.attend_cached(q, local, window, ring, wide, entries, sink, scale), whole)


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(ValueError, match="float32"):
        TRITON.linear(torch.randn(2, 32), fp8(8, 32))
    with pytest.raises(ValueError, match=r"input \(2, 16\)"):
        TRITON.linear(bf(2, 16), fp8(8, 32))
    with pytest.raises(ValueError, match="multiple of 32"):
        TRITON.pack_rows(bf(2, 40), "window")
    with pytest.raises(TypeError, match="int64"):
        TRITON.load_rows(torch.zeros(9, 33, dtype=torch.uint8), torch.tensor([1], dtype=torch.int32), "window")
    (x, counts, bank, w, limit), _ = make("moe_experts", 2)
    with pytest.raises(ValueError, match="12 slots"):
        TRITON.moe_experts(x, counts[:-1], bank, w, limit)


def test_engines_with_different_kernel_caches_read_each_their_own_at_the_same_time(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "_platform", lambda: "sm90")
    x, w = on_device(bf(2, 64)), on_device(torch.ones(64))
    own, both = triton.knobs.cache.dir, threading.Barrier(2, timeout=60)

    def looked_in(name: str) -> list[str | None]:
        seen: list[str | None] = []

        def record(_: launch.Call) -> None:
            both.wait()
            with launch.reading():
                seen.append(triton.knobs.cache.dir)

        with launch.recording(record):
            Ops(NUMERICS["fast"], DEVICE, TRITON.chosen, tmp_path / name).rms_norm(x, w, 1e-6)
        return seen

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(looked_in, ("one", "other")))
    assert found == [[str(tmp_path / name / "sm90" / "triton")] for name in ("one", "other")]
    assert triton.knobs.cache.dir == own


def make_big(name: str, T: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments at the sizes of V4.1-Flash."""
    torch.manual_seed(T)
    H, N, D, E, K = 5120, 64, 512, 384, 6
    if name == "mhc_mixes":
        weights = torch.randn(24, 4 * H) * 0.02, torch.randn(24), torch.rand(3)
        return (bf(T, 4, H), *weights), dict(rms_eps=1e-6, hc_eps=1e-6, iters=20)
    if name == "mhc_collapse":
        return (bf(T, 4, H), torch.rand(T, 4)), {}
    if name == "mhc_expand":
        return (bf(T, 4, H), bf(T, H), torch.rand(T, 4), torch.rand(T, 4, 4)), {}
    if name == "gate_topk":
        choice = dict(k=K, normalise=True, scale=1.5, temperature=1.0)
        return (bf(T, H), torch.randn(E, H) * 0.02, torch.rand(E)), choice
    if name == "moe_combine":
        return (bf(T * K, H), torch.randperm(T * K), bf(T, H), K), {}
    if name == "index_scores":
        return (bf(T, 3, 32, 128), bf(T, 3, 32), bf(T, 1000, 128), torch.randint(0, 1001, (T, 3))), {}
    if name == "index_scores_cached":
        return cached(T, 3, 32, 128, 1000, 128)
    if name == "rms_norm":
        return (rows_of(T, H), torch.rand(H).bfloat16(), 1e-20), {}
    if name == "rope":
        angle = torch.rand(T, 32) * 100
        return (bf(T, N, D), angle.cos(), angle.sin()), {}
    if name == "quantise_index_query":
        return (bf(T, 32, 128),), {}
    if name == "head_logits":
        return (bf(T, H), Weight(bf(1000, H, scale=H**-0.5), "bf16")), {}
    raise AssertionError(f"no inputs for {name}")


BIG = ["mhc_mixes", "mhc_collapse", "mhc_expand", "gate_topk", "moe_combine", "index_scores", "rms_norm", "rope"]
BIG.append("index_scores_cached")


# fewer rows: sums of the reference itself are off by the tolerance
BIG_SIZES = [(name, T) for name in (*BIG, "quantise_index_query", "head_logits") for T in (7, 64, 300)]


@big
@pytest.mark.parametrize(("name", "T"), [*BIG_SIZES, ("mhc_mixes", 600)])
def test_agrees_with_the_reference_at_the_shapes_of_flash(name: str, T: int):
    args, kwargs = make_big(name, T)
    check(name, run(TRITON, name, args, kwargs), getattr(REFERENCE, name)(*args, **kwargs))


@big
@pytest.mark.parametrize("kind", ["window", "global", "index"])
def test_records_of_flash_have_the_bytes_of_the_reference(kind: str):
    torch.manual_seed(7)
    x = rows_of(300, 128 if kind == "index" else 512)
    x[7, 5], x[8, 100], x[9, 40:50] = float("nan"), float("inf"), float("-inf")
    stored, expected = run(TRITON, "pack_rows", (x, kind), {}), REFERENCE.pack_rows(x, kind)
    assert torch.equal(stored.cpu(), expected)
    values = run(TRITON, "unpack_rows", (expected, kind), {}).cpu()
    again = REFERENCE.unpack_rows(expected, kind)
    assert torch.equal(values.isnan(), again.isnan()) and bool(values[7].isnan().any())
    assert torch.equal(values.nan_to_num(0.0), again.nan_to_num(0.0))


@big
@pytest.mark.parametrize("name", ["mhc_mixes", "gate_topk", "index_scores", "index_scores_cached", "head_logits"])
def test_a_row_of_flash_has_the_same_bits_alone_and_in_any_batch(name: str):
    args, kwargs = make_big(name, 300)
    args = on_device(args)
    whole = outputs(getattr(INVARIANT, name)(*args, **kwargs))
    for start, stop in ((0, 1), (5, 6), (290, 300), (100, 164), (64, 129), (0, 299)):
        part = [a[start:stop] if isinstance(a, Tensor) and a.shape[:1] == (300,) else a for a in args]
        for a, b in zip(outputs(getattr(INVARIANT, name)(*part, **kwargs)), whole, strict=True):
            assert torch.equal(a, b[start:stop]), f"rows {start}..{stop}"


@big
@pytest.mark.parametrize("heads", [3, 4, 32, 64])
def test_a_score_has_the_same_bits_with_any_number_of_queries(heads: int):
    torch.manual_seed(heads)
    q, w, keys = bf(2, 40, heads, 128), bf(2, 40, heads), bf(2, 1000, 128)
    visible = torch.randint(0, 1001, (2, 40))
    q, w, keys, visible = on_device((q, w, keys, visible))
    whole = INVARIANT.index_scores(q, w, keys, visible)
    for start, stop in ((0, 1), (7, 9), (3, 6), (10, 15), (11, 20), (0, 39)):
        part = (t[:, start:stop].contiguous() for t in (q, w))
        got = INVARIANT.index_scores(*part, keys, visible[:, start:stop].contiguous())
        assert torch.equal(got, whole[:, start:stop]), f"queries {start}..{stop}"


@big
@pytest.mark.parametrize(("heads", "C"), [(3, 150), (4, 260), (32, 40), (64, 40)])
def test_a_score_of_records_has_the_same_bits_with_any_number_of_queries(heads: int, C: int):
    """All of them decode records into memory before, few of them read these in place."""
    torch.manual_seed(heads)
    for width in (64, 128):
        (q, w, store, rows, table, visible), sizes = cached(2, C, heads, width, 1000, 128)
        q, w, visible = on_device((q, w, visible))
        places = on_device((store, rows, table))
        whole = INVARIANT.index_scores_cached(q, w, *places, visible, **sizes)
        for start, stop in ((0, 1), (7, 9), (3, 6), (10, 15), (11, 20), (0, 33), (0, C - 1)):
            part = slice(start, stop)
            got = INVARIANT.index_scores_cached(q[:, part], w[:, part], *places, visible[:, part], **sizes)
            assert torch.equal(got, whole[:, part]), f"width {width}, queries {start}..{stop}"
