"""Cases of test_tilelang.py for a CUDA device: values beside the reference, bits alone and in a batch, graphs."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deepinfer_kernels import kernel_cache
from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import attention as reference
from deepinfer_kernels.reference import quantise
from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.tilelang import attention, build, families, launch

NUM = NUMERICS["fast"]
#: heads and width: nano's, the release's, part of a block of heads, more than a block
SHAPES = [(4, 64), (64, 512), (40, 512), (70, 64), (64, 128)]


@pytest.fixture(scope="session", autouse=True)
def built(cases_cache: Path) -> Iterator[None]:
    """Every program of these cases, compiled side by side."""
    found: list[tuple[str, launch.Call]] = []
    platform = families.platform()
    with launch.recording(lambda call: found.append(("attend_cached", call)), platform):
        for heads, width in SHAPES:
            for T in (1, 500):
                arguments = on(make(T, heads, width), torch.device("meta"))
                attention.attend_cached(NUM, *arguments)
    made = kernel_cache.build(build.jobs(build.kernels(found), platform, cases_cache))
    assert {b.status for b in made} <= {"built", "cached"}, [b.detail for b in made if b.path is None]
    with families.from_folder(cases_cache / platform):
        yield


@contextmanager
def poisoned() -> Iterator[None]:
    """Memory that nobody writes holds NaN while this holds."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def on(arguments: tuple[Any, ...], device: torch.device | str) -> tuple[Any, ...]:
    return tuple(a.to(device) if isinstance(a, Tensor) else a for a in arguments)


def make(T: int, heads: int, width: int, W: int = 130, G: int = 200) -> tuple[Any, ...]:
    """Rows of this step, hidden places, 50 rows of the ring, slots, some of them hidden; the first row sees none."""
    torch.manual_seed(T + heads)
    window = torch.randint(-52, T, (T, W))
    slots = torch.randint(-3, 40, (T, G)).clamp(min=-1)
    window[0], slots[0] = -1, -1
    rows = torch.randn(51, width) * torch.exp2(torch.randint(-4, 4, (51, 1)).float())
    ring = quantise.pack_window(rows.bfloat16())
    entries = quantise.pack_global(torch.randn(40, width).bfloat16())
    q, local = torch.randn(T, heads, width).bfloat16(), torch.randn(T, width).bfloat16()
    return q, local, window, ring, slots, entries, torch.randn(heads), width**-0.5


def check(got: Tensor, expected: Tensor) -> None:
    assert got.shape == expected.shape and got.dtype == expected.dtype
    a, b = got.double(), expected.to(got.device).double()
    assert bool(torch.equal(a.isnan(), b.isnan()))
    a, b = a.nan_to_num(), b.nan_to_num()
    assert (a - b).norm() <= OPS["attend_cached"].tolerance.relative * b.norm()


@pytest.mark.parametrize("T", [1, 2, 7, 64, 150])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_agrees_with_the_reference(heads: int, width: int, T: int):
    arguments = on(make(T, heads, width), "cuda")
    expected = reference.attend_cached(NUM, *arguments)
    for form in (attention.attend_cached, attention.attend_cached_invariant):
        with poisoned():
            check(form(NUM, *arguments), expected)


@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_any_stores_may_be_absent_and_any_key_hidden(heads: int, width: int):
    q, local, window, ring, slots, entries, sink, scale = on(make(9, heads, width, 64, 65), "cuda")
    for stores in ((ring, None, None), (None, slots, entries), (None, None, None), (ring, slots[:, :0], entries)):
        places = window if stores[0] is not None else window.clamp(min=-1)
        arguments: tuple[Any, ...] = (q, local, places, *stores, sink, scale)
        check(attention.attend_cached(NUM, *arguments), reference.attend_cached(NUM, *arguments))
    hidden = attention.attend_cached(NUM, q, local, torch.full_like(window, -1), None, None, None, sink, scale)
    assert hidden.abs().max() == 0, "no key: nothing"


@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_a_row_has_the_same_bits_alone_in_any_batch_and_with_padded_slots(heads: int, width: int):
    q, local, window, ring, slots, entries, sink, scale = on(make(140, heads, width), "cuda")
    whole = attention.attend_cached_invariant(NUM, q, local, window, ring, slots, entries, sink, scale)
    for start, stop in ((0, 1), (5, 6), (3, 5), (10, 80), (0, 139)):
        part = slice(start, stop)
        got = attention.attend_cached_invariant(
            NUM, q[part], local, window[part], ring, slots[part], entries, sink, scale
        )
        assert torch.equal(got, whole[part]), f"rows {start}..{stop}"
    wide = torch.nn.functional.pad(slots, (0, 300), value=-1)
    assert torch.equal(
        attention.attend_cached_invariant(NUM, q, local, window, ring, wide, entries, sink, scale), whole
    )


def test_every_code_of_a_record_reads_as_in_the_reference():
    """A NaN in a record reaches the rows that read it and no other."""
    torch.manual_seed(3)
    width = 512
    ring = torch.randint(0, 256, (60, width + width // 32), dtype=torch.uint8)
    ring[:, width:] = torch.randint(120, 130, (60, width // 32))
    entries = torch.randint(0, 256, (60, width * 9 // 16), dtype=torch.uint8)
    ring[:30, :width][(ring[:30, :width] & 0x7F) == 0x7F] = 0x31
    entries[:30, width // 2 :] &= 0x6F
    window, slots = -2 - torch.arange(60).unsqueeze(1), torch.arange(60).unsqueeze(1)
    slots[15:30] = -1
    window[:15] = -1
    q = torch.randn(60, 64, width).bfloat16() * 0.05
    arguments = on((q, q[:, 0], window, ring, slots, entries, torch.zeros(64), 1e-3), "cuda")
    expected = reference.attend_cached(NUM, *arguments)
    assert not expected[:30].isnan().any() and expected[30:].isnan().any()
    check(attention.attend_cached_invariant(NUM, *arguments), expected)


def test_calls_in_a_graph_follow_the_stream_and_its_new_inputs():
    arguments = on(make(64, 64, 512), "cuda")
    attention.attend_cached(NUM, *arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = attention.attend_cached(NUM, *arguments)
    arguments[0].normal_()
    graph.replay()
    torch.cuda.synchronize()
    check(got, reference.attend_cached(NUM, *arguments))
    del graph
    gc.collect()


def test_wrong_shapes_and_types_are_refused():
    q, local, window, ring, slots, entries, sink, scale = on(make(2, 64, 512), "cuda")
    with pytest.raises(TypeError, match="bfloat16"):
        attention.attend_cached(NUM, q.float(), local, window, ring, slots, entries, sink, scale)
    with pytest.raises(ValueError, match="records of 288 bytes, not 528"):
        attention.attend_cached(NUM, q, local, window, entries, slots, entries, sink, scale)
    with pytest.raises(ValueError, match="local rows, window and sink"):
        attention.attend_cached(NUM, q, local, window[:1], ring, slots, entries, sink, scale)
