"""One file per block, for a shared mount that needs nothing else (3FS, NFS, Lustre).

    <path>/<namespace>/<aa>/<bb>/<key>.kv

Written under a temporary name, then renamed. The modification time is the last use: it is set anew when half of the
lifetime is over, so a block expires its lifetime after its last use. Removing many blocks is slow; the segment log is
the store for a local disk.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TypeVar

from deepinfer_engine.cache.prefix import Key
from deepinfer_engine.cache.store.direct import Buffers, open_direct, write_all
from deepinfer_engine.cache.store.interface import (
    Checked,
    Cleaned,
    StoreOptions,
    StoreStats,
    TrafficClass,
    claim_folder,
)
from deepinfer_engine.cache.store.record import (
    PAGE,
    BadRecord,
    Header,
    decode,
    decode_header,
    decode_section,
    encode,
    record_bytes,
    section_pages,
)
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.errors import CapacityError, NotReadyError, UsageError

_T = TypeVar("_T")
_READERS = 8
_LOW_WATER = 0.9
#: a temporary file this old was left by a process that died
_ORPHAN_S = 3600
#: what a file is that another process removed; NFS says the second for one it had looked up
_VANISHED = (errno.ENOENT, errno.ESTALE)


def _used(path: Path) -> float | None:
    """Unix seconds of a file's last use; None when it is not there."""
    try:
        return path.stat().st_mtime
    except OSError as exc:
        if exc.errno not in _VANISHED:
            raise
        return None


