"""Throughput of this engine beside transformers' ``generate``, on the same cores, in one process, alternating.

    pip install 'transformers>=5.24,<6'        # measured beside, never a dependency
    PYTHONPATH=.:engine:kernels python -m recipes.peers.beside_transformers --out rows.jsonl [--rounds 3]

The peer runs a V4 model of nano's shape (layers, widths, heads, experts, window, streams; V4 compresses keys by 4 and
128 where V4.1 does by 2 and 1, and has no n-gram memory, so its step is the lighter one) with random weights: only
speed is compared. Requests have mixed lengths. The peer takes ``concurrency`` of them as one left-padded batch that
runs until its longest answer ends, as ``generate`` does; padding and tokens beyond a request's own length do not count.

For each concurrency: useful tokens per second of both, and the ratio split into two factors,

    ours(c) / theirs(c)  =  [ours(1) / theirs(1)]  x  [ours(c) / ours(1)] / [theirs(c) / theirs(1)]
                             gain per step             gain from batching

The last row says where the time of our decode step goes, by operation.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

from deepinfer_engine.runtime.threads import set_thread_defaults

THREADS = set_thread_defaults(rows=32)  # before torch is imported

import torch  # noqa: E402

from deepinfer_engine.config.model import ModelConfig  # noqa: E402
from deepinfer_engine.engine import Engine  # noqa: E402
from deepinfer_engine.types import Request, SamplingParams  # noqa: E402
from deepinfer_kernels.ops import OPS  # noqa: E402

PROMPT_TOKENS = (16, 192)
ANSWER_TOKENS = (8, 32)
CONCURRENCY = (1, 8, 32, 128)
SEED = 5
PAD_ID = 2
ORDINARY_IDS = (300, 1500)  # byte-pair tokens of nano's vocabulary, no control token among them
#: the ways transformers runs its experts; the fastest at 32 rows is the one compared
EXPERT_PATHS = ("eager", "grouped_mm", "batched_mm")


@dataclass(frozen=True)
class Load:
    """Requests of one wave: prompt ids and the number of tokens wanted of each."""

    prompts: tuple[tuple[int, ...], ...]
    answers: tuple[int, ...]

    @property
    def useful_tokens(self) -> int:
        return sum(self.answers)


def draw_load(count: int, seed: int) -> Load:
    """``count`` requests with uniform prompt and answer lengths and random ids of ordinary tokens."""
    rng = Random(seed)
    prompts = tuple(
        tuple(rng.randrange(*ORDINARY_IDS) for _ in range(rng.randint(*PROMPT_TOKENS))) for _ in range(count)
    )
    return Load(prompts, tuple(rng.randint(*ANSWER_TOKENS) for _ in range(count)))


# ------------------------------------------------------------------ the peer


def peer_model(c: ModelConfig, dtype: torch.dtype) -> Any:
    """transformers' V4 model with the shape of ``c`` and random weights; exits with 3 where it is not installed."""
    try:
        from transformers import DeepseekV4Config, DeepseekV4ForCausalLM  # pyright: ignore
    except ImportError:
        print("error: transformers with DeepSeek-V4 is not installed", file=sys.stderr)
        print("\nhint: pip install 'transformers>=5.24,<6'", file=sys.stderr)
        raise SystemExit(3) from None
    kinds = {0: "sliding_attention", 2: "compressed_sparse_attention", 1: "heavily_compressed_attention"}
    rotary = c.qk_rope_head_dim / c.head_dim
    main = {"rope_type": "default", "rope_theta": c.rope_theta, "partial_rotary_factor": rotary}
    compress = {"rope_type": "default", "rope_theta": c.compress_rope_theta, "partial_rotary_factor": rotary}
    config = DeepseekV4Config(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        moe_intermediate_size=c.moe_intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=1,
        head_dim=c.head_dim,
        q_lora_rank=c.q_lora_rank,
        num_experts_per_tok=c.num_experts_per_tok,
        n_routed_experts=c.n_routed_experts,
        n_shared_experts=1,
        max_position_embeddings=c.max_position_embeddings,
        layer_types=[kinds[r] for r in c.compress_ratios[: c.num_hidden_layers]],
        mlp_layer_types=["moe"] * c.num_hidden_layers,
        hc_mult=c.hc_mult,
        sliding_window=c.sliding_window,
        o_groups=c.o_groups,
        o_lora_rank=c.o_lora_rank,
        index_n_heads=c.index_n_heads,
        index_head_dim=c.index_head_dim,
        index_topk=c.index_topk,
        routed_scaling_factor=c.routed_scaling_factor,
        swiglu_limit=c.swiglu_limit,
        partial_rotary_factor=rotary,
        rope_parameters={"main": main, "compress": compress},
        pad_token_id=PAD_ID,
        bos_token_id=0,
        eos_token_id=1,
    )
    torch.manual_seed(SEED)
    return DeepseekV4ForCausalLM(config).to(dtype).eval()


