"""``deepinfer inspect``: what a checkpoint or a bare config.json is, without loading a weight."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import CapacityError, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.config.model_v4 import AnyConfig
    from deepinfer_engine.weights.checkpoint import Checkpoint
    from deepinfer_engine.weights.summary import ActiveParameters, Component


#: as in a profile: eight times the widest published deployment
_MOST_RANKS = 1024


def command(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A checkpoint directory, a config.json on its own, or nano.")
    ],
    ep: Annotated[int, typer.Option("--ep", metavar="N", help="Also show bytes per rank for N ranks.")] = 1,
    read: Annotated[
        bool, typer.Option("--read", help="Also read what one rank loads, and time it shard by shard.")
    ] = False,
    rank: Annotated[int, typer.Option("--rank", metavar="R", help="The rank that --read reads for.")] = 0,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Show the layer plan, parameters and bytes by component and rank, and digests.

    A checkpoint is validated on the way: config, index and every shard header must agree. With --read, MB/s is
    the loader's rate into memory and disk MB/s the rate of plain reads after the page cache was dropped. nano is
    the embedded model (unless there is a path of that name); its card says how it was made and what it can do.

    \b
    Examples:
      deepinfer inspect ./DeepSeek-V4.1-Flash --ep 8
      deepinfer inspect ./DeepSeek-V4.1-Flash --ep 8 --read --rank 3
      deepinfer inspect config.json --format json
      deepinfer inspect nano
    """
    from deepinfer_engine.config.model_v4 import load_any_config
    from deepinfer_engine.config.resources import embedded_or
    from deepinfer_engine.sim.models import EMBEDDED
    from deepinfer_engine.weights.card import card_text, read_card
    from deepinfer_engine.weights.checkpoint import Checkpoint
    from deepinfer_engine.weights.summary import active_parameters, components, layer_picture

    form = options.accept(format, OutputFormat.table, OutputFormat.json, verb="inspect")
    if ep > _MOST_RANKS:
        raise UsageError(f"--ep {ep} is more than the {_MOST_RANKS} ranks a profile may have")
    if rank and not read:
        raise UsageError("--rank says which rank --read reads for; without --read it changes nothing")
    model = embedded_or(model, EMBEDDED)
    checkpoint = Checkpoint.open(model) if model.is_dir() and _has_weights(model) else None
    config = checkpoint.any_config if checkpoint is not None else load_any_config(model)
    rows = components(config, ep)
    active = active_parameters(config)
    if read and checkpoint is None:
        raise UsageError(f"{model}: there are no weights to read", hint="give a checkpoint directory")
    speed = _read(checkpoint, ep, rank) if read and checkpoint is not None else None
    card = None if checkpoint is None else read_card(model)
    if form is OutputFormat.json:
        document = _document(config, checkpoint, rows, active, ep, speed, card)
        render.deliver(render.json_text(document), out)
        return
    parts = [_head(config), layer_picture(config), _sizes(rows, ep), _per_token(active), _identity(config, checkpoint)]
    if speed is not None:
        cells = [(s["file"], s["bytes"], s["mb_s"], s["disk_mb_s"]) for s in speed]
        parts.append(render.table(("shard", "bytes", "MB/s", "disk MB/s"), cells))
    if card is not None and checkpoint is not None:
        other = (
            "" if card["weights_digest"] == checkpoint.digest else "warning         the card is about other weights\n"
        )
        parts.append(other + card_text(card))
    render.deliver("\n".join(parts), out)


def _read(checkpoint: Checkpoint, ep: int, rank: int) -> list[dict[str, Any]]:
    """Read one rank's share once; rates by shard. CapacityError when it does not fit the free memory."""
    from deepinfer_engine.weights.read_plan import plan_read
    from deepinfer_engine.weights.reader import execute, measure_disk

    plan = plan_read(checkpoint, ep=ep, rank=rank)
    need, have = plan.useful_bytes, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    if need > have:
        raise CapacityError(
            f"rank {rank} of {ep} reads {need / 2**30:.1f} GiB, {have / 2**30:.1f} GiB of memory are free",
            hint="raise --ep, or run it where the rank will run",
        )
    disk = {s.file: measure_disk(checkpoint, plan, s.file) for s in plan.spans}
    loaded = execute(checkpoint, plan)
    return [
        {"file": s.file, "bytes": s.useful_bytes, "mb_s": round(s.mb_s, 1), "disk_mb_s": round(disk[s.file], 1)}
        for s in loaded.shards
    ]


def _has_weights(directory: Path) -> bool:
    """Whether anything there claims to be weights; a directory with only a config is inspected like the config."""
    return any(p.name.endswith((".safetensors", ".safetensors.index.json")) for p in directory.iterdir())


# ------------------------------------------------------------------------ table


def _family(config: AnyConfig) -> str:
    from deepinfer_engine.config.model_v4 import V4Config

    if isinstance(config, V4Config):
        return "DeepSeek-V4 (inspect only, its forward pass is not implemented)"
    return "DeepSeek-V4.1"


