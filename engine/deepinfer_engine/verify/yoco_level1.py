"""Level 1: is every integer of a replay right? Plans, chunks, floors, slots and cached names, without weights.

The subject's plans are turned into steps by the engine's own ``build_batch`` and ``Step`` and executed on tags
(``yoco_tags``); what every row reads and writes is compared with the definitions (``yoco_oracle``). Equality, no
tolerance.
"""

from __future__ import annotations

import itertools
import pickle
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np

from deepinfer_engine.cache.pivots import Replica
from deepinfer_engine.cache.replay import DecoderReplay, EncoderReplay, ReplayShape, ReplaySpan
from deepinfer_engine.cache.tiers import Payload, WindowPool
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig, check_invariants
from deepinfer_engine.errors import UsageError
from deepinfer_engine.runtime.batch import RowInput
from deepinfer_engine.verify.yoco_oracle import Case, Expected, Sizes, expect, pivots
from deepinfer_engine.verify.yoco_subject import MUTATIONS, Subject
from deepinfer_engine.verify.yoco_tags import CLASSES, Ints, Seen, Tagged, TagMachine

B = BLOCK_TOKENS
TITLES = {
    "L1-1": "cap, L1, start, pivot and mode",
    "L1-2": "room behind a hit for the decoder rows and the rollback rows",
    "L1-3": "rows per layer class, and enough of them in the last chunk",
    "L1-4": "visible window rows of every query in every layer class",
    "L1-5": "ring slots: position mod ring, and nothing visible overwritten",
    "L1-6": "block KV: replayed rows write none, every other row once, in its place",
    "L1-7": "compressed entries per row and ratio, pairs across chunk edges, unaligned hits refused",
    "L1-8": "selectable entries name their tokens, the same with and without replay",
    "L1-9": "any chunking reads and writes the same",
    "L1-10": "a row reads and writes the same in any batch",
    "L1-11": "every crossed pivot is copied in time from the right rows",
    "L1-12": "after a rollback nothing visible is stale",
    "L1-13": "what a finished request leaves: the newest complete pivot",
    "L1-14": "preempted, resumed and handed-over requests get the same plan",
    "L1-15": "what is kept: layers, lineage and keys",
    "L1-16": "all ranks plan the same, and count the same tail rows",
    "L1-17": "invalid models, windows, hits and budgets are refused by name",
    "L1-18": "known faults are noticed",
}


@dataclass
class CheckResult:
    """Outcome of one check: comparisons made, how many differed, and the first difference."""

    check: str
    title: str
    compared: int = 0
    failed: int = 0
    first: str = ""


class _Noticed(Exception):
    """The first difference of a run that was to find one."""


class Ledger:
    """Results by check; ``same`` compares and remembers. ``stop``: raise at the first difference."""

    def __init__(self, *, stop: bool = False) -> None:
        self.stop = stop
        self.results = {check: CheckResult(check, title) for check, title in TITLES.items()}

    def same(self, check: str, where: object, what: str, got: object, want: object) -> None:
        """Count one comparison of equal-shaped arrays or plain values."""
        if isinstance(got, np.ndarray) or isinstance(want, np.ndarray):
            equal = bool(np.array_equal(np.asarray(got), np.asarray(want)))
        else:
            equal = got == want
        self.note(check, equal, lambda: f"{where}: {what} is {_short(got)}, expected {_short(want)}")

    def note(self, check: str, good: bool, text: Callable[[], str]) -> None:
        """Count one comparison; ``text`` says what was wrong."""
        result = self.results[check]
        result.compared += 1
        if not good:
            result.failed += 1
            result.first = result.first or text()
            if self.stop:
                raise _Noticed(f"{check}: {result.first}")


def _short(value: object) -> str:
    text = str(value).replace("\n", " ")
    return text if len(text) <= 80 else f"{text[:77]}…"


def verify_level1(config: ModelConfig, subject: Subject | None = None) -> list[CheckResult]:
    """All checks of one model. L1-18 is judged for the engine's own functions only."""
    ledger = Ledger()
    _judge(config, subject or Subject(), ledger, thorough=True)
    if subject is None:
        for name in MUTATIONS:
            noticed = noticed_at_level1(config, name)
            ledger.note("L1-18", bool(noticed), lambda name=name: f"mutation {name} was not noticed")
    return list(ledger.results.values())


