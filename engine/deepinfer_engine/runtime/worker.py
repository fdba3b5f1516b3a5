"""A process that follows: it loads its share, then does the leader's steps until it is told to stop.

``python -m deepinfer_engine.runtime.worker PORT RANK SIZE`` is what a leader spawns; under torchrun the command line
calls ``serve`` on every rank but the first.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store  # pyright: ignore[reportPrivateImportUsage]

from deepinfer_engine.dist.control import Follower, is_transport
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.rendezvous import follow_spawned, follow_torchrun, join_group
from deepinfer_engine.dist.share import Share
from deepinfer_engine.dist.transport import RankedMesh, connector
from deepinfer_engine.errors import ArtefactError, DeepInferError, NotReadyError, PeerLost
from deepinfer_engine.runtime.host import host_runner
from deepinfer_engine.runtime.lane import InlineLane
from deepinfer_engine.runtime.orders import DrawOrder, Loaded, LoadOrder, News, StepOrder
from deepinfer_engine.runtime.runner import Flight, Runner
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import Sequence
from deepinfer_engine.weights.checkpoint import Checkpoint

#: seconds to find the leader: it may be importing torch
_CONNECT_S = 120.0


def device_of(kind: str, local_rank: int) -> str:
    """The torch device of a local rank. Raises NotReadyError when this host has too few."""
    if kind != "cuda":
        return kind
    have = torch.cuda.device_count()
    if local_rank >= have:
        raise NotReadyError(
            f"process {local_rank} of this host needs a device of its own, {have} are visible",
            hint="start as many processes as there are devices",
        )
    return f"cuda:{local_rank}"


class Worker:
    """One follower: mirrors of the sequences whose rows it hosts, and the runner that does the steps."""

    def __init__(self, store: Store, follower: Follower, rank: int, size: int, local_rank: int):
        self.store = store
        self.follower = follower
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.sequences: dict[int, Sequence] = {}
        self.flight: Flight | None = None
        self.runner: Runner | None = None

    def serve(self) -> None:
        """Do what the leader says until it says stop. Raises PeerLost when it, or another rank, is gone."""
        orders: dict[str, Callable[[Any], None]] = {
            "load": self._load,
            "forward": self._forward,
            "sample": self._sample,
            "command": self._command,
        }
        while True:
            kind, body = self.follower.next()
            if kind == "stop":
                return
            orders[kind](body)

    def _load(self, order: LoadOrder) -> None:
        torch.set_num_threads(order.threads)
        device = device_of(order.device, self.local_rank)
        checkpoint = Checkpoint.open(order.model)
        if checkpoint.digest != order.digest:
            raise ArtefactError(f"{order.model} on this host is not the checkpoint of rank 0: other weights digest")
        profile = order.profile
        share = Share(profile.parallel.ep, profile.parallel.dp, self.rank, self.size)
        group = join_group(self.store, self.rank, self.size, device, order.step_s)

        make = connector(profile, checkpoint.config, share, group, device)

        def connect(placement: Placement) -> RankedMesh:
            mesh = make(placement)
            self.follower.entered = lambda: mesh.entered
            return mesh

        self.runner, shards = host_runner(
            profile,
            checkpoint,
            Tokenizer.from_dir(checkpoint.directory),
            InlineLane(),
            device=device,
            share=share,
            placement=order.placement,
            connect=connect,
        )
        self.follower.answer("loaded", Loaded(shards, len(self.runner.mesh.local_slots), device))

    def _forward(self, order: StepOrder) -> None:
        assert self.runner is not None
        for uid in order.gone:
            self.sequences.pop(uid, None)
            self.runner.forget(uid)
        self._learn(order.news)
        self.flight = self.runner.forward(order.plan, self.sequences, self.flight, joint=order.joint)

    def _sample(self, order: DrawOrder) -> None:
        assert self.runner is not None and self.flight is not None
        self._learn(order.news)
        self.runner.sample(self.flight, {uid: self.sequences[uid] for uid in order.live}, order.masks)
        self.follower.answer("done", self.runner.collect(self.flight))

    def _command(self, order: tuple[str, Any]) -> None:
        assert self.runner is not None
        self.follower.answer("answer", self.runner.command(*order)[0])

    def _learn(self, news: tuple[News, ...]) -> None:
        """Bring the mirrors of sequences up to date."""
        for item in news:
            if item.born is not None:
                born = item.born
                seq = Sequence(born.request, [], born.num_prompt, born.seed, uid=item.uid, index=born.index)
                self.sequences[item.uid] = seq
            seq = self.sequences[item.uid]
            if item.placed is not None:
                seq.generation, seq.slot, seq.span = item.placed.generation, item.placed.slot, item.placed.span
                seq.block_ids.clear()
            seq.block_ids += item.blocks
            seq.token_ids += item.tokens


def serve(store: Store, follower: Follower, rank: int, size: int, local_rank: int) -> int:
    """Follow to the end; the exit code. What goes wrong is told to the leader, which reports it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader ends the run
    worker = Worker(store, follower, rank, size, local_rank)
    try:
        worker.serve()
    except Exception as exc:  # the process boundary: the leader reports what happened here
        code, text, hint = _told(exc)
        with contextlib.suppress(DeepInferError):
            follower.answer("failed", (code, text, hint))
        os._exit(code)  # an exchange may still hang in another thread of the transport
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def serve_torchrun() -> int:
    """Follow under torchrun."""
    store, follower, rank, size = follow_torchrun(timeout_s=_CONNECT_S)
    return serve(store, follower, rank, size, int(os.environ.get("LOCAL_RANK", "0")))


def _told(exc: Exception) -> tuple[int, str, str | None]:
    """(exit code, message, hint) of what ended a follower; trouble in an exchange is a lost peer."""
    if isinstance(exc, DeepInferError):
        return exc.exit_code, exc.message, exc.hint
    if isinstance(exc, RuntimeError) and is_transport(exc):
        return PeerLost.exit_code, str(exc).splitlines()[0], None
    return 1, f"{type(exc).__name__}: {exc}", None


def main(arguments: list[str]) -> int:
    """Entry of a spawned process."""
    port, rank, size = (int(a) for a in arguments)
    store, follower = follow_spawned(port, rank, size, timeout_s=_CONNECT_S)
    return serve(store, follower, rank, size, rank)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
