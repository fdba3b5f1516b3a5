"""Cases of test_tilelang.py for a CUDA device: experts and index scores beside the reference, faults, single rows.

What the sanitizer looks at has its reference from the CPU: initcheck takes a bf16 product of torch for unwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import index as reference_index
from deepinfer_kernels.reference import moe as reference_moe
from deepinfer_kernels.reference.linear import Weight, in_tiles
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.tilelang import build, experts, families, index, launch

NUM = NUMERICS["fast"]
#: hidden and expert width: whole tiles, and an odd number of tiles of which the last is half full
WIDTHS = [(256, 128), (288, 160)]
#: rows of seven slots: a few, one class up, many; empty slots and slots with part of a tile
COUNTS = [
    (0, 3, 1, 0, 17, 33, 2),
    (0, 0, 0, 0, 0, 0, 5),
    (64, 65, 0, 1, 130, 0, 128),
    (256, 257, 0, 1, 600, 255, 90),
    (0, 0, 0, 2100, 0, 0, 0),
]
#: heads and width of index queries
HEADS = [(32, 128), (8, 64)]


@pytest.fixture(scope="session", autouse=True)
def built(cases_cache: Path) -> Iterator[None]:
    """Every program of these cases, compiled side by side."""
    found: list[tuple[str, launch.Call]] = []
    platform = families.platform()
    with launch.recording(lambda call: found.append(("op", call)), platform):
        for H, width in WIDTHS:
            for rows in (7, 7 * 40, 7 * 300):
                arguments = on(make_experts((rows, 0, 0, 0, 0, 0, 0), H, width), "meta")
                experts.moe_experts(NUM, *arguments)
                experts.moe_experts_invariant(NUM, *arguments)
        for heads, width in HEADS:
            for C in (1, 2, 4, 8, 16, 32):
                index.index_scores(NUM, *on(make_scores(1, C, heads, 9, width), "meta"))
    made = kernel_cache.build(build.jobs(build.kernels(found), platform, cases_cache))
    assert {b.status for b in made} <= {"built", "cached"}, [b.detail for b in made if b.path is None]
    with families.from_folder(cases_cache / platform):
        yield


def on(arguments: tuple[Any, ...], device: str) -> tuple[Any, ...]:
    def moved(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.to(device)
        if isinstance(value, ExpertBank):
            return ExpertBank(*(moved(w) for w in (value.w1, value.w3, value.w2)))
        if isinstance(value, Weight) and value.scale is not None:
            return replace(value, data=value.data.to(device), scale=value.scale.to(device))
        return value

    return tuple(moved(a) for a in arguments)


def fp4(*shape: int) -> Weight:
    *stack, outs, inner = shape
    scale = torch.randint(115, 125, (*stack, outs, inner // 32), dtype=torch.uint8)
    codes = torch.randint(0, 256, (*stack, outs, inner // 2), dtype=torch.uint8)
    return tiled(codes, scale)


def tiled(codes: Tensor, scale: Tensor) -> Weight:
    data, scales = in_tiles(codes, scale, "fp4")
    return Weight(data, "fp4", scales, shape=(codes.shape[-2], 2 * codes.shape[-1]))


def make_experts(counts: tuple[int, ...], H: int, width: int) -> tuple[Any, ...]:
    torch.manual_seed(sum(counts))
    M, S = sum(counts), len(counts)
    bank = ExpertBank(fp4(S, width, H), fp4(S, width, H), fp4(S, H, width))
    return torch.randn(M, H).bfloat16(), torch.tensor(counts), bank, torch.rand(M), 2.0


def make_scores(B: int, C: int, heads: int, n: int, width: int) -> tuple[Any, ...]:
    torch.manual_seed(B + C + n)
    q, w = torch.randn(B, C, heads, width).bfloat16(), torch.randn(B, C, heads).bfloat16()
    return q, w, torch.randn(B, n, width).bfloat16(), torch.randint(0, n + 1, (B, C))


def poisoned(call: Callable[..., Tensor], *arguments: Any) -> Tensor:
    """The result of a call whose outputs held NaN before it."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return call(NUM, *arguments)
    finally:
        torch.use_deterministic_algorithms(False)


def check(op: str, got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    assert torch.equal(got.isnan(), expected.isnan()) and torch.equal(got.isinf(), expected.isinf())
    a, b = (torch.where(x.isfinite(), x.double(), 0) for x in (got, expected))
    assert (a - b).norm() <= OPS[op].tolerance.relative * b.norm()


@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("H", "width"), WIDTHS)
def test_experts_agree_with_the_reference(H: int, width: int, counts: tuple[int, ...]):
    given = make_experts(counts, H, width)
    arguments, expected = on(given, "cuda"), reference_moe.moe_experts(NUM, *given).cuda()
    for form in (experts.moe_experts, experts.moe_experts_invariant):
        check("moe_experts", poisoned(form, *arguments), expected)


