"""The index of the segment log: which record of which segment holds a key. A hint that several processes share.

SQLite in WAL mode with ``synchronous=NORMAL``: after a power cut the last rows may be missing, and the scan of open
segments finds their records again.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from deepinfer_engine.errors import ArtefactError

#: keys per query; SQLite takes at least 999 parameters
_BATCH = 250
#: a checkpoint waits for the disk twice; 32 MiB of pages between two of them keep that off the puts
_CHECKPOINT_PAGES = 8192
#: how long one process may hold the file before another gives up on it
_BUSY_S = 30.0
_T = TypeVar("_T")
_SCHEMA = """
CREATE TABLE IF NOT EXISTS segments (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL, traffic TEXT NOT NULL,
  stride INTEGER NOT NULL, expires INTEGER NOT NULL, sealed INTEGER NOT NULL);
CREATE TABLE IF NOT EXISTS blocks (key BLOB PRIMARY KEY, segment INTEGER NOT NULL, offset INTEGER NOT NULL,
  expiry INTEGER NOT NULL) WITHOUT ROWID;
"""


@dataclass(frozen=True)
class Segment:
    """One segment file: name relative to the store, bytes per record, when its last block expires."""

    id: int
    name: str
    traffic: str
    stride: int
    expires: int
    sealed: bool


@dataclass(frozen=True)
class Place:
    """Where a record is, and when it expires (Unix seconds)."""

    segment: int
    offset: int
    expiry: int


def _segment(row: tuple) -> Segment:
    identity, name, traffic, stride, expires, sealed = row
    return Segment(identity, name, traffic, stride, expires, bool(sealed))


def _patiently(act: Callable[[], _T]) -> _T:
    """``act``, again while another process holds the file: turning a new file to WAL does not wait by itself."""
    deadline = time.monotonic() + _BUSY_S
    while True:
        try:
            return act()
        except sqlite3.OperationalError as exc:
            if "locked" not in str(exc) or time.monotonic() > deadline:
                raise
            time.sleep(0.01)


class Index:
    """Two connections, each used under a lock by all threads of a process: lookups never wait for a checkpoint."""

    def __init__(self, path: Path):
        self._lock = threading.Lock()
        self._read_lock = threading.Lock()
        try:
            self._db = _patiently(lambda: self._connect(path))
            _patiently(lambda: self._db.executescript(_SCHEMA))
            self._reader = _patiently(lambda: self._connect(path))
        except sqlite3.DatabaseError as exc:
            raise ArtefactError(
                f"{path}: the index cannot be read: {exc}", hint="remove it: it is built again from the segments"
            ) from None

    def _connect(self, path: Path) -> sqlite3.Connection:
        db = sqlite3.connect(path, timeout=_BUSY_S, check_same_thread=False, isolation_level=None)
        db.execute("PRAGMA journal_mode=WAL")
        db.execute("PRAGMA synchronous=NORMAL")
        db.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
        return db

    def close(self) -> None:
        with self._lock, self._read_lock:
            self._db.close()
            self._reader.close()

    # --------------------------------------------------------------- segments

    def add_segment(self, name: str, traffic: str, stride: int, expires: int) -> Segment:
        """Row of a segment file, which may exist already."""
        with self._lock:
            self._db.execute(
                "INSERT OR IGNORE INTO segments (name, traffic, stride, expires, sealed) VALUES (?, ?, ?, ?, 0)",
                (name, traffic, stride, expires),
            )
            row = self._db.execute("SELECT * FROM segments WHERE name = ?", (name,)).fetchone()
        return _segment(row)

    def segment(self, segment_id: int) -> Segment | None:
        with self._read_lock:
            row = self._reader.execute("SELECT * FROM segments WHERE id = ?", (segment_id,)).fetchone()
        return None if row is None else _segment(row)

    def segments(self) -> list[Segment]:
        """All segments, the one that expires first in front."""
        with self._lock:
            rows = self._db.execute("SELECT * FROM segments ORDER BY expires, id").fetchall()
        return [_segment(row) for row in rows]

    def seal(self, segment_id: int) -> None:
        with self._lock:
            self._db.execute("UPDATE segments SET sealed = 1 WHERE id = ?", (segment_id,))

    def drop_segment(self, segment_id: int) -> int:
        """Forget a segment and its blocks; how many blocks."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            count = self._db.execute("DELETE FROM blocks WHERE segment = ?", (segment_id,)).rowcount
            self._db.execute("DELETE FROM segments WHERE id = ?", (segment_id,))
            self._db.execute("COMMIT")
        return count

    # ----------------------------------------------------------------- blocks

    def find(self, keys: Sequence[bytes]) -> dict[bytes, Place]:
        """Places of those keys that are indexed."""
        out: dict[bytes, Place] = {}
        for at in range(0, len(keys), _BATCH):
            part = keys[at : at + _BATCH]
            marks = ",".join("?" * len(part))
            query = f"SELECT key, segment, offset, expiry FROM blocks WHERE key IN ({marks})"
            with self._read_lock:
                rows = self._reader.execute(query, part).fetchall()
            out.update((key, Place(segment, offset, expiry)) for key, segment, offset, expiry in rows)
        return out

    def add(self, rows: Sequence[tuple[bytes, Place]]) -> None:
        """Insert or replace places in one transaction."""
        with self._lock:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany(
                "INSERT OR REPLACE INTO blocks (key, segment, offset, expiry) VALUES (?, ?, ?, ?)",
                [(key, p.segment, p.offset, p.expiry) for key, p in rows],
            )
            self._db.execute("COMMIT")

    def remove(self, key: bytes, place: Place) -> None:
        """Forget a key, unless it has moved elsewhere."""
        with self._lock:
            self._db.execute(
                "DELETE FROM blocks WHERE key = ? AND segment = ? AND offset = ?", (key, place.segment, place.offset)
            )

    def blocks_of(self, segment_id: int) -> dict[int, bytes]:
        """Key by offset of one segment's indexed records."""
        with self._lock:
            rows = self._db.execute("SELECT offset, key FROM blocks WHERE segment = ?", (segment_id,)).fetchall()
        return dict(rows)

    def all(self) -> Iterator[tuple[bytes, Place]]:
        """Every indexed block, segment by segment."""
        for segment in self.segments():
            with self._lock:
                rows = self._db.execute(
                    "SELECT key, segment, offset, expiry FROM blocks WHERE segment = ? ORDER BY offset", (segment.id,)
                ).fetchall()
            for key, segment_id, offset, expiry in rows:
                yield key, Place(segment_id, offset, expiry)

    def count(self, now: float) -> tuple[int, int]:
        """(indexed blocks, expired ones among them)."""
        with self._lock:
            row = self._db.execute("SELECT count(*), coalesce(sum(expiry <= ?), 0) FROM blocks", (now,)).fetchone()
        return int(row[0]), int(row[1])
