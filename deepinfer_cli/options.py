"""Options shared by verbs, so that one name means one thing everywhere."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_engine.errors import UsageError


@dataclass(frozen=True)
class Session:
    """What the root command knows and every verb may ask for: ``ctx.find_root().obj``."""

    quiet: bool = False


class OutputFormat(StrEnum):
    """Forms of a result on stdout; a verb offers some of them."""

    table = "table"
    text = "text"
    json = "json"
    jsonl = "jsonl"
    csv = "csv"


def complete_profile(incomplete: str) -> list[str]:
    """Names of shipped profiles that start with what is typed."""
    from deepinfer_engine.config.resources import profile_names

    return [name for name in profile_names() if name.startswith(incomplete)]


def _merge_quiet(ctx: typer.Context, value: bool) -> bool:
    session = ctx.find_root().obj
    return value or (isinstance(session, Session) and session.quiet)


Profile = Annotated[
    str,
    typer.Option("--profile", "-p", metavar="NAME|PATH", help="Deployment profile.", autocompletion=complete_profile),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override one profile key, as in --set sched.overlap=true."),
]
Format = Annotated[OutputFormat, typer.Option("--format", help="Form of the result on stdout.")]


def writable(path: Path | None) -> Path | None:
    """Refuse (UsageError) a result file that cannot come to be, before any work is done for it."""
    if path is not None and path.is_dir():
        raise UsageError(f"{path}: is a folder", hint="give the name of a file")
    if path is not None and not path.parent.is_dir():
        raise UsageError(f"{path}: its folder does not exist", hint="check the folder of the file to write")
    if path is not None and path.exists() and not path.is_file():  # a device or a pipe would be replaced by a file
        raise UsageError(f"{path}: is not a regular file", hint="without it the result goes to stdout")
    return path


Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FILE",
        callback=writable,
        help="Write the result to a file, under a temporary name first.",
    ),
]
RecordExperts = Annotated[
    Path | None,
    typer.Option(
        "--record-experts",
        metavar="FILE",
        callback=writable,
        help="Write tokens per step, layer and expert, for eplb-plan.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", callback=_merge_quiet, help="No notes or progress on stderr; errors stay."),
]


def accept(chosen: OutputFormat, *offered: OutputFormat, verb: str) -> OutputFormat:
    """The chosen form if the verb offers it; UsageError naming the offered ones otherwise."""
    if chosen not in offered:
        raise UsageError(f"{verb} has no --format {chosen.value}", hint=f"use one of {', '.join(offered)}")
    return chosen
