"""``deepinfer build-kernels``: compile kernels ahead of time; nothing is ever compiled while serving."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError

if TYPE_CHECKING:
    from deepinfer_kernels.cpp import Source

_COLUMNS = ("op", "backend", "status", "seconds", "file", "reason")
_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)


class Target(StrEnum):
    """What kernels are compiled for."""

    cpu = "cpu"
    sm90 = "sm90"
    sm100 = "sm100"
    ascend950 = "ascend950"


def command(
    target: Annotated[Target, typer.Option("--target", help="What to compile for; this version builds cpu.")],
    ops: Annotated[
        str | None, typer.Option("--ops", metavar="NAME,NAME", help="Only the libraries these operations are in.")
    ] = None,
    profile: options.Profile = "cpu-nano",
    set_: options.Set = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be compiled, and compile nothing.")
    ] = False,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Compile kernels for this machine into the kernel cache.

    Operations of one family share a library; a library is compiled once per source, compiler and CPU. The cache is
    the profile's kernels.cache_dir, or the user's cache folder. Engines use what is there when they start;
    eplb_plan is the planner's inner loop.

    \b
    Examples:
      deepinfer build-kernels --target cpu
      deepinfer build-kernels --target cpu --ops moe_experts,rms_norm --dry-run
      deepinfer build-kernels --target cpu --set kernels.cache_dir=/var/cache/deepinfer --format json
    """
    from deepinfer_engine.config.profile import load_profile

    options.accept(format, *_FORMATS, verb="build-kernels")
    kernels = load_profile(profile, set_ or ()).profile.kernels
    if target is not Target.cpu:
        raise NotReadyError(
            f"no kernels for {target} in this version: --target cpu is what can be built",
            hint="deepinfer doctor lists what computes each operation on a machine",
        )
    from deepinfer_kernels import cpp

    wanted = _sources(ops)
    operations = {source.name: names for source, names in wanted}
    cache = cpp.default_cache() if kernels.cache_dir is None else Path(kernels.cache_dir)
    try:
        compiler = cpp.Compiler.find()
        made = (cpp.plan if dry_run else cpp.build)([source for source, _ in wanted], compiler, cache)
    except cpp.CompilerError as exc:
        raise NotReadyError(str(exc), hint="install one (apt install g++), or name it in CXX") from None
    rows = [
        (op, "cpu", b.status, round(b.seconds, 2), None if b.path is None else str(b.path), b.detail)
        for b in made
        for op in operations[b.name]
    ]
    if format is OutputFormat.json:
        content = {"target": str(target), "compiler": compiler.version, "cache": str(cache), "dry_run": dry_run}
        objects = [dict(zip(_COLUMNS, row, strict=True)) for row in rows]
        render.deliver(render.json_text(render.document("build-kernels", {**content, "rows": objects})), out)
    else:
        render.deliver(render.rows_text(format, "build-kernels", _COLUMNS, rows), out)
    failed = [b for b in made if b.status == "failed"]
    if failed:
        raise ArtefactError(
            f"{len(failed)} of {len(made)} libraries were not built, first {failed[0].name}: {failed[0].detail}",
            hint=f"the compiler is {compiler.path} ({compiler.version}); g++ 12 or newer is known to work",
        )


def _sources(ops: str | None) -> list[tuple[Source, list[str]]]:
    """C++ sources with the operations in each: the kernels' families and the planner's loops, all or those that
    ``--ops`` names."""
    from deepinfer_engine.eplb.native import SOURCE
    from deepinfer_kernels.cpu.binary import source
    from deepinfer_kernels.cpu.families import FAMILIES

    every = [(source(family), list(made.operations)) for family, made in FAMILIES.items()] + [(SOURCE, ["eplb_plan"])]
    if ops is None:
        return every
    wanted = [name.strip() for name in ops.split(",")]
    known = [op for _, names in every for op in names]
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise UsageError(f"--ops: no compiled operation named {unknown[0]!r}", hint=f"there are: {', '.join(known)}")
    chosen = [(made, [op for op in names if op in wanted]) for made, names in every]
    return [(made, names) for made, names in chosen if names]
