"""``LoadRecord``: expert counts of a running engine on the host: the newest steps, and the balance of all of them.

What counts: every token that a step routes in a layer, once per expert it chose. A prompt token that is computed again
(after a preemption, or replayed behind a prefix hit) is routed again and counts again, because ranks carry it again;
rows that stop at the encoder half do not count in the decoder half. Rows that only pad a step never count.

Balance (``BalanceMeter``). Every expert's tokens are split evenly over its replicas under the slots of the step they
ran in; loads are exact integers in units of 1 ÷ lcm(1..16) token. Per layer and over the steps with tokens

    moe_lb       Σ_steps max_rank ÷ Σ_steps mean_rank
    moe_lb_step  mean over steps of max_rank ÷ mean_rank

both averaged over the layers that had tokens: the numbers that ``deepinfer eplb-plan`` predicts from the same counts.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.eplb.placement import LCM


@dataclass(frozen=True)
class CountChunk:
    """Consecutive steps: counts int64 [m, L, E], tokens int64 [m], and under which slots (``epoch``) each step ran."""

    counts_MLE: np.ndarray
    tokens_M: np.ndarray
    epoch_M: np.ndarray


@dataclass(frozen=True)
class Balance:
    """Balance of a span of steps. ``moe_lb`` and ``moe_lb_step`` are None when no step had a token.

    ``load_LR`` [L, R] is the load of each rank over its equal share, so 1.0 everywhere is perfect; a layer without
    tokens has zeros. ``moe_lb_L`` is the balance by layer, 0 for a layer without tokens.
    """

    steps: int
    tokens: int
    moe_lb: float | None
    moe_lb_step: float | None
    load_LR: np.ndarray
    moe_lb_L: np.ndarray


def split_units(slot_LRS: np.ndarray, experts: int) -> np.ndarray:
    """Units of LCM that one token of expert e puts on rank r: int64 [L, E, R]; -1 slots (dead ranks) hold nothing."""
    layers, ranks, _ = slot_LRS.shape
    unit_LER = np.zeros((layers, experts, ranks), np.int64)
    layer, rank, slot = np.nonzero(slot_LRS >= 0)
    np.add.at(unit_LER, (layer, slot_LRS[layer, rank, slot], rank), 1)
    copies_LE = unit_LER.sum(axis=2)
    return unit_LER * (LCM // np.maximum(copies_LE, 1))[:, :, None]


class BalanceMeter:
    """Adds up the balance of steps under the slots they ran with; all sums are exact."""

    def __init__(self, slot_LRS: np.ndarray, experts: int):
        self._layers, self._ranks, self._experts = slot_LRS.shape[0], slot_LRS.shape[1], experts
        self._live = int((slot_LRS[0] >= 0).any(axis=1).sum())
        self._slots: dict[int, np.ndarray] = {0: slot_LRS}
        self._units: dict[int, np.ndarray] = {}
        self.restart()

    def use(self, epoch: int, slot_LRS: np.ndarray) -> None:
        """Steps of ``epoch`` run with these slots. Epochs come in order."""
        self._slots[epoch] = slot_LRS

    def restart(self, epoch: int = 0) -> None:
        """Start a new span, of the steps from ``epoch`` on."""
        self._from = epoch
        self._steps = self._tokens = 0
        self._peak_L = np.zeros(self._layers, np.int64)
        self._load_LR = np.zeros((self._layers, self._ranks), np.int64)
        self._ratio_L = np.zeros(self._layers)
        self._busy_L = np.zeros(self._layers, np.int64)

    def add(self, chunk: CountChunk) -> None:
        for epoch in np.unique(chunk.epoch_M).tolist():
            if epoch < self._from:
                continue
            here = chunk.epoch_M == epoch
            counts_MLE = chunk.counts_MLE[here]
            self._steps += len(counts_MLE)
            self._tokens += int(chunk.tokens_M[here].sum())
            units_LER = self._split(epoch)
            # exact: a step would need 2^53 / LCM = 1.2e10 choices per layer before a float64 sum rounds
            load_LMR = np.matmul(counts_MLE.transpose(1, 0, 2).astype(np.float64), units_LER)
            peak_LM, sum_LM = load_LMR.max(axis=2), load_LMR.sum(axis=2)
            busy_LM = sum_LM > 0
            self._peak_L += peak_LM.astype(np.int64).sum(axis=1)
            self._load_LR += load_LMR.astype(np.int64).sum(axis=1)
            ratio_LM = np.divide(peak_LM * self._live, sum_LM, out=np.zeros_like(peak_LM), where=busy_LM)
            self._ratio_L += ratio_LM.sum(axis=1)
            self._busy_L += busy_LM.sum(axis=1)

    def _split(self, epoch: int) -> np.ndarray:
        """Units of an epoch, float64 [L, E, R]; those of epochs before it are done with."""
        if epoch not in self._units:
            self._units = {epoch: split_units(self._slots[epoch], self._experts).astype(np.float64)}
            self._slots = {k: v for k, v in self._slots.items() if k >= epoch}
        return self._units[epoch]

    def balance(self) -> Balance:
        total_L = self._load_LR.sum(axis=1)
        known = total_L > 0
        share_LR = np.divide(
            self._load_LR * self._live,
            total_L[:, None],
            out=np.zeros(self._load_LR.shape),
            where=total_L[:, None] > 0,
        )
        lb_L = np.where(known, self._peak_L * self._live / np.maximum(total_L, 1), 0.0)
        if not known.any():
            return Balance(self._steps, self._tokens, None, None, share_LR, lb_L)
        step = float(np.mean(self._ratio_L[known] / self._busy_L[known]))
        return Balance(self._steps, self._tokens, float(lb_L[known].mean()), step, share_LR, lb_L)


class LoadRecord:
    """The newest ``keep`` steps (all when None) and meters that see every step once."""

    def __init__(self, keep: int | None, meters: Sequence[BalanceMeter] = ()):
        self.keep = keep
        self.meters = list(meters)
        self.steps = 0
        self._chunks: deque[CountChunk] = deque()
        self._held = 0

    def add(self, chunk: CountChunk) -> None:
        """Take over a chunk; drops chunks that lie wholly before the newest ``keep`` steps."""
        for meter in self.meters:
            meter.add(chunk)
        size = len(chunk.tokens_M)
        self.steps += size
        if self.keep == 0:
            return
        # a step routes far fewer than 2^31 tokens; half the memory of what arrives and of what is written
        self._chunks.append(CountChunk(chunk.counts_MLE.astype(np.int32), chunk.tokens_M, chunk.epoch_M))
        self._held += size
        while self.keep is not None and self._held - len(self._chunks[0].tokens_M) >= self.keep:
            self._held -= len(self._chunks.popleft().tokens_M)

    def newest(self, steps: int | None = None) -> tuple[np.ndarray, np.ndarray]:
        """(counts int64 [m, L, E], tokens int64 [m]) of the newest ``steps`` kept steps (all kept when None), oldest
        first. Asks for at least one kept step."""
        wanted = self._held if self.keep is None else min(self._held, self.keep)
        if steps is not None:
            wanted = min(wanted, steps)
        assert wanted > 0, "no step is kept"
        taken: list[CountChunk] = []
        have = 0
        for chunk in reversed(self._chunks):
            taken.append(chunk)
            have += len(chunk.tokens_M)
            if have >= wanted:
                break
        taken.reverse()
        counts = np.concatenate([c.counts_MLE for c in taken])[-wanted:].astype(np.int64)
        return counts, np.concatenate([c.tokens_M for c in taken])[-wanted:]

    def window(self, end: int, steps: int) -> list[CountChunk]:
        """Chunks of the ``steps`` steps before step ``end`` (numbered from 0), oldest first, the outer ones cut; fewer
        where fewer are kept. Nothing is copied, so another thread may put them together."""
        out: list[CountChunk] = []
        upto = self.steps
        for chunk in reversed(self._chunks):
            first = upto - len(chunk.tokens_M)
            lo, hi = max(first, end - steps), min(upto, end)
            if lo < hi:
                part = slice(lo - first, hi - first)
                out.append(CountChunk(chunk.counts_MLE[part], chunk.tokens_M[part], chunk.epoch_M[part]))
            upto = first
        return out[::-1]

    @property
    def kept(self) -> int:
        """Steps that ``newest`` can return."""
        return self._held if self.keep is None else min(self._held, self.keep)
