"""``CountRing``: expert counts gathered on the device step by step and brought to the host in chunks.

Adding a step is one copy on the device. A full chunk is copied to pinned memory without waiting; ``take`` hands out
the chunks that have arrived. So no step waits for counts, and a reader that must have all of them says so.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.eplb.record import CountChunk

#: steps per chunk: 64 are 7.9 MB at 40 layers x 384 experts; on a CPU nothing has to be waited for
DEVICE_CHUNK = 64
HOST_CHUNK = 8


@dataclass
class _Sent:
    """A chunk on its way: host tensor, tokens and epoch of its steps, and the event after the copy (None on CPU)."""

    counts: Tensor
    tokens: list[int]
    epochs: list[int]
    ready: Any


class CountRing:
    """Counts [L, E] of steps in launch order. ``add`` and ``flush`` run on the lane, ``take`` anywhere."""

    def __init__(self, layers: int, experts: int, device: str):
        self._cuda = device.startswith("cuda")
        self._size = DEVICE_CHUNK if self._cuda else HOST_CHUNK
        self._buffer = torch.zeros((self._size, layers, experts), dtype=torch.int64, device=device)
        self._tokens: list[int] = []
        self._epochs: list[int] = []
        self._sent: deque[_Sent] = deque()

    def add(self, load_LE: Tensor, tokens: int, epoch: int) -> None:
        """One step: counts int64 [L, E] on the device, its tokens, and the epoch of the slots it ran with."""
        self._buffer[len(self._tokens)].copy_(load_LE)
        self._tokens.append(tokens)
        self._epochs.append(epoch)
        if len(self._tokens) == self._size:
            self.flush()

    def flush(self) -> None:
        """Send what is there, although the chunk is not full."""
        steps = len(self._tokens)
        if not steps:
            return
        part, ready = self._buffer[:steps], None
        if self._cuda:
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=True).copy_(part, non_blocking=True)
            ready = torch.cuda.Event()
            ready.record()
        else:
            host = part.clone()
        self._sent.append(_Sent(host, self._tokens, self._epochs, ready))
        self._tokens, self._epochs = [], []

    def take(self, *, wait: bool = False) -> list[CountChunk]:
        """Chunks that have arrived, in order; with ``wait`` all that were sent."""
        out = []
        while self._sent:
            head = self._sent[0]
            if head.ready is not None:
                if wait:
                    head.ready.synchronize()
                elif not head.ready.query():
                    break
            self._sent.popleft()
            tokens, epochs = np.array(head.tokens, np.int64), np.array(head.epochs, np.int64)
            out.append(CountChunk(head.counts.numpy(), tokens, epochs))
        return out
