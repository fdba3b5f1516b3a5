"""What every persistent tier promises: it may lose a block, it never hands out a wrong byte."""

from __future__ import annotations

import os
import random
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from deepinfer_engine.cache.store import segment
from deepinfer_engine.cache.store.index import Index
from deepinfer_engine.cache.store.interface import StoreOptions, backend_of, open_store
from deepinfer_engine.cache.store.record import PAGE, record_bytes
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.errors import ArtefactError, CapacityError, NotReadyError, UsageError

ROOT = Path(__file__).resolve().parents[3]
WRITER = Path(__file__).with_name("store_writer.py")
SIZE = 5 * 64
BACKENDS = ["segment", "posix"]
NAMESPACE = b"n" * 32


class Clock:
    """Seconds that a test sets."""

    def __init__(self, now: float = 1_800_000_000.0):
        self.now = now

    def __call__(self) -> float:
        return self.now


def key_of(number: int) -> bytes:
    return number.to_bytes(32, "little")


def payload_of(number: int, size: int = SIZE) -> Payload:
    return Payload(bytes((number * 131 + i) % 251 for i in range(64)) * (size // 64))


def options(path: Path, **changes) -> StoreOptions:
    return StoreOptions(**{"path": path / "kv", "namespace": NAMESPACE, **changes})


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_deletion_that_fails_is_told(backend, tmp_path, monkeypatch):
    store = open_store(options(tmp_path), backend)
    for n in range(2):
        store.put(key_of(n), payload_of(n))
    store.close()
    path = sorted(p for p in (tmp_path / "kv").rglob("*") if p.suffix in (".seg", ".kv"))[0]
    with path.open("r+b") as file:
        file.seek(PAGE + 7)
        file.write(b"\xff\xff\xff")
    store, real = open_store(options(tmp_path), backend), segment.open_direct

    def refused(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "unlink", refused)
    monkeypatch.setattr(segment, "open_direct", lambda p, how: refused() if how & os.O_WRONLY else real(p, how))
    with pytest.raises(NotReadyError, match="cannot be deleted"):
        list(store.check(repair=True))
    before = store.read_errors
    assert store.remove([key_of(0), key_of(1)]) == 0 and store.read_errors > before
    monkeypatch.undo()
    store.close()


@pytest.fixture(params=BACKENDS)
def backend(request):
    return request.param


def test_blocks_come_back_byte_for_byte_in_this_and_the_next_process(backend, tmp_path):
    sections = ((2, 100), (5, 220))
    store = open_store(options(tmp_path, sections=sections), backend)
    numbers = range(40)
    for n in numbers:
        payload = payload_of(n)
        assert store.put(key_of(n), Payload(payload.data, replayed=n % 3 == 0), "agent" if n % 2 else "chat")
    keys = [key_of(n) for n in [*numbers, 99]]
    expected = [Payload(payload_of(n).data, n % 3 == 0) for n in numbers]
    assert store.get(keys) == [*expected, None]
    assert store.match(keys) == 40 and store.match(keys[::-1]) == 0
    stats = store.stats()
    assert (stats.blocks, stats.hits, stats.misses, stats.puts) == (40, 40, 1, 40)
    store.close()
    again = open_store(options(tmp_path), backend)
    assert again.get(keys) == [*expected, None]
    assert again.match([key_of(3), key_of(77), key_of(4)]) == 1, "a hole ends the run"
    assert not again.put(key_of(1), payload_of(1), "agent"), "a put of a present block is no second copy"
    assert [c.problem for c in again.check()] == [""] * 40
    again.close()


def test_another_namespace_or_salt_never_sees_a_block(backend, tmp_path):
    from deepinfer_engine.cache.prefix import extend_keys

    store = open_store(options(tmp_path), backend)
    tokens = list(range(256))
    for key in extend_keys(NAMESPACE, [], tokens):
        store.put(key, payload_of(1))
    assert store.match(extend_keys(NAMESPACE, [], tokens)) == 2
    assert store.match(extend_keys(b"m" * 32, [], tokens)) == 0
    store.close()


def test_a_block_expires_its_lifetime_after_its_last_use(backend, tmp_path):
    clock = Clock()
    store = open_store(options(tmp_path, ttl_s={"agent": 3600, "chat": 36_000}), backend, clock)
    for n in range(4):
        store.put(key_of(n), payload_of(n), "chat")
    clock.now += 20_000  # past half: using a block renews it
    assert store.get([key_of(0)]) == [payload_of(0)]
    store.flush()
    clock.now += 17_000
    assert store.get([key_of(n) for n in range(4)]) == [payload_of(0), None, None, None]
    clock.now += 3600  # whole hours expire
    cleaned = store.collect(clock.now)
    assert cleaned.blocks >= 3 and cleaned.bytes > 0
    assert store.get([key_of(0)]) == [payload_of(0)]
    assert store.stats().blocks == 1
    clock.now += 50_000
    store.collect(clock.now)
    assert store.stats().blocks == store.stats().bytes == 0
    assert [p for p in (tmp_path / "kv").rglob("*") if p.suffix in (".seg", ".kv")] == []
    store.close()


def test_traffic_classes_have_their_own_lifetimes(backend, tmp_path):
    clock = Clock()
    store = open_store(options(tmp_path, ttl_s={"agent": 3600, "chat": 360_000}), backend, clock)
    store.put(key_of(1), payload_of(1), "agent")
    store.put(key_of(2), payload_of(2), "chat")
    clock.now += 3 * 3600
    store.collect(clock.now)
    assert store.get([key_of(1), key_of(2)]) == [None, payload_of(2)]
    store.close()


def test_collection_above_the_capacity_keeps_the_newest(backend, tmp_path):
    clock = Clock()
    size = record_bytes(SIZE)
    store = open_store(options(tmp_path, capacity=10 * size), backend, clock)
    for n in range(30):
        store.put(key_of(n), payload_of(n))
        clock.now += 3600  # a segment per hour
    store.flush()
    assert store.collect(clock.now).blocks == 21
    assert (store.stats().blocks, store.stats().bytes) == (9, 9 * size)
    assert store.get([key_of(29)]) == [payload_of(29)] and store.get([key_of(0)]) == [None]
    store.close()


def damage(path: Path, rng: random.Random, *, whole: int) -> None:
    """Flip one bit of a file below ``whole`` bytes."""
    with path.open("r+b") as file:
        at = rng.randrange(whole)
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << rng.randrange(8)]))


