"""The published rows, derived again: published value, ours, error and the error that is allowed.

``fitted`` rows are what the parameters were chosen from, so that they agree proves only that the law has the right
shape; ``predicted`` rows were not used; ``arithmetic`` rows follow from the config or from other published numbers.
A row without a bound is shown and not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.cost import published as p
from deepinfer_engine.cost.account import Workload, request_cost
from deepinfer_engine.cost.steptime import DecodePoint, decode_point, rows_at_speed
from deepinfer_engine.cost.work import prefill_flops
from deepinfer_engine.weights.plan import parameter_summary

Kind = Literal["fitted", "predicted", "arithmetic"]

_GIB = 2**30
#: Slots per rank behind the published decode curves: 384 experts with one redundant expert per rank.
_SLOTS = {64: 7, 8: 49}
_PRODUCTION_ROWS = 60
#: Reading error of a value taken off a plot, with some room for the law [R].
_READ = 5.0


@dataclass(frozen=True)
class Anchor:
    """One row. ``bound`` and ``error`` are per cent of the published value, or points where ``unit`` is %."""

    id: str
    quantity: str
    unit: str
    published: float
    model: float
    bound: float | None
    kind: Kind

    @property
    def error(self) -> float:
        if self.unit == "%":
            return self.model - self.published
        return 100 * (self.model / self.published - 1)

    @property
    def holds(self) -> bool:
        # a hair of room, so that a bound of 0 asks for equality and not for equal rounding
        return self.bound is None or abs(self.error) <= self.bound + 1e-9


def anchors(config: ModelConfig) -> tuple[Anchor, ...]:
    """Every row, for the released model's config."""
    return (*_prefill(config), *_decode(config), *_verification(config), *_replay(config), *_account(config),
            *_storage(config))  # fmt: skip


def _prefill(config: ModelConfig) -> Iterator[Anchor]:
    time = p.prefill_time(config)
    for chunk, seconds in p.PREFILL_STEPS:
        step = time.step_s([(chunk, 0)])
        yield Anchor("prefill-step", f"EP4 step of {chunk:,} tokens", "ms", seconds * 1e3, step * 1e3, _READ, "fitted")
        rate = p.PREFILL_TOKENS_S[chunk]
        name = f"EP4 throughput, chunk {chunk:,}"
        yield Anchor("prefill-rate", name, "tok/s/GPU", rate, time.tokens_per_s(chunk), _READ, "fitted")
    late = 100 * (time.tokens_per_s(65536) / time.tokens_per_s(32768) - 1)
    yield Anchor("prefill-flat", "gain from chunk 32,768 to 65,536", "%", 0.0, late, _READ, "predicted")


def _point(config: ModelConfig, ep: int, rows: int) -> DecodePoint:
    return decode_point(p.decode_time(config, _SLOTS[ep]), p.ADAPTIVE, rows)


def _decode(config: ModelConfig) -> Iterator[Anchor]:
    for rows, (user, gpu) in p.DECODE_CURVE.items():
        point = _point(config, 64, rows)
        if user is not None:
            name = f"EP64 speed, {rows} rows"
            yield Anchor("decode-user", name, "tok/s/user", user, point.tokens_per_s_user, _READ, "fitted")
        name = f"EP64 throughput, {rows} rows"
        yield Anchor("decode-gpu", name, "tok/s/GPU", gpu, point.tokens_per_s_gpu, _READ, "fitted")
    for speed, by_ep in p.DECODE_BY_EP.items():
        for ep, published in zip((8, 64), by_ep, strict=True):
            time = p.decode_time(config, _SLOTS[ep])
            found = decode_point(time, p.ADAPTIVE, rows_at_speed(time, p.ADAPTIVE, speed)).tokens_per_s_gpu
            name = f"EP{ep} throughput at {speed:g} tok/s/user"
            yield Anchor("wide-ep", name, "tok/s/GPU", published, found, 8.0, "fitted")
    found = _point(config, 64, _PRODUCTION_ROWS).tokens_per_s_user
    yield Anchor("user-speed", "mean speed a user sees", "tok/s/user", p.USER_TOKENS_S, found, 10.0, "predicted")


def _verification(config: ModelConfig) -> Iterator[Anchor]:
    time = p.decode_time(config, _SLOTS[64])
    for row in p.VERIFY_TABLE:
        adaptive = decode_point(time, p.ADAPTIVE, row.rows).tokens_per_s_gpu
        gain = 100 * (adaptive / decode_point(time, p.FIXED, row.rows).tokens_per_s_gpu - 1)
        name = f"variable over fixed verification, {row.rows} rows"
        yield Anchor("dspark", name, "%", row.gain_percent, gain, 1.5, "fitted")


