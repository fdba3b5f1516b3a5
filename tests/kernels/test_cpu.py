"""Compiled CPU operations against the reference: values, bytes, decisions, independence of rows, refusals."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels import parts
from deepinfer_kernels.cpu.binary import Library, source
from deepinfer_kernels.cpu.families import FAMILIES
from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import attention
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, Ops, resolve
from tests.kernels.cpu_inputs import D, E, K, N, bf, make, rows_of, weight

SIZES = (1, 2, 7, 64)
OPERATIONS = [name for family in FAMILIES.values() for name in family.operations]
#: operations over rows; what prepares weights has tests of its own
ROW_OPERATIONS = [name for name in OPERATIONS if name != "prepare_weight"]
#: operations that write into an argument, and which one
STORES = {"store_rows": (0,), "store_pairs": (0,), "store_entries": (5,)}


@pytest.fixture(scope="module")
def compiled(kernel_cache: Path) -> Ops:
    return resolve("fast", "cpu", backend="cpu", cache=kernel_cache)


@pytest.fixture(scope="module")
def reference() -> Ops:
    return resolve("fast", "cpu", backend="reference")


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody writes holds NaN, or the largest integer, while this holds."""
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def attend(ops: Ops, q: Tensor, keys: Tensor, mask: Tensor, sink: Tensor, scale: float) -> Tensor:
    """Attention of every row over keys [T, K, D] of its own, which are given as rows of this step."""
    places = torch.arange(mask.numel()).view(mask.shape).masked_fill(~mask, -1)
    return ops.attend_cached(q, keys.flatten(0, 1), places, None, None, None, sink, scale)


def outputs(result: Any) -> tuple[Tensor, ...]:
    if result is None:
        return ()
    return result if isinstance(result, tuple) else (result,)


def after(ops: Ops, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, ...]:
    """What an operation returns, and the store as it leaves it; the one among ``args`` stays as it is."""
    given = list(args)
    stores = [given.pop(i).clone() for i in STORES.get(name, ())]
    for i, store in zip(STORES.get(name, ()), stores, strict=True):
        given.insert(i, store)
    return (*outputs(getattr(ops, name)(*given, **kwargs)), *stores)


def check(name: str, got: Any, expected: Any) -> None:
    tolerance = OPS[name].tolerance
    for a, b in zip(outputs(got), outputs(expected), strict=True):
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


@pytest.mark.parametrize("T", SIZES)
@pytest.mark.parametrize("name", ROW_OPERATIONS)
def test_agrees_with_the_reference(compiled: Ops, reference: Ops, name: str, T: int):
    args, kwargs = make(name, T)
    assert compiled.chosen[name].backend == "cpu"
    expected = after(reference, name, args, kwargs)
    with poisoned():
        got = after(compiled, name, args, kwargs)
    check(name, got, expected)


#: arguments that belong to no row of the batch
SHARED = {
    "moe_combine": (0, 1),
    "load_rows": (0,),
    "attend_cached": (1,),
    "pool_cached": (0, 1, 2),
    "pair_places": (2, 3, 5),
    "window_rows": (1,),
    "store_entries": (1, 5),
}
#: operations on whole numbers alone
INTEGERS = ("dispatch_permute", "engram_hash", "token_classes", "entry_slots", "window_places", "pair_places")

#: arguments whose rows may hold anything; all bytes of records and tables are tried elsewhere
FAULTY = [
    (n, 0)
    for n in ROW_OPERATIONS
    if n not in ("unpack_rows", "load_rows", "store_rows", "dequantise_table", "store_pairs", "pool_pairs")
    and n not in ("embed", "embed_streams", "engram_lookup", *INTEGERS)
]
FAULTY += [("embed", 1), ("embed_streams", 1), ("pool_cached", 1), ("pool_cached", 2)]
FAULTY += [("index_scores", 2), ("mhc_expand", 1), ("moe_combine", 2), ("engram_gate", 1)]


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name, argument", FAULTY)
def test_a_row_that_is_no_number_stays_one_and_harms_no_other(
    compiled: Ops, reference: Ops, name: str, argument: int, fault: float
):
    args, kwargs = make(name, 7)
    wrong = [a.clone() if isinstance(a, Tensor) else a for a in args]
    wrong[argument][3] = fault
    results = [getattr(ops, name)(*a, **kwargs) for ops in (compiled, reference) for a in (args, wrong)]
    for good, bad, fine, faulty in zip(*map(outputs, results), strict=True):
        assert torch.equal(bad.isnan(), faulty.isnan())
        if not faulty.is_floating_point():
            assert torch.equal(bad, faulty)
        for row in range(len(bad)):
            if torch.equal(fine[row], faulty[row]):
                assert torch.equal(good[row], bad[row]), row