def noticed_at_level1(config: ModelConfig, name: str) -> str:
    """What notices a mutation first, on a few cases of every check; empty when nothing does."""
    try:
        _judge(config, MUTATIONS[name].apply(Subject()), Ledger(stop=True), thorough=False)
    except _Noticed as exc:
        return str(exc)
    except (AssertionError, IndexError) as exc:
        return f"the engine's own assertion: {exc or type(exc).__name__}"
    return ""


def _judge(config: ModelConfig, subject: Subject, ledger: Ledger, *, thorough: bool) -> None:
    judge = _Judge(config, subject, ledger)
    judge.refusals()
    judge.keeping()
    for case in sweep(judge.sizes, thorough=thorough):
        judge.plan_case(case)
    for case, budgets in stepped_cases(judge.sizes, thorough=thorough):
        judge.run_case(case, budgets)
    judge.decode(thorough=thorough)
    judge.batches(6 if thorough else 2)


# ------------------------------------------------------------------------- cases


def _facts(sizes: Sizes, length: int, decoder: str, encoder: str) -> list[Case]:
    """Cases of one length: hits around the cap, windows at hand, a block earlier, or nowhere."""
    cap = expect(sizes, Case(length, 0, frozenset(), decoder, encoder)).cap
    cases: dict[Case, None] = {}
    for hit in sorted({0, B, max(0, cap - B), cap, cap + B}):
        reused = min(hit, cap)
        for ends in ((), (reused,), (reused - B,)):
            cases[Case(length, hit, frozenset(e for e in ends if e > 0), decoder, encoder)] = None
    return list(cases)


def sweep(sizes: Sizes, *, thorough: bool) -> Iterable[Case]:
    """Lengths 1–400, around 16k and one of 77k, with every hit, window and setting."""
    W, G = sizes.window, sizes.slack
    lengths = [*range(1, 401), *range(16_320, 16_450), 77_056]
    if not thorough:
        lengths = [W + 1, W + G - 1 + B, 157, 300, 390, 523, 16_384]
    for length in lengths:
        for decoder, encoder in itertools.product(("off", "exact", "bounded"), ("off", "bounded")):
            yield from _facts(sizes, length, decoder, encoder)


def stepped_cases(sizes: Sizes, *, thorough: bool) -> Iterable[tuple[Case, list[int]]]:
    """Cases that are run step by step, each with chunk budgets (0: one chunk)."""
    W, G = sizes.window, sizes.slack
    edges = {1, 2, W - 1, W, W + 1, W + G - 1, W + G, W + G + 1, 255, 256, 257, 261, 262, 263, 390, 401, 700}
    if not thorough:
        edges = {390, 523}
    least = W + G + B
    for length in sorted(edges):
        for decoder in ("off", "exact", "bounded"):
            seen: set[Expected] = set()
            for case in _facts(sizes, length, decoder, "bounded"):
                plan = expect(sizes, case)
                if plan not in seen:  # other hits with the same plan run the same rows
                    seen.add(plan)
                    yield case, [0, least, least + 57] if thorough else [0, least]
    if thorough:
        for decoder in ("exact", "bounded"):
            cap = expect(sizes, Case(16_400, 0, frozenset(), decoder, "bounded")).cap
            yield Case(16_400, cap, frozenset(), decoder, "bounded"), [4096]


# --------------------------------------------------------------------- execution


@dataclass
class _Trace:
    """Union over the steps of one prefill, by position: lowest visible row per class, entry slot, window names."""

    lows: dict[str, dict[int, int]]
    slots: dict[int, int]

    @classmethod
    def empty(cls) -> _Trace:
        return cls({name: {} for name in CLASSES}, {})


