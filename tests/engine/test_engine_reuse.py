"""The engine with a prefix cache and replays: what must be the same bit by bit is, and usage says what was reused."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deepinfer_engine.cache.prefix import extend_keys
from deepinfer_engine.cache.store.record import PAGE
from deepinfer_engine.cache.tiers import Tiers
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import ProfileError
from deepinfer_engine.runtime.lane import InlineLane, Lane, ThreadLane
from deepinfer_engine.runtime.stopwatch import Stopwatch
from deepinfer_engine.types import Completion, Request, SamplingParams

CHECKPOINT = Path(__file__).resolve().parents[1] / "vectors" / "v41-tiny-a" / "checkpoint"
BASE = {
    "sched.max_context_tokens": "1024",
    "cache.hbm_tokens_per_rank": "4096",
    "sched.max_rows_per_rank": "4",
    "sched.prefill_chunk_tokens": "256",
    "numerics.mode": "fast",
    "numerics.batch_invariant": "true",
    "replay.decoder": "bounded",
}
PREFIX = {"cache.prefix": "true"}
WINDOWS = {**PREFIX, "cache.swa_pool_gib_per_rank": "0.01"}
REPLAY = {**PREFIX, "replay.encoder": "bounded"}


def open_engine(lane: Lane | None = None, **changes: str) -> Engine:
    chosen = {**BASE, **changes}
    profile = load_profile("cpu-nano", [f"{key}={value}" for key, value in chosen.items()]).profile
    return Engine.open(profile, CHECKPOINT, device="cpu", lane=lane or ThreadLane())


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    rng = random.Random(seed)
    return tuple(rng.randrange(3, 360) for _ in range(length))


def ask(engine: Engine, ids: tuple[int, ...], name: str = "r", new: int = 12) -> Completion:
    sampling = SamplingParams(max_tokens=new, ignore_eos=True, logprobs=True)
    (done,) = engine.generate([Request(name, ids, sampling)])
    assert not engine.busy
    engine.scheduler.verify()
    assert all(device.used == 0 for device in engine.scheduler.reuse.device)
    return done


def drawn(done: Completion) -> list[tuple[int, float]]:
    assert done.logprobs is not None
    return [(item.token_id, item.logprob) for item in done.logprobs]


def tiers_of(engine: Engine) -> Tiers:
    assert engine.scheduler.reuse.tiers is not None
    return engine.scheduler.reuse.tiers


def store_of(engine: Engine) -> Any:
    """The store, of which tests replace methods."""
    return tiers_of(engine).store


def reused(done: Completion) -> tuple[int, int]:
    return done.usage.cached, done.usage.replayed


@pytest.fixture(scope="module")
def cold() -> dict[int, list[tuple[int, float]]]:
    """What a bounded engine without a cache draws, by prompt length."""
    with open_engine() as engine:
        return {length: drawn(ask(engine, prompt(length))) for length in (390, 523)}


def test_an_exact_tail_draws_what_all_rows_draw_in_any_chunks():
    results = []
    for changes in (
        {"replay.decoder": "off"},
        {"replay.decoder": "exact"},
        {"replay.decoder": "off", "sched.prefill_chunk_tokens": "97"},
        {"replay.decoder": "exact", "sched.prefill_chunk_tokens": "150"},
    ):
        with open_engine(**changes) as engine:
            results.append(drawn(ask(engine, prompt(390))))
    assert results[1:] == results[:1] * 3


def test_a_bounded_decoder_is_an_approximation_of_them(cold):
    with open_engine(**{"replay.decoder": "off"}) as engine:
        assert drawn(ask(engine, prompt(390))) != cold[390]


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_hit_with_its_windows_draws_the_bits_of_a_cold_run(cold, overlap):
    with open_engine(**WINDOWS, **{"sched.overlap": overlap}) as engine:
        first, second = ask(engine, prompt(390), "a"), ask(engine, prompt(390), "b")
        assert reused(first) == (0, 0) and reused(second) == (256, 0)
        assert drawn(first) == drawn(second) == cold[390]
        assert engine.scheduler.reuse.stats.windows_kept >= 1


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_a_second_turn_starts_from_windows_copied_while_decoding(overlap):
    with open_engine(**WINDOWS, **{"sched.overlap": overlap}) as engine:
        first = ask(engine, prompt(370), "a", new=24)  # passes 384
        turn = (*prompt(370), *first.token_ids, *prompt(60, 5))
        second = ask(engine, turn, "b")
        assert reused(second) == (384, 0)
    with open_engine() as engine:
        assert drawn(ask(engine, turn)) == drawn(second)


def test_a_hit_without_windows_is_replayed_or_computed(cold):
    with open_engine(**REPLAY) as engine:
        ask(engine, prompt(390), "a")
        replayed = ask(engine, prompt(390), "b")
        assert reused(replayed) == (256, 16)
        assert drawn(replayed) != cold[390], "a replay is an approximation"
        assert drawn(ask(engine, prompt(390), "c")) == drawn(replayed), "and the same one every time"
    with open_engine(**PREFIX) as engine:
        ask(engine, prompt(390), "a")
        computed = ask(engine, prompt(390), "b")
        assert reused(computed) == (0, 0) and drawn(computed) == cold[390]


def test_strict_lineage_keeps_no_window_of_a_replay():
    for strict, kept in (("true", 0), ("false", 1)):
        with open_engine(**{**WINDOWS, **REPLAY, "cache.strict_lineage": strict}) as engine:
            ask(engine, prompt(300), "a")
            windows = tiers_of(engine).windows
            for key in list(windows._held):
                windows._remove(key)
            assert ask(engine, prompt(300), "b").usage.replayed == 16
            assert len(windows) == kept


def test_blocks_return_from_host_memory_after_the_device_gave_them_up(cold):
    small = {**WINDOWS, "cache.hbm_tokens_per_rank": "1024", "cache.host_gib_per_rank": "0.01"}
    with open_engine(**small) as engine:
        first = ask(engine, prompt(390), "a")
        ask(engine, prompt(900, 7), "b")  # takes all eight blocks
        third = ask(engine, prompt(390), "c")
        assert tiers_of(engine).host.stats.hits >= 2
        assert reused(third) == (256, 0)
        assert drawn(first) == drawn(third) == cold[390]


@pytest.mark.parametrize("backend", ["segment", "posix"])
def test_blocks_return_from_the_store_in_another_process(cold, backend, tmp_path):
    changes = {**REPLAY, "cache.store.backend": backend, "cache.store.path": str(tmp_path / "kv")}
    with open_engine(**changes) as engine:
        ask(engine, prompt(390))
    with open_engine(**changes) as engine:
        again = ask(engine, prompt(390))
        assert reused(again) == (256, 16)
    with open_engine(**{**changes, "cache.tenant": "other"}) as engine:
        other = ask(engine, prompt(390))
        assert reused(other) == (0, 0) and drawn(other) == cold[390]


def poison(engine: Engine, *, at_call: int) -> None:
    """From its ``at_call``-th forward on, every row's logits are NaN."""
    forward, calls = engine.runner.model.forward, []

    def poisoned(batch, *args, **named):
        out = forward(batch, *args, **named)
        calls.append(1)
        if len(calls) >= at_call and len(out.logits):
            with torch.inference_mode():
                out.logits.fill_(torch.nan)
        return out

    engine.runner.model.forward = poisoned


