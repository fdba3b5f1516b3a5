"""The same vectors on a CUDA device: the model is one program on both."""

from __future__ import annotations

import pytest
import torch

TOLERANCE = 2e-4


@pytest.fixture(scope="module", autouse=True)
def full_f32():
    """f32 products in f32: TF32 alone would exceed the tolerance."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.gpu
@pytest.mark.parametrize("case_id", ["base_n0001", "base_n0035", "base_n0700", "w128_n0300"])
def test_float_logits_and_greedy_tokens_on_cuda(golden, variants, make_rig, case_id):
    case = golden.cases[case_id]
    rig = make_rig(variants[case["variant"]], "float", device="cuda")
    ids, n = list(case["prompt_ids"]), case["length"]
    kv = rig.kv()
    out = rig.run(kv, ids, 0, n)
    a, b = case["logit_positions"]
    recorded = golden.tensors[f"case/{case_id}/float/logits"]
    assert (out.logits[a:b].cpu() - recorded).abs().max() <= TOLERANCE
    greedy = [int(out.logits[-1].argmax())]
    for _ in range(31):
        ids.append(greedy[-1])
        greedy.append(int(rig.run(kv, ids, len(ids) - 1, len(ids)).logits[0].argmax()))
    assert greedy == case["float"]["greedy_ids"]


@pytest.mark.gpu
@pytest.mark.parametrize(("mode", "backend"), [("reference", "auto"), ("fast", "reference"), ("fast", "triton")])
def test_quantised_numerics_on_cuda_agree_with_the_cpu(golden, variants, make_rig, mode, backend):
    """Same codes on both devices up to rare flips: top-1 of at least nine positions in ten."""
    ids = list(golden.cases["base_n0035"]["prompt_ids"])
    logits = []
    for device, chosen in (("cpu", "auto"), ("cuda", backend)):
        rig = make_rig(variants["base"], mode, device=device, backend=chosen)
        logits.append(rig.run(rig.kv(), ids, 0, len(ids)).logits.cpu())
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() >= 0.9
