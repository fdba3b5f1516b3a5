"""``Engine``: the façade that every operator job uses. open / submit / step / stream / generate / abort / close."""

from __future__ import annotations

import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np

from deepinfer_engine.build_command import build_command
from deepinfer_engine.cache.open_tiers import open_tiers
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.resources import model_dir as embedded_dir
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.mesh import Mesh
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.rendezvous import World
from deepinfer_engine.dist.share import Share
from deepinfer_engine.eplb.record import Balance
from deepinfer_engine.eplb.stats import ExpertStats
from deepinfer_engine.errors import NotReadyError, UsageError
from deepinfer_engine.launch import EMBEDDED, check_device, check_model, prepare
from deepinfer_engine.runtime.expert_watch import WINDOW_SLACK, ExpertWatch, recordable_steps
from deepinfer_engine.runtime.host import Capacity, host_runner, replay_shape
from deepinfer_engine.runtime.lane import InlineLane, Lane, ThreadLane
from deepinfer_engine.runtime.leader import lead_runner
from deepinfer_engine.runtime.rebalance import Rebalance, Rebalancer, RebalanceSettings
from deepinfer_engine.runtime.runner import Flight, Runner, StepOutput
from deepinfer_engine.runtime.step_curve import planner_for
from deepinfer_engine.sample.answer import AnswerTrack, ThinkMarks
from deepinfer_engine.sample.grammar import GrammarService, GrammarState, checked_grammar, require_library, vocabulary
from deepinfer_engine.sample.sampler import NON_FINITE, choice_seed, token_bits
from deepinfer_engine.sched.limits import Limits
from deepinfer_engine.sched.scheduler import Drawn, Scheduler
from deepinfer_engine.spec.budget import survival
from deepinfer_engine.spec.calibrate import regime_of
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import (
    Completion,
    GrammarSpec,
    Request,
    Sequence,
    StepPlan,
    Timing,
    TokenEvent,
    TokenLogprob,
    Usage,
)
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.reader import ShardReport
from deepinfer_kernels.triton import families

#: steps whose host times are kept
_KEPT_STEPS = 4096
#: seconds a step waits for a grammar when nothing else can run
_COMPILE_WAIT_S = 0.05


@dataclass
class HostTimes:
    """Milliseconds of the last steps: planning, building tensors, post-processing, and the step itself."""

    schedule_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    build_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    post_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))
    run_ms: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT_STEPS))


@dataclass
class DraftCounts:
    """Verify rows run, drafts they verified and accepted, tokens they committed (the one that is always drawn too).

    ``verified_at`` and ``accepted_at`` [J] split the drafts by their place in the row.
    """

    rows: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    verified_at: Counter[int] = field(default_factory=Counter)
    accepted_at: Counter[int] = field(default_factory=Counter)

    @property
    def tokens_per_row(self) -> float:
        return self.tokens / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class RankWork:
    """By attention rank: tokens computed, and rows added up over all steps."""

    tokens: tuple[int, ...]
    rows: tuple[int, ...]


