"""``deepinfer build-kernels``: compile kernels ahead of time; nothing is ever compiled while serving."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import ArtefactError, NotReadyError, UsageError
from deepinfer_kernels.ops import OPS

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile
    from deepinfer_kernels.cpp import Source
    from deepinfer_kernels.kernel_cache import Built

_COLUMNS = ("op", "backend", "kernel", "sizes", "status", "seconds", "file", "reason")
_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)


class Target(StrEnum):
    """What kernels are compiled for."""

    cpu = "cpu"
    sm90 = "sm90"
    sm100 = "sm100"
    ascend950 = "ascend950"


def command(
    ctx: typer.Context,
    target: Annotated[
        list[Target] | None,
        typer.Option(
            "--target",
            metavar=f"<{'|'.join(Target)}>",
            help="What to compile for: this CPU, Hopper (sm90), Blackwell (sm100), Ascend 950.",
        ),
    ] = None,
    ops: Annotated[
        list[str] | None, typer.Option("--ops", metavar="NAME,NAME", help="Only the kernels of these operations.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            metavar="NAME|PATH",
            help="GPU kernels are for its shapes: nano (default), deepseek-v4.1-flash, a folder or a config.json.",
        ),
    ] = None,
    vendor: Annotated[
        str | None,
        typer.Option(
            "--vendor",
            metavar="NAME",
            help="Build a vendor library instead: deep_gemm, flash_mla, tile_kernels, deep_ep or deep_select.",
        ),
    ] = None,
    source: Annotated[
        Path | None,
        typer.Option("--source", metavar="DIR", help="Source tree of that library, instead of fetching it."),
    ] = None,
    profile: options.Profile = "cpu-nano",
    set_: options.Set = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be compiled, and compile nothing.")
    ] = False,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Compile kernels into the kernel cache: the profile's kernels.cache_dir, or the user's cache folder.

    For the CPU, operations of one family share a library, compiled once per source, compiler and CPU; eplb_plan is
    the planner's inner loop. GPU kernels are cubins for the shapes of a model and the expert slots of a rank of the
    profile, by Triton and by TileLang where that is installed; no GPU is needed. Engines use what is there when they
    start. The table has the sizes in which kernels of one name differ, the other formats have all of them.

    For Ascend 950, operations that have a form are lowered to AscendC source, and to binaries where CANN's compiler is;
    what is known of each stands in its row.

    A vendor library is fetched at the commit that its adapters know, or taken from a source tree, and built into the
    cache; with --dry-run its needs and commands are listed. An operation is given to it by kernels.overrides.

    Exit codes: 3 when a compiler is missing, the cache cannot be written, or sources are all that can be made here; 4
    when a kernel was not built. An interrupted build (130) leaves nothing half done.

    \b
    Examples:
      deepinfer build-kernels --target cpu
      deepinfer build-kernels --target cpu --ops moe_experts,rms_norm --dry-run
      deepinfer build-kernels --target sm90 --profile h200x1-nano
      deepinfer build-kernels --target sm100 --model deepseek-v4.1-flash --profile decode-ep64 --format json
      deepinfer build-kernels --target ascend950 --model deepseek-v4.1-flash --profile decode-ep64-ascend950
      deepinfer build-kernels --vendor deep_gemm --target sm90 --dry-run
    """
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_kernels.kernel_cache import default_cache
    from deepinfer_kernels.processes import BuildError

    options.accept(format, *_FORMATS, verb="build-kernels")
    chosen = load_profile(profile, set_ or ()).profile
    cache = chosen.kernels.folder or default_cache()
    note = partial(render.note, quiet=ctx.find_root().obj.quiet)
    if len(target or ()) > 1:
        raise UsageError(f"--target is given more than once: {', '.join(target or ())}", hint="build one at a time")
    platform = target[0] if target else None
    if model is not None and (vendor is not None or platform is Target.cpu):
        what = f"--vendor {vendor}" if vendor is not None else "--target cpu"
        raise UsageError(f"--model with {what}, whose kernels are for any shapes", hint="leave --model out")
    model = model or "nano"
    if vendor is not None:
        from deepinfer_cli.vendor_build import build_vendor

        if ops:
            raise UsageError("--ops with --vendor: a library is built as a whole", hint="leave --ops out")
        build_vendor(vendor, cache, source=source, target=platform, dry_run=dry_run, note=note, format=format, out=out)
        return
    if source is not None:
        raise UsageError("--source is the tree of a vendor library, and none is named", hint="add --vendor NAME")
    if platform is None:
        raise UsageError("neither --target nor --vendor is given", hint=f"--target is one of {', '.join(Target)}")
    wanted = [name.strip() for given in ops for name in given.split(",")] if ops else None
    try:
        if platform is Target.cpu:
            tools, rows = _for_cpu(wanted, cache, dry_run, note)
        elif platform is Target.ascend950:
            tools, rows = _for_ascend(wanted, model, chosen, cache, dry_run, note)
        else:
            tools, rows = _for_gpu(platform, wanted, model, chosen, cache, dry_run, note)
    except BuildError as exc:
        raise NotReadyError(str(exc), hint=exc.hint) from None
    content = {"target": str(platform), "compiler": tools, "cache": str(cache), "dry_run": dry_run}
    render.deliver(_text(rows, content, format), out)
    failed = [(row, short) for row, short in zip(rows, _short(rows), strict=True) if row.status == "failed"]
    if failed:
        row, short = failed[0]
        what = f"{row.op}, {row.kernel}{f' ({short})' if short else ''}"
        raise ArtefactError(
            f"{len(failed)} of {len(rows)} kernels were not built, first of {what}: {row.reason}",
            hint=f"compiled with {tools}; g++ 12 or newer, triton 3.6 to 3.8 and nvcc 13.0 are known to work",
        )
    sources = len({row.file for row in rows if row.status == "source-only"})
    if sources and not dry_run:
        from deepinfer_kernels.ascend.families import BISHENG

        raise NotReadyError(
            f"{sources} programs are AscendC source and none is a binary: bisheng is not on the path", hint=BISHENG
        )