def heal(engine: Engine) -> None:
    del engine.runner.model.forward  # the class has the right one


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_kv_of_non_finite_logits_reaches_no_tier(cold, overlap, tmp_path):
    store = {"cache.store.backend": "posix", "cache.store.path": str(tmp_path / "kv")}
    with open_engine(**WINDOWS, **store, **{"sched.overlap": overlap}) as engine:
        poison(engine, at_call=1)  # 390 tokens are two chunks: the first one's exports come before the first draw
        failed = ask(engine, prompt(390), "a")
        assert failed.error == "non_finite_logits" and engine.steps >= 2
        reuse = engine.scheduler.reuse
        assert len(tiers_of(engine).windows) == 0 and reuse.device[0].kept == 0
        heal(engine)
        assert reused(ask(engine, prompt(300, 8), "other")) == (0, 0)
    names = [path.stem for path in (tmp_path / "kv").rglob("*.kv")]
    assert len(names) == 2 and engine.notes() == [], "only the blocks of the sound request are stored"
    with open_engine(**WINDOWS, **store) as engine:
        again = ask(engine, prompt(390))
        assert reused(again) == (0, 0) and drawn(again) == cold[390]


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_blocks_and_windows_that_a_failed_request_took_over_are_forgotten_too(cold, overlap):
    small = {**WINDOWS, "cache.hbm_tokens_per_rank": "1024", "cache.host_gib_per_rank": "0.01"}
    with open_engine(**small, **{"sched.overlap": overlap}) as engine:
        ask(engine, prompt(390), "a")
        ask(engine, prompt(900, 7), "b")  # sends the blocks of a to host memory
        host, windows = tiers_of(engine).host, tiers_of(engine).windows
        keys = extend_keys(tiers_of(engine).root, [], prompt(390))
        assert any(key in host for key in keys) and any(windows.has(key, 0.0) for key in keys)
        poison(engine, at_call=1)
        failed = ask(engine, prompt(390), "c")
        assert reused(failed) == (256, 0) and failed.error == "non_finite_logits"
        assert not any(key in host for key in keys) and not any(windows.has(key, 0.0) for key in keys)
        heal(engine)
        again = ask(engine, prompt(390), "d")
        assert reused(again) == (0, 0) and drawn(again) == cold[390]


