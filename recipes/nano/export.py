"""Turn the weights of a training run into an official-format checkpoint directory.

    python -m recipes.nano.export --weights RUN_DIR --data DATA_DIR --out CHECKPOINT_DIR

``--data`` gives config.json and the tokenizer files, ``--weights`` the weights-*.safetensors pieces. The values are
already those of the official formats, so writing them quantises without further loss; this is verified by reading the
checkpoint back. The draft blocks are not part of it.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from deepinfer_engine.weights.checkpoint import Checkpoint
from deepinfer_engine.weights.writer import write_checkpoint
from deepinfer_kernels.reference import quantise
from recipes.nano.model import stored
from recipes.nano.parameters import from_official, to_official

SIDE_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")


def load_pieces(run: Path) -> dict[str, Tensor]:
    """All tensors of the weights-*.safetensors pieces, f32; raises ``FileNotFoundError`` when there are none."""
    pieces = sorted(run.glob("weights-*.safetensors"))
    if not pieces:
        raise FileNotFoundError(f"{run}: no weights-*.safetensors")
    out: dict[str, Tensor] = {}
    for piece in pieces:
        out |= {name: value.float() for name, value in load_file(str(piece)).items()}
    return out


def load_start(source: Path) -> dict[str, Tensor]:
    """Training values of a run's folder, or the stored values of a checkpoint, under the training names."""
    return (
        from_official(read_back(source)) if (source / "model.safetensors.index.json").is_file() else load_pieces(source)
    )


def export(weights: dict[str, Tensor], data: Path, out: Path) -> dict[str, Tensor]:
    """Write the checkpoint of stacked training weights; returns the official float tensors that went in."""
    source = to_official(stored(weights, weights=True))
    raw = json.loads((data / "config.json").read_text(encoding="utf-8"))
    files = {name: data / name for name in SIDE_FILES}
    write_checkpoint(out, raw, source, extra_files=files, groups=("backbone", "engram"))
    return source


def read_back(checkpoint: Path) -> dict[str, Tensor]:
    """f32 values of every stored weight, as the engine reads the checkpoint."""
    opened = Checkpoint.open(checkpoint)
    decode = {
        "fp8": quantise.dequantise_fp8_tiles,
        "fp4": quantise.dequantise_mxfp4,
        "table": quantise.dequantise_rows,
    }
    out: dict[str, Tensor] = {}
    for name, spec in opened.plan.items():
        if spec.is_scale or not opened.has(name):
            continue
        value = opened.tensor(name)
        if spec.kind in decode:
            scale = opened.tensor(f"{name.removesuffix('.weight')}.scale")
            out[name] = decode[spec.kind](value.view(torch.uint8), scale.view(torch.uint8))
        else:
            out[name] = value.float()
    return out


def largest_difference(checkpoint: Path, source: dict[str, Tensor]) -> float:
    """Largest |stored - source| over all tensors; the names must be the same."""
    stored = read_back(checkpoint)
    if stored.keys() != source.keys():
        raise ValueError(f"{checkpoint}: stores other weights than {len(source)} trained ones")
    return max(float((stored[name] - value).abs().max()) for name, value in source.items())


def main() -> None:
    parser = argparse.ArgumentParser(description="export nano in the official checkpoint format")
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = export(load_pieces(args.weights), args.data, args.out)
    size = sum(f.stat().st_size for f in args.out.iterdir())
    difference = largest_difference(args.out, source)
    print(f"{args.out}: {len(source)} weights, {size / 1e6:.2f} MB, read back within {difference:g}", file=sys.stderr)
    if difference:
        raise SystemExit("the stored values differ from the trained ones")


if __name__ == "__main__":
    main()