def _head(config: AnyConfig) -> str:
    return (
        f"{_family(config)}\n"
        f"{config.num_hidden_layers} layers, hidden {config.hidden_size}, "
        f"{config.num_attention_heads} heads x {config.head_dim}, {config.n_routed_experts} experts "
        f"({config.num_experts_per_tok} per token, 1 shared)\nvocabulary {config.vocab_size:,}, "
        f"context {config.max_position_embeddings:,} tokens\n"
    )


def _sizes(rows: tuple[Component, ...], ep: int) -> str:
    columns = ["component", "tensors", "parameters", "bytes", "%"]
    whole = _sum(rows, "nbytes")
    body: list[list[render.Cell]] = []
    for row in rows:
        body.append(
            [row.name, f"{row.tensors:,}", f"{row.parameters:,}", f"{row.nbytes:,}", f"{100 * row.nbytes / whole:.1f}"]
        )
        if ep > 1:
            body[-1] += [f"{row.rank_bytes:,}", row.share]
    total: list[render.Cell] = ["total", f"{_sum(rows, 'tensors'):,}", f"{_sum(rows, 'parameters'):,}",
                                f"{whole:,}", "100.0"]  # fmt: skip
    if ep > 1:
        columns += [f"per rank, ep {ep}", "split"]
        total += [f"{_sum(rows, 'rank_bytes'):,}", ""]
    cells = [[str(c) for c in line] for line in [columns, *body, total]]
    return _aligned(cells, left=(0, 6)) + (_rank_note(rows) if ep > 1 else "")


def _rank_note(rows: tuple[Component, ...]) -> str:
    """What the fullest rank holds when Engram tables stay on disk and the vision tower is skipped."""
    lines = []
    total = _sum(rows, "rank_bytes")
    tables = sum(r.rank_bytes for r in rows if r.name == "engram tables")
    vision = sum(r.rank_bytes for r in rows if r.group == "vision")
    draft = sum(r.rank_bytes for r in rows if r.group == "draft")
    if tables:
        lines.append(f"Engram tables gathered from disk instead: {total - tables:,} bytes per rank.")
    if vision or draft:
        lines.append(f"Loaded only when asked for: vision {vision:,}, draft {draft:,} bytes of it.")
    return "".join(f"{line}\n" for line in lines)


def _sum(rows: tuple[Component, ...], field: str) -> int:
    return sum(getattr(row, field) for row in rows)


def _aligned(lines: list[list[str]], *, left: tuple[int, ...]) -> str:
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "".join(
        "  ".join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        .rstrip() + "\n"
        for line in lines
    )  # fmt: skip


def _per_token(active: ActiveParameters) -> str:
    text = f"parameters at work per token: prefill {active.prefill:,}, decode {active.decode:,}"
    return text + (f", draft {active.draft:,}\n" if active.draft else "\n")


def _identity(config: AnyConfig, checkpoint: Checkpoint | None) -> str:
    lines = [f"config digest   {config.digest}"]
    if checkpoint is None:
        lines.append("weights digest  none, no weights here")
    else:
        lines.append(f"weights digest  {checkpoint.digest}")
        present = ", ".join(sorted(checkpoint.groups_present))
        lines.append(f"weights         {len(checkpoint.headers)} shards, valid; groups: {present}")
        lines += [f"warning         {warning}" for warning in checkpoint.warnings]
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------- json


def _document(
    config: AnyConfig,
    checkpoint: Checkpoint | None,
    rows: tuple[Component, ...],
    active: ActiveParameters,
    ep: int,
    speed: list[dict[str, Any]] | None,
    card: dict[str, Any] | None,
) -> dict[str, Any]:
    from dataclasses import asdict

    from deepinfer_engine.config.model import ModelConfig

    layers: list[dict[str, Any]]
    if isinstance(config, ModelConfig):
        layers = [asdict(plan) for plan in config.layer_plan]
    else:
        layers = [
            {"layer": i, "ratio": config.compress_ratios[i], "hash_router": i < config.num_hash_layers}
            for i in range(config.num_hidden_layers)
        ]
    weights = None
    if checkpoint is not None:
        weights = {
            "digest": checkpoint.digest,
            "shards": len(checkpoint.headers),
            "groups_present": sorted(checkpoint.groups_present),
            "warnings": list(checkpoint.warnings),
        }
    content = {
        "model_type": "deepseek_v41" if isinstance(config, ModelConfig) else "deepseek_v4",
        "runnable": isinstance(config, ModelConfig),
        "config_digest": config.digest,
        "cut": config.cut if isinstance(config, ModelConfig) else None,
        "layers": layers,
        "ep": ep,
        "components": [
            {
                "component": r.name,
                "group": r.group,
                "tensors": r.tensors,
                "parameters": r.parameters,
                "bytes": r.nbytes,
                "fullest_rank_bytes": r.rank_bytes,
                "split": r.share,
            }
            for r in rows
        ],
        "total": {
            "tensors": _sum(rows, "tensors"),
            "parameters": _sum(rows, "parameters"),
            "bytes": _sum(rows, "nbytes"),
            "fullest_rank_bytes": _sum(rows, "rank_bytes"),
        },
        "active_parameters": asdict(active),
        "weights": weights,
        "read": speed,
        "card": card,
    }
    return render.document("inspect", content)