@pytest.mark.parametrize("backend", ["segment", "posix"])
def test_blocks_of_the_store_that_a_failed_request_took_over_are_deleted(cold, backend, tmp_path):
    changes = {**REPLAY, "cache.store.backend": backend, "cache.store.path": str(tmp_path / "kv")}
    with open_engine(**changes) as engine:
        ask(engine, prompt(390), "a")
        ask(engine, prompt(300, 8), "other")
    with open_engine(**changes) as engine:
        poison(engine, at_call=1)
        failed = ask(engine, prompt(390), "b")
        assert reused(failed) == (256, 16) and failed.error == "non_finite_logits"
    with open_engine(**changes) as engine:
        again = ask(engine, prompt(390), "c")
        assert reused(again) == (0, 0) and drawn(again) == cold[390]
        assert reused(ask(engine, prompt(300, 8), "other")) == (256, 16), "others stay"


@pytest.mark.parametrize("backend", ["segment", "posix"])
def test_a_store_that_cannot_be_read_costs_time_and_is_told(cold, backend, tmp_path, monkeypatch):
    changes = {**REPLAY, "cache.store.backend": backend, "cache.store.path": str(tmp_path / "kv")}
    with open_engine(**changes) as engine:
        ask(engine, prompt(390))
        assert engine.notes() == []

    def broken(fd, buffers, offset):
        raise OSError(5, "Input/output error")

    with open_engine(**changes) as engine:
        monkeypatch.setattr("os.preadv", broken)
        again = ask(engine, prompt(390))
        monkeypatch.undo()
        assert reused(again) == (0, 0) and drawn(again) == cold[390]
    (note,) = engine.notes()
    assert note.startswith("reading the KV store failed 3 times")
    with open_engine(**changes) as engine:
        assert reused(ask(engine, prompt(390))) == (256, 16), "an unreadable block is not lost"


def test_a_fetch_that_fails_is_a_miss(cold, tmp_path, monkeypatch):
    changes = {**REPLAY, "cache.store.backend": "posix", "cache.store.path": str(tmp_path / "kv")}
    with open_engine(**changes) as engine:
        ask(engine, prompt(390))
    with open_engine(**changes) as engine:
        store = store_of(engine)

        def broken(keys, arrived):
            raise RuntimeError("can't start new thread")

        monkeypatch.setattr(store, "get_sections", broken)
        again = ask(engine, prompt(390))
        assert reused(again) == (0, 0) and drawn(again) == cold[390]
        assert engine.scheduler.reuse.stats.fetch_failed == 1


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("backend", ["segment", "posix"])
def test_a_forward_waits_for_the_section_of_a_source_only_when_it_comes_to_its_layer(
    backend, overlap, tmp_path, monkeypatch
):
    """Sections after the first are held back until the forward asks for them: whoever waits for all is too late."""
    changes = {**REPLAY, "cache.store.backend": backend, "cache.store.path": str(tmp_path / "kv"),
               "sched.overlap": overlap, "cache.store.fetch_deadline_ms": "5000"}  # fmt: skip
    with open_engine(**changes) as engine:
        ask(engine, prompt(390))
    with open_engine(**changes) as engine:
        expected = drawn(ask(engine, prompt(390)))
    with open_engine(**changes) as engine:
        store, kv = store_of(engine), engine.runner.kv
        layers = [layer for layer, _ in tiers_of(engine).sources]
        asked = {layer: threading.Event() for layer in layers}
        read, arrive, order = store.get_sections, kv.arrive, []

        def held_back(keys, arrived):
            def deliver(index, found):
                assert not index or asked[layers[index]].wait(20)
                order.append(("read", layers[index]))
                arrived(index, found)

            read(keys, deliver)

        def asking(layer):
            order.append(("ask", layer))
            asked[layer].set()
            arrive(layer)

        monkeypatch.setattr(store, "get_sections", held_back)
        monkeypatch.setattr(kv, "arrive", asking)
        again = ask(engine, prompt(390))
        assert reused(again) == (256, 16) and again.usage.preemptions == 0 and drawn(again) == expected
        assert engine.scheduler.reuse.stats.fetch_late == 0 and len(layers) > 1
        assert order[:4] == [("read", layers[0]), ("ask", layers[0]), ("ask", layers[1]), ("read", layers[1])]


