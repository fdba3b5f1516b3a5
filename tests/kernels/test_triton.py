"""Triton kernels in the interpreter against the reference: values, bytes, decisions, independence of rows, refusals.

They run in a process of their own, because Triton decides at its import whether kernels are interpreted.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deepinfer_kernels.triton import families

if (reason := families.unusable()) is not None:
    pytest.skip(f"needs another triton: {reason}", allow_module_level=True)

CASES = [
    str(Path(__file__).with_name(f"triton_{name}.py")) for name in ("cases", "step_cases", "draw_cases", "reject_cases")
]

#: models and profiles of one process and of several
SERVED = (("nano", "h200x1-nano"), ("deepseek-v4.1-flash", "decode-ep64"))
#: operations whose kernels depend on how many rows, choices or entries there are
BY_LENGTH = ("dispatch_permute", "dispatch_rows", "count_choices", "select_topk", "candidate_blocks")


def run(**environment: str) -> None:
    """Every case; none of them skipped, but those in the interpreter that would take it hours."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-m", "pytest", *CASES, "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    allowed = "V4.1-Flash's shapes take a device" if environment else None
    assert " passed" in done.stdout and all(allowed and line.endswith(allowed) for line in skipped), skipped


@pytest.mark.timeout(900)
def test_every_kernel_agrees_with_the_reference_in_the_interpreter():
    run(TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_every_kernel_agrees_with_the_reference_on_the_device():
    run()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("platform", ["sm90", "sm100"])
def test_kernels_of_every_kind_compile_for_a_gpu_that_is_not_there(tmp_path: Path, platform: str):
    """One of each function, storage and record kind at nano's shapes; build-kernels makes them all."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from deepinfer_engine.config.profile import load_profile\n"
        "from deepinfer_engine.model.kernel_shapes import kernel_shapes\n"
        "from deepinfer_engine.sim.models import find_model\n"
        "from deepinfer_kernels.triton import build, shapes\n"
        "sizes = kernel_shapes(find_model('nano').config, load_profile('h200x1-nano').profile)\n"
        "one = {}\n"
        "for k in build.kernels(shapes.launches(sizes, invariant=False)):\n"
        "    constants = dict(k.constants)\n"
        "    named = {name: constants[i] for i, (name, _) in enumerate(k.signature) if i in constants}\n"
        "    one.setdefault((k.function, named.get('STORED'), named.get('KIND'), named.get('PARTS', 1) > 1), k)\n"
        "for k in one.values():\n"
        "    cubin = build.compile_one(k, sys.argv[1], Path(sys.argv[2]))\n"
        "    print(k.function, cubin[:4] == b'\\x7fELF')\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    command = [sys.executable, "-c", code, platform, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    made = [line.split() for line in done.stdout.splitlines()]
    assert len(made) > 20 and {is_elf for _, is_elf in made} == {"True"}, done.stdout


@pytest.mark.timeout(300)
def test_weights_of_a_real_size_are_on_their_way_while_the_steps_before_are_multiplied(tmp_path: Path):
    """A load that Triton cannot see to be wide and on 16 bytes is waited for in every step, at twice the time."""
    code = (
        "import torch, triton\n"
        "from triton.backends.compiler import GPUTarget\n"
        "from deepinfer_kernels.reference.moe import ExpertBank\n"
        "from deepinfer_kernels.reference.numerics import NUMERICS\n"
        "from deepinfer_kernels.triton import build, launch, linear, moe, shapes\n"
        "empty, weight, calls = shapes._empty, shapes._weight, []\n"
        "bank = ExpertBank(*(weight(6, *s, kind='fp4') for s in ((2304, 5120), (2304, 5120), (5120, 2304))))\n"
        "with launch.recording(calls.append):\n"
        "    for rows in (48, 384, 12288):\n"
        "        counts = empty(6, dtype=torch.int64)\n"
        "        moe.moe_experts(None, empty(rows, 5120), counts, bank, empty(rows, dtype=torch.float32), 10.0)\n"
        "    for T in (1, 64, 200):\n"
        "        linear.linear(None, empty(T, 5120), weight(1280, 5120, kind='fp8'))\n"
        "for k in build.kernels(('', call) for call in calls):\n"
        "    made = triton.compile(k.source, target=GPUTarget('cuda', 90, 32), options=dict(k.options))\n"
        "    for part in made.asm['ttgir'].split('scf.for')[1:]:\n"
        "        loop = part.split('scf.yield')[0]\n"
        "        print(k.function, loop.count('tt.load'), loop.count('async_copy_global_to_local'))\n"
    )
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"TRITON_CACHE_DIR": str(tmp_path)}
    env["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _, _ in lines} == {"_gate_up", "_down", "_linear"}, done.stdout
    assert {(waited, ahead) for _, waited, ahead in lines} == {("0", "3")}, done.stdout


def test_no_number_of_tokens_of_a_step_takes_a_product_that_is_not_made_ahead():
    from deepinfer_kernels.triton.linear import parts, pays_dense, tile
    from deepinfer_kernels.triton.shapes import _TOKENS, _weight

    for outs, inner in (
        (160, 512),
        (512, 4096),
        (1024, 4096),
        (1536, 4096),
        (8192, 4096),
        (32768, 1536),
        (129280, 4096),
    ):
        weight = _weight(outs, inner, kind="fp8")

        def form(tokens: int, outs: int = outs, inner: int = inner, weight: Any = weight) -> Any:
            if pays_dense(tokens, weight):
                return "dense"
            return tile(tokens, outs), parts(tokens, outs, inner, tile(tokens, outs))

        assert {form(tokens) for tokens in range(1, 8193)} == {form(tokens) for tokens in _TOKENS}, (outs, inner)


def test_no_number_of_rows_of_experts_takes_a_kernel_that_is_not_made_ahead():
    from deepinfer_kernels.triton.moe import tiles
    from deepinfer_kernels.triton.shapes import _ROWS

    for slots in (1, 6, 48):
        made = {tiles(mean * slots, slots) for mean in _ROWS}
        assert {tiles(rows, slots) for rows in range(1, 400 * slots)} == made


def test_no_number_of_choices_or_entries_takes_a_kernel_that_is_not_made_ahead():
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_engine.sim.models import find_model
    from deepinfer_kernels.reference.numerics import NUMERICS
    from deepinfer_kernels.triton import build, launch, permute, select, shapes

    num, empty, i64, f32, needed = NUMERICS["fast"], shapes._empty, shapes._i64, shapes._f32, []
    sizes = [kernel_shapes(find_model(m).config, load_profile(p).profile) for m, p in SERVED]
    for s in sizes:
        made = set(build.kernels(c for c in shapes.launches(s, invariant=False) if c[0] in BY_LENGTH))
        with launch.recording(lambda call, needed=needed: needed.append(call)):
            for (experts, choices, slots, _), all_slots in zip(s.routers, s.all_slots, strict=True):
                for tokens in (1, 2, 1024 // choices, 1024 // choices + 1, 999, 8192):
                    ids, weights = i64(tokens, choices), f32(tokens, choices)
                    permute.dispatch_permute(num, ids, all_slots)
                    permute.dispatch_permute(num, i64(tokens * choices, 1), slots)
                    permute.dispatch_rows(num, empty(tokens, s.H), ids, weights, slots)
                    permute.count_choices(num, i64(7, tokens, choices), experts)
            entries, block, keep = s.choice
            for n in (1, 9, *(length + more for length in (1 << e for e in range(8, 23)) for more in (-1, 0, 1, 99))):
                select.select_topk(num, f32(3, 2, n), k=entries)
                select.candidate_blocks(num, f32(3, 2, n), i64(3, 2), block=block, keep=keep)
        assert set(build.kernels(("", call) for call in needed)) <= {replace(k, op="") for k in made}
        needed.clear()


def test_no_number_of_queries_of_index_records_takes_a_kernel_that_is_not_made_ahead():
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_engine.sim.models import find_model
    from deepinfer_kernels.triton import build, index, launch, shapes

    empty, i64 = shapes._empty, shapes._i64
    for model, profile in SERVED:
        s = kernel_shapes(find_model(model).config, load_profile(profile).profile)
        needed: list[Any] = []
        with launch.recording(needed.append):
            for C in (*range(1, 70), 100, 127, 128, 129, 255, 256, 257, 511, 512, 513, 1000, 2048, 8192):
                queries = empty(3, C, s.index_heads, s.Di), empty(3, C, s.index_heads)
                places = shapes._bytes(999, s.Di // 32 * 17), i64(3), i64(5, 9), i64(3, C)
                for per_block in (64, 128):
                    index.index_scores_cached(None, *queries, *places, per_block=per_block, count=500)  # pyright: ignore
        made = {replace(k, op="") for k in build.kernels(shapes.launches(s, invariant=False))}
        assert set(build.kernels(("", call) for call in needed)) <= made


def test_what_is_announced_is_what_the_modules_hold():
    """The signatures too: the registry takes them from the reference, without importing triton."""
    import importlib
    import inspect

    from deepinfer_kernels.registry import IMPLEMENTATIONS
    from deepinfer_kernels.triton.families import BATCH_DEPENDENT, FAMILIES

    for family, names in FAMILIES.items():
        module = importlib.import_module(f"deepinfer_kernels.triton.{family}")
        for name in names:
            forms = [name, f"{name}_invariant"] if BATCH_DEPENDENT.get(name) else [name]
            made = [i for i in IMPLEMENTATIONS[name] if i.backend == "triton"]
            assert [i.fn.__name__ for i in made] == [name] * len(forms)
            for form in forms:
                assert inspect.signature(getattr(module, form)) == inspect.signature(made[0].fn), form
