"""How a benchmark is shown: while it runs (one line on stderr) and when it is over (tables, lines, documents)."""

from __future__ import annotations

import csv
import io
import sys
import time
from collections import defaultdict
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render
from deepinfer_cli.options import OutputFormat
from deepinfer_cli.render import Cell

if TYPE_CHECKING:
    from deepinfer_engine.bench.curve import MeasuredCurve
    from deepinfer_engine.bench.replay import MeasuredReplay
    from deepinfer_engine.bench.result import BenchResult
    from deepinfer_engine.bench.run import Progress
    from deepinfer_engine.bench.workload import Workload

FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)
_PHASES = {"warmup": "warming up", "fill": "filling the cache", "measure": "measuring"}
_BETWEEN_S = 0.2


class LiveLine:
    """One line on a terminal's stderr, rewritten a few times a second; nothing elsewhere."""

    def __init__(self, *, quiet: bool):
        self._shown = not quiet and sys.stderr.isatty()
        self._last_s = 0.0
        self._width = 0

    def __call__(self, p: Progress) -> None:
        now = time.monotonic()
        if not self._shown or (now - self._last_s < _BETWEEN_S and p.done < p.total):
            return
        self._last_s = now
        rate = p.output_tokens / p.elapsed_s if p.elapsed_s > 0 else 0.0
        failed = f", {p.failed} failed" if p.failed else ""
        counts = f"{_PHASES[p.phase]}: {p.done}/{p.total}{failed}, {p.in_flight} in flight"
        text = f"{counts}, {rate:.0f} tok/s out, {p.elapsed_s:.0f} s"
        sys.stderr.write("\r" + text.ljust(self._width))
        sys.stderr.flush()
        self._width = len(text)

    def end(self) -> None:
        """Leave an empty line behind."""
        if self._width:
            sys.stderr.write("\r" + " " * self._width + "\r")
            sys.stderr.flush()
            self._width = 0


def text_of(result: BenchResult, form: OutputFormat, *, writer: str, detailed: bool) -> str:
    """A result in the asked form: tables, vLLM's document or InferenceX's, a line for every request, a CSV row."""
    from deepinfer_engine.bench import writers

    if form is OutputFormat.jsonl:
        return "".join(render.json_text(o, indent=None) for o in writers.request_objects(result))
    if form is OutputFormat.csv:
        row = result.to_row()
        stream = io.StringIO()
        csv.writer(stream, lineterminator="\n").writerows(
            [list(row), ["" if v is None else repr(v) if isinstance(v, float) else v for v in row.values()]]
        )
        return stream.getvalue()
    if form is OutputFormat.json:
        if writer == "inferencex":
            return render.json_text(writers.inferencex_document(result))
        return render.json_text(writers.vllm_document(result, detailed=detailed))
    return _table(result)


def _table(result: BenchResult) -> str:
    parts = [_head(result), _rates(result), _latencies(result), _rest(result)]
    if result.failures:
        first = {r.error_group: r.error for r in reversed(result.requests) if r.status == "failed"}
        rows = [(kind, n, first.get(kind) or "") for kind, n in result.failures.items()]
        parts.append(render.table(("failure", "requests", "first of them"), rows))
    parts.append(_undefined(result))
    return "\n".join(p for p in parts if p)


def _head(result: BenchResult) -> str:
    s, meta = result.summary, result.meta
    on = meta.profile_name or meta.target.get("url") or ""
    forward = f", single {meta.target['forward']} forwards" if "forward" in meta.target else ""
    marked = ""
    if result.status == "interrupted":
        marked = f"  INTERRUPTED: {s['cancelled']} cancelled, {s['unsent']} not sent\n"
    place = f"{meta.kind} on {meta.hardware.get('name')}, commit {meta.commit or 'unknown'}, seed {meta.seed}"
    return (
        f"{meta.workload} on {on}{forward}: {place}\n"
        f"{s['requests']} requests: {s['completed']} completed, {s['failed']} failed, {s['cancelled']} cancelled, "
        f"{s['unsent']} not sent; {_cell(s['input_tokens'])} prompt + {_cell(s['output_tokens'])} output tokens in "
        f"{_cell(s['duration_s'])} s\n{marked}"
    )


