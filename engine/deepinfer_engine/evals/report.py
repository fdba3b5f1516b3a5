"""What a log says: the result document, the check against an expected score, and the comparison with another run."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepinfer_engine.errors import UsageError
from deepinfer_engine.evals.log import LogContent
from deepinfer_engine.evals.score import INTERVAL, Comparison, Share, Summary, compare, summarise
from deepinfer_engine.evals.task import Task

#: Chance of calling two equal runs different that a comparison accepts.
ALPHA = 0.05


@dataclass(frozen=True)
class Expect:
    """A score the run is held against. ``floor`` allows more than the value; ``label`` is how it was asked for."""

    value: float
    floor: bool
    label: str

    def verdict(self, summary: Summary) -> str | None:
        """Why the run does not meet it, or None: the 95 % interval of avg@k must contain (or exceed) the value."""
        interval = summary.avg.interval
        if interval is None:
            return "no sample was graded"
        low, high = interval
        shown = f"{percent(low)} to {percent(high)} %"
        if high < self.value:
            return f"the 95 % interval {shown} lies below {percent(self.value)} % ({self.label})"
        if low > self.value and not self.floor:
            return f"the 95 % interval {shown} lies above {percent(self.value)} % ({self.label})"
        return None


def parse_expect(text: str, task: Task, *, whole: bool) -> Expect:
    """``vendor``, a share such as ``0.9`` or ``90%``, or ``>=0.9`` for a floor. ``UsageError`` otherwise.

    ``whole`` says whether all questions are asked: a vendor's score is about all of them.
    """
    if text == "vendor":
        if task.vendor is None:
            raise UsageError(
                f"--expect vendor: no score for {task.name} is published", hint="give a number: --expect 0.9"
            )
        if not whole:
            raise UsageError("--expect vendor is about all questions of the task, and only some are asked")
        return Expect(task.vendor.score, floor=False, label=f"vendor, {task.vendor.source}")
    match = re.fullmatch(r"(>=)?\s*([0-9]*\.?[0-9]+)\s*(%)?", text.strip())
    if match is None:
        raise UsageError(f"--expect {text}: expected vendor, a share such as 0.9 or 90%, or >=0.9")
    value = float(match.group(2)) / (100 if match.group(3) else 1)
    if not 0 <= value <= 1:
        raise UsageError(f"--expect {text}: a share is 0 to 1", hint=f"write {match.group(2)}% for per cent")
    return Expect(value, floor=match.group(1) is not None, label=f"--expect {text}")


def percent(value: float) -> str:
    """A share in per cent with one decimal: one question of 30 is 3.3 points, more digits would be noise."""
    return f"{100 * value:.1f}"


def check_pairs(identity: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Refuse to compare runs that did not ask the same questions in the same way."""
    for key in ("task", "task_digest", "data_sha256", "judge"):
        mine, theirs = identity.get(key), other.get(key)
        if mine != theirs:
            raise UsageError(
                f"--compare: the runs differ in {key} ({mine!r} here, {theirs!r} there), so their questions do not pair"
            )


def compared(content: LogContent, other: LogContent) -> Comparison:
    """Paired comparison with another run; ``UsageError`` when the two do not pair."""
    check_pairs(content.identity, other.identity)
    result = compare(content.samples(), other.samples())
    if result.better + result.worse + result.same == 0:
        raise UsageError("--compare: the runs have no completed question in common")
    return result


def differences(content: LogContent, other: LogContent) -> dict[str, list[Any]]:
    """What a comparison compares: the parts of the two identities that differ, ``[here, there]``."""
    mine, theirs = flat(content.identity), flat(other.identity)
    names = [n for n in (*mine, *(t for t in theirs if t not in mine)) if mine.get(n) != theirs.get(n)]
    return {name: [mine.get(name), theirs.get(name)] for name in names}


def flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested mapping by dotted keys."""
    out: dict[str, Any] = {}
    for key, inner in value.items():
        if isinstance(inner, Mapping) and inner:
            out |= flat(inner, f"{prefix}{key}.")
        else:
            out[prefix + key] = inner
    return out


def document(content: LogContent, log: Path) -> dict[str, Any]:
    """The result of a run as JSON content; counts of outcomes add up to ``samples``."""
    identity, summary = content.identity, summary_of(content)
    records = content.records.values()
    return {
        "task": identity["task"],
        "complete": len(content.records) == content.expected,
        "samples": summary.samples,
        "samples_expected": content.expected,
        "questions": identity["items"],
        "k": summary.k,
        "seeds": identity["seeds"],
        "reproducible": _reproducible(content),
        "interval": INTERVAL,
        "avg_at_k": _share(summary.avg),
        "pass_at_k": _share(summary.passed),
        "cons_at_k": _share(summary.consensus),
        "outcomes": dict(summary.outcomes),
        "errors": dict(Counter(str(r.get("error")) for r in records if r["outcome"] == "errored").most_common(5)),
        "prompt_tokens": sum(r.get("prompt_tokens") or 0 for r in records),
        "generated_tokens": sum(r.get("generated_tokens") or 0 for r in records),
        "log": log.name,
        "identity": dict(identity),
    }


def summary_of(content: LogContent) -> Summary:
    """Counts and shares of a log."""
    return summarise(content.samples(), len(content.identity["seeds"]))


def _reproducible(content: LogContent) -> bool | None:
    """Whether every sample can be drawn again bit by bit; None when an endpoint answered, which does not say."""
    flags = [r.get("reproducible") for r in content.records.values() if r["outcome"] != "errored"]
    return all(flags) if flags and None not in flags else None


def _share(share: Share) -> dict[str, Any]:
    low, high = share.interval or (None, None)
    return {"value": share.value, "low": low, "high": high, "hits": share.hits, "of": share.of}


def per_question(content: LogContent) -> list[tuple[str, int, int, str, str]]:
    """(question, correct, samples, gold, what was extracted) in the order of first answers, for tables."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for record in content.records.values():
        groups.setdefault(record["item"], []).append(record)
    return [
        (
            item,
            sum(r["outcome"] == "correct" for r in group),
            len(group),
            str(group[0].get("gold")),
            " | ".join(str(r["extracted"]) if r.get("extracted") is not None else f"<{r['outcome']}>" for r in group),
        )
        for item, group in groups.items()
    ]