@dataclass(frozen=True)
class Row:
    """What became of one kernel for one operation. ``sizes``: all that it is made for, by name."""

    op: str
    backend: str
    kernel: str | None
    sizes: Mapping[str, int | str | bool | None]
    status: str
    seconds: float
    file: str | None
    reason: str | None

    @classmethod
    def of(cls, op: str, backend: str, built: Built, sizes: Mapping[str, int | str | bool | None] | None = None) -> Row:
        path = None if built.path is None else str(built.path)
        return cls(op, backend, built.name, sizes or {}, built.status, round(built.seconds, 2), path, built.detail)

    @classmethod
    def skipped(cls, op: str, backend: str, reason: str) -> Row:
        return cls(op, backend, None, {}, "skipped", 0.0, None, reason)


def _text(rows: list[Row], content: dict[str, object], format: OutputFormat) -> str:
    """Rows in any form: an object of sizes in JSON, all of them in CSV, those that tell kernels apart in a table."""
    if format in (OutputFormat.json, OutputFormat.jsonl):
        objects = [{name: getattr(row, name) for name in _COLUMNS} for row in rows]
        if format is OutputFormat.jsonl:
            return "".join(render.json_text(item, indent=None) for item in objects)
        return render.json_text(render.document("build-kernels", {**content, "rows": objects}))
    sizes = _short(rows) if format is OutputFormat.table else [_listed(row.sizes.items()) for row in rows]
    cells = [
        [text or None if name == "sizes" else getattr(row, name) for name in _COLUMNS]
        for row, text in zip(rows, sizes, strict=True)
    ]
    return render.rows_text(format, "build-kernels", _COLUMNS, cells)


def _short(rows: list[Row]) -> list[str]:
    """The sizes of each row in which kernels of its name differ."""
    seen: dict[tuple[str | None, str], set[int | str | bool | None]] = defaultdict(set)
    for row in rows:
        for name, value in row.sizes.items():
            seen[row.kernel, name].add(value)
    return [
        _listed((name, value) for name, value in row.sizes.items() if len(seen[row.kernel, name]) > 1) for row in rows
    ]


def _listed(sizes: Iterable[tuple[str, int | str | bool | None]]) -> str:
    return ", ".join(f"{name}={value}" for name, value in sizes)


Note = Callable[[str], None]
#: what ``--ops`` names, None without it
Names = list[str] | None


def _for_cpu(ops: Names, cache: Path, dry_run: bool, note: Note) -> tuple[str, list[Row]]:
    """(compiler, rows) of the C++ libraries."""
    from deepinfer_kernels import cpp

    wanted = _sources(ops)
    operations = {source.name: names for source, names in wanted}
    compiler = cpp.Compiler.find()
    made = (cpp.plan if dry_run else partial(cpp.build, note=note))([source for source, _ in wanted], compiler, cache)
    return f"{compiler.path} ({compiler.version})", [
        row for b in made for op in operations[b.name] for row in [Row.of(op, "cpu", b)]
    ]


