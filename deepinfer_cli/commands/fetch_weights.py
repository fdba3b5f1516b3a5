"""``deepinfer fetch-weights``: bring a checkpoint from a model hub, checked byte by byte."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_cli.transfer_progress import shown, size_text
from deepinfer_engine.errors import NotReadyError, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.weights.fetch.job import FetchPlan, Job
    from deepinfer_engine.weights.fetch.progress import Progress
    from deepinfer_engine.weights.fetch.selection import Selection

DEFAULT_REPO = "deepseek-ai/DeepSeek-V4.1-Flash"


def command(
    repo: Annotated[str, typer.Argument(metavar="REPO", help="Repository on the hub.")] = DEFAULT_REPO,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Branch, tag or commit.", show_default="main")
    ] = None,
    dest: Annotated[
        Path | None, typer.Option("--dest", metavar="DIR", help="Directory to fill.", show_default="./NAME of the repo")
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option("--groups", metavar="NAMES", help="Only these of backbone,draft,engram,vision."),
    ] = None,
    ep: Annotated[
        int | None, typer.Option("--ep", metavar="N", help="Only what one of N ranks needs, without replicas.")
    ] = None,
    rank: Annotated[int | None, typer.Option("--rank", metavar="R", help="That rank, from 0; goes with --ep.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the table and check the space; write nothing.")
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Hash every file again. Fetches nothing, except with --repair.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Fetch files again whose content is wrong, instead of stopping.")
    ] = False,
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="While another fetch has the directory: wait, or stop.")
    ] = True,
    connections: Annotated[int, typer.Option("--connections", min=1, max=64, help="Connections at once.")] = 8,
    stall_s: Annotated[
        float, typer.Option("--stall-s", min=1.0, help="Drop a connection after so long without data.")
    ] = 60.0,
    retries: Annotated[
        int, typer.Option("--retries", min=0, max=100, help="Attempts in a row without progress, after the first.")
    ] = 5,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Fetch a checkpoint, resumable and hash-checked.

    Every file is checked against the hash that the hub lists, and remembered. A run that was interrupted, even
    killed, is continued by the same command. Half-fetched files lie in DIR/.fetch until they are whole.

    --groups leaves out shards without a tensor of the named groups, --ep/--rank those without a tensor of the rank.
    Login, endpoint and offline mode follow the hub's own variables (HF_TOKEN, HF_ENDPOINT, HF_HUB_OFFLINE). Offline,
    what is there is checked and what is missing is named.

    \b
    Examples:
      deepinfer fetch-weights --dry-run
      deepinfer fetch-weights --dest /models/v41 --groups backbone,engram
      deepinfer fetch-weights --dest /models/v41 --verify
    """
    from deepinfer_engine.weights.fetch.hub import Limits
    from deepinfer_engine.weights.fetch.job import Job

    options.accept(format, OutputFormat.table, OutputFormat.json, verb="fetch-weights")
    if dry_run and (verify or repair):
        raise UsageError("--dry-run does not hash or repair anything", hint="use --verify alone: it fetches nothing")
    selection = _selection(groups, ep, rank)
    target = dest if dest is not None else Path(repo.rstrip("/").rpartition("/")[2] or repo)
    limits = Limits(connections=connections, stall_s=stall_s, retries=retries)
    with shown(quiet=quiet) as progress:
        job = Job(repo, target, progress, revision=revision, selection=selection, limits=limits,
                  pinned=verify or repair)  # fmt: skip
        checking = job.offline or (verify and not repair)
        if job.offline and repair:
            raise NotReadyError("offline: nothing can be repaired", hint="unset HF_HUB_OFFLINE, or leave out --repair")
        if checking and not target.is_dir():
            raise NotReadyError(f"{target}: no such directory, nothing was fetched there", hint="check --dest")
        plan = job.survey()
        if not dry_run:
            with _locked(target, checking=checking, wait=wait, progress=progress):
                plan = job.survey()  # again: the fetch we waited for may have brought everything
                if checking:
                    plan = job.check(rehash=verify)
                else:
                    if format is OutputFormat.table:
                        render.deliver(_table(plan), out)
                    plan = _bring(job, rehash=verify, repair=repair)
    if checking or dry_run or format is OutputFormat.json:
        render.deliver(render.json_text(_document(plan)) if format is OutputFormat.json else _table(plan), out)
    else:
        render.out(_last_line(plan))
    if checking:
        job.require_complete()
    elif dry_run:
        job.require_space()


