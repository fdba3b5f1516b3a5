"""Processes that share a run's mesh: ``--nproc``, torchrun, and what is left after a loss."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import render
from deepinfer_engine.errors import PeerLost, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile
    from deepinfer_engine.dist.rendezvous import World
    from deepinfer_engine.launch import Launch

Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", min=1, max=1024, help="Processes for the profile's ranks, on this host."),
]
Healthy = Annotated[
    str | None,
    typer.Option(
        "--healthy",
        metavar="N|FILE|world",
        help="Re-form over the ranks that are left: how many, a file that lists them, or as many as processes.",
    ),
]


@dataclass(frozen=True)
class Crew:
    """Processes of this run: ``size`` of them, this one is ``rank``; ``here`` of them on this host.

    ``torchrun``: they exist already. ``restarts``: whoever started them starts them again after a loss.
    """

    size: int = 1
    rank: int = 0
    here: int = 1
    torchrun: bool = False
    restarts: bool = False

    def prepare(self, profile: Profile, model: Path | None, healthy: str | None) -> Launch:
        """Fit a profile to these processes and this machine."""
        from deepinfer_engine.launch import prepare

        if healthy == "world":
            healthy = str(min(self.size, profile.ranks))
        return prepare(profile, model, processes=self.size, here=self.here, healthy=healthy)

    def world(self, profile: Profile) -> World | None:
        """Start or meet the other processes; None when there are none."""
        if self.size == 1:
            return None
        from deepinfer_engine.dist.rendezvous import lead, spawn

        load_s, step_s = float(profile.deadlines.load_s), float(profile.deadlines.step_s)
        find = lead if self.torchrun else partial(spawn, self.size)
        world = find(load_s=load_s, step_s=step_s)
        world.crew.stuck = _end
        return world


def started(nproc: int | None) -> Crew:
    """The processes of this run, from the command line or from torchrun's variables."""
    given = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in given):
        return Crew() if nproc is None else Crew(nproc, 0, nproc)
    if nproc is not None:
        raise UsageError("--nproc starts processes, but torchrun has started them", hint="leave out --nproc")
    numbers = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
    if not all(value.isdecimal() for value in numbers.values()):
        raise UsageError(f"torchrun's variables are {numbers}, expected numbers")
    rank, size = int(numbers["RANK"]), int(numbers["WORLD_SIZE"])
    here = os.environ.get("LOCAL_WORLD_SIZE", "1")
    return Crew(
        size, rank, int(here) if here.isdecimal() else 1, torchrun=True, restarts="TORCHELASTIC_RUN_ID" in os.environ
    )


def follow(crew: Crew) -> None:
    """On every process but the first: do what the first one says, then end. Returns only on the first."""
    if crew.rank == 0:
        return
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(1)
    from deepinfer_engine.runtime.worker import serve_torchrun

    raise typer.Exit(serve_torchrun())


def _end(error: PeerLost) -> None:
    """The main thread hangs in an exchange with a rank that is gone: say so and end the process from outside."""
    render.error(error.message, error.hint)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(PeerLost.exit_code)
