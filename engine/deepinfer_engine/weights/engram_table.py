"""An Engram table gathered straight from its shard: rows by id, nothing copied but the rows asked for. No torch here.

A row is 256 E4M3 values and 8 scales (264 bytes in the release), so a token costs 24 rows of each table; the page
cache keeps the hot ones. ``prefetch`` starts the disk early, from ids that are known before the layer runs.
"""

from __future__ import annotations

import mmap

import numpy as np

from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.weights.checkpoint import Checkpoint


class EngramTable:
    """The table of one Engram layer, mapped. ``rows`` is the number of rows, ``width`` the channels of one."""

    def __init__(self, checkpoint: Checkpoint, layer: int):
        self._checkpoint = checkpoint
        self._names = (f"layers.{layer}.engram.embed.weight", f"layers.{layer}.engram.embed.scale")
        self.rows, self.width = checkpoint.plan[self._names[0]].shape
        parts = []
        for name in self._names:
            shape = checkpoint.plan[name].shape
            parts.append(np.frombuffer(checkpoint.raw(name), dtype=np.uint8).reshape(shape))
            # without this every miss reads 128 KiB ahead for a row of 264 bytes
            checkpoint.advise(name, mmap.MADV_RANDOM)
        self._weight, self._scale = parts

    def gather(self, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(E4M3 bytes [..., width], E8M0 bytes [..., width / 32]) of int64 row ``ids`` [...]; new arrays.

        Raises ``ArtefactError`` when a scale is not a number.
        """
        assert ids.size == 0 or (ids.min() >= 0 and ids.max() < self.rows), "row ids outside the table"
        scale = self._scale[ids]
        if bool((scale == 255).any()):
            row = int(ids.reshape(-1)[(scale == 255).any(-1).reshape(-1)][0])
            raise ArtefactError(f"tensor {self._names[1]}: scale byte 255 in row {row} is not a number")
        return self._weight[ids], scale

    def prefetch(self, ids: np.ndarray) -> int:
        """Ask the kernel to read the pages of these rows in the background; returns the number of page ranges."""
        requests = 0
        for name in self._names:
            where = self._checkpoint.stored(name)
            row_bytes = where.shape[1]
            begin = where.begin + np.unique(ids.reshape(-1)) * row_bytes
            pages = np.unique(np.concatenate([begin, begin + row_bytes - 1]) // mmap.PAGESIZE)
            for run in np.split(pages, np.flatnonzero(np.diff(pages) > 1) + 1):
                if run.size:
                    self._checkpoint.advise_bytes(
                        name, int(run[0]) * mmap.PAGESIZE, int(run.size) * mmap.PAGESIZE, mmap.MADV_WILLNEED
                    )
                    requests += 1
        return requests
