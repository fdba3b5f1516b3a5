"""Scores with their uncertainty, and the paired comparison of two runs. Pure arithmetic on outcomes.

* avg@k: share of correct answers among all samples that ran. Errored and ungraded samples are not in it; wrong,
  unparsed and truncated ones are.
* pass@k: share of questions with at least one correct answer among their k. cons@k: share whose most frequent answer
  is right; unparsed and truncated answers do not vote, and a tie is no consensus. Both count complete questions only.
* Interval: Wilson, 95 %, over samples for avg@k and over questions for the others. The questions are held fixed: it
  says how far luck in sampling moves the score of this deployment on these questions, which is what a deployment
  check compares. Since questions differ in difficulty it is a little too wide for that (by concavity of p(1-p)).
* Comparison: McNemar's exact test for one sample per question, the exact sign test on per-question averages otherwise;
  both two-sided. Questions on which the runs agree carry no weight.

Worked example: 28 of 30 correct is 0.933 with the interval 0.787 .. 0.982; a vendor's 0.999 is excluded.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from deepinfer_engine.evals.grade import OUTCOMES, Outcome

#: Standard normal quantile of a two-sided 95 % interval.
Z95 = 1.959963984540054
INTERVAL = "Wilson 95 %, questions held fixed"
_RAN: tuple[Outcome, ...] = ("correct", "wrong", "unparsed", "truncated")


@dataclass(frozen=True)
class Sample:
    """The verdict on one sample of one question."""

    item: str
    sample: int
    outcome: Outcome
    key: str | None = None


@dataclass(frozen=True)
class Share:
    """``hits`` of ``of``; the interval is None when ``of`` is 0."""

    hits: int
    of: int

    @property
    def value(self) -> float | None:
        return self.hits / self.of if self.of else None

    @property
    def interval(self) -> tuple[float, float] | None:
        return wilson(self.hits, self.of) if self.of else None


@dataclass(frozen=True)
class Summary:
    """Counts that add up to the samples, and the three shares."""

    k: int
    outcomes: Mapping[Outcome, int]
    avg: Share
    passed: Share
    consensus: Share

    @property
    def samples(self) -> int:
        return sum(self.outcomes.values())


@dataclass(frozen=True)
class Comparison:
    """Questions where this run did better or worse than the other, and the two-sided p-value."""

    test: str
    better: int
    worse: int
    same: int
    p_value: float


def wilson(hits: int, of: int, z: float = Z95) -> tuple[float, float]:
    """Wilson's score interval of a share."""
    share, z2 = hits / of, z * z
    centre = (share + z2 / (2 * of)) / (1 + z2 / of)
    half = z / (1 + z2 / of) * math.sqrt(share * (1 - share) / of + z2 / (4 * of * of))
    low = 0.0 if hits == 0 else max(0.0, centre - half)
    high = 1.0 if hits == of else min(1.0, centre + half)
    return low, high


def summarise(samples: Iterable[Sample], k: int) -> Summary:
    """Counts and shares of a run; the order of samples does not matter."""
    by_item: dict[str, list[Sample]] = {}
    for sample in samples:
        by_item.setdefault(sample.item, []).append(sample)
    every = [s for group in by_item.values() for s in group]
    counts = Counter(s.outcome for s in every)
    complete = [g for g in by_item.values() if sum(s.outcome in _RAN for s in g) == k]
    return Summary(
        k=k,
        outcomes={name: counts[name] for name in OUTCOMES},
        avg=Share(counts["correct"], sum(counts[name] for name in _RAN)),
        passed=Share(sum(any(s.outcome == "correct" for s in g) for g in complete), len(complete)),
        consensus=Share(sum(agreed(g) for g in complete), len(complete)),
    )


def agreed(group: Sequence[Sample]) -> bool:
    """Whether the most frequent answer of one question is right; False on a tie or without any vote."""
    votes = Counter(s.key for s in group if s.outcome in ("correct", "wrong"))
    ranked = votes.most_common(2)
    if not ranked or (len(ranked) == 2 and ranked[0][1] == ranked[1][1]):
        return False
    return any(s.outcome == "correct" and s.key == ranked[0][0] for s in group)


def compare(mine: Iterable[Sample], other: Iterable[Sample]) -> Comparison:
    """Paired comparison over the questions that ran completely in both runs."""
    ours, theirs = _rates(mine), _rates(other)
    better = worse = same = 0
    single = True
    for item in ours.keys() & theirs.keys():
        (hits, of), (hits2, of2) = ours[item], theirs[item]
        single = single and of == of2 == 1
        left, right = hits * of2, hits2 * of
        better += left > right
        worse += left < right
        same += left == right
    name = "McNemar exact, two-sided" if single else "sign test on per-question averages, exact, two-sided"
    return Comparison(name, better, worse, same, sign_test(better, worse))


def _rates(samples: Iterable[Sample]) -> dict[str, tuple[int, int]]:
    """(correct, ran) per question that ran; questions with an errored or ungraded sample are left out."""
    rates: dict[str, list[int]] = {}
    broken: set[str] = set()
    for s in samples:
        if s.outcome not in _RAN:
            broken.add(s.item)
        pair = rates.setdefault(s.item, [0, 0])
        pair[0] += s.outcome == "correct"
        pair[1] += 1
    return {item: (hits, of) for item, (hits, of) in rates.items() if item not in broken}


def sign_test(better: int, worse: int) -> float:
    """Two-sided exact p-value of ``better`` against ``worse`` under even odds; 1 when both are 0."""
    total, least = better + worse, min(better, worse)
    tail = sum(math.comb(total, i) for i in range(least + 1))
    return min(1.0, 2 * tail / 2**total) if total else 1.0
