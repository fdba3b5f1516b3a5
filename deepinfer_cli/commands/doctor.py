"""``deepinfer doctor``: is this machine ready, and if not, what is the next step."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import NotReadyError

if TYPE_CHECKING:
    from deepinfer_engine.doctor.finding import Diagnosis

_COLUMNS = ("group", "check", "result", "found", "fix")
_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)

_OptionalProfile = Annotated[
    str | None,
    typer.Option(
        "--profile",
        "-p",
        metavar="NAME|PATH",
        help="Also check what this profile needs.",
        autocompletion=options.complete_profile,
    ),
]


def command(
    profile: _OptionalProfile = None,
    set_: options.Set = None,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Check these weights instead of the embedded model.")
    ] = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Check that this machine is ready to run.

    Every check passes, warns or fails, and what does not pass carries the next step. Warnings cost speed or room,
    failures make the exit code 3. Without --profile only the machine is judged.

    \b
    Examples:
      deepinfer doctor
      deepinfer doctor --profile h200x8 --model /models/DeepSeek-V4.1-Flash
      deepinfer doctor --format json --out doctor.json
    """
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.doctor.diagnose import diagnose
    from deepinfer_engine.errors import UsageError

    options.accept(format, *_FORMATS, verb="doctor")
    if set_ and profile is None:
        raise UsageError("--set changes a profile, and none is given", hint="add --profile NAME")
    loaded = load_profile(profile, set_ or ()) if profile is not None else None
    diagnosis = diagnose(loaded.profile if loaded else None, model=model)
    render.deliver(_text(diagnosis, format, loaded.digest if loaded else None), out)
    failures = diagnosis.failures
    if failures:
        names = ", ".join(dict.fromkeys(f.name for f in failures))
        count = len(failures)
        raise NotReadyError(f"{count} check{'s' if count > 1 else ''} failed: {names}", hint=failures[0].fix)


def _text(diagnosis: Diagnosis, format: OutputFormat, digest: str | None) -> str:
    if format is OutputFormat.table:
        return _report(diagnosis)
    if format is OutputFormat.json:
        findings = [
            {
                "group": group,
                "check": f.name,
                "result": f.status,
                "found": f.found,
                "fix": f.fix,
                "details": list(f.details),
            }
            for group, f in diagnosis.findings
        ]
        counts = {"pass": diagnosis.count("pass"), "warn": diagnosis.count("warn"), "fail": diagnosis.count("fail")}
        return render.json_text(render.document("doctor", {"profile_digest": digest, **counts, "checks": findings}))
    rows = [(group, f.name, f.status, f.found, f.fix) for group, f in diagnosis.findings]
    return render.rows_text(format, "doctor", _COLUMNS, rows)


def _report(diagnosis: Diagnosis) -> str:
    """Findings under their group, details and fixes indented below each, counts at the end."""
    lines: list[str] = []
    width = max(len(f.name) for _, f in diagnosis.findings)
    current = None
    for group, f in diagnosis.findings:
        if group != current:
            lines.append(group)
            current = group
        lines.append(f"  {f.status}  {f.name.ljust(width)}  {f.found}")
        indent = " " * (8 + width + 2)
        for detail in f.details:
            lines += textwrap.wrap(detail, 110, initial_indent=indent, subsequent_indent=indent + "  ")
        if f.fix:
            lines.append(f"{indent}fix: {f.fix}")
    lines.append(
        f"{diagnosis.count('pass')} passed, {diagnosis.count('warn')} warned, {diagnosis.count('fail')} failed"
    )
    return "\n".join(lines) + "\n"
