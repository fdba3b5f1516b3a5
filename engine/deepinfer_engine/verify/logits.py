"""Teacher-forced logits and greedy continuations of token lists: what an acceptance test compares."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.state import KVState
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.errors import UsageError
from deepinfer_engine.model.load import load_model
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import resolve


def forced_logits(
    model_dir: str | Path,
    prompts: list[list[int]],
    *,
    numerics: str,
    chunk: int | None = None,
    greedy: int = 0,
    device: str = "cpu",
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Tensor]:
    """``logits.{i}`` f32 [T, V] of every prompt position and ``greedy.{i}`` int64 [greedy] of the continuation.

    ``chunk`` feeds prompts in pieces of that many tokens. The continuation ignores EOS. Raises ``UsageError`` for an
    empty prompt, a token outside the vocabulary, or a prompt that does not fit the model's positions.
    """
    checkpoint = Checkpoint.open(model_dir)
    config = checkpoint.config
    for i, ids in enumerate(prompts):
        if not ids:
            raise UsageError(f"prompt {i} is empty")
        bad = next((t for t in ids if not 0 <= t < config.vocab_size), None)
        if bad is not None:
            raise UsageError(f"prompt {i} holds token {bad}, the vocabulary has ids 0..{config.vocab_size - 1}")
        if len(ids) + greedy > config.max_position_embeddings:
            raise UsageError(
                f"prompt {i} needs {len(ids) + greedy} positions, the model has {config.max_position_embeddings}"
            )
    ops = resolve(numerics, "cpu" if device == "cpu" else "sm90")
    profile = load_profile("cpu-nano").profile
    loaded = load_model(checkpoint, Tokenizer.from_dir(model_dir), ops, profile, device=device)
    layout = KVLayout.of(config, records=ops.numerics.records)
    blocks = layout.blocks_for(max(len(p) for p in prompts) + greedy)
    out: dict[str, Tensor] = {}
    for i, prompt in enumerate(prompts):
        kv = KVState(layout, ops, slots=1, blocks=blocks, device=device)
        ids, parts = list(prompt), []

        def run(start: int, end: int, ids: list[int] = ids, kv: KVState = kv) -> Tensor:
            row = RowInput(ids, start, end - start, 1, range(1, blocks + 1), logits="all")
            batch = build_batch([row], layout, ngram=config.engram_max_ngram_size, device=device)
            return loaded.model.forward(batch, kv, ops, loaded.mesh).logits

        step = chunk or len(ids)
        for start in range(0, len(ids), step):
            parts.append(run(start, min(start + step, len(ids))).float().cpu())
        out[f"logits.{i}"] = torch.cat(parts)
        if greedy:
            token = int(parts[-1][-1].argmax())
            for _ in range(greedy - 1):
                ids.append(token)
                token = int(run(len(ids) - 1, len(ids))[-1].argmax())
            ids.append(token)
            out[f"greedy.{i}"] = torch.tensor(ids[len(prompt) :], dtype=torch.int64)
        if progress is not None:
            progress(i + 1, len(prompts))
    return out