def _cell(value: Any) -> Cell:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def _rates(result: BenchResult) -> str:
    s = result.summary
    names = (
        ("requests/s", "request_rate_s", None, None),
        ("prompt tok/s", "input_tok_s", "steady_input_tok_s", "input_tok_s_gpu"),
        ("output tok/s", "output_tok_s", "steady_output_tok_s", "output_tok_s_gpu"),
        ("total tok/s", "total_tok_s", "steady_total_tok_s", "total_tok_s_gpu"),
        ("output tok/s/user", "output_tok_s_user", None, None),
    )
    rows = [(label, *(None if k is None else _cell(s.get(k)) for k in keys)) for label, *keys in names]
    return render.table(("throughput", "whole run", "steady window", "per GPU"), rows)


def _latencies(result: BenchResult) -> str:
    s = result.summary
    columns = ("mean", "median", "std", "p90", "p99", "min", "max")
    labels = {
        "ttft": "TTFT",
        "queued": "queued",
        "tpot": "TPOT",
        "itl_chunk": "ITL by chunk",
        "itl_token": "ITL by token",
        "e2e": "E2E",
        "forward": "forward",
    }
    rows = [
        (label, *(_cell(s[f"{name}_{c}_ms"]) for c in columns))
        for name, label in labels.items()
        if s.get(f"{name}_mean_ms") is not None
    ]
    return render.table(("ms", *columns), rows) if rows else ""


def _rest(result: BenchResult) -> str:
    s = result.summary
    keys = (
        "mean_in_flight", "tokens_per_chunk", "queued_share_of_ttft", "max_submit_delay_ms", "cache_found_tokens",
        "cache_replayed_tokens", "cache_computed_tokens", "cache_hit_share", "prompt_seen_share", "acceptance_rate",
        "goodput_share",
        "goodput_rate_s", "moe_lb", "moe_lb_step", "steps", "preemptions", "step_run_mean_ms", "step_schedule_mean_ms",
        "step_build_mean_ms", "step_post_mean_ms", "forwards", "rows_per_forward", "forward_tokens_mean",
        "forward_tok_s", "shorter_than_planned", "lost_output_tokens",
    )  # fmt: skip
    drafts = ("verify_rows", "verify_length_mean", "tokens_per_verify_row")
    shown = [*keys, *drafts, *(k for k in s if k.startswith("acceptance_place_"))] if s.get("verify_rows") else keys
    rows = [(k, _cell(s[k])) for k in shown if s.get(k) is not None]
    return render.table(("also", "value"), rows)


def _undefined(result: BenchResult) -> str:
    """Reasons for what is undefined, one line each, with the first words of the keys they cover."""
    groups: dict[str, list[str]] = defaultdict(list)
    for key, reason in result.undefined.items():
        groups[reason].append(key)
    lines = [f"  {_families(keys)}: {reason}" for reason, keys in groups.items()]
    return "\n".join(["undefined:", *lines]) if lines else ""


def _families(keys: list[str]) -> str:
    """Keys with the statistics of one distribution folded into one name."""
    out: list[str] = []
    for key in keys:
        for mark in ("_mean_", "_median_", "_std_", "_min_", "_max_", "_p75_", "_p90_", "_p95_", "_p99_"):
            if mark in key and key.endswith("_ms"):
                key = key.split(mark)[0] + "_*_ms"
                break
        if key not in out:
            out.append(key)
    return ", ".join(out)


