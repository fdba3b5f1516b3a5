"""Greedy generation on the training model and exact scoring of held-out rows (no cache: the whole row every step)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from recipes.nano.model import Model, Params


@dataclass(frozen=True)
class Rows:
    """Padded token rows: ids [N, length], lengths, prompt lengths, and answer lengths (with EOS), all int64 [N]."""

    ids: Tensor
    lengths: Tensor
    prompts: Tensor
    answers: Tensor

    def to(self, device: torch.device) -> Rows:
        return Rows(*(v.to(device) for v in (self.ids, self.lengths, self.prompts, self.answers)))


def load_rows(arrays: dict[str, np.ndarray], prefix: str, width: int, pad: int) -> Rows:
    """Unpack one set of data.npz into rows of ``width`` tokens."""
    lengths = arrays[f"{prefix}lengths"].astype(np.int64)
    if lengths.max() > width:
        raise ValueError(f"{prefix or 'training'} rows have up to {lengths.max()} tokens, the width is {width}")
    ids = np.full((len(lengths), width), pad, dtype=np.int16)
    ids[np.arange(width) < lengths[:, None]] = arrays[f"{prefix}tokens"].astype(np.int16)
    return Rows(
        torch.from_numpy(ids),
        torch.from_numpy(lengths),
        torch.from_numpy(arrays[f"{prefix}prompts"].astype(np.int64)),
        torch.from_numpy(arrays[f"{prefix}answers"].astype(np.int64)),
    )


@torch.no_grad()
def generate(model: Model, w: Params, rows: Rows, *, eos: int) -> tuple[Tensor, Tensor]:
    """(ids [N, width], end [N]) of greedy continuations of the prompts, up to the width or EOS (included)."""
    width = rows.ids.shape[1]
    column = torch.arange(width, device=rows.ids.device)
    ids = torch.where(column < rows.prompts.unsqueeze(1), rows.ids.long(), eos)
    end = rows.prompts.clone()
    done = end >= width
    while not bool(done.all()):
        hidden = model.hidden(w, ids[:, : int(end.max())])  # later columns cannot matter
        last = hidden.gather(1, (end - 1).view(-1, 1, 1).expand(-1, 1, hidden.shape[-1])).squeeze(1)
        token = model.logits(w, last).argmax(-1)
        here = (column == end.unsqueeze(1)) & ~done.unsqueeze(1)
        ids = torch.where(here, token.unsqueeze(1), ids)
        end = end + (~done).long()
        done = done | (token == eos) | (end >= width)
    return ids, end


def correct(ids: Tensor, end: Tensor, rows: Rows) -> Tensor:
    """bool [N]: the continuation closes with the expected answer and EOS, right after the end of its thinking.

    The token before the answer (``</think>``, given in the prompt when thinking is off) is compared too, so an answer
    that only ends like the expected one does not count.
    """
    width = ids.shape[1]
    column = torch.arange(width, device=ids.device)
    count = rows.answers + 1
    shifted = column.unsqueeze(0) - count.unsqueeze(1)  # columns of the tail, right-aligned at `end` and `lengths`
    given = (end.unsqueeze(1) + shifted).clamp(0, width - 1)
    wanted = (rows.lengths.unsqueeze(1) + shifted).clamp(0, width - 1)
    same = ids.gather(1, given) == rows.ids.long().gather(1, wanted)
    return (same | (column >= count.unsqueeze(1))).all(1) & (end - count >= rows.prompts - 1)


def evaluate(model: Model, w: Params, rows: Rows, *, eos: int, batch: int) -> tuple[float, Tensor, Tensor]:
    """(share correct, ids, bool [N]) over all rows, ``batch`` at a time."""
    hits, outs = [], []
    for start in range(0, len(rows.lengths), batch):
        part = Rows(*(v[start : start + batch] for v in (rows.ids, rows.lengths, rows.prompts, rows.answers)))
        ids, end = generate(model, w, part, eos=eos)
        hits.append(correct(ids, end, part))
        outs.append(ids)
    hit = torch.cat(hits)
    return float(hit.float().mean()), torch.cat(outs), hit
