"""Programs for Ascend 950: they lower without the device, and their source computes what the reference does.

``ascend/emulated.h`` stands for the intrinsics: the source that TileLang writes is compiled for the CPU with it, run
core by core, and compared with the reference. Needs tilelang and a C++ compiler; what the hardware does is unverified.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_cli import main as cli
from deepinfer_kernels.ascend import build, families
from deepinfer_kernels.ascend.families import Program
from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import attention, cache, engram, hyper, index, linear, moe, norm, quantise
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.registry import IMPLEMENTATIONS, KernelError, resolve, why_not

FAST = NUMERICS["fast"]
EMULATION = Path(__file__).parent / "ascend" / "emulated.h"
CORES = 56
_SCALARS = {"float": ctypes.c_float, "int32_t": ctypes.c_int32, "int64_t": ctypes.c_int64}

needs_tilelang = pytest.mark.skipif(
    families.tilelang.unusable() is not None, reason=families.tilelang.unusable() or "tilelang is there"
)
needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX") or "g++") is None, reason="no C++ compiler on the path"
)


def program(name: str, **sizes: Any) -> Program:
    return Program(("any",), name, tuple(sizes.items()))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., None]:
    """Lowers a program, compiles it with the emulation and runs every core of it on tensors given by name."""
    folder = tmp_path_factory.mktemp("ascend")

    def compiled(source: str, name: str, parameters: str, mixed: bool) -> ctypes.CDLL:
        body = re.sub(r"#include <tl_templates[^>]*>\n", "", source)
        for place, memory in (("ubuf", "ub_memory"), ("cbuf", "l1_memory"), ("cc", "l0c_memory")):
            body = body.replace(f"(__{place}__ uint8_t *)0", memory)
        body = body.replace("(__cc__ float *)0", "(float*)l0c_memory")
        names = ", ".join(p.rpartition(" ")[2] for p in parameters.split(","))
        call = f"run_on_core(core, {str(mixed).lower()}, [&] {{ {name}({names}); }});"
        text = f'#include "{EMULATION}"\n{body}\nextern "C" void on_core(int64_t core, {parameters}) {{ {call} }}\n'
        stem = folder / hashlib.sha256(text.encode()).hexdigest()[:12]
        if not stem.with_suffix(".so").exists():
            stem.with_suffix(".cpp").write_text(text)
            flags = ["-std=c++20", "-O1", "-fno-strict-aliasing", "-fwrapv", "-ffp-contract=off", "-w", "-pthread"]
            command = [os.environ.get("CXX") or "g++", *flags, "-shared", "-fPIC", "-o", f"{stem}.so", f"{stem}.cpp"]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, done.stderr[:2000]
        return ctypes.CDLL(f"{stem}.so")

    def run(name: str, sizes: dict[str, Any], **values: Any) -> None:
        source = build.lower(program(name, **sizes))
        header = re.search(r'extern "C" __global__ __(vector__|cube__|mix__\(1, 2\)) void (\w+)\((.*?)\) \{', source)
        assert header is not None
        library, arguments, names = compiled(source, header[2], header[3], header[1].startswith("mix")), [], set()
        for parameter in header[3].split(","):
            kind, _, parameter_name = parameter.strip().rpartition(" ")
            names.add(parameter_name)
            value = values[parameter_name]
            if isinstance(value, Tensor):
                assert value.is_contiguous() and kind.endswith("*")
                arguments.append(ctypes.c_void_p(value.data_ptr()))
            else:
                arguments.append(_SCALARS[kind](value))
        assert names == set(values), f"not parameters of {name}: {sorted(set(values) - names)}"
        for core in range(CORES):
            library.on_core(ctypes.c_int64(core), *arguments)

    return run


def bf(*shape: int) -> Tensor:
    return torch.randn(*shape).bfloat16()


def poison(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else 77, dtype=dtype)


def close(got: Tensor, expected: Tensor, relative: float = 1e-4) -> None:
    assert got.shape == expected.shape and not got.isnan().any()
    error = float((got.float() - expected.float()).norm() / expected.float().norm())
    assert error <= relative, f"relative error {error:.2e}"


def emulated(test: Callable[..., None]) -> Callable[..., None]:
    """A test that lowers a program and runs its source."""
    return needs_tilelang(needs_compiler(test))


@emulated
@pytest.mark.parametrize("width", [160, 32])
def test_rms_norm(run, width):
    x, w, y = bf(60, width), bf(width), poison(60, width)
    x[0] = 0
    run("rows.rms_norm", {"H": width}, X=x, WEIGHT=w, Y=y, T=60, eps=1e-20)
    close(y, norm.rms_norm(FAST, x, w, 1e-20))
    assert not y[0].any()


@emulated
@pytest.mark.parametrize(("heads", "width", "turned"), [(5, 64, 16), (1, 128, 64)])
def test_rope(run, heads, width, turned):
    inverse = heads == 5
    x, angle = bf(7, heads, width), torch.rand(7, turned // 2) * 50
    y = x.clone()
    sizes = {"N": heads, "D": width, "DR": turned, "INVERSE": inverse}
    run("rows.rope", sizes, X=y, COS=angle.cos(), SIN=angle.sin(), T=7)
    close(y, norm.rope(FAST, x, angle.cos(), angle.sin(), inverse))
    assert torch.equal(y[..., : width - turned], x[..., : width - turned])


@emulated
def test_swiglu(run):
    width = 96
    gate, up, weight, a = bf(60, width) * 6, bf(60, width) * 6, torch.rand(60), poison(60, width)
    run("rows.swiglu", {"WIDTH": width}, GATE=gate, UP=up, WEIGHT=weight, A=a, M=60, limit=10.0)
    close(a, moe.swiglu(FAST, gate, up, 10.0, weight))


@emulated
def test_moe_combine(run):
    y, order, shared, out = bf(33, 160), torch.randperm(33), bf(11, 160), poison(11, 160)
    run("rows.moe_combine", {"H": 160, "K": 3}, Y=y, ORDER=order, SHARED=shared, OUT=out, T=11, M=33)
    assert torch.equal(out, moe.moe_combine(FAST, y, order, shared, 3))


@emulated
def test_streams(run):
    X, pre, y = bf(7, 4, 160), torch.rand(7, 4), poison(7, 160)
    run("rows.mhc_collapse", {"H": 160, "C": 4}, X=X, PRE=pre, Y=y, T=7)
    close(y, hyper.mhc_collapse(FAST, X, pre), 1e-3)
    added, post, comb, out = bf(7, 160), torch.rand(7, 4), torch.rand(7, 4, 4), poison(7, 4, 160)
    run("rows.mhc_expand", {"H": 160, "C": 4}, X=X, Y=added, POST=post, COMB=comb, OUT=out, T=7)
    close(out, hyper.mhc_expand(FAST, X, added, post, comb), 1e-3)


@emulated
def test_engram_hash(run):
    classes, factors = torch.randint(-1, 90000, (200, 4)), torch.randint(1 << 20, 1 << 44, (4,))
    primes = torch.randint(15_000_000, 16_000_000, (3, 8))
    offsets, ids = torch.arange(24).view(3, 8) * 16_000_000, poison(200, 24, dtype=torch.int64)
    given = dict(CLASSES=classes, MULTIPLIERS=factors, PRIMES=primes, OFFSETS=offsets, IDS=ids)
    run("rows.engram_hash", {"LAGS": 4, "HEADS": 8}, **given, T=200, pad_class=2)
    assert torch.equal(ids, engram.engram_hash(FAST, classes, 2, factors, primes, offsets))


@emulated
@pytest.mark.parametrize(("experts", "choices", "normalise"), [(64, 6, True), (12, 3, False)])
def test_gate_topk(run, experts, choices, normalise):
    logits, bias = torch.randn(70, experts) * 6, torch.rand(experts)
    logits[1], logits[2] = 0.0, 30.0  # all equal: the bias decides
    if experts == 12:
        bias[:] = 0.25  # nothing decides: the lowest ids
        logits[3] = -18.0  # exp is lost beside 1
    ids, weights = poison(70, choices, dtype=torch.int64), poison(70, choices, dtype=torch.float32)
    sizes = {"E": experts, "K": choices, "NORMALISE": normalise}
    run("rows.gate_topk", sizes, LOGITS=logits, BIAS=bias, IDS=ids, WEIGHTS=weights, T=70, scale=1.5)
    options: dict[str, Any] = dict(k=choices, normalise=normalise, scale=1.5, temperature=1.0)
    expected_ids, expected = moe.gate_topk(FAST, logits, torch.eye(experts), bias, **options)
    assert torch.equal(ids, expected_ids)
    assert ((weights - expected).abs() <= 2e-6 * expected.abs()).all()


def hard_rows(width: int) -> Tensor:
    """Magnitudes from 2^-40 to 2^20; zeros, equal values, ties of every code, a NaN, an infinity, −0."""
    x = bf(80, width) * torch.exp2(torch.randint(-40, 20, (80, 1)).float()).bfloat16()
    x[0], x[1], x[4] = 0, 0.75, -0.0
    x[2, 3], x[3, 5] = float("nan"), float("inf")
    halves = torch.tensor(
        [6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -0.25, -0.75, -1.25, -1.75, -2.5, -3.5, -5.0, 0.5]
    )
    x[5] = halves.repeat(width // 16).bfloat16()
    return x


@emulated
@pytest.mark.parametrize(("kind", "width"), [("window", 96), ("global", 64), ("index", 32)])
def test_records_are_the_references_bytes_and_read_back(run, kind, width):
    x, sizes = hard_rows(width), {"D": width, "KIND": kind}
    expected = cache.pack_rows(FAST, x, kind)
    records = poison(*expected.shape, dtype=torch.uint8)
    run("records.pack_rows", sizes, X=x, RECORDS=records, T=80)
    assert torch.equal(records, expected), f"{int((records != expected).sum())} bytes differ"
    slots, y = torch.arange(90) % 81 - 1, poison(90, width)
    y.fill_(3.0)
    run("records.load_rows", sizes, RECORDS=records, SLOTS=slots, Y=y, T=90, R=80)
    values = cache.load_rows(FAST, records, slots, kind)
    assert torch.equal(y.nan_to_num(nan=-7.0), values.nan_to_num(nan=-7.0)) and values.isnan().any()


@emulated
@pytest.mark.parametrize(("outs", "inner"), [(32, 160), (320, 128)])
def test_linear(run, outs, inner):
    x, w, y = bf(150, inner), bf(outs, inner), poison(150, outs)
    run("cube.linear", {"OUT": outs, "IN": inner}, X=x, W=w, Y=y, T=150)
    close(y, linear.linear(FAST, x, linear.Weight(w, "bf16")), 1e-3)


@emulated
def test_linear_of_quantised_operands(run):
    num = NUMERICS["reference"]
    x, w, y = bf(130, 256), torch.randn(64, 256), poison(130, 64)
    data, scale = quantise.quantise_fp8_tiles(w)
    codes, x_scale = quantise.quantise_q8(x)
    rows = scale.repeat_interleave(32, 0).contiguous()
    run("cube.linear_mx", {"OUT": 64, "IN": 256}, X=codes, XS=x_scale, W=data, WS=rows, Y=y, T=130)
    close(y, linear.linear(num, x, linear.prepare_weight(num, data, scale, "fp8")), 1e-3)


@emulated
def test_grouped_products_take_the_weights_of_their_tile(run):
    slots = torch.tensor([2, -1, 0, 2], dtype=torch.int32)
    x, w, y = bf(450, 96), bf(3, 64, 96), torch.full((450, 64), 3.0).bfloat16()
    run("cube.grouped", {"S": 3, "OUT": 64, "IN": 96}, X=x, W=w, SLOTS=slots, Y=y, M=450, TILES=4)
    for tile, slot in enumerate(slots.tolist()):
        part = slice(tile * 128, min(450, (tile + 1) * 128))
        if slot < 0:
            assert (y[part] == 3.0).all()
        else:
            close(y[part], x[part] @ w[slot].mT, 1e-3)


@emulated
def test_attend(run):
    q, kv, sink, o = bf(30, 32, 64), bf(90, 64), torch.randn(32), poison(30, 32, 64)
    places = torch.randint(-40, 90, (30, 128)).clamp(min=-1)
    places[0] = -1  # only the sink
    run("attend.attend", {"N": 32, "D": 64, "K": 128}, Q=q, KV=kv, PLACES=places.int(), SINK=sink, OUT=o, T=30, R=90,
        scale=0.125)  # fmt: skip
    expected = attention.attend(FAST, q, kv[places.clamp(min=0)], places >= 0, sink, 0.125)
    close(o, expected, 5e-3)
    assert not o[0].any()


@emulated
def test_mhc_mixes_are_a_product_of_three_parts_and_the_coefficients_of_its_sums(run):
    T, C, H = 20, 4, 160
    X, fn = bf(T, C, H), torch.randn(C * (C + 2), C * H) / 25
    base, scale = torch.randn(C * (C + 2)), torch.tensor([0.7, 0.5, 0.9])
    parts, rest = [], fn
    for _ in range(3):  # what bf16 leaves of f32, again and again
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    w = torch.nn.functional.pad(torch.cat(parts), (0, 0, 0, 8))
    sums = poison(T, 80, dtype=torch.float32)
    run("cube.linear", {"OUT": 80, "IN": C * H, "WIDE": True}, X=X.flatten(1), W=w, Y=sums, T=T)
    mine = [poison(T, n, dtype=torch.float32) for n in (C, C, C * C)]
    given = dict(X=X.flatten(1), SUMS=sums[:, :72].contiguous(), BASE=base, SCALE=scale)
    outs = dict(zip(("PRE", "POST", "COMB"), mine, strict=True))
    sizes = {"H": H, "C": C, "PARTS": 3, "ITERS": 20}
    run("rows.mhc_coefficients", sizes, **given, **outs, T=T, rms_eps=1e-20, hc_eps=1e-6)
    expected = hyper.mhc_mixes(FAST, X, fn, base, scale, rms_eps=1e-20, hc_eps=1e-6, iters=20)
    for have, want in zip(mine, expected, strict=True):
        close(have, want.flatten(1), 1e-5)


@emulated
def test_engram_gate(run):
    T, C, H = 9, 4, 160
    X, projected, weights = bf(T, C, H), bf(T, (C + 1) * H), (bf(C, H), bf(C, H))
    dead = torch.arange(T) % 3 == 1
    fused, live = weights[0].float() * weights[1].float(), (~dead).float()
    out, gate = poison(T, C, H), poison(T, C, dtype=torch.float32)
    given = dict(X=X, KV=projected, WEIGHT=fused, LIVE=live, OUT=out, GATE=gate)
    run("rows.engram_gate", {"H": H, "C": C}, **given, T=T, eps=1e-20)
    for have, want in zip((out, gate), engram.engram_gate(FAST, X, projected, *weights, dead, 1e-20), strict=True):
        close(have, want, 1e-3)


@emulated
def test_index_scores(run):
    iq, iw, keys, out = bf(30, 16, 32), torch.randn(30, 16), bf(150, 32), poison(30, 150, dtype=torch.float32)
    run("attend.index_scores", {"HEADS": 16, "D": 32}, Q=iq, W=iw, KV=keys, OUT=out, T=30, N=150)
    visible = torch.full((1, 30), 150)
    close(out, index.index_scores(FAST, iq.unsqueeze(0), iw.unsqueeze(0), keys.unsqueeze(0), visible)[0], 1e-5)


@needs_tilelang
@pytest.mark.parametrize(
    ("name", "sizes", "said"),
    [
        ("cube.linear", {"OUT": 1280, "IN": 5120}, ("ascend_gemm_l1<", "gm2l1_nd2nz", "asc_copy_l0c2gm", "__cube__")),
        ("cube.linear", {"OUT": 16, "IN": 160}, ("ascend_gemm_l1<", "__cube__")),
        ("cube.linear_mx", {"OUT": 1280, "IN": 5120}, ("mx", "__cube__", "e8m0")),
        ("cube.grouped", {"S": 7, "OUT": 2304, "IN": 5120}, ("ascend_gemm_l1<", "SLOTS[", "__cube__")),
        ("rows.rms_norm", {"H": 5120}, ("__vector__", "simd_inst::vcadd", "asc_copy_gm2ub_align", "vlds_unpack<")),
        ("records.pack_rows", {"D": 512, "KIND": "window"}, ("__simt_vf__", "tl::float_e4m3_t", "asc_vf_call<")),
    ],
)  # fmt: skip
def test_programs_lower_to_the_units_they_are_for(name, sizes, said):
    source = build.lower(program(name, **sizes))
    assert all(word in source for word in said), [word for word in said if word not in source]


@needs_tilelang
def test_sources_are_written_once_and_a_damaged_one_again(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "bisheng", lambda: None)
    wanted = [program("rows.rms_norm", H=64), program("records.pack_rows", D=64, KIND="index")]
    assert [b.status for b in build.plan(wanted, tmp_path)] == ["missing", "missing"] and not list(tmp_path.iterdir())
    made = build.build(wanted, tmp_path)
    assert [(b.status, b.detail) for b in made] == [("source-only", families.LABEL)] * 2
    assert all(b.path is not None and "__vector__" in b.path.read_text() for b in made)
    again = build.build(wanted, tmp_path)
    assert [(b.path, b.seconds) for b in again] == [(b.path, 0.0) for b in made]
    assert made[0].path is not None
    made[0].path.write_text("damaged")
    assert [b.status for b in build.plan(wanted, tmp_path)] == ["missing", "source-only"]
    assert [p.suffix for p in (tmp_path / "ascend950").iterdir() if p.name.startswith(".")] in ([""], [".lock"], [])


@needs_tilelang
def test_a_program_that_cannot_be_lowered_fails_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(families, "bisheng", lambda: None)
    made = build.build([program("records.pack_rows", D=64, KIND="absent"), program("rows.rms_norm", H=64)], tmp_path)
    assert [b.status for b in made] == ["failed", "source-only"] and "absent" in made[0].detail


@needs_tilelang
def test_the_command_lists_sources_and_what_has_none(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(families, "bisheng", lambda: None)
    arguments = ["build-kernels", "--target", "ascend950", "--ops", "rms_norm,pack_rows", "--format", "json"]
    arguments += ["--set", f"kernels.cache_dir={tmp_path}"]
    assert cli.main([*arguments, "--dry-run"]) == 0
    dry = json.loads(capsys.readouterr().out)["rows"]
    assert {r["status"] for r in dry} == {"missing"} and {r["op"] for r in dry} == {"rms_norm", "pack_rows"}
    assert cli.main(arguments) == 3
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    assert {(r["backend"], r["status"]) for r in document["rows"]} == {("ascend", "source-only")}
    assert all(Path(r["file"]).suffix == ".asc" for r in document["rows"]) and len(document["rows"]) == len(dry)
    assert "none is a binary: bisheng is not on the path" in captured.err and "set_env.sh" in captured.err
    assert cli.main([*arguments[:3], "--dry-run", "--format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert {r["op"] for r in rows} == set(OPS)
    assert {r["reason"] for r in rows if r["backend"] == "reference"} == {families.NO_FORM}


def test_without_tilelang_the_command_says_what_to_install(capsys, monkeypatch):
    monkeypatch.setattr(families.tilelang, "unusable", lambda: "tilelang is not installed: pip install it")
    assert cli.main(["build-kernels", "--target", "ascend950"]) == 3
    captured = capsys.readouterr()
    assert "kernels for ascend950 are compiled by tilelang, and tilelang is not installed" in captured.err


def test_the_registry_lists_ascend_and_refuses_with_what_is_known():
    for op, programs in families.OPERATIONS.items():
        (row,) = [i for i in IMPLEMENTATIONS[op] if i.backend == "ascend"]
        assert programs and not row.auto and row.platforms == {"ascend950"}
        assert families.LABEL in (row.missing(None) or "")
        assert "no step of this engine runs on an NPU" in (why_not(row, "fast", "ascend950") or "")
    with pytest.raises(KernelError, match=r"^\w+: .*not on ascend950"):
        resolve("fast", "ascend950")
    for named, said in (("rms_norm", "no step of this engine runs on an NPU"), ("linear", "not on ascend950")):
        with pytest.raises(KernelError, match=said) as refused:
            resolve("fast", "ascend950", {named: "ascend" if named == "rms_norm" else "reference"})
        assert refused.value.op == named, "not of an operation that nobody named"
    row = next(i for i in IMPLEMENTATIONS["rms_norm"] if i.backend == "ascend")
    with pytest.raises(RuntimeError, match="rms_norm on ascend950: compiles to AscendC source"):
        row.fn(FAST, torch.zeros(1, 4), torch.ones(4), 1e-6)
