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


def build_tilelang(directory: Path, cache: Path) -> None:
    """Compile every TileLang program of a checkpoint's shapes for the device."""
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_kernels import kernel_cache
    from deepinfer_kernels.tilelang import build, families, shapes

    if (reason := families.uncompilable()) is not None:
        pytest.skip(reason)
    sizes = kernel_shapes(load_model_config(directory), load_profile("cpu-nano").profile)
    kernels = build.kernels(shapes.launches(sizes, platform="sm90", invariant=False))
    made = kernel_cache.build(build.jobs(kernels, "sm90", cache))
    assert {b.status for b in made} <= {"built", "cached"}, [b.detail for b in made if b.path is None][:3]


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


@pytest.mark.gpu
@pytest.mark.timeout(400)
@pytest.mark.parametrize("tilelang", [False, True], ids=["triton", "tilelang first"])
def test_recorded_tokens_and_drafts_through_the_kernels_of_the_device(golden, variants, make_rig, tmp_path, tilelang):
    """As ``triton_golden.py`` asks of the interpreter: recorded tokens, errors of the reference operations."""
    build_triton(variants["base"], tmp_path)
    if tilelang:
        build_tilelang(variants["base"], tmp_path)
    case = golden.cases["base_n0035"]
    ids, steps = list(case["prompt_ids"]), 2
    first, last = case["logit_positions"]
    recorded = golden.tensors["case/base_n0035/float/logits"]
    errors = []
    for backend in ("reference", "auto"):
        rig = make_rig(variants["base"], "fast", device="cuda", backend=backend, cache=tmp_path)
        if backend == "auto":
            chosen = {name: rig.ops.chosen[name].backend for name in ("attend_cached", "moe_experts", "rms_norm")}
            first_choice = "tilelang" if tilelang else "triton"
            assert chosen == {"attend_cached": first_choice, "moe_experts": first_choice, "rms_norm": "triton"}
        kv, seen = rig.kv(), list(ids)
        logits = rig.run(kv, seen, 0, len(seen)).logits
        errors.append((logits[first:last].cpu() - recorded).square().mean().sqrt())
        assert torch.equal(logits[first:last].argmax(-1).cpu(), recorded.argmax(-1))
        greedy = [int(logits[-1].argmax())]
        for _ in range(steps):
            seen.append(greedy[-1])
            greedy.append(int(rig.run(kv, seen, len(seen) - 1, len(seen)).logits[0].argmax()))
        assert greedy == case["float"]["greedy_ids"][: steps + 1]
        drafted = rig.propose(kv, greedy[-1], len(seen))
        assert drafted.tokens[0].tolist() == case["float"]["draft_trace"][steps]["tokens"]
    assert errors[1] <= 1.25 * errors[0], errors