def _replay(config: ModelConfig) -> Iterator[Anchor]:
    c = config
    yield Anchor("replay", "tokens replayed in the decoder half", "tokens", 128, c.sliding_window, 0.0, "arithmetic")
    field = c.sliding_window * (c.num_hidden_layers - c.cut)
    yield Anchor("replay", "tokens an exact rebuild would need", "tokens", 2560, field, 0.0, "arithmetic")
    yield Anchor("replay", "window and rollback room", "tokens", 134, c.ring, 0.0, "arithmetic")
    some, every = (prefill_flops(c, decoder_replay=flag).flat for flag in (True, False))
    saved = 100 * (1 - some / every)
    yield Anchor("replay", "prefill arithmetic saved by replay", "%", 50.0, saved, 5.0, "arithmetic")


def _account(config: ModelConfig) -> Iterator[Anchor]:
    """One request of 77,000 tokens in and 500 out: first with the published rates, then with ours."""
    cold = Workload(p.INPUT_TOKENS, p.OUTPUT_TOKENS, 0.0)
    slow = request_cost(cold, prefill_tokens_s=60_000, decode_tokens_s=p.USER_TOKENS_S, replay_window=0)
    # the published rate with hits counts every prompt token, so the whole prompt is divided by it
    fast = request_cost(cold, prefill_tokens_s=p.PREFILL_WITH_HITS_S, decode_tokens_s=13_800, replay_window=0)
    rows = (
        ("prefill without cache", 1.28, slow.prefill_gpu_s),
        ("prefill with cache", 0.051, fast.prefill_gpu_s),
        ("decode of one stream", 2.17, slow.decode_gpu_s),
        ("decode in a batch", 0.036, fast.decode_gpu_s),
        ("total, nothing optimised", 3.45, slow.gpu_s),
        ("total, production", 0.087, fast.gpu_s),
    )
    for name, published, value in rows:
        yield Anchor("account", name, "GPU s", published, value, 2.0, "arithmetic")
    warm = Workload(p.INPUT_TOKENS, p.OUTPUT_TOKENS, p.HIT_RATE)
    prefill = p.prefill_time(config)
    decode = _point(config, 64, _PRODUCTION_ROWS).tokens_per_s_gpu
    ours = request_cost(warm, prefill_tokens_s=prefill.tokens_per_s(4096), decode_tokens_s=decode,
                        replay_window=config.sliding_window)  # fmt: skip
    with_hits = p.INPUT_TOKENS / ours.prefill_gpu_s
    name = "prefill rate with hits counted"
    yield Anchor("hits", name, "tok/s/GPU", p.PREFILL_WITH_HITS_S, with_hits, 10.0, "predicted")
    yield Anchor("account", "total, production, from the fits", "GPU s", 0.087, ours.gpu_s, 10.0, "predicted")
    large = request_cost(warm, prefill_tokens_s=prefill.tokens_per_s(32768), decode_tokens_s=decode,
                         replay_window=config.sliding_window)  # fmt: skip
    name = "prefill GPUs per decode GPU"
    yield Anchor("p-to-d", name, "ratio", 1.0, large.prefill_per_decode, 25.0, "predicted")
    computed = warm.computed_tokens(config.sliding_window)
    alone = prefill.step_s([(computed, p.INPUT_TOKENS * p.HIT_RATE)])
    yield Anchor("ttft", "TTFT without queue and fetch", "ms", p.TTFT_S * 1e3, alone * 1e3, None, "predicted")


def _storage(config: ModelConfig) -> Iterator[Anchor]:
    block = KVLayout.of(config, records=True).block_bytes
    yield Anchor("block", "bytes of a 128-token block", "KiB", 112, block / 1024, 1.0, "arithmetic")
    yield Anchor("weights", "bytes of the checkpoint", "GB", 510.313353565, parameter_summary(config).nbytes / 1e9, 0.1,
                 "arithmetic")  # fmt: skip
    # [Q]: 100 PiB over servers of 20 x 30.73 TB that write 5 GB/s and read 40 GB/s or more, 10+2 coded
    servers = 100 * 2**50 / (20 * 30.73e12)
    yield Anchor("store", "writes of the servers that hold it", "GiB/s", 850, servers * 5e9 / _GIB, 2.0, "arithmetic")
    read = servers * 40e9 / 2**40
    yield Anchor("store", "reads at the least rate per server", "TiB/s", 10, read, None, "arithmetic")
    # [B]: 155e12 tokens a day, 4 % of them new, kept 7 days, against the logical size
    logical = 100 * 2**50 * 10 / 12
    kept = 155e12 * (1 - p.HIT_RATE) * 7 * block / 128
    yield Anchor(
        "store", "logical size, and 7 days of new blocks", "PB", logical / 1e15, kept / 1e15, None, "arithmetic"
    )
