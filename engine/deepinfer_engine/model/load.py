"""From an open checkpoint to a model in memory: read plan, prepared weights, hash memory, mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.mesh import LocalMesh, Mesh
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.share import Share
from deepinfer_engine.dist.starting import starting_placement
from deepinfer_engine.model.ced import CedModel
from deepinfer_engine.model.draft import DraftModel
from deepinfer_engine.model.engram import EngramSource, MappedEngramSource, MemoryEngramSource
from deepinfer_engine.model.weights import ModelWeights, WeightReader, load_draft, load_weights
from deepinfer_engine.tokens.classes import check_classes
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint, no_draft_weights
from deepinfer_engine.weights.engram_table import EngramTable
from deepinfer_engine.weights.read_plan import plan_read
from deepinfer_engine.weights.reader import ShardReport, execute


@dataclass(frozen=True)
class LoadedModel:
    """The model, the mesh its experts live on, how fast each shard was read, and the draft blocks if asked for."""

    model: CedModel
    mesh: Mesh
    shards: tuple[ShardReport, ...]
    draft: DraftModel | None = None


def load_model(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    ops: Any,
    profile: Profile,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
    draft: bool = False,
    placement: Placement | None = None,
    share: Share | None = None,
    connect: Callable[[Placement], Mesh] | None = None,
) -> LoadedModel:
    """Read the backbone, its hash memory and with ``draft`` the draft blocks; ``progress(done, total)`` counts bytes.

    ``placement``: by default that of ``starting_placement``; draft experts have one slot each. Of several processes
    each reads the experts of its ``share`` only, and all draft experts, and ``connect`` makes the mesh between them.
    Engram tables are read into memory, or gathered from the file under ``cache.engram_placement: mmap``. Raises
    ``ArtefactError`` when ``draft`` is asked for and not there.
    """
    config = checkpoint.config
    if draft and "draft" not in checkpoint.groups_present:
        raise no_draft_weights(checkpoint.directory)
    if placement is None:
        placement = starting_placement(checkpoint, profile)
    placement.check(config.n_routed_experts)
    slots = placement.slot_expert if share is None else placement.of_ranks(share.ranks)
    mapped = profile.cache.engram_placement == "mmap"
    groups = ("backbone", "engram", "draft") if draft else ("backbone", "engram")
    plan = plan_read(
        checkpoint,
        slots=slots.tolist(),
        groups=groups,
        engram="mmap" if mapped else "whole",
        fuse=False,
    )
    done = 0

    def count(_: str, read: int) -> None:
        nonlocal done
        done += read
        if progress is not None:
            progress(done, plan.read_bytes)

    loaded = execute(checkpoint, plan, progress=count)
    reader = WeightReader(plan, loaded, ops, device)
    sources: dict[int, EngramSource] = {}
    for layer in config.engram_layer_ids:
        at = f"layers.{layer}.engram.embed"
        sources[layer] = (
            MappedEngramSource(EngramTable(checkpoint, layer), ops)
            if mapped
            else MemoryEngramSource(reader.plain(f"{at}.weight"), reader.plain(f"{at}.scale"), ops)
        )
    weights = load_weights(reader, config)
    model = CedModel(config, weights, sources, check_classes(config, tokenizer), device)
    if connect is None:
        mesh = LocalMesh(placement, config.n_routed_experts, device, choice=profile.eplb.replica_choice)
    else:
        mesh = connect(placement)
    return LoadedModel(model, mesh, loaded.shards, _draft_model(reader, config, weights, device) if draft else None)


def _draft_model(reader: WeightReader, config: ModelConfig, backbone: ModelWeights, device: str) -> DraftModel:
    experts = config.dspark_n_routed_experts
    placement = Placement.static(config.num_nextn_predict_layers, experts, ranks=1, redundant_per_rank=0)
    mesh = LocalMesh(placement, experts, device)
    return DraftModel(config, load_draft(reader, config), backbone.embed, backbone.head, mesh, device)
