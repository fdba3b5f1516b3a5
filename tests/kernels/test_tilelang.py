"""TileLang kernels are compiled ahead, found again and refused with what is missing; their numbers need a device."""

from __future__ import annotations

import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_kernels import cuda_tools, kernel_cache
from deepinfer_kernels.registry import IMPLEMENTATIONS
from deepinfer_kernels.tilelang import families, launch
from deepinfer_kernels.tilelang.experts import _FEW, _MANY

CASES = [Path(__file__).with_name(name) for name in ("tilelang_cases.py", "tilelang_gemm_cases.py")]


def needs_compiler() -> None:
    reason = families.uncompilable()
    if reason is not None:
        pytest.skip(f"needs what TileLang compiles with: {reason}")


def disassembled(cubin: bytes, path: Path) -> str:
    """SASS of a kernel, by the disassembler of CUDA or of triton's package."""
    tool = cuda_tools.find("nvdisasm")
    if tool.path is None:
        pytest.skip(f"{tool.absence}: {tool.fix()}")
    path.write_bytes(cubin)
    return subprocess.run([tool.path, "-c", path], capture_output=True, text=True, check=True).stdout


#: program, sizes, platform → what its products run on
PROGRAMS = [
    ("attention.attend_wide", dict(N=64, D=512, SPLIT=False), "sm90", "HGMMA"),
    ("attention.attend_wide", dict(N=64, D=512, SPLIT=True), "sm90", "HGMMA"),
    ("attention.attend", dict(N=64, D=128, SPLIT=False, HEADS=64), "sm90", "HGMMA"),
    ("attention.attend", dict(N=4, D=64, SPLIT=True, HEADS=16), "sm90", "HMMA"),
    # the tensor cores of Blackwell by the instructions of Ampere: correct, and slower than Triton's
    ("attention.attend", dict(N=64, D=512, SPLIT=False, HEADS=64), "sm100", "HMMA"),
    ("attention.join", dict(N=64, D=512), "sm100", ""),
    ("experts.gate_up", dict(N=2304, K=5120) | _MANY[0]._asdict(), "sm90", "HGMMA.64x256x16"),
    ("experts.down", dict(N=5120, K=2304) | _FEW[1]._asdict(), "sm90", "HGMMA.64x32x16"),
    ("experts.gate_up_blackwell", dict(N=2304, K=5120, BT=128), "sm100", "UTCHMMA"),
    ("experts.down_blackwell", dict(N=320, K=192, BT=32), "sm100", "UTCHMMA"),
    ("index.index_scores", dict(HEADS=32, D=128, QB=8), "sm90", "HGMMA.64x256x16"),
    ("index.index_scores", dict(HEADS=8, D=64, QB=1), "sm90", "HGMMA.64x8x16"),
    ("index.index_scores_blackwell", dict(HEADS=32, D=128, QB=4), "sm100", "UTCHMMA"),
]


#: stores to local memory that are known: in 64 registers, what makes keys keeps places and addresses there
SPILLS = {"attention.attend_wide": 100}


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("program", "sizes", "platform", "instruction"), PROGRAMS)
def test_a_program_compiles_for_a_gpu_that_is_not_there(tmp_path, program, sizes, platform, instruction):
    needs_compiler()
    from deepinfer_kernels.tilelang import build

    call = launch.Call(program, tuple(sizes.items()))
    jobs = build.jobs([build.Kernel("op", call)], platform, tmp_path)
    [made] = kernel_cache.build(jobs)
    assert made.status == "built", made.detail
    assert made.path is not None and made.path.parent == tmp_path / platform
    assert made.path == launch.library(call, tmp_path / platform)
    assert sorted(p.name for p in (tmp_path / platform).iterdir()) == sorted([".lock", made.path.name])
    sass = disassembled(build.cubin(made.path), tmp_path / "kernel.cubin")
    assert "EXIT" in sass and f" {instruction}" in sass
    assert sass.count(" STL") <= SPILLS.get(program, 0), "registers are spilled"
    if program == "attention.attend_wide":  # else the assembler waits for each product before the next one
        assert sass.count("WARPGROUP.DEPBAR") < sass.count("HGMMA") / 8
    [again] = kernel_cache.build(jobs)
    assert (again.status, again.path) == ("cached", made.path)


def test_what_is_announced_is_what_the_modules_hold():
    for module, names in families.FAMILIES.items():
        held = importlib.import_module(f"deepinfer_kernels.tilelang.{module}")
        for name in names:
            forms = [name, f"{name}_invariant"] if families.BATCH_DEPENDENT.get(name) else [name]
            made = [i for i in IMPLEMENTATIONS[name] if i.backend == "tilelang"]
            assert [i.fn.__name__ for i in made if "sm90" in i.platforms] == [name] * len(forms)
            for form in forms:
                assert inspect.signature(getattr(held, form)) == inspect.signature(made[0].fn), form


