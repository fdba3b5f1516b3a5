"""``KVLayout``: which rows a sequence owns, their record sizes, and how positions map to rows. No torch.

Two address spaces, both position-addressed, so a rolled-back verify step needs no undo:

* ring slots: every layer keeps the last ``ring`` window rows of a sequence; position p lives at slot·ring + p mod ring.
  Ratio-2 sources keep the pending (value, gate) pairs of the last ``pair_ring`` positions the same way.
* blocks: 128 tokens of global KV and index keys; entry j = p // ratio of a sequence lives in its block p // 128.

Slot 0 and block 0 are reserved: rows that must not be kept (PAD) are written there and never read.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig

#: a block or ring slot that is not to be written
PAD = -1


@dataclass(frozen=True)
class SourceLayout:
    """One kv source layer: its ratio and entries per 128-token block."""

    layer: int
    ratio: int

    @property
    def entries_per_block(self) -> int:
        return BLOCK_TOKENS // self.ratio


@dataclass(frozen=True)
class KVLayout:
    """Sizes in bytes of every stream; ``records`` False means f32 rows (numerics ``float``)."""

    records: bool
    window_layers: int
    window: int
    ring: int
    pair_ring: int
    head_dim: int
    index_head_dim: int
    sources: tuple[SourceLayout, ...]

    @classmethod
    def of(cls, config: ModelConfig, *, records: bool, draft: bool = False) -> KVLayout:
        """Layout of a model; ``draft`` adds the windows of the draft blocks after those of the backbone."""
        return cls(
            records=records,
            window_layers=config.num_hidden_layers + (config.num_nextn_predict_layers if draft else 0),
            window=config.sliding_window,
            ring=config.ring,
            pair_ring=config.pair_ring,
            head_dim=config.head_dim,
            index_head_dim=config.index_head_dim,
            sources=tuple(SourceLayout(s, config.compress_ratios[s]) for s in config.kv_source_layer_ids),
        )

    @property
    def window_row_bytes(self) -> int:
        """528 at D = 512: 512 E4M3 values, 16 scales."""
        return self.head_dim + self.head_dim // 32 if self.records else 4 * self.head_dim

    @property
    def global_row_bytes(self) -> int:
        """288 at D = 512: 256 bytes of packed E2M1, 32 E4M3 scales."""
        return self.head_dim // 2 + self.head_dim // 16 if self.records else 4 * self.head_dim

    @property
    def index_row_bytes(self) -> int:
        """68 at Di = 128: 64 bytes of packed E2M1, 4 scales."""
        return self.index_head_dim // 2 + self.index_head_dim // 32 if self.records else 4 * self.index_head_dim

    @property
    def block_bytes(self) -> int:
        """Global rows and index keys of one block over all sources (113,920 for the release)."""
        per_entry = self.global_row_bytes + self.index_row_bytes
        return sum(s.entries_per_block for s in self.sources) * per_entry

    @property
    def slot_bytes(self) -> int:
        """Windows and pending pairs of one sequence."""
        pairs = sum(s.ratio == 2 for s in self.sources) * self.pair_ring * 8 * self.head_dim
        return self.window_layers * self.ring * self.window_row_bytes + pairs

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the global KV of ``tokens`` positions."""
        return -(-tokens // BLOCK_TOKENS)