def curve_text(curve: MeasuredCurve, form: OutputFormat) -> str:
    """A step-time curve: a table of rows by tokens a row (median ms), or its points."""
    points = [{**asdict(p), "tokens": p.tokens} for p in curve.points]
    if form is OutputFormat.json:
        content = {"meta": curve.meta, "rounds": curve.rounds, "points": points, "steps": list(curve.steps)}
        return render.json_text(render.document("step-curve", content))
    if form is not OutputFormat.table:
        columns = list(points[0])
        return render.rows_text(form, "step-curve", columns, [[p[c] for c in columns] for p in points])
    widths = sorted({p.tokens_per_row for p in curve.points})
    table: dict[int, dict[int, float]] = defaultdict(dict)
    for p in curve.points:
        table[p.rows][p.tokens_per_row] = p.median_ms
    rows = [(r, *(_cell(at[w]) for w in widths)) for r, at in table.items()]
    meta = curve.meta
    head = (
        f"step time in ms, {meta['kind']}: profile {meta['profile']} on {meta['hardware']['name']}, commit "
        f"{meta['commit'] or 'unknown'}, {meta['context_tokens']} tokens of context, median of {curve.rounds} rounds\n"
        "forward passes with logits of every token; drawing, drafting and planning are not in it\n\n"
    )
    text = head + render.table(("rows", *(f"{w} tok/row" for w in widths)), rows)
    if not curve.steps:
        return text
    columns = ("path", "rows", "drafts", "tokens", "step_ms")
    steps = [tuple(_cell(step[c]) for c in columns) for step in curve.steps]
    said = "whole steps (build, forward, verification, commit, drafts), as verify budgets are chosen by"
    return f"{text}\n{said}\n\n{render.table(columns, steps)}"


def replay_text(measured: MeasuredReplay, form: OutputFormat) -> str:
    """Prefill times and FLOPs by length and case, ratios beside the predicted ones."""
    cells = [asdict(c) for c in measured.cells]
    if form is OutputFormat.json:
        content = {"meta": measured.meta, "rounds": measured.rounds, "clock": measured.clock, "cells": cells}
        return render.json_text(render.document("replay", content))
    if form is not OutputFormat.table:
        columns = list(cells[0])
        return render.rows_text(form, "replay", columns, [[c[name] for name in columns] for c in cells])
    shown = ("tokens", "case", "cached", "replayed", "gflop", "median_ms", "cpu_ms", "against", "ratio")
    shown += ("predicted_rows", "predicted_flops", "reached")
    meta = measured.meta
    head = (
        f"prefill and first token, {meta['kind']}: profile {meta['profile']} on {meta['hardware']['name']}, commit "
        f"{meta['commit'] or 'unknown'}, median of {measured.rounds} rounds that took turns\n"
        f"ratio: of {measured.clock}; reached: the measured saving as a share of the predicted one\n\n"
    )
    return head + render.table(shown, [tuple(_cell(c[name]) for name in shown) for c in cells])


def workload_rows(workload: Workload) -> list[tuple[str, Cell]]:
    """What a workload is, for a dry run."""
    outputs, arrivals = workload.output_tokens, workload.arrivals
    how = {
        "closed": f"closed loop, {arrivals.concurrency} in flight",
        "open": f"open loop, {arrivals.rate_per_s} a second, burstiness {arrivals.burstiness:g}",
        "trace": f"the trace's times, {arrivals.speed:g} times as fast",
        "at_once": "all at once",
    }[arrivals.mode]
    if arrivals.mode != "closed" and arrivals.concurrency is not None:
        how += f", at most {arrivals.concurrency} in flight"
    total, middle, seen = None, "known to the endpoint", None
    if workload.measured:
        inputs = workload.input_tokens
        total, middle = int(inputs.sum()), f"{inputs.mean():.0f} / {inputs.max()}"
        seen = round(workload.seen_rate or 0.0, 4)
    most = ", at most" if any(r.text is not None for r in workload.requests) else ""
    return [
        ("workload", workload.name),
        ("description", workload.description),
        ("digest", workload.digest[:16]),
        ("seed", workload.seed),
        ("requests", len(workload.requests)),
        ("skipped for length", workload.skipped),
        ("warm-up requests", len(workload.warmup)),
        ("prompt tokens", total),
        ("prompt mean / longest", middle),
        (f"output tokens{most}", int(outputs.sum())),
        (f"output mean / longest{most}", f"{outputs.mean():.0f} / {outputs.max()}"),
        ("seen before, share of prompt tokens", seen),
        ("cache", workload.cache),
        ("arrivals", how),
    ]
