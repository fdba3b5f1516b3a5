"""The downloader: every missing range of every file, over several connections, until each file has its listed hash.

Work is cut into segments (one request each). A connection writes what it receives into the partial file and notes it
in the journal chunk by chunk, and once more whenever it ends for any reason; so a dropped or stalled connection loses
nothing, a killed process at most one chunk per connection. The thread that finishes a file hashes it on disk, gives it
its final name and stamps it, while the others go on.
"""

from __future__ import annotations

import errno
import shutil
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import httpx2

from deepinfer_engine.errors import CapacityError, DeepInferError, Interrupted, NotReadyError
from deepinfer_engine.weights.fetch.files import STATE_DIR, RemoteFile, hash_file, local_path
from deepinfer_engine.weights.fetch.hub import Hub, Transient, Watch
from deepinfer_engine.weights.fetch.manifest import Manifest
from deepinfer_engine.weights.fetch.partial import Partial, Range, finished_ranges, gaps, total
from deepinfer_engine.weights.fetch.progress import Progress


class _Open:
    """One file in transfer: opened by the first of its segments, finished by the last."""

    def __init__(self, file: RemoteFile, segments: list[Range], kept_bytes: int):
        self.file, self.segments, self.kept_bytes = file, segments, kept_bytes
        self.left = len(segments)
        self.lock = threading.Lock()
        self.partial: Partial | None = None