def test_importing_the_operations_imports_no_tilelang():
    names = [f"deepinfer_kernels.tilelang.{module}" for module in families.FAMILIES]
    code = f"import sys, {', '.join(names)}; sys.exit('tilelang' in sys.modules or 'tvm_ffi' in sys.modules)"
    env = dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p))
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_a_kernel_that_was_not_built_is_named_with_the_command_that_builds_it(tmp_path):
    with (
        families.from_folder(tmp_path / "sm90"),
        pytest.raises(launch.NotBuilt, match=r"attention\.join\(N=3, D=64\).*build-kernels --target sm90"),
    ):
        launch.launch("attention.join", dict(N=3, D=64), torch.empty(1))


@pytest.mark.parametrize("module", list(families.FAMILIES))
def test_without_triton_nothing_is_given_to_tilelang(monkeypatch, tmp_path, module):
    """Experts read weights as Triton packs them, and sizes without a program are Triton's."""
    folder = tmp_path / "sm90"
    folder.mkdir()
    (folder / f"{module}.f-{families.source_key(module)}-0-0.so").touch()
    monkeypatch.setattr(families, "platform", lambda: "sm90")
    monkeypatch.setattr(families.triton, "unusable", lambda: None)
    assert families.missing(module, tmp_path) is None
    reason = "triton is not installed: pip install 'deepinfer-cli[cuda]'"
    monkeypatch.setattr(families.triton, "unusable", lambda: reason)
    assert families.missing(module, tmp_path) == f"goes with triton, and {reason}"


def test_what_is_missing_is_said_with_what_to_install(monkeypatch, tmp_path):
    assert families.missing("attention", tmp_path) is not None, "no device, or nothing built"
    found = importlib.util.find_spec
    monkeypatch.setattr(families.importlib.util, "find_spec", lambda name: None if name == "tilelang" else found(name))
    assert families.uncompilable() == "tilelang is not installed: pip install 'deepinfer-cli[tilelang]'"
    monkeypatch.undo()
    needs_compiler()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    said = f"there is no nvcc in CUDA_HOME ({tmp_path}/bin): pip install nvidia-cuda-nvcc nvidia-cuda-cccl and unset"
    assert (families.uncompilable() or "").startswith(said)
    monkeypatch.undo()
    monkeypatch.setattr(families.importlib.metadata, "version", lambda name: "0.1.16")
    assert "kernels are written for 0.1.15" in (families.unusable() or "")


def test_another_source_or_size_is_another_library():
    stem = launch.Call("attention.join", (("N", 3), ("D", 64))).stem()
    assert stem != launch.Call("attention.join", (("N", 4), ("D", 64))).stem()
    assert stem.startswith(f"attention.join-{families.source_key('attention')}-")


def test_operations_without_programs_of_a_model_give_way_by_name_and_are_refused_when_demanded(tmp_path):
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_engine.sim.models import find_model

    shapes = kernel_shapes(find_model("nano").config, load_profile("h200x1-nano").profile)

    def why(op: str) -> str:
        row = next(i for i in IMPLEMENTATIONS[op] if i.backend == "tilelang")
        return row.lacks(shapes, "sm90", tmp_path) or ""

    assert why("index_scores") == "has no programs for 4 index heads of 32, only for 8 to 256 of 64 or 128"
    assert "3 of its kernels are not built for the sizes of this model, first attention.attend" in why("attend_cached")
    assert "not built for the sizes of this model, first experts." in why("moe_experts")


def test_calls_outside_the_programs_are_refused_and_not_handed_to_another_backend():
    from deepinfer_kernels.reference.linear import Weight
    from deepinfer_kernels.reference.moe import ExpertBank
    from deepinfer_kernels.tilelang import experts, index

    any_: Any = None
    with pytest.raises(ValueError, match="no index scores of 4 heads of 32"):
        index.index_scores(any_, torch.empty(1, 1, 4, 32), any_, torch.empty(1, 9, 32), any_)
    weight = Weight(torch.empty(2, 16, 16), "bf16")
    for form in (experts.moe_experts, experts.moe_experts_invariant):
        with pytest.raises(ValueError, match="MXFP4 in tiles"):
            form(any_, torch.empty(1, 16), torch.empty(2), ExpertBank(weight, weight, weight), torch.empty(1), 10.0)


@pytest.mark.gpu
@pytest.mark.timeout(900)
@pytest.mark.parametrize("cases", CASES, ids=lambda path: path.stem)
def test_every_kernel_agrees_with_the_reference_on_the_device(cases: Path):
    command = [sys.executable, "-m", "pytest", str(cases), "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout, done.stdout[-500:]