def test_a_flipped_bit_is_a_miss_wherever_it_is(backend, tmp_path):
    rng = random.Random(1)
    for trial in range(12):
        store = open_store(options(tmp_path / str(trial)), backend)
        for n in range(3):
            store.put(key_of(n), payload_of(n))
        store.close()
        files = sorted(p for p in (tmp_path / str(trial) / "kv").rglob("*") if p.suffix in (".seg", ".kv"))
        for path in files:
            meaningful = PAGE + SIZE  # the padding behind a payload proves nothing and means nothing
            damage(path, rng, whole=min(path.stat().st_size, meaningful))
        store = open_store(options(tmp_path / str(trial)), backend)
        got = store.get([key_of(n) for n in range(3)])
        bad = sum(p is None for p in got)
        assert bad == (3 if backend == "posix" else 1)
        assert all(p in (None, payload_of(n)) for n, p in enumerate(got))
        assert store.stats().corrupt == bad
        assert store.get([key_of(0)])[0] is None and store.stats().corrupt == bad, "a wrong record is read once"
        assert store.put(key_of(0), payload_of(0)) and store.get([key_of(0)]) == [payload_of(0)]
        store.close()


def test_check_reports_wrong_records_and_deletes_them_when_asked(backend, tmp_path):
    store = open_store(options(tmp_path), backend)
    for n in range(5):
        store.put(key_of(n), payload_of(n))
    store.close()
    path = sorted(p for p in (tmp_path / "kv").rglob("*") if p.suffix in (".seg", ".kv"))[0]
    with path.open("r+b") as file:
        file.seek(PAGE + 7)
        file.write(b"\xff\xff\xff")
    store = open_store(options(tmp_path), backend)
    for repair in (False, False, True):
        assert sorted(c.problem for c in store.check(repair=repair)) == [""] * 4 + ["payload CRC differs"]
    assert [c.problem for c in store.check()] == [""] * 4
    assert sum(p is None for p in store.get([key_of(n) for n in range(5)])) == 1 and store.stats().corrupt == 0
    store.close()


