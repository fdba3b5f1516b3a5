"""Level 2: what do replays do to the numbers of a real model? A forced trajectory, element by element.

Two kinds of quantity, judged differently:

* bit-identical: log-probabilities against the definition (chunks, exact tail, verify steps with rollback, bounded
  decoder, replay, second turn), block KV under a trimmed prefill, windows up to the cut, a hit against the cold run it
  was taken from, stored bytes, virtual ranks. Operations are the batch-invariant ones, so no bit depends on how rows
  are grouped, and no tie of the indexer or router can fall the other way;
* approximate: what a replay leaves out, against a drift budget (mean KL, top-1, overlap of the top 20).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from deepinfer_engine.cache.replay import DecoderReplay, ReplayShape, ReplaySpan
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import CapacityError, UsageError
from deepinfer_engine.verify.yoco_oracle import Case, Sizes, expect
from deepinfer_engine.verify.yoco_play import Place, Played, Stage, block_rows, oracle, play, window_rows
from deepinfer_engine.verify.yoco_subject import MUTATIONS, Subject

B = BLOCK_TOKENS
TOP = 20
ROOT = b"yoco"


@dataclass(frozen=True)
class Budget:
    """Most drift that passes: mean KL in nat, share of equal best tokens, mean overlap of the top 20."""

    kl: float = 5e-3
    top1: float = 0.98
    overlap: float = 0.95


DECODER = "bounded decoder against all rows"
HIT = "replay after a hit against the cold run"
#: what passes unless said otherwise. A replay after a hit leaves more out than a bounded decoder: its limits were set
#: once, from the embedded model (mean KL 1.2e-2, 84 of 86 best tokens equal).
FROZEN = {DECODER: Budget(), HIT: Budget(kl=2e-2, top1=0.96)}


@dataclass(frozen=True)
class Row:
    """One comparison of elements that must be equal bit by bit; ``largest`` is the largest difference found."""

    name: str
    compared: int
    largest: float

    @property
    def good(self) -> bool:
        return self.largest == 0.0


@dataclass(frozen=True)
class Drift:
    """An approximation against what it approximates, over forced positions; ``late_kl``: after the first W of them."""

    name: str
    positions: int
    mean_kl: float
    max_kl: float
    late_kl: float | None
    top1: float
    overlap: float
    max_logprob: float

    def within(self, budget: Budget) -> bool:
        return self.mean_kl <= budget.kl and self.top1 >= budget.top1 and self.overlap >= budget.overlap


@dataclass(frozen=True)
class Level2:
    """Everything level 2 found for one model and trajectory."""

    prompt: int
    forced: int
    rows: tuple[Row, ...]
    drifts: tuple[Drift, ...]
    caught: tuple[tuple[str, str], ...] = ()

    def verdict(self, budgets: Mapping[str, Budget] = FROZEN) -> list[str]:
        """What is wrong, one sentence each; empty when all is well. ``budgets`` by the name of the drift."""
        bad = [f"{r.name}: differs by up to {r.largest:g}" for r in self.rows if not r.good]
        bad += [
            f"{d.name}: mean KL {d.mean_kl:.2g} (allowed {b.kl:g}), top-1 {d.top1:.3f} ({b.top1:g}), "
            f"overlap {d.overlap:.3f} ({b.overlap:g})"
            for d in self.drifts
            if not d.within(b := budgets[d.name])
        ]
        return bad + [f"mutation {name} was not noticed" for name, by in self.caught if not by]


class _Noticed(Exception):
    """The first difference of a run that was to find one."""


def plan_lengths(sizes: Sizes) -> tuple[int, int, int]:
    """(prompt of the first turn, its end behind a pivot, prompt of the second turn) for a model's sizes."""
    first = 2 * B + sizes.window + sizes.slack + 45  # hit 256 and an odd rest
    end = (first // B + 1) * B + sizes.drafts + 4  # decoding crosses a pivot
    return first, end, end + sizes.window + sizes.slack + 9


class Level2Check:
    """Runs the subject and the definitions on one trajectory. Definitions are run once and kept."""

    def __init__(self, stage: Stage, ids: Sequence[int]):
        c = stage.config
        self.stage = stage
        self.sizes = Sizes(c.sliding_window, c.dspark_block_size, c.num_hidden_layers, c.cut, B)
        self.first, self.end, self.second = plan_lengths(self.sizes)
        self.total = self.second + 6
        if self.total + self.sizes.slack > c.max_position_embeddings:
            raise CapacityError(
                f"level 2 needs {self.total + self.sizes.slack} positions, the model has {c.max_position_embeddings}"
            )
        if len(ids) < self.total:
            raise UsageError(f"the trajectory has {len(ids)} tokens, level 2 needs {self.total}")
        self.ids = list(ids[: self.total])
        self.short = self.ids[: self.end]
        #: most runs force only as far as a window reaches
        self.brief = self.ids[: min(self.end, self.first + self.sizes.window + 12)]
        self.truth: dict[str, Played] = {}

    # ------------------------------------------------------------ definitions

    def case(self, decoder: str, hit: int = 0, ends: tuple[int, ...] = (), length: int = 0) -> Case:
        return Case(length or self.first, hit, frozenset(ends), decoder, "bounded")

    def blocks(self, count: int) -> int:
        return -(-(self.total + self.sizes.slack) // B) * count

    def run_definitions(self, progress: Callable[[str], None]) -> None:
        """off, bounded, replay and the second turn, without rings, chunks, drafts or shared blocks."""
        stage, tokens = self.stage, self.total + self.sizes.slack + 1
        kv = stage.cache(stage.unwrapped(tokens), slots=4, blocks=self.blocks(4))
        places = [Place(kv, i + 1, list(range(1 + self.blocks(1) * i, 1 + self.blocks(1) * (i + 1)))) for i in range(4)]
        short = self.short
        progress("definition: all rows through all layers")
        self.truth["off"] = oracle(stage, places[0], short, self.first, expect(self.sizes, self.case("off")))
        progress("definition: bounded decoder")
        self.truth["bounded"] = oracle(stage, places[1], short, self.first, expect(self.sizes, self.case("bounded")))
        want = expect(self.sizes, self.case("bounded", hit=2 * B))
        places[2].blocks[:2] = places[1].blocks[:2]
        progress("definition: replay after a hit")
        self.truth["replay"] = oracle(stage, places[2], short, self.first, want)
        progress("definition: second turn")
        cold = expect(self.sizes, self.case("bounded", length=self.second))
        self.truth["second"] = oracle(stage, places[3], self.ids, self.second, cold)
        swapped = self.swapped()
        progress("definition: blocks in another order")
        self.truth["swapped"] = oracle(stage, places[0], swapped, self.first, expect(self.sizes, self.case("bounded")))

    def swapped(self) -> list[int]:
        """The same blocks in another order: nothing of them may be reused."""
        return [*self.ids[B : 2 * B], *self.ids[:B], *self.brief[2 * B :]]

    # ---------------------------------------------------------------- subject

    def shape(self, decoder: DecoderReplay) -> ReplayShape:
        return ReplayShape.of(self.stage.config, decoder=decoder, encoder="bounded")

    def judge(
        self, subject: Subject, *, stop: bool = False, progress: Callable[[str], None] = lambda _: None
    ) -> Level2:
        """All comparisons of one subject; ``stop``: raise at the first one that is over its bar."""
        run = _Run(self, subject, stop=stop, progress=progress)
        run.cold()
        run.hits()
        run.second_turn()
        run.names()
        return Level2(self.first, self.end - self.first, tuple(run.rows), tuple(run.drifts))

    def noticed(self, name: str) -> str:
        """What notices a mutation first; empty when nothing does."""
        try:
            self.judge(MUTATIONS[name].apply(Subject()), stop=True)
        except _Noticed as exc:
            return str(exc)
        except (AssertionError, IndexError) as exc:
            return f"the engine's own assertion: {exc or type(exc).__name__}"
        return ""


class _Run:
    """One subject's runs in one cache, as an engine would share it."""

    def __init__(self, check: Level2Check, subject: Subject, *, stop: bool, progress: Callable[[str], None]):
        self.check = check
        self.subject = subject
        self.stop = stop
        self.progress = progress
        self.stage = check.stage
        self.rows: list[Row] = []
        self.drifts: list[Drift] = []
        self.used = 0
        layout = self.stage.layout(subject)
        self.kv = self.stage.cache(layout, slots=9, blocks=check.blocks(8))
        self.short, self.brief = check.short, check.brief
        self.up_to_cut = range(check.sizes.cut + 1)

    def place(self, shared: Sequence[int] = ()) -> Place:
        """A fresh ring slot and blocks, the first ones shared."""
        per = self.check.blocks(1)
        blocks = list(range(1 + per * self.used, 1 + per * (self.used + 1)))
        self.used += 1
        blocks[: len(shared)] = shared
        return Place(self.kv, self.used, blocks)

    def plan(self, decoder: DecoderReplay, length: int, **facts) -> ReplaySpan:
        return self.subject.plan(self.check.shape(decoder), length, **facts)

    # ------------------------------------------------------------ comparisons

    def same(self, name: str, got: Played, want: Played) -> None:
        forced = min(len(got.logprobs), len(want.logprobs))  # brief runs force a part of the trajectory
        self.enter(Row(name, got.logprobs.numel(), _gap(got.logprobs, want.logprobs[:forced])))

    def bits(self, name: str, got: dict[str, Tensor], want: dict[str, Tensor]) -> None:
        assert got.keys() == want.keys()
        worst = max(_gap(got[key], want[key]) for key in got)
        self.enter(Row(name, sum(t.numel() for t in got.values()), worst))

    def enter(self, row: Row) -> None:
        self.rows.append(row)
        if self.stop and not row.good:
            raise _Noticed(f"{row.name}: differs by up to {row.largest:g}")

    def drift(self, name: str, got: Played, want: Played) -> None:
        self.drifts.append(measure_drift(name, got.logprobs, want.logprobs, self.check.sizes.window))

    # ------------------------------------------------------------------- runs

    def cold(self) -> None:
        """Trimming and chunking without a cache."""
        check, stage, s = self.check, self.stage, self.subject
        least = check.sizes.window + check.sizes.slack + B
        self.progress("cold: off, exact and bounded")
        self.off_at = self.place()
        off = play(stage, s, self.off_at, self.short, self.plan("off", check.first))
        self.same("all rows, verify steps with rollback = definition", off, check.truth["off"])
        bounded_at = self.place()
        bounded = play(stage, s, bounded_at, self.short, self.plan("bounded", check.first))
        self.same("bounded decoder = definition", bounded, check.truth["bounded"])
        self.bits(
            "block KV of a bounded prefill = of a full one",
            block_rows(bounded_at, 0, check.first),
            block_rows(self.off_at, 0, check.first),
        )
        self.bits(
            "windows up to the cut, bounded = full",
            window_rows(bounded_at, check.end - 2, self.up_to_cut),
            window_rows(self.off_at, check.end - 2, self.up_to_cut),
        )
        self.used -= 1  # the slot and blocks of the bounded run are free again
        budget = max(check.sizes.window + check.sizes.slack, (check.first - 5) // 2)  # would leave a chunk of 5 rows
        chunked = play(stage, s, self.place(), self.brief, self.plan("bounded", check.first), budget=budget)
        self.same("bounded decoder in chunks = definition", chunked, check.truth["bounded"])
        self.used -= 1
        exact = play(stage, s, self.place(), self.brief, self.plan("exact", check.first), budget=least)
        self.same("exact tail in chunks = all rows", exact, check.truth["off"])
        self.used -= 1
        self.drift(DECODER, bounded, off)

    def hits(self) -> None:
        """A hit with its windows, and one without."""
        check, stage, s, hit = self.check, self.stage, self.subject, 2 * B
        self.progress("prefix hits: with windows, without")
        cold_at = self.place()
        cold = play(stage, s, cold_at, self.brief, self.plan("bounded", check.first), stop=hit)
        # windows at the hit are those of a cold run that stopped there
        stopped_at = self.place()
        self.prefill_to(stopped_at, hit)
        before = block_rows(cold_at, 0, hit)

        exact_at = self.place(cold_at.blocks[:2])
        span = self.plan("bounded", check.first, hit=hit, windows_at=frozenset({hit}))
        if span.window_end is not None:
            layers = s.snapshot_layers(span.shape)
            self.kv.copy_window(stopped_at.slot, exact_at.slot, span.window_end, layers)
        exact = play(stage, s, exact_at, self.brief, span)
        self.bits("hit with windows = cold run cut there", {"log p": exact.logprobs}, {"log p": cold.logprobs})
        self.bits(
            "block KV after that hit", block_rows(exact_at, hit, check.first), block_rows(cold_at, hit, check.first)
        )
        self.bits("cached block KV untouched by that hit", block_rows(cold_at, 0, hit), before)

        older = self.plan("bounded", check.first, hit=hit, windows_at=frozenset({hit - B}))
        self.used -= 1
        replay_at = self.place(cold_at.blocks[:2])
        if older.window_end is not None:
            self.kv.copy_window(stopped_at.slot, replay_at.slot, older.window_end - B, self.up_to_cut)
        replay = play(stage, s, replay_at, self.brief, older, budget=check.sizes.window * 2 + check.sizes.slack + B)
        self.bits("cached block KV untouched by a replay", block_rows(cold_at, 0, hit), before)
        self.same("hit without windows = definition", replay, check.truth["replay"])
        self.claims(older, replay_at, cold_at)
        self.drift(HIT, replay, cold)
        self.used -= 3

    def claims(self, span: ReplaySpan, replay_at: Place, cold_at: Place) -> None:
        """What a pool would keep as exact must be what a cold run computes."""
        end = self.check.first
        if self.subject.lineage(span) == "exact":
            kept, cold = window_rows(replay_at, end, self.up_to_cut), window_rows(cold_at, end, self.up_to_cut)
            worst = max(_gap(kept[key], cold[key]) for key in kept)
            self.enter(Row("windows kept as exact = of a cold run", len(kept), worst))

    def prefill_to(self, at: Place, end: int) -> None:
        span = self.plan("bounded", self.check.first)
        self.stage.forward(at, self.short, 0, end, self.subject.limits(span, 0, end), wanted="none")

    def second_turn(self) -> None:
        """Windows copied while decoding serve the next prompt."""
        check, stage, s = self.check, self.stage, self.subject
        self.progress("second turn: windows copied at a pivot while decoding")
        first_at, saved = self.place(), Place(self.kv, 9, [])
        layers = s.snapshot_layers(check.shape("bounded"))

        def keep(pivot: int) -> None:
            self.kv.copy_window(first_at.slot, saved.slot, pivot, layers)

        played = play(stage, s, first_at, self.short, self.plan("bounded", check.first), on_pivot=keep)
        if not played.pivots:
            self.enter(Row("a pivot is copied while decoding", 1, 1.0))
            return
        pivot = played.pivots[-1]
        span = self.plan("bounded", check.second, hit=pivot, windows_at=frozenset({pivot}))
        at = self.place(first_at.blocks[: pivot // B])
        self.kv.copy_window(saved.slot, at.slot, span.reused, layers)
        second = play(stage, s, at, check.ids, span)
        self.same("second turn from copied windows = definition", second, check.truth["second"])
        self.used -= 2

    def names(self) -> None:
        """The same blocks in another order are another prompt."""
        check, stage, s = self.check, self.stage, self.subject
        self.progress("names: the same blocks in another order")
        held = dict(zip(s.keys(ROOT, [], self.short), self.off_at.blocks, strict=False))
        ids = check.swapped()
        found: list[int] = []
        for key in s.keys(ROOT, [], ids):
            if key not in held:
                break
            found.append(held[key])
        span = self.plan("bounded", check.first, hit=len(found) * B)
        other = play(stage, s, self.place(found[: span.reused // B]), ids, span)
        self.same("blocks in another order are not reused", other, check.truth["swapped"])


def _gap(a: Tensor, b: Tensor) -> float:
    """Largest absolute difference; infinite where one is not a number or the shapes differ."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    worst = (a.double() - b.double()).abs().max().item()
    return worst if worst == worst else float("inf")


def measure_drift(name: str, got: Tensor, want: Tensor, window: int) -> Drift:
    """Drift of log-probabilities [C, V] from ``want``: KL(want ‖ got) per position, top-1 and top-20 agreement."""
    kl = (want.exp() * (want - got)).sum(-1).clamp(min=0)
    k = min(TOP, want.shape[1])
    top, mine = want.topk(k, -1).indices, got.topk(k, -1).indices
    overlap = (top.unsqueeze(-1) == mine.unsqueeze(-2)).any(-1).float().mean().item()
    best = (want.argmax(-1) == got.argmax(-1)).float().mean().item()
    late = kl[window:]
    return Drift(
        name=name,
        positions=len(kl),
        mean_kl=kl.mean().item(),
        max_kl=kl.max().item(),
        late_kl=late.mean().item() if len(late) else None,
        top1=best,
        overlap=overlap,
        max_logprob=(got - want).abs().max().item(),
    )
