"""Every TileLang kernel a model needs: operations are called with tensors without memory, their launches recorded."""

from __future__ import annotations

import importlib
from collections.abc import Container, Iterator
from pathlib import Path

from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.shapes import Shapes
from deepinfer_kernels.tilelang.families import FAMILIES
from deepinfer_kernels.tilelang.launch import Call, library, recording


def launches(shapes: Shapes, *, platform: str, invariant: bool) -> Iterator[tuple[str, Call]]:
    """(operation, launch) of every kernel, some of them more than once; ``invariant``: in the batch-invariant form."""
    for name in FAMILIES:
        module = importlib.import_module(f"deepinfer_kernels.tilelang.{name}")
        for op, arguments, options in module.calls(shapes):
            form = getattr(module, f"{op}_invariant", None) if invariant else None
            found: list[Call] = []
            with recording(found.append, platform):
                (form or getattr(module, op))(NUMERICS["fast"], *arguments, **options)
            yield from ((op, call) for call in found)


def absent(shapes: Shapes, platform: str, cache: Path, ops: Container[str], *, invariant: bool) -> list[str]:
    """The programs of some operations that a kernel cache does not have in the sizes of a model."""
    found = launches(shapes, platform=platform, invariant=invariant)
    wanted = dict.fromkeys(call for op, call in found if op in ops)
    return [call.program for call in wanted if library(call, cache / platform) is None]
