"""Score an exported checkpoint on held-out rows with the training model, greedy, on any device.

    python -m recipes.nano.score --checkpoint DIR --data DIR [--set two_digit] [--count N] [--numerics float|official]

Prints one JSON line per set: items, correct, share. ``float`` is f32 without rounding, ``official`` adds the roundings
of activations and cache rows.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer

from deepinfer_engine.config.model import load_model_config
from recipes.nano import experts
from recipes.nano.engram import token_classes
from recipes.nano.evaluate import Rows, evaluate, load_rows
from recipes.nano.export import read_back
from recipes.nano.model import Model, Numerics, Ops
from recipes.nano.parameters import from_official


def score(checkpoint: Path, rows: Rows, *, numerics: Numerics, device: torch.device, batch: int) -> tuple[int, int]:
    """(correct, items) of ``rows``."""
    config = load_model_config(checkpoint)
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    weights = {n: v.to(device) for n, v in from_official(read_back(checkpoint)).items()}
    classes = torch.from_numpy(token_classes(tokenizer)).to(device)
    routed = experts.dense_experts if device.type == "cuda" else experts.grouped_experts
    model = Model(config, classes, numerics=numerics, ops=Ops(routed=routed))
    _, _, hit = evaluate(model, weights, rows.to(device), eos=config.eos_token_id, batch=batch)
    return int(hit.sum()), len(hit)


def main() -> None:
    parser = argparse.ArgumentParser(description="score an exported nano checkpoint")
    parser.add_argument("--checkpoint", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--set", dest="sets", action="append", help="a held-out set; default two_digit; repeatable")
    parser.add_argument("--count", type=int, help="only the first COUNT items of a set")
    parser.add_argument("--numerics", choices=("float", "official"), default="float")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=64)
    args = parser.parse_args()
    pad = load_model_config(args.checkpoint).pad_token_id
    with np.load(args.data / "data.npz") as file:
        arrays = {name: file[name] for name in file.files if name.startswith("eval/")}
    numerics = Numerics(torch.float32, official=args.numerics == "official")
    for name in args.sets or ["two_digit"]:
        width = int(arrays[f"eval/{name}/lengths"].max()) + 8  # room for an answer that runs on
        rows = load_rows(arrays, f"eval/{name}/", width, pad)
        rows = Rows(*(v[: args.count] for v in (rows.ids, rows.lengths, rows.prompts, rows.answers)))
        hits, items = score(
            args.checkpoint, rows, numerics=numerics, device=torch.device(args.device), batch=args.batch
        )
        print(json.dumps({"set": name, "items": items, "correct": hits, "share": round(hits / items, 4)}), flush=True)


if __name__ == "__main__":
    main()
