"""``BlockStore``: what every persistent tier does. It may lose a block; it never hands out a wrong byte."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from deepinfer_engine.cache.prefix import Key
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.errors import ArtefactError, NotReadyError

TrafficClass = Literal["agent", "chat"]
_MARKER = "store.json"


@dataclass(frozen=True)
class StoreOptions:
    """Where and how blocks are kept. Sizes in bytes; ``ttl_s`` by traffic class, counted from the last use.

    ``namespace`` starts every key (``prefix.namespace_root``); ``sections`` are (layer, bytes) of a payload. A store
    opened without a namespace reads, checks and cleans, but takes no blocks.
    """

    path: Path
    ttl_s: dict[TrafficClass, int] = field(default_factory=lambda: {"agent": 259_200, "chat": 604_800})
    capacity: int = 0
    namespace: bytes | None = None
    sections: tuple[tuple[int, int], ...] = ()


@dataclass
class StoreStats:
    """Counts since opening, and what is on disk (``blocks``, ``bytes``, ``files``) when asked for."""

    backend: str
    direct: bool = False
    blocks: int = 0
    expired: int = 0
    bytes: int = 0
    files: int = 0
    puts: int = 0
    already: int = 0
    hits: int = 0
    misses: int = 0
    corrupt: int = 0
    read_errors: int = 0
    recovered: int = 0
    renewed: int = 0


@dataclass(frozen=True)
class Checked:
    """One record that was read: ``problem`` is empty when every byte is right."""

    file: str
    offset: int
    problem: str = ""


@dataclass(frozen=True)
class Cleaned:
    """What a collection removed."""

    files: int
    bytes: int
    blocks: int


class BlockStore(Protocol):
    """Safe to call from several threads. Expired, missing, torn and flipped records are all misses.

    So is what ``match`` and ``get`` cannot read because the file system or the index fails; it stays where it is and
    counts in ``read_errors``, as does a block that was read but could not be renewed or removed.
    """

    @property
    def read_errors(self) -> int: ...

    def match(self, keys: Sequence[Key]) -> int:
        """Length of the longest run of ``keys`` from the first on that is indexed; reads no payload."""
        ...

    def put(self, key: Key, payload: Payload, traffic: TrafficClass = "chat") -> bool:
        """Keep a block; False when it is there already. It is acknowledged when this returns."""
        ...

    def put_many(self, items: Sequence[tuple[Key, Payload]], traffic: TrafficClass = "chat") -> int:
        """Keep blocks, several in one write; how many were not there yet. All are acknowledged when this returns."""
        ...

    def get(self, keys: Sequence[Key]) -> list[Payload | None]:
        """Payloads in order, None for misses."""
        ...

    def get_sections(self, keys: Sequence[Key], arrived: Callable[[int, list[Payload | None]], None]) -> None:
        """Read the first section of every block, then the second, and so on: the order in which layers need them.

        ``arrived(i, payloads)`` gets section ``i`` alone of each block, None for misses; a block that misses once
        misses in all later sections. Without ``StoreOptions.sections`` a payload is one section.
        """
        ...

    def remove(self, keys: Sequence[Key]) -> int:
        """Delete blocks, for good: no scan finds them again. How many were there."""
        ...

    def flush(self) -> None:
        """Make everything acknowledged visible to other processes."""
        ...

    def collect(self, now: float) -> Cleaned:
        """Remove what has expired, then the oldest above the capacity."""
        ...

    def check(self, *, repair: bool = False) -> Iterator[Checked]:
        """Read every record and compare every checksum. ``repair`` deletes those that are wrong or cannot be read."""
        ...

    def stats(self) -> StoreStats: ...

    def close(self) -> None: ...


def claim_folder(path: Path, backend: str) -> None:
    """Make the folder of a store and say in it whose format it is; refuse one that holds anything else."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        found = backend_of(path)
        if found is None and any(not p.name.startswith(f".{_MARKER}.") for p in path.iterdir()):
            found = backend_of(path)  # another process may be making this store right now: its marker comes first
            if found is None:
                raise ArtefactError(
                    f"{path}: not empty and not a KV store", hint="give cache.store.path an empty folder"
                )
        if found is None:
            part = path / f".{_MARKER}.{os.getpid()}.part"
            part.write_text(json.dumps({"format": "deepinfer-kv", "version": 1, "backend": backend}) + "\n")
            part.replace(path / _MARKER)
        elif found != backend:
            raise ArtefactError(f"{path}: a {found} store, the profile asks for {backend}")
    except OSError as exc:
        raise NotReadyError(f"{path}: cannot hold a KV store: {exc.strerror}") from None


def backend_of(path: Path) -> str | None:
    """Backend of the store in a folder; None when there is no store."""
    try:
        marker = json.loads((path / _MARKER).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as exc:
        raise ArtefactError(f"{path / _MARKER}: cannot be read: {exc}") from None
    if not isinstance(marker, dict) or marker.get("format") != "deepinfer-kv" or marker.get("version") != 1:
        raise ArtefactError(f"{path / _MARKER}: not a version 1 KV store")
    return str(marker.get("backend"))


def open_store(options: StoreOptions, backend: str, clock: Callable[[], float] | None = None) -> BlockStore:
    """The store of a profile (backend segment or posix)."""
    import time

    from deepinfer_engine.cache.store.posix import PosixStore
    from deepinfer_engine.cache.store.segment import SegmentStore

    kinds = {"segment": SegmentStore, "posix": PosixStore}
    if backend not in kinds:
        raise ArtefactError(f"{options.path}: backend {backend!r} is none of {', '.join(kinds)}")
    return kinds[backend](options, clock or time.time)