def _for_gpu(
    platform: str, ops: Names, model: str, profile: Profile, cache: Path, dry_run: bool, note: Note
) -> tuple[str, list[Row]]:
    """(toolchains, rows) of the Triton and TileLang kernels for a model's shapes.

    Raises ``NotReadyError`` without triton, and without what TileLang takes where the profile asks for it; otherwise
    operations that TileLang has are skipped with the reason, because Triton has them too.
    """
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_engine.sim.models import find_model
    from deepinfer_kernels import kernel_cache
    from deepinfer_kernels.tilelang import families as tilelang
    from deepinfer_kernels.triton import families as triton

    known = [name for names in triton.FAMILIES.values() for name in names]
    wanted = _named(ops, known, platform)
    _need("triton", platform, triton.unusable())
    from deepinfer_kernels.triton import build, shapes

    sizes = kernel_shapes(find_model(model).config, profile)
    invariant = profile.numerics.batch_invariant
    found = shapes.launches(sizes, invariant=invariant)
    do = kernel_cache.plan if dry_run else partial(kernel_cache.build, note=note)
    kernels = build.kernels((op, call) for op, call in found if op in wanted)
    made = do(build.jobs(kernels, platform, cache))
    rows = [Row.of(k.op, "triton", b, k.sizes) for k, b in zip(kernels, made, strict=True)]
    tools = build.toolchain(platform)
    also = [name for names in tilelang.FAMILIES.values() for name in names if name in wanted]
    if not also:
        return tools, rows
    reason = tilelang.uncompilable()
    if reason is not None:
        if "tilelang" in (profile.kernels.backend, *dict(profile.kernels.overrides).values()):
            _need("tilelang", platform, reason)
        return tools, rows + [Row.skipped(op, "tilelang", reason) for op in also]
    from deepinfer_kernels.tilelang import build as programs
    from deepinfer_kernels.tilelang import shapes as launches

    calls = launches.launches(sizes, platform=platform, invariant=invariant)
    more = programs.kernels((op, call) for op, call in calls if op in also)
    made = do(programs.jobs(more, platform, cache))
    return f"{tools}; {programs.toolchain()}", rows + [
        Row.of(k.op, "tilelang", b, k.sizes) for k, b in zip(more, made, strict=True)
    ]


def _for_ascend(
    ops: Names, model: str, profile: Profile, cache: Path, dry_run: bool, note: Note
) -> tuple[str, list[Row]]:
    """(toolchain, rows) of the AscendC sources for a model's shapes, then of the operations that have none."""
    from deepinfer_engine.model.kernel_shapes import kernel_shapes
    from deepinfer_engine.sim.models import find_model
    from deepinfer_kernels.ascend import build, families

    wanted = _named(ops, list(families.OPERATIONS), "ascend950")
    _need("tilelang", "ascend950", families.tilelang.unusable())
    needed = {name for op in wanted for name in families.OPERATIONS[op]}
    found = families.programs(kernel_shapes(find_model(model).config, profile))
    programs = [program for program in found if program.name in needed]
    made = build.plan(programs, cache) if dry_run else build.build(programs, cache, note)
    pairs = zip(programs, made, strict=True)
    rows = [Row.of(op, "ascend", b, dict(p.sizes)) for p, b in pairs for op in p.ops if op in wanted]
    if ops is None:
        rows += [Row.skipped(op, "reference", families.NO_FORM) for op in families.without_form()]
    return build.toolchain(), rows


def _need(tool: str, platform: str, reason: str | None) -> None:
    """Raise ``NotReadyError`` for what a tool misses, given as "what: how to install it"."""
    if reason is not None:
        what, _, install = reason.partition(": ")
        raise NotReadyError(f"kernels for {platform} are compiled by {tool}, and {what}", hint=install)


def _named(ops: Names, known: list[str], platform: str) -> list[str]:
    """Those of the ``known`` operations of a platform that ``--ops`` names, all without it."""
    for name in ops or ():
        if name in known:
            continue
        listed = f"there are: {', '.join(known)}"
        if not name:
            raise UsageError("--ops has an empty name", hint=listed)
        if name in OPS:
            raise UsageError(f"--ops: {name} is not compiled for {platform}", hint=listed)
        near = get_close_matches(name, known, 1)
        raise UsageError(f"--ops: no operation named {name!r}", hint=f"did you mean {near[0]}?" if near else listed)
    return known if ops is None else ops


def _sources(ops: Names) -> list[tuple[Source, list[str]]]:
    """C++ sources with the operations in each: the kernels' families and the planner's loops, all or those that
    ``--ops`` names."""
    from deepinfer_engine.eplb.native import SOURCE
    from deepinfer_kernels.cpu.binary import source
    from deepinfer_kernels.cpu.families import FAMILIES

    every = [(source(family), list(made.operations)) for family, made in FAMILIES.items()] + [(SOURCE, ["eplb_plan"])]
    wanted = _named(ops, [op for _, names in every for op in names], "cpu")
    chosen = [(made, [op for op in names if op in wanted]) for made, names in every]
    return [(made, names) for made, names in chosen if names]
