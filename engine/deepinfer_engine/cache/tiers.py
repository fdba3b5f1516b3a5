"""What lies below the device: block payloads in host memory, window KV at pivots, and how a prompt's hit adds up.

Payloads are bytes as ``KVState`` exports them; nothing here reads them. Clocks are passed in as seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from deepinfer_engine.cache.prefix import DeviceBlocks, Key, window_key
from deepinfer_engine.config.model import BLOCK_TOKENS

if TYPE_CHECKING:
    from deepinfer_engine.cache.store.interface import BlockStore


@dataclass(frozen=True)
class Payload:
    """Bytes of one block or window, and whether they were computed after an encoder replay."""

    data: bytes
    replayed: bool = False


class Lower(Protocol):
    """A tier below host memory, as far as matching needs it."""

    def match(self, keys: Sequence[Key]) -> int: ...


@dataclass
class TierStats:
    """Counts since the start; ``bytes`` is what is held now."""

    bytes: int = 0
    puts: int = 0
    hits: int = 0
    misses: int = 0
    evicted: int = 0
    expired: int = 0


class HostBlocks:
    """Block payloads in host memory, least recently used first out. ``capacity`` in bytes; 0 keeps nothing."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.stats = TierStats()
        self._held: OrderedDict[Key, Payload] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    def __len__(self) -> int:
        return len(self._held)

    def put(self, key: Key, payload: Payload) -> bool:
        """Keep a payload, dropping older ones; False when it is larger than the whole tier."""
        size = len(payload.data)
        if size > self.capacity:
            return False
        self.drop(key)
        while self.stats.bytes + size > self.capacity:
            _, old = self._held.popitem(last=False)
            self.stats.bytes -= len(old.data)
            self.stats.evicted += 1
        self._held[key] = payload
        self.stats.bytes += size
        self.stats.puts += 1
        return True

    def get(self, key: Key) -> Payload | None:
        """The payload, now the most recently used one."""
        payload = self._held.get(key)
        if payload is None:
            self.stats.misses += 1
            return None
        self._held.move_to_end(key)
        self.stats.hits += 1
        return payload

    def drop(self, key: Key) -> None:
        """Forget one payload."""
        old = self._held.pop(key, None)
        if old is not None:
            self.stats.bytes -= len(old.data)


class WindowPool:
    """Window KV at pivots in host memory; an entry lives ``ttl_s`` from its last use.

    Losing an entry costs one window of replay, so there is one copy and nothing is written to disk.
    ``strict`` refuses entries of replayed lineage.
    """

    def __init__(self, capacity: int, ttl_s: float, layers: range, *, strict: bool = False):
        self.capacity = capacity
        self.ttl_s = ttl_s
        self.layers = layers
        self.strict = strict
        self.stats = TierStats()
        self._held: OrderedDict[Key, tuple[float, Payload]] = OrderedDict()  # least recently used first

    def __len__(self) -> int:
        return len(self._held)

    def put(self, block_key: Key, payload: Payload, now: float) -> bool:
        """Keep the window that ends with ``block_key``; False when it is too large or its lineage is refused."""
        if self.strict and payload.replayed:
            return False
        self.expire(now)
        key = window_key(block_key, self.layers)
        old = self._held.get(key)
        if old is not None and payload.replayed and not old[1].replayed:
            payload = old[1]  # an exact window is never replaced by an approximate one
        size = len(payload.data)
        if size > self.capacity:
            return False
        self._remove(key)
        while self.stats.bytes + size > self.capacity:
            self._remove(next(iter(self._held)))
            self.stats.evicted += 1
        self._held[key] = (now + self.ttl_s, payload)
        self.stats.bytes += size
        self.stats.puts += 1
        return True

    def has(self, block_key: Key, now: float) -> bool:
        """Whether ``get`` would find it; counts nothing."""
        entry = self._held.get(window_key(block_key, self.layers))
        return entry is not None and entry[0] > now

    def get(self, block_key: Key, now: float) -> Payload | None:
        """The window, its lifetime renewed; None when it is absent or expired."""
        self.expire(now)
        key = window_key(block_key, self.layers)
        entry = self._held.get(key)
        if entry is None:
            self.stats.misses += 1
            return None
        self._held[key] = (now + self.ttl_s, entry[1])
        self._held.move_to_end(key)
        self.stats.hits += 1
        return entry[1]

    def drop(self, block_key: Key) -> None:
        """Forget the window that ends with ``block_key``."""
        self._remove(window_key(block_key, self.layers))

    def expire(self, now: float) -> None:
        """Drop what nobody used for ``ttl_s``; use order is expiry order."""
        while self._held:
            key, (expiry, _) = next(iter(self._held.items()))
            if expiry > now:
                return
            self._remove(key)
            self.stats.expired += 1

    def _remove(self, key: Key) -> None:
        entry = self._held.pop(key, None)
        if entry is not None:
            self.stats.bytes -= len(entry[1].data)


@dataclass
class Tiers:
    """What holds KV beside the device. ``root`` starts the keys; a store is optional.

    ``fetch_s``: time after which blocks that did not arrive from the store count as missing. ``sources``: (layer,
    bytes per block) of the sections in which they arrive; empty: whole blocks.
    """

    root: Key
    host: HostBlocks
    windows: WindowPool
    store: BlockStore | None = None
    fetch_s: float = 2.0
    sources: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PrefixMatch:
    """Where the cached blocks of a prompt are, in order: the first ``device`` ones, then by tier.

    ``blocks``: device block of each, None where it must be fetched. ``windows_at``: ends of loadable window KV.
    ``approximate``: some block or window has replayed lineage as far as known without fetching.
    """

    blocks: tuple[int | None, ...] = ()
    host: int = 0
    store: int = 0
    windows_at: frozenset[int] = field(default_factory=frozenset)
    approximate: bool = False

    @property
    def hit_tokens(self) -> int:
        return len(self.blocks) * BLOCK_TOKENS


def match_prefix(
    keys: Sequence[Key],
    device: DeviceBlocks,
    host: HostBlocks,
    lower: Lower | None,
    windows: WindowPool,
    now: float,
) -> PrefixMatch:
    """The longest run of blocks from the first on, each in any tier; moves and counts nothing."""
    blocks: list[int | None] = []
    in_host = in_store = 0
    store_run = 0
    approximate = False
    for i, key in enumerate(keys):
        block = device.find(key)
        if block is not None:
            approximate |= device.is_replayed(block)
        elif key in host:
            in_host += 1
        else:
            if lower is not None and store_run <= i:
                store_run = i + lower.match(keys[i:])
            if store_run <= i:
                break
            in_store += 1
        blocks.append(block)
    ends = frozenset((i + 1) * BLOCK_TOKENS for i in range(len(blocks)) if windows.has(keys[i], now))
    return PrefixMatch(tuple(blocks), in_host, in_store, ends, approximate)
