"""Segment log: append-only files of equal-sized records, one writer each, and an SQLite index over all of them.

    <path>/<namespace>/<traffic>-<UTC hour>-<writer>-<number>-<record bytes>.seg

A put reserves the next slot, writes the record in one call, then publishes its place: data before index. A record
proves itself, so losing index rows loses nothing that a scan does not find, and a stale row is a miss. Blocks of one
traffic class and hour share a segment and expire by unlinking it. A writer holds a lock on its open segments; a segment
whose lock is free and that was not sealed belonged to a process that died, and whoever opens the store scans it.
"""

from __future__ import annotations

import calendar
import fcntl
import mmap
import os
import re
import secrets
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import cast

from deepinfer_engine.cache.prefix import Key
from deepinfer_engine.cache.store.direct import Buffers, open_direct, write_all
from deepinfer_engine.cache.store.index import Index, Place, Segment
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
from deepinfer_engine.errors import ArtefactError, CapacityError, NotReadyError, UsageError

#: a segment is preallocated: large enough to be unlinked rarely, small enough to expire as one
_SEGMENT_BYTES = 256 << 20
_SEGMENT_SLOTS = 2048
_HOUR = 3600
#: index rows are written in batches; other processes see a block at most this much later
_BATCH_ROWS = 64
_BATCH_S = 0.02
#: records of one write: as many as make it as fast over fresh space as over written space
_GROUP = 8
#: reads in flight of one ``get``; the disk saturates at eight
_READERS = 8
#: blocks near expiry that ``flush`` writes again
_RENEW_LIMIT = 64
#: places remembered in memory; beyond that they are asked of the index again
_REMEMBERED = 1_000_000
#: collection above the capacity goes on to this share of it, so that it does not run at every put
_LOW_WATER = 0.9
_NAME = re.compile(r"[0-9a-f]{16}/(?P<traffic>agent|chat)-(?P<stamp>\d{10})-[0-9a-f]{12}-\d{4,}-(?P<stride>\d+)\.seg")


class _Open:
    """An open segment file and how many calls use it; a reader's is closed when dropped and unused.

    ``slots`` and ``next`` count records of a file that this process writes.
    """

    def __init__(self, fd: int, segment: Segment, slots: int = 0):
        self.fd = fd
        self.segment = segment
        self.slots = slots
        self.next = 0
        self.users = 0
        self.dropped = False