class Clock:
    """Milliseconds that pass only where a test says so."""

    now = 0.0

    def passing(self, ms: float, call: Callable[..., Any]) -> Callable[..., Any]:
        """``call``, which takes ``ms``."""

        def run(*args: Any, **named: Any) -> Any:
            self.now += ms
            return call(*args, **named)

        return run

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(lambda: self.now, lambda begin, end: end - begin)


@pytest.mark.parametrize("overlap", ["false", "true"])
def test_only_the_time_of_a_step_itself_is_learnt_from(overlap, tmp_path, monkeypatch):
    """A forward takes 10 ms, a wait for a section in it 500 ms, masks and results on the host 70 ms each."""
    changes = {**REPLAY, "cache.store.backend": "segment", "cache.store.path": str(tmp_path / "kv"),
               "sched.overlap": overlap, "cache.store.fetch_deadline_ms": "5000"}  # fmt: skip
    with open_engine(**changes) as engine:
        ask(engine, prompt(390))
    with open_engine(InlineLane(beside=True), **changes) as engine:  # one thread: nothing else moves the clock
        clock, learnt = Clock(), []
        runner, scheduler = engine.runner, engine.scheduler
        arrival, observe = scheduler.reuse._arrival, scheduler.reuse.observe
        monkeypatch.setattr(
            scheduler.reuse,
            "_arrival",
            lambda *a: replace(m := arrival(*a), arrival=replace(m.arrival, take=clock.passing(500, m.arrival.take))),
        )
        monkeypatch.setattr(runner, "stopwatch", clock.stopwatch)
        monkeypatch.setattr(runner.model, "forward", clock.passing(10, runner.model.forward))
        monkeypatch.setattr(engine, "_masks", clock.passing(70, engine._masks))
        monkeypatch.setattr(engine, "_post", clock.passing(70, engine._post))
        monkeypatch.setattr(scheduler.reuse, "observe", lambda rows, s: learnt.append((rows, s)) or observe(rows, s))
        assert reused(ask(engine, prompt(390))) == (256, 16)
        assert clock.now > 500 * len(tiers_of(engine).sources), "the forward did wait"
        assert len(learnt) == 12 and {seconds for _, seconds in learnt} == {0.01}
        assert list(engine.times.run_ms) == [10.0] * 12


@pytest.mark.parametrize("overlap", ["false", "true"])
@pytest.mark.parametrize("fault", ["flipped bit", "late"])
def test_a_section_that_fails_behind_a_running_forward_is_computed_again(cold, fault, overlap, tmp_path, monkeypatch):
    """Two requests share the blocks, a third shares nothing; no token and no tier sees what was read.

    Under overlap the second one is placed on blocks of which nobody knows yet that they did not come.
    """
    changes = {**REPLAY, "cache.store.backend": "segment", "cache.store.path": str(tmp_path / "kv"),
               "sched.overlap": overlap, "cache.store.fetch_deadline_ms": "1500"}  # fmt: skip
    with open_engine(**changes) as engine:
        ask(engine, prompt(390))
        layers = [layer for layer, _ in tiers_of(engine).sources]
        end = PAGE + sum(size for _, size in tiers_of(engine).sources)
    with open_engine() as engine:
        other = drawn(ask(engine, prompt(300, 8)))
    if fault == "flipped bit":
        (path,) = (tmp_path / "kv").rglob("*.seg")
        data = bytearray(path.read_bytes())
        data[end - 1] ^= 16  # the last byte of the first block: of its last section
        path.write_bytes(data)
    with open_engine(**changes) as engine:
        store = store_of(engine)
        read = store.get_sections

        def slow(keys, arrived):
            read(keys, lambda i, found: (time.sleep(2.5 if i and fault == "late" else 0), arrived(i, found)))

        monkeypatch.setattr(store, "get_sections", slow)
        sampling = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=True)
        engine.submit(Request("a", prompt(390), sampling))
        events = []
        while not engine.scheduler.running:
            events += engine.step()
        engine.submit(Request("b", prompt(390), sampling))
        engine.submit(Request("c", prompt(300, 8), sampling))
        done = {e.request_id: e for e in (*events, *engine.stream()) if isinstance(e, Completion)}
        a, b, c = (done[name] for name in "abc")
        assert drawn(a) == cold[390] and a.usage.preemptions == 1 and reused(a) == (0, 0)
        assert drawn(c) == other and c.usage.preemptions == 0
        assert engine.scheduler.reuse.stats.blocks_lost > 0
        if overlap == "true":
            assert drawn(b) == cold[390] and b.usage.preemptions == 1 and reused(b) == (0, 0)
        engine.scheduler.verify()
        monkeypatch.setattr(store, "get_sections", read)
        again = ask(engine, prompt(390), "d")
        assert reused(again) == (256, 16) and len(layers) > 1
    with open_engine(**REPLAY) as engine:
        ask(engine, prompt(390))
        assert drawn(ask(engine, prompt(390), "e")) == drawn(again), "what is kept is what a cold run leaves"


