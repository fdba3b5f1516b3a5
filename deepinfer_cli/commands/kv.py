"""``deepinfer kv``: explain a prompt's replay plan; inspect, check, clean and measure the persistent KV store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.interrupts import terminable
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import CheckFailed, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.cache.store.interface import BlockStore

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings=_CONTEXT,
    help="Explain replay plans; inspect, check, clean and measure the persistent KV store.",
)

_Path = Annotated[
    Path | None, typer.Option("--path", metavar="DIR", help="Folder of the store instead of the profile's.")
]


#: positions of the released model
_MOST_TOKENS = 1_048_576


@app.command("explain", context_settings=_CONTEXT)
def explain(
    length: Annotated[int, typer.Option("--length", metavar="L", help="Tokens of the prompt.")],
    hit: Annotated[int, typer.Option("--hit", metavar="N", help="Tokens with cached block KV, whole blocks.")] = 0,
    no_swa: Annotated[bool, typer.Option("--no-swa", help="The window KV of the hit is gone.")] = False,
    model: Annotated[
        str,
        typer.Option(
            "--model", metavar="NAME|PATH", help="deepseek-v4.1-flash, nano, a model folder or a config.json."
        ),
    ] = "nano",
    profile: options.Profile = "cpu-nano",
    set_: options.Set = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """What a prefill of L tokens computes, sees and writes, every number with its reason.

    The profile gives replay.decoder, replay.encoder and the chunk size; the model gives the sizes.

    \b
    Examples:
      deepinfer kv explain --length 1000 --hit 896
      deepinfer kv explain --length 77056 --hit 76928 --no-swa --model deepseek-v4.1-flash --profile prefill-ep4
      deepinfer kv explain --length 4096 --set replay.decoder=bounded --format json
    """
    from deepinfer_engine.cache.replay import ReplayShape, plan_prefill
    from deepinfer_engine.cache.replay import explain as reasons
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.sim.models import find_model

    options.accept(format, *_FORMATS, verb="kv explain")
    loaded = load_profile(profile, set_ or ()).profile
    if length > _MOST_TOKENS:
        raise UsageError(f"--length {length} is more than the {_MOST_TOKENS} positions of the largest model")
    shape = ReplayShape.of(find_model(model).config, decoder=loaded.replay.decoder, encoder=loaded.replay.encoder)
    first = plan_prefill(shape, length, hit=hit)
    windows = frozenset() if no_swa else frozenset({min(hit, first.cap)})
    span = plan_prefill(shape, length, hit=hit, windows_at=windows)
    budget = loaded.sched.prefill_chunk_tokens
    chunks = span.chunks(budget)
    shown = " ".join(f"[{c.start}, {c.start + c.count})" for c in chunks[:6]) + (" …" if len(chunks) > 6 else "")
    rows = [*reasons(span), ("chunks", len(chunks), f"sched.prefill_chunk_tokens {budget}: {shown}")]
    render.deliver(render.rows_text(format, "kv-explain", ("field", "value", "reason"), rows), out)


@app.command("stat", context_settings=_CONTEXT)
def stat(
    path: _Path = None,
    profile: options.Profile = "cpu-nano",
    set_: options.Set = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Blocks, bytes and files of the store.

    expired blocks are misses that gc removes; recovered ones were found by scanning segments of writers that died.

    \b
    Examples:
      deepinfer kv stat --path kv/
      deepinfer kv stat --profile ./mine.yaml --format json
    """
    options.accept(format, *_FORMATS, verb="kv stat")
    store = _open(path, profile, set_)
    s = store.stats()
    store.close()
    columns = ("backend", "blocks", "expired", "mib", "files", "recovered")
    row = (s.backend, s.blocks, s.expired, round(s.bytes / 2**20, 1), s.files, s.recovered)
    render.deliver(render.rows_text(format, "kv-stat", columns, [row]), out)


