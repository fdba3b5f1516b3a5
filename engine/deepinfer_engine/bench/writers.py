"""A result in the forms that others read: the key set of vLLM's benchmark, InferenceX's aggregate, one line a request.

Undefined values are null everywhere; the reasons are in our own object.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import datetime
from typing import Any

from deepinfer_engine.bench.metrics import PERCENTILES, RequestRow
from deepinfer_engine.bench.result import BenchResult

#: our metric behind each of vLLM's
_METRICS = {"ttft": "ttft", "tpot": "tpot", "itl": "itl_chunk", "e2el": "e2e"}


def vllm_document(result: BenchResult, *, detailed: bool = False) -> dict[str, Any]:
    """The key set of ``vllm bench serve`` with our object under ``deepinfer``; arrays per request when ``detailed``.

    ``request_rate`` is the text "inf" where arrivals are not paced, ``max_concurrency`` always an integer (without a
    bound: the number of requests, which nothing can exceed), because readers convert both without looking.
    """
    s, meta = result.summary, result.meta
    arrivals = meta.recipe.get("arrivals", {})
    rate = arrivals.get("rate_per_s")
    document: dict[str, Any] = {
        "date": datetime.fromisoformat(meta.started).strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if meta.target.get("interface") == "chat" else str(meta.target.get("kind")),
        "model_id": meta.target.get("model"),
        "tokenizer_id": meta.target.get("model"),
        "num_prompts": s["requests"],
        "request_rate": "inf" if rate is None else rate,
        "burstiness": arrivals.get("burstiness", 1.0),
        "max_concurrency": arrivals.get("concurrency") or s["requests"],
        "duration": s["duration_s"],
        "completed": s["completed"],
        "failed": s["failed"],
        "total_input_tokens": s["input_tokens"],
        "total_output_tokens": s["output_tokens"],
        "request_throughput": s["request_rate_s"],
        "request_goodput": s["goodput_rate_s"],
        "output_throughput": s["output_tok_s"],
        "total_token_throughput": s["total_tok_s"],
    }
    for theirs, ours in _METRICS.items():
        for name in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES)):
            document[f"{name}_{theirs}_ms"] = s[f"{ours}_{name}_ms"]
    if s["drafted_tokens"]:
        rate_of = s["acceptance_rate"]
        document["spec_decode_acceptance_rate"] = None if rate_of is None else 100 * float(rate_of)
        document["spec_decode_draft_tokens"] = s["drafted_tokens"]
        document["spec_decode_accepted_tokens"] = s["accepted_tokens"]
        document["spec_decode_num_drafts"] = s.get("verify_rows")
        document["spec_decode_acceptance_length"] = s.get("tokens_per_verify_row")
        places = [s[key] for key in s if key.startswith("acceptance_place_")]
        document["spec_decode_per_position_acceptance_rates"] = places
    if detailed:
        document |= _arrays(result)
    document["deepinfer"] = own_object(result)
    return document


def _arrays(result: BenchResult) -> dict[str, Any]:
    rows = result.requests
    return {
        "input_lens": [r.input_tokens for r in rows],
        "output_lens": [r.output_tokens for r in rows],
        "ttfts": [r.ttft_s for r in rows],
        "itls": [[b[0] - a[0] for a, b in zip(r.chunks, r.chunks[1:], strict=False)] for r in rows],
        "start_times": [r.submitted_s for r in rows],
        "errors": [r.error or "" for r in rows],
    }


def own_object(result: BenchResult) -> dict[str, Any]:
    """Everything we know of a run but its requests."""
    return {
        "schema": "deepinfer/bench/1",
        "status": result.status,
        "summary": result.summary,
        "undefined": result.undefined,
        "failures": result.failures,
        "meta": asdict(result.meta),
    }


def inferencex_document(result: BenchResult) -> dict[str, Any]:
    """InferenceX's aggregate: seconds, rates per GPU, interactivity = 1 / TPOT (tokens per second and user).

    The deviation of an interactivity is not 1 / the deviation of TPOT, so it is null.
    """
    s, meta = result.summary, result.meta
    profile, load = meta.profile, meta.recipe.get("load", {})
    document: dict[str, Any] = {
        "hw": meta.hardware.get("name"),
        "tp": s["gpus"],
        "ep": profile.get("parallel.ep"),
        "dp_attention": None if not profile else bool(profile.get("parallel.dp", 1) > 1),
        "conc": meta.recipe.get("arrivals", {}).get("concurrency") or s["requests"],
        "model": meta.target.get("model"),
        "framework": "deepinfer" if meta.target.get("kind") == "engine" else meta.target.get("kind"),
        "precision": profile.get("numerics.mode"),
        "isl": load.get("input_tokens"),
        "osl": load.get("output_tokens"),
        "tput_per_gpu": s["total_tok_s_gpu"],
        "output_tput_per_gpu": s["output_tok_s_gpu"],
        "input_tput_per_gpu": s["input_tok_s_gpu"],
    }
    for theirs, ours in _METRICS.items():
        for name in ("mean", "median", "std", *(f"p{p}" for p in PERCENTILES)):
            value = s[f"{ours}_{name}_ms"]
            document[f"{name}_{theirs}"] = None if value is None else float(value) / 1e3
            if theirs == "tpot":
                document[f"{name}_intvty"] = None if not value or name == "std" else 1e3 / float(value)
    return document


def request_object(row: RequestRow) -> dict[str, Any]:
    """One request as a flat object, times in milliseconds, chunks as [ms, tokens] from the start of the run."""
    out = {k: v for k, v in asdict(row).items() if not k.endswith("_s") and k != "chunks"}
    for name in ("due", "submitted", "ended", "queued", "ttft", "tpot", "e2e"):
        value = getattr(row, f"{name}_s")
        out[f"{name}_ms"] = None if value is None else value * 1e3
    out["chunks"] = [[at * 1e3, tokens] for at, tokens in row.chunks]
    return out


def request_objects(result: BenchResult) -> list[dict[str, Any]]:
    """All requests, in order of the workload, each with the names of its run."""
    meta = result.meta
    base: Mapping[str, Any] = {"workload": meta.workload, "started": meta.started, "run_status": result.status}
    return [{**base, **request_object(row)} for row in result.requests]