def test_unreadable_records_are_deleted_when_asked(backend, tmp_path, monkeypatch):
    store = open_store(options(tmp_path), backend)
    for n in range(3):
        store.put(key_of(n), payload_of(n))
    real, bad = os.preadv, iter([False, True, False])

    def failing(fd, buffers, offset):
        if next(bad):
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    assert sorted(c.problem for c in store.check(repair=True)) == ["", "", "read failed: Input/output error"]
    monkeypatch.undo()
    assert sum(p is None for p in store.get([key_of(n) for n in range(3)])) == 1
    store.close()


def test_removed_blocks_stay_gone_when_the_index_is_lost(backend, tmp_path):
    store = open_store(options(tmp_path), backend)
    for n in range(6):
        store.put(key_of(n), payload_of(n))
    assert store.remove([key_of(1), key_of(4), key_of(77)]) == 2
    expected = [None if n in (1, 4) else payload_of(n) for n in range(6)]
    assert store.get([key_of(n) for n in range(6)]) == expected
    assert store.match([key_of(n) for n in range(6)]) == 1
    store.close()
    for name in ("index.db", "index.db-wal", "index.db-shm"):
        (tmp_path / "kv" / name).unlink(missing_ok=True)
    store = open_store(options(tmp_path), backend)
    assert store.get([key_of(n) for n in range(6)]) == expected
    assert store.put(key_of(1), payload_of(1)) and store.get([key_of(1)]) == [payload_of(1)]
    store.close()


def test_puts_in_one_call_are_puts_one_by_one(backend, tmp_path):
    clock = Clock()
    store = open_store(options(tmp_path), backend, clock)
    assert store.put(key_of(3), payload_of(3))
    items = [(key_of(n), payload_of(n, 64 * (1 + n % 3 * 70))) for n in range(30)]
    items[3] = (key_of(3), payload_of(3))
    assert store.put_many([*items, items[7]]) == 29, "one was there, one comes twice"
    assert store.get([key for key, _ in items]) == [payload for _, payload in items]
    assert store.put_many(items) == 0
    assert [c.problem for c in store.check()] == [""] * 30
    store.close()
    again = open_store(options(tmp_path), backend, clock)
    assert again.get([key for key, _ in items]) == [payload for _, payload in items]
    again.close()


def test_a_call_of_many_blocks_goes_on_in_the_next_segment(tmp_path, monkeypatch):
    from deepinfer_engine.cache.store import segment

    monkeypatch.setattr(segment, "_SEGMENT_SLOTS", 5)
    store = open_store(options(tmp_path), "segment")
    assert store.put_many([(key_of(n), payload_of(n)) for n in range(23)]) == 23
    assert store.get([key_of(n) for n in range(23)]) == [payload_of(n) for n in range(23)]
    assert store.stats().files == 5
    store.close()


SECTIONS = ((2, 5000), (5, 120), (7, 9000))


def test_sections_arrive_in_the_order_of_layers_and_prove_themselves(backend, tmp_path):
    """Bits flipped at random: what a section hands out is right, and a block that fails once is gone from then on."""
    rng, size = random.Random(5), sum(bytes_ for _, bytes_ in SECTIONS)
    payloads = [Payload(rng.randbytes(size), replayed=n % 3 == 0) for n in range(24)]
    keys = [key_of(n) for n in range(25)]
    cuts = (0, 5000, 5120, 14120)
    with_sections = options(tmp_path, sections=SECTIONS)
    store = open_store(with_sections, backend)
    store.put_many(list(zip(keys, payloads, strict=False)))
    store.close()
    files = sorted(p for p in (tmp_path / "kv").rglob("*") if p.suffix in (".seg", ".kv"))
    for _ in range(12):
        damage(rng.choice(files), rng, whole=24 * record_bytes(size) if backend == "segment" else PAGE + size)
    store = open_store(with_sections, backend)
    got: list[list[Payload | None]] = []
    store.get_sections(keys, lambda index, found: got.append(found) if index == len(got) else None)
    assert len(got) == 3 and [g[24] for g in got] == [None] * 3
    for index, found in enumerate(got):
        for n, payload in enumerate(payloads):
            if found[n] is not None:
                assert found[n] == Payload(payload.data[cuts[index] : cuts[index + 1]], payload.replayed)
            if index and got[index - 1][n] is None:
                assert found[n] is None
    bad = sum(payload is None for payload in got[2][:24])
    assert 0 < bad < 24 and (store.stats().hits, store.stats().misses) == (24 - bad, bad + 1)
    whole = store.get(keys[:24])
    assert all(w in (None, p) for w, p in zip(whole, payloads, strict=True))
    assert [w is None for w in whole] == [p is None for p in got[2][:24]], "sections miss no bad byte of the payload"
    store.close()


