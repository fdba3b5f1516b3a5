"""Random batch compositions under ``numerics.batch_invariant``: the logits of every text must keep their bits.

    PYTHONPATH=.:engine:kernels python -m recipes.host.invariance --profile h200x1-nano --out rows.jsonl

Each text runs alone in one chunk first. A composition takes some of the texts in random order and cuts each into one
to four chunks (one token is a decode row) that fall into random steps, so that a chunk meets other texts' prompts and
decode rows. All logits are compared with those of the text alone, bit by bit. Exit code 6 where one differs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from deepinfer_engine.runtime.threads import set_thread_defaults

THREADS = set_thread_defaults(rows=32)  # before torch is imported

import torch  # noqa: E402

from deepinfer_engine.cache.state import KVState  # noqa: E402
from deepinfer_engine.config.model import BLOCK_TOKENS  # noqa: E402
from deepinfer_engine.engine import Engine  # noqa: E402
from deepinfer_engine.runtime.batch import RowInput, build_batch  # noqa: E402
from recipes.host.pairs import ORDINARY_IDS  # noqa: E402

STEPS = 4
MOST_TEXTS = 12


@dataclass(frozen=True)
class Composition:
    """Per step the chunks (text, start, end) in their order."""

    steps: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def texts(self) -> list[int]:
        return sorted({text for step in self.steps for text, _, _ in step})


def draw_texts(count: int, longest: int, seed: int = 0) -> list[list[int]]:
    """Random texts, some longer than a window and a block, some of a few tokens."""
    rng = Random(seed)
    lengths = [rng.choice((rng.randint(2, 16), rng.randint(17, 160), rng.randint(161, longest))) for _ in range(count)]
    return [[rng.randrange(*ORDINARY_IDS) for _ in range(n)] for n in lengths]


def draw_composition(texts: Sequence[Sequence[int]], rng: Random) -> Composition:
    """Some of the texts, each cut at random places into chunks of different steps, in random order within a step."""
    chosen = rng.sample(range(len(texts)), rng.randint(1, min(MOST_TEXTS, len(texts))))
    steps: list[list[tuple[int, int, int]]] = [[] for _ in range(STEPS)]
    for text in chosen:
        size = len(texts[text])
        cuts = sorted(rng.sample(range(1, size), min(size - 1, rng.randrange(STEPS))))
        if cuts and rng.random() < 0.5:
            cuts[-1] = size - 1  # the last token decodes
            cuts = sorted(set(cuts))
        places = sorted(rng.sample(range(STEPS), len(cuts) + 1))
        for step, start, end in zip(places, [0, *cuts], [*cuts, size], strict=True):
            steps[step].append((text, start, end))
    return Composition(tuple(tuple(rng.sample(step, len(step))) for step in steps if step))


class Bench:
    """The model of an open engine, run on rows of its own."""

    def __init__(self, engine: Engine, texts: Sequence[Sequence[int]]):
        self.runner = engine.runner
        self.texts = texts
        self.blocks = max(-(-len(t) // BLOCK_TOKENS) for t in texts)
        self.alone = [self.run(Composition((((i, 0, len(t)),),)))[i] for i, t in enumerate(texts)]

    def run(self, composition: Composition) -> dict[int, torch.Tensor]:
        """Logits [tokens, V] of every text of a composition, in fresh KV."""
        runner, chosen = self.runner, composition.texts
        slots, blocks = len(chosen), len(chosen) * self.blocks
        kv = KVState(runner.kv.layout, runner.ops, slots=slots, blocks=blocks, device=runner.device)
        out: dict[int, list[torch.Tensor]] = {i: [] for i in chosen}
        for step in composition.steps:
            rows = []
            for text, start, end in step:
                at = chosen.index(text)
                own = list(range(1 + at * self.blocks, 1 + (at + 1) * self.blocks))
                rows.append(RowInput(self.texts[text], start, end - start, at + 1, own, logits="all"))
            ngram = runner.model.config.engram_max_ngram_size
            batch = build_batch(rows, runner.kv.layout, ngram=ngram, device=runner.device)
            logits = runner.model.forward(batch, kv, runner.ops, runner.mesh).logits
            for (text, start, end), part in zip(step, logits.split([e - s for _, s, e in step]), strict=True):
                assert part.shape[0] == end - start
                out[text].append(part)
        return {text: torch.cat(parts) for text, parts in out.items()}

    def differences(self, composition: Composition) -> list[int]:
        """Texts whose logits do not have the bits they have alone."""
        found = self.run(composition)
        return [text for text, logits in found.items() if not torch.equal(logits, self.alone[text])]


def check(engine: Engine, compositions: int, seed: int = 0, *, longest: int = 400) -> dict[str, Any]:
    """Run random compositions on an engine that serves nobody else; what differed."""
    bench = Bench(engine, draw_texts(24, longest))
    rng = Random(seed)
    rows, tokens, bad = 0, 0, []
    began = time.perf_counter()
    for number in range(compositions):
        composition = draw_composition(bench.texts, rng)
        rows += sum(map(len, composition.steps))
        tokens += sum(len(bench.texts[t]) for t in composition.texts)
        bad += [{"composition": number, "text": text} for text in bench.differences(composition)]
    return {
        "kind": "invariance",
        "device": engine.runner.device,
        "batch_invariant": engine.profile.numerics.batch_invariant,
        "numerics": engine.profile.numerics.mode,
        "compositions": compositions,
        "rows": rows,
        "tokens": tokens,
        "different": bad,
        "seconds": round(time.perf_counter() - began, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--profile", default="cpu-nano")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--compositions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=int, default=600, help="tokens of the longest text")
    parser.add_argument("--plain", action="store_true", help="without batch_invariant, to see how many differ then")
    parser.add_argument("--out", type=Path, help="JSON lines")
    args = parser.parse_args(arguments)
    if args.out is not None and args.out.exists():
        parser.error(f"{args.out} exists")
    sets = [*args.set, f"numerics.batch_invariant={str(not args.plain).lower()}"]
    with torch.inference_mode(), Engine.open(args.profile, sets=sets) as engine:
        line = {"profile": args.profile, "set": sets, "torch": torch.__version__}
        line |= check(engine, args.compositions, args.seed, longest=args.longest)
    print(json.dumps(line | {"different": len(line["different"])}, allow_nan=False), flush=True)
    if args.out is not None:
        part = args.out.with_name(args.out.name + ".part")
        part.write_text(json.dumps(line, allow_nan=False) + "\n", encoding="utf-8")
        os.replace(part, args.out)
    if line["different"] and not args.plain:
        print(f"error: {len(line['different'])} texts changed bits", file=sys.stderr)
        raise SystemExit(6)


if __name__ == "__main__":
    main()