class PosixStore:
    """See the module's text; ``BlockStore`` has the contract."""

    def __init__(self, options: StoreOptions, clock: Callable[[], float] = time.time):
        claim_folder(options.path, "posix")
        self.options = options
        self._clock = clock
        self._lock = threading.Lock()
        self._buffers = Buffers()
        self._pool: ThreadPoolExecutor | None = None
        self._stats = StoreStats("posix")

    @property
    def read_errors(self) -> int:
        """Reads that failed and counted as misses."""
        return self._stats.read_errors

    def _unreadable(self) -> None:
        with self._lock:
            self._stats.read_errors += 1

    def _path(self, key: Key) -> Path:
        if self.options.namespace is None:
            raise UsageError(f"{self.options.path}: opened without a namespace, finds no blocks")
        name = key.hex()
        return self.options.path / self.options.namespace[:8].hex() / name[:2] / name[2:4] / f"{name}.kv"

    def match(self, keys: Sequence[Key]) -> int:
        """See ``BlockStore``; one stat call per key."""
        shortest = self._clock() - max(self.options.ttl_s.values())
        for i, key in enumerate(keys):
            try:
                if os.stat(self._path(key)).st_mtime <= shortest:
                    return i
            except FileNotFoundError:
                return i
            except OSError:
                self._unreadable()
                return i
        return len(keys)

    def put(self, key: Key, payload: Payload, traffic: TrafficClass = "chat") -> bool:
        """See ``BlockStore``."""
        path, now, ttl = self._path(key), self._clock(), self.options.ttl_s[traffic]
        used = _used(path)
        if used is not None and used + ttl / 2 > now:
            with self._lock:
                self._stats.already += 1
            return False
        buffer = self._buffers.get(record_bytes(len(payload.data)))
        encode(
            buffer,
            key,
            payload,
            namespace=self.options.namespace or b"",
            created=int(now),
            expiry=int(now) + ttl,
            sections=self.options.sections,
        )
        part = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            fd, self._stats.direct = open_direct(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
            try:
                write_all(fd, buffer, 0)
                os.utime(fd, (now, now))
            finally:
                os.close(fd)
            part.rename(path)
        except OSError as exc:
            part.unlink(missing_ok=True)
            raise CapacityError(f"{path}: cannot be written: {exc.strerror}") from None
        with self._lock:
            self._stats.puts += 1
        return True

    def put_many(self, items: Sequence[tuple[Key, Payload]], traffic: TrafficClass = "chat") -> int:
        """See ``BlockStore``; one file after the other."""
        return sum(self.put(key, payload, traffic) for key, payload in items)

    def get(self, keys: Sequence[Key]) -> list[Payload | None]:
        """See ``BlockStore``; up to eight reads are in flight."""
        found = self._spread(lambda i: self._get_one(keys[i], self._read), len(keys))
        out = [None if f is None else f[1] for f in found]
        self._count(sum(payload is not None for payload in out), len(keys))
        return out

    def get_sections(self, keys: Sequence[Key], arrived: Callable[[int, list[Payload | None]], None]) -> None:
        """See ``BlockStore``; up to eight reads are in flight."""
        sections = self.options.sections
        if len(sections) < 2:
            arrived(0, self.get(keys))
            return
        found: list[tuple[Header, Payload, float] | None] = []
        for index in range(len(sections)):

            def read(i: int, index: int = index, before: list = found) -> tuple[Header, Payload, float] | None:
                if index and before[i] is None:
                    return None
                return self._get_one(keys[i], partial(self._read_section, index, before[i][0] if index else None))

            found = self._spread(read, len(keys))
            arrived(index, [None if f is None else f[1] for f in found])
        self._count(sum(f is not None for f in found), len(keys))

    def _spread(self, read: Callable[[int], _T], count: int) -> list[_T]:
        """``read(i)`` for every i below ``count``, through up to eight threads."""
        if count <= 1:
            return [read(i) for i in range(count)]
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-read")
        return list(self._pool.map(read, range(count)))

    def _count(self, hits: int, asked: int) -> None:
        with self._lock:
            self._stats.hits += hits
            self._stats.misses += asked - hits

    def _get_one(
        self, key: Key, read: Callable[[Path, Key], tuple[Header, Payload, float]]
    ) -> tuple[Header, Payload, float] | None:
        """What ``read`` finds (header, payload, last use), its lifetime renewed where half of it is over."""
        path, now = self._path(key), self._clock()
        try:
            found = header, _, used = read(path, key)
        except FileNotFoundError:
            return None
        except OSError:
            self._unreadable()
            return None
        except BadRecord:
            with self._lock:
                self._stats.corrupt += 1
            try:
                path.unlink(missing_ok=True)
            except OSError:
                self._unreadable()
            return None
        ttl = header.expiry - header.created
        if used + ttl <= now:
            return None
        if used + ttl / 2 <= now:
            try:
                os.utime(path, (now, now))
            except FileNotFoundError:
                return found  # removed meanwhile; what was read is still right
            except OSError:
                self._unreadable()
                return found
            with self._lock:
                self._stats.renewed += 1
        return found

    def _read(self, path: Path, key: Key) -> tuple[Header, Payload, float]:
        fd, self._stats.direct = open_direct(path, os.O_RDONLY)
        try:
            status = os.fstat(fd)
            size = -(-status.st_size // PAGE) * PAGE
            view = self._buffers.get(max(size, PAGE))[:size]
            got = os.preadv(fd, [view], 0) if size else 0
            return (*decode(view[:got], key), status.st_mtime)
        finally:
            os.close(fd)

    def _read_section(self, index: int, header: Header | None, path: Path, key: Key) -> tuple[Header, Payload, float]:
        begin, size = section_pages(self.options.sections, index)
        fd, self._stats.direct = open_direct(path, os.O_RDONLY)
        try:
            view = self._buffers.get(size)
            pages = view[: os.preadv(fd, [view], begin)]
            header = header or decode_header(pages[:PAGE], key)
            payload = Payload(decode_section(pages, header, index), header.replayed)
            return header, payload, os.fstat(fd).st_mtime
        finally:
            os.close(fd)

    def flush(self) -> None:
        """Nothing is pending: a renamed file is visible."""

    def _files(self) -> Iterator[Path]:
        yield from self.options.path.glob("*/*/*/*.kv")

    def _found(self) -> Iterator[tuple[Path, os.stat_result, int]]:
        """Every file with its status and lifetime; one that another process removes meanwhile is not there."""
        for path in self._files():
            try:
                status, ttl = path.stat(), self._lifetime(path)
            except OSError as exc:
                if exc.errno not in _VANISHED:
                    raise
                continue
            yield path, status, ttl

    def collect(self, now: float) -> Cleaned:
        """Remove expired files and orphans of dead writers, then the least recently used above the capacity."""
        files = size = 0
        kept: list[tuple[float, int, Path]] = []
        for path, status, ttl in self._found():
            if status.st_mtime + ttl <= now:
                path.unlink(missing_ok=True)
                files, size = files + 1, size + status.st_size
            else:
                kept.append((status.st_mtime, status.st_size, path))
        total = sum(item[1] for item in kept)
        if 0 < self.options.capacity < total:
            for _, bytes_, path in sorted(kept):
                if total <= self.options.capacity * _LOW_WATER:
                    break
                path.unlink(missing_ok=True)
                files, size, total = files + 1, size + bytes_, total - bytes_
        for part in self.options.path.glob("*/*/*/.*.part"):
            written = _used(part)
            if written is not None and now - written > _ORPHAN_S:
                part.unlink(missing_ok=True)
        return Cleaned(files, size, files)

    def _lifetime(self, path: Path) -> int:
        """Seconds a file lives after its last use; 0 when it is no record."""
        with path.open("rb") as file:
            try:
                header = decode_header(file.read(PAGE))
            except BadRecord:
                return 0
        return header.expiry - header.created

    def check(self, *, repair: bool = False) -> Iterator[Checked]:
        """See ``BlockStore``: every file."""
        for path in self._files():
            problem = ""
            try:
                self._read(path, bytes.fromhex(path.stem))
            except FileNotFoundError:
                continue
            except (BadRecord, ValueError) as exc:
                problem = str(exc)
            except OSError as exc:
                problem = f"read failed: {exc.strerror}"
            if problem and repair:
                try:
                    path.unlink(missing_ok=True)
                except OSError as exc:
                    raise NotReadyError(f"{path}: wrong, and cannot be deleted: {exc.strerror}") from None
            yield Checked(str(path.relative_to(self.options.path)), 0, problem)

    def remove(self, keys: Sequence[Key]) -> int:
        """See ``BlockStore``."""
        removed = 0
        for path in map(self._path, keys):
            try:
                path.unlink()
                removed += 1
            except FileNotFoundError:
                pass
            except OSError:
                self._unreadable()
        return removed

    def stats(self) -> StoreStats:
        """See ``BlockStore``; walks all files."""
        now = self._clock()
        found = [(status, ttl) for _, status, ttl in self._found()]
        with self._lock:
            self._stats.blocks = self._stats.files = len(found)
            self._stats.bytes = sum(status.st_size for status, _ in found)
            self._stats.expired = sum(status.st_mtime + ttl <= now for status, ttl in found)
            return StoreStats(**vars(self._stats))

    def close(self) -> None:
        """Stop the readers."""
        if self._pool is not None:
            self._pool.shutdown()
