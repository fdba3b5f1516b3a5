"""Cases of test_triton.py, beside products, experts and attention: what is selected, placed, permuted and kept.

Decisions, ids and bytes are compared bit by bit with the reference, on random rows and on the edges of each operation.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels.reference import quantise
from deepinfer_kernels.reference.linear import Weight
from deepinfer_kernels.triton import launch
from tests.kernels.triton_cases import (
    DEVICE,
    INVARIANT,
    REFERENCE,
    TRITON,
    bf,
    cached,
    check,
    on_device,
    outputs,
    rows_of,
)

INF, NAN = float("inf"), float("nan")


def run(name: str, *args: Any, **kwargs: Any) -> Any:
    """The Triton form on the device; memory that nobody writes holds NaN, or the largest integer."""
    assert TRITON.chosen[name].backend == "triton"
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        there = {k: on_device(v) for k, v in kwargs.items()}
        result = getattr(TRITON, name)(*on_device(args), **there)
    finally:
        torch.use_deterministic_algorithms(False)
    return tuple(t.cpu() for t in outputs(result)) if isinstance(result, tuple) else result.cpu()


def same(name: str, *args: Any, **kwargs: Any) -> Any:
    """The Triton form has exactly the reference's values; returns them."""
    got, expected = run(name, *args, **kwargs), getattr(REFERENCE, name)(*args, **kwargs)
    for a, b in zip(outputs(got), outputs(expected), strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert torch.equal(a, b), name
    return expected


def near(name: str, *args: Any, **kwargs: Any) -> None:
    """The Triton form has the reference's values within its tolerance."""
    check(name, run(name, *args, **kwargs), getattr(REFERENCE, name)(*args, **kwargs))


# ----------------------------------------------------------------------- permute


@pytest.mark.parametrize("T", [0, 1, 3, 200])
@pytest.mark.parametrize("slots", [1, 7, 64])
def test_choices_are_sorted_by_slot_in_the_order_of_their_tokens(T: int, slots: int):
    torch.manual_seed(T)
    choice = torch.randint(0, slots, (T, 3))
    if T == 200:
        choice[50:] = slots - 1  # one slot has nearly all
    same("dispatch_permute", choice, slots)
    x, weights = bf(T, 40), torch.rand(T, 3)
    rows, weight, order, counts = same("dispatch_rows", x, choice, weights, slots)
    assert int(counts.sum()) == 3 * T and torch.equal(rows[order], x.repeat_interleave(3, 0))
    assert torch.equal(weight[order], weights.flatten())


@pytest.mark.parametrize("slots", [1, 7, 384])
def test_more_choices_than_one_launch_sorts_keep_the_same_order(slots: int):
    torch.manual_seed(slots)
    for T, K in ((257, 4), (683, 3)) if launch.INTERPRETED else ((257, 4), (683, 3), (2048, 6), (9000, 6)):
        choice = torch.randint(0, slots, (T, K))
        choice[T // 3 : T // 2] = slots - 1
        same("dispatch_permute", choice, slots)
        same("dispatch_rows", bf(T, 40), choice, torch.rand(T, K), slots)


def test_choices_are_counted_by_layer():
    torch.manual_seed(0)
    for T, layers in ((0, 2), (1, 1), (300, 3), (700, 3)):
        same("count_choices", torch.randint(0, 9, (layers, T, 4)), 11)


# ------------------------------------------------------------------- index records


@pytest.mark.parametrize(
    ("B", "C", "heads", "width", "n", "per_block"),
    [
        (2, 1, 32, 128, 1, 128),  # one entry
        (3, 1, 32, 128, 200, 128),  # a tile that ends in a block
        (2, 5, 8, 64, 130, 64),
        (2, 2, 3, 96, 70, 8),  # blocks smaller than a tile, heads and width that fill none
        (1, 3, 1, 256, 65, 64),
        (1, 40, 32, 128, 100, 64),  # queries enough for keys decoded before
        (2, 130, 4, 32, 70, 8),
    ],
)
def test_scores_of_records_are_those_of_their_keys(B: int, C: int, heads: int, width: int, n: int, per_block: int):
    torch.manual_seed(n)
    args, sizes = cached(B, C, heads, width, n, per_block)
    near("index_scores_cached", *args, **sizes)
    visible = args[-1]
    visible[0], visible[-1, -1] = 0, n  # a row that sees nothing, a query that sees all
    near("index_scores_cached", *args, **sizes)
    assert run("index_scores_cached", *args, **sizes)[0].isneginf().all() or B == 1


@pytest.mark.parametrize("C", [2, 40])
def test_every_code_and_scale_of_a_record_scores_with_its_exact_value(C: int):
    """Each query has one head that takes one value of a key, by its sign; scales to the smallest and to no number."""
    torch.manual_seed(C)
    n, heads, width = 128, 32, 128
    store = torch.randint(0, 256, (3 * n, 68), dtype=torch.uint8)
    scales = torch.tensor([0, 1, 2, 64, 120, 127, 128, 129, 130, 140, 200, 227, 255], dtype=torch.uint8)
    store[:, 64:] = scales[torch.randint(0, 12, (3 * n, 4))]
    store[5::7, 66] = 255
    taken = torch.randint(0, width, (3, C))
    q, w = torch.zeros(3, C, heads, width), torch.zeros(3, C, heads)
    sign = torch.where(torch.rand(3, C, 1) < 0.5, -1.0, 1.0)
    q[:, :, 7] = sign * 2.0**20 * torch.nn.functional.one_hot(taken, width)
    w[:, :, 7] = 1
    places = store, torch.tensor([2, 0, 1]), torch.randperm(6).view(3, 2), torch.full((3, C), n)
    args = (q.bfloat16(), w.bfloat16(), *places)
    sizes = dict(per_block=64, count=n)
    got, expected = run("index_scores_cached", *args, **sizes), REFERENCE.index_scores_cached(*args, **sizes)
    assert torch.equal(got.isnan(), expected.isnan()) and expected.isnan().any() and (expected > 0).any()
    assert torch.equal(got.nan_to_num(-1.0), expected.nan_to_num(-1.0))


def test_records_and_places_that_do_not_fit_are_refused():
    (q, w, store, rows, table, visible), sizes = cached(2, 1, 4, 64, 70, 64)
    with pytest.raises(ValueError, match="records"):
        TRITON.index_scores_cached(q, w, store[:, :17], rows, table, visible, **sizes)
    with pytest.raises(ValueError, match="rows"):
        TRITON.index_scores_cached(q, w, store, rows[:1], table, visible, **sizes)
    with pytest.raises(TypeError, match="int32"):
        TRITON.index_scores_cached(q, w, store, rows, table.int(), visible, **sizes)
    with pytest.raises(TypeError, match="float32"):
        TRITON.index_scores_cached(q.float(), w, store, rows, table, visible, **sizes)
    with pytest.raises(ValueError, match="visible"):
        TRITON.index_scores_cached(q, w, store, rows, table, visible[:1], **sizes)


# ------------------------------------------------------------------------ select


def edges(n: int) -> Tensor:
    """Rows of scores: random, ties, equal, hidden, few, infinities, zeros of both signs, NaN, subnormal, negative,
    ascending, a few NaN among ties."""
    torch.manual_seed(n)
    random = torch.randn(n)
    hidden = torch.full((n,), -INF)
    few = hidden.clone()
    few[:: max(1, n // 3)] = 1.5
    ties = torch.randint(-2, 3, (n,)).float()
    infinite = torch.where(torch.rand(n) < 0.3, INF, ties)
    zeros = torch.where(torch.rand(n) < 0.5, 0.0, -0.0)
    some, many = random.clone(), ties.clone()
    some[torch.randperm(n)[:2]] = NAN
    many[torch.rand(n) < 0.6] = NAN
    tiny = torch.randn(n) * 1e-42
    rare = torch.where(torch.rand(n) < 0.01, NAN, ties)
    ascending = random.sort().values
    lows = (tiny, -random.abs(), ascending, rare)
    return torch.stack((random, ties, random * 0, hidden, few, infinite, zeros, some, many, *lows))


@pytest.mark.parametrize("n", [1, 5, 64, 137, 1025, 5000])
def test_the_best_are_selected_with_ties_to_the_lowest(n: int):
    scores = edges(n)
    for k in {1, 3, 64, n - 1, n, n + 5} - {0}:
        same("select_topk", scores.unsqueeze(1), k=k)
    same("select_topk", scores[:0], k=4)


@pytest.mark.parametrize(("n", "some"), [(16385, (512, 8192, 9000, 20000)), (40000, (3, 1000, 4097))])
def test_the_best_of_longer_rows_than_a_program_holds_are_selected(n: int, some: tuple[int, ...]):
    scores = edges(n)
    for k in some:
        same("select_topk", scores.unsqueeze(1), k=k)
    for k in some:
        visible = torch.full((scores.shape[0],), n)
        visible[:3] = torch.tensor([n // 3, 0, 1])
        same("candidate_blocks", scores, visible, block=2 if k == some[0] else 1, keep=k)


def test_nothing_is_selected_among_no_entries():
    same("select_topk", torch.zeros(3, 2, 0), k=4)


@pytest.mark.parametrize("n", [1, 8, 61, 1000, 9000])
def test_candidate_blocks_are_the_best_with_the_newest_pinned(n: int):
    scores = edges(n)
    rows = scores.shape[0]
    visible = torch.randint(0, n + 1, (rows,))
    visible[0], visible[1], visible[2] = 0, n, 1
    scores = scores.masked_fill(torch.arange(n) >= visible.unsqueeze(1), -INF)
    for keep in (1, 4, 200):
        for block in (8, 5, 1):
            kept = same("candidate_blocks", scores, visible, block=block, keep=keep)
            clean = torch.nan_to_num(scores, nan=0.0, posinf=INF, neginf=-INF)  # NaN is not equal to itself
            same("restrict_to_candidates", clean, kept, block=block)


def test_head_weights_are_scaled_and_rounded_as_in_the_reference():
    for T in (0, 1, 70):
        same("index_weights", bf(T, 4), 32)
    same("index_weights", torch.randn(9, 32), 128)


# ------------------------------------------------------------------------ places


@pytest.mark.parametrize("ratio", [1, 2])
def test_entries_are_found_by_the_block_table(ratio: int):
    torch.manual_seed(3)
    table, rows = torch.randint(1, 500, (4, 3)), torch.tensor([0, 3, 3, 1, 2])
    entries = torch.randint(-1, 3 * 128 // ratio + 90, (5, 300))  # some beyond the last block
    entries[0], entries[1, :4] = -1, torch.tensor([0, 128 // ratio - 1, 128 // ratio, -1])
    same("entry_slots", entries, rows, table, per_block=128 // ratio, count=300)
    same("entry_slots", None, rows, table, per_block=128 // ratio, count=129)
    same("entry_slots", entries[:, :0], rows, table, per_block=64, count=0)
    same("entry_slots", entries[:0], rows[:0], table, per_block=64, count=300)


def test_window_rows_are_found_in_the_step_in_the_ring_or_hidden():
    # three rows: a prefill from 0, a decode row at 200 with a floor, a chunk from 300 whose first rows see the ring
    spans = torch.tensor([[0, 0, 0], [150, 200, 5], [0, 300, 6]])
    position = torch.cat((torch.arange(5), torch.tensor([200]), torch.arange(300, 340)))
    row = torch.tensor([0] * 5 + [1] + [2] * 40)
    for width in (1, 7, 128, 130):
        for rings in (torch.tensor([1, 4, 2]), None):
            same("window_places", position, row, spans, rings, width=width, ring=134)
    same("window_places", position[:0], row[:0], spans, None, width=4, ring=134)


@pytest.mark.parametrize("n", [0, 1, 5, 300])
def test_partners_of_pairs_are_found(n: int):
    torch.manual_seed(n)
    second, from_ring = torch.randint(0, 400, (n,)), torch.rand(n) < 0.5
    position, row = torch.randint(0, 9999, (400,)), torch.randint(0, 4, (400,))
    position[:50] = torch.arange(50) % 2
    blocks = torch.randint(-1, 99999, (400,))
    same("pair_places", second, from_ring, position, row, torch.tensor([3, 1, 9, 2]), blocks, ring=7)


@pytest.mark.parametrize("T", [0, 1, 20])
def test_streams_are_collapsed_and_normed(T: int):
    torch.manual_seed(T)
    for C, H in ((4, 160), (1, 64), (3, 300)):
        X, pre = bf(T, C, H), torch.rand(T, C)
        if T:
            X[0] = 0
        for weight in (bf(H), torch.rand(H)):
            near("mhc_collapse_norm", X, pre, weight, 1e-20)


def test_angles_agree_far_from_zero():
    torch.manual_seed(5)
    position = torch.cat((torch.arange(5), torch.randint(0, 1 << 20, (60,))))
    frequency = 1.0 / (10000 ** (torch.arange(0, 16, 2).float() / 16))
    got, expected = run("rope_angles", position, frequency), REFERENCE.rope_angles(position, frequency)
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape and float((a - b).abs().max()) < 1e-6
    assert run("rope_angles", position[:0], frequency)[0].shape == (0, 8)


@pytest.mark.parametrize("T", [0, 1, 30])
def test_embedding_rows_are_copied_to_every_stream(T: int):
    torch.manual_seed(T)
    for table in (bf(50, 200), torch.randn(50, 72)):
        ids = torch.randint(0, 50, (T,))
        same("embed", ids, table)
        for streams in (1, 4):
            same("embed_streams", ids, table, streams)


# ------------------------------------------------------------------------- cache


def angles(T: int, half: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(T, half) * 100
    return angle.cos(), angle.sin()


def plain_rows(T: int, D: int) -> Tensor:
    """Rows whose squares and sums of squares are exact in f32 in any order: the norm has one value."""
    return torch.randint(-8, 9, (T, D)).bfloat16()


@pytest.mark.parametrize(("D", "half"), [(64, 8), (96, 16), (160, 80), (512, 32)])
def test_window_rows_have_the_bytes_of_norm_rotation_and_record_one_by_one(D: int, half: int):
    torch.manual_seed(D)
    for T in (0, 1, 9):
        x, w, (cos, sin) = plain_rows(T, D), bf(D), angles(T, half)
        if T:
            x[0] = 0
        turned = torch.zeros_like(cos), torch.ones_like(sin)  # a quarter turn: no sum of products to contract
        same("window_rows", x, w, 1e-6, *turned)
        values, _ = run("window_rows", x, w, 1e-6, cos, sin)
        expected = REFERENCE.window_rows(x, w, 1e-6, cos, sin)[0]
        assert not T or (values.float() - expected.float()).norm() <= 5e-3 * expected.float().norm()
    values = run("window_rows", rows_of(40, D), bf(D), 1e-20, *angles(40, half))[0]
    assert bool(values.isfinite().all())
    wrong = plain_rows(4, D)
    wrong[1, 3], wrong[2, D - 1] = NAN, INF
    got, expected = (
        o.window_rows(*on_device((wrong, w, 1e-6, *angles(4, half))))[0].cpu() for o in (TRITON, REFERENCE)
    )
    assert torch.equal(got.isnan(), expected.isnan()) and bool(got[1].isnan().all())


@pytest.mark.parametrize("kind", ["window", "global", "index"])
def test_entries_have_the_bytes_of_norm_rotation_and_record_one_by_one(kind: str):
    torch.manual_seed(7)
    size = {"window": 66, "global": 36, "index": 34}[kind]
    for T in (0, 1, 20):
        x, w = plain_rows(T, 64), torch.rand(64)
        cos, sin = torch.zeros(T, 8), torch.ones(T, 8)
        slots = 1 + torch.randperm(99)[:T]
        slots[T // 2 : T // 2 + 1] = -1
        mine, theirs = (torch.zeros(100, size, dtype=torch.uint8) for _ in range(2))
        there = mine.to(DEVICE)
        normed = TRITON.store_entries(*on_device((x, w, 1e-6, cos, sin, there, slots, kind)))
        expected = REFERENCE.store_entries(x, w, 1e-6, cos, sin, theirs, slots, kind)
        assert torch.equal(normed.cpu(), expected)
        assert torch.equal(there.cpu()[1:], theirs[1:]), "row 0 holds what belongs nowhere"


def test_pairs_are_pooled_from_the_step_and_from_the_ring():
    torch.manual_seed(8)
    value, gate = torch.randn(30, 96), torch.randn(30, 96) * 5
    ring = torch.randn(20, 2, 96)
    second = torch.tensor([1, 3, 7, 29])
    partner, slot = torch.tensor([0, 3, 6, 28]), torch.tensor([-1, 19, 0, 5])
    from_ring = torch.tensor([False, True, False, True])
    for pairs in (ring, None):
        near("pool_cached", value, gate, pairs, second, partner, slot, from_ring)
    assert run("pool_cached", value, gate, ring, second[:0], partner[:0], slot[:0], from_ring[:0]).shape == (0, 96)
    near("pool_pairs", (value[:4], gate[:4]), (value[4:8], gate[4:8]))
    far = gate[:4] * 100  # one of the two gates counts
    near("pool_pairs", (value[:4], far), (value[4:8], -far))


def test_pairs_are_stored_where_they_belong():
    torch.manual_seed(9)
    value, gate, slots = torch.randn(6, 40), torch.randn(6, 40), torch.tensor([3, 9, -1, 1, 4, 7])
    mine, theirs = torch.zeros(10, 2, 40, device=DEVICE), torch.zeros(10, 2, 40)
    TRITON.store_pairs(mine, *on_device((slots, value, gate)))
    REFERENCE.store_pairs(theirs, slots, value, gate)
    assert torch.equal(mine.cpu(), theirs)
    TRITON.store_pairs(mine, *on_device((slots[:0], value[:0], gate[:0])))
    assert torch.equal(mine.cpu(), theirs)


@pytest.mark.parametrize("width", [33, 64, 20000])
def test_rows_are_moved_between_slots(width: int):
    torch.manual_seed(width)
    for rows in (1, 7, 0):
        source = torch.randint(0, 256, (20, width), dtype=torch.uint8)
        of, at = torch.randperm(20)[:rows], torch.randperm(12)[:rows]
        mine, theirs = torch.zeros(12, width, dtype=torch.uint8, device=DEVICE), torch.zeros(12, width).byte()
        TRITON.copy_rows(mine, *on_device((at, source, of)))
        REFERENCE.copy_rows(theirs, at, source, of)
        assert torch.equal(mine.cpu(), theirs)
    store = source.to(DEVICE)  # within one store, whose rows have several dimensions
    four, (last, second) = store.view(5, 4, width), on_device((torch.tensor([4]), torch.tensor([1])))
    TRITON.copy_rows(four, last, four, second)
    assert torch.equal(store[16:].cpu(), source[4:8]) and torch.equal(store[:16].cpu(), source[:16])


# ------------------------------------------------------------------------ engram


@pytest.mark.parametrize("T", [0, 1, 70])
def test_ngrams_are_hashed_exactly(T: int):
    torch.manual_seed(T)
    for orders, heads in ((2, 1), (3, 2), (4, 3)):
        ids = torch.randint(-1, 100, (T, orders))
        table = torch.randint(0, 1 << 20, (100,))
        for image in (None, 42):
            classes = same("token_classes", ids, table, image)
            multipliers = torch.randint(1 << 30, 1 << 42, (orders,)) | 1
            primes = torch.tensor([104729, 1299709, 15485863])[:heads] + 2 * torch.arange(orders - 1).unsqueeze(1)
            offsets = torch.randint(0, 1 << 40, (orders - 1, heads))
            same("engram_hash", classes, 7, multipliers, primes, offsets)


def test_table_rows_are_read_exactly():
    torch.manual_seed(11)
    for width in (32, 96, 320):
        weight = (torch.randint(0, 127, (50, width)) | (torch.randint(0, 2, (50, width)) << 7)).to(torch.uint8)
        scale = torch.randint(0, 250, (50, width // 32), dtype=torch.uint8)
        same("dequantise_table", weight, scale)
        for T in (0, 1, 20):
            same("engram_lookup", weight, scale, torch.randint(0, 50, (T, 3)))


@pytest.mark.parametrize("T", [0, 1, 20])
def test_memory_is_mixed_into_the_streams(T: int):
    torch.manual_seed(T)
    for C, H in ((4, 160), (1, 64), (3, 200)):
        X, projected, q, k = bf(T, C, H), bf(T, (C + 1) * H), bf(C, H), bf(C, H)
        if T:
            X[0], projected[T - 1] = 0, 0  # a product of zero counts as positive
        for dead in (None, torch.arange(T) % 3 == 1):
            near("engram_gate", X, projected, q, k, dead, 1e-20)
        if T > 1:
            X[1, 0, 5] = NAN
            assert torch.equal(
                run("engram_gate", X, projected, q, k, None, 1e-20)[1].isnan().nonzero(), torch.tensor([[1, 0]])
            )


# -------------------------------------------------------------------------- head


@pytest.mark.parametrize(("T", "V", "K"), [(1, 300, 160), (3, 1, 192), (17, 129, 200), (70, 64, 1000), (0, 64, 96)])
def test_logits_agree_with_f32_products(T: int, V: int, K: int):
    torch.manual_seed(12)
    near("head_logits", bf(T, K), Weight(bf(V, K), "bf16"))


# --------------------------------------------------------------------- invariance

#: arguments of 40 rows, and which of them belong to the rows
BY_ROWS: dict[str, Any] = {
    "index_weights": lambda: ((bf(40, 4), 32), (0,)),
    "select_topk": lambda: ((torch.randn(40, 3, 500),), (0,)),
    "entry_slots": lambda: (
        (torch.randint(-1, 300, (40, 50)), torch.randint(0, 4, (40,)), torch.randint(0, 99, (4, 3))),
        (0, 1),
    ),
    "rope_angles": lambda: ((torch.randint(0, 1 << 20, (40,)), torch.rand(8)), (0,)),
    "embed": lambda: ((torch.randint(0, 50, (40,)), bf(50, 200)), (0,)),
    "embed_streams": lambda: ((torch.randint(0, 50, (40,)), bf(50, 200), 4), (0,)),
    "window_rows": lambda: ((bf(40, 64), bf(64), 1e-6, *angles(40, 8)), (0, 3, 4)),
    "mhc_collapse_norm": lambda: ((bf(40, 4, 160), torch.rand(40, 4), bf(160), 1e-6), (0, 1)),
    "pool_pairs": lambda: (tuple((torch.randn(40, 96), torch.randn(40, 96)) for _ in range(2)), ()),
    "engram_gate": lambda: ((bf(40, 4, 160), bf(40, 800), bf(4, 160), bf(4, 160), None, 1e-20), (0, 1)),
    "engram_lookup": lambda: ((quantise.pack_window(bf(50, 32))[:, :32].contiguous(),
                               torch.full((50, 1), 127, dtype=torch.uint8), torch.randint(0, 50, (40, 3))), (2,)),
    "head_logits": lambda: ((bf(40, 160), Weight(bf(300, 160), "bf16")), (0,)),
}  # fmt: skip
OPTIONS = {"select_topk": {"k": 60}, "entry_slots": {"per_block": 128, "count": 50}}


@pytest.mark.parametrize("name", sorted(set(BY_ROWS) - ({"head_logits"} if launch.INTERPRETED else set())))
def test_a_row_has_the_same_bits_alone_and_in_any_batch(name: str):
    torch.manual_seed(13)
    args, rows = BY_ROWS[name]()
    args, options = on_device(args), OPTIONS.get(name, {})
    call = getattr(INVARIANT, name)
    assert INVARIANT.chosen[name].backend == "triton"
    whole = outputs(call(*args, **options))
    for start, stop in ((0, 1), (5, 6), (3, 5), (10, 27), (0, 39)):
        cut = [tuple(t[start:stop] for t in a) if isinstance(a, tuple) else a for a in args]
        part = [a[start:stop] if i in rows else cut[i] for i, a in enumerate(args)]
        for a, b in zip(outputs(call(*part, **options)), whole, strict=True):
            assert torch.equal(a, b[start:stop]), f"rows {start}..{stop}"


def test_wrong_shapes_and_types_are_refused():
    with pytest.raises(TypeError, match="int64"):
        TRITON.dispatch_permute(torch.zeros(2, 3, dtype=torch.int32), 4)
    with pytest.raises(ValueError, match="float32"):
        TRITON.select_topk(bf(2, 9), k=3)
    with pytest.raises(ValueError, match="1 or more"):
        TRITON.select_topk(torch.zeros(2, 9), k=0)
    with pytest.raises(ValueError, match="blocks of 8"):
        TRITON.restrict_to_candidates(torch.zeros(2, 9), torch.ones(2, 1, dtype=torch.bool), block=8)
    with pytest.raises(ValueError, match="window records of 66 bytes"):
        cos = torch.zeros(1, 8)
        store = torch.zeros(4, 60, dtype=torch.uint8)
        TRITON.store_entries(bf(1, 64), bf(64), 1e-6, cos, cos, store, torch.zeros(1).long(), "window")
    with pytest.raises(ValueError, match="of 32 channels"):
        TRITON.dequantise_table(torch.zeros(2, 40, dtype=torch.uint8), torch.zeros(2, 1, dtype=torch.uint8))
    with pytest.raises(ValueError, match="hidden states"):
        TRITON.head_logits(torch.zeros(2, 32), Weight(bf(4, 32), "bf16"))
