"""Sharing under pressure: random requests on a cache of names, where every row checks that it reads its own past."""

from __future__ import annotations

import random
import threading
import time

import pytest

from deepinfer_engine.cache.prefix import extend_keys
from deepinfer_engine.cache.replay import ReplayShape
from deepinfer_engine.cache.tiers import HostBlocks, Tiers, WindowPool
from deepinfer_engine.sched.limits import Limits
from deepinfer_engine.sched.reuse import _Fetch
from deepinfer_engine.sched.rows import plan_decode
from deepinfer_engine.sched.scheduler import Scheduler
from deepinfer_engine.types import Move, Request, SamplingParams, Sequence, StepPlan

B, W, ROOT = 128, 16, b"root"


class NamedCache:
    """Blocks and windows that hold names instead of numbers; ``run`` executes a plan and checks every read."""

    def __init__(self) -> None:
        self.blocks: dict[int, bytes] = {}
        self.moved: list[tuple[Move, bytes]] = []
        self.windows: dict[int, tuple[bytes, int]] = {}  # slot → (key of the block that ends there, end)

    def run(self, plan: StepPlan, scheduler: Scheduler) -> dict[int, int]:
        moved = []
        for move in plan.before:
            if move.kind == "import_block":
                self.blocks[move.at] = move.data
            elif move.kind == "import_window":
                self.windows[move.at] = (move.data, move.end)
            else:
                assert self.blocks[move.at] == move.key, "a kept block was overwritten before it was exported"
                moved.append((move, self.blocks[move.at]))
        tokens = {}
        for row in plan.rows:
            seq = scheduler.running[row.seq_id]
            self.check(seq, row.start)
            keys = extend_keys(ROOT, [], seq.token_ids[: row.start + row.count])
            assert seq.span is not None
            written = row.start if row.start >= seq.span.reused else seq.span.reused
            for j in range(written // B, -(-(row.start + row.count) // B)):
                self.blocks[seq.block_ids[j]] = keys[j] if j < len(keys) else b"partial"
            if row.sample:
                tokens[row.seq_id] = 1000 + (len(seq.token_ids) * 31 + seq.token_ids[0]) % 97
        for move in plan.after:
            data = self.blocks[move.at] if move.kind == "export_block" else move.key
            assert data == move.key
            moved.append((move, data))
        self.moved = moved
        return tokens

    def finish(self, plan: StepPlan, scheduler: Scheduler) -> None:
        """Run a plan, then commit its draws and keep its exports as the engine does."""
        drawn = scheduler.commit(plan, self.run(plan, scheduler))
        scheduler.reuse.keep(self.moved, [d.seq for d in drawn if d.reason != "error"])

    def check(self, seq: Sequence, start: int) -> None:
        """All whole blocks below the row hold this sequence's past; a hit with windows has its own windows."""
        span = seq.span
        assert span is not None
        keys = extend_keys(ROOT, [], seq.token_ids[: max(start, span.reused)])
        assert [self.blocks[b] for b in seq.block_ids[: len(keys)]] == keys
        if start == span.start and span.window_end is not None:
            assert self.windows[seq.slot] == (keys[span.reused // B - 1], span.window_end)


def workload(rng: random.Random) -> list[Request]:
    """Prompts that branch from few stems, some continuing others."""
    stems = [[rng.randrange(5, 900) for _ in range(700)] for _ in range(2)]
    out = []
    for i in range(14):
        stem = rng.choice(stems)
        own = [rng.randrange(5, 900) for _ in range(rng.randrange(1, 200))]
        ids = stem[: rng.choice([0, 100, 256, 300, 512, 640])] + own
        out.append(Request(f"r{i}", tuple(ids), SamplingParams(max_tokens=rng.randrange(1, 200), ignore_eos=True)))
    return out


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(("encoder", "host", "windows"), [("bounded", 0, 0), ("off", 0, 4096), ("bounded", 320, 4096)])
def test_every_row_reads_its_own_past(seed, encoder, host, windows):
    rng = random.Random(seed)
    shape = ReplayShape(W, 6, 9, 5, "bounded", encoder)
    tiers = Tiers(ROOT, HostBlocks(host), WindowPool(windows, 1e9, shape.snapshot_layers))
    dp = rng.choice([1, 2])
    scheduler = Scheduler(Limits(dp, 4, rng.randrange(9, 16), 256, 2000, 1), shape, tiers)
    cache, todo, steps = NamedCache(), workload(rng), 0
    total = len(todo)
    sequences = []
    while todo or scheduler.busy:
        if todo and rng.random() < 0.2:
            request = todo.pop(0)
            sequences.append(Sequence(request, list(request.token_ids), len(request.token_ids), seed=0))
            scheduler.submit(sequences[-1])
        if scheduler.running and rng.random() < 0.01:
            scheduler.abort(rng.choice(list(scheduler.running)))
        if scheduler.running and rng.random() < 0.02:
            scheduler._preempt(scheduler.running[rng.choice(list(scheduler.running))])
        scheduler._mean_new = 1.0  # the router expects short answers and admits more than fits
        plan = scheduler.schedule()
        cache.finish(plan, scheduler)
        if steps % 16 == 0:
            scheduler.verify()
        steps += 1
        assert steps < 20_000, "nobody moves"
    assert len(sequences) == total and all(s.state == "finished" for s in sequences)
    assert all(s.num_generated == s.request.sampling.max_tokens or s.finish_reason == "abort" for s in sequences)
    scheduler.verify()


def test_a_full_cache_preempts_by_what_victims_really_free():
    """Sequences that share a stem give back only what is theirs alone; everybody finishes all the same."""
    hits = preemptions = 0
    for seed in range(6):
        rng = random.Random(seed)
        stem = [rng.randrange(5, 900) for _ in range(256)]
        shape = ReplayShape(W, 6, 9, 5, "bounded", "bounded")
        tiers = Tiers(ROOT, HostBlocks(0), WindowPool(0, 1.0, shape.snapshot_layers))
        scheduler = Scheduler(Limits(1, 4, 9, 256, 2000, 1), shape, tiers)
        cache, sampling = NamedCache(), SamplingParams(max_tokens=300, ignore_eos=True)
        for i in range(8):
            ids = [*stem, *(rng.randrange(5, 900) for _ in range(rng.randrange(30, 90)))]
            scheduler.submit(Sequence(Request(f"r{i}", tuple(ids), sampling), ids, len(ids), seed=0))
        while scheduler.busy:
            scheduler._mean_new = 1.0  # the router expects short answers
            plan = scheduler.schedule()
            cache.finish(plan, scheduler)
        hits += scheduler.reuse.stats.hits
        preemptions += scheduler.preemptions
    assert hits > 10 and preemptions > 3


def test_a_victim_frees_what_nobody_else_uses():
    """Three sequences need a block; each victim shares two of its three, so one victim is not enough."""
    running = []
    for uid in range(4):
        seq = Sequence(Request(f"r{uid}", (1,) * 384, SamplingParams(max_tokens=50)), [1] * 385, 384, seed=0, uid=uid)
        seq.dp_rank, seq.num_computed, seq.block_ids = 0, 384, [1, 2, 3 + uid]
        running.append(seq)
    running[3].block_ids = [1, 2, 6, 7]  # has its next block already
    users = {1: 4, 2: 4}
    plan = plan_decode(running, [0], lambda block: users.get(block, 1))
    assert [s.uid for s in plan.preempt] == [3, 2]
    assert [s.uid for s in plan.grow] == [0, 1]
    alone = plan_decode(running, [0])
    assert [s.uid for s in alone.preempt] == [3], "without sharing its four blocks are enough"


class SlowStore:
    """A store that has every block and reads one batch at a time, when told."""

    read_errors = 0

    def __init__(self) -> None:
        self.begun, self.gate, self.reads = threading.Event(), threading.Event(), 0

    def match(self, keys):
        return len(keys)

    def get(self, keys):
        self.reads += 1
        self.begun.set()
        self.gate.wait(20)
        return [None] * len(keys)

    def close(self) -> None: ...


def test_closing_cancels_fetches_that_have_not_begun():
    store, shape = SlowStore(), ReplayShape(W, 6, 9, 5, "bounded", "bounded")
    tiers = Tiers(ROOT, HostBlocks(0), WindowPool(0, 1.0, shape.snapshot_layers), store)  # pyright: ignore[reportArgumentType]
    reuse = Scheduler(Limits(1, 4, 20, 256, 2000, 1), shape, tiers).reuse
    for uid in range(5):
        ids = [uid + 5] * 300
        reuse.begin(Sequence(Request(f"r{uid}", tuple(ids), SamplingParams(max_tokens=5)), ids, 300, seed=0, uid=uid))
    assert store.begun.wait(20)
    closing = threading.Thread(target=reuse.close)
    closing.start()
    deadline = time.monotonic() + 20
    while not all(f.job and f.job.cancelled() for uid, f in reuse._fetches.items() if uid):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    store.gate.set()
    closing.join(20)
    assert not closing.is_alive() and store.reads == 1


def test_a_sequence_starts_when_its_later_sections_are_expected_in_time():
    """Sections of 1, 1 and 2 parts; the first took 10 ms, so the others are expected at 20 and 40 ms after begin.

    100 rows of 1 ms over 10 layers come to layer 2 after 20 ms and to layer 5 after 50 ms.
    """
    fetch = _Fetch([bytes(32)], ((0, 100), (2, 100), (5, 200)), 0.0, 9.0, 100)
    now = [0.0]

    class Store:
        def get_sections(self, keys, arrived):
            now[0] = 0.010
            arrived(0, [None])

    fetch.read(Store(), lambda: now[0])  # pyright: ignore[reportArgumentType]
    assert fetch.parts[0].done() and not fetch.done
    assert fetch.lead_s(0.010, 1e-3, 10) == 0.0, "there at 20 and 40, needed at 30 and 60"
    assert fetch.lead_s(0.010, 1e-4, 10) == pytest.approx(0.040 - 0.010 - 0.005), "ten times as fast: wait for the last"
    assert fetch.lead_s(0.010, 0.0, 10) == pytest.approx(0.030), "nothing is known of the forward: hide nothing"
    assert fetch.lead_s(0.036, 1e-4, 10) == 0.0
    for index, part in enumerate(fetch.parts):
        if index:
            part.set_result([None])
    assert fetch.lead_s(0.010, 1e-4, 10) == 0.0
