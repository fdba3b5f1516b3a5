"""Figures that the vendor published for its own deployment, and the step-time laws fitted to them.

Sources: [Q] the inference deployment Q&A of the upstream engine's repository, [B] the vendor's blog as reported by the
press, [R] values that a report read off the published plots (a few per cent of reading error). Hardware: SM100.
"""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.cost.hardware import REFERENCE, Peak
from deepinfer_engine.cost.memory import dense_bytes, expert_bytes
from deepinfer_engine.cost.steptime import DecodeTime, PrefillTime, Speculation
from deepinfer_engine.cost.work import decode_flops, index_bytes_per_context, prefill_flops

#: EP4DP4: prompt tokens of a step and its seconds at the two ends of the curve [R].
PREFILL_STEPS = ((4096, 0.068), (65536, 0.740))
#: The same ends as tokens per second and GPU [R].
PREFILL_TOKENS_S = {4096: 60_000.0, 65536: 89_000.0}
#: EP64DP64: rows per rank to (tok/s/user, tok/s/GPU) [R]; 60 rows is the production point [Q].
DECODE_CURVE = {8: (325.0, 2_600.0), 60: (None, 13_730.0), 256: (105.0, 26_000.0)}
#: tok/s/user to tok/s/GPU with EP8 and EP64 [R].
DECODE_BY_EP = {100.0: (25_000.0, 26_000.0), 150.0: (19_000.0, 23_000.0)}


@dataclass(frozen=True)
class VerifyRow:
    """One row of the published table of variable verification: drafts verified, tokens committed, gain in %."""

    rows: int
    verify: float
    committed_fixed: float
    committed: float
    gain_percent: float


#: EP64DP64, five drafts [Q].
VERIFY_TABLE = (
    VerifyRow(16, 4.44, 3.32, 3.24, -1.5),
    VerifyRow(32, 3.65, 3.25, 3.17, 1.6),
    VerifyRow(48, 3.94, 3.30, 3.26, 3.6),
    VerifyRow(60, 3.58, 3.30, 3.21, 5.4),
    VerifyRow(72, 3.24, 3.29, 3.12, 6.7),
    VerifyRow(96, 3.24, 3.30, 3.15, 11.0),
)
#: Below the table: not published; between the fixed five and the first row. Gives the published speed at 8 rows.
_FEW_ROWS = (8, 4.7, 3.28)

#: Traffic [B]: mean input tokens, prefix hit rate, mean TTFT, tok/s a user sees.
INPUT_TOKENS, HIT_RATE, TTFT_S, USER_TOKENS_S = 77_000, 0.96, 0.4, 230.0
#: Output tokens of the report's worked example; its assumption, not the vendor's.
OUTPUT_TOKENS = 500
#: Prefill tokens per second and GPU with hits counted as done [B].
PREFILL_WITH_HITS_S = 1_500_000.0
#: Share of the perfectly balanced offline throughput that the vendor's balancers reach [Q].
BALANCE = 0.80

ADAPTIVE = Speculation((_FEW_ROWS, *((r.rows, r.verify, r.committed) for r in VERIFY_TABLE)))
FIXED = Speculation(tuple((r.rows, 5.0, r.committed_fixed) for r in VERIFY_TABLE))

# EP64: the triple whose largest error over the published decode rows, each divided by its bound, is smallest on a
# grid of 0.1 ms, 0.4 us and 2 us.
_EP64 = DecodeTime(base_s=9.4e-3, token_s=15.2e-6, row_s=16.0e-6)
_EP64_SLOTS = 7  # 384 experts over 64 ranks and one redundant
_EP8_SLOTS = 49  # 384 experts over 8 ranks and one redundant


def prefill_time(config: ModelConfig, peak: Peak = REFERENCE, *, decoder_replay: bool = True) -> PrefillTime:
    """The published prefill curve with an index-scan term from arithmetic, carried to another accelerator.

    The scan runs at the rate that the curve implies for the rest. Elsewhere the same share of the FP8 peak is
    assumed, and the same base; without decoder replay a token costs what all layers cost.
    """
    work = prefill_flops(config, decoder_replay=True)
    (c0, s0), (c1, s1) = PREFILL_STEPS
    rate = work.flat * (c1 - c0) / (s1 - s0)
    fitted = PrefillTime.fit(PREFILL_STEPS, pair_s=work.per_context / rate)
    slower = REFERENCE.fp8_flops / peak.fp8_flops
    wanted = prefill_flops(config, decoder_replay=decoder_replay)
    return PrefillTime(
        fitted.base_s,
        fitted.token_s * slower * wanted.flat / work.flat,
        fitted.pair_s * slower * wanted.per_context / work.per_context,
    )


def decode_time(config: ModelConfig, slots_per_rank: int, peak: Peak = REFERENCE) -> DecodeTime:
    """The published decode curves, linear in expert slots per rank between EP64 and EP8, carried elsewhere.

    Base and slopes at EP8 meet its two published points. On another accelerator the base changes by the time its
    memory needs for one rank's weights, verified positions scale with FP8 peak and rows with memory bandwidth.
    """
    ep8 = _ep8_time()
    share = (slots_per_rank - _EP64_SLOTS) / (_EP8_SLOTS - _EP64_SLOTS)
    here = DecodeTime(
        _EP64.base_s + share * (ep8.base_s - _EP64.base_s),
        _EP64.token_s + share * (ep8.token_s - _EP64.token_s),
        _EP64.row_s + share * (ep8.row_s - _EP64.row_s),
    )
    slow_memory = 1 / peak.memory_bytes_s - 1 / REFERENCE.memory_bytes_s
    work = decode_flops(config)
    rate = prefill_flops(config, decoder_replay=True).flat / prefill_time(config, peak).token_s
    context = index_bytes_per_context(config) / peak.memory_bytes_s + work.per_context / rate
    return DecodeTime(
        here.base_s + weight_bytes_per_step(config, slots_per_rank) * slow_memory,
        here.token_s * REFERENCE.fp8_flops / peak.fp8_flops,
        here.row_s * REFERENCE.memory_bytes_s / peak.memory_bytes_s,
        context,
    )


def _ep8_time() -> DecodeTime:
    """Base and one factor on both slopes of EP64 that meet the two published EP8 points, at the table's last row."""
    last = VERIFY_TABLE[-1]
    (u0, (g0, _)), (u1, (g1, _)) = DECODE_BY_EP.items()
    n0, n1 = g0 / u0, g1 / u1
    t0, t1 = last.committed / u0, last.committed / u1
    slope = (t0 - t1) / (n0 - n1)
    factor = slope / (_EP64.token_s * (1 + last.verify) + _EP64.row_s)
    return DecodeTime(t0 - slope * n0, _EP64.token_s * factor, _EP64.row_s * factor)


def weight_bytes_per_step(config: ModelConfig, slots_per_rank: int) -> int:
    """Bytes one rank reads of its weights when every local expert is hit: dense parts and its expert slots."""
    per_slot = expert_bytes(config) * config.num_hidden_layers
    return dense_bytes(config, groups=("backbone",)) + slots_per_rank * per_slot