@pytest.mark.parametrize("tile", [experts._FEW[1], experts._MANY[1]], ids=["few", "many"])
def test_every_code_times_every_scale_is_exact(tile: experts.Tile):
    """One-hot rows read single weights: all codes under scales from the smallest to the largest of tiles."""
    new = experts.platform() == "sm100"
    x = torch.eye(160)
    codes = torch.arange(3 * 288 * 80).mul(7).remainder(256).to(torch.uint8).view(3, 288, 80)
    for scale in [*range(1, 128, 9), 127, 128]:
        scales = torch.full((3, 288, 5), scale, dtype=torch.uint8)
        scales[:, ::3] -= 1  # rows and groups have their own
        scales[:, :, 1::2] -= scales[:, :, 1::2].clamp(max=2)
        w2 = tiled(codes, scales)
        factor = 2.0 ** (100 if scale < 64 else 0)  # results in the middle of the range
        y = torch.full((160, 288), float("nan"), dtype=torch.bfloat16, device="cuda")
        counts, held = on((torch.tensor([0, 160, 0]), w2), "cuda")
        sizes = experts._sizes(288, 160, tile, new)
        launch.launch(
            "experts.down_blackwell" if new else "experts.down", sizes, (x * factor).bfloat16().cuda(), counts,
            *experts._words(held), y, experts._most_tiles(160, 3, int(sizes["BT"])),
        )  # fmt: skip
        expected = (x.double() * factor @ w2.dense[1].double().mT).bfloat16()
        assert torch.equal(y.cpu(), expected), scale


@pytest.mark.parametrize("fault", [float("nan"), float("inf")])
@pytest.mark.parametrize("counts", [COUNTS[0], COUNTS[2], COUNTS[3]])
def test_a_fault_stays_in_its_row(counts: tuple[int, ...], fault: float):
    x, *rest = make_experts(counts, 288, 160)
    whole = experts.moe_experts(NUM, *on((x, *rest), "cuda"))
    x[4, 7] = fault
    arguments = on((x, *rest), "cuda")
    got = experts.moe_experts(NUM, *arguments)
    assert torch.equal(got[4].isnan(), reference_moe.moe_experts(NUM, *arguments)[4].isnan())
    others = [i for i in range(len(x)) if i != 4]
    assert torch.equal(got[others], whole[others])


def test_an_expert_row_has_the_same_bits_with_any_other_rows_of_its_slot():
    x, _, bank, weight, limit = on(make_experts((700,) + (0,) * 6, 288, 160), "cuda")
    whole = experts.moe_experts_invariant(NUM, x, torch.tensor([700] + [0] * 6).cuda(), bank, weight, limit)
    for start, stop in ((0, 1), (100, 103), (60, 300)):
        counts = torch.tensor([stop - start] + [0] * 6).cuda()
        got = experts.moe_experts_invariant(NUM, x[start:stop], counts, bank, weight[start:stop], limit)
        assert torch.equal(got, whole[start:stop])


@pytest.mark.parametrize("C", [1, 2, 3, 8, 33])
@pytest.mark.parametrize(("heads", "width"), HEADS)
def test_scores_agree_with_the_reference(heads: int, width: int, C: int):
    for B, n in ((1, 1), (3, 130), (2, 5000)):
        given = make_scores(B, C, heads, n, width)
        got = poisoned(index.index_scores, *on(given, "cuda"))
        check("index_scores", got, reference_index.index_scores(NUM, *given).cuda())


@pytest.mark.parametrize(("heads", "width"), HEADS)
def test_a_score_has_the_same_bits_with_any_other_queries(heads: int, width: int):
    q, w, keys, visible = on(make_scores(2, 40, heads, 700, width), "cuda")
    whole = index.index_scores(NUM, q, w, keys, visible)
    for start, stop in ((0, 1), (5, 7), (3, 6), (10, 27), (0, 39)):
        part = slice(start, stop)
        got = index.index_scores(NUM, q[:, part], w[:, part], keys, visible[:, part])
        assert torch.equal(got, whole[:, part]), f"queries {start}..{stop}"
    assert torch.equal(index.index_scores(NUM, q[1:], w[1:], keys[1:], visible[1:]), whole[1:])


@pytest.mark.parametrize("fault", [float("nan"), float("inf"), float("-inf")])
def test_a_fault_in_a_key_or_query_reaches_its_scores_alone(fault: float):
    q, w, keys, visible = make_scores(1, 9, 32, 300, 128)
    visible[:] = 250
    keys[0, 17, 3] = keys[0, 260, 3] = fault
    q[0, 5, 2, 0] = fault
    arguments = on((q, w, keys, visible), "cuda")
    check("index_scores", index.index_scores(NUM, *arguments), reference_index.index_scores(NUM, *arguments))


def test_calls_in_a_graph_follow_their_new_inputs():
    x, counts, bank, weight, limit = on(make_experts(COUNTS[2], 288, 160), "cuda")
    experts.moe_experts(NUM, x, counts, bank, weight, limit)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = experts.moe_experts(NUM, x, counts, bank, weight, limit)
    x.normal_()
    counts.copy_(counts.flip(0))
    graph.replay()
    torch.cuda.synchronize()
    check("moe_experts", got, reference_moe.moe_experts(NUM, x, counts, bank, weight, limit))


def test_wrong_shapes_and_types_are_refused():
    x, counts, bank, weight, limit = on(make_experts((5, 0), 288, 160), "cuda")
    with pytest.raises(ValueError, match="5 rows for 2 slots"):
        experts.moe_experts(NUM, x, counts[:1], bank, weight, limit)
    with pytest.raises(TypeError, match="rows are bfloat16"):
        experts.moe_experts(NUM, x.float(), counts, bank, weight, limit)
    with pytest.raises(ValueError, match="rows of width 256"):
        experts.moe_experts(NUM, x[:, :256], counts, bank, weight, limit)
    q, w, keys, visible = on(make_scores(1, 2, 32, 9, 128), "cuda")
    with pytest.raises(ValueError, match="weights, keys and visible"):
        index.index_scores(NUM, q, w[:, :1], keys, visible)
    with pytest.raises(TypeError, match="bfloat16"):
        index.index_scores(NUM, q.float(), w, keys, visible)