@app.command("verify", context_settings=_CONTEXT)
def verify(
    path: _Path = None,
    repair: Annotated[bool, typer.Option("--repair", help="Delete blocks that are wrong or cannot be read.")] = False,
    profile: options.Profile = "cpu-nano",
    set_: options.Set = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Read every block and compare every checksum; exit 6 when one is wrong and not deleted.

    To a request a wrong block is a miss, whether it is deleted or not.

    \b
    Examples:
      deepinfer kv verify --path kv/
      deepinfer kv verify --path kv/ --repair
    """
    options.accept(format, *_FORMATS, verb="kv verify")
    store = _open(path, profile, set_)
    checked, bad = 0, []
    for record in store.check(repair=repair):
        checked += 1
        if record.problem:
            bad.append((record.file, record.offset, record.problem))
    store.close()
    render.deliver(render.rows_text(format, "kv-verify", ("file", "offset", "problem"), bad), out)
    if bad and not repair:
        raise CheckFailed(f"{len(bad)} of {checked} blocks are wrong", hint="--repair deletes them")
    said = f"{len(bad)} of {checked} blocks were wrong and are deleted" if bad else f"{checked} blocks are right"
    render.note(said, quiet=quiet)


@app.command("gc", context_settings=_CONTEXT)
def gc(
    path: _Path = None,
    profile: options.Profile = "cpu-nano",
    set_: options.Set = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Remove what has expired, then the oldest above cache.store.capacity_gib.

    \b
    Examples:
      deepinfer kv gc --path kv/
      deepinfer kv gc --profile ./mine.yaml
    """
    import time

    options.accept(format, *_FORMATS, verb="kv gc")
    store = _open(path, profile, set_)
    cleaned = store.collect(time.time())
    store.close()
    row = (cleaned.files, cleaned.blocks, round(cleaned.bytes / 2**20, 1))
    render.deliver(render.rows_text(format, "kv-gc", ("files", "blocks", "mib"), [row]), out)


@app.command("bench", context_settings=_CONTEXT)
def bench(
    path: Annotated[Path, typer.Option("--path", metavar="DIR", help="Folder on the disk to measure.")],
    backend: Annotated[str, typer.Option("--backend", metavar="segment|posix", help="Kind of store.")] = "segment",
    depth: Annotated[int, typer.Option("--depth", min=1, max=64, help="Blocks in flight, plain and of the store.")] = 8,
    rounds: Annotated[int, typer.Option("--rounds", min=1, max=1000, help="Interleaved rounds.")] = 7,
    blocks: Annotated[int, typer.Option("--blocks", min=16, max=65_536, help="112 KiB blocks per round.")] = 512,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Put and get speed of a store beside plain unbuffered I/O of the same size and depth.

    fresh writes go to preallocated space as a log's do, rewrites over written space. Medians of the rounds in MiB/s.
    All of it happens in a folder .deepinfer-kv-* inside DIR, which is removed again; what a killed run left goes too.

    \b
    Examples:
      deepinfer kv bench --path /mnt/nvme --depth 8
    """
    import statistics

    from deepinfer_engine.cache.store.measure import measure_store

    options.accept(format, *_FORMATS, verb="kv bench")
    if backend not in ("segment", "posix"):
        raise UsageError(f"backend is {backend!r}, expected segment or posix")
    with terminable(), render.progress("rounds", quiet=quiet) as step:
        speeds = measure_store(path, backend, depth=depth, rounds=rounds, blocks=blocks, progress=step)
    names = ("fresh", "rewrite", "put", "read", "get")
    rows: list[tuple[render.Cell, ...]] = []
    for name in names:
        values = getattr(speeds, name)
        rows.append((name, round(min(values), 1), round(statistics.median(values), 1), round(max(values), 1)))
    rows += [(f"ratio {name}", None, round(ratio, 3), None) for name, ratio in speeds.ratios().items()]
    render.deliver(render.rows_text(format, "kv-bench", ("what", "min", "median", "max"), rows), out)
    kind = "direct I/O" if speeds.direct else "buffered I/O: this file system has no direct I/O"
    render.note(f"{backend}, depth {depth}, {rounds} rounds of {blocks} blocks, {kind}", quiet=quiet)


def _open(path: Path | None, profile: str, set_: list[str] | None) -> BlockStore:
    """The store in a folder, or of a profile; UsageError when there is none."""
    from deepinfer_engine.cache.store.interface import StoreOptions, TrafficClass, backend_of, open_store
    from deepinfer_engine.config.profile import load_profile

    settings = load_profile(profile, set_ or ()).profile.cache.store
    if path is None:
        if settings.path is None:
            raise UsageError("the profile has no store", hint="give --path DIR, or set cache.store.path")
        path = Path(settings.path)
    backend = backend_of(path)
    if backend is None:
        raise UsageError(f"{path}: no KV store here")
    ttl: dict[TrafficClass, int] = {"agent": settings.ttl_s.agent, "chat": settings.ttl_s.chat}
    return open_store(StoreOptions(path, ttl, int(settings.capacity_gib * 2**30)), backend)
