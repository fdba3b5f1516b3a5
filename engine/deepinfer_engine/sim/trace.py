"""Request traces: Azure CSV (arrival, prompt and answer lengths) and Mooncake JSON lines (with ids of prompt blocks).

``prefix_hits`` turns block ids into cached tokens, with every prompt kept for ever or for a time after its last use.
"""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import numpy as np

from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import ArtefactError, UsageError

#: Tokens behind one id of a Mooncake trace.
TRACE_BLOCK = 512

_AZURE = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_MOONCAKE = ("timestamp", "input_length", "output_length", "hash_ids")


@dataclass(frozen=True)
class TraceRequest:
    """One request: seconds from the start of the trace, lengths, and the ids of its prompt's blocks if known."""

    arrival_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival. ``has_prefixes`` tells whether hits can be derived."""

    name: str
    requests: tuple[TraceRequest, ...]
    has_prefixes: bool

    def scaled(self, rate: float) -> Trace:
        """The same requests arriving ``rate`` times as fast."""
        if not (rate > 0 and math.isfinite(rate)):
            raise UsageError(f"the arrival rate is scaled by {rate}, expected a positive number")
        moved = tuple(
            TraceRequest(r.arrival_s / rate, r.input_tokens, r.output_tokens, r.blocks) for r in self.requests
        )
        return Trace(self.name, moved, self.has_prefixes)


def read_trace(path: Path, *, limit: int | None = None) -> Trace:
    """Read a trace by its suffix, at most ``limit`` requests.

    Raises ``ArtefactError`` naming file and line, ``UsageError`` for a file of another kind.
    """
    if path.suffix not in (".csv", ".jsonl"):
        raise UsageError(f"{path}: a trace is an Azure .csv or a Mooncake .jsonl file")
    try:
        with path.open(encoding="utf-8", newline="") as file:
            read = _read_azure if path.suffix == ".csv" else _read_mooncake
            requests = read(file, path, limit)
    except FileNotFoundError:
        raise ArtefactError(f"{path}: no such file") from None
    except (OSError, UnicodeDecodeError) as exc:
        raise ArtefactError(f"{path}: cannot be read: {exc}") from None
    if not requests:
        raise ArtefactError(f"{path}: holds no requests")
    requests.sort(key=lambda r: r.arrival_s)
    first = requests[0].arrival_s
    moved = tuple(TraceRequest(r.arrival_s - first, r.input_tokens, r.output_tokens, r.blocks) for r in requests)
    return Trace(path.name, moved, path.suffix == ".jsonl")


def _read_azure(file, path: Path, limit: int | None) -> list[TraceRequest]:
    rows = csv.reader(file)
    header = next(rows, None)
    if header is None or tuple(header) != _AZURE:
        raise ArtefactError(f"{path}:1: columns are {header}, expected {','.join(_AZURE)}")
    out = []
    for number, row in enumerate(rows, start=2):
        if limit is not None and len(out) >= limit:
            break
        if not row:
            continue
        where = f"{path}:{number}"
        if len(row) != 3:
            raise ArtefactError(f"{where}: {len(row)} columns, expected 3")
        try:
            # seven digits of a second; datetime reads six
            arrival = datetime.fromisoformat(row[0].strip()[:26]).timestamp()
        except ValueError:
            raise ArtefactError(f"{where}: {row[0]!r} is not a time") from None
        out.append(TraceRequest(arrival, _length(row[1], where, 1), _length(row[2], where, 1)))
    return out


def _read_mooncake(file, path: Path, limit: int | None) -> list[TraceRequest]:
    out = []
    for number, line in enumerate(file, start=1):
        if limit is not None and len(out) >= limit:
            break
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            item = json.loads(line)
        except (json.JSONDecodeError, RecursionError) as exc:
            raise ArtefactError(f"{where}: not JSON: {exc}") from None
        if not isinstance(item, dict) or any(key not in item for key in _MOONCAKE):
            raise ArtefactError(f"{where}: expected an object with {', '.join(_MOONCAKE)}")
        stamp, ids = item["timestamp"], item["hash_ids"]
        if isinstance(stamp, bool) or not isinstance(stamp, int | float) or not math.isfinite(stamp):
            raise ArtefactError(f"{where}: timestamp is {stamp!r}, expected milliseconds")
        if not isinstance(ids, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
            raise ArtefactError(f"{where}: hash_ids is not a list of integers")
        tokens = _length(item["input_length"], where, 1)
        if len(ids) > -(-tokens // TRACE_BLOCK):
            raise ArtefactError(f"{where}: {len(ids)} blocks of {TRACE_BLOCK} for {tokens} tokens")
        out.append(TraceRequest(stamp / 1e3, tokens, _length(item["output_length"], where, 1), tuple(ids)))
    return out


def _length(value: object, where: str, least: int) -> int:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArtefactError(f"{where}: length {value!r}, expected an integer of {least} or more")
    return value


# ------------------------------------------------------------------- prefixes


def hit_cap(tokens: int, *, window: int, slack: int) -> int:
    """Most tokens of a prompt that a prefix hit may cover: whole blocks that leave a window and rollback room."""
    return max(0, (tokens - window - slack) // BLOCK_TOKENS * BLOCK_TOKENS)


def prefix_hits(trace: Trace, *, window: int, slack: int, ttl_s: float = math.inf) -> np.ndarray:
    """Cached tokens of every request, int64, when each block is kept ``ttl_s`` after its last use.

    A block counts from the arrival of the request that brought it. Contiguous from the first block on.
    """
    last: dict[int, float] = {}
    out = np.zeros(len(trace.requests), dtype=np.int64)
    for i, request in enumerate(trace.requests):
        found = 0
        for block in request.blocks:
            if block not in last or request.arrival_s - last[block] > ttl_s:
                break
            found += 1
        # the last id of a prompt stands for what is left of it, which may be less than a block
        hit = min(found * TRACE_BLOCK, request.input_tokens)
        out[i] = min(hit // BLOCK_TOKENS * BLOCK_TOKENS, hit_cap(request.input_tokens, window=window, slack=slack))
        for block in request.blocks:
            last[block] = request.arrival_s
    return out


def assumed_hits(trace: Trace, rate: float, *, window: int, slack: int) -> np.ndarray:
    """Cached tokens when every prompt finds the same share of itself, in whole blocks, int64."""
    if not 0 <= rate <= 1:
        raise UsageError(f"the hit rate is {rate:g}, expected 0 to 1")
    return np.array(
        [
            min(int(rate * r.input_tokens) // BLOCK_TOKENS * BLOCK_TOKENS,
                hit_cap(r.input_tokens, window=window, slack=slack))
            for r in trace.requests
        ],
        dtype=np.int64,
    )  # fmt: skip


# ------------------------------------------------------------------ synthetic


@dataclass(frozen=True)
class AgentSessions:
    """Sessions of an agent: every turn sends the whole context again with something appended.

    Turns are geometric, appended and generated tokens log-normal around their means, pauses exponential.
    """

    turns: float
    append: float
    generate: float
    longest: int
    pause_s: float = 20.0
    system_tokens: int = 2048

    @property
    def spread(self) -> float:
        """Sigma of the log-normal lengths; 0.8 has a 90th percentile of twice the mean."""
        return 0.8


#: Published statistics of agent traffic by longest context: turns, tokens appended and generated a turn
#: (DualPath, arXiv 2602.21548). The distributions around the means are assumed.
AGENT_SESSIONS = {
    "agent-32k": AgentSessions(60, 608, 148, 32_768),
    "agent-48k": AgentSessions(106, 474, 172, 49_152),
    "agent-64k": AgentSessions(157, 429, 176, 65_536),
}


def synthetic_agents(name: str, *, requests: int, sessions_per_s: float, seed: int) -> Trace:
    """A synthetic trace of agent sessions: Poisson starts, one shared system prompt. Same seed, same trace."""
    if name not in AGENT_SESSIONS:
        raise UsageError(f"no synthetic trace is called {name!r}", hint=f"use one of {', '.join(AGENT_SESSIONS)}")
    if not (sessions_per_s > 0 and math.isfinite(sessions_per_s)):
        raise UsageError(f"sessions start at {sessions_per_s} per second, expected a positive rate")
    kind, rng = AGENT_SESSIONS[name], np.random.default_rng(seed)
    out: list[TraceRequest] = []
    start, next_id = 0.0, 1_000_000  # ids below belong to the system prompt
    while len(out) < requests:
        start += rng.exponential(1 / sessions_per_s)
        now, context, ids = start, kind.system_tokens, list(range(kind.system_tokens // TRACE_BLOCK))
        for _ in range(int(rng.geometric(1 / kind.turns))):
            context += _lognormal(rng, kind.append, kind.spread)
            if context > kind.longest:
                break
            while len(ids) < context // TRACE_BLOCK:
                ids.append(next_id)
                next_id += 1
            answer = _lognormal(rng, kind.generate, kind.spread)
            out.append(TraceRequest(now, context, answer, tuple(ids)))
            context += answer
            now += rng.exponential(kind.pause_s)
    out.sort(key=lambda r: r.arrival_s)
    return Trace(f"{name} (synthetic)", tuple(out[:requests]), True)


def _lognormal(rng: np.random.Generator, mean: float, sigma: float) -> int:
    return max(1, round(float(rng.lognormal(math.log(mean) - sigma * sigma / 2, sigma))))


def describe(requests: Sequence[TraceRequest]) -> dict[str, float]:
    """Means and extremes of a trace, for its report."""
    inputs = np.array([r.input_tokens for r in requests])
    outputs = np.array([r.output_tokens for r in requests])
    return {
        "requests": len(requests),
        "seconds": requests[-1].arrival_s,
        "input_mean": float(inputs.mean()),
        "input_p99": float(np.percentile(inputs, 99)),
        "output_mean": float(outputs.mean()),
    }
