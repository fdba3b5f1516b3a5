"""``yoco-verify``: opens models and trajectories for both levels, and adds what needs more than one model.

YoCo ("you only cache once") is the design that replays serve: global KV made once below the cut and read above it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from deepinfer_engine.cache.layout import KVLayout
from deepinfer_engine.cache.prefix import extend_keys, namespace_root
from deepinfer_engine.cache.replay import ReplayShape, plan_prefill
from deepinfer_engine.cache.store.interface import StoreOptions, open_store
from deepinfer_engine.cache.tiers import Payload
from deepinfer_engine.config.model import BLOCK_TOKENS, ModelConfig
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.config.rules import MAX_REPLICAS, check_against_model
from deepinfer_engine.errors import ArtefactError, ProfileError, UsageError
from deepinfer_engine.model.load import load_model
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.verify.yoco_level2 import Level2Check, Row
from deepinfer_engine.verify.yoco_oracle import expect
from deepinfer_engine.verify.yoco_play import Place, Stage, oracle, play
from deepinfer_engine.verify.yoco_subject import Subject
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_kernels.registry import resolve

#: control tokens of the V4.1 prompt format
_BEGIN, _END, _USER = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>"
_ASSISTANT, _ANSWER = "<｜Assistant｜>", "</think>"


def open_stage(directory: Path, *, numerics: str = "float", ranks: int = 1, device: str = "cpu") -> Stage:
    """A loaded model on one process; ``ranks`` virtual expert-parallel ranks, with a replica on each where there is
    room for one. Raises ``CheckpointError``; ``ProfileError`` for a number of ranks that its experts cannot fill."""
    checkpoint = Checkpoint.open(directory)
    # invariant operations: a sum in another order may turn a tie of the indexer or router, and that is no fault
    invariant = numerics != "reference"
    ops = resolve(numerics, "cpu" if device == "cpu" else "sm90", batch_invariant=invariant)
    profile = load_profile("cpu-nano").profile
    experts = checkpoint.config.n_routed_experts
    slots = -(-experts // ranks) + 1
    spare = int(ranks > 1 and slots <= experts and ranks * slots <= MAX_REPLICAS * experts)
    parallel = profile.parallel.model_copy(update={"ep": ranks, "redundant_experts_per_rank": spare})
    profile = profile.model_copy(update={"parallel": parallel})
    if problems := check_against_model(profile, experts):
        raise ProfileError("\n".join(problems))
    loaded = load_model(checkpoint, Tokenizer.from_dir(directory), ops, profile, device=device)
    return Stage(checkpoint.config, loaded.model, loaded.mesh, ops, device)


def forced_tokens(directory: Path, config: ModelConfig, count: int) -> list[int]:
    """``count`` tokens of a long conversation about sums, which every model of the family knows how to continue.

    In the V4.1 prompt format where the tokenizer has its control tokens, as plain text where it has none.
    """
    tokenizer = Tokenizer.from_dir(directory)
    try:
        begin, end, user, assistant, answer = (
            [tokenizer.control_id(name)] for name in (_BEGIN, _END, _USER, _ASSISTANT, _ANSWER)
        )
    except ArtefactError:
        begin, end, user, assistant, answer = [config.bos_token_id], *(tokenizer.encode_text(t) for t in "\n\n  ")
    ids, turn = list(begin), 0
    while len(ids) < count:
        a, b = 17 + 37 * turn % 80, 11 + 53 * turn % 70
        turn += 1
        ids += [*user, *tokenizer.encode_text(f"What is {a}+{b}?"), *assistant, *answer]
        ids += [*tokenizer.encode_text(str(a + b)), *end]
    return check_tokens(ids[:count], config)


def check_tokens(ids: Sequence[int], config: ModelConfig) -> list[int]:
    """The ids, if all are in the vocabulary and none is an image's."""
    for position, token in enumerate(ids):
        if not 0 <= token < config.vocab_size or token == config.image_token_id:
            raise UsageError(f"token {token} at position {position} is no text token of this model")
    return list(ids)