class SegmentStore:
    """See the module's text; ``BlockStore`` has the contract."""

    def __init__(self, options: StoreOptions, clock: Callable[[], float] = time.time):
        claim_folder(options.path, "segment")
        self.options = options
        self._clock = clock
        self._writer = secrets.token_hex(6)
        self._numbers = 0
        self._lock = threading.Lock()
        self._committing = threading.Lock()  # taken before the other one
        self._left: list[_Open] = []
        self._buffers = Buffers()
        self._index = Index(options.path / "index.db")
        self._places: dict[Key, Place] = {}
        self._pending: list[tuple[Key, Place]] = []
        self._pending_since = 0.0
        self._renew: dict[Key, tuple[Payload, TrafficClass]] = {}
        self._writing: dict[tuple[str, int], _Open] = {}
        self._reading: dict[int, _Open] = {}
        self._pool: ThreadPoolExecutor | None = None
        self._stats = StoreStats("segment")
        self._recover()

    # ------------------------------------------------------------------ write

    def put(self, key: Key, payload: Payload, traffic: TrafficClass = "chat") -> bool:
        """Keep a block; False when it is there with more than half of its lifetime left. See ``BlockStore``."""
        return self.put_many([(key, payload)], traffic) == 1

    def put_many(self, items: Sequence[tuple[Key, Payload]], traffic: TrafficClass = "chat") -> int:
        """See ``BlockStore``; up to ``_GROUP`` neighbours are one write."""
        now, ttl = self._clock(), self.options.ttl_s[traffic]
        if self.options.namespace is None:
            raise UsageError(f"{self.options.path}: opened without a namespace, takes no blocks")
        known = self._find([key for key, _ in items])
        fresh: dict[Key, Payload] = {}
        for key, payload in items:
            place = known.get(key)
            if place is None or place.expiry - now <= ttl / 2:
                fresh.setdefault(key, payload)
        if len(fresh) < len(items):
            with self._lock:
                self._stats.already += len(items) - len(fresh)
        rest = list(fresh.items())
        while rest:
            rest = rest[self._write(rest[:_GROUP], traffic, now) :]
        return len(fresh)

    def _write(self, items: Sequence[tuple[Key, Payload]], traffic: TrafficClass, now: float) -> int:
        """Write the first of the blocks that have one size and fit the open segment, in one call; how many."""
        assert self.options.namespace is not None
        expiry, stride = int(now) + self.options.ttl_s[traffic], record_bytes(len(items[0][1].data))
        count = next((i for i, (_, p) in enumerate(items) if record_bytes(len(p.data)) != stride), len(items))
        with self._lock:
            file = self._segment_for(traffic, stride, now)
            count = min(count, file.slots - file.next)
            offset = file.next * stride
            file.next += count
            file.users += 1
        try:
            buffer = self._buffers.get(count * stride)
            for i, (key, payload) in enumerate(items[:count]):
                encode(
                    buffer[i * stride : (i + 1) * stride],
                    key,
                    payload,
                    namespace=self.options.namespace,
                    created=int(now),
                    expiry=expiry,
                    sections=self.options.sections,
                )
            write_all(file.fd, buffer, offset)
        except OSError as exc:
            with self._lock:
                file.users -= 1
            raise CapacityError(f"{self.options.path / file.segment.name}: cannot be written: {exc.strerror}") from None
        rows = [(key, Place(file.segment.id, offset + i * stride, expiry)) for i, (key, _) in enumerate(items[:count])]
        with self._lock:
            file.users -= 1
            self._places.update(rows)
            self._stats.puts += count
            if not self._pending:
                self._pending_since = time.monotonic()
            self._pending += rows
            due = len(self._pending) >= _BATCH_ROWS or time.monotonic() - self._pending_since > _BATCH_S
        if due:
            self._commit()
        return count

    def _commit(self) -> None:
        """Index what is pending, then seal the segments left behind; other writers go on meanwhile.

        A segment is sealed in the turn that indexes the last of its rows, because nobody scans a sealed one.
        """
        with self._committing:
            with self._lock:
                rows, self._pending = self._pending, []
                left = [file for file in self._left if not file.users]
                self._left = [file for file in self._left if file.users]
            if rows:
                self._index.add(rows)
            for file in left:
                os.ftruncate(file.fd, file.next * file.segment.stride)
                self._index.seal(file.segment.id)
                os.close(file.fd)

    def flush(self) -> None:
        """Write the pending index rows, and blocks again that were used late in their lifetime."""
        with self._lock:
            renew, self._renew = self._renew, {}
        for key, (payload, traffic) in renew.items():
            if self.put(key, payload, traffic):
                with self._lock:
                    self._stats.renewed += 1
        self._commit()

    def _segment_for(self, traffic: str, stride: int, now: float) -> _Open:
        hour = int(now) // _HOUR
        file = self._writing.get((traffic, stride))
        if file is not None:
            full = file.next >= file.slots
            if (
                not full
                and file.segment.expires == (hour + 1) * _HOUR + self.options.ttl_s[cast(TrafficClass, traffic)]
            ):
                return file
            self._left.append(self._writing.pop((traffic, stride)))
        file = self._create(traffic, stride, hour)
        self._writing[traffic, stride] = file
        return file

    def _create(self, traffic: str, stride: int, hour: int) -> _Open:
        """A new segment under this writer's lock. It gets its name only once the lock is held."""
        assert self.options.namespace is not None
        stamp = time.strftime("%Y%m%d%H", time.gmtime(hour * _HOUR))
        folder = self.options.path / self.options.namespace[:8].hex()
        folder.mkdir(exist_ok=True)
        name = f"{folder.name}/{traffic}-{stamp}-{self._writer}-{self._numbers:04d}-{stride}.seg"
        self._numbers += 1
        part = self.options.path / f"{name}.part"
        fd, direct = open_direct(part, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        fcntl.flock(fd, fcntl.LOCK_EX)
        slots = max(1, min(_SEGMENT_SLOTS, _SEGMENT_BYTES // stride))
        try:
            os.posix_fallocate(fd, 0, slots * stride)
        except OSError as exc:
            os.close(fd)
            part.unlink()
            raise CapacityError(
                f"{self.options.path}: no room for a segment of {slots * stride} bytes: {exc.strerror}",
                hint="lower cache.store.capacity_gib, or run deepinfer kv gc",
            ) from None
        part.rename(self.options.path / name)
        self._stats.direct = direct
        expires = (hour + 1) * _HOUR + self.options.ttl_s[cast(TrafficClass, traffic)]
        return _Open(fd, self._index.add_segment(name, traffic, stride, expires), slots)

    def _release(self, file: _Open) -> None:
        with self._lock:
            file.users -= 1
            if not file.users and file.dropped:
                os.close(file.fd)

    # ------------------------------------------------------------------- read

    def _find(self, keys: Sequence[Key]) -> dict[Key, Place]:
        with self._lock:
            found = {key: place for key in keys if (place := self._places.get(key)) is not None}
        missing = [key for key in keys if key not in found]
        if missing:
            more = self._index.find(missing)
            with self._lock:
                if len(self._places) > _REMEMBERED:
                    self._places.clear()
                self._places.update(more)
            found.update(more)
        return found

    @property
    def read_errors(self) -> int:
        """Reads that failed and counted as misses."""
        return self._stats.read_errors

    def _unreadable(self) -> None:
        with self._lock:
            self._stats.read_errors += 1

    def _find_for_reading(self, keys: Sequence[Key]) -> dict[Key, Place]:
        try:
            return self._find(keys)
        except sqlite3.Error:
            self._unreadable()
            return {}

    def match(self, keys: Sequence[Key]) -> int:
        """See ``BlockStore``."""
        now = self._clock()
        places = self._find_for_reading(keys)
        for i, key in enumerate(keys):
            place = places.get(key)
            if place is None or place.expiry <= now:
                return i
        return len(keys)

    def get(self, keys: Sequence[Key]) -> list[Payload | None]:
        """See ``BlockStore``; up to eight reads are in flight."""
        places = self._find_for_reading(keys)
        out: list[Payload | None] = [None] * len(keys)

        def read(i: int) -> None:
            found = self._read(keys[i], places.get(keys[i]), self._record)
            if found is not None:
                out[i] = found[1]
                self._remember_use(keys[i], found[1], found[2])

        self._spread(read, len(keys))
        self._count(sum(payload is not None for payload in out), len(keys))
        return out

    def get_sections(self, keys: Sequence[Key], arrived: Callable[[int, list[Payload | None]], None]) -> None:
        """See ``BlockStore``; up to eight reads are in flight."""
        sections = self.options.sections
        if len(sections) < 2:
            arrived(0, self.get(keys))
            return
        places: list[Place | None] = list(map(self._find_for_reading(keys).get, keys))
        headers: list[Header | None] = [None] * len(keys)
        parts: list[list[bytes]] = [[] for _ in keys]
        for index in range(len(sections)):
            out: list[Payload | None] = [None] * len(keys)

            def read(i: int, index: int = index, out: list[Payload | None] = out) -> None:
                if len(parts[i]) < index:
                    return
                found = self._read(keys[i], places[i], partial(self._section, index=index, header=headers[i]))
                if found is not None:
                    headers[i], payload, places[i] = found
                    out[i] = payload
                    parts[i].append(payload.data)

            self._spread(read, len(keys))
            arrived(index, out)
        whole = [i for i in range(len(keys)) if len(parts[i]) == len(sections)]
        for i in whole:
            header, place = headers[i], places[i]
            assert header is not None and place is not None
            self._remember_use(keys[i], Payload(b"".join(parts[i]), header.replayed), place)
        self._count(len(whole), len(keys))

    def _spread(self, read: Callable[[int], None], count: int) -> None:
        """``read(i)`` for every i below ``count``, through up to eight threads."""
        lanes = min(_READERS, count)
        if lanes <= 1:
            for i in range(count):
                read(i)
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(_READERS, thread_name_prefix="kv-read")

        def share(first: int) -> None:
            for i in range(first, count, lanes):
                read(i)

        list(self._pool.map(share, range(lanes)))

    def _count(self, hits: int, asked: int) -> None:
        with self._lock:
            self._stats.hits += hits
            self._stats.misses += asked - hits

    def _read(
        self, key: Key, place: Place | None, read: Callable[[_Open, int, Key], tuple[Header, Payload]]
    ) -> tuple[Header, Payload, Place] | None:
        """What ``read`` finds at the place of a key, or at the one that the index knows by now; None for a miss."""
        try:
            return self._read_at(key, place, read)
        except (OSError, sqlite3.Error):
            self._unreadable()
            return None

    def _read_at(
        self, key: Key, place: Place | None, read: Callable[[_Open, int, Key], tuple[Header, Payload]]
    ) -> tuple[Header, Payload, Place] | None:
        for _ in range(2):  # a place from memory may be stale: the index is asked once more
            if place is None:
                return None
            file = self._file(place.segment)
            if file is not None:
                try:
                    header, payload = read(file, place.offset, key)
                    return None if header.expiry <= self._clock() else (header, payload, place)
                except BadRecord:
                    with self._lock:
                        self._stats.corrupt += 1
                    self._index.remove(key, place)
                finally:
                    self._release(file)
            with self._lock:
                self._places.pop(key, None)
            fresh = self._index.find([key]).get(key)
            place = None if fresh == place else fresh
        return None

    def _pages(self, file: _Open, offset: int, size: int) -> memoryview:
        view = self._buffers.get(size)
        return view[: os.preadv(file.fd, [view], offset)]

    def _record(self, file: _Open, offset: int, key: Key) -> tuple[Header, Payload]:
        return decode(self._pages(file, offset, file.segment.stride), key)

    def _section(
        self, file: _Open, offset: int, key: Key, *, index: int, header: Header | None
    ) -> tuple[Header, Payload]:
        begin, size = section_pages(self.options.sections, index)
        pages = self._pages(file, offset + begin, size)
        header = header or decode_header(pages[:PAGE], key)
        return header, Payload(decode_section(pages, header, index), header.replayed)

    def _remember_use(self, key: Key, payload: Payload, place: Place) -> None:
        """Have a block that was used late in its lifetime written again."""
        with self._lock:
            file = self._reading.get(place.segment)
            if self.options.namespace is None or file is None or len(self._renew) >= _RENEW_LIMIT:
                return
            kind = cast(TrafficClass, file.segment.traffic)
            if place.expiry - self._clock() < self.options.ttl_s[kind] / 2:
                self._renew[key] = (payload, kind)

    def _file(self, segment_id: int) -> _Open | None:
        """The open file of a segment, one user more; None when it is gone."""
        with self._lock:
            file = self._reading.get(segment_id)
            if file is None:
                segment = self._index.segment(segment_id)
                if segment is None:
                    return None
                try:
                    fd, self._stats.direct = open_direct(self.options.path / segment.name, os.O_RDONLY)
                except FileNotFoundError:
                    return None
                file = self._reading[segment_id] = _Open(fd, segment)
            file.users += 1
            return file

    # --------------------------------------------------------- maintenance

    def _recover(self) -> None:
        """Scan segments of writers that died before sealing them; index what is whole, cut what is behind."""
        sealed = {s.name for s in self._index.segments() if s.sealed}
        mine = {file.segment.name for file in self._writing.values()}
        for path in sorted(self.options.path.glob("*/*.seg")):
            name = f"{path.parent.name}/{path.name}"
            if name in sealed or name in mine:
                continue
            try:
                fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._scan(fd, name)
            except BlockingIOError:
                pass  # its writer lives
            finally:
                os.close(fd)
        for part in self.options.path.glob("*/*.seg.part"):
            try:
                written = part.stat().st_mtime
            except FileNotFoundError:
                continue  # renamed or removed by another process meanwhile
            if self._clock() - written > _HOUR:
                part.unlink(missing_ok=True)

    def _scan(self, fd: int, name: str) -> None:
        parts = _NAME.fullmatch(name)
        if parts is None:
            raise ArtefactError(
                f"{self.options.path / name}: not the name of a segment", hint="move it out of the store"
            )
        traffic, stride, end = parts["traffic"], int(parts["stride"]), os.fstat(fd).st_size
        ttl = self.options.ttl_s[cast(TrafficClass, traffic)]
        hour = calendar.timegm(time.strptime(parts["stamp"], "%Y%m%d%H")) // _HOUR
        segment = self._index.add_segment(name, traffic, stride, (hour + 1) * _HOUR + ttl)
        indexed = self._index.blocks_of(segment.id)
        found, used = [], max(indexed, default=-stride) + stride
        for offset in range(0, end - stride + 1, stride):
            if offset in indexed:
                continue
            try:
                header = decode_header(os.pread(fd, PAGE, offset))
                decode(memoryview(os.pread(fd, stride, offset)), header.key)
            except BadRecord:
                continue
            found.append((header.key, Place(segment.id, offset, header.expiry)))
            used = max(used, offset + stride)
        self._index.add(found)
        self._stats.recovered += len(found)
        os.ftruncate(fd, used)
        self._index.seal(segment.id)

    def collect(self, now: float) -> Cleaned:
        """Unlink expired segments, then those that expire first, down to nine tenths of the capacity."""
        self.flush()
        self._recover()
        files = size = blocks = 0
        sizes = {s.id: self._size(s) for s in self._index.segments()}
        total = sum(sizes.values())
        goal = self.options.capacity * _LOW_WATER if 0 < self.options.capacity < total else total
        for segment in self._index.segments():
            if segment.expires > now and (total <= goal or not segment.sealed):
                continue
            with self._lock:
                for at, file in list(self._writing.items()):
                    if file.segment.id == segment.id:
                        self._left.append(self._writing.pop(at))
            self._commit()
            blocks += self._index.drop_segment(segment.id)
            (self.options.path / segment.name).unlink(missing_ok=True)
            self._close_reader(segment.id)
            files, size, total = files + 1, size + sizes[segment.id], total - sizes[segment.id]
        return Cleaned(files, size, blocks)

    def _close_reader(self, segment_id: int) -> None:
        with self._lock:
            self._places = {k: p for k, p in self._places.items() if p.segment != segment_id}
            file = self._reading.pop(segment_id, None)
            if file is not None:
                if file.users:
                    file.dropped = True
                else:
                    os.close(file.fd)

    def _size(self, segment: Segment) -> int:
        """Bytes of a segment; of one that this process writes, without the room preallocated behind its records."""
        for file in self._writing.values():
            if file.segment.id == segment.id:
                return file.next * segment.stride
        try:
            return (self.options.path / segment.name).stat().st_size
        except FileNotFoundError:
            return 0

    def check(self, *, repair: bool = False) -> Iterator[Checked]:
        """See ``BlockStore``: every indexed record."""
        self.flush()
        for key, place in self._index.all():
            file, problem = self._file(place.segment), "the file is gone"
            if file is not None:
                try:
                    self._record(file, place.offset, key)
                    problem = ""
                except BadRecord as exc:
                    problem = str(exc)
                except OSError as exc:
                    problem = f"read failed: {exc.strerror}"
                finally:
                    self._release(file)
            if problem and repair and not self._delete(key, place):
                raise NotReadyError(f"{self.options.path}: a wrong block cannot be deleted", hint="make it writable")
            yield Checked(file.segment.name if file is not None else f"segment {place.segment}", place.offset, problem)

    def remove(self, keys: Sequence[Key]) -> int:
        """See ``BlockStore``. The header page is overwritten, so that a scan does not bring the record back."""
        self.flush()
        places = self._index.find(keys)
        return sum([self._delete(key, place) for key, place in places.items()])

    def _delete(self, key: Key, place: Place) -> bool:
        """Forget a record and overwrite its header; False where that failed, and a scan would find it again."""
        self._index.remove(key, place)
        with self._lock:
            self._places.pop(key, None)
            self._renew.pop(key, None)
        segment = self._index.segment(place.segment)
        if segment is None:
            return True
        try:
            fd, _ = open_direct(self.options.path / segment.name, os.O_WRONLY)
        except FileNotFoundError:
            return True
        except OSError:
            self._unreadable()
            return False
        try:
            write_all(fd, memoryview(mmap.mmap(-1, PAGE)), place.offset)
        except OSError:
            self._unreadable()
            return False
        finally:
            os.close(fd)
        return True

    def stats(self) -> StoreStats:
        """See ``BlockStore``."""
        self.flush()
        segments = self._index.segments()
        blocks, expired = self._index.count(self._clock())
        with self._lock:
            self._stats.blocks, self._stats.expired = blocks, expired
            self._stats.files, self._stats.bytes = len(segments), sum(self._size(s) for s in segments)
            return StoreStats(**vars(self._stats))

    def close(self) -> None:
        """Seal what this process wrote and let go of every file."""
        self.flush()
        if self._pool is not None:
            self._pool.shutdown()
        with self._lock:
            self._left.extend(self._writing.values())
            self._writing.clear()
        self._commit()
        with self._lock:
            for file in self._reading.values():
                os.close(file.fd)
            self._reading.clear()
        self._index.close()
