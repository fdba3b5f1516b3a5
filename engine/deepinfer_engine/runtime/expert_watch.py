"""``ExpertWatch``: what the experts of a running engine had to do, from the device to a statistics file.

``add`` runs on the lane after a step's forward pass; everything else belongs to the thread that drives the engine.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from deepinfer_engine import __version__
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.eplb.record import Balance, BalanceMeter, LoadRecord
from deepinfer_engine.eplb.stats import ExpertStats
from deepinfer_engine.errors import UsageError
from deepinfer_engine.runtime.expert_counts import DEVICE_CHUNK, CountRing

#: most bytes of counts that a recording holds, as they stand in its file: 8,738 steps at 40 layers x 384 experts
RECORD_BYTES = 1 << 30

#: steps kept beyond a planning window: what runs on while the counts up to the trigger are on their way
WINDOW_SLACK = 4 * DEVICE_CHUNK


def recordable_steps(config: ModelConfig) -> int:
    """Newest steps that a recording keeps."""
    return max(1, RECORD_BYTES // (config.num_hidden_layers * config.n_routed_experts * 8))


class ExpertWatch:
    """Counts of every step: gathered on the device, the newest ``keep`` steps and the balance of all on the host.

    ``slot_LRS`` are the slots of the newest step launched. ``recording``: somebody wants the kept steps as a file.
    """

    def __init__(self, config: ModelConfig, slot_LRS: np.ndarray, *, keep: int, device: str, recording: bool = False):
        self.config = config
        self.recording = recording
        self.slot_LRS = slot_LRS
        self.meter = BalanceMeter(slot_LRS, config.n_routed_experts)
        self.record = LoadRecord(keep, [self.meter])
        self._ring = CountRing(config.num_hidden_layers, config.n_routed_experts, device)

    def add(self, load_LE: Tensor, tokens: int, epoch: int) -> None:
        """One step's counts, in launch order, without waiting; ``epoch``: of the slots it ran with."""
        self._ring.add(load_LE, tokens, epoch)

    def flush(self) -> None:
        """Send the counts that have not filled a chunk; on the lane."""
        self._ring.flush()

    def take(self, *, wait: bool = False) -> None:
        """Add what has arrived (with ``wait``: all that was sent) to the record."""
        for chunk in self._ring.take(wait=wait):
            self.record.add(chunk)

    def balance(self) -> Balance:
        return self.meter.balance()

    def stats(self, weights_digest: str) -> ExpertStats:
        """The kept steps as statistics for ``eplb-plan``. Raises UsageError when no step ran."""
        if not self.record.kept:
            raise UsageError("no step has run, so there are no expert counts to record")
        counts, tokens = self.record.newest(recordable_steps(self.config))
        return ExpertStats(
            counts,
            tuple(range(self.config.num_hidden_layers)),
            tokens,
            tuple(plan.mode for plan in self.config.layer_plan),
            self.config.num_experts_per_tok,
            self.slot_LRS.shape[1],
            self.config.digest,
            weights_digest,
            __version__,
        )
