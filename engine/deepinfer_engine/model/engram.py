"""Engram hash memory: where table rows come from, and the injection into the streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.model.weights import EngramWeights
from deepinfer_engine.weights.engram_table import EngramTable


class EngramSource(Protocol):
    """Table of one Engram layer."""

    def lookup(self, ids: Tensor) -> Tensor:
        """Values [T, columns · head_dim] in the activation dtype for row ids [T, columns]."""
        ...

    def prefetch(self, ids: Tensor) -> None:
        """Start bringing these rows closer; called once per step, before the first layer runs."""
        ...


class MemoryEngramSource:
    """A table held as stored (E4M3 rows, one E8M0 scale per 32 channels) in device memory."""

    def __init__(self, weight: Tensor, scale: Tensor, ops: Any):
        self.weight = weight.view(torch.uint8)
        self.scale = scale
        self.ops = ops

    def lookup(self, ids: Tensor) -> Tensor:
        return self.ops.engram_lookup(self.weight, self.scale, ids)

    def prefetch(self, ids: Tensor) -> None:
        """Nothing to do: the table is where it is read."""


class MappedEngramSource:
    """A table gathered straight from its shard: only the rows a step touches are read, nothing is held."""

    def __init__(self, table: EngramTable, ops: Any):
        self.table = table
        self.ops = ops

    def lookup(self, ids: Tensor) -> Tensor:
        weight, scale = self.table.gather(ids.flatten().cpu().numpy())
        rows = self.ops.dequantise_table(
            torch.from_numpy(weight).to(ids.device), torch.from_numpy(scale).to(ids.device)
        )
        return rows.view(ids.shape[0], -1)

    def prefetch(self, ids: Tensor) -> None:
        self.table.prefetch(ids.flatten().cpu().numpy())


@dataclass(frozen=True)
class HashTable:
    """Hash parameters of one Engram layer on the device."""

    multipliers: Tensor
    primes: Tensor
    offsets: Tensor


class EngramHasher:
    """Row ids of every Engram layer for a batch, from token ids alone (so a lookup can be prefetched)."""

    def __init__(self, config: ModelConfig, token_class: np.ndarray, device: str = "cpu"):
        self.token_class = torch.from_numpy(token_class).to(device)
        self.pad_class = int(token_class[config.engram_pad_token_id])
        self.image_token_id = config.image_token_id
        self.tables: dict[int, HashTable] = {}
        shape = (config.engram_max_ngram_size - 1, config.engram_n_heads)
        for layer, primes, multipliers in zip(
            config.engram_layer_ids, config.engram_primes, config.engram_multipliers, strict=True
        ):
            sizes = torch.tensor(primes, dtype=torch.int64)
            offsets = sizes.cumsum(0) - sizes
            self.tables[layer] = HashTable(
                torch.tensor(multipliers, dtype=torch.int64, device=device),
                sizes.view(shape).to(device),
                offsets.view(shape).to(device),
            )

    def ids(self, ops: Any, lag_ids: Tensor) -> dict[int, Tensor]:
        """layer → row ids [T, columns] for token ids at lags 0..nmax−1 [T, nmax] (−1 before the start)."""
        classes = ops.token_classes(lag_ids, self.token_class, self.image_token_id)
        return {
            layer: ops.engram_hash(classes, self.pad_class, t.multipliers, t.primes, t.offsets)
            for layer, t in self.tables.items()
        }


def inject(
    ops: Any, X: Tensor, ids: Tensor, dead: Tensor | None, source: EngramSource, weights: EngramWeights, eps: float
) -> tuple[Tensor, Tensor]:
    """Streams [T, C, H] with the looked-up memory mixed in, and the gate [T, C]."""
    projected = ops.linear(source.lookup(ids), weights.wkv)
    return ops.engram_gate(X, projected, weights.q_weight, weights.k_weight, dead, eps)