def run_peer(model: Any, load: Load) -> float:
    """Seconds of one left-padded batch, greedy, until its longest answer is complete."""
    width, count = max(map(len, load.prompts)), len(load.prompts)
    ids = torch.full((count, width), PAD_ID)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(load.prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    steps = max(load.answers)
    began = time.perf_counter()
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=steps, min_new_tokens=steps, do_sample=False
        )
    assert out.shape == (count, width + steps)
    return time.perf_counter() - began


def pick_experts(model: Any, load: Load) -> dict[str, float]:
    """Seconds of each expert path on ``load``; the model is left on the fastest."""
    seconds = {}
    for path in EXPERT_PATHS:
        try:
            model.set_experts_implementation(path)
            seconds[path] = run_peer(model, load)
        except (RuntimeError, ValueError) as exc:
            print(f"note: transformers' {path} experts do not run here: {str(exc).splitlines()[0]}", file=sys.stderr)
    model.set_experts_implementation(min(seconds, key=lambda p: seconds[p]))
    return seconds


# -------------------------------------------------------------------- our side


def requests_of(load: Load, tag: str) -> list[Request]:
    return [
        Request(f"{tag}-{i}", prompt, SamplingParams(max_tokens=answer, ignore_eos=True))
        for i, (prompt, answer) in enumerate(zip(load.prompts, load.answers, strict=True))
    ]


def run_ours(engine: Engine, load: Load, tag: str) -> float:
    """Seconds until all requests of the wave are complete."""
    requests = requests_of(load, tag)
    began = time.perf_counter()
    done = engine.generate(requests)
    seconds = time.perf_counter() - began
    assert sum(len(c.token_ids) for c in done) == load.useful_tokens
    return seconds


