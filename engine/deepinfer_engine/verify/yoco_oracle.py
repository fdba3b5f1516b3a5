"""What a replay must be, said once more: scalar loops over the definitions, independent of the planner it judges."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """One prompt: its length, cached tokens, ends of loadable window KV, and the two replay settings."""

    length: int
    hit: int
    ends: frozenset[int]
    decoder: str
    encoder: str

    def __str__(self) -> str:
        ends = ",".join(str(e) for e in sorted(self.ends)) or "none"
        return f"L {self.length}, hit {self.hit}, windows {ends}, decoder {self.decoder}, encoder {self.encoder}"


@dataclass(frozen=True)
class Expected:
    """Cap, L1, first row, decoder pivot and mode of a case, and the lowest visible positions."""

    cap: int
    reused: int
    start: int
    pivot: int
    mode: str
    low_encoder: int
    low_decoder: int


@dataclass(frozen=True)
class Sizes:
    """Integers of a model that replay depends on."""

    window: int
    drafts: int
    layers: int
    cut: int
    block: int

    @property
    def slack(self) -> int:
        return self.drafts + 1


def decoder_rows(sizes: Sizes, decoder: str) -> int:
    """Rows above the cut that a long prompt needs: its last window, widened layer by layer when exact."""
    rows = sizes.window
    if decoder == "exact":
        for _ in range(sizes.cut + 1, sizes.layers):
            rows += sizes.window - 1
    return rows


def expect(sizes: Sizes, case: Case) -> Expected:
    """The plan of a case by trial: the largest cap that leaves the decoder rows and the rollback rows."""
    needed = decoder_rows(sizes, case.decoder) + sizes.slack
    cap = 0
    while case.length - (cap + sizes.block) >= needed:
        cap += sizes.block
    reused = case.hit if case.hit < cap else cap
    if reused == 0:
        mode, start = "cold", 0
    elif reused in case.ends:
        mode, start = "exact", reused
    elif case.encoder == "bounded" and reused > sizes.window:
        mode, start = "replay", reused - sizes.window
    else:
        mode, start, reused = "cold", 0, 0
    low = start if mode == "replay" else 0
    if case.decoder == "off":
        return Expected(cap, reused, start, start, mode, low, low)
    pivot = max(0, case.length - decoder_rows(sizes, case.decoder))
    return Expected(cap, reused, start, pivot, mode, low, pivot)


def pivots(block: int, start: int, end: int) -> list[int]:
    """Multiples of the block that committed lengths from ``start`` to ``end`` reach."""
    return [p for p in range(1, end + 1) if p % block == 0 and p > start]