def test_torn_pages_of_a_power_cut_are_never_served(tmp_path):
    rng = random.Random(2)
    store = open_store(options(tmp_path), "segment")
    size, n_records = 3 * PAGE, 30
    for n in range(n_records):
        store.put(key_of(n), payload_of(n, size))
    store.close()
    (path,) = (tmp_path / "kv").rglob("*.seg")
    torn = rng.sample(range(n_records), 8)
    with path.open("r+b") as file:
        for n in torn:
            file.seek(n * record_bytes(size) + PAGE * rng.randrange(4))
            file.write(bytes(PAGE))
    for index_too in (False, True):
        if index_too:
            for name in ("index.db", "index.db-wal", "index.db-shm"):
                (tmp_path / "kv" / name).unlink(missing_ok=True)
        store = open_store(options(tmp_path), "segment")
        got = store.get([key_of(n) for n in range(n_records)])
        assert [p is None for p in got] == [n in torn for n in range(n_records)]
        assert all(p in (None, payload_of(n, size)) for n, p in enumerate(got))
        assert store.stats().recovered == (n_records - len(torn) if index_too else 0)
        store.close()


def test_threads_share_a_store(backend, tmp_path):
    store = open_store(options(tmp_path), backend)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(60):
            n = rng.randrange(25)  # several threads put the same keys
            store.put(key_of(n), payload_of(n))
            if store.get([key_of(n)]) != [payload_of(n)]:
                wrong.append(n)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert store.stats().blocks == 25
    store.close()


def spawn(backend: str, path: Path, first: int, size: int = SIZE) -> subprocess.Popen[bytes]:
    env = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'engine'}:{ROOT / 'kernels'}"}
    command = [sys.executable, str(WRITER), backend, str(path / "kv"), str(first), str(size)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env=env)


def test_readers_see_what_live_writers_of_other_processes_wrote(backend, tmp_path):
    writers = [spawn(backend, tmp_path, first) for first in (0, 100_000)]
    acknowledged = []
    for writer in writers:
        assert writer.stdout is not None
        acknowledged += [int(writer.stdout.readline()) for _ in range(80)]
    reader = open_store(options(tmp_path), backend)
    got = {n: reader.get([key_of(n)])[0] for n in acknowledged}
    assert all(p in (None, payload_of(n)) for n, p in got.items())
    # rows of the index are at most one batch behind a writer that goes on writing
    deadline = time.monotonic() + 10
    while reader.match([key_of(n) for n in acknowledged]) < 160 and time.monotonic() < deadline:
        time.sleep(0.05)
    for writer in writers:
        writer.kill()
        writer.wait()
    assert reader.get([key_of(n) for n in acknowledged]) == [payload_of(n) for n in acknowledged]
    reader.close()


def kill_at_a_random_point(backend: str, path: Path, rng: random.Random, first: int) -> list[int]:
    """Numbers a writer acknowledged before SIGKILL hit it."""
    writer = spawn(backend, path, first)
    assert writer.stdout is not None
    seen = [int(writer.stdout.readline())]
    time.sleep(rng.random() * 0.12)
    os.kill(writer.pid, signal.SIGKILL)
    rest = writer.stdout.read().split(b"\n")[:-1]  # a torn last line was not acknowledged
    writer.wait()
    return [*seen, *(int(line) for line in rest)]


