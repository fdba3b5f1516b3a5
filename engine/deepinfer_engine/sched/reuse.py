"""``Reuse``: what a sequence takes over instead of computing it, and what it leaves for others. Decides; moves nothing.

It owns the blocks of every rank and knows the tiers below. Placing a sequence matches its prompt, plans its prefill
(``cache.replay``) and lists the moves that must run before its first row: payloads to import, kept blocks to export
before they are overwritten. Later it names blocks as they fill, and asks for window KV at pivots. The runner executes
the moves in step order, so everything named here is there when a later step reads it.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Items
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from dataclasses import dataclass, field, replace

from deepinfer_engine.cache.pivots import due_pivot
from deepinfer_engine.cache.pool import IdPool
from deepinfer_engine.cache.prefix import DeviceBlocks, Key, extend_keys
from deepinfer_engine.cache.replay import ReplayShape, ReplaySpan, plan_prefill
from deepinfer_engine.cache.store.behind import DEPTH, WriteBehind
from deepinfer_engine.cache.store.interface import BlockStore
from deepinfer_engine.cache.tiers import Payload, PrefixMatch, Tiers, match_prefix
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import DeepInferError
from deepinfer_engine.types import Arrival, Move, Sequence


class _Fetch:
    """Blocks of a waiting sequence on their way from the store: whole, or section by section.

    ``parts[i]`` is done when section i of all of them is there. ``rows``: tokens left to compute beside them.
    """

    def __init__(self, keys: list[Key], sources: Items[tuple[int, int]], began: float, deadline: float, rows: int):
        self.keys = keys
        self.sources = sources
        self.began = began
        self.deadline = deadline
        self.rows = rows
        self.parts: list[Future[list[Payload | None]]] = [Future() for _ in range(max(1, len(sources)))]
        self.job: Future[None] | None = None
        self._first_s = 0.0

    @property
    def done(self) -> bool:
        return all(part.done() for part in self.parts)

    def read(self, store: BlockStore, clock: Callable[[], float]) -> None:
        """Run on the reading thread."""

        def arrived(index: int, found: list[Payload | None]) -> None:
            if index == 0:
                self._first_s = clock() - self.began
            self.parts[index].set_result(found)

        try:
            if self.sources:
                store.get_sections(self.keys, arrived)
            else:
                arrived(0, store.get(self.keys))
        except Exception as exc:  # the boundary of a thread: whoever waits hears of it
            for part in self.parts:
                if not part.done():
                    part.set_exception(exc)

    def lead_s(self, now: float, row_s: float, layers: int) -> float:
        """How long to wait yet, so that every later section is expected before the forward comes to its layer.

        Sections are expected at the rate of the first; a forward takes ``row_s`` a row, evenly over ``layers``.
        """
        if self.done or not self.sources:
            return 0.0
        wait, read = 0.0, 0
        for layer, size in self.sources:
            read += size
            there = self.began + self._first_s * read / self.sources[0][1]
            wait = max(wait, there - now - self.rows * row_s * layer / layers)
        return wait


@dataclass
class ReuseStats:
    """Counts since the start."""

    hits: int = 0
    cached_tokens: int = 0
    replayed_tokens: int = 0
    fetch_late: int = 0
    fetch_failed: int = 0
    blocks_lost: int = 0
    unproven_dropped: int = 0
    windows_kept: int = 0


@dataclass
class Reuse:
    """Blocks of ``dp`` ranks, ``blocks`` each. ``tiers`` None: nothing is shared or kept."""

    shape: ReplayShape | None
    dp: int
    blocks: int
    tiers: Tiers | None = None
    clock: Callable[[], float] = time.monotonic
    stats: ReuseStats = field(default_factory=ReuseStats)

    def __post_init__(self) -> None:
        self.device = [DeviceBlocks(IdPool(self.blocks, "blocks")) for _ in range(self.dp)]
        self._before: list[Move] = []
        self._after: list[Move] = []
        self._fetches: dict[int, _Fetch] = {}
        self._staged: dict[int, _Staged] = {}
        self._row_s = 0.0
        # exports by (uid, generation), held until a finite draw shows that what they were computed with is sound
        self._unproven: dict[tuple[int, int], list[tuple[Move, Payload]]] = {}
        self._ended: list[tuple[int, int]] = []
        self._spilling: set[Key] = set()
        self._reader = ThreadPoolExecutor(1, "kv-fetch") if self.tiers is not None and self.tiers.store else None
        self._behind = WriteBehind(self.tiers.store) if self.tiers is not None and self.tiers.store else None

    # ----------------------------------------------------------------- fetch

    def begin(self, seq: Sequence) -> None:
        """A new sequence: start reading what only the store has. Never waits."""
        tiers = self.tiers
        if tiers is None:
            return
        extend_keys(tiers.root, seq.keys, seq.token_ids[: seq.num_prompt])
        if tiers.store is None or self._reader is None:
            return
        near = max(len(d.match(seq.keys)) for d in self.device)
        keys = [k for k in seq.keys[near:] if k not in tiers.host]
        try:
            keys = keys[: tiers.store.match(keys)]
        except (OSError, sqlite3.Error):
            self.stats.fetch_failed += 1
            return
        if keys:
            now, rows = self.clock(), seq.num_prompt - (near + len(keys)) * BLOCK_TOKENS
            fetch = _Fetch(keys, tiers.sources, now, now + tiers.fetch_s, rows)
            fetch.job = self._reader.submit(fetch.read, tiers.store, self.clock)
            self._fetches[seq.uid] = fetch

    def ready(self, seq: Sequence) -> bool:
        """Whether a waiting sequence may be placed: what it needs first is there and the rest in time, or too late."""
        fetch = self._fetches.get(seq.uid)
        if fetch is None:
            return True
        first, now = fetch.parts[0], self.clock()
        if now < fetch.deadline and not (first.done() and self._lead_s(fetch, now) <= 0):
            return False
        del self._fetches[seq.uid]
        if not (first.done() and (fetch.done or now < fetch.deadline)):
            self.stats.fetch_late += 1
            return True
        if first.exception() is not None:
            self.stats.fetch_failed += 1
            return True
        self._staged[seq.uid] = _Staged(fetch)
        return True

    def _lead_s(self, fetch: _Fetch, now: float) -> float:
        return fetch.lead_s(now, self._row_s, 1 if self.shape is None else self.shape.layers)

    def observe(self, rows: int, seconds: float) -> None:
        """A step of ``rows`` took so long: what may be hidden behind the next one."""
        if rows:
            self._row_s += 0.25 * (seconds / rows - self._row_s)

    def wait(self) -> None:
        """Sleep until something on its way arrives, is late, or need not be waited for any longer."""
        now, until, parts = self.clock(), [], []
        for fetch in self._fetches.values():
            until.append(fetch.deadline - now)
            if fetch.parts[0].done():
                until.append(self._lead_s(fetch, now))
            parts += [part for part in fetch.parts if not part.done()][:1]
        if until:
            wait_for(parts, max(0.0, min(until)), FIRST_COMPLETED)

    # ----------------------------------------------------------------- place

    def place(self, seq: Sequence) -> None:
        """Give a sequence its blocks on its rank and its plan: shared ones first, then fetched, then empty ones."""
        device, base = self.device[seq.dp_rank], seq.dp_rank * self.blocks
        found, staged, now = PrefixMatch(), self._staged.pop(seq.uid, _Staged(None)), self.clock()
        if self.tiers is not None:
            self._unproven[_owner(seq)] = []
            extend_keys(self.tiers.root, seq.keys, seq.token_ids)
            found = match_prefix(seq.keys, device, self.tiers.host, staged, self.tiers.windows, now)
        need = -(-len(seq.token_ids) // BLOCK_TOKENS)
        if self.shape is None:
            seq.block_ids = [base + b for b in self._take(device, base, need)]
            return
        seq.span = self._plan(self.shape, seq, found)
        reused = seq.span.reused // BLOCK_TOKENS
        shared = [b for b in found.blocks[:reused] if b is not None]
        device.share(shared)
        fresh = iter(self._take(device, base, need - len(shared)))
        blocks = [b if b is not None else next(fresh) for b in found.blocks[:reused]]
        coming: dict[Key, int] = {}
        for j, block in enumerate(found.blocks[:reused]):
            if block is None and not self._import(seq.keys[j], blocks[j], base, device, staged):
                coming[seq.keys[j]] = base + blocks[j]
        if coming:
            self._before.append(self._arrival(coming, staged))
        seq.block_ids = [base + b for b in [*blocks, *fresh]]
        seq.published, seq.windowed = reused, seq.span.start
        if seq.span.window_end is not None:
            assert self.tiers is not None
            window = self.tiers.windows.get(seq.keys[reused - 1], now)
            assert window is not None, "it was there when the plan was made"
            self._before.append(Move("import_window", seq.slot, seq.span.window_end, data=window.data))
        self.stats.hits += reused > 0
        self.stats.cached_tokens += seq.span.reused
        self.stats.replayed_tokens += seq.span.replayed

    def _plan(self, shape: ReplayShape, seq: Sequence, found: PrefixMatch) -> ReplaySpan:
        """A preempted sequence gets the plan it had, or one that computes the same: never a new approximation."""
        hit, before = found.hit_tokens, seq.span
        if before is not None:
            if before.mode == "replay" and hit >= before.reused:
                hit = before.reused
            else:
                shape = replace(shape, encoder="off")
        return plan_prefill(shape, seq.num_prompt, hit=hit, windows_at=found.windows_at, approximate=found.approximate)

    def _import(self, key: Key, block: int, base: int, device: DeviceBlocks, staged: _Staged) -> bool:
        """Name a block that is taken over and list its move; False when it arrives section by section."""
        assert self.tiers is not None
        whole = self.tiers.host.get(key) if staged.by_section or key not in staged.held else staged.held[key]
        payload = whole or staged.held.get(key)
        assert payload is not None, "it was there when the plan was made"
        device.publish(block, key, replayed=payload.replayed)
        if whole is not None:
            self._before.append(Move("import_block", base + block, data=whole.data))
        return whole is not None

    def _arrival(self, blocks: dict[Key, int], staged: _Staged) -> Move:
        """The move of blocks of which the first section is there and the others are on their way."""
        fetch = staged.fetch
        assert fetch is not None
        place = {key: i for i, key in enumerate(fetch.keys)}
        wanted = [place[key] for key in blocks]

        def take(index: int) -> list[bytes | None]:
            try:
                found = fetch.parts[index].result(max(0.0, fetch.deadline - self.clock()))
            except TimeoutError:
                self.stats.fetch_late += 1
                return [None] * len(wanted)
            except Exception:  # the reading thread's error: a miss as well
                self.stats.fetch_failed += 1
                return [None] * len(wanted)
            return [None if (payload := found[i]) is None else payload.data for i in wanted]

        sources = tuple(layer for layer, _ in fetch.sources)
        return Move("import_arrival", min(blocks.values()), arrival=Arrival(tuple(blocks.values()), sources, take))

    def _take(self, device: DeviceBlocks, base: int, count: int) -> list[int]:
        blocks, spilled = device.take(count)
        if self.tiers is not None and self.tiers.host.capacity:
            wanted = [s for s in spilled if s.key not in self.tiers.host]
            self._before += [Move("export_block", base + s.block, key=s.key, replayed=s.replayed) for s in wanted]
            self._spilling.update(s.key for s in wanted)
        return blocks

    def grow(self, seq: Sequence, count: int) -> None:
        """``count`` more empty blocks."""
        base = seq.dp_rank * self.blocks
        seq.block_ids.extend(base + b for b in self._take(self.device[seq.dp_rank], base, count))

    # --------------------------------------------------------------- publish

    def advance(self, seq: Sequence) -> None:
        """After rows of a sequence are planned: name the blocks they fill, ask for the windows they pass."""
        tiers = self.tiers
        if tiers is None:
            return
        known = min(seq.num_computed, len(seq.token_ids))
        replayed = seq.span is not None and seq.span.lineage == "replayed"
        if known // BLOCK_TOKENS > seq.published:
            extend_keys(tiers.root, seq.keys, seq.token_ids[:known])
            device, base = self.device[seq.dp_rank], seq.dp_rank * self.blocks
            while seq.published < known // BLOCK_TOKENS:
                block, key = seq.block_ids[seq.published], seq.keys[seq.published]
                fresh = device.publish(block - base, key, replayed=replayed)
                if fresh and tiers.store is not None:
                    self._after.append(
                        Move("export_block", block, key=key, replayed=replayed, store=True, owner=_owner(seq))
                    )
                seq.published += 1
        pivot = due_pivot(seq.windowed, known)
        # the rings hold the windows before a pivot until more than the rollback rows follow
        assert self.shape is not None
        if pivot is not None and seq.num_computed + seq.ahead - pivot <= self.shape.slack and tiers.windows.capacity:
            seq.windowed = pivot
            key = seq.keys[pivot // BLOCK_TOKENS - 1]
            if not (replayed and tiers.windows.strict) and not tiers.windows.has(key, self.clock()):
                self._after.append(
                    Move("export_window", seq.slot, pivot, key=key, replayed=replayed, owner=_owner(seq))
                )

    def stop(self, seq: Sequence) -> int:
        """Where a prefill chunk ends so that the windows there can be kept; 0: anywhere."""
        if self.tiers is None or not self.tiers.windows.capacity or seq.span is None:
            return 0
        return seq.span.keep_windows_at

    def users(self, block: int) -> int:
        """Sequences that use a block, by its number in the store that all virtual ranks share."""
        rank = (block - 1) // self.blocks
        return self.device[rank].users(block - rank * self.blocks)

    def moves(self, runs: bool) -> tuple[tuple[Move, ...], tuple[Move, ...]]:
        """Moves before and after the step that is being planned; they wait for one that ``runs``."""
        if not runs:
            return (), ()
        before, after = tuple(self._before), tuple(self._after)
        self._before, self._after = [], []
        return before, after

    def keep(self, moved: Items[tuple[Move, bytes]], proven: Iterable[Sequence]) -> None:
        """Payloads of a step's exports, into their tiers; called once its draws are committed.

        ``proven``: sequences that drew a finite token in it. Their exports are kept, those of running ones are held,
        and those of sequences that ended or were preempted without such a draw are dropped.
        """
        for move, data in moved:
            payload = Payload(data, move.replayed)
            if move.owner is None:
                self._keep_spilled(move, payload)
            elif (held := self._unproven.get(move.owner)) is not None:
                held.append((move, payload))
        for seq in proven:
            held = self._unproven.get(_owner(seq), [])
            for move, payload in held:
                self._put(move, payload)
            held.clear()
        for owner in self._ended:
            self._unproven.pop(owner, None)
        self._ended.clear()
        self._bound_unproven()

    def _keep_spilled(self, move: Move, payload: Payload) -> None:
        assert self.tiers is not None
        if move.key in self._spilling:  # it leaves the set when the block proves wrong on its way
            self._spilling.discard(move.key)
            self.tiers.host.put(move.key, payload)

    def _put(self, move: Move, payload: Payload) -> None:
        assert self.tiers is not None
        if move.kind == "export_window":
            self.stats.windows_kept += self.tiers.windows.put(move.key, payload, self.clock())
        elif self._behind is not None:
            self._behind.put(move.key, payload)

    def _bound_unproven(self) -> None:
        """Give up the last held exports above what the writer's queue takes, so that long prompts bound host memory."""
        above = sum(len(held) for held in self._unproven.values()) - DEPTH
        for held in reversed(self._unproven.values()):
            if above <= 0:
                return
            gone = min(above, len(held))
            del held[len(held) - gone :]
            self.stats.unproven_dropped += gone
            above -= gone

    # --------------------------------------------------------------- release

    def release(self, seq: Sequence, *, wrong: bool = False, delete: bool = False) -> None:
        """A sequence ends or is preempted; ``wrong``: what it computed, and what it took over, must not be reused.

        What it took over goes too, because it may be the cause: another sequence computed it and never drew.
        ``delete``: from the store as well.
        """
        device, base = self.device[seq.dp_rank], seq.dp_rank * self.blocks
        if self.tiers is not None and not wrong:
            self._ended.append(_owner(seq))
        if self.tiers is not None and wrong:
            self._unproven.pop(_owner(seq), None)
            for key in seq.keys:
                device.drop(key)
                self._spilling.discard(key)
                self.tiers.host.drop(key)
                self.tiers.windows.drop(key)
            if self._behind is not None and delete and seq.keys:
                self._behind.remove(tuple(seq.keys))
        device.release([b - base for b in seq.block_ids])
        seq.block_ids = []
        seq.published = 0

    def lose(self, blocks: set[int]) -> None:
        """Trust no name of ``blocks`` and of what is kept beside them; nothing on its way to host memory is put."""
        self.stats.blocks_lost += len(blocks)
        self._spilling.clear()
        for rank, device in enumerate(self.device):
            device.distrust(b - rank * self.blocks for b in blocks)

    def forget(self, seq: Sequence) -> None:
        """A waiting sequence ends: nothing waits for its blocks any more."""
        self._fetches.pop(seq.uid, None)
        self._staged.pop(seq.uid, None)

    def close(self) -> None:
        """Finish writing behind; reads that have not begun are cancelled."""
        if self._reader is not None:
            self._reader.shutdown(cancel_futures=True)
        written = self._behind is None or self._behind.close()
        if written and self.tiers is not None and self.tiers.store is not None:
            try:
                self.tiers.store.close()
            except (OSError, sqlite3.Error, DeepInferError) as exc:  # the answers are right without what it still held
                assert self._behind is not None
                self._behind.failed = self._behind.failed or exc

    def notes(self) -> list[str]:
        """What the store did not do, one sentence each; complete after ``close``."""
        out: list[str] = []
        behind, stats = self._behind, self.stats
        if self.tiers is None or self.tiers.store is None or behind is None:
            return out
        lost = behind.dropped + stats.unproven_dropped
        if behind.failed is not None:
            out.append(f"the KV store took no more blocks, {lost} were not stored: {_said(behind.failed)}")
        elif lost:
            out.append(f"{lost} blocks were not stored: the KV store is slower than the engine")
        failed = self.tiers.store.read_errors + stats.fetch_failed
        if failed:
            out.append(f"reading the KV store failed {failed} times; blocks it did not give were computed instead")
        return out


def _owner(seq: Sequence) -> tuple[int, int]:
    """One life of a sequence, from its placing to its end or preemption."""
    return seq.uid, seq.generation


def _said(exc: Exception) -> str:
    """An error in one line."""
    return " ".join(str(exc).split()) or type(exc).__name__


class _Staged:
    """What arrived from the store for one sequence, as a tier: whole blocks, or their first sections."""

    def __init__(self, fetch: _Fetch | None):
        self.fetch = fetch
        self.by_section = fetch is not None and len(fetch.parts) > 1
        found = [] if fetch is None else zip(fetch.keys, fetch.parts[0].result(), strict=True)
        self.held: dict[Key, Payload] = {key: payload for key, payload in found if payload is not None}

    def match(self, keys: Items[Key]) -> int:
        for i, key in enumerate(keys):
            if key not in self.held:
                return i
        return len(keys)