class _Judge:
    """Runs cases of one model through a subject and enters what differs."""

    def __init__(self, config: ModelConfig, subject: Subject, ledger: Ledger):
        self.config = config
        self.subject = subject
        self.ledger = ledger
        self.sizes = Sizes(
            config.sliding_window, config.dspark_block_size, config.num_hidden_layers, config.cut, BLOCK_TOKENS
        )
        self.layout = subject.layout(config, True)
        self.rng = random.Random(20)
        self.shapes = {
            (decoder, encoder): ReplayShape.of(
                config, decoder=cast(DecoderReplay, decoder), encoder=cast(EncoderReplay, encoder)
            )
            for decoder in ("off", "exact", "bounded")
            for encoder in ("off", "bounded")
        }

    def shape(self, case: Case) -> ReplayShape:
        return self.shapes[case.decoder, case.encoder]

    def plan(self, case: Case) -> ReplaySpan:
        return self.subject.plan(self.shape(case), case.length, hit=case.hit, windows_at=case.ends)

    def plan_case(self, case: Case) -> ReplaySpan:
        """L1-1, L1-2, L1-14."""
        same, want = self.ledger.same, expect(self.sizes, case)
        span = self.plan(case)
        for name in ("cap", "reused", "start", "pivot", "mode"):
            same("L1-1", case, name, getattr(span, name), getattr(want, name))
        limits = self.subject.limits(span, span.start, span.length - span.start)
        same("L1-1", case, "floor_encoder", limits.floor_encoder, want.low_encoder)
        same("L1-1", case, "floor_decoder", limits.floor_decoder, want.low_decoder)
        if span.mode != "cold":
            W, G = self.sizes.window, self.sizes.slack
            self.ledger.note(
                "L1-2", case.length - span.reused >= W + G, lambda: f"{case}: {case.length - span.reused} rows are left"
            )
            if case.decoder != "off":
                self.ledger.note("L1-2", span.pivot >= span.reused + G, lambda: f"{case}: pivot {span.pivot}")
        if case.length % 8 == 1:
            same("L1-14", case, "the plan after a hand-over", pickle.loads(pickle.dumps(span)), self.plan(case))
        return span

    def tagged(self, number: int, slot: int, length: int, first_block: int) -> Tagged:
        blocks = list(range(first_block, first_block + -(-length // B)))
        return Tagged(number, slot, blocks, np.zeros(length, np.int64))

    def row(self, seq: Tagged, span: ReplaySpan, start: int, count: int) -> RowInput:
        limits = self.subject.limits(span, start, count)
        ids = range(len(seq.versions))
        return RowInput(ids, start, count, seq.slot, seq.blocks, logits="none", **vars(limits))

    def load(self, machine: TagMachine, seq: Tagged, span: ReplaySpan) -> None:
        """What a hit brings: block KV, and window KV of the kept layers when the plan asks for it."""
        machine.load_blocks(seq, span.reused)
        if span.window_end is not None:
            layers = self.subject.snapshot_layers(span.shape)
            cut = self.config.cut
            held = ((cut - 1, "encoder"), (cut, "cut"), (self.config.num_hidden_layers - 1, "decoder"))
            machine.load_windows(seq, span.window_end, [name for layer, name in held if layer in layers])

    def chunks(self, span: ReplaySpan, budget: int) -> list[tuple[int, int]]:
        out, at = [], span.start
        while at < span.length:
            chunk = self.subject.chunk(span, at, budget or span.length)
            assert chunk is not None and chunk.count > 0, (span, at, budget)
            out.append((chunk.start, chunk.count))
            at += chunk.count
        return out

    def run_case(self, case: Case, budgets: Sequence[int]) -> None:
        """L1-3 … L1-9 of one case under several chunk budgets."""
        span, want = self.plan_case(case), expect(self.sizes, case)
        traces = []
        for budget in budgets:
            machine = TagMachine(self.layout, slots=2, blocks=2 + -(-case.length // B))
            seq = self.tagged(1, 1, case.length, 2)
            self.load(machine, seq, span)
            trace = _Trace.empty()
            parts = self.chunks(span, budget)
            where = f"{case}, chunks of {budget or 'any size'}"
            for start, count in parts:
                (seen,) = machine.run([(seq, self.row(seq, span, start, count))])
                self.compare_reads("L1-4", where, seq, seen, want)
                self.compare_entries(where, seq, seen, want)
                self.trace(trace, seen, start)
                self.ring_holds(where, machine, seq, want, start + count)
            self.rows_of(where, trace, want, case, parts)
            self.block_writes(where, trace, seq, want, case)
            self.all_entries(where, machine, seq, case.length)
            traces.append(trace)
        for trace in traces[1:]:
            self.ledger.same("L1-9", case, "what chunks read", trace.lows, traces[0].lows)
            self.ledger.same("L1-9", case, "what chunks write", trace.slots, traces[0].slots)

    def expected_windows(self, seq: Tagged, positions: Ints, low: int, width: int) -> Ints:
        at = positions[:, None] - np.arange(width - 1, -1, -1)[None, :]
        names = seq.names(at)
        return np.where(at >= max(0, low), names, -1)

    def compare_reads(self, check: str, where: object, seq: Tagged, seen: Seen, want: Expected) -> None:
        for name, positions in seen.queries.items():
            low = want.low_decoder if name == "decoder" else want.low_encoder
            windows = seen.windows[name]
            names = self.expected_windows(seq, positions, low, windows.shape[1])
            self.ledger.same(
                check, where, f"what {name} rows from {positions[0] if len(positions) else 0} see", windows, names
            )

    def compare_entries(self, where: object, seq: Tagged, seen: Seen, want: Expected) -> None:
        for ratio, names in seen.entries.items():
            entry = np.arange(len(names))
            wanted = seq.names(entry * ratio + ratio - 1)
            self.ledger.same("L1-8", where, f"entries of ratio {ratio}", names, wanted)
        positions = seen.queries.get("encoder", np.zeros(0, np.int64))
        for ratio, visible in seen.visible.items():
            last = next((seen.queries[name] for name in reversed(CLASSES) if name in seen.queries), positions)
            self.ledger.same("L1-7", where, f"visible entries of ratio {ratio}", visible, (last + 1) // ratio)
        odd = positions[positions % 2 == 1]
        self.ledger.same("L1-7", where, "even halves", *self.known_partners(seq, seen.partners, odd, want))

    def known_partners(self, seq: Tagged, got: Ints, odd: Ints, want: Expected) -> tuple[Ints, Ints]:
        """Partners of pairs that are pooled for keeping: those of replayed rows are thrown away."""
        keep = odd >= want.reused
        return got[keep], seq.names(odd[keep] - 1)

    def trace(self, trace: _Trace, seen: Seen, start: int) -> None:
        for name, positions in seen.queries.items():
            first = np.where(seen.windows[name] >= 0, seen.windows[name] & (2**32 - 1), 2**40).min(1)
            trace.lows[name].update(zip(positions.tolist(), first.tolist(), strict=True))
        for i, slot in enumerate(seen.block_slots.tolist()):
            if slot >= 0:
                assert start + i not in trace.slots, "a position is written twice"
                trace.slots[start + i] = slot

    def rows_of(self, where: object, trace: _Trace, want: Expected, case: Case, parts: list[tuple[int, int]]) -> None:
        same, L = self.ledger.same, case.length
        same("L1-3", where, "encoder rows", sorted(trace.lows["encoder"]), list(range(want.start, L)))
        for name in ("cut", "decoder"):
            same("L1-3", where, f"{name} queries", sorted(trace.lows[name]), list(range(want.pivot, L)))
        if case.decoder != "off":
            least = min(self.sizes.window + self.sizes.slack, L - want.start)
            count = parts[-1][1]
            self.ledger.note("L1-3", count >= least, lambda: f"{where}: the last chunk has {count} rows of {least}")

    def ring_holds(self, where: object, machine: TagMachine, seq: Tagged, want: Expected, end: int) -> None:
        """Before the next row: each class still holds all rows that it may see."""
        for name in CLASSES:
            low = want.low_decoder if name == "decoder" else want.low_encoder
            begin = max(low, end - self.sizes.window + 1, 0)
            if name == "decoder" and end <= want.pivot:
                continue
            positions = np.arange(begin, end)
            names = machine.rings[name][seq.slot * machine.layout.ring + positions % machine.layout.ring]
            self.ledger.same("L1-5", where, f"{name} ring behind row {end - 1}", names, seq.names(positions))

    def block_writes(self, where: object, trace: _Trace, seq: Tagged, want: Expected, case: Case) -> None:
        places = {p: seq.blocks[p // B] * B + p % B for p in range(want.reused, case.length)}
        self.ledger.same("L1-6", where, "positions written", trace.slots, places)

    def all_entries(self, where: object, machine: TagMachine, seq: Tagged, length: int) -> None:
        for ratio, store in machine.entries.items():
            entry = np.arange(length // ratio)
            per = B // ratio
            slots = np.array(seq.blocks)[entry // per] * per + entry % per
            self.ledger.same(
                "L1-8", where, f"kept entries of ratio {ratio}", store[slots], seq.names(entry * ratio + ratio - 1)
            )

    # ---------------------------------------------------------------- batches

    def batches(self, count: int) -> None:
        """L1-10 and L1-16: mixed rows alone, together, and spread over ranks."""
        W, G = self.sizes.window, self.sizes.slack
        for _ in range(count):
            rows: list[tuple[Tagged, ReplaySpan, int, int]] = []
            for number in range(1, self.rng.randint(2, 8) + 1):
                length = self.rng.choice([W, W + G, 300, 390, 523])
                cap = expect(self.sizes, Case(length, 0, frozenset(), "bounded", "bounded")).cap
                hit = self.rng.choice([0, cap])
                ends = frozenset({hit} if hit and self.rng.random() < 0.5 else ())
                case = Case(length, hit, ends, self.rng.choice(["off", "bounded"]), "bounded")
                span = self.plan(case)
                start, rest = self.rng.choice(self.chunks(span, W + G + B))
                rows.append((self.tagged(number, number, length, 1 + 5 * number), span, start, rest))
            machines = [TagMachine(self.layout, slots=9, blocks=60) for _ in range(len(rows) + 1)]
            for machine in machines:
                for seq, span, start, _ in rows:
                    self.prepare(machine, seq, span, start)
            together = machines[-1].run([(seq, self.row(seq, span, at, n)) for seq, span, at, n in rows])
            for machine, (seq, span, at, n), mixed in zip(machines[:-1], rows, together, strict=True):
                (alone,) = machine.run([(seq, self.row(seq, span, at, n))])
                self.compare_seen(alone, mixed)
            self.ranks(rows, together)

    def prepare(self, machine: TagMachine, seq: Tagged, span: ReplaySpan, until: int) -> None:
        self.load(machine, seq, span)
        if until > span.start:
            machine.run([(seq, self.row(seq, span, span.start, until - span.start))])

    def compare_seen(self, alone: Seen, mixed: Seen) -> None:
        same = self.ledger.same
        for name in CLASSES:
            if name in alone.queries or len(mixed.queries.get(name, ())):
                same("L1-10", "batch", f"{name} queries", mixed.queries.get(name), alone.queries.get(name))
                wide, narrow = mixed.windows[name], alone.windows[name]
                pad = wide.shape[1] - narrow.shape[1]
                same("L1-10", "batch", f"{name} windows", wide, np.pad(narrow, ((0, 0), (pad, 0)), constant_values=-1))
        for ratio in alone.entries:
            same("L1-10", "batch", f"entries of ratio {ratio}", mixed.entries[ratio], alone.entries[ratio])
        same("L1-10", "batch", "block slots", mixed.block_slots, alone.block_slots)
        same("L1-10", "batch", "pairs", mixed.partners, alone.partners)

    def ranks(self, rows: list[tuple[Tagged, ReplaySpan, int, int]], seen: list[Seen]) -> None:
        """Each of four ranks derives all plans from (length, hit, windows) alone and counts the tails of all."""
        tails = [len(one.queries.get("decoder", ())) for one in seen]
        for rank in range(4):
            for (_, span, at, n), tail in zip(rows, tails, strict=True):
                facts = {"hit": span.hit, "windows_at": frozenset({span.reused} if span.mode == "exact" else ())}
                shape = pickle.loads(pickle.dumps(span.shape))
                again = self.subject.plan(shape, span.length, **facts)
                self.ledger.same("L1-16", f"rank {rank}", "plan", again.start, span.start)
                self.ledger.same("L1-16", f"rank {rank}", "tail rows", self.subject.limits(again, at, n).tail, tail)

    # ----------------------------------------------------------------- decode

    def decode(self, *, thorough: bool) -> None:
        """L1-11, L1-12, L1-13: verify steps with random acceptance behind prompts of several plans."""
        W, G = self.sizes.window, self.sizes.slack
        lengths = [2 * B - 2, 3 * B - 1, 3 * B + 1, W + G + 2 * B + 3] if thorough else [3 * B - 1]
        for length in lengths:
            for decoder in ("off", "bounded")[not thorough :]:
                cap = expect(self.sizes, Case(length, 0, frozenset(), decoder, "bounded")).cap
                for hit, ends in ((0, ()), (cap, ()), (cap, (cap,))):
                    self.decode_case(Case(length, hit, frozenset(ends), decoder, "bounded"))

    def decode_case(self, case: Case) -> None:
        span, want, gamma = self.plan(case), expect(self.sizes, case), self.sizes.drafts
        total = case.length + B + 3 * (gamma + 1)
        machine = TagMachine(self.layout, slots=1, blocks=1 + -(-total // B))
        seq = self.tagged(1, 1, total, 1)
        self.load(machine, seq, span)
        for start, count in self.chunks(span, 0):
            machine.run([(seq, self.row(seq, span, start, count))])
        at, copied, replica = case.length, [], Replica()
        while at + gamma + 1 <= total:
            (seen,) = machine.run([(seq, self.row(seq, span, at, gamma + 1))])
            where = f"{case}, verify at {at}"
            self.compare_reads("L1-12", where, seq, seen, want)
            odd = np.arange(at, at + gamma + 1)
            odd = odd[odd % 2 == 1]
            self.ledger.same("L1-12", where, "even halves", seen.partners, seq.names(odd - 1))
            for ratio, names in seen.entries.items() if at % 4 == 0 else ():
                entry = np.arange(len(names))
                self.ledger.same("L1-12", where, "entries", names, seq.names(entry * ratio + ratio - 1))
            accepted = self.rng.choice([1, 1, 2, gamma + 1, self.rng.randint(1, gamma + 1)])
            seq.versions[at + accepted : at + gamma + 1] += 1  # rejected: other tokens will stand there
            pivot = self.subject.pivot(at, at + accepted)
            at += accepted
            if pivot is not None:
                copied.append(pivot)
                self.copy(where, machine, seq, want, pivot, at)
                replica.finish(replica.begin(pivot))
        crossed = pivots(B, case.length, at)
        self.ledger.same("L1-11", case, "pivots copied", copied, crossed)
        newest = replica.newest()
        self.ledger.same("L1-13", case, "pivot left", newest[1] if newest else 0, crossed[-1] if crossed else 0)

    def copy(self, where: str, machine: TagMachine, seq: Tagged, want: Expected, pivot: int, at: int) -> None:
        late = at - pivot
        self.ledger.note("L1-11", late <= self.sizes.drafts, lambda: f"{where}: pivot {pivot} copied {late} late")
        begin = max(0, pivot - self.sizes.window)
        for name in ("encoder", "cut"):
            names = machine.window_names(name, seq, pivot)
            low = np.arange(begin, pivot) < want.low_encoder
            expected = np.where(low, names, seq.names(np.arange(begin, pivot)))
            self.ledger.same("L1-11", where, f"the {name} rows of pivot {pivot}", names, expected)

    # ---------------------------------------------------------------- keeping

    def keeping(self) -> None:
        """L1-13 (short requests), L1-15: layers, lineage, strict pools and keys."""
        same, subject = self.ledger.same, self.subject
        for end in (1, B - 1):
            same("L1-13", f"a request of {end} tokens", "pivot", subject.pivot(0, end), None)
        L = self.config.num_hidden_layers
        for decoder in ("off", "exact", "bounded"):
            shape = self.shape(Case(1, 0, frozenset(), decoder, "bounded"))
            layers = range(L if decoder == "off" else self.config.cut + 1)
            same("L1-15", f"decoder {decoder}", "layers kept", subject.snapshot_layers(shape), layers)
        W, G = self.sizes.window, self.sizes.slack
        length = 4 * B + W + G
        for ends, inherited in itertools.product((frozenset({4 * B}), frozenset()), (False, True)):
            shape = self.shape(Case(length, 0, frozenset(), "bounded", "bounded"))
            span = subject.plan(shape, length, hit=4 * B, windows_at=ends, approximate=inherited)
            lineage = "exact" if ends and not inherited else "replayed"
            same("L1-15", f"windows {sorted(ends)}, inherited {inherited}", "lineage", subject.lineage(span), lineage)
            pool = WindowPool(1024, 60.0, subject.snapshot_layers(shape), strict=True)
            kept = pool.put(bytes(32), Payload(b"w", replayed=subject.lineage(span) == "replayed"), 0.0)
            same("L1-15", "a strict pool", "kept", kept, lineage == "exact")
        tokens = list(range(3 * B))
        ours = subject.keys(b"r", [], tokens)
        other = subject.keys(b"r", [], [9, *tokens[1:]])
        same("L1-15", "prompts that differ in token 0", "shared keys", len(set(ours) & set(other)), 0)
        longer = subject.keys(b"r", [], [*tokens, *tokens])
        same("L1-15", "a longer prompt", "shared keys", longer[:3], ours)
        same("L1-15", "another namespace", "shared keys", len(set(ours) & set(subject.keys(b"s", [], tokens))), 0)

    # --------------------------------------------------------------- refusals

    def refusals(self) -> None:
        """L1-7 (unaligned hits), L1-17."""
        c, W = self.config, self.sizes.window
        shape = ReplayShape.of(c, decoder="bounded", encoder="bounded")
        layout = self.subject.layout(c, True)
        need = W + self.sizes.drafts
        self.ledger.note("L1-17", layout.ring > need, lambda: f"ring {layout.ring} does not exceed {need}")
        need = self.sizes.drafts + 1
        self.ledger.note("L1-17", layout.pair_ring > need, lambda: f"pair ring {layout.pair_ring}, needs over {need}")
        self.ledger.same("L1-17", "model", "rollback slack", shape.slack, self.sizes.drafts + 1)
        for cut in (0, c.num_hidden_layers):
            both = f"0 < n_prefill_layer {cut} < n_layer {c.num_hidden_layers}"
            self.refused("L1-17", lambda cut=cut: replace(shape, cut=cut), both)
        self.refused("L1-17", lambda: replace(shape, window=96), "window 96 and block")
        ratios = tuple(2 if i == c.cut else r for i, r in enumerate(c.compress_ratios))
        self.refused("L1-17", lambda: ReplayShape.of(replace(c, compress_ratios=ratios)), f"cut layer {c.cut}")
        late = replace(c, engram_layer_ids=(*c.engram_layer_ids[:-1], c.cut))
        self.refused("L1-17", lambda: ReplayShape.of(late), f"engram layer {c.cut}")
        self.ledger.note("L1-17", bool(check_invariants(late)), lambda: "the config check accepts a late engram layer")
        orphan = replace(c, index_source_layer_ids=c.index_source_layer_ids[:-1] or (0,))
        if c.cut == c.index_source_layer_ids[-1]:
            self.ledger.note("L1-17", bool(check_invariants(orphan)), lambda: "a cut without an indexer is accepted")
        budget = shape.min_chunk_tokens - 1
        self.refused("L1-17", lambda: self.plan(Case(9, 0, frozenset(), "bounded", "off")).chunks(budget), "too small")
        for hit in (1, B - 1, B + 1):
            self.refused("L1-7", lambda hit=hit: self.subject.plan(shape, 999, hit=hit), f"found {hit} tokens")
        self.refused("L1-17", lambda: self.subject.plan(shape, 0), "found 0")

    def refused(self, check: str, act: Callable[[], object], text: str) -> None:
        try:
            act()
        except UsageError as exc:
            message = exc.message
            self.ledger.note(check, text in message, lambda: f"refused with {message!r}, expected {text!r}")
            return
        self.ledger.note(check, False, lambda: f"accepted, expected a refusal with {text!r}")