def _selection(groups: str | None, ep: int | None, rank: int | None) -> Selection | None:
    from deepinfer_engine.weights.fetch.selection import Selection

    if groups is None and ep is None and rank is None:
        return None
    names: Any = tuple(name.strip() for name in groups.split(",") if name.strip()) if groups is not None else None
    return Selection(names, ep, rank)


def _locked(target: Path, *, checking: bool, wait: bool, progress: Progress) -> AbstractContextManager[None]:
    from deepinfer_engine.weights.fetch.lock import destination_lock

    if checking and not os.access(target, os.W_OK):
        progress.note(f"{target} is read-only: it is checked without a lock")
        return nullcontext()
    return destination_lock(target, wait=wait, note=progress.note)


def _bring(job: Job, *, rehash: bool, repair: bool) -> FetchPlan:
    job.require_space()
    job.check(rehash=rehash)
    if not repair:
        job.require_right("wrong")
    job.require_space()  # again: files that turned out wrong are fetched too
    return job.fetch()


# ---------------------------------------------------------------------- output


def _table(plan: FetchPlan) -> str:
    by_rank = plan.selection.ep is not None
    columns = ["file", "groups", "state", "bytes", "fetch_bytes", *(["rank_bytes"] if by_rank else [])]
    rows: list[list[render.Cell]] = [
        [i.file.path, ",".join(i.groups) or "-", i.state, i.file.size, i.fetch_bytes,
         *([i.needed_bytes] if by_rank else [])]
        for i in plan.items
    ]  # fmt: skip
    groups = "".join(f"  {name}  {size_text(nbytes)}\n" for name, nbytes in _by_groups(plan).items())
    return (
        f"{render.table(columns, rows)}\n"
        f"{plan.repo} at {plan.commit[:12]} ({plan.revision}), {plan.selection.describe()}\n{groups}"
        f"{len(plan.items)} files, {size_text(plan.total_bytes)}; {size_text(plan.fetch_bytes)} to fetch, "
        f"{size_text(plan.free_bytes)} free at {plan.dest}\n"
    )


def _by_groups(plan: FetchPlan) -> dict[str, int]:
    """Bytes of files by what is in them; files without a tensor count as other."""
    if not any(i.groups for i in plan.items):
        return {}
    sums: Counter[str] = Counter()
    for item in plan.items:
        sums["+".join(item.groups) or "other"] += item.file.size
    return dict(sums.most_common())


def _last_line(plan: FetchPlan) -> str:
    fetched = plan.paths("fetched")
    return (
        f"{len(plan.items)} files, {size_text(plan.total_bytes)}, hashes as listed at {plan.commit[:12]}: "
        f"{len(fetched)} fetched now, {len(plan.items) - len(fetched)} were there; in {plan.dest}"
    )


def _document(plan: FetchPlan) -> dict[str, Any]:
    return render.document(
        "fetch-weights",
        {
            "repo": plan.repo,
            "revision": plan.revision,
            "commit": plan.commit,
            "dest": str(plan.dest),
            "selection": plan.selection.to_json(),
            "total_bytes": plan.total_bytes,
            "fetch_bytes": plan.fetch_bytes,
            "free_bytes": plan.free_bytes,
            "files": [
                {
                    "path": i.file.path,
                    "groups": list(i.groups),
                    "state": i.state,
                    "bytes": i.file.size,
                    "fetch_bytes": i.fetch_bytes,
                    "rank_bytes": i.needed_bytes,
                    "digest": i.file.digest,
                }
                for i in plan.items
            ],
        },
    )
