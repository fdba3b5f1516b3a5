"""The five inner loops of the planner behind one interface, in numpy or compiled; both return the same bits.

``NumpyLoops`` is the definition. ``native.NativeLoops`` runs ``loops.cpp``; which one is used is the caller's choice
and is reported with the plan.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from deepinfer_engine.eplb import moments, placement, score, search
from deepinfer_engine.eplb.moments import LayerMoments
from deepinfer_engine.eplb.search import SearchRules


class Loops(Protocol):
    """What a planner needs computed per layer; shapes as in the numpy functions of the same names."""

    name: str

    def moments(self, counts_ME: np.ndarray, ahead: bool = True) -> LayerMoments: ...

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

    def peak_sum(self, counts_ME: np.ndarray, slot_RS: np.ndarray, copies_E: np.ndarray) -> int: ...


class NumpyLoops:
    """The reference loops."""

    name = "numpy"

    moments = staticmethod(moments.layer_moments)
    replica_counts = staticmethod(placement.replica_counts)
    longest_first = staticmethod(placement.longest_first)
    swap_search = staticmethod(search.swap_search)
    peak_sum = staticmethod(score.peak_sum)
