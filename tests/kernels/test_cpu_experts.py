"""Compiled experts over MXFP4 weights as they are stored: values, bits, scales of any size, moves between slots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_engine.cost.memory import plan_memory
from deepinfer_engine.engine import Engine
from deepinfer_engine.eplb.moving import plan_moves
from deepinfer_engine.launch import resident_bytes
from deepinfer_engine.runtime.expert_mover import ExpertMover
from deepinfer_engine.sim.deployment import deployment_of
from deepinfer_kernels.reference import quantise as q
from deepinfer_kernels.reference.linear import Weight, in_panels, out_of_panels
from deepinfer_kernels.reference.moe import ExpertBank
from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, Ops, resolve


@pytest.fixture(scope="module")
def compiled(kernel_cache: Path) -> Ops:
    return resolve("fast", "cpu", backend="cpu", cache=kernel_cache)


def stored(slots: int, out: int, inner: int, low: int, high: int) -> tuple[Tensor, Tensor]:
    """Bytes as a checkpoint has them, of scales from ``low`` to ``high`` - 1."""
    codes = torch.randint(0, 256, (slots, out, inner // 2), dtype=torch.uint8)
    return codes, torch.randint(low, high, (slots, out, inner // 32), dtype=torch.uint8)


def bank(ops: Ops, slots: int, hidden: int, width: int, low: int = 119, high: int = 123) -> ExpertBank:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return ExpertBank(*(ops.prepare_weight(*stored(slots, *shape, low, high), "fp4") for shape in shapes))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num().view(torch.int16), b.nan_to_num().view(torch.int16)
    )


def test_panels_hold_every_code_and_scale_and_come_apart_again(compiled: Ops):
    codes = torch.arange(256, dtype=torch.uint8).repeat(256).view(1, 1024, 64)
    scales = torch.arange(256, dtype=torch.uint8).repeat_interleave(16).view(1, 1024, 4)
    assert all(
        torch.equal(a, b) for a, b in zip(out_of_panels(*in_panels(codes, scales)), (codes, scales), strict=True)
    )
    packed = compiled.prepare_weight(codes, scales, "fp4")
    plain = resolve("fast", "cpu", backend="reference").prepare_weight(codes, scales, "fp4")
    assert packed.sizes == plain.sizes and packed.panels and same_bits(packed.dense, plain.dense)
    assert packed.scale is not None and packed.data.nbytes + packed.scale.nbytes == plain.data.nbytes * 17 // 64


@pytest.mark.parametrize("rows", [*range(1, 18), 24, 70])
@pytest.mark.parametrize("hidden, width", [(160, 64), (96, 32), (1056, 544)])
def test_an_expert_has_the_bits_of_a_shared_expert_of_the_same_weights_in_bf16(
    compiled: Ops, rows: int, hidden: int, width: int
):
    """Longer than one fold of a sum, in tiles of every width; scales that only move exponents and one that does not."""
    torch.manual_seed(rows)
    for low, high in ((117, 121), (2, 253), (0, 256)):
        b = bank(compiled, 2, hidden, width, low, high)
        x = torch.randn(rows, hidden).bfloat16()
        got = compiled.moe_experts(x, torch.tensor([0, rows]), b, torch.ones(rows), 7.0)
        dense = (Weight(w.dense[1].clone(), "fp8") for w in (b.w1, b.w3, b.w2))
        assert same_bits(got, compiled.shared_expert(x, *dense, 7.0)), (low, high)


def test_a_scale_beyond_the_range_of_exponents_harms_no_other_output(compiled: Ops):
    """Subnormal, infinite and NaN weights of single outputs, among tiles of ordinary ones."""
    torch.manual_seed(0)
    codes, scales = stored(1, 160, 64, 120, 124)
    plain = ExpertBank(
        *(bank(compiled, 1, 64, 160).w1, bank(compiled, 1, 64, 160).w3),
        compiled.prepare_weight(*stored(1, 64, 160, 120, 124), "fp4"),
    )
    for byte in (0, 1, 253, 254, 255):
        odd = scales.clone()
        odd[0, 37, 1] = byte
        w1 = compiled.prepare_weight(codes, odd, "fp4")
        b = ExpertBank(w1, plain.w3, plain.w2)
        for rows in (1, 3, 9):
            x, counts, weight = torch.randn(rows, 64).bfloat16(), torch.tensor([rows]), torch.rand(rows)
            got = compiled.moe_experts(x, counts, b, weight, 2.0)
            want = resolve("fast", "cpu", backend="reference").moe_experts(x, counts, b, weight, 2.0)
            assert torch.equal(got.isnan(), want.isnan())
            assert (got - want).nan_to_num().float().norm() <= 5e-3 * want.nan_to_num().float().norm()


def test_moved_experts_compute_what_they_did_in_their_old_slots(compiled: Ops):
    torch.manual_seed(1)
    old = np.array([[[0, 1, 2], [3, 4, 0]]])
    new = np.array([[[4, 1, 3], [0, 2, 2]]])
    whole = bank(compiled, 5, 64, 32)

    def placed(slots: np.ndarray) -> ExpertBank:
        at = torch.from_numpy(slots.reshape(-1))
        parts = (
            Weight(w.data[at], w.kind, w.scale[at], w.shape, True)
            for w in (whole.w1, whole.w3, whole.w2)
            if w.scale is not None
        )
        return ExpertBank(*parts)

    banks = placed(old)
    mover = ExpertMover([banks], range(6), compiled)
    assert mover.expert_bytes == 3 * 64 * 32 * 17 // 32, "four bits and a 32nd of a scale per weight"
    counts, x, weight = torch.tensor([3, 1, 0, 9, 2, 5]), torch.randn(20, 64).bfloat16(), torch.rand(20)
    before = compiled.moe_experts(x, counts, banks, weight, 5.0)
    for step in plan_moves(old, new, expert_bytes=mover.expert_bytes, limit=1000).steps:
        mover.run(step)
    after = compiled.moe_experts(x, counts, banks, weight, 5.0)
    assert torch.equal(after, compiled.moe_experts(x, counts, placed(new), weight, 5.0))
    assert not torch.equal(after, before)


@pytest.mark.parametrize("backend", ["cpu", "tiled"])
def test_experts_divided_over_ranks_have_the_bits_of_one_bank(backend: str, kernel_cache: Path, tmp_path: Path):
    """Slots of two ranks, two experts in both: whichever rows come to a rank, however many, a row keeps its bits."""
    ops = resolve("fast", "cpu", batch_invariant=True, cache=kernel_cache if backend == "cpu" else tmp_path)
    assert ops.chosen["moe_experts"].backend == backend
    torch.manual_seed(2)
    raw = [stored(6, *shape, 118, 123) for shape in ((32, 64), (32, 64), (64, 32))]
    ranks = ([0, 1, 2, 3, 4], [3, 4, 5])

    def placed(experts: list[int]) -> ExpertBank:
        return ExpertBank(*(ops.prepare_weight(codes[experts], scales[experts], "fp4") for codes, scales in raw))

    whole, banks = placed([0, 1, 2, 3, 4, 5]), [placed(experts) for experts in ranks]
    for rows in (1, 3, 8, 9, 40):
        expert, x = torch.randint(6, (rows,)).sort().values, torch.randn(rows, 64).bfloat16()
        weight = torch.rand(rows)
        together = ops.moe_experts(x, expert.bincount(minlength=6), whole, weight, 5.0)
        second = (expert == 5) | ((expert >= 3) & (torch.rand(rows) < 0.5))
        for experts, bank_, mine in zip(ranks, banks, (~second, second), strict=True):
            counts = torch.tensor([int((expert[mine] == e).sum()) for e in experts])
            if mine.any():
                assert torch.equal(ops.moe_experts(x[mine], counts, bank_, weight[mine], 5.0), together[mine]), rows


def test_experts_take_the_memory_that_a_model_is_said_to_need(kernel_cache: Path, tmp_path: Path):
    said, taken, planned = [], [], []
    for cache, packed in ((tmp_path, False), (kernel_cache, True)):
        with Engine.open("cpu-nano", sets=[f"kernels.cache_dir={cache}"]) as engine:
            said.append(resident_bytes(engine.checkpoint, engine.profile))
            deployment = replace(deployment_of(engine.profile, engine.config), packed_experts=packed)
            planned.append(plan_memory(engine.config, deployment).of("routed experts"))
            banks = [layer.ffn.bank for layer in engine.runner.model.weights.layers]
        tensors = [t for b in banks for w in (b.w1, b.w3, b.w2) for t in (w.data, w.scale) if t is not None]
        taken.append(sum(t.nbytes for t in tensors))
    assert said[0] - said[1] == taken[0] - taken[1] and taken[1] * 64 == taken[0] * 17
    assert planned == taken


def test_weights_of_another_layout_are_refused(compiled: Ops):
    b = bank(compiled, 2, 64, 32)
    x, counts, weight = torch.randn(3, 64).bfloat16(), torch.tensor([1, 2]), torch.rand(3)
    for wrong in (Weight(b.w3.dense, "fp4"), bank(compiled, 2, 64, 64).w3):
        with pytest.raises(ValueError, match=r"not \(2, 32, 64\) as panels"):
            compiled.moe_experts(x, counts, ExpertBank(b.w1, wrong, b.w2), weight, 5.0)


def test_experts_and_what_prepares_their_weights_come_from_one_backend(kernel_cache: Path):
    def backends(backend: str = "auto", **named: str) -> tuple[str, str]:
        chosen = resolve("fast", "cpu", named, backend=backend, cache=kernel_cache).chosen
        return chosen["prepare_weight"].backend, chosen["moe_experts"].backend

    assert backends() == backends("cpu") == ("cpu", "cpu")
    assert backends("reference") == ("reference", "reference")
    for backend in ("auto", "cpu", "reference"):
        assert backends(backend, moe_experts="torch") == ("reference", "torch")
        assert backends(backend, moe_experts="cpu") == ("cpu", "cpu")
        assert backends(backend, prepare_weight="cpu") == ("cpu", "cpu")
    assert backends(prepare_weight="reference") == ("reference", "torch")
    with pytest.raises(KernelError, match=r"goes with .* of the same backend, and that is"):
        backends(prepare_weight="reference", moe_experts="cpu")
    assert {i.partner for i in IMPLEMENTATIONS["moe_experts"]} == {None, "prepare_weight"}
    assert not any(i.copies for i in IMPLEMENTATIONS["moe_experts"] if i.backend == "cpu")


def test_values_are_those_of_the_tables(compiled: Ops):
    """By hand: 1.5 x 2^-3, -6 x 2^1, zero of either sign."""
    codes = torch.zeros(1, 16, 16, dtype=torch.uint8)
    codes[0, 0, 0], codes[0, 1, 0] = 0x3 | 0xF << 4, 0x8
    scales = torch.full((1, 16, 1), 124, dtype=torch.uint8)
    scales[0, 0, 0] = 128
    dense = compiled.prepare_weight(codes, scales, "fp4").dense[0].float()
    assert dense[0, :2].tolist() == [3.0, -12.0] and dense[1, 0].signbit() and dense.count_nonzero() == 2
    assert q.e2m1_value(torch.tensor([3])).item() == 1.5