def crash_test(backend: str, path: Path, kills: int) -> int:
    rng = random.Random(kills)
    lost = total = 0
    acknowledged: list[int] = []
    for kill in range(kills):
        acknowledged += kill_at_a_random_point(backend, path, rng, 1_000_000 * kill)
        if kill % 4 == 3 or kill == kills - 1:
            store = open_store(options(path), backend)
            got = store.get([key_of(n) for n in acknowledged])
            lost += sum(p is None for p in got)
            assert all(p in (None, payload_of(n)) for n, p in zip(acknowledged, got, strict=True)), "a wrong byte"
            store.close()
            total += len(acknowledged)
            acknowledged = []
    assert lost == 0
    return total


def test_kill_9_at_random_points_loses_no_acknowledged_block(backend, tmp_path):
    assert crash_test(backend, tmp_path, 8 if backend == "segment" else 3) >= 3


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_kill_9_at_100_random_points_loses_no_acknowledged_block(backend, tmp_path):
    assert crash_test(backend, tmp_path, 100) >= 100


def test_a_segment_survives_the_loss_of_its_index(tmp_path):
    store = open_store(options(tmp_path), "segment")
    for n in range(10):
        store.put(key_of(n), payload_of(n), "agent")
    store.close()
    for name in ("index.db", "index.db-wal", "index.db-shm"):
        (tmp_path / "kv" / name).unlink(missing_ok=True)
    store = open_store(options(tmp_path), "segment")
    assert store.get([key_of(n) for n in range(10)]) == [payload_of(n) for n in range(10)]
    assert store.stats().recovered == 10
    store.close()


def test_folders_of_others_are_refused(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / "letter.txt").write_text("dear")
    with pytest.raises(ArtefactError, match="not empty and not a KV store"):
        open_store(options(tmp_path), "segment")
    open_store(options(tmp_path / "a"), "segment").close()
    with pytest.raises(ArtefactError, match="a segment store, the profile asks for posix"):
        open_store(options(tmp_path / "a"), "posix")
    assert backend_of(tmp_path / "a" / "kv") == "segment" and backend_of(tmp_path) is None
    (tmp_path / "a" / "kv" / "index.db").write_bytes(b"garbage" * 100)
    with pytest.raises(ArtefactError, match="the index cannot be read"):
        open_store(options(tmp_path / "a"), "segment")


def test_processes_that_make_a_store_at_once_do_not_refuse_each_other(tmp_path):
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv" / ".store.json.12345.part").write_text("{")  # another process is about to name it
    open_store(options(tmp_path), "segment").close()
    for trial in range(4):
        writers = [spawn("segment", tmp_path / str(trial), first) for first in (0, 100_000, 200_000)]
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline(), "it ended before it acknowledged a block"
            writer.kill()
            writer.wait()


def test_a_store_without_a_namespace_takes_no_blocks(backend, tmp_path):
    store = open_store(options(tmp_path, namespace=None), backend)
    with pytest.raises(UsageError, match="without a namespace"):
        store.put(key_of(1), payload_of(1))
    store.close()


def test_no_room_is_an_error_with_the_path(backend, tmp_path, monkeypatch):
    store = open_store(options(tmp_path), backend)
    store.put(key_of(0), payload_of(0))
    monkeypatch.setattr(os, "pwritev", lambda fd, data, offset: 10)
    with pytest.raises(CapacityError, match="cannot be written"):
        store.put(key_of(1), payload_of(1))
    monkeypatch.undo()
    assert store.get([key_of(0), key_of(1)]) == [payload_of(0), None]
    assert store.put(key_of(1), payload_of(1))
    store.close()


def test_an_index_that_another_process_is_creating_is_waited_for(tmp_path):
    """SQLite refuses the turn to WAL at once while a writer holds the file, whatever the busy time-out says."""
    holder = sqlite3.connect(tmp_path / "index.db", isolation_level=None, check_same_thread=False)
    holder.execute("CREATE TABLE other (x)")
    holder.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.2, lambda: holder.execute("COMMIT"))
    release.start()
    Index(tmp_path / "index.db").close()
    release.join()
    holder.close()
