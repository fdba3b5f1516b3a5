"""``numerics.batch_invariant``: bits of a row's logits, and tokens of a seeded request, whatever runs beside it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.errors import NotReadyError
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.runtime.lane import ThreadLane
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import Completion, Request, SamplingParams
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import resolve
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("tiny"))


class Mix:
    """Ten texts, longer than window (16), index budget (12) and candidates (20), run together in random ways."""

    def __init__(self, model: Path, mode: str):
        checkpoint = Checkpoint.open(model)
        self.ops = resolve(mode, "cpu", batch_invariant=True)
        loaded = load_model(checkpoint, Tokenizer.from_dir(model), self.ops, load_profile("cpu-nano").profile)
        self.model, self.mesh, self.config = loaded.model, loaded.mesh, checkpoint.config
        self.layout = KVLayout.of(self.config, records=self.ops.numerics.records)
        rng = random.Random(0)
        self.texts = [[rng.randrange(3, 370) for _ in range(rng.randrange(25, 55))] for _ in range(10)]
        self.alone = [self.run([i], None)[i] for i in range(len(self.texts))]

    def check(self, seed: int) -> None:
        """A random subset in random order, each text in one or two chunks, against each text alone and whole."""
        rng = random.Random(seed)
        chosen = rng.sample(range(len(self.texts)), rng.randrange(1, 4))
        for i, logits in self.run(chosen, rng).items():
            assert torch.equal(logits, self.alone[i]), f"composition {seed}, text {i}"

    def run(self, chosen: list[int], rng: random.Random | None) -> dict[int, torch.Tensor]:
        kv = KVState(self.layout, self.ops, slots=len(chosen), blocks=len(chosen))
        chunks: list[dict[int, tuple[int, int]]] = [{} for _ in range(2)]  # per step: text → (start, end)
        for i in chosen:
            size = len(self.texts[i])
            cuts = sorted(rng.sample(range(1, size), rng.randrange(2))) if rng is not None else []
            steps = sorted(rng.sample(range(2), len(cuts) + 1)) if rng is not None else [0]
            for step, span in zip(steps, zip([0, *cuts], [*cuts, size], strict=True), strict=True):
                chunks[step][i] = span
        out: dict[int, list[torch.Tensor]] = {i: [] for i in chosen}
        for step in chunks:
            if not step:
                continue
            order = list(step) if rng is None else rng.sample(list(step), len(step))
            rows = [
                RowInput(self.texts[i], a, b - a, chosen.index(i) + 1, [chosen.index(i) + 1], logits="all")
                for i in order
                for a, b in [step[i]]
            ]
            batch = build_batch(rows, self.layout, ngram=self.config.engram_max_ngram_size)
            logits = self.model.forward(batch, kv, self.ops, self.mesh).logits
            for i, part in zip(order, logits.split([r.count for r in rows]), strict=True):
                out[i].append(part)
        return {i: torch.cat(parts) for i, parts in out.items()}


@pytest.mark.parametrize(("mode", "count"), [("float", 160), ("fast", 40)])
def test_logits_have_the_same_bits_in_200_compositions(model: Path, mode: str, count: int):
    mix = Mix(model, mode)
    for seed in range(count):
        mix.check(seed)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("mode", ["float", "fast"])
def test_logits_have_the_same_bits_in_1000_compositions(model: Path, mode: str):
    mix = Mix(model, mode)
    for seed in range(1000, 2000):
        mix.check(seed)


def operations() -> dict:
    """Operation → its inputs for T rows; the first dimension of every tensor listed first is the row."""
    g = torch.Generator().manual_seed(1)

    def r(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    from deepinfer_kernels.reference.linear import Weight

    T, H, C = 150, 96, 4
    fn, base, scale = r(C * (C + 2), C * H) * 0.1, r(C * (C + 2)), r(3)
    gain, router, bias, sink = r(H), r(10, H), r(10), r(3)
    w, local = Weight(r(80, H), "bf16"), r(70, 32)
    visible = torch.randint(0, 71, (T, 1), generator=g)
    return {
        "linear": ((r(T, H),), lambda ops, x: ops.linear(x, w)),
        "head_logits": ((r(T, H),), lambda ops, x: ops.head_logits(x, w)),
        "rms_norm": ((r(T, H),), lambda ops, x: ops.rms_norm(x, gain, 1e-20)),
        "mhc_mixes": (
            (r(T, C, H),),
            lambda ops, x: torch.cat(
                [m.flatten(1) for m in ops.mhc_mixes(x, fn, base, scale, rms_eps=1e-20, hc_eps=1e-6, iters=20)], 1
            ),
        ),
        "gate_topk": (
            (r(T, H),),
            lambda ops, x: torch.cat(
                ops.gate_topk(x, router, bias, k=3, normalise=True, scale=1.5, temperature=1.0), 1
            ),
        ),
        "attend_cached": (
            (r(T, 3, 32), torch.randint(-1, 70, (T, 50), generator=g)),
            lambda ops, q, places: ops.attend_cached(q, local, places, None, None, None, sink, 0.2),
        ),
        "index_scores": (
            (r(T, 1, 4, 32), r(T, 1, 4), r(T, 70, 32), visible),
            lambda ops, q, w, k, v: ops.index_scores(q, w, k, v),
        ),
    }


@pytest.mark.parametrize("name", list(operations()))
def test_operation_is_invariant_and_agrees_with_the_reference(name: str):
    inputs, call = operations()[name]
    tiled, plain = resolve("float", "cpu", batch_invariant=True), resolve("float", "cpu")
    assert tiled.chosen[name].backend == "tiled"
    whole = call(tiled, *inputs)
    assert torch.allclose(whole, call(plain, *inputs), rtol=1e-4, atol=1e-5)
    rng = random.Random(name)
    total = inputs[0].shape[0]
    for size in (1, 2, 3, 4, 5, 6, 7, 8, 16, 31, 32, 33, 64, 65, 127):
        chosen = torch.tensor(rng.sample(range(total), size))
        part = call(tiled, *(x[chosen] for x in inputs))
        assert torch.equal(part, whole[chosen]), f"{size} rows"


def test_attention_ignores_how_wide_the_padding_is():
    ops = resolve("float", "cpu", batch_invariant=True)
    g = torch.Generator().manual_seed(2)
    q, local = torch.randn(4, 3, 32, generator=g), torch.randn(90, 32, generator=g)
    places, sink = torch.randint(-1, 90, (4, 50), generator=g), torch.randn(3, generator=g)

    def attended(window: torch.Tensor) -> torch.Tensor:
        return ops.attend_cached(q, local, window, None, None, None, sink, 0.2)

    for padding in ((0, 1), (7, 0), (64, 64), (13, 200)):
        assert torch.equal(attended(torch.nn.functional.pad(places, padding, value=-1)), attended(places))
    assert not attended(torch.full_like(places, -1)).any()


def test_reference_numerics_are_refused_with_the_reason(model: Path):
    sets = ["numerics.mode=reference", "numerics.batch_invariant=true", "sched.max_context_tokens=512"]
    profile = load_profile("cpu-nano", sets).profile
    with pytest.raises(NotReadyError, match=r"honours .* numerics, not reference"):
        Engine.open(profile, model, device="cpu")


SETS = (
    "numerics.batch_invariant=true",
    "numerics.mode=float",
    "sched.max_context_tokens=512",
    "sched.max_rows_per_rank=5",
    "cache.hbm_tokens_per_rank=1024",
)


def _companies(model: Path, count: int) -> set[tuple[int, ...]]:
    """Answers of one seeded request in ``count`` random companies under three ways of running."""
    rng = random.Random(4)
    prompt = tuple(rng.randrange(3, 370) for _ in range(50))
    subject = Request("subject", prompt, SamplingParams(temperature=1.0, top_p=0.95, seed=11, max_tokens=8))
    seen = set()
    for way, (chunk, overlap) in enumerate(((64, "false"), (17, "true"), (200, "true"))):
        extra = (f"sched.prefill_chunk_tokens={chunk}", f"sched.overlap={overlap}")
        with Engine.open(
            load_profile("cpu-nano", [*SETS, *extra]).profile, model, device="cpu", lane=ThreadLane()
        ) as engine:
            (alone,) = engine.generate([subject])
            assert alone.reproducible
            seen.add(alone.token_ids)
            seen |= {_in_company(engine, subject, rng) for _ in range(way, count, 3)}
    return seen


def test_seeded_request_draws_the_same_tokens_in_any_company(model: Path):
    assert len(_companies(model, 9)) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_seeded_request_draws_the_same_tokens_in_200_companies(model: Path):
    assert len(_companies(model, 200)) == 1


def _in_company(engine: Engine, subject: Request, rng: random.Random) -> tuple[int, ...]:
    """Tokens of the subject among requests that come, go and are aborted at random."""
    at = rng.randrange(4)
    names = []
    result = None
    for i in range(4):
        if i == at:
            engine.submit(subject)
        name = f"n{i}"
        length = rng.randrange(1, 90)
        sampling = SamplingParams(temperature=rng.choice((0.0, 1.0)), max_tokens=rng.randrange(1, 9))
        engine.submit(Request(name, tuple(rng.randrange(3, 370) for _ in range(length)), sampling))
        names.append(name)
    while result is None:
        for event in engine.step():
            if isinstance(event, Completion) and event.request_id == "subject":
                result = event.token_ids
        if rng.random() < 0.2:
            engine.abort(rng.choice(names))
    for name in names:
        engine.abort(name)
    list(engine.stream())
    engine.scheduler.verify()
    return result