@pytest.mark.parametrize(
    "name",
    [n for n in ROW_OPERATIONS if OPS[n].row_independent and n not in ("moe_experts", "store_rows", "store_pairs")],
)
def test_a_row_has_the_same_bits_alone_and_in_any_batch(compiled: Ops, name: str):
    args, kwargs = make(name, 64)
    call: Callable[..., Any] = getattr(compiled, name)
    whole = outputs(call(*args, **kwargs))
    shared = SHARED.get(name, ())

    def of_rows(a: Any, rows: slice) -> Any:
        if isinstance(a, tuple):
            return tuple(of_rows(b, rows) for b in a)
        return a[rows] if isinstance(a, Tensor) and a.shape[:1] == (64,) else a

    for start, stop in ((0, 1), (5, 6), (63, 64), (3, 5), (10, 17), (0, 63)):
        part = [a if i in shared else of_rows(a, slice(start, stop)) for i, a in enumerate(args)]
        if name == "moe_combine":
            part[1] = args[1][start * K : stop * K]
            part[0] = args[0][part[1]]
            part[1] = torch.arange((stop - start) * K)
        for a, b in zip(outputs(call(*part, **kwargs)), whole, strict=True):
            assert torch.equal(a, b[start:stop]), f"rows {start}..{stop}"


def test_an_expert_row_has_the_same_bits_with_any_other_rows_of_its_slot(compiled: Ops):
    (x, _, bank, w, limit), _ = make("moe_experts", 64)
    all_in_one = torch.zeros(E, dtype=torch.int64)
    all_in_one[7] = len(x)
    whole = compiled.moe_experts(x, all_in_one, bank, w, limit)
    for start, stop in ((0, 1), (100, 103), (60, 70), (1, 192)):
        counts = torch.zeros(E, dtype=torch.int64)
        counts[7] = stop - start
        assert torch.equal(compiled.moe_experts(x[start:stop], counts, bank, w[start:stop], limit), whole[start:stop])


def test_an_attended_row_has_the_same_bits_however_far_its_keys_are_padded(compiled: Ops):
    q, keys, mask, sink, scale = bf(7, N, D), bf(7, 41, D), torch.rand(7, 41) < 0.6, torch.randn(N), D**-0.5
    mask[0] = False
    whole = attend(compiled, q, keys, mask, sink, scale)
    wide = torch.zeros(7, 100, D).bfloat16()
    seen = torch.zeros(7, 100, dtype=torch.bool)
    at = torch.arange(41) * 2 + 9
    wide[:, at], seen[:, at] = keys, mask
    assert torch.equal(attend(compiled, q, wide, seen, sink, scale), whole)
    assert bool((whole[0] == 0).all()), "no key: nothing"
    assert attend(compiled, q, keys[:, :0], mask[:, :0], sink, scale).abs().max() == 0


def test_rows_read_in_place_give_the_bits_of_gathered_keys(compiled: Ops):
    args, _ = make("attend_cached", 7)
    gathered = attention.gathered(compiled.numerics, lambda num, *a: attend(compiled, *a), *args)
    assert torch.equal(compiled.attend_cached(*args), gathered)
    q, local, window, ring, _, entries, sink, scale = args
    with pytest.raises(IndexError, match="query 3 reads beyond 7 rows"):
        compiled.attend_cached(q, local, window.index_fill(0, torch.tensor(3), 7), ring, None, entries, sink, scale)
    with pytest.raises(ValueError, match="window records of 33 bytes"):
        compiled.attend_cached(q, local, window, ring[:, :33], None, None, sink, scale)


