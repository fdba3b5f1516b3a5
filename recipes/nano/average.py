"""Average the weights of two training runs, as the official formats hold them.

    python -m recipes.nano.average --first RUN_DIR --second RUN_DIR --share 0.8 --out DIR

writes ``share`` of the first run's values plus the rest of the second's, rounded to the official formats, as
weights-*.safetensors that ``export`` reads. Two runs can be averaged when one was started from the other.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from torch import Tensor

from recipes.nano.export import load_pieces
from recipes.nano.model import stored
from recipes.nano.train import save_pieces, saved


def average(first: dict[str, Tensor], second: dict[str, Tensor], share: float) -> dict[str, Tensor]:
    """``share`` x first + (1 - share) x second in stored values, in the types of a run's files.

    Raises ``ValueError`` for a share outside 0..1 and for runs of different models.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"the share is {share}, expected 0 to 1")
    shapes = [{n: tuple(v.shape) for n, v in w.items()} for w in (first, second)]
    if shapes[0] != shapes[1]:
        other = sorted(n for n in shapes[0].keys() | shapes[1].keys() if shapes[0].get(n) != shapes[1].get(n))
        raise ValueError(f"the runs are of different models: {other[0]} and {len(other) - 1} more differ")
    mixed = {n: first[n].float() * share + second[n].float() * (1 - share) for n in first}
    return saved(stored(mixed, weights=True))


def main() -> None:
    parser = argparse.ArgumentParser(description="average two training runs of nano")
    parser.add_argument("--first", type=Path, required=True)
    parser.add_argument("--second", type=Path, required=True)
    parser.add_argument("--share", type=float, required=True, help="of the first run, 0 to 1")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    weights = average(load_pieces(args.first), load_pieces(args.second), args.share)
    args.out.mkdir(parents=True, exist_ok=True)
    pieces = save_pieces(args.out, weights)
    print(f"{args.out}: {len(weights)} weights in {len(pieces)} pieces", file=sys.stderr)


if __name__ == "__main__":
    main()
