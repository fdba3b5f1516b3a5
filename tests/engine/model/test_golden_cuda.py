"""The same vectors on a CUDA device: the model is one program on both."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepinfer_engine.config.model import load_model_config
from deepinfer_engine.config.profile import load_profile

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


def build_triton(directory: Path, cache: Path) -> None:
    """Compile every kernel of a checkpoint's shapes for the device."""
    pytest.importorskip("triton", reason="needs triton: pip install 'deepinfer-cli[cuda]'")
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_kernels import kernel_cache
    from deepinfer_kernels.triton import build, shapes

    sizes = kernel_shapes(load_model_config(directory), load_profile("cpu-nano").profile)
    kernels = build.kernels(shapes.launches(sizes, invariant=False))
    made = kernel_cache.build(build.jobs(kernels, "sm90", cache))
    assert {b.status for b in made} <= {"built", "cached"}, [b for b in made if b.path is None][:3]  # same kernel twice


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "backend"), [("reference", "auto"), ("fast", "reference"), ("fast", "triton")])
def test_quantised_numerics_on_cuda_agree_with_the_cpu(golden, variants, make_rig, tmp_path, mode, backend):
    """Same codes on both devices up to rare flips: top-1 of at least nine positions in ten."""
    if backend == "triton":
        build_triton(variants["base"], tmp_path)
    ids = list(golden.cases["base_n0035"]["prompt_ids"])
    logits = []
    for device, chosen in (("cpu", "auto"), ("cuda", backend)):
        rig = make_rig(variants["base"], mode, device=device, backend=chosen, cache=tmp_path)
        logits.append(rig.run(rig.kv(), ids, 0, len(ids)).logits.cpu())
    assert (logits[0].argmax(-1) == logits[1].argmax(-1)).float().mean() >= 0.9