@pytest.mark.parametrize("kind", ["window", "global", "index"])
def test_records_have_the_bytes_of_the_reference_and_read_back_exactly(compiled: Ops, reference: Ops, kind: str):
    every = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = every[every.isfinite()]
    torch.manual_seed(0)
    x = torch.cat((finite, finite[torch.randperm(len(finite))], rows_of(200, D).flatten(), every))
    x = x[: len(x) // D * D].view(-1, D)
    with poisoned():
        stored = compiled.pack_rows(x, kind)
    expected = reference.pack_rows(x, kind)
    assert torch.equal(stored, expected)
    stored, x = stored[: len(finite) // D], x[: len(finite) // D]
    values, expected = compiled.unpack_rows(stored, kind), reference.unpack_rows(stored, kind)
    assert torch.equal(values.view(torch.int16), expected.view(torch.int16))
    slots = torch.tensor([[3, -1], [0, len(x) - 1]])
    assert torch.equal(compiled.load_rows(stored, slots, kind), values[slots.clamp(min=0)])


@pytest.mark.parametrize("kind", ["window", "global", "index"])
def test_every_stored_byte_reads_as_the_reference_does(compiled: Ops, reference: Ops, kind: str):
    torch.manual_seed(1)
    stored = torch.randint(0, 256, (4000, {"window": 66, "global": 36, "index": 34}[kind]), dtype=torch.uint8)
    got, expected = compiled.unpack_rows(stored, kind), reference.unpack_rows(stored, kind)
    assert torch.equal(got.isnan(), expected.isnan()) and bool(expected.isnan().any())
    real = ~expected.isnan()
    assert torch.equal(got[real].view(torch.int16), expected[real].view(torch.int16))


@pytest.mark.parametrize("T", [0, 1, 64])
@pytest.mark.parametrize(
    "name", sorted(n for n in parts.OPERATIONS if any(i.backend == "cpu" for i in IMPLEMENTATIONS[n]))
)
def test_a_fused_operation_has_the_bits_of_its_compiled_parts(compiled: Ops, name: str, T: int):
    args, kwargs = make(name, 64)
    kept = {**SHARED, "engram_lookup": (0, 1)}.get(name, ())
    args = tuple(a[:T] if isinstance(a, Tensor) and len(a) == 64 and i not in kept else a for i, a in enumerate(args))
    if T and name in STORES:
        args = tuple(a.index_fill(0, torch.tensor(0), -1) if a is args[STORES[name][0] + 1] else a for a in args)
    apart = next(i for i in IMPLEMENTATIONS[name] if i.backend == "parts")
    composed = Ops(compiled.numerics, "cpu", compiled.chosen | {name: apart})
    with poisoned():
        got = after(compiled, name, args, kwargs)
    for a, b in zip(got, after(composed, name, args, kwargs), strict=True):
        assert a.dtype == b.dtype and torch.equal(a, b)


def test_what_names_nothing_is_refused_by_fused_operations_and_stores_stay_as_they_were(compiled: Ops):
    for name, at, wrong, message in (
        ("store_entries", 6, 100, "slot 100 is beyond a store of 100 rows"),
        ("store_pairs", 1, 100, "slot 100 is beyond a store of 100 rows"),
        ("pool_cached", 3, 7, "pair 4 reads beyond 7 rows"),
        ("dispatch_rows", 1, E, f"slot {E} is not in 0..{E - 1}"),
        ("entry_slots", 1, 5, "row 5 is not in a table of 5 rows"),
        ("window_places", 1, 3, "row 3 is not among 3 spans"),
        ("pair_places", 0, 7, "pair 4 names token 7 of 7"),
        ("embed", 0, 50, "token 50 is not in a vocabulary of 50"),
        ("embed_streams", 0, -1, "token -1 is not in a vocabulary of 50"),
        ("token_classes", 0, 50, "token 50 is beyond a vocabulary of 50"),
        ("engram_lookup", 2, 50, "row 50 is not in a table of 50"),
    ):
        args, kwargs = make(name, 7)
        given = list(args)
        given[at] = given[at].index_fill(0, torch.tensor(4), wrong)
        with pytest.raises(IndexError, match=message):
            getattr(compiled, name)(*given, **kwargs)
        for i in STORES.get(name, ()):
            assert not args[i].any()
    with pytest.raises(IndexError, match="row 0 is not in a table of 1 rows of 0 blocks"):
        blocks = torch.zeros(1, 0, dtype=torch.int64)
        compiled.entry_slots(None, torch.zeros(1, dtype=torch.int64), blocks, per_block=8, count=3)
    for name in ("window_places", "pair_places"):
        args, kwargs = make(name, 7)
        with pytest.raises(ValueError, match="a ring of 0"):
            getattr(compiled, name)(*args, **(kwargs | {"ring": 0}))


def test_places_without_older_rows_and_entries_from_the_first_on(compiled: Ops, reference: Ops):
    (position, row, spans, _), kwargs = make("window_places", 64)
    places = [ops.window_places(position, row, spans, None, **kwargs) for ops in (compiled, reference)]
    assert torch.equal(*places)
    (_, rows, table), _ = make("entry_slots", 64)
    slots = [ops.entry_slots(None, rows, table, per_block=8, count=50) for ops in (compiled, reference)]
    assert torch.equal(*slots)
    args = list(make("pool_cached", 64)[0])
    args[2] = None
    check("pool_cached", compiled.pool_cached(*args), reference.pool_cached(*args))


def test_equal_scores_go_to_the_lowest_expert(compiled: Ops, reference: Ops):
    torch.manual_seed(2)
    x = torch.randint(-2, 3, (64, 8)).bfloat16()  # products and sums of small integers are exact in any order
    router = torch.randint(-1, 2, (16, 8)).float()
    for bias in (torch.zeros(16), torch.randint(0, 2, (64, 16)).float()):
        choice = dict(k=6, normalise=False, scale=1.0, temperature=1.0)
        assert torch.equal(
            compiled.gate_topk(x, router, bias, **choice)[0], reference.gate_topk(x, router, bias, **choice)[0]
        )


def test_rows_are_stored_where_they_belong_and_padding_goes_to_row_zero(compiled: Ops, reference: Ops):
    for T in SIZES:
        (store, slots, packed), _ = make("store_rows", T)
        slots[0] = -1
        other = store.clone()
        compiled.store_rows(store, slots, packed)
        reference.store_rows(other, slots, packed)
        assert torch.equal(store, other) and torch.equal(store[0], packed[0])
    pairs = torch.zeros(5, 2, 3)
    compiled.store_rows(pairs, torch.tensor([4, 2]), torch.ones(2, 2, 3))
    assert pairs.sum((1, 2)).tolist() == [0, 0, 6, 0, 6]


def test_other_layouts_and_kinds(compiled: Ops, reference: Ops):
    torch.manual_seed(3)
    x = bf(96, 7).T  # not contiguous
    f = Weight(torch.randn(20, 96), "f32")
    got, expected = compiled.linear(x, f), reference.linear(x, f)
    assert got.dtype == torch.float32 and (got - expected).norm() < 1e-6 * expected.norm()
    cube = bf(2, 3, 50)
    w = weight(16, 50)
    check("linear", compiled.linear(cube, w), reference.linear(cube, w))
    assert compiled.linear(bf(0, 50), weight(16, 50)).shape == (0, 16)
    y, cos, sin = bf(4, 64), torch.rand(4, 8), torch.rand(4, 8)
    assert torch.equal(compiled.rope(y, cos, sin, inverse=True), reference.rope(y, cos, sin, inverse=True))
    wide = torch.rand(96)
    check("rms_norm", compiled.rms_norm(x, wide, 1e-6), reference.rms_norm(x, wide, 1e-6))
    for streams in (1, 2, 8):
        X = bf(5, streams, 64)
        fn, base = torch.randn(streams * (streams + 2), streams * 64) * 0.1, torch.randn(streams * (streams + 2))
        arguments = (X, fn, base, torch.rand(3))
        constants = dict(rms_eps=1e-6, hc_eps=1e-6, iters=5)
        check("mhc_mixes", compiled.mhc_mixes(*arguments, **constants), reference.mhc_mixes(*arguments, **constants))


def test_wrong_shapes_types_and_slots_are_refused(compiled: Ops):
    with pytest.raises(TypeError, match="bfloat16"):
        compiled.linear(torch.randn(2, 32), weight(8, 32))
    with pytest.raises(ValueError, match="width 16"):
        compiled.linear(bf(2, 16), weight(8, 32))
    with pytest.raises(ValueError, match="multiple of 32"):
        compiled.pack_rows(bf(2, 40), "window")
    with pytest.raises(IndexError, match="slot 9 is beyond"):
        compiled.load_rows(torch.zeros(9, 33, dtype=torch.uint8), torch.tensor([9]), "window")
    with pytest.raises(IndexError, match="slot 9 is beyond"):
        compiled.store_rows(torch.zeros(9, 33), torch.tensor([9]), torch.zeros(1, 33))
    with pytest.raises(IndexError, match="slot 4 is not in"):
        compiled.dispatch_permute(torch.tensor([[0, 4]]), 4)
    (x, counts, bank, w, limit), _ = make("moe_experts", 2)
    with pytest.raises(ValueError, match="6 rows, but the counts add up to 7"):
        compiled.moe_experts(x, counts + torch.eye(E, dtype=torch.int64)[0], bank, w, limit)
    with pytest.raises(ValueError, match="at most 8"):
        compiled.mhc_collapse(bf(1, 9, 16), torch.rand(1, 9))


def test_without_a_build_the_reference_serves_and_a_forced_backend_says_what_to_do(tmp_path: Path):
    chosen = resolve("fast", "cpu", cache=tmp_path).chosen
    assert "cpu" not in {i.backend for i in chosen.values()}
    with pytest.raises(KernelError, match="not built for this machine: deepinfer build-kernels --target cpu"):
        resolve("fast", "cpu", backend="cpu", cache=tmp_path)
    with pytest.raises(KernelError, match="honours fast numerics, not reference"):
        resolve("reference", "cpu", backend="cpu", cache=tmp_path)


def test_they_serve_fast_numerics_only_and_batch_invariance_too(kernel_cache: Path):
    for mode in ("float", "reference"):
        assert "cpu" not in {i.backend for i in resolve(mode, "cpu", cache=kernel_cache).chosen.values()}
    chosen = resolve("fast", "cpu", batch_invariant=True, cache=kernel_cache).chosen
    assert {name for name, i in chosen.items() if i.backend == "cpu"} == set(OPERATIONS)
    one = resolve("fast", "cpu", {"linear": "auto", "rope": "reference"}, backend="cpu", cache=kernel_cache).chosen
    assert (one["linear"].backend, one["rope"].backend, one["rope_angles"].backend) == ("cpu", "reference", "reference")


def test_every_compiled_operation_is_registered_once():
    for name in OPERATIONS:
        assert [i.backend for i in IMPLEMENTATIONS[name]].count("cpu") == 1


def test_a_damaged_library_is_named(kernel_cache: Path, tmp_path: Path):
    real = source("norm").library(kernel_cache)
    assert real is not None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / real.name).write_bytes(real.read_bytes()[:1000])
    assert "is damaged: delete it" in (Library("norm", rms_norm="p").missing(tmp_path) or "")
    assert "undefined symbol: call_nothing" in (Library("norm", nothing="p").missing(kernel_cache) or "")
    with pytest.raises(RuntimeError, match="before the library of norm is loaded"):
        Library("norm", rms_norm="p").rms_norm(0)


def long_scores(n: int, seed: int) -> Tensor:
    """Five rows [5, n] with ties, holes, infinities and NaN."""
    made = torch.Generator().manual_seed(seed)
    scores = torch.randn(5, n, generator=made)
    scores[1] = (scores[1] * 3).round()
    scores[2, : n // 2] = float("-inf")
    scores[3] = torch.where(scores[3] > 1.5, float("nan"), scores[3])
    scores[0, n // 3] = float("inf")
    return scores


@pytest.mark.parametrize("k", [1, 12, 64, 512])
@pytest.mark.parametrize("n", [1, 15, 127, 128, 1000, 1024, 2999])
def test_selection_of_long_rows_is_the_k_best_with_lowest_index_first(compiled: Ops, n: int, k: int):
    scores = long_scores(n, n + k)
    chosen = compiled.select_topk(scores, k=k)
    assert chosen.shape == (5, min(k, n))
    for row, ids in zip(scores.tolist(), chosen, strict=True):
        order = sorted((i for i, s in enumerate(row) if s > float("-inf")), key=lambda i: (-row[i], i))
        assert ids[ids >= 0].tolist() == sorted(order[:k])


def test_scores_of_many_queries_and_keys_are_those_of_one_query_alone(compiled: Ops):
    """More queries and keys than a tile holds; a score is -inf from its query's first invisible key on."""
    made = torch.Generator().manual_seed(4)
    B, C, N, D, n = 2, 70, 4, 32, 1300
    iq, iw = (torch.randn(B, C, N, *rest, generator=made).bfloat16() for rest in ((D,), ()))
    keys = torch.randn(B, n, D, generator=made).bfloat16()
    visible = torch.randint(0, n + 1, (B, C), generator=made)
    visible[0, 3], visible[1, 5] = 0, n
    got = compiled.index_scores(iq, iw, keys, visible)
    products = torch.einsum("bchd,bnd->bchn", iq.float(), keys.float()).clamp(min=0)
    hidden = torch.arange(n) >= visible.unsqueeze(-1)
    want = (products * iw.float().unsqueeze(-1)).sum(2).masked_fill(hidden, float("-inf"))
    assert torch.equal(got == float("-inf"), hidden)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-4)
    for b, c in ((0, 0), (0, 3), (0, 31), (0, 32), (1, 5), (1, 69)):
        row, column = slice(b, b + 1), slice(c, c + 1)
        alone = compiled.index_scores(iq[row, column], iw[row, column], keys[row], visible[row, column])
        assert torch.equal(alone[0, 0], got[b, c]), "the bits of a row do not depend on its neighbours"
