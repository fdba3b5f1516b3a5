"""``deepinfer build-kernels --vendor``: what a vendor library needs, the commands that build it, and their result."""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_cli import render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError

if TYPE_CHECKING:
    from deepinfer_kernels.vendor.build import Done, Plan

_COLUMNS = ("part", "status", "what", "found", "next")
Row = tuple[str, str, str, str | None, str | None]


def build_vendor(
    name: str,
    cache: Path,
    *,
    source: Path | None,
    target: str | None,
    dry_run: bool,
    note: Callable[[str], None],
    format: OutputFormat,
    out: Path | None,
) -> None:
    """Build a vendor library into the kernel cache, or say how. What is lacking ends with exit 3, a failure with 4."""
    from deepinfer_kernels.processes import BuildError
    from deepinfer_kernels.vendor import build
    from deepinfer_kernels.vendor.libraries import LIBRARIES

    name = name.replace("-", "_")
    if name not in LIBRARIES:
        near = get_close_matches(name, LIBRARIES, 1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(LIBRARIES)}"
        raise UsageError(f"--vendor: no library named {name!r}", hint=hint)
    if target not in (None, "sm90", "sm100"):
        raise UsageError(
            f"--vendor {name} with --target {target}: these libraries are built for sm90 and sm100",
            hint="leave --target out for both",
        )
    source = None if source is None else source.expanduser()
    if source is not None and not source.is_dir():
        raise UsageError(f"--source {source}: no such folder", hint="name the folder of the library's setup.py")
    try:
        plan = build.plan(name, cache, source=source, platform=target)
    except build.SourceError as exc:
        raise ArtefactError(str(exc)) from None
    done: list[Done] = []
    if not dry_run and not plan.lacking and not plan.built:
        try:
            done = build.run(plan, note)
        except BuildError as exc:
            raise NotReadyError(str(exc), hint=exc.hint) from None
    _deliver(plan, done, dry_run, format, out)
    if plan.built:
        return
    if plan.lacking:
        first = plan.lacking[0]
        have = f", this is {first.found}" if first.found else ""
        raise NotReadyError(
            f"{name} cannot be built here: it needs {first.what}{have}"
            + (f" ({len(plan.lacking)} things are lacking)" if len(plan.lacking) > 1 else ""),
            hint=first.fix,
        )
    failed = next((d for d in done if d.status == "failed"), None)
    if failed is not None and failed.step.what in ("clone", "fetch", "submodules"):
        raise NotReadyError(
            f"{name} was not fetched: {failed.detail}", hint="fetch it elsewhere and name it in --source"
        )
    if failed is not None:
        raise ArtefactError(f"{name} was not built: {failed.detail}", hint=f"run it by hand: {failed.step.shell}")


def _deliver(plan: Plan, done: list[Done], dry_run: bool, format: OutputFormat, out: Path | None) -> None:
    from deepinfer_kernels.vendor.libraries import LIBRARIES

    library = LIBRARIES[plan.library]
    rows: list[Row] = [
        ("need", "ok" if need.fix is None else "missing", need.what, need.found, need.fix) for need in plan.needs
    ]
    by_step = {d.step: d for d in done}
    for step in plan.steps:
        ended = by_step.get(step)
        status = "cached" if plan.built and not done else "planned" if ended is None else ended.status
        found = None if ended is None else f"{ended.seconds:.1f} s"
        rows.append((step.what, status, step.shell, found, None if ended is None else ended.detail))
    if plan.note is not None:
        rows.append(("note", "-", plan.note, None, None))
    if format is OutputFormat.json:
        content = {
            "vendor": plan.library,
            "repository": library.repository,
            "commit": library.commit,
            "licence": library.licence,
            "folder": str(plan.target),
            "dry_run": dry_run,
            "rows": [dict(zip(_COLUMNS, row, strict=True)) for row in rows],
        }
        render.deliver(render.json_text(render.document("build-vendor", content)), out)
    elif format is OutputFormat.table:
        needs = [(what, status, found, fix) for part, status, what, found, fix in rows if part == "need"]
        lines = [render.table(("need", "status", "found", "next"), needs)]
        for part, status, what, found, said in rows:
            if part == "note":
                lines.append(f"\nnote: {what}\n")
            elif part != "need":
                ended = "".join(f", {text}" for text in (found, said) if text)
                lines.append(f"\n{part}: {status}{ended}\n  {what}\n")
        render.deliver("".join(lines), out)
    else:
        render.deliver(render.rows_text(format, "build-vendor", _COLUMNS, rows), out)
