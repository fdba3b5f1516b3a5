"""What the numbers of a benchmark mean, computed from its requests. Undefined is None with a reason, never 0 or NaN.

===================  ==================================================================================================
ttft                 submission to first output token
queued               submission to the step that first runs the prompt (our engine only)
tpot                 (last token − first token) / (tokens − 1) of a request; undefined below two tokens
itl_chunk            gap between two chunks of a stream, whatever they hold
itl_token            the same gap shared among the tokens of the later chunk, each token counted once
e2e                  submission to the end of the answer
whole run            first submission to the last end; tokens of completed requests over it
steady window        from the last first token of the first ``concurrency`` requests (closed loop) or the first end
                     (else) to the last submission: ramp and tail are outside; every token that came inside counts
goodput              requests meeting all given limits, as a share of those attempted and per second of the run
acceptance           accepted / verified drafts; ``acceptance_place_k``: the same for the k-th draft of a row;
                     ``verify_length_mean`` drafts a row, ``tokens_per_verify_row`` accepted ones and one more
cache                prompt tokens by source: found (cached − replayed), replayed, computed; ``prompt_seen_share`` is
                     what an unlimited cache could have found of all planned prompts
===================  ==================================================================================================

Times are seconds from the start of the run inside, milliseconds in the summary.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from deepinfer_engine.bench.recipe import Limits

Status = Literal["completed", "failed", "cancelled", "unsent"]
Value = float | int | str | None

#: percentiles of every distribution
PERCENTILES = (75, 90, 95, 99)
#: shortest steady window, as a share of the run; below it the ramp and the tail are the run
_LEAST_WINDOW = 0.1


@dataclass(frozen=True)
class RequestRow:
    """What became of one planned request. Times in seconds from the start of the run; None: it never came to that.

    ``chunks``: (time, tokens) of every piece of the stream; tokens None where the endpoint does not say.
    ``due_s``: when it should have been submitted; ``error_group`` names a kind of failure, ``error`` the sentence.
    Counts are the target's own; ``planned_*`` the workload's, None for a text of unknown length.
    """

    index: int
    status: Status
    planned_input_tokens: int | None
    planned_output_tokens: int
    due_s: float | None = None
    submitted_s: float | None = None
    ended_s: float | None = None
    queued_s: float | None = None
    chunks: tuple[tuple[float, int | None], ...] = ()
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    replayed_tokens: int | None = None
    drafted_tokens: int | None = None
    accepted_tokens: int | None = None
    preemptions: int | None = None
    finish_reason: str | None = None
    error_group: str | None = None
    error: str | None = None

    @property
    def ttft_s(self) -> float | None:
        """Submission to first output token."""
        return self.chunks[0][0] - self.submitted_s if self.chunks and self.submitted_s is not None else None

    @property
    def e2e_s(self) -> float | None:
        """Submission to the end."""
        return None if self.ended_s is None or self.submitted_s is None else self.ended_s - self.submitted_s

    @property
    def tpot_s(self) -> float | None:
        """(last − first) / (tokens − 1); None below two tokens."""
        if self.output_tokens is None or self.output_tokens < 2 or len(self.chunks) < 2:
            return None
        first = self.chunks[0][1] or 1  # what came with the first chunk took no time after it
        rest = self.output_tokens - first
        return None if rest < 1 else (self.chunks[-1][0] - self.chunks[0][0]) / rest


@dataclass(frozen=True)
class RunFacts:
    """What the requests alone do not tell. ``gpus`` None with ``gpus_reason``; ``extra`` are the target's own values,
    ``reasons`` say why some of them are None."""

    concurrency: int | None
    limits: Limits = field(default_factory=Limits)
    gpus: int | None = None
    gpus_reason: str = "no profile names the number of GPUs"
    closed: bool = True
    extra: Mapping[str, Value] = field(default_factory=dict)
    reasons: Mapping[str, str] = field(default_factory=dict)


class Summary:
    """Flat values under construction: ``put`` keeps a value, or None with the reason."""

    def __init__(self) -> None:
        self.values: dict[str, Value] = {}
        self.undefined: dict[str, str] = {}

    def put(self, key: str, value: Value, reason: str = "") -> None:
        self.values[key] = value
        if value is None:
            assert reason, key
            self.undefined[key] = reason

    def ratio(self, key: str, over: float | None, under: float | None, reason: str) -> None:
        """``over / under``; None with the reason when either is missing or the divisor is 0."""
        self.put(key, None if over is None or not under else over / under, reason)

    def spread(self, name: str, unit: str, values: Sequence[float], reason: str) -> None:
        """Mean, deviation, extremes and percentiles (linear between ranks) of a distribution."""
        array = np.array(values, dtype=np.float64)
        has = len(array) > 0
        self.put(f"{name}_mean_{unit}", float(array.mean()) if has else None, reason)
        self.put(f"{name}_median_{unit}", float(np.median(array)) if has else None, reason)
        self.put(f"{name}_std_{unit}", float(array.std()) if has else None, reason)
        self.put(f"{name}_min_{unit}", float(array.min()) if has else None, reason)
        self.put(f"{name}_max_{unit}", float(array.max()) if has else None, reason)
        for p in PERCENTILES:
            self.put(f"{name}_p{p}_{unit}", float(np.percentile(array, p)) if has else None, reason)


def summarise(rows: Sequence[RequestRow], facts: RunFacts) -> Summary:
    """The summary of a run. completed + failed + cancelled + unsent = requests, always."""
    s = Summary()
    _counts(s, rows)
    _throughput(s, rows, facts)
    _latencies(s, rows)
    _goodput(s, rows, facts.limits)
    _speculation(s, rows)
    _cache(s, rows)
    for key, value in facts.extra.items():
        s.put(key, value, facts.reasons.get(key, "the target does not report it"))
    return s


def failures(rows: Sequence[RequestRow]) -> dict[str, int]:
    """Failed requests by kind, the most frequent first."""
    return dict(Counter(r.error_group or "unknown" for r in rows if r.status == "failed").most_common())


def _done(rows: Sequence[RequestRow]) -> list[RequestRow]:
    return [r for r in rows if r.status == "completed"]


def _counts(s: Summary, rows: Sequence[RequestRow]) -> None:
    s.put("requests", len(rows))
    for status in ("completed", "failed", "cancelled", "unsent"):
        s.put(status, sum(r.status == status for r in rows))
    done = _done(rows)
    s.put("input_tokens", _total(r.input_tokens for r in done), "the endpoint does not count prompt tokens")
    s.put("output_tokens", _total(r.output_tokens for r in done), "the endpoint does not count output tokens")
    s.put("lost_output_tokens", sum(_streamed(r) for r in rows if r.status in ("failed", "cancelled")))
    short = [r for r in done if r.output_tokens is not None and r.output_tokens < r.planned_output_tokens]
    s.put("shorter_than_planned", len(short))


def _total(counts: Any) -> int | None:
    """Sum of counts; None as soon as one of them is unknown."""
    total = 0
    for count in counts:
        if count is None:
            return None
        total += count
    return total


def _streamed(row: RequestRow) -> int:
    """Tokens that came of a request; a chunk of unknown size counts as one."""
    return sum(1 if n is None else n for _, n in row.chunks)


# ----------------------------------------------------------------- throughput


def _throughput(s: Summary, rows: Sequence[RequestRow], facts: RunFacts) -> None:
    done = _done(rows)
    starts = [r.submitted_s for r in rows if r.submitted_s is not None]
    ends = [r.ended_s for r in rows if r.ended_s is not None]
    seconds = max(ends) - min(starts) if starts and ends else None
    none = "no request completed" if not done else "the endpoint does not count tokens"
    s.put("duration_s", seconds, "no request ended")
    inputs, outputs = s.values["input_tokens"], s.values["output_tokens"]
    tokens_in = float(inputs) if isinstance(inputs, int) and done else None
    tokens_out = float(outputs) if isinstance(outputs, int) and done else None
    both = None if tokens_in is None or tokens_out is None else tokens_in + tokens_out
    s.ratio("request_rate_s", float(len(done)) if done else None, seconds, "no request completed")
    s.ratio("input_tok_s", tokens_in, seconds, none)
    s.ratio("output_tok_s", tokens_out, seconds, none)
    s.ratio("total_tok_s", both, seconds, none)
    _steady(s, rows, facts, seconds)
    for key in ("input", "output", "total", "steady_output"):
        value, reason = s.values[f"{key}_tok_s"], s.undefined.get(f"{key}_tok_s")
        per = None if value is None or not facts.gpus else float(value) / facts.gpus
        s.put(f"{key}_tok_s_gpu", per, reason or facts.gpus_reason)
    s.put("gpus", facts.gpus, facts.gpus_reason)
    depth = sum(r.e2e_s for r in rows if r.e2e_s is not None)
    s.ratio("mean_in_flight", depth or None, seconds, "no request ended")
    late = [r.submitted_s - r.due_s for r in rows if r.submitted_s is not None and r.due_s is not None]
    s.put("max_submit_delay_ms", max(late) * 1e3 if late else None, "requests have no time of their own")


def _steady(s: Summary, rows: Sequence[RequestRow], facts: RunFacts, seconds: float | None) -> None:
    """Rates inside the steady window; tokens of failed requests that came inside count too: they were made."""
    window, reason = steady_window(rows, facts, seconds)
    s.put("steady_s", None if window is None else window[1] - window[0], reason)
    if window is None:
        for key in ("input", "output", "total"):
            s.put(f"steady_{key}_tok_s", None, reason)
        return
    start, end = window
    made = read = 0.0
    for row in rows:
        known = row.output_tokens is not None and row.chunks and any(n is None for _, n in row.chunks)
        each = row.output_tokens / len(row.chunks) if known and row.output_tokens is not None else 1.0
        made += sum(each if n is None else n for t, n in row.chunks if start < t <= end)
        if row.chunks and start < row.chunks[0][0] <= end:
            read += row.input_tokens or 0
    s.put("steady_input_tok_s", read / (end - start))
    s.put("steady_output_tok_s", made / (end - start))
    s.put("steady_total_tok_s", (made + read) / (end - start))


def steady_window(
    rows: Sequence[RequestRow], facts: RunFacts, seconds: float | None
) -> tuple[tuple[float, float] | None, str]:
    """((start, end), "") or (None, why there is no steady window)."""
    sent = sorted(r.submitted_s for r in rows if r.submitted_s is not None)
    if not sent or not seconds:
        return None, "no request ended"
    first = sorted((r for r in rows if r.submitted_s is not None), key=lambda r: (r.submitted_s, r.index))
    if facts.closed and facts.concurrency is not None:
        starts = [r.chunks[0][0] if r.chunks else r.ended_s for r in first[: facts.concurrency]]
        if any(t is None for t in starts):
            return None, "some of the first requests neither answered nor ended"
        start = max(t for t in starts if t is not None)
    else:
        start = min((r.ended_s for r in rows if r.ended_s is not None), default=sent[-1])
    end = sent[-1]
    if end - start < _LEAST_WINDOW * seconds:
        return None, "the run is ramp and tail only: more requests than run at once are needed"
    return (start, end), ""


# ------------------------------------------------------------------ latencies


def _latencies(s: Summary, rows: Sequence[RequestRow]) -> None:
    done = _done(rows)
    none = "no request completed"
    s.spread("ttft", "ms", [r.ttft_s * 1e3 for r in done if r.ttft_s is not None], none)
    queued = [r.queued_s for r in done if r.queued_s is not None]
    outside = none if not done else "only our engine tells how long a request was queued"
    s.spread("queued", "ms", [q * 1e3 for q in queued], outside)
    waited = sum(r.ttft_s for r in done if r.queued_s is not None and r.ttft_s is not None)
    s.ratio("queued_share_of_ttft", sum(queued) if queued else None, waited or None, outside)
    tpot = [r.tpot_s * 1e3 for r in done if r.tpot_s is not None]
    one = none if not done else "no completed request has two tokens or more in two chunks or more"
    s.spread("tpot", "ms", tpot, one)
    s.put("tpot_requests", len(tpot))
    mean = float(np.mean(tpot)) if tpot else None
    s.ratio("output_tok_s_user", 1e3 if mean else None, mean, one)
    _gaps(s, done, one)
    s.spread("e2e", "ms", [r.e2e_s * 1e3 for r in done if r.e2e_s is not None], none)


def _gaps(s: Summary, done: Sequence[RequestRow], one: str) -> None:
    gaps, weights, unknown = [], [], False
    for row in done:
        for (before, _), (at, tokens) in zip(row.chunks, row.chunks[1:], strict=False):
            gaps.append((at - before) * 1e3)
            weights.append(tokens or 0)
            unknown = unknown or tokens is None
    s.spread("itl_chunk", "ms", gaps, one)
    each = [] if unknown else np.repeat(np.array(gaps) / np.maximum(weights, 1), weights).tolist() if gaps else []
    s.spread("itl_token", "ms", each, "the endpoint does not say how many tokens a chunk holds" if unknown else one)
    chunks = sum(len(r.chunks) for r in done)
    total = _total(r.output_tokens for r in done)
    s.ratio("tokens_per_chunk", float(total) if total is not None else None, float(chunks), "no chunk came")


# -------------------------------------------------------------------- goodput


def _goodput(s: Summary, rows: Sequence[RequestRow], limits: Limits) -> None:
    """A failed request misses; one whose limited metric is undefined neither meets nor misses and is counted apart."""
    given, reason = limits.given, "no limit is given"
    if not given:
        for key in ("goodput_share", "goodput_rate_s", "goodput_met", "goodput_missed", "goodput_undefined"):
            s.put(key, None, reason)
        return
    met = missed = undefined = 0
    for row in rows:
        if row.status in ("cancelled", "unsent"):
            continue
        values = {"ttft_ms": row.ttft_s, "tpot_ms": row.tpot_s, "e2e_ms": row.e2e_s}
        picked = [(values[key], limit / 1e3) for key, limit in given.items()]
        if row.status == "failed" or any(v is not None and v > limit for v, limit in picked):
            missed += 1
        elif any(v is None for v, _ in picked):
            undefined += 1
        else:
            met += 1
    s.put("goodput_met", met)
    s.put("goodput_missed", missed)
    s.put("goodput_undefined", undefined)
    judged = met + missed
    s.ratio("goodput_share", float(met) if judged else None, float(judged), "no request could be judged")
    seconds = s.values["duration_s"]
    s.ratio("goodput_rate_s", float(met), float(seconds) if seconds is not None else None, "no request ended")


# ------------------------------------------------------- speculation and cache


def _speculation(s: Summary, rows: Sequence[RequestRow]) -> None:
    done = _done(rows)
    drafted, accepted = _total(r.drafted_tokens for r in done), _total(r.accepted_tokens for r in done)
    known = drafted is not None and accepted is not None and bool(done)
    s.put("drafted_tokens", drafted if known else None, "the target does not count drafts")
    s.put("accepted_tokens", accepted if known else None, "the target does not count drafts")
    why = "no drafts were verified" if known else "the target does not count drafts"
    s.ratio("acceptance_rate", float(accepted or 0) if known else None, float(drafted or 0), why)


def _cache(s: Summary, rows: Sequence[RequestRow]) -> None:
    """Prompt tokens by source; they add up to the prompt tokens of completed requests."""
    done = _done(rows)
    cached, replayed = _total(r.cached_tokens for r in done), _total(r.replayed_tokens for r in done)
    prompt = _total(r.input_tokens for r in done)
    why = "no request completed" if not done else "the target does not tell where prompt tokens came from"
    known = bool(done) and cached is not None and prompt is not None
    s.put("cache_found_tokens", (cached or 0) - (replayed or 0) if known else None, why)
    s.put("cache_replayed_tokens", replayed if known and replayed is not None else None, why)
    s.put("cache_computed_tokens", (prompt or 0) - (cached or 0) if known else None, why)
    s.ratio("cache_hit_share", float(cached or 0) if known else None, float(prompt or 0), why)
