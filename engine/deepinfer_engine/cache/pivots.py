"""When window KV is copied out of the rings of a decoding sequence. No torch.

A pivot is a multiple of the block: the window before it is what a later prompt with the same prefix loads. The ring
holds W + γ + 1 rows and a verify step overwrites up to γ + 1 of them, so the copy of pivot p is due in the step that
commits position p − 1, before the next step writes.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.config.model import BLOCK_TOKENS


def due_pivot(before: int, after: int) -> int | None:
    """The pivot that committing tokens [before, after) reaches; None when it reaches none.

    A prefill chunk may pass several: only the last is still in the ring.
    """
    pivot = after // BLOCK_TOKENS * BLOCK_TOKENS
    return pivot if pivot > before and pivot > 0 else None


def in_ring(pivot: int, written: int, *, window: int, ring: int) -> bool:
    """Whether positions [pivot − W, pivot) survive in a ring in which positions below ``written`` were written."""
    return pivot <= written <= max(0, pivot - window) + ring


@dataclass
class Replica:
    """Two buffers of one sequence's latest pivots; the sequence number of a buffer is set when its copy is done.

    A reader that finds a buffer without its number takes the other one: a torn copy is never flushed.
    """

    pivots: tuple[int, int] = (0, 0)
    numbers: tuple[int, int] = (0, 0)
    issued: int = 0

    def begin(self, pivot: int) -> int:
        """Buffer for the copy of ``pivot``; it counts as empty until ``finish``."""
        self.issued += 1
        at = self.issued % 2
        assert pivot > max(self.pivots), "pivots only grow"
        self.pivots = (pivot, self.pivots[1]) if at == 0 else (self.pivots[0], pivot)
        self.numbers = (0, self.numbers[1]) if at == 0 else (self.numbers[0], 0)
        return at

    def finish(self, at: int) -> None:
        """The copy into buffer ``at`` is complete."""
        self.numbers = (self.issued, self.numbers[1]) if at == 0 else (self.numbers[0], self.issued)

    def newest(self) -> tuple[int, int] | None:
        """(buffer, pivot) of the newest complete copy; None when there is none."""
        at = 0 if self.numbers[0] > self.numbers[1] else 1
        return (at, self.pivots[at]) if self.numbers[at] else None
