"""Which implementation computes which operation: chosen once, shown on request, never changed silently.

``resolve`` walks the implementations of each operation in order of preference and takes the first that runs on the
platform, honours the numerics and misses nothing. A forced backend that cannot serve is an error, not a fallback.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepinfer_kernels import invariant, parts
from deepinfer_kernels.ascend import families as ascend
from deepinfer_kernels.cpu.families import FAMILIES as COMPILED
from deepinfer_kernels.kernel_cache import default_cache
from deepinfer_kernels.ops import OPS
from deepinfer_kernels.reference import (
    attention,
    cache,
    compress,
    engram,
    hyper,
    index,
    linear,
    moe,
    norm,
    sample,
    speculate,
)
from deepinfer_kernels.reference.numerics import NUMERICS, Numerics
from deepinfer_kernels.shapes import Shapes
from deepinfer_kernels.spec import Implementation
from deepinfer_kernels.tilelang import families as tilelang
from deepinfer_kernels.triton import families as triton
from deepinfer_kernels.vendor import families as vendor

_EVERYWHERE = frozenset({"cpu", "sm90", "sm100"})
_GPUS = frozenset({"sm90", "sm100"})
_ALL = frozenset(NUMERICS)
#: backends that are torch operations, alone or one after another
_TORCH = frozenset({"reference", "torch", "parts", "tiled"})

#: compiled experts read weights as the compiled ``prepare_weight`` packs them; others would unpack them at every call
_COMPILED_PARTNERS = {"moe_experts": "prepare_weight", "prepare_weight": "moe_experts"}

_FAMILIES = {
    "attention": attention,
    "cache": cache,
    "compress": compress,
    "engram": engram,
    "hyper": hyper,
    "index": index,
    "linear": linear,
    "moe": moe,
    "norm": norm,
    "sample": sample,
    "speculate": speculate,
}


def _implementations() -> dict[str, tuple[Implementation, ...]]:
    table: dict[str, list[Implementation]] = {}
    for spec in OPS.values():
        fn = getattr(_FAMILIES[spec.family], spec.name)
        exact = spec.name in invariant.AS_THEY_ARE
        table[spec.name] = [Implementation(spec.name, "reference", _EVERYWHERE, _ALL, fn, batch_invariant=exact)]
    # bf16 grouped products: the only faster route that needs nothing but torch
    table["moe_experts"].insert(
        0, Implementation("moe_experts", "torch", _EVERYWHERE, frozenset({"fast"}), moe.moe_experts_grouped)
    )
    for name, fn in parts.OPERATIONS.items():
        whole = Implementation(name, "parts", _EVERYWHERE, _ALL, fn, batch_invariant=True, composed=True)
        table[name].insert(0, whole)
    for family in COMPILED.values():  # first: the fastest where it is built
        for name, fn in family.operations.items():
            missing, partner = family.binary.missing, _COMPILED_PARTNERS.get(name)
            compiled = Implementation(
                name, "cpu", frozenset({"cpu"}), frozenset({"fast"}), fn, missing, True, partner=partner
            )
            table[name].insert(0, compiled)
    for module, names in triton.FAMILIES.items():  # one source for both, where it was built
        for name in names:
            table[name][:0] = _triton(module, name)
    for module, names in tilelang.FAMILIES.items():
        for name in names:
            first = tilelang.FASTER.get(name, frozenset())
            table[name][:0] = _tilelang(module, name, first)
            after = 1 + max(i for i, row in enumerate(table[name]) if row.backend in ("triton", "tilelang"))
            table[name][after:after] = _tilelang(module, name, _GPUS - first)
    for name, fn in invariant.OPERATIONS.items():  # last: slower, so taken only where invariance is asked for
        numerics = frozenset({"float", "fast"})
        table[name].append(Implementation(name, "tiled", _EVERYWHERE, numerics, fn, batch_invariant=True))
    for name in ascend.OPERATIONS:  # listed, and refused with what is known
        reference = getattr(_FAMILIES[OPS[name].family], name)
        fn, missing = ascend.operation(name, reference), functools.partial(ascend.missing, name)
        platforms, numerics = frozenset({"ascend950"}), frozenset({"fast"})
        table[name].append(Implementation(name, "ascend", platforms, numerics, fn, missing, auto=False))
    for adapter in vendor.ADAPTERS:  # by name only
        table[adapter.op].append(_vendor(adapter))
    return {name: tuple(rows) for name, rows in table.items()}


def _triton(module: str, name: str) -> list[Implementation]:
    """The Triton form of an operation, and behind it the one whose tiles do not follow the batch."""
    reference = getattr(_FAMILIES[OPS[name].family], name)
    forms = {name: name not in triton.BATCH_DEPENDENT}
    if triton.BATCH_DEPENDENT.get(name):
        forms[f"{name}_invariant"] = True
    return [
        Implementation(
            name,
            "triton",
            _GPUS,
            frozenset({"fast"}),
            triton.operation(module, form, reference),
            triton.missing,
            safe,
            bound=triton.reading,
            tolerance=triton.TOLERANCES.get(name),
            lacks=functools.partial(triton.lacks, name, form != name),
        )
        for form, safe in forms.items()
    ]


def _vendor(adapter: vendor.Adapter) -> Implementation:
    """A vendor library's form of an operation."""
    reference = getattr(_FAMILIES[OPS[adapter.op].family], adapter.op)
    return Implementation(
        adapter.op,
        adapter.library,
        adapter.platforms,
        adapter.numerics,
        adapter.operation(reference),
        adapter.missing,
        adapter.batch_invariant,
        auto=False,
        tolerance=adapter.tolerance,
        copies=adapter.copies,
    )


