"""Train the draft heads of an exported nano and write them into its checkpoint.

    python -m recipes.nano.draft --checkpoint DIR --prompts FILE --out DIR [--minutes 2] [--device cuda|cpu]

The backbone stays as it is. It answers the prompts itself (half greedily, half at temperature 1), its hidden states
over those sequences are computed once, and the blocks learn on random anchors of the answers: cross-entropy on the next
tokens, total variation to the backbone's own distribution, and the acceptance probability for the confidence head.
Then the engine runs the result on prompts that were not trained on, with every draft verified, and one vector of
temperatures per sampling regime is fitted to what it accepted.

``--out`` gets the checkpoint with the draft blocks and ``confidence.json``, and beside it (``--report``) what was seen:
acceptance per position, calibration before and after, the losses.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.profile import load_profile
from deepinfer_engine.engine import Engine
from deepinfer_engine.runtime.batch import RowInput, build_batch
from deepinfer_engine.spec.calibrate import CONFIDENCE_FILE, REGIMES, Regime, calibrate, calibration_record
from deepinfer_engine.types import Completion, Request, SamplingParams
from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.writer import write_checkpoint
from recipes.nano.draft_model import DraftBlocks, Drafted, Frozen, initial_parameters, stored
from recipes.nano.export import read_back
from recipes.nano.parameters import to_official

BLOCK = 128
#: position weights exp(−k / 3) of a block of five
DECAY = 3.0
LOSS = {"ce": 0.1, "l1": 0.9, "confidence": 1.0}


@dataclass(frozen=True)
class Settings:
    """Sizes of a run. ``generate_s`` and ``train_s`` bound its two long parts."""

    device: str
    rows: int
    answer_tokens: int
    generate_s: float
    train_s: float
    steps: int | None
    batch: int
    anchors: int
    rate: float
    seed: int
    calibrate_prompts: int


@dataclass(frozen=True)
class Corpus:
    """N sequences of up to T tokens: ids int64 [N, T], prompt and whole lengths [N]; bf16 taps [N, T, taps, H] and
    normed last hidden states [N, T, H] of the backbone."""

    ids: Tensor
    prompts: Tensor
    lengths: Tensor
    taps: Tensor
    hidden: Tensor


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), file=sys.stderr, flush=True)


def read_prompts(path: Path) -> list[list[int]]:
    """Token ids of the requests that ``recipes.nano.measure --requests`` wrote, one per line."""
    with path.open(encoding="utf-8") as file:
        return [json.loads(line)["token_ids"] for line in file]


def open_engine(checkpoint: Path, settings: Settings, *sets: str) -> Engine:
    platform = "h200x1-nano" if settings.device == "cuda" else "cpu-nano"
    base = {
        "sched.max_rows_per_rank": settings.rows, "sched.max_context_tokens": 1024, "sched.overlap": "true",
        "cache.prefix": "false", "cache.hbm_tokens_per_rank": settings.rows * 1024, "replay.decoder": "off",
        "sched.prefill_chunk_tokens": 8192,
    }  # fmt: skip
    merged = {k: str(v) for k, v in base.items()} | dict(s.split("=", 1) for s in sets)
    profile = load_profile(platform, [f"{k}={v}" for k, v in merged.items()]).profile
    return Engine.open(profile, checkpoint, device=settings.device)


# ------------------------------------------------------------------------------- corpus


def answers(engine: Engine, prompts: list[list[int]], settings: Settings) -> list[tuple[list[int], int]]:
    """(prompt and answer, prompt length) of as many prompts as the time allows, the end token included."""
    eos = engine.config.eos_token_id
    out: list[tuple[list[int], int]] = []
    end = time.monotonic() + settings.generate_s
    queue = list(enumerate(prompts))[::-1]
    live = 0
    while queue or live:
        while queue and live < settings.rows and time.monotonic() < end:
            i, ids = queue.pop()
            sampling = SamplingParams(temperature=float(i % 2), seed=i, max_tokens=settings.answer_tokens)
            engine.submit(Request(str(i), tuple(ids), sampling))
            live += 1
        if not live:
            break
        for event in engine.step():
            if isinstance(event, Completion):
                live -= 1
                ids = prompts[int(event.request_id)]
                tail = [eos] if event.finish_reason == "stop" else []
                out.append(([*ids, *event.token_ids, *tail], len(ids)))
    return out


@torch.inference_mode()
def corpus_of(engine: Engine, sequences: list[tuple[list[int], int]], device: str) -> Corpus:
    """The backbone's hidden states over whole sequences, in groups of similar length."""
    c, runner = engine.config, engine.runner
    T = max(len(ids) for ids, _ in sequences)
    N, taps, H = len(sequences), len(c.dspark_target_layer_ids), c.hidden_size
    ids_NT = torch.full((N, T), c.pad_token_id, dtype=torch.int64)
    taps_NT = torch.zeros((N, T, taps, H), dtype=torch.bfloat16, device=device)
    hidden_NT = torch.zeros((N, T, H), dtype=torch.bfloat16, device=device)
    per_row = -(-T // BLOCK)
    group = max(1, min(runner.kv.slots, runner.kv.blocks // per_row, 16_384 // T))
    for start in range(0, N, group):
        part = sequences[start : start + group]
        rows = [
            RowInput(ids, 0, len(ids), b + 1, range(1 + b * per_row, 1 + (b + 1) * per_row), logits="all")
            for b, (ids, _) in enumerate(part)
        ]
        batch = build_batch(rows, runner.kv.layout, ngram=c.engram_max_ngram_size, device=device)
        out = runner.model.forward(batch, runner.kv, runner.ops, runner.mesh)
        normed = runner.ops.rms_norm(out.hidden, runner.model.weights.norm, c.rms_norm_eps)
        row, pos = start + batch.row_T, batch.pos_T
        taps_NT[row, pos] = out.taps.bfloat16()
        hidden_NT[row, pos] = normed.bfloat16()
    for i, (ids, _) in enumerate(sequences):
        ids_NT[i, : len(ids)] = torch.tensor(ids)
    lengths = torch.tensor([[p, len(ids)] for ids, p in sequences])
    return Corpus(ids_NT.to(device), lengths[:, 0].to(device), lengths[:, 1].to(device), taps_NT, hidden_NT)


# ---------------------------------------------------------------------------------- training


def losses(drafted: Drafted, target: Tensor, labels: Tensor, valid: Tensor) -> dict[str, Tensor]:
    """Weighted means over valid slots. target f32 [B, A, J, V] probabilities, labels int64 and valid bool [B, A, J]."""
    J = labels.shape[-1]
    weight = valid * torch.exp(-torch.arange(J, device=labels.device) / DECAY)
    total = weight.sum().clamp(min=1)
    distance = (drafted.logits.softmax(-1) - target).abs().sum(-1)
    accepted = (1 - 0.5 * distance).detach()
    parts = {
        "ce": F.cross_entropy(drafted.logits.flatten(0, 2), labels.flatten(), reduction="none").view_as(weight),
        "l1": distance,
        "confidence": F.binary_cross_entropy_with_logits(drafted.confidence, accepted, reduction="none"),
    }
    return {name: (value * weight).sum() / total for name, value in parts.items()} | {
        "accept": (accepted * valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
    }


def train(config: ModelConfig, corpus: Corpus, params: dict[str, Tensor], frozen: Frozen, settings: Settings):
    """Update ``params`` until the time or the steps are over; the last losses."""
    device = corpus.ids.device
    blocks = DraftBlocks(config, frozen, torch.bfloat16 if device.type == "cuda" else torch.float32)
    trained = [v.requires_grad_() for n, v in params.items() if ".gate.bias" not in n]
    matrices = [v for v in trained if v.dim() > 1]
    vectors = [v for v in trained if v.dim() == 1]
    optimiser = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.01}, {"params": vectors, "weight_decay": 0.0}],
        lr=settings.rate, betas=(0.9, 0.95), fused=device.type == "cuda",
    )  # fmt: skip
    generator = torch.Generator(device=device).manual_seed(settings.seed)
    J = config.dspark_block_size
    slots = torch.arange(J, device=device)
    begin, done, found = time.monotonic(), 0, {}
    while True:
        elapsed = (time.monotonic() - begin) / settings.train_s
        progress = elapsed if settings.steps is None else done / settings.steps
        if progress >= 1 or elapsed >= 1:
            break
        for group in optimiser.param_groups:
            group["lr"] = settings.rate * min(1.0, progress / 0.03 + 0.02) * max(0.02, min(1.0, (1 - progress) / 0.5))
        pick = torch.randint(len(corpus.ids), (settings.batch,), generator=generator, device=device)
        prompt, length = corpus.prompts[pick].unsqueeze(1), corpus.lengths[pick].unsqueeze(1)
        share = torch.rand((settings.batch, settings.anchors), generator=generator, device=device)
        anchors = prompt + (share * (length - prompt - 1).clamp(min=1)).long()  # a successor exists
        longest = min(corpus.ids.shape[1], -(-int(length.max()) // 16) * 16)
        ids = corpus.ids[pick, :longest]
        place = anchors.unsqueeze(2) + slots
        valid = place + 1 < length.unsqueeze(2)
        labels = ids.gather(1, (place + 1).clamp(max=longest - 1).flatten(1)).view_as(place)
        at = place.clamp(max=longest - 1).flatten(1)
        hidden = corpus.hidden[pick.unsqueeze(1), at].float()
        with torch.no_grad():
            target = F.linear(hidden, frozen.head).softmax(-1).view(*place.shape, -1)
        found = losses(blocks(stored(params), corpus.taps[pick, :longest], ids, anchors), target, labels, valid)
        loss = sum((LOSS[name] * found[name] for name in LOSS), torch.zeros((), device=device))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        done += 1
        if done % 200 == 0 or done == settings.steps:
            say("step", step=done, progress=round(progress, 3), **readable(found))
    return done, readable(found)


def readable(found: dict[str, Tensor]) -> dict[str, Any]:
    return {n: [round(x, 4) for x in v.tolist()] if v.dim() else round(float(v), 4) for n, v in found.items()}


# ----------------------------------------------------------------------------- export, calibration


def write(checkpoint: Path, params: dict[str, Tensor], out: Path, extra: dict[str, bytes]) -> None:
    """The checkpoint with the draft blocks: backbone values as stored, which the formats hold exactly."""
    with torch.no_grad():
        values = {n: v.detach().cpu().float() for n, v in stored(params).items()}
    for name in list(values):
        if name.endswith("gate.bias_vl"):
            values[name] = values[name.removesuffix("_vl")]
    backbone = {n: v for n, v in read_back(checkpoint).items() if not n.startswith("mtp.")}
    raw = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
    sides = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
    files: dict[str, bytes | Path] = {n: checkpoint / n for n in sides}
    write_checkpoint(
        out, raw, backbone | to_official(values), extra_files=files | extra, groups=("backbone", "engram", "draft")
    )


@dataclass
class Judged:
    """Fully verified steps: raw confidence logits, drafts accepted, positions observed."""

    logits: list[tuple[float, ...]]
    accepted: list[int]
    observed: list[int]


def judge(checkpoint: Path, prompts: list[list[int]], regime: Regime, settings: Settings) -> tuple[Judged, float]:
    """Run the engine with every draft verified; what it accepted, and tokens per step and sequence."""
    mode = "rejection" if regime == "rejection" else "coupled"
    out = Judged([], [], [])
    with open_engine(checkpoint, settings, "spec.verify=fixed", f"spec.mode={mode}") as engine:
        spec = engine.runner.speculation
        assert spec is not None
        collect = engine.runner.collect

        def watched(flight):
            before = dict(engine.runner.confidence)
            result = collect(flight)
            for uid, verified in result.verified.items():
                if verified == spec.tokens and uid in before:
                    accepted = result.accepted[uid]
                    cut = len(result.tokens[uid]) <= accepted  # an end inside accepted drafts: nothing is known behind
                    out.logits.append(before[uid])
                    out.accepted.append(accepted)
                    out.observed.append(accepted if cut else verified)
            return result

        engine.runner.collect = watched
        temperature = 0.0 if regime == "greedy" else 1.0
        requests = [
            Request(str(i), tuple(ids), SamplingParams(
                temperature=temperature, seed=None if temperature == 0 else 7 * i, max_tokens=settings.answer_tokens))
            for i, ids in enumerate(prompts)
        ]  # fmt: skip
        engine.generate(requests)
        return out, engine.drafts.tokens_per_row


def report(regime: str, judged: Judged, calibration: Any, per_row: float) -> dict[str, Any]:
    accepted, observed = np.array(judged.accepted), np.array(judged.observed)
    width = len(judged.logits[0])
    given = [int(((accepted >= k) & (observed > k)).sum()) for k in range(width)]
    stood = [int(((accepted > k) & (observed > k)).sum()) for k in range(width)]
    return {
        "regime": regime,
        "steps": len(accepted),
        "tokens_per_step": round(per_row, 3),
        "accept_given_before": [round(s / max(1, g), 4) for s, g in zip(stood, given, strict=True)],
        "accept_survival": [round(s / max(1, int((observed > k).sum())), 4) for k, s in enumerate(stood)],
        "temperatures": calibration.temperatures,
        "ece": [[round(r.ece, 4) for r in rows] for rows in (calibration.before, calibration.after)],
        "auc": [[r.auc and round(r.auc, 4) for r in rows] for rows in (calibration.before, calibration.after)],
        "brier": [[round(r.brier, 4) for r in rows] for rows in (calibration.before, calibration.after)],
    }  # fmt: skip


def run(args: argparse.Namespace) -> dict[str, Any]:
    settings = Settings(
        device=args.device, rows=args.rows, answer_tokens=args.answer_tokens, generate_s=args.generate_minutes * 60,
        train_s=args.minutes * 60, steps=args.steps, batch=args.batch, anchors=args.anchors, rate=args.rate,
        seed=args.seed, calibrate_prompts=args.calibrate_prompts,
    )  # fmt: skip
    began = time.monotonic()
    prompts = read_prompts(args.prompts)
    kept, fresh = prompts[settings.calibrate_prompts :], prompts[: settings.calibrate_prompts]
    source = args.checkpoint
    config = Checkpoint.open(source).config
    with open_engine(source, settings, "spec.verify=off") as engine:
        sequences = [s for s in answers(engine, kept, settings) if len(s[0]) - s[1] > 2]
        tokens = sum(len(ids) - p for ids, p in sequences)
        say("answered", sequences=len(sequences), tokens=tokens, seconds=round(time.monotonic() - began, 1))
        corpus = corpus_of(engine, sequences, settings.device)
    say("corpus", shape=list(corpus.taps.shape), seconds=round(time.monotonic() - began, 1))
    backbone = read_back(source)
    frozen = Frozen(*(backbone[n].to(settings.device) for n in ("embed.weight", "head.weight")))
    start = initial_parameters(config, backbone, seed=settings.seed)
    params = {n: v.to(settings.device) for n, v in start.items()}
    steps, final = train(config, corpus, params, frozen, settings)
    say("trained", steps=steps, seconds=round(time.monotonic() - began, 1), **final)
    del corpus
    plain = args.out.with_name(args.out.name + ".uncalibrated")
    write(source, params, plain, {})
    rows, reports = [], []
    for regime in REGIMES:
        judged, per_row = judge(plain, fresh, regime, settings)
        rows.append(calibrate(np.array(judged.logits), np.array(judged.accepted), regime, np.array(judged.observed)))
        reports.append(report(regime, judged, rows[-1], per_row))
        say("calibrated", **reports[-1])
    dataset = f"{len(fresh)} prompts of {args.prompts.name} that were not trained on"
    record = json.dumps(calibration_record(rows, dataset=dataset)).encode() + b"\n"
    write(source, params, args.out, {CONFIDENCE_FILE: record})
    size = sum(f.stat().st_size for f in args.out.iterdir())
    result = {"steps": steps, "losses": final, "sequences": len(sequences), "tokens": tokens, "megabytes": size / 1e6,
              "seconds": round(time.monotonic() - began, 1), "regimes": reports}  # fmt: skip
    args.report.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    say("done", megabytes=round(size / 1e6, 2), seconds=result["seconds"])
    return result


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="train the draft heads of nano")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="requests that recipes.nano.measure wrote")
    parser.add_argument("--out", type=Path, required=True, help="new checkpoint folder")
    parser.add_argument("--report", type=Path, required=True)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--minutes", type=float, default=2.0, help="training")
    parser.add_argument("--generate-minutes", type=float, default=0.7, help="the backbone's own answers")
    parser.add_argument("--steps", type=int, help="train at most this many steps")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=96)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--anchors", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--calibrate-prompts", type=int, default=384)
    return parser.parse_args(argv)


def main() -> None:
    run(arguments())


if __name__ == "__main__":
    main()
