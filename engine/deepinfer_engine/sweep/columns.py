"""Columns of a row that tables, pictures and comparisons know: their words, and which way is better."""

from __future__ import annotations

from typing import NamedTuple


class Column(NamedTuple):
    """Words with the unit, and whether more is better (None: neither)."""

    label: str
    more_is_better: bool | None = None


#: Share of prompt tokens served from the prefix cache.
HIT_SHARE = "cache_hit_share"
#: Published gain of variable over fixed verification.
GAIN = "adaptive_gain_percent"
#: Throughput of a process without accelerators, where there is no GPU to divide by.
PER_PROCESS = "output_tok_s"

_KNOWN: dict[str, Column] = {
    "rows_per_rank": Column("rows in flight per rank"),
    "input_tok_s": Column("prompt throughput, tok/s", True),
    "input_tok_s_gpu": Column("prompt throughput, tok/s/GPU", True),
    "output_tok_s": Column("output throughput, tok/s", True),
    "output_tok_s_gpu": Column("output throughput, tok/s/GPU", True),
    "steady_output_tok_s": Column("output throughput in the steady window, tok/s", True),
    "output_tok_s_user": Column("speed per user, tok/s", True),
    "ttft_mean_ms": Column("time to first token, mean, ms", False),
    "ttft_p95_ms": Column("time to first token, 95th percentile, ms", False),
    "tpot_mean_ms": Column("time per output token, mean, ms", False),
    "prefill_step_ms": Column("prefill step, ms", False),
    "decode_step_ms": Column("decode step, ms", False),
    "acceptance_rate": Column("drafts accepted, share", True),
    "tokens_per_step": Column("tokens committed per row and step", True),
    "drafts_verified_per_step": Column("drafts verified per row and step"),
    HIT_SHARE: Column("prompt tokens cached, share"),
    GAIN: Column("gain over fixed verification, %", True),
    "sched.prefill_chunk_tokens": Column("prefill chunk, tokens"),
    "sched.max_rows_per_rank": Column("most rows per rank"),
    "parallel.ep": Column("expert-parallel ranks"),
    "spec.verify": Column("verification"),
    "sched.overlap": Column("overlapped scheduling"),
    "cache.prefix": Column("prefix cache"),
    "workload.arrivals.concurrency": Column("requests in flight"),
    "workload.load.input_tokens": Column("prompt, tokens"),
    "workload.load.shared_prefix_tokens": Column("prefix that all prompts share, tokens"),
}

#: Metrics of the table and of comparisons, in order; those that no row has are left out.
SHOWN = (
    "rows_per_rank", "input_tok_s", "input_tok_s_gpu", "output_tok_s", "output_tok_s_gpu", "output_tok_s_user",
    "ttft_mean_ms", "tpot_mean_ms", "prefill_step_ms", "decode_step_ms", "acceptance_rate",
    "drafts_verified_per_step", "tokens_per_step", HIT_SHARE,
)  # fmt: skip
COMPARED = tuple(name for name in SHOWN if _KNOWN[name].more_is_better is not None)


def label(column: str) -> str:
    """Words for a column; its own name where it has none."""
    return _KNOWN[column].label if column in _KNOWN else column.removeprefix("workload.")


def short(column: str) -> str:
    """A column as a legend names it: its words without the unit, or its last part."""
    return _KNOWN[column].label.partition(",")[0] if column in _KNOWN else column.rsplit(".", 1)[-1]


def higher_is_better(column: str) -> bool:
    """Direction of a metric; an unknown column that ends in a unit of time is better low."""
    known = _KNOWN.get(column)
    if known is not None and known.more_is_better is not None:
        return known.more_is_better
    return not column.endswith(("_ms", "_s", "_us")) or column.endswith("tok_s")