def decode_profile(engine: Engine, rows: int, steps: int) -> dict[str, Any]:
    """Share of a decode step of ``rows`` rows by operation; the rest of the forward pass and the host are named."""
    spent: dict[str, float] = defaultdict(float)

    def timed(name: str, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        began = time.perf_counter()
        out = fn(*args, **kwargs)
        spent[name] += time.perf_counter() - began
        return out

    load = draw_load(rows, SEED + 2)
    for request in requests_of(Load(load.prompts, (steps + 64,) * rows), "profile"):
        engine.submit(request)
    while engine.scheduler.waiting or any(
        len(s.token_ids) < s.num_prompt + 2 for s in engine.scheduler.running.values()
    ):
        engine.step()
    ops = engine.runner.ops
    plain = {name: getattr(ops, name) for name in OPS}
    for name, fn in plain.items():
        setattr(ops, name, partial(timed, name, fn))
    began = time.perf_counter()
    first = len(engine.times.run_ms)
    for _ in range(steps):
        engine.step()
    total = time.perf_counter() - began
    for name, fn in plain.items():
        setattr(ops, name, fn)
    run_s = sum(list(engine.times.run_ms)[first:]) / 1000
    for request_id in [f"profile-{i}" for i in range(rows)]:
        engine.abort(request_id)
    families: dict[str, float] = defaultdict(float)
    for name, seconds in spent.items():
        families[OPS[name].family] += seconds
    ranked = sorted(spent.items(), key=lambda item: -item[1])
    return {
        "kind": "profile",
        "rows": rows,
        "steps": steps,
        "step_ms": round(total / steps * 1e3, 2),
        "outside_forward_share": round(1 - run_s / total, 3),
        "between_operations_share": round((run_s - sum(spent.values())) / total, 3),
        "family_shares": {k: round(v / total, 3) for k, v in sorted(families.items(), key=lambda kv: -kv[1])},
        "operation_shares": {k: round(v / total, 3) for k, v in ranked[:12]},
    }


# ------------------------------------------------------------------ the comparison


def compare(engine: Engine, peer: Any, rounds: int, report: Callable[[dict[str, Any]], None]) -> None:
    """One row per concurrency with medians over alternating rounds."""
    base: tuple[float, float] | None = None
    for count in CONCURRENCY:
        waves = [draw_load(count, SEED + 100 * r) for r in range(rounds)]
        ours, theirs = [], []
        for r, load in enumerate(waves):
            first, second = (ours, theirs) if r % 2 == 0 else (theirs, ours)
            for side in (first, second):
                seconds = run_ours(engine, load, f"{count}-{r}") if side is ours else run_peer(peer, load)
                side.append(load.useful_tokens / seconds)
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        mine, peers = median(ours), median(theirs)
        base = base or (mine, peers)
        report(
            {
                "kind": "throughput",
                "concurrency": count,
                "rounds": rounds,
                "ours_tok_s": round(mine, 2),
                "peer_tok_s": round(peers, 2),
                "ratio": round(median(ratios), 2),
                "ratio_min": round(min(ratios), 2),
                "ratio_max": round(max(ratios), 2),
                "gain_per_step": round(base[0] / base[1], 2),
                "gain_from_batching": round((mine / base[0]) / (peers / base[1]), 2),
            }
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, help="JSON lines, one per concurrency and a profile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cache-dir", type=Path, help="folder of compiled kernels")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"{args.out} exists")
    sets = ["sched.max_rows_per_rank=128", "cache.hbm_tokens_per_rank=65536"]
    if args.cache_dir is not None:
        sets.append(f"kernels.cache_dir={args.cache_dir}")
    rows: list[dict[str, Any]] = []

    def report(row: dict[str, Any]) -> None:
        rows.append(row)
        print(json.dumps(row, allow_nan=False), flush=True)

    with Engine.open("cpu-nano", sets=sets) as engine:
        trial = draw_load(32, SEED + 1)
        chosen = {}
        for dtype in (torch.float32, torch.bfloat16):
            model = peer_model(engine.config, dtype)
            seconds = pick_experts(model, Load(trial.prompts, (4,) * 32))
            chosen[str(dtype).removeprefix("torch.")] = (min(seconds.values()), model, seconds)
        dtype_name, (_, peer, _) = min(chosen.items(), key=lambda item: item[1][0])
        import transformers  # pyright: ignore

        report(
            {
                "kind": "setup",
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "threads": torch.get_num_threads(),
                "cores": os.cpu_count(),
                "machine": platform.machine(),
                "peer_dtype": dtype_name,
                "peer_trial_s": {k: {p: round(s, 2) for p, s in v[2].items()} for k, v in chosen.items()},
                "prompt_tokens": PROMPT_TOKENS,
                "answer_tokens": ANSWER_TOKENS,
                "our_backends": sorted({i.backend for i in engine.runner.ops.chosen.values()}),
            }
        )
        del chosen
        run_ours(engine, trial, "warm")
        compare(engine, peer, args.rounds, report)
        report(decode_profile(engine, 32, 40))
    part = args.out.with_name(args.out.name + ".part")
    part.write_text("".join(json.dumps(r, allow_nan=False) + "\n" for r in rows), encoding="utf-8")
    os.replace(part, args.out)


if __name__ == "__main__":
    main()
