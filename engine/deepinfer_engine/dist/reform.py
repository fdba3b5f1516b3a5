"""Re-forming a deployment over the ranks that are left. No torch here.

Statement. A rank's memory does not grow when others die, so the slots per rank stay what they were; a size of R ranks
is legal when R slots of them hold every expert. The largest legal size is all ranks that are alive, or none. Surviving
ranks keep the experts they hold; only what the lost ones held alone, and replicas that are worth more elsewhere, is
placed anew. Attention ranks become as many as divide the new size and are no more than before.

Worked example: 64 ranks of 7 slots for 384 experts; 55 of them still make 385 slots, 54 make 378 and are refused.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from deepinfer_engine.config.schema import Profile
from deepinfer_engine.eplb.policy import PlanSettings, Topology, plan_experts
from deepinfer_engine.errors import CapacityError, UsageError


@dataclass(frozen=True, eq=False)
class Reformed:
    """A profile over the ranks that are ``alive`` (numbers among the ``had`` ranks before), and its slots [L, R, S].

    ``read`` counts the slots, over all layers, that hold an expert their rank did not hold before.
    """

    profile: Profile
    alive: tuple[int, ...]
    had: int
    slots_LRS: np.ndarray
    read: int


def read_healthy(given: str, had: int) -> tuple[int, ...]:
    """Ranks that are alive, from ``--healthy``: how many (the first so many are meant), or a file that lists them.

    A file holds rank numbers and ranges such as 0-5, separated by commas, spaces or lines; # starts a comment. Raises
    ``UsageError`` for what is neither, and for ranks the instance does not have.
    """
    if given.isdecimal():
        ranks = list(range(int(given)))
        if not 1 <= len(ranks) <= had:
            raise UsageError(f"--healthy {given}: the instance has {had} ranks, expected 1 to {had}")
        return tuple(ranks)
    try:
        text = Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(f"--healthy {given}: neither a number nor a file that can be read: {exc}") from None
    ranks = []
    for number, line in enumerate(text.splitlines(), start=1):
        for part in line.partition("#")[0].replace(",", " ").split():
            first, dash, last = part.partition("-")
            if not first.isdecimal() or (dash and not last.isdecimal()):
                raise UsageError(f"{given}:{number}: {part!r} is not a rank or a range", hint="for example 0-5, 7")
            ranks += range(int(first), int(last or first) + 1)
    if bad := [r for r in ranks if r >= had]:
        raise UsageError(f"{given}: rank {bad[0]} does not exist, the instance has ranks 0..{had - 1}")
    if not ranks:
        raise UsageError(f"{given}: lists no rank")
    return tuple(sorted(set(ranks)))


def reform(profile: Profile, slots_LRS: np.ndarray, experts: int, alive: tuple[int, ...]) -> Reformed:
    """The profile and the slots over ``alive`` ranks of a deployment that has ``slots_LRS`` [L, R, S].

    Raises ``CapacityError`` when their slots cannot hold every expert.
    """
    _, had, slots = slots_LRS.shape
    ranks = len(alive)
    if ranks * slots < experts:
        raise CapacityError(
            f"{ranks} of {had} ranks are left: need {experts} expert slots, have {ranks} x {slots} = {ranks * slots}",
            hint=f"{-(-experts // slots)} ranks are enough, or raise parallel.redundant_experts_per_rank",
        )
    topology = Topology(had, slots, tuple(sorted(set(range(had)) - set(alive))))
    before = slots_LRS[:, list(alive)]
    now = before
    if ranks < had:
        now = np.stack([_planned(topology, old_RS, experts)[list(alive)] for old_RS in slots_LRS])
    read = int((~(now[..., None] == before[..., None, :]).any(-1)).sum())
    return Reformed(_profile(profile, ranks, slots, experts), alive, had, np.ascontiguousarray(now), read)


def _planned(topology: Topology, old_RS: np.ndarray, experts: int) -> np.ndarray:
    """One layer for even loads, receiving only what no live rank holds."""
    live = np.delete(old_RS, topology.dead, axis=0)
    orphans = experts - len(np.unique(live[live >= 0]))
    even = np.ones((1, 1, experts), np.int64)
    return plan_experts(even, topology, old_LRS=old_RS[None], settings=PlanSettings(max_moves=orphans))[0].slot_RS


def _profile(profile: Profile, ranks: int, slots: int, experts: int) -> Profile:
    parallel, hardware, eplb = profile.parallel, profile.hardware, profile.eplb
    dp = max(d for d in range(1, min(parallel.dp, ranks) + 1) if ranks % d == 0)
    spare = slots - -(-experts // ranks)
    parallel = parallel.model_copy(update={"ep": ranks, "dp": dp, "redundant_experts_per_rank": spare})
    if hardware.platform != "cpu":
        fill = math.gcd(ranks, hardware.gpus_per_node)
        hardware = hardware.model_copy(update={"gpus": ranks, "gpus_per_node": fill})
    if ranks == 1:
        eplb = eplb.model_copy(update={"period_steps": 0})
    eplb = eplb.model_copy(update={"plan_path": None})
    return profile.model_copy(update={"parallel": parallel, "hardware": hardware, "eplb": eplb})
