"""What a verb says about a launch before anything runs, and about the load once it is done. All of it on stderr."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render
from deepinfer_cli.rank_report import rank_rows
from deepinfer_engine.errors import UsageError

if TYPE_CHECKING:
    from deepinfer_engine.engine import Engine
    from deepinfer_engine.eplb.record import Balance
    from deepinfer_engine.launch import Launch
    from deepinfer_engine.runtime.rebalance import Rebalance

#: below this a load is quicker than the sentence about it
_NOTED_BYTES = 1_000_000_000


def launch_notes(launch: Launch, *, quiet: bool) -> None:
    """Say what differs from the request: replaced keys, inactive keys, warnings of the checkpoint."""
    if launch.reformed is not None:
        again, now = launch.reformed, launch.reformed.profile
        slots = again.slots_LRS.shape[2]
        render.note(
            f"re-formed: {len(again.alive)} of {again.had} ranks, dp {now.parallel.dp}, {slots} expert slots per rank "
            f"as before; {again.read} of {again.slots_LRS.size} slots hold an expert that their rank did not hold",
            quiet=quiet,
        )
    if launch.processes > 1:
        render.note(f"{launch.profile.ranks} ranks on {launch.processes} processes", quiet=quiet)
    elif launch.profile.hardware.gpus > 1:
        gpus = launch.profile.hardware.gpus
        render.note(f"{gpus} ranks share one process and one device; --nproc {gpus} gives each its own", quiet=quiet)
    if launch.replaced:
        p = launch.requested
        rows = [(r.key, str(r.requested), str(r.used), r.reason) for r in launch.replaced]
        where = "this process" if launch.processes == 1 else f"{launch.processes} processes"
        render.panel(
            f"emulated: {p.name} asks for {p.hardware.gpus} x {p.hardware.platform}; "
            f"{launch.profile.ranks} virtual ranks run in {where}, {len(rows)} keys replaced",
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
    rebalance_notes(engine, quiet=quiet)
    for line in engine.notes():
        render.note(line, quiet=quiet)


def load_notes(engine: Engine, *, quiet: bool) -> None:
    """Say what torch computes for want of kernels, which loop runs where it is not the one asked for, and how fast a
    large checkpoint was read."""
    fallback_notes(engine, quiet=quiet)
    if engine.profile.sched.overlap and not engine.overlap:
        render.note("overlap: one process on a CPU runs step after step, the tokens are the same", quiet=quiet)
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


def fallback_notes(engine: Engine, *, quiet: bool) -> None:
    """Say, one line a reason, which operations run in torch because kernels are not there, and what builds them."""
    from deepinfer_engine.build_command import build_command

    by_reason: dict[tuple[str, str], int] = {}
    for backend, reason in engine.fallbacks.values():
        kind = (backend, "not built") if "not built" in reason else (backend, reason)
        by_reason[kind] = by_reason.get(kind, 0) + 1
    for (backend, reason), count in by_reason.items():
        command = build_command(engine.profile, engine.checkpoint.directory)
        fix = f": {command}" if reason == "not built" else ""
        render.note(f"{count} operations run in torch, slower: {backend}'s kernels: {reason}{fix}", quiet=quiet)


def fallback_rows(engine: Engine) -> list[dict[str, str]]:
    """Operations that run in torch for want of kernels, in a JSON document."""
    return [
        {"operation": op, "used": engine.runner.ops.chosen[op].backend, "passed_over": backend, "reason": reason}
        for op, (backend, reason) in engine.fallbacks.items()
    ]


@contextmanager
def experts_recorded(engine: Engine, path: Path | None, *, quiet: bool) -> Iterator[None]:
    """Write the expert counts of the block's steps to ``path`` when it ends, or when the user stops it."""
    try:
        yield
    except KeyboardInterrupt:
        _write_counts(engine, path, quiet=quiet)
        raise
    _write_counts(engine, path, quiet=quiet)


def _write_counts(engine: Engine, path: Path | None, *, quiet: bool) -> None:
    if path is None:
        return
    from deepinfer_engine.eplb.stats import write_stats

    try:
        stats = engine.expert_stats()
    except UsageError as exc:
        render.note(f"{path} is not written: {exc.message}", quiet=quiet)
        return
    write_stats(stats, path)
    left = engine.steps - stats.steps
    more = f", {left} older ones did not fit" if left > 0 else ""
    render.note(f"expert counts of {stats.steps} steps are in {path}{more}", quiet=quiet)


def balance_text(balance: Balance | None) -> str:
    """``moe_lb 1.234`` of a mesh of several ranks, as progress and summaries show it; empty otherwise."""
    if balance is None or balance.moe_lb is None or balance.load_LR.shape[1] == 1:
        return ""
    return f"moe_lb {balance.moe_lb:.3f}"


def rebalance_notes(engine: Engine, *, quiet: bool) -> None:
    """Say what live rebalancing did, one line each."""
    for entry in engine.rebalances:
        render.note(rebalance_text(entry), quiet=quiet)


def rebalance_text(entry: Rebalance) -> str:
    """One rebalance in a line: what it cost, what was predicted and what came of it; or why nothing moved."""
    if entry.outcome != "moved":
        return f"rebalance at step {entry.step}: {entry.outcome}: {entry.reason}"
    back = "back to an earlier placement, " if entry.back else ""
    text = (
        f"rebalance at step {entry.step}: {back}{entry.experts} experts, {_bytes(entry.bytes)} "
        f"(at most {_bytes(entry.max_rank_bytes)} to a rank) in {entry.move_steps} steps, {entry.move_ms:.1f} ms, "
        f"planned in {entry.plan_ms:.0f} ms beside the steps"
    )
    if entry.predicted_before is not None and entry.predicted_after is not None:
        text += f"; moe_lb {entry.predicted_before:.3f} -> {entry.predicted_after:.3f} predicted"
    if entry.observed_before is not None and entry.observed_after is not None:
        text += f", {entry.observed_before:.3f} -> {entry.observed_after:.3f} observed"
    return text


def _bytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count >= 100_000 else f"{count / 1e3:.1f} kB"


def experts_row(engine: Engine, balance: Balance | None, *, explain: bool = False) -> dict[str, Any] | None:
    """Balance and rebalances in a JSON document; with ``explain`` also what every rank did."""
    if balance is None:
        return {"by_rank": rank_rows(engine, None)} if explain else None
    detail = {"by_rank": rank_rows(engine, balance)} if explain else {}
    return detail | {
        "ranks": balance.load_LR.shape[1],
        "steps": balance.steps,
        "tokens": balance.tokens,
        "moe_lb": balance.moe_lb,
        "moe_lb_step": balance.moe_lb_step,
        "rebalances": [asdict(entry) for entry in engine.rebalances],
    }
