"""The compiled loops return the bits of the numpy ones, and the build says what is wrong when it fails."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from deepinfer_engine.eplb import loops, native, placement, policy
from deepinfer_engine.eplb.search import SearchRules
from deepinfer_engine.errors import NotReadyError

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++ on this machine")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def compiled(cache):
    return native.load(cache)


SHAPES = [
    (48, 8, 7, 400),
    (48, 8, 7, 240),
    (48, 8, 7, 30),
    (48, 8, 7, 5),
    (40, 5, 9, 90),
    (12, 2, 8, 100),
    (33, 32, 2, 50),
    (384, 2, 196, 100),
    (384, 4, 100, 100),
]


@needs_compiler
@pytest.mark.parametrize(("experts", "ranks", "slots", "steps"), SHAPES)
def test_same_plan_and_same_moments(decode, compiled, experts, ranks, slots, steps):
    counts = decode(experts=experts, ranks=ranks, steps=steps)
    a, b = (which.window(counts[:, 0]).moments() for which in (compiled, loops.NumpyLoops()))
    assert (
        (a.cov_EE == b.cov_EE).all()
        and (a.mean_E == b.mean_E).all()
        and (a.total_E == b.total_E).all()
        and a.steps == b.steps
        and a.recent == b.recent == (steps == 400)
    )
    topology = policy.Topology(ranks, slots)
    for x, y in zip(
        *(policy.plan_experts(counts, topology, loops=which) for which in (compiled, loops.NumpyLoops())), strict=True
    ):
        assert (x.slot_RS == y.slot_RS).all() and x.start == y.start and x.exchanges == y.exchanges


@needs_compiler
@pytest.mark.parametrize("cap", [None, 6])
def test_same_warm_start(decode, compiled, cap):
    counts = decode(steps=480)
    topology = policy.Topology(8, 7, dead=(3,))
    old = np.stack([p.slot_RS for p in policy.plan_experts(counts[:200], policy.Topology(8, 8))])
    plans = [
        policy.plan_experts(
            counts[200:],
            topology,
            old_LRS=old,
            settings=policy.PlanSettings(move_price=0.5, max_moves=cap),
            loops=which,
        )
        for which in (compiled, loops.NumpyLoops())
    ]
    for x, y in zip(*plans, strict=True):
        assert (x.slot_RS == y.slot_RS).all() and x.start == y.start


@needs_compiler
def test_same_search_from_any_start_with_prices_and_caps(compiled):
    """Random small layers: several copies, replicas that share a rank at the start, experts that are held or not."""
    rng, made, shared = np.random.default_rng(0), 0, 0
    for trial in range(200):
        experts, ranks = int(rng.integers(2, 24)), int(rng.integers(2, 9))
        slots = -(-experts // ranks) + int(rng.integers(0, 3))
        counts = rng.poisson(rng.gamma(0.5, 20.0, experts), (60, experts)) + 1
        copies = loops.NumpyLoops.replica_counts(counts.sum(axis=0), ranks, ranks * slots)
        m = loops.NumpyLoops.window(counts).moments()
        start = rng.permutation(np.repeat(np.arange(experts), copies)).reshape(ranks, slots)
        shared += bool(placement.colocated(start))
        held, rules = None, SearchRules()
        if trial % 2:
            held = rng.random((ranks, experts)) < 0.4
            rules = SearchRules(price=float(rng.random()), cap=None if trial % 4 == 1 else int(rng.integers(0, 9)))
        (a, n), (b, k) = (
            which.swap_search(start, m.mean_E, m.cov_EE, copies, rules, held) for which in (compiled, loops.NumpyLoops)
        )
        assert n == k and (a == b).all()
        made += n
        weight = rng.integers(0, 5, experts)  # many ties
        assert (
            compiled.longest_first(weight, copies, ranks) == loops.NumpyLoops.longest_first(weight, copies, ranks)
        ).all()
    assert made > 400 and shared > 50


@needs_compiler
def test_other_integer_types_and_strides_are_accepted(decode, compiled):
    counts = decode()
    want = compiled.window(counts[:, 1]).moments().cov_EE
    for view in (counts.astype(np.uint16)[:, 1], np.asfortranarray(counts)[:, 1], counts[::-1, 1][::-1]):
        assert (compiled.window(view).moments().cov_EE == want).all()


@needs_compiler
@pytest.mark.parametrize("factor", [1, 60_000, 3_000_000])
def test_peak_sums_are_exact_in_every_width(decode, compiled, factor):
    """32-bit loads, 64-bit loads of 32-bit counts, and counts beyond 32 bits."""
    counts = decode()[:, 0] * factor
    slots = np.stack([np.roll(np.arange(48), -6 * r)[:7] for r in range(8)])
    copies = np.bincount(slots.reshape(-1), minlength=48)
    assert sorted(set(copies.tolist())) == [1, 2]
    a, b = (which.window(counts).peak_sum(slots, copies) for which in (compiled, loops.NumpyLoops()))
    assert a == b > 0
    assert (counts.max() >= 2**31) == (factor == 3_000_000) == isinstance(compiled.window(counts), loops.NumpyWindow)


@needs_compiler
def test_a_window_in_the_memory_of_another_has_its_own_numbers(decode, compiled):
    first, second = decode()[:, 0], decode()[:, 1]
    want = compiled.window(second).moments()
    spare = compiled.window(first)
    spare.moments()
    got = compiled.window(second, spare).moments()
    assert (got.cov_EE == want.cov_EE).all() and (got.mean_E == want.mean_E).all()
    idle = np.insert(second, [0, 9], 0, axis=0)
    assert (compiled.window(idle, spare).moments().cov_EE == want.cov_EE).all()


@needs_compiler
def test_library_is_built_once_and_left_without_temporary_files(compiled, cache):
    lock, first = sorted((cache / "cpu").iterdir())
    stamp = first.stat().st_mtime_ns
    native.load(cache)
    assert lock.name == ".lock" and first.suffix == ".so" and first.stat().st_mtime_ns == stamp
    content = first.read_bytes()
    first.unlink()  # it is mapped here: another file takes its place
    first.write_bytes(content[:1000])
    native.load(cache)
    assert len(list((cache / "cpu").iterdir())) == 2, "a damaged library is replaced"


def test_missing_compiler_is_named(tmp_path):
    with pytest.raises(NotReadyError, match="no C\\+\\+ compiler: no-such-g\\+\\+"):
        native.load(tmp_path, "no-such-g++")


def test_failing_compiler_shows_its_first_line_and_leaves_nothing(tmp_path):
    fake = tmp_path / "g++"
    fake.write_text('#!/bin/sh\n[ "$1" = --version ] && echo fake 1.0 && exit 0\necho "no such target" >&2\nexit 1\n')
    fake.chmod(0o755)
    cache = tmp_path / "cache"
    with pytest.raises(NotReadyError, match="no such target"):
        native.load(cache, str(fake))
    assert [path.name for path in (cache / "cpu").iterdir()] == [".lock"]


def test_unwritable_cache_is_an_environment_error(tmp_path):
    if shutil.which("g++") is None:
        pytest.skip("no g++ on this machine")
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(NotReadyError, match="cannot be written"):
        native.load(blocked / "cache")