def open_level2(
    directory: Path, ids: Sequence[int] | None, *, ranks: int, progress: Callable[[str], None]
) -> tuple[Level2Check, list[Row]]:
    """The level-2 check of a model with its definitions run, and the rows that compare ranks and stored bytes.

    The definitions run on one rank, everything that is judged by them on ``ranks`` virtual ones. ``ids``: the
    trajectory, or None for the built-in text.
    """
    stage = open_stage(directory)
    config = stage.config
    tokens = forced_tokens(directory, config, 4096) if ids is None else check_tokens(ids, config)
    check = Level2Check(stage, tokens)
    check.run_definitions(progress)
    rows = []
    progress("stored bytes: a hit through the store")
    rows.append(_stored_bytes(directory, check))
    if ranks > 1:
        progress(f"ranks: {ranks} against one")
        check.stage = open_stage(directory, ranks=ranks)
        rows.append(_ranks(check, ranks))
    return check, rows


def _ranks(check: Level2Check, ranks: int) -> Row:
    """The definition of the bounded decoder, on the ranks, against itself on one."""
    stage = check.stage
    tokens = check.total + check.sizes.slack + 1
    kv = stage.cache(stage.unwrapped(tokens), slots=1, blocks=check.blocks(1))
    want = expect(check.sizes, check.case("bounded"))
    got = oracle(stage, Place(kv, 1, list(range(1, check.blocks(1) + 1))), check.short, check.first, want)
    gap = (got.logprobs - check.truth["bounded"].logprobs).abs().max().item()
    return Row(f"{ranks} virtual ranks = one", got.logprobs.numel(), gap)


def _stored_bytes(directory: Path, check: Level2Check) -> Row:
    """Official records through a store file into another cache: the next logits must have the same bits."""
    stage = open_stage(directory, numerics="reference")
    subject, hit = Subject(), 2 * BLOCK_TOKENS
    layout = KVLayout.of(stage.config, records=True)
    shape = ReplayShape.of(stage.config, decoder="bounded")
    span = plan_prefill(shape, check.first, hit=hit, windows_at=frozenset({hit}))
    size = check.blocks(1)

    def fresh() -> Place:
        return Place(stage.cache(layout, slots=1, blocks=size), 1, list(range(1, size + 1)))

    here, there = fresh(), fresh()
    cold = plan_prefill(shape, check.first)
    stage.forward(here, check.short, 0, hit, cold.limits(0, hit), wanted="none")
    blocks = torch.tensor(here.blocks[: hit // BLOCK_TOKENS])
    root = namespace_root(config=stage.config.digest, weights="verify", numerics="reference", layout=layout)
    keys = extend_keys(root, [], check.ids[:hit])
    with tempfile.TemporaryDirectory(prefix="deepinfer-kv-") as folder:
        store = open_store(StoreOptions(Path(folder) / "kv", namespace=root), "segment")
        for key, data in zip(keys, here.kv.export_blocks(blocks).cpu(), strict=True):
            store.put(key, Payload(bytes(data.numpy())))
        found = store.get(keys)
        store.close()
    payloads = [torch.frombuffer(bytearray(p.data), dtype=torch.uint8) for p in found if p is not None]
    if len(payloads) != len(keys):
        raise ArtefactError(f"{len(keys) - len(payloads)} of {len(keys)} blocks did not come back from the store")
    there.kv.import_blocks(torch.tensor(there.blocks[: len(keys)]), torch.stack(payloads))
    layers = shape.snapshot_layers
    there.kv.import_window(there.slot, hit, layers, here.kv.export_window(here.slot, hit, layers))
    ids = check.ids[: check.first + 12]  # reference rounds at every step, which takes its time
    a = play(stage, subject, there, ids, span)
    b = play(stage, subject, here, ids, span)
    gap = (a.logprobs - b.logprobs).abs().max().item()
    return Row("hit through stored bytes = hit in place (reference)", a.logprobs.numel(), gap)
