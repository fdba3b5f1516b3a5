"""Names of blocks, and who holds them on the device: chained digests, reference counts, LRU. No torch.

The key of block j covers everything its KV depends on: model config, weights, record format, tenant, and all tokens up
to its end. 32-byte digests, because a collision between two tenants would hand one the other's state.

    root = H(H(namespace) ‖ tenant);  k_0 = H(root ‖ tokens of block 0);  k_j = H(k_{j−1} ‖ tokens of block j)

On the device a block is free, in use (one or more sequences), or kept (published, used by nobody). Kept blocks are
taken back in order of last use; of one sequence the last block goes first, so that what remains is still a prefix.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.pool import IdPool
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import CapacityError

#: version of the key derivation and of the payload's byte order
_SCHEME = "deepinfer-kv-1"
Key = bytes


def namespace_root(*, config: str, weights: str, numerics: str, layout: KVLayout, tenant: str = "") -> Key:
    """Start of every chain of one model, record format and tenant. ``config``, ``weights``: their digests."""
    facts = {
        "scheme": _SCHEME,
        "config": config,
        "weights": weights,
        "numerics": numerics,
        "block_tokens": BLOCK_TOKENS,
        "row_bytes": [layout.window_row_bytes, layout.global_row_bytes, layout.index_row_bytes],
        "sources": [[s.layer, s.ratio] for s in layout.sources],
    }
    namespace = hashlib.sha256(json.dumps(facts, sort_keys=True, separators=(",", ":")).encode()).digest()
    return hashlib.sha256(namespace + tenant.encode()).digest()


def extend_keys(root: Key, keys: list[Key], token_ids: Sequence[int]) -> list[Key]:
    """Append the keys of the complete blocks of ``token_ids`` that ``keys`` does not cover yet; returns ``keys``."""
    begin = len(keys) * BLOCK_TOKENS
    end = len(token_ids) // BLOCK_TOKENS * BLOCK_TOKENS
    if begin >= end:
        return keys
    words = array("I", token_ids[begin:end])
    assert words.itemsize == 4
    data = words.tobytes()
    last = keys[-1] if keys else root
    for at in range(0, len(data), 4 * BLOCK_TOKENS):
        last = hashlib.sha256(last + data[at : at + 4 * BLOCK_TOKENS]).digest()
        keys.append(last)
    return keys


def window_key(key: Key, layers: range) -> Key:
    """Key of the window KV that ends with block ``key``, over a set of layers."""
    return hashlib.sha256(b"window" + f"{layers.start}:{layers.stop}".encode() + key).digest()


@dataclass(frozen=True)
class Spilled:
    """A kept block that was taken back: its content is still there until the new owner writes it."""

    key: Key
    block: int
    replayed: bool


class DeviceBlocks:
    """Blocks of one rank. A block belongs to as many sequences as its count says; keys exist for published ones."""

    def __init__(self, pool: IdPool):
        self._pool = pool
        self._count: dict[int, int] = {}
        self._key_of: dict[int, Key] = {}
        self._block_of: dict[Key, int] = {}
        self._replayed: set[int] = set()
        self._kept: OrderedDict[int, None] = OrderedDict()

    @property
    def free(self) -> int:
        """Blocks that ``take`` can hand out: never used, and kept ones."""
        return self._pool.free + len(self._kept)

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def used(self) -> int:
        return len(self._count)

    def match(self, keys: Sequence[Key]) -> list[int]:
        """Blocks of the longest run of ``keys`` from the first on that is on the device."""
        out: list[int] = []
        for key in keys:
            block = self._block_of.get(key)
            if block is None:
                break
            out.append(block)
        return out

    def users(self, block: int) -> int:
        """Sequences that use the block."""
        return self._count.get(block, 0)

    def find(self, key: Key) -> int | None:
        """The block published under ``key``."""
        return self._block_of.get(key)

    def is_replayed(self, block: int) -> bool:
        """Whether the block was computed after an encoder replay."""
        return block in self._replayed

    def share(self, blocks: Sequence[int]) -> None:
        """One more user for published blocks."""
        for block in blocks:
            assert block in self._key_of, f"block {block} is not published"
            self._kept.pop(block, None)
            self._count[block] = self._count.get(block, 0) + 1

    def take(self, count: int) -> tuple[list[int], list[Spilled]]:
        """``count`` private blocks, and the kept ones among them whose content their key's lower tier may want.

        Raises ``CapacityError`` (and takes nothing) when fewer are free or kept.
        """
        if count > self.free:
            raise CapacityError(
                f"{count} blocks needed, {self._pool.free} of {self._pool.total} free and {len(self._kept)} kept",
                hint="raise cache.hbm_tokens_per_rank",
            )
        spilled: list[Spilled] = []
        while self._pool.free < count:
            block, _ = self._kept.popitem(last=False)
            spilled.append(Spilled(self._forget(block), block, block in self._replayed))
            self._replayed.discard(block)
            self._pool.give([block])
        blocks = self._pool.take(count)
        for block in blocks:
            self._count[block] = 1
        return blocks, spilled

    def publish(self, block: int, key: Key, *, replayed: bool = False) -> bool:
        """Name a complete block that a sequence owns; False when another block has that name already (it stays)."""
        assert self._count.get(block, 0) > 0, f"block {block} is in nobody's use"
        if key in self._block_of or block in self._key_of:
            return False
        self._block_of[key] = block
        self._key_of[block] = key
        if replayed:
            self._replayed.add(block)
        return True

    def release(self, blocks: Sequence[int]) -> None:
        """One user less for each block of a sequence, given in its order; published ones are kept."""
        for block in reversed(blocks):
            self._count[block] -= 1
            if self._count[block]:
                continue
            del self._count[block]
            if block in self._key_of:
                self._kept[block] = None
            else:
                self._pool.give([block])

    def drop(self, key: Key) -> None:
        """Forget a name (its content proved wrong); a kept block becomes free, a used one stays its users'."""
        block = self._block_of.get(key)
        if block is None:
            return
        self._forget(block)
        self._replayed.discard(block)
        if block in self._kept:
            del self._kept[block]
            self._pool.give([block])

    def distrust(self, blocks: Iterable[int]) -> None:
        """Forget the names of ``blocks``, and everything that is kept: it may have been computed with them."""
        for key in [self._key_of[b] for b in (*blocks, *self._kept) if b in self._key_of]:
            self.drop(key)

    def _forget(self, block: int) -> Key:
        key = self._key_of.pop(block)
        del self._block_of[key]
        return key

    def check(self) -> None:
        """Assert the invariants: every block is free, used or kept, and names are one to one."""
        self._pool.check()
        assert self.used + self.kept == self._pool.used
        assert {b: k for k, b in self._block_of.items()} == self._key_of
        assert set(self._kept) <= set(self._key_of) and not set(self._kept) & set(self._count)
        assert all(n > 0 for n in self._count.values()) and self._replayed <= set(self._key_of)
