"""From an open checkpoint to a model in memory: read plan, prepared weights, hash memory, mesh."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.mesh import LocalMesh
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.model.ced import CedModel
from deepinfer_engine.model.engram import EngramSource, MappedEngramSource, MemoryEngramSource
from deepinfer_engine.model.weights import WeightReader, load_weights
from deepinfer_engine.tokens.classes import check_classes
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.engram_table import EngramTable
from deepinfer_engine.weights.read_plan import plan_read
from deepinfer_engine.weights.reader import ShardReport, execute


@dataclass(frozen=True)
class LoadedModel:
    """The model, the mesh its experts live on, and how fast each shard was read."""

    model: CedModel
    mesh: LocalMesh
    shards: tuple[ShardReport, ...]


def load_model(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    ops: Any,
    profile: Profile,
    *,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Read the backbone and its hash memory for ``profile``; ``progress(done, total)`` counts bytes.

    The placement puts every logical expert into at least one physical slot of the virtual ranks. Engram tables are
    read into memory, or gathered from the file under ``cache.engram_placement: mmap``.
    """
    config = checkpoint.config
    placement = Placement.static(
        config.num_hidden_layers,
        config.n_routed_experts,
        ranks=profile.parallel.ep,
        redundant_per_rank=profile.parallel.redundant_experts_per_rank,
    )
    mapped = profile.cache.engram_placement == "mmap"
    plan = plan_read(checkpoint, slots=placement.slot_expert.tolist(), engram="mmap" if mapped else "whole", fuse=False)
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
    return LoadedModel(
        model, LocalMesh(placement, config.n_routed_experts, device, choice=profile.eplb.replica_choice), loaded.shards
    )
