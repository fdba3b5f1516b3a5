"""``lead_runner``: rank 0 tells every process what to load, loads its own share, and gets a runner for all of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import torch

from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.rendezvous import World
from deepinfer_engine.dist.share import Share
from deepinfer_engine.dist.starting import starting_placement
from deepinfer_engine.dist.transport import connector
from deepinfer_engine.runtime.host import Capacity, host_runner
from deepinfer_engine.runtime.lane import Lane
from deepinfer_engine.runtime.orders import LoadOrder
from deepinfer_engine.runtime.ranked import RankedRunner
from deepinfer_engine.runtime.runner import Runner
from deepinfer_engine.runtime.worker import device_of
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.reader import ShardReport


def lead_runner(
    profile: Profile,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    lane: Lane,
    world: World,
    *,
    device: str,
    placement: Placement | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Runner, tuple[ShardReport, ...]]:
    """Load a deployment over the processes of ``world``. Raises what any of them meets, or PeerLost."""
    config, parallel = checkpoint.config, profile.parallel
    share = Share(parallel.ep, parallel.dp, 0, world.size)
    if placement is None:
        placement = starting_placement(checkpoint, profile)
    kind, step_s = device.split(":")[0], float(profile.deadlines.step_s)
    own = device_of(kind, int(os.environ.get("LOCAL_RANK", "0")))
    threads = max(1, torch.get_num_threads() // world.size)
    order = LoadOrder(profile, str(checkpoint.directory.resolve()), checkpoint.digest, kind, placement, threads, step_s)
    world.crew.tell_all("load", order)
    with world.crew.exchanging():
        group = world.join(own, step_s)

    torch.set_num_threads(threads)
    made = host_runner(
        profile,
        checkpoint,
        tokenizer,
        lane,
        device=own,
        share=share,
        placement=placement,
        connect=connector(profile, config, share, group, own),
        progress=progress,
        make=partial(RankedRunner, crew=world.crew, share=share, capacity=Capacity.of(profile)),
    )
    world.crew.gather("loaded", float(profile.deadlines.load_s), "loading")
    return made
