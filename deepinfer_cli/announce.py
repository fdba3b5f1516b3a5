"""What a verb says about a launch before anything runs, and about the load once it is done. All of it on stderr."""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer_cli import render

if TYPE_CHECKING:
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.launch import Launch

#: below this a load is quicker than the sentence about it
_NOTED_BYTES = 1_000_000_000


def launch_notes(launch: Launch, *, quiet: bool) -> None:
    """Say what differs from the request: replaced keys, inactive keys, warnings of the checkpoint."""
    if launch.replaced:
        p = launch.requested
        rows = [(r.key, str(r.requested), str(r.used), r.reason) for r in launch.replaced]
        render.panel(
            f"emulated: {p.name} asks for {p.hardware.gpus} x {p.hardware.platform}; {p.parallel.ep} virtual ranks run "
            f"in this process, {len(rows)} keys replaced",
            render.table(("key", "asked", "used", "why"), rows),
            quiet=quiet,
        )
    if launch.inactive:
        rows = [(i.key, str(i.value), i.reason) for i in launch.inactive]
        render.panel("inactive: requested, not built yet", render.table(("key", "value", "instead"), rows), quiet=quiet)
    for warning in launch.checkpoint.warnings:
        render.note(f"warning: {warning}", quiet=quiet)


def closing_notes(engine: Engine, *, quiet: bool) -> None:
    """Say what an engine could not do beside its answers; complete once it is closed."""
    for line in engine.notes():
        render.note(line, quiet=quiet)


def load_notes(engine: Engine, *, quiet: bool) -> None:
    """Say how fast a large checkpoint was read, and which shard came slowest."""
    total = sum(s.useful_bytes for s in engine.shards)
    if total < _NOTED_BYTES:
        return
    seconds = sum(s.seconds for s in engine.shards)
    slowest = min(engine.shards, key=lambda s: s.mb_s)
    render.note(
        f"read {total / 1e9:.1f} GB in {len(engine.shards)} shards at {total / 1e6 / max(seconds, 1e-9):.0f} MB/s, "
        f"slowest {slowest.file} at {slowest.mb_s:.0f} MB/s (deepinfer inspect --read compares with the disk)",
        quiet=quiet,
    )