class Transfer:
    """Brings files to ``dest``; the caller holds its lock. ``manifest`` is stamped and saved file by file."""

    def __init__(self, hub: Hub, dest: Path, manifest: Manifest, progress: Progress):
        self._hub, self._dest, self._manifest, self._progress = hub, dest, manifest, progress
        self._limits = hub.limits
        self._stop = threading.Event()
        self._record = threading.Lock()
        self._live: set[httpx2.Response] = set()
        self._not_before = 0.0
        self._mismatched: list[str] = []

    def run(self, files: Sequence[RemoteFile], ready: Mapping[str, bytes]) -> tuple[str, ...]:
        """Fetch ``files`` (content of some may be ``ready``); returns the paths whose bytes had a wrong hash.

        Any other failure stops everything and is raised; what was received is kept.
        """
        state = self._dest / STATE_DIR
        opened = []
        for file in files:
            kept = finished_ranges(state, file)
            missing = gaps(kept, file.size, self._limits.segment_bytes)
            opened.append(_Open(file, missing or [(file.size, file.size)], total(kept)))
        self._progress.expect("fetch", sum(o.file.size - o.kept_bytes for o in opened))
        self._progress.expect("check", sum(o.file.size for o in opened))
        pool = ThreadPoolExecutor(self._limits.connections, thread_name_prefix="fetch")
        jobs = [pool.submit(self._segment, o, r, ready.get(o.file.path)) for o in opened for r in o.segments]
        try:
            self._wait(jobs)
        except KeyboardInterrupt:
            raise Interrupted("interrupted; what was fetched is kept",
                              hint="run the same command again, it continues") from None  # fmt: skip
        finally:
            self._stop.set()
            self._sever()
            pool.shutdown(wait=True, cancel_futures=True)
            for o in opened:
                if o.partial is not None:
                    o.partial.close()
        return tuple(sorted(self._mismatched))

    def _wait(self, jobs: list[Future[None]]) -> None:
        done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        for job in done:
            job.result()

    # ------------------------------------------------------------------ segments

    def _segment(self, o: _Open, span: Range, ready: bytes | None) -> None:
        if self._stop.is_set():
            return
        with self._disk_errors(o.file.path):
            with o.lock:
                if o.partial is None:
                    o.partial = Partial(self._dest / STATE_DIR, o.file)
                    self._progress.begin("fetch", o.file.path, o.file.size, o.kept_bytes)
            begin, end = span
            if ready is not None and begin < end:
                o.partial.write(begin, ready[begin:end])
                o.partial.commit(begin, end)
                self._progress.advance("fetch", o.file.path, end - begin)
            elif not self._pull(o.partial, begin, end):
                return
            with o.lock:
                o.left -= 1
                last = o.left == 0
            if last:
                self._progress.end("fetch", o.file.path)
                self._finish(o.partial)

    def _pull(self, partial: Partial, begin: int, end: int) -> bool:
        """Receive ``[begin, end)``, over as many connections as it takes; False when stopped."""
        path, failures = partial.file.path, 0
        while begin < end:
            if self._stop.wait(max(0.0, self._not_before - time.monotonic())):
                return False
            at, failure = self._stream(partial, begin, end)
            if self._stop.is_set():
                return False
            if failure is not None:
                failures = 0 if at - begin >= self._limits.chunk_bytes else failures + 1
                if failures > self._limits.retries:
                    raise self._hub.give_up(failure, path, failures)
                wait_s = self._hub.pause(failure, max(failures - 1, 0), path)
                if failure.wait_s:  # the hub asks all of us
                    self._not_before = max(self._not_before, time.monotonic() + failure.wait_s)
                self._stop.wait(wait_s)
            begin = at
        return True

    def _stream(self, partial: Partial, begin: int, end: int) -> tuple[int, Transient | None]:
        """One request; returns how far the bytes are on disk, and why it ended early if it did."""
        at = mark = begin
        failure: Transient | None = None
        try:
            with self._hub.range(self._manifest.commit, partial.file, begin, end) as response, self._listed(response):
                watch = Watch(self._limits)
                for received in response.iter_raw():
                    block = received[: end - at]
                    partial.write(at, block)
                    at += len(block)
                    self._progress.advance("fetch", partial.file.path, len(block))
                    watch.feed(len(block))
                    if at - mark >= self._limits.chunk_bytes:
                        partial.commit(mark, at)
                        mark = at
                        watch.reset()  # the flush was not the network's time
                    # a body that ends where it should is read to its end, so that the connection can be used again
                    if len(block) < len(received) or self._stop.is_set():
                        break
                else:
                    failure = Transient("the answer ended early")
        except Transient as exc:
            failure = exc
        if at > mark:
            partial.commit(mark, at)
        return at, None if at == end else failure

    # -------------------------------------------------------------------- finish

    def _finish(self, partial: Partial) -> None:
        file = partial.file
        self._progress.begin("check", file.path, file.size, 0)
        content = hash_file(
            partial.path, file.digest, lambda n: self._progress.advance("check", file.path, n), self._stop.is_set
        )
        self._progress.end("check", file.path)
        if content is None:
            return  # stopped; the partial file is complete and will be hashed next time
        if not content.matches(file.digest):
            partial.discard()
            with self._record:
                self._mismatched.append(file.path)
            return
        target = local_path(self._dest, file.path)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.promote(target)
        with self._record:
            self._manifest.stamp(file.path, target, content)
            self._manifest.save(self._dest)

    @contextmanager
    def _disk_errors(self, path: str) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise disk_error(exc, path, self._dest) from None

    # ---------------------------------------------------------------------- stop

    @contextmanager
    def _listed(self, response: httpx2.Response) -> Iterator[None]:
        """Keep the response where ``_sever`` finds it."""
        with self._record:
            self._live.add(response)
        try:
            yield
        finally:
            with self._record:
                self._live.discard(response)

    def _sever(self) -> None:
        """Wake threads that wait for bytes, so that stopping does not take a whole time-out."""
        with self._record:
            live = list(self._live)
        for response in live:
            stream = response.extensions.get("network_stream")
            connection = stream.get_extra_info("socket") if stream is not None else None
            if connection is not None:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue  # closed meanwhile, which is what is wanted


def disk_error(exc: OSError, path: str, dest: Path) -> DeepInferError:
    """What a failed write means to the operator."""
    if exc.errno in (errno.ENOSPC, errno.EDQUOT):
        return CapacityError(f"{path}: no room left on the disk of {dest}: {shutil.disk_usage(dest).free} bytes",
                             hint="free some space and run the same command again; it continues")  # fmt: skip
    return NotReadyError(f"{path}: cannot be written below {dest}: {exc.strerror}",
                         hint="check the disk and the permissions of --dest")  # fmt: skip
