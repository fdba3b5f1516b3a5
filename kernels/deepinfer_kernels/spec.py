"""``OpSpec``: what an operation is, independent of who computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

#: named sizes of one call, e.g. {"T": 4, "H": 192}
Dims = Mapping[str, int]


@dataclass(frozen=True)
class Tolerance:
    """How an implementation may differ from the reference: exact bits, or a relative norm ‖a − b‖ / ‖b‖."""

    exact: bool = False
    relative: float = 0.0


EXACT = Tolerance(exact=True)


@dataclass(frozen=True)
class OpSpec:
    """Signature, cost and tolerance of one operation.

    ``inputs`` / ``outputs`` map argument names to "shape dtype" with the repository's dimension letters.
    ``bytes`` and ``flops`` give the least memory traffic and the arithmetic (multiply-add = 2) of one call.
    ``row_independent``: an output row depends on its own input row only, so batch invariance can hold.
    """

    name: str
    family: str
    summary: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]
    tolerance: Tolerance
    bytes: Callable[[Dims], int]
    flops: Callable[[Dims], int]
    row_independent: bool = True


@dataclass(frozen=True)
class Implementation:
    """One way to compute an operation.

    ``backend`` names the source (reference, torch, cpp, triton, …), ``platforms`` where it runs, ``numerics`` the
    modes it honours. ``missing``, given the kernel cache (None: the user's), says in one sentence what is absent on
    this machine, or None when it can run.
    ``batch_invariant``: an output row has the same bits whatever else is in the call. ``auto``: may be chosen without
    being named. ``tolerance``: where it differs from the operation's. ``bound``, given the function and the kernel
    cache, is how the function reads its compiled kernels from there. ``composed``: the function is made of other
    operations and takes the namespace of those chosen in place of the numerics. ``copies``: it computes with copies of
    its weights, so that what is written into them after its first call is not seen. ``partner``: another operation that
    has to come from the same backend, because one reads what the other lays out. ``lacks``, given a model's ``Shapes``,
    the platform and the kernel cache, says what keeps it from serving that model without compiling.
    """

    op: str
    backend: str
    platforms: frozenset[str]
    numerics: frozenset[str]
    fn: Callable[..., Any]
    missing: Callable[[Path | None], str | None] = field(default=lambda cache: None)
    batch_invariant: bool = False
    auto: bool = True
    tolerance: Tolerance | None = None
    bound: Callable[[Callable[..., Any], Path], Callable[..., Any]] | None = None
    composed: bool = False
    copies: bool = False
    partner: str | None = None
    lacks: Callable[[Any, str, Path], str | None] = field(default=lambda shapes, platform, cache: None)
