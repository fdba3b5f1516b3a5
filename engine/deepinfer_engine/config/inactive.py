"""Keys whose feature is not built yet: legal, and named whenever a profile asks for them.

``NOT_BUILT`` is the whole list. The change that builds a feature removes its line (and nothing else here).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.config.schema import Profile, leaves


@dataclass(frozen=True)
class Inactive:
    """A value the profile requests and this version does not honour."""

    key: str
    value: Any
    reason: str


@dataclass(frozen=True)
class _Missing:
    """``key`` (a trailing ``*`` covers the section) is inactive when ``requested`` holds for its value."""

    key: str
    requested: Callable[[Any], bool]
    reason: str


def _not(*quiet: Any) -> Callable[[Any], bool]:
    return lambda value: value not in quiet


NOT_BUILT: tuple[_Missing, ...] = (
    _Missing("role", _not("both"), "prefill and decode run on the same ranks of one process"),
    _Missing("cache.store.ttl_s.agent", _not(259_200), "all traffic is kept as chat"),
    _Missing("deadlines.build_s", _not(3600), "phases are not timed"),
    _Missing("deadlines.warmup_s", _not(1800), "phases are not timed"),
    _Missing("network.interface", _not(None), "the transport chooses; GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME do it"),
    _Missing("requires.*", _not(None), "run does not compare versions, doctor does"),
)


def inactive_features(profile: Profile) -> list[Inactive]:
    """Every requested value without a built feature behind it, in schema order; ``run`` prints them."""
    out: list[Inactive] = []
    for key, value in leaves(profile).items():
        for entry in NOT_BUILT:
            matches = key.startswith(entry.key[:-1]) if entry.key.endswith(".*") else key == entry.key
            if matches and value != {} and entry.requested(value):
                out.append(Inactive(key, value, entry.reason))
    return out