class Engine:
    """One model under one profile in this process. Not thread-safe: one caller drives ``step``.

    With ``sched.overlap`` a call of ``step`` plans and launches the next step before it waits for the one in flight,
    and post-processes that one while the next runs; without, each step is finished before the next is planned. Both
    loops draw the same tokens. ``overlap`` says which one runs: in one process on a CPU there is nothing that a step
    could run beside, so planning ahead would only add rows of requests that have just ended.
    """

    def __init__(
        self,
        profile: Profile,
        checkpoint: Checkpoint,
        tokenizer: Tokenizer,
        runner: Runner,
        scheduler: Scheduler,
        shards: tuple[ShardReport, ...],
        world: World | None = None,
        grammars: GrammarService | None = None,
    ):
        self.profile = profile
        self.checkpoint = checkpoint
        self.tokenizer = tokenizer
        self.runner = runner
        self.scheduler = scheduler
        self.shards = shards
        self.world = world
        self.overlap = profile.sched.overlap and runner.lane.beside
        self.times = HostTimes()
        self.drafts = DraftCounts()
        self._survivals: dict[int, np.ndarray] = {}  # [J] by uid, of the drafts that the next step may verify
        self.steps = 0
        self._compiled_before = len(families.compiled)
        self._marks = ThinkMarks.of(tokenizer)
        self._tracks: dict[int, AnswerTrack] = {}
        self._started: dict[int, float] = {}
        self._live: dict[str, set[int]] = {}
        self._flight: Flight | None = None
        self._launched = 0
        self._rank_tokens = np.zeros(profile.parallel.dp, np.int64)
        self._rank_rows = np.zeros(profile.parallel.dp, np.int64)
        self._rebalancer = self._make_rebalancer()
        self._grammars = grammars
        self._compiling: dict[int, Sequence] = {}
        # inside the reasoning a constrained answer may not end: it would have no constrained part
        self._thoughts = token_bits(self.config.vocab_size, None, (self.config.eos_token_id,))

    @classmethod
    def open(
        cls,
        profile: Profile | str | Path,
        model: str | Path | None = None,
        *,
        sets: Items[str] = (),
        device: str | None = None,
        progress: Callable[[int, int], None] | None = None,
        record_experts: bool = False,
        placement: Placement | None = None,
        world: World | None = None,
        lane: Lane | None = None,
        grammars: Mapping[str, GrammarSpec] | None = None,
    ) -> Engine:
        """Validate and load a model under a profile (a name, a path or a loaded one) with ``sets`` overrides.

        ``model`` None is the embedded one. Without ``device`` the profile is fitted to this machine first, as
        ``deepinfer run`` does; with it, it is used as it stands. ``progress(done, total)`` counts loaded bytes.
        ``record_experts`` keeps every step's expert counts for ``expert_stats``. ``placement``: where experts
        live at start, if not where the profile says. ``world``: further processes that share the mesh; the engine
        ends them when it closes. ``lane``: where steps are launched, if not where ``lane_for`` says. ``grammars``, by
        the name that complaints give them, are compiled before weights are read.
        Raises ``ProfileError`` (2), ``UsageError`` (2), ``CheckpointError`` (4) or ``NotReadyError`` (3).
        """
        if not isinstance(profile, Profile):
            profile = load_profile(profile, sets).profile
        elif sets:
            raise UsageError("overrides apply to a profile given by name or path, this one is loaded already")
        if device is None:
            launch = prepare(profile, model)
            profile, checkpoint, device = launch.profile, launch.checkpoint, launch.device
        else:
            checkpoint = Checkpoint.open(embedded_dir(EMBEDDED) if model is None else model)
            check_model(profile, checkpoint.config)
            check_device(profile, device)
        tokenizer = Tokenizer.from_dir(checkpoint.directory)
        config = checkpoint.config
        if world is not None and profile.spec.verify != "off":
            raise NotReadyError("spec.verify: drafts are verified in one process only", hint="--set spec.verify=off")
        limits = limits_of(profile, config)
        lane = lane or lane_for(profile, device, processes=1 if world is None else world.size)
        with ExitStack() as undo:  # processes that were started end with a load that fails
            if world is None:
                share = Share(profile.parallel.ep, profile.parallel.dp)
                host = partial(host_runner, share=share)
            else:
                undo.callback(world.close)
                host = partial(lead_runner, world=world)
            compiled = None
            if grammars:
                require_library()
                compiled = _grammar_service(profile, tokenizer, config)
                undo.callback(compiled.close)
                for name, spec in grammars.items():
                    compiled.require(spec, name)
            runner, shards = host(
                profile, checkpoint, tokenizer, lane, device=device, placement=placement, progress=progress
            )
            shape = replay_shape(profile, checkpoint)
            tiers = open_tiers(profile, shape, checkpoint, runner.kv.layout) if profile.cache.prefix else None
            if tiers is not None and world is not None:
                tiers.sources = ()  # the other processes take whole blocks
            runner.watch = _watch(profile, config, runner.mesh, device, recording=record_experts)
            scheduler = Scheduler(limits, shape, tiers, planner_for(profile, checkpoint, runner, device))
            engine = cls(profile, checkpoint, tokenizer, runner, scheduler, shards, world, compiled)
            undo.pop_all()
        return engine

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    # ------------------------------------------------------------- requests

    def submit(self, request: Request) -> None:
        """Queue a request, all its choices. Refuses ids outside the vocabulary, image tokens, what can never fit."""
        if request.id in self._live:
            raise UsageError(f"request id {request.id!r} is already in flight")
        _check_ids(request, self.config)
        sampling = request.sampling
        drafting = self.profile.spec
        unsteady = drafting.mode == "rejection" and drafting.verify == "adaptive"
        if unsteady and sampling.seed is not None and sampling.temperature:
            raise UsageError(
                f"request {request.id!r}: a seed cannot be honoured with spec.mode rejection and spec.verify adaptive: "
                "what is verified depends on the other requests",
                hint="use spec.mode=coupled, or spec.verify=fixed",
            )
        grammar = None
        if request.grammar is not None:
            if sampling.ignore_eos:
                raise UsageError(f"request {request.id!r}: ignore_eos and a grammar exclude each other")
            require_library()
            grammar = checked_grammar(request.grammar)
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        choices = [
            Sequence(
                request=request,
                token_ids=list(request.token_ids),
                num_prompt=len(request.token_ids),
                seed=choice_seed(seed, index),
                index=index,
            )
            for index in range(sampling.n)
        ]
        now = time.perf_counter()
        for seq in choices:
            uid = self.scheduler.reserve(seq)
            if grammar is None:
                self.scheduler.submit(seq)
            else:
                self._compiling[uid] = seq
                if self._grammars is None:
                    self._grammars = _grammar_service(self.profile, self.tokenizer, self.config)
                self._grammars.request(uid, grammar)
            self._tracks[seq.uid] = AnswerTrack(seq, self.tokenizer, self._marks)
            self._started[seq.uid] = now
        self._live[request.id] = {seq.uid for seq in choices}

    @property
    def busy(self) -> bool:
        """Whether a request is queued or running, or a step in flight."""
        return self.scheduler.busy or self._flight is not None or bool(self._compiling)

    def in_flight(self) -> tuple[str, ...]:
        """Ids of the requests that are queued or running, in order of submission."""
        return tuple(self._live)

    def abort(self, request_id: str) -> list[Completion]:
        """End a request in any state; its completions carry what was generated. Empty when it is not in flight."""
        now = time.perf_counter()
        ended = []
        for uid in sorted(self._live.get(request_id, ())):
            seq = self._compiling.pop(uid, None)
            if seq is not None:
                seq.state, seq.finish_reason = "finished", "abort"
            else:
                seq = self.scheduler.abort(uid)
            assert seq is not None
            ended.append(seq)
        return [self._complete(seq, now) for seq in ended]

    def generate(self, requests: Iterable[Request]) -> list[Completion]:
        """Run requests to their end; completions in order of requests, then choices."""
        order = {}
        for request in requests:
            self.submit(request)
            order[request.id] = len(order)
        done = [e for e in self.stream() if isinstance(e, Completion) and e.request_id in order]
        return sorted(done, key=lambda c: (order[c.request_id], c.index))

    def close(self) -> None:
        """Abort everything in flight and let the lane end."""
        with ExitStack() as last:  # in reverse order, each of them whatever the others raise
            if self.world is not None:
                last.callback(self.world.close)
            last.callback(self.scheduler.reuse.close)
            if self._grammars is not None:
                last.callback(self._grammars.close)
                self._grammars = None
            if self._rebalancer is not None:
                last.callback(self._rebalancer.close)
            last.callback(self.runner.lane.close)
            flight, self._flight = self._flight, None
            if flight is not None:
                last.callback(self.runner.collect, flight)
            for request_id in list(self._live):
                self.abort(request_id)

    # --------------------------------------------------------------- experts

    def balance(self, *, now: bool = False) -> Balance | None:
        """How evenly ranks shared the experts' work so far; None on a single rank that is not recorded.

        A few steps behind what ran, unless ``now``.
        """
        watch = self.runner.watch
        if watch is None:
            return None
        if now:
            self._gather(watch)
        return watch.balance()

    def restart_balance(self) -> None:
        """Let ``balance`` speak of the steps from here on."""
        if self.runner.watch is not None:
            self._gather(self.runner.watch)
            self.runner.watch.meter.restart()

    def expert_stats(self) -> ExpertStats:
        """Tokens per step, layer and expert, the newest ``recordable_steps``; for an engine opened to record them."""
        watch = self.runner.watch
        if watch is None or not watch.recording:
            raise UsageError("this engine does not record expert counts", hint="open it with record_experts=True")
        self._gather(watch)
        return watch.stats(self.checkpoint.digest)

    @property
    def rank_work(self) -> RankWork:
        """What the attention ranks did so far."""
        return RankWork(tuple(self._rank_tokens.tolist()), tuple(self._rank_rows.tolist()))

    @property
    def rebalances(self) -> tuple[Rebalance, ...]:
        """What live rebalancing did so far, oldest first; complete after ``close``."""
        if self._rebalancer is None:
            return ()
        self._rebalancer.observe()
        return tuple(self._rebalancer.log)

    def _make_rebalancer(self) -> Rebalancer | None:
        runner, eplb = self.runner, self.profile.eplb
        if self.profile.ranks == 1 or not eplb.period_steps:
            return None
        assert runner.watch is not None and runner.site is not None
        settings = RebalanceSettings(
            window_steps=eplb.window_steps,
            period_steps=eplb.period_steps,
            max_bytes_per_step=eplb.max_bytes_per_step,
            top_k=self.config.num_experts_per_tok,
            config_digest=self.config.digest,
            weights_digest=self.checkpoint.digest,
        )
        return Rebalancer(
            settings,
            watch=runner.watch,
            site=runner.site,
            lane=runner.lane,
            step_ms=lambda: float(np.median(self.times.run_ms)) if self.times.run_ms else 0.0,
            tell=None if self.world is None else runner.command,
        )

    def _gather(self, watch: ExpertWatch) -> None:
        self.runner.lane.launch(watch.flush).result()
        watch.take(wait=True)

    def notes(self) -> list[str]:
        """What went wrong beside the answers, one line each; complete after ``close``."""
        lines = self.scheduler.reuse.notes()
        if self.compiled:
            lines = [
                *lines,
                f"{len(self.compiled)} kernels were compiled while serving, first {self.compiled[0]}: no kernel cache "
                f"held them ({build_command(self.profile, self.checkpoint.directory)})",
            ]
        return lines

    @property
    def compiled(self) -> tuple[str, ...]:
        """Names of the kernels that this process has compiled since the engine was made; none when all were built."""
        return tuple(families.compiled[self._compiled_before :])

    @property
    def fallbacks(self) -> dict[str, tuple[str, str]]:
        """Operations that torch computes here in place of compiled kernels: which, and why not."""
        return self.runner.ops.fallbacks

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---------------------------------------------------------------- steps

    def step(self) -> list[TokenEvent | Completion]:
        """Run one step; the tokens that came back and the requests that ended. Empty when idle.

        With overlap the results are those of the step launched by the call before.
        """
        events: list[TokenEvent | Completion] = self._take_compiled() if self._compiling else []
        began = time.perf_counter()
        plan = self.scheduler.schedule()
        self.times.schedule_ms.append((time.perf_counter() - began) * 1000)
        flight = None
        if not plan.rows and self._flight is None:
            self.scheduler.reuse.wait()
        if plan.rows:
            self._note_starts(plan, began)
            if self._rebalancer is not None:
                self._rebalancer.before_step(self._launched)
            self._launched += 1
            dp_rank = [row.dp_rank for row in plan.rows]
            np.add.at(self._rank_tokens, dp_rank, [row.count for row in plan.rows])
            np.add.at(self._rank_rows, dp_rank, 1)
            flight = self.runner.forward(plan, self.scheduler.running, self._flight)
        if self._flight is not None:
            events += self._collect(self._flight)
            self._flight = None
        if flight is not None:
            self.runner.sample(flight, self.scheduler.running, self._masks(flight))
            if self.overlap:
                self._flight = flight
            else:
                events += self._collect(flight)
        return events

    def _note_starts(self, plan: StepPlan, now: float) -> None:
        """Keep how long a sequence waited for the first step that runs it. Prompt rows are the last of a plan."""
        for row in reversed(plan.rows):
            if row.kind != "prefill":
                break
            seq = self.scheduler.running[row.seq_id]
            if seq.queued_s is None:
                seq.queued_s = now - self._started[seq.uid]

    def stream(self) -> Iterator[TokenEvent | Completion]:
        """Events of ``step`` until nothing is in flight."""
        while self.busy:
            yield from self.step()

    # ------------------------------------------------------------- grammars

    def _take_compiled(self) -> list[TokenEvent | Completion]:
        """Queue the choices whose grammar is there; completions of those whose grammar cannot be compiled."""
        assert self._grammars is not None
        idle = not self.scheduler.busy and self._flight is None
        events: list[TokenEvent | Completion] = []
        for outcome in self._grammars.poll(_COMPILE_WAIT_S if idle else 0.0):
            seq = self._compiling.pop(outcome.ticket, None)
            if seq is None:
                continue  # aborted meanwhile
            if outcome.error is None:
                words = -(-self.config.vocab_size // 32)
                self._tracks[seq.uid].grammar = GrammarState(outcome.grammar, words, opened=outcome.opened)
                self.scheduler.submit(seq)
            else:
                seq.state, seq.finish_reason, seq.error = "finished", "error", "grammar"
                events.append(self._complete(seq, time.perf_counter(), detail=outcome.error.message))
        return events

    def _masks(self, flight: Flight) -> dict[int, np.ndarray]:
        """Masks of the constrained rows that are about to be drawn: int32 words, with drafts one row per place."""
        masks = {}
        spec = self.runner.speculation
        for row in flight.plan.rows:
            if not row.sample or row.seq_id not in self.scheduler.running:
                continue
            track = self._tracks[row.seq_id]
            if track.grammar is None:
                continue
            found = track.masks(self._thoughts, self.runner.ahead(row))
            if spec is None:
                if found[0] is not None:
                    masks[row.seq_id] = found[0]
            elif any(words is not None for words in found):
                everything = np.full_like(self._thoughts, -1)
                found += [None] * (spec.tokens + 1 - len(found))
                masks[row.seq_id] = np.stack([everything if words is None else words for words in found])
        return masks

    # ------------------------------------------------------------- results

    def _collect(self, flight: Flight) -> list[TokenEvent | Completion]:
        out = self.runner.collect(flight)
        now = time.perf_counter()
        self.steps += 1
        self.times.build_ms.append(out.build_ms)
        self.times.run_ms.append(out.run_ms)
        self.scheduler.observe(flight.plan, out.run_ms)
        if self.runner.watch is not None:
            self.runner.watch.take()
        events: list[TokenEvent | Completion] = []
        if out.lost:
            self.scheduler.lose(out.lost)
        self._observe_drafts(flight, out)
        sound: dict[int, Sequence] = {}
        seen: dict[int, int] = {}
        for drawn in self.scheduler.committed(flight.plan, out.tokens):
            uid = drawn.seq.uid
            at = seen[uid] = seen.get(uid, -1) + 1
            self._count_drafts(drawn.seq, out.verified.get(uid, 0), out.accepted.get(uid, 0), at)
            if drawn.reason == "error":
                sound.pop(uid, None)
            else:
                sound[uid] = drawn.seq
            logprobs = out.logprobs.get(uid)
            events += self._post(drawn, None if logprobs is None else logprobs[at], now)
        # after the commit, which tells whose exports are worth keeping
        self.scheduler.reuse.keep(out.moved, list(sound.values()))
        self.times.post_ms.append((time.perf_counter() - now) * 1000)
        return events

    def _observe_drafts(self, flight: Flight, out: StepOutput) -> None:
        """Tell the planner what the drafts of earlier steps came to, and what those of this step may be worth."""
        planner, spec = self.scheduler.planner, self.runner.speculation
        if planner is None or spec is None:
            return
        # a row that ended inside its accepted drafts says nothing about those behind
        judged = [
            (self._survivals[u][:n], out.accepted[u])
            for u, n in out.verified.items()
            if u in self._survivals and len(out.tokens[u]) > out.accepted[u]
        ]
        hoped = sum(float(s.sum()) for s, _ in judged)
        if hoped:
            planner.outcome(hoped, sum(accepted for _, accepted in judged))
        self._survivals = {}
        kept = [u for u in flight.drawn_rows if u in self.scheduler.running] if flight.plan.draft else []
        if kept:
            params = [self.scheduler.running[u].request.sampling for u in kept]
            regime = [regime_of(p.temperature, spec.mode) for p in params]
            logits = np.array([self.runner.confidence[u] for u in kept]) / spec.host_temperatures[regime]
            found = survival(1 / (1 + np.exp(-logits.clip(-80, 80))))
            self._survivals = dict(zip(kept, found, strict=True))
            planner.observe(found)

    def _count_drafts(self, seq: Sequence, verified: int, accepted: int, at: int) -> None:
        """Count the ``at``-th token of a row that verified drafts."""
        if not verified:
            return
        if at == 0:
            seq.drafted += verified
            self.drafts.rows += 1
            self.drafts.drafted += verified
            self.drafts.verified_at.update(range(verified))
        if at < accepted:
            self.drafts.accepted_at[at] += 1
        seq.accepted += at < accepted
        self.drafts.accepted += at < accepted
        self.drafts.tokens += 1

    def _post(self, drawn: Drawn, logprob: TokenLogprob | None, now: float) -> list[TokenEvent | Completion]:
        """Events of one drawn token: what may be shown, and the completion if the choice ended with it."""
        seq, token, reason = drawn
        track = self._tracks[seq.uid]
        if seq.first_token_s is None:
            seq.first_token_s = now - self._started[seq.uid]
        if reason == "error":
            seq.error = "non_finite_logits" if token == NON_FINITE else "no_token_allowed"
            return [*track.finish(), self._complete(seq, now)]
        if reason == "stop":
            track.stop_token = None if token == self.config.eos_token_id else token
            return [*track.finish(), self._complete(seq, now)]
        if logprob is not None:
            logprob = replace(logprob, top=logprob.top[: seq.request.sampling.top_logprobs])
        events: list[TokenEvent | Completion] = [*track.push(token, logprob)]
        if track.cut is not None:
            if reason is None:
                self.scheduler.finish(seq, "stop")
            seq.finish_reason = "stop"  # a stop string that ends with the last allowed token is a stop
        elif reason is None:
            return events
        return [*events, *track.finish(), self._complete(seq, now)]

    def _complete(self, seq: Sequence, now: float, *, detail: str = "") -> Completion:
        assert seq.finish_reason is not None
        request = seq.request
        live = self._live[request.id]
        live.discard(seq.uid)
        if not live:
            del self._live[request.id]
        self.runner.forget(seq.uid)
        track = self._tracks.pop(seq.uid)
        track.finish()  # an abort keeps what was held back
        seeded = request.sampling.temperature == 0 or request.sampling.seed is not None
        spec = self.profile.spec
        if spec.verify != "off" and spec.mode == "rejection" and request.sampling.temperature:
            seeded = False  # which draw a position takes depends on what was drafted
        return Completion(
            request_id=request.id,
            token_ids=tuple(track.kept),
            finish_reason=seq.finish_reason,
            reproducible=seeded and self.profile.numerics.batch_invariant,
            usage=Usage(
                prompt=seq.num_prompt,
                cached=0 if seq.span is None else seq.span.reused,
                replayed=0 if seq.span is None else seq.span.replayed,
                generated=seq.num_generated,
                drafted=seq.drafted,
                accepted=seq.accepted,
                preemptions=seq.preemptions,
            ),
            timing=Timing(seq.first_token_s, now - self._started.pop(seq.uid), seq.queued_s),
            index=seq.index,
            text=self.tokenizer.decode(track.kept) + track.tail,
            tail=track.tail,
            stop_reason=track.cut.stop if track.cut is not None else track.stop_token,
            error=seq.error,
            error_detail=detail,
            logprobs=tuple(track.logprobs) if request.sampling.logprobs else None,
        )


def lane_for(profile: Profile, device: str, *, processes: int) -> Lane:
    """Where the steps of an engine are launched: a device's queue, a thread beside other processes, or the caller."""
    if device.startswith("cuda"):
        return InlineLane(beside=True)
    return ThreadLane() if profile.sched.overlap and processes > 1 else InlineLane()


def _grammar_service(profile: Profile, tokenizer: Tokenizer, config: ModelConfig) -> GrammarService:
    settings = profile.grammar
    return GrammarService(
        vocabulary(tokenizer, config.vocab_size, config.eos_token_id),
        workers=settings.workers,
        timeout_s=float(settings.timeout_s),
        cache_bytes=settings.cache_mib << 20,
    )


def _watch(profile: Profile, config: ModelConfig, mesh: Mesh, device: str, *, recording: bool) -> ExpertWatch | None:
    """Counts are kept for a file or for planning, and their balance wherever there is more than one rank."""
    if not recording and profile.ranks == 1:
        return None
    keep = recordable_steps(config) if recording else 0
    if profile.eplb.period_steps:
        keep = max(keep, profile.eplb.window_steps + WINDOW_SLACK)
    return ExpertWatch(config, mesh.placement.slots_LRS, keep=keep, device=device, recording=recording)


def _check_ids(request: Request, config: ModelConfig) -> None:
    """Refuse token ids outside the vocabulary, and image tokens."""
    last, ids = config.vocab_size - 1, request.token_ids
    plain = set(map(type, ids)) <= {int} and (not ids or 0 <= min(ids) <= max(ids) <= last)
    for position, token in enumerate(() if plain else ids):  # find the one to name
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= last:
            raise UsageError(f"request {request.id!r}: token {token!r} at position {position} is not in 0..{last}")
    if config.image_token_id is not None and config.image_token_id in request.token_ids:
        raise UsageError(f"request {request.id!r}: image tokens need the vision tower, which this engine skips")
    p = request.sampling
    named = {
        "logit_bias": [token for token, _ in p.logit_bias],
        "allowed_token_ids": p.allowed_token_ids or (),
        "banned_token_ids": p.banned_token_ids,
        "stop_token_ids": p.stop_token_ids,
    }
    for name, tokens in named.items():
        bad = [token for token in tokens if token > last]
        if bad:
            raise UsageError(f"request {request.id!r}: {name} names token {bad[0]}, the vocabulary is 0..{last}")


def limits_of(profile: Profile, config: ModelConfig) -> Limits:
    """What a profile has room for on one model."""
    sched, capacity = profile.sched, Capacity.of(profile)
    return Limits(
        dp=profile.parallel.dp,
        rows=capacity.rows,
        blocks=capacity.blocks,
        chunk_tokens=sched.prefill_chunk_tokens,
        context_tokens=sched.max_context_tokens,
        eos_token_id=config.eos_token_id,
        step_budget_ms=sched.step_budget_ms,
        draft_tokens=0 if profile.spec.verify == "off" else profile.spec.draft_tokens,
        positions=config.max_position_embeddings,
        profile=f"profile {profile.name}",
    )
