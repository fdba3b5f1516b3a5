"""The inner loops of the planner behind one interface, in numpy or compiled; both return the same bits.

``NumpyLoops`` is the definition. ``native.NativeLoops`` runs ``loops.cpp``; which one is used is the caller's choice
and is reported with the plan.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from deepinfer_engine.eplb import moments, placement, score, search
from deepinfer_engine.eplb.moments import LayerMoments
from deepinfer_engine.eplb.search import SearchRules


class Window(Protocol):
    """One layer's counts in the form the loops read them; what is computed from every step of it. ``tokens``: their
    sum."""

    tokens: float

    def moments(self, ahead: bool = True) -> LayerMoments: ...

    def peak_sum(self, slot_RS: np.ndarray, copies_E: np.ndarray) -> int: ...


class Loops(Protocol):
    """What a planner needs computed per layer; shapes as in the numpy functions of the same names."""

    name: str

    def window(self, counts_ME: np.ndarray, spare: Window | None = None) -> Window:
        """The counts [M, E] of one layer; ``spare`` is a window that is not used any more: its memory may be taken."""
        ...

    def replica_counts(self, weight_E: np.ndarray, ranks: int, slots: int) -> np.ndarray: ...

    def longest_first(self, weight_E: np.ndarray, copies_E: np.ndarray, ranks: int) -> np.ndarray: ...

    def swap_search(
        self,
        slot_RS: np.ndarray,
        mean_E: np.ndarray,
        cov_EE: np.ndarray,
        copies_E: np.ndarray,
        rules: SearchRules,
        held_RE: np.ndarray | None = None,
    ) -> tuple[np.ndarray, int]: ...


class NumpyWindow:
    """Counts [M, E] as they are."""

    def __init__(self, counts_ME: np.ndarray):
        self.counts_ME = counts_ME
        self.tokens = float(counts_ME.sum(dtype=np.float64))

    def moments(self, ahead: bool = True) -> LayerMoments:
        return moments.layer_moments(self.counts_ME, ahead)

    def peak_sum(self, slot_RS: np.ndarray, copies_E: np.ndarray) -> int:
        return score.peak_sum(self.counts_ME, slot_RS, copies_E)


class NumpyLoops:
    """The reference loops."""

    name = "numpy"

    @staticmethod
    def window(counts_ME: np.ndarray, spare: Window | None = None) -> Window:
        return NumpyWindow(counts_ME)

    replica_counts = staticmethod(placement.replica_counts)
    longest_first = staticmethod(placement.longest_first)
    swap_search = staticmethod(search.swap_search)