def _tilelang(module: str, name: str, platforms: frozenset[str]) -> list[Implementation]:
    """The TileLang forms of an operation on some platforms, as for Triton."""
    if not platforms:
        return []
    reference = getattr(_FAMILIES[OPS[name].family], name)
    forms = {name: name not in tilelang.BATCH_DEPENDENT}
    if tilelang.BATCH_DEPENDENT.get(name):
        forms[f"{name}_invariant"] = True
    missing = functools.partial(tilelang.missing, module)
    made = {form: triton.operation(module, form, reference, "deepinfer_kernels.tilelang") for form in forms}
    return [
        Implementation(
            name,
            "tilelang",
            platforms,
            frozenset({"fast"}),
            made[form],
            missing,
            safe,
            bound=tilelang.reading,
            lacks=functools.partial(tilelang.lacks, module, name, form != name),
        )
        for form, safe in forms.items()
    ]


IMPLEMENTATIONS = _implementations()


class KernelError(Exception):
    """No implementation can serve an operation as asked. ``reasons`` holds one sentence per candidate."""

    def __init__(self, op: str, reasons: tuple[str, ...]):
        super().__init__(f"{op}: " + "; ".join(reasons))
        self.op = op
        self.reasons = reasons


class Ops:
    """The flat namespace of operations: ``ops.rms_norm(x, weight, eps)`` and so on, numerics already bound.

    ``cache``: the folder of compiled kernels; None: implementations look where they would by themselves.
    """

    def __init__(
        self, numerics: Numerics, platform: str, chosen: Mapping[str, Implementation], cache: Path | None = None
    ):
        self.numerics = numerics
        self.platform = platform
        self.chosen = dict(chosen)
        #: operation → the backend that goes first and why it does not serve here, where torch computes it instead
        self.fallbacks: dict[str, tuple[str, str]] = {}
        for name, implementation in chosen.items():
            fn = implementation.fn
            if cache is not None and implementation.bound is not None:
                fn = implementation.bound(fn, cache)
            setattr(self, name, functools.partial(fn, self if implementation.composed else numerics))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        raise AttributeError(f"no operation named {name!r}; known: {', '.join(sorted(OPS))}")


