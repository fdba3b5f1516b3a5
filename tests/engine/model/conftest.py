"""The recorded tiny checkpoint and its expectations."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.model.ced import Out
from deepinfer_engine.model.draft import Anchors, Proposals
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import Ops, resolve

VECTORS = Path(__file__).resolve().parents[2] / "vectors" / "v41-tiny-a"
SLOT, BLOCKS = 1, range(1, 9)


@dataclass
class Golden:
    """Recorded cases and tensors."""

    cases: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    replay: list[dict[str, Any]]
    prefix_hit: list[dict[str, Any]]
    engram_hash: dict[str, Any]


@dataclass
class Rig:
    """A loaded model and a way to run chunks of one sequence through it."""

    directory: Path
    numerics: str
    ep: int = 1
    redundant: int = 0
    device: str = "cpu"
    backend: str = "auto"
    cache: Path | None = None
    ops: Ops | None = None  # None: as resolved from the four above
    seen: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.checkpoint = Checkpoint.open(self.directory)
        self.config = self.checkpoint.config
        if self.ops is None:
            platform = "cpu" if self.device == "cpu" else "sm90"
            self.ops = resolve(self.numerics, platform, backend=self.backend, cache=self.cache)
        profile = load_profile("cpu-nano").profile
        parallel = profile.parallel.model_copy(update={"ep": self.ep, "redundant_experts_per_rank": self.redundant})
        profile = profile.model_copy(update={"parallel": parallel})
        tokenizer = Tokenizer.from_dir(self.directory)
        loaded = load_model(self.checkpoint, tokenizer, self.ops, profile, device=self.device, draft=True)
        assert loaded.draft is not None
        self.model, self.mesh, self.draft = loaded.model, loaded.mesh, loaded.draft

    @cached_property
    def layout(self) -> KVLayout:
        return KVLayout.of(self.config, records=self.ops.numerics.records, draft=True)

    def kv(self) -> KVState:
        return KVState(self.layout, self.ops, slots=2, blocks=len(BLOCKS), device=self.device)

    def probe(self, name: str, layer: int, value: torch.Tensor) -> None:
        self.seen[name, layer] = value

    def row(self, ids: list[int], start: int, end: int, **options: Any) -> RowInput:
        return RowInput(ids, start, end - start, SLOT, list(BLOCKS), **{"logits": "all", **options})

    def run(self, kv: KVState, ids: list[int], start: int, end: int, *, watch: bool = False, **options: Any) -> Out:
        rows = [self.row(ids, start, end, **options)]
        batch = build_batch(rows, self.layout, ngram=self.config.engram_max_ngram_size, device=self.device)
        out = self.model.forward(batch, kv, self.ops, self.mesh, self.probe if watch else None)
        at = slice(None) if batch.tail_T is None else batch.tail_T
        self.draft.write_context(out.taps, batch.pos_T[at], batch.ring_slot_T[at], kv, self.ops)
        return out

    def propose(self, kv: KVState, token: int, position: int, floor: int = 0) -> Proposals:
        """Greedy drafts of one sequence whose newest token has not run yet."""
        anchors = Anchors(*(torch.tensor([v], device=self.device) for v in (token, position, SLOT, floor)))
        return self.draft.propose(anchors, kv, self.ops, lambda _, logits: logits.argmax(-1))


@pytest.fixture(scope="session")
def golden() -> Golden:
    raw = json.loads((VECTORS / "cases.json").read_text())
    return Golden(
        {c["id"]: c for c in raw["cases"]},
        load_file(VECTORS / "expected.safetensors"),
        raw["replay"],
        raw["prefix_hit"],
        raw["engram_hash"],
    )


@pytest.fixture(scope="session")
def variants(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoint directory per config variant; the weights are shared by links."""
    wide = tmp_path_factory.mktemp("w128")
    for file in (VECTORS / "checkpoint").iterdir():
        if not file.name.startswith("config"):
            os.symlink(file, wide / file.name)
    shutil.copy(VECTORS / "checkpoint" / "config.w128.json", wide / "config.json")
    return {"base": VECTORS / "checkpoint", "w128": wide}


@pytest.fixture(scope="session")
def float_rigs(variants: dict[str, Path]) -> dict[str, Rig]:
    return {name: Rig(path, "float") for name, path in variants.items()}


@pytest.fixture(scope="session")
def reference_rig(variants: dict[str, Path]) -> Rig:
    return Rig(variants["base"], "reference")


@pytest.fixture(scope="session")
def make_rig() -> type[Rig]:
    return Rig
