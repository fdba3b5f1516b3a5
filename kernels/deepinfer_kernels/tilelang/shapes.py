"""Every TileLang kernel a model needs: operations are called with tensors without memory, their launches recorded."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from deepinfer_kernels.reference.numerics import NUMERICS
from deepinfer_kernels.tilelang.families import FAMILIES
from deepinfer_kernels.tilelang.launch import Call, recording

if TYPE_CHECKING:
    from deepinfer_kernels.triton.shapes import Shapes


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
