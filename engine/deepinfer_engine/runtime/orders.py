"""What the leader tells the other processes, and what they answer. Frozen; everything in it can be sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer_engine.cache.replay import ReplaySpan
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.runtime.runner import Joint
from deepinfer_engine.types import Request, StepPlan
from deepinfer_engine.weights.reader import ShardReport


@dataclass(frozen=True)
class LoadOrder:
    """What a follower loads: profile, checkpoint folder and its digest, kind of device, placement, threads."""

    profile: Profile
    model: str
    digest: str
    device: str
    placement: Placement
    threads: int
    step_s: float


@dataclass(frozen=True)
class Loaded:
    """What a follower has loaded: shards and the slots of experts it holds in each layer."""

    shards: tuple[ShardReport, ...]
    slots: int
    device: str


@dataclass(frozen=True)
class News:
    """What a process learns of a sequence: ``tokens`` and ``blocks`` behind those it knows, where it is placed after
    an admission, who it is when it is new there."""

    uid: int
    tokens: tuple[int, ...]
    blocks: tuple[int, ...]
    placed: Placed | None = None
    born: Born | None = None


@dataclass(frozen=True)
class Placed:
    """An admission: ring slot and prefill plan of a generation; blocks known before are void."""

    generation: int
    slot: int
    span: ReplaySpan | None


@dataclass(frozen=True)
class Born:
    """What never changes of a sequence."""

    request: Request
    num_prompt: int
    seed: int
    index: int


@dataclass(frozen=True)
class StepOrder:
    """A step as one process is told it; ``gone``: sequences that ended."""

    plan: StepPlan
    joint: Joint
    news: tuple[News, ...]
    gone: tuple[int, ...]


@dataclass(frozen=True)
class DrawOrder:
    """The rows to draw: sequences that still run, their new tokens, and the masks of the constrained ones."""

    live: tuple[int, ...]
    news: tuple[News, ...]
    masks: dict[int, np.ndarray]
