"""``Share``: which part of the mesh one process hosts. No torch here.

The mesh has ``ep`` ranks and ``dp`` attention ranks; attention rank d lives on mesh rank d · ep / dp. Process p of n
hosts the ep / n consecutive mesh ranks from p · ep / n on, and the attention ranks that live there: their rows, their
KV. Sizes and numbers of rows and blocks in the scheduler's plans count over all attention ranks, so a process
subtracts those of the ranks before its own.

Worked example, ep 8, dp 4, 2 processes: attention ranks 0..3 live on mesh ranks 0, 2, 4, 6; process 1 hosts mesh ranks
4..7 and attention ranks 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.errors import UsageError


@dataclass(frozen=True)
class Share:
    """Process ``rank`` of ``size`` that run a mesh of ``ep`` ranks with ``dp`` attention ranks."""

    ep: int
    dp: int
    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if self.ep % self.size:
            raise UsageError(
                f"{self.ep} expert-parallel ranks do not divide over {self.size} processes",
                hint=f"use a number of processes that divides {self.ep}, or --set parallel.ep={self.size} "
                f"--set parallel.dp={self.size}",
            )
        assert 0 <= self.rank < self.size and self.ep % self.dp == 0

    @property
    def ranks(self) -> range:
        """Mesh ranks hosted here."""
        width = self.ep // self.size
        return range(self.rank * width, (self.rank + 1) * width)

    @property
    def dp_ranks(self) -> range:
        """Attention ranks hosted here; may be empty."""
        step, hosted = self.ep // self.dp, self.ranks
        return range(-(-hosted.start // step), -(-hosted.stop // step))

    def of(self, dp_rank: int) -> int:
        """The process that hosts an attention rank."""
        return dp_rank * (self.ep // self.dp) // (self.ep // self.size)

    def other(self, rank: int) -> Share:
        """The share of another process of the same mesh."""
        return Share(self.ep, self.dp, rank, self.size)
