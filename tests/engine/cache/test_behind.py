"""Writing behind: whatever the store does, a step never waits, the queue drains, and closing ends."""

from __future__ import annotations

import sqlite3
import threading
import time

import pytest

from deepinfer_engine.cache.store import posix
from deepinfer_engine.cache.store.behind import DEPTH, WriteBehind
from deepinfer_engine.cache.store.interface import StoreOptions, open_store
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.errors import ArtefactError

PAYLOAD = Payload(bytes(320))


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "big")


class Broken:
    """A store whose ``put`` raises, or waits for ``gate``."""

    def __init__(self, error: Exception | None = None, gate: threading.Event | None = None):
        self.error, self.gate, self.puts = error, gate, 0

    def collect(self, now: float) -> None: ...

    def flush(self) -> None: ...

    def put_many(self, items, traffic) -> int:
        self.puts += 1
        if self.gate is not None:
            self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return len(items)


@pytest.mark.parametrize(
    "error", [FileNotFoundError("gone"), sqlite3.OperationalError("database is locked"), ArtefactError("no segment")]
)
def test_any_error_of_the_store_ends_writing_and_nothing_else(error):
    store = Broken(error)
    behind = WriteBehind(store)  # pyright: ignore[reportArgumentType]
    for n in range(3 * DEPTH):  # more than the queue holds: a dead thread would leave it full
        behind.put(key_of(n), PAYLOAD)
    assert behind.close(20)
    assert behind.failed is error and store.puts <= len(behind._threads) and behind.dropped == 3 * DEPTH


def test_closing_does_not_wait_for_a_store_that_hangs():
    gate = threading.Event()
    behind = WriteBehind(Broken(gate=gate))  # pyright: ignore[reportArgumentType]
    for n in range(DEPTH + 32):  # what both threads hold, and a full queue
        behind.put(key_of(n), PAYLOAD)
    began = time.monotonic()
    assert not behind.close(0.2)
    assert time.monotonic() - began < 5
    assert isinstance(behind.failed, TimeoutError) and behind.dropped >= DEPTH
    gate.set()
    for thread in behind._threads:
        thread.join(0.1)


@pytest.mark.parametrize("backend", ["segment", "posix"])
def test_everything_that_was_queued_is_there_after_closing_but_what_proved_wrong(backend, tmp_path):
    store = open_store(StoreOptions(tmp_path / "kv", namespace=b"n" * 32), backend)
    store.put(key_of(900), PAYLOAD)
    behind = WriteBehind(store)
    behind.remove([key_of(900), key_of(901)])
    for n in range(100):
        behind.put(key_of(n), PAYLOAD)
    assert behind.close(20) and behind.dropped == 0 and behind.failed is None
    assert store.match([key_of(n) for n in range(100)]) == 100
    assert store.get([key_of(900)]) == [None]
    store.close()
    again = open_store(StoreOptions(tmp_path / "kv", namespace=b"n" * 32), backend)
    assert again.stats().blocks == 100 and again.match([key_of(900)]) == 0
    again.close()


class Gated(Broken):
    """A store of keys whose first puts wait for the gate."""

    def __init__(self, gate: threading.Event):
        super().__init__(gate=gate)
        self.keys: set[bytes] = set()

    def put_many(self, items, traffic) -> int:
        super().put_many(items, traffic)
        self.keys |= {key for key, _ in items}
        return len(items)

    def remove(self, keys) -> int:
        self.keys -= set(keys)
        return len(keys)


def test_what_proves_wrong_while_it_is_queued_or_being_written_is_not_there_afterwards():
    gate = threading.Event()
    store = Gated(gate)
    behind = WriteBehind(store)  # pyright: ignore[reportArgumentType]
    for n in range(40):
        behind.put(key_of(n), PAYLOAD)
    until = time.monotonic() + 20
    while store.puts < len(behind._threads) and time.monotonic() < until:
        time.sleep(0.001)  # both threads are writing, the rest is queued
    assert store.puts == len(behind._threads)
    behind.remove([key_of(n) for n in range(39)])
    behind.put(key_of(0), PAYLOAD)  # computed again
    gate.set()
    assert behind.close(20) and behind.failed is None
    assert store.keys - {key_of(0)} == {key_of(39)}


def test_files_that_another_engine_collects_meanwhile_are_not_there(tmp_path, monkeypatch):
    store = open_store(StoreOptions(tmp_path / "kv", namespace=b"n" * 32), "posix")
    for n in range(6):
        store.put(key_of(n), PAYLOAD)
    listed = posix.PosixStore._files

    def vanishing(self):
        for i, path in enumerate(list(listed(self))):
            if i % 2:
                path.unlink()  # between the listing and the look at it
            yield path

    monkeypatch.setattr(posix.PosixStore, "_files", vanishing)
    assert store.collect(time.time()).files == 0
    assert store.stats().blocks == 2
    store.close()


def test_a_read_error_is_a_miss_that_counts_and_removes_nothing(tmp_path, monkeypatch):
    for backend in ("segment", "posix"):
        store = open_store(StoreOptions(tmp_path / backend, namespace=b"n" * 32), backend)
        store.put(key_of(1), PAYLOAD)

        def broken(fd, buffers, offset):
            raise OSError(5, "Input/output error")

        monkeypatch.setattr("os.preadv", broken)
        assert store.get([key_of(1)]) == [None] and store.read_errors == 1
        assert [c.problem for c in store.check()] == ["read failed: Input/output error"]
        monkeypatch.undo()
        assert store.get([key_of(1)]) == [PAYLOAD] and store.stats().corrupt == 0
        store.close()


def test_an_index_or_mount_that_fails_ends_a_match_without_an_error(tmp_path, monkeypatch):
    store = open_store(StoreOptions(tmp_path / "segment", namespace=b"n" * 32), "segment")

    def locked(keys):
        raise sqlite3.OperationalError("database is locked")

    monkeypatch.setattr(store._index, "find", locked)  # pyright: ignore[reportAttributeAccessIssue]
    assert store.match([key_of(1)]) == 0 and store.get([key_of(1), key_of(2)]) == [None, None]
    assert store.read_errors == 2
    store.close()
    store = open_store(StoreOptions(tmp_path / "posix", namespace=b"n" * 32), "posix")
    store.put(key_of(1), PAYLOAD)

    def stale(path):
        raise OSError(116, "Stale file handle")

    monkeypatch.setattr("deepinfer_engine.cache.store.posix.os.stat", stale)
    assert store.match([key_of(1)]) == 0 and store.read_errors == 1
    monkeypatch.undo()
    assert store.match([key_of(1)]) == 1
    store.close()
