"""Recorded logits and greedy tokens of the whole model through Triton's kernels in the interpreter.

Run by ``test_golden_triton.py`` in a process of its own, because Triton decides at its import whether kernels are
interpreted. Quantised numerics keep no recorded value to the last digit, so errors are held to those of the reference
operations in the same numerics, and every token to the recorded one.
"""

from __future__ import annotations

import pytest
import torch

from deepinfer_kernels import registry
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.triton import launch


def interpreted() -> registry.Ops:
    """Triton's kernel of every operation that has one, on the CPU."""
    assert launch.INTERPRETED
    chosen = dict(registry.resolve("fast", "cpu", backend="reference").chosen)
    for name, rows in registry.IMPLEMENTATIONS.items():
        chosen[name] = next((row for row in rows if row.backend == "triton"), chosen[name])
    assert {row.backend for row in chosen.values()} == {"triton"}
    return registry.Ops(NUMERICS["fast"], "cpu", chosen)


@pytest.mark.timeout(900)
def test_recorded_tokens_and_errors_of_the_reference_through_triton(golden, variants, make_rig):
    case = golden.cases["base_n0035"]
    ids, steps = list(case["prompt_ids"]), 2
    first, last = case["logit_positions"]
    recorded = golden.tensors["case/base_n0035/float/logits"]
    errors = []
    for ops in (registry.resolve("fast", "cpu", backend="reference"), interpreted()):
        rig = make_rig(variants["base"], "fast", ops=ops)
        kv, seen = rig.kv(), list(ids)
        logits = rig.run(kv, seen, 0, len(seen)).logits
        errors.append((logits[first:last] - recorded).square().mean().sqrt())
        assert torch.equal(logits[first:last].argmax(-1), recorded.argmax(-1))
        greedy = [int(logits[-1].argmax())]
        for _ in range(steps):
            seen.append(greedy[-1])
            greedy.append(int(rig.run(kv, seen, len(seen) - 1, len(seen)).logits[0].argmax()))
        assert greedy == case["float"]["greedy_ids"][: steps + 1]
        drafted = rig.propose(kv, greedy[-1], len(seen))
        assert drafted.tokens[0].tolist() == case["float"]["draft_trace"][steps]["tokens"]
    assert errors[1] <= 1.25 * errors[0], errors