def resolve(
    mode: str,
    platform: str,
    backends: Mapping[str, str] | None = None,
    *,
    backend: str = "auto",
    batch_invariant: bool = False,
    cache: Path | None = None,
    shapes: Shapes | None = None,
) -> Ops:
    """Choose an implementation of every operation for one numerics mode and platform.

    ``backend`` other than auto is forced on every operation that has one of that name, ``backends`` (op → backend)
    wins over it and auto there lifts it. A name for a part of a fused operation takes that apart, unless it has a name
    of its own; so does a backend that is forced on everything and has such a part, not the whole. The partner of an
    operation that is named follows it. ``batch_invariant`` admits only implementations that are. ``cache`` is the
    folder of compiled kernels; with the ``shapes`` of a model only those are admitted that have all their kernels of
    these sizes there, so that none is compiled while serving. Raises ``KernelError`` naming the reasons; ``KeyError``
    for an unknown op.
    """
    named = dict(backends or {})
    unknown = set(named) - set(OPS)
    if unknown:
        raise KeyError(f"unknown operations {sorted(unknown)}; known: {', '.join(sorted(OPS))}")
    chosen: dict[str, Implementation] = {}
    fallbacks: dict[str, tuple[str, str]] = {}
    for name in sorted(OPS, key=lambda op: op not in named):  # partners follow what is named
        wanted = named.get(name)
        if wanted is None and _taken_apart(name, named, backend):
            wanted = "parts"
        candidates = _candidates(name, wanted, backend)
        if wanted is None and all(_apart(i, chosen) for i in candidates):
            candidates = _candidates(name, "auto", backend)
        reasons = []
        for implementation in candidates:
            reason = why_not(
                implementation, mode, platform, batch_invariant=batch_invariant, cache=cache, shapes=shapes
            )
            reason = reason or _apart(implementation, chosen)
            if reason is None:
                chosen[name] = implementation
                break
            if implementation.backend not in _TORCH and _fits(implementation, mode, platform, batch_invariant) is None:
                fallbacks.setdefault(name, (implementation.backend, reason))
            reasons.append(f"{implementation.backend}: {reason}")
        else:
            raise KernelError(name, tuple(reasons))
    ops = Ops(NUMERICS[mode], platform, {name: chosen[name] for name in OPS}, cache or default_cache())
    ops.fallbacks = {name: fallbacks[name] for name in OPS if name in fallbacks and chosen[name].backend in _TORCH}
    return ops


def _taken_apart(name: str, named: Mapping[str, str], backend: str) -> bool:
    """Whether an operation that is not named is computed by its parts, because these are as asked and it is not."""
    made_of = parts.PARTS.get(name, ())
    if any(named.get(part, "auto") != "auto" for part in made_of):
        return True
    if backend == "auto" or any(i.backend == backend for i in IMPLEMENTATIONS[name]):
        return False
    return any(i.backend == backend for part in made_of for i in IMPLEMENTATIONS[part])


def _apart(implementation: Implementation, chosen: Mapping[str, Implementation]) -> str | None:
    """Why an implementation does not go with those chosen, in one sentence; None where it does."""
    for other in chosen.values():
        together = implementation.partner == other.op or other.partner == implementation.op
        if together and other.backend != implementation.backend:
            return f"goes with {other.op} of the same backend, and that is {other.backend}"
    return None


def _candidates(name: str, wanted: str | None, backend: str) -> tuple[Implementation, ...]:
    """Implementations of one operation, the preferred first: those that need no name, or of the backend named."""
    every = IMPLEMENTATIONS[name]
    free = tuple(i for i in every if i.auto)
    if wanted == "auto" or (wanted is None and backend == "auto"):
        return free
    held = tuple(i for i in every if i.backend == (wanted or backend))
    if wanted is not None and not held:
        known = ", ".join(dict.fromkeys(i.backend for i in every))
        raise KernelError(name, (f"no backend {wanted!r}, there are: {known}",))
    return held or free


def why_not(
    implementation: Implementation,
    mode: str,
    platform: str,
    *,
    batch_invariant: bool = False,
    cache: Path | None = None,
    shapes: Shapes | None = None,
) -> str | None:
    """The reason an implementation cannot serve, in one sentence; None when it can."""
    reason = _fits(implementation, mode, platform, batch_invariant) or implementation.missing(cache)
    if reason is None and shapes is not None:
        reason = implementation.lacks(shapes, platform, cache or default_cache())
    return reason


def _fits(implementation: Implementation, mode: str, platform: str, batch_invariant: bool) -> str | None:
    """Why an implementation is not for a platform and numerics, whatever is built; None where it is."""
    if batch_invariant and not implementation.batch_invariant:
        return "its result may depend on the batch"
    if platform not in implementation.platforms:
        return f"runs on {', '.join(sorted(implementation.platforms))}, not on {platform}"
    if mode not in implementation.numerics:
        return f"honours {', '.join(sorted(implementation.numerics))} numerics, not {mode}"
    return None