def test_what_the_store_did_not_take_is_told(tmp_path, monkeypatch):
    changes = {**REPLAY, "cache.store.backend": "posix", "cache.store.path": str(tmp_path / "kv")}
    with open_engine(**changes) as engine:
        store = store_of(engine)

        def locked(*args):
            raise OSError(116, "Stale file handle")

        monkeypatch.setattr(store, "put", locked)
        assert ask(engine, prompt(390)).error is None
    assert engine.notes() == ["the KV store took no more blocks, 3 were not stored: [Errno 116] Stale file handle"]


def test_two_prompts_share_a_prefix_and_never_more(cold):
    with open_engine(**WINDOWS) as engine:
        ask(engine, prompt(390), "a")
        other = (*prompt(390)[:200], *prompt(323, 9))
        changed = ask(engine, other, "b")
        assert reused(changed) == (0, 0), "128 shared tokens have no windows"
        assert drawn(ask(engine, prompt(523), "c")) == cold[523]
    with open_engine() as engine:
        assert drawn(ask(engine, other)) == drawn(changed)


@pytest.mark.parametrize("changes", [WINDOWS, REPLAY, {}], ids=["windows", "replay", "none"])
def test_a_preempted_request_goes_on_as_if_it_had_not_been(changes):
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    work = [Request("a", prompt(390), sampling), Request("b", prompt(300, 4), sampling)]
    with open_engine(**changes) as undisturbed:
        expected = [c.token_ids for c in undisturbed.generate(work)]
    with open_engine(**changes) as engine:
        for request in work:
            engine.submit(request)
        done: list[Completion] = []
        while engine.busy:
            done += [event for event in engine.step() if isinstance(event, Completion)]
            if engine.steps in (2, 9):  # while prefilling, while decoding
                for seq in list(engine.scheduler.running.values()):
                    engine.scheduler._preempt(seq)
                engine.scheduler.verify()
        assert [c.token_ids for c in sorted(done, key=lambda c: c.request_id)] == expected
        assert all(c.usage.preemptions >= 1 for c in done)
        assert [c.usage.cached > 0 for c in done] == [changes is WINDOWS] * 2


def test_virtual_ranks_keep_their_own_blocks(cold):
    with open_engine(**WINDOWS, **{"parallel.ep": "2", "parallel.dp": "2"}) as engine:
        work = [Request(f"r{i}", prompt(390), SamplingParams(max_tokens=12, ignore_eos=True)) for i in range(4)]
        done = engine.generate(work) + engine.generate(
            [Request(f"s{i}", r.token_ids, r.sampling) for i, r in enumerate(work)]
        )
        assert {c.token_ids for c in done} == {tuple(t for t, _ in cold[390])}
        assert max(c.usage.cached for c in done) == 256


def test_rows_that_cannot_leave_the_device_are_refused_by_name():
    sets = [f"{key}={value}" for key, value in {**BASE, **WINDOWS, "numerics.mode": "float"}.items()]
    with pytest.raises(ProfileError, match=r"cache.swa_pool_gib_per_rank is 0.01, but it keeps official records"):
        load_profile("cpu-nano", sets)
    with open_engine(**REPLAY, **{"numerics.mode": "float"}) as engine:
        ask(engine, prompt(390), "a")
        assert reused(ask(engine, prompt(390), "b")) == (256, 16)
