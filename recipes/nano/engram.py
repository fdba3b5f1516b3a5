"""Engram addressing for training: token classes, bucket primes, hash multipliers, row ids.

Every token belongs to a class (its normalised text); the row of an n-gram is the XOR of (class at lag d x odd
multiplier d), modulo the prime of its (order, head) bucket, plus the bucket's offset. Lags before the sequence start
count as the class of the pad token, and stay so for all older lags. Source: the V4.1 release's n-gram memory.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence

import numpy as np
import torch
from tokenizers import Tokenizer

_SPACES = str.maketrans({c: " " for c in "\t\r\n"})
_LONE_SPACE = "\ue000"  # keeps a token that is one space apart from the empty string while stripping


def normalise(text: str) -> str:
    """The key text of one token: NFKC, NFD, accents and case dropped, runs of blanks joined, ends stripped."""
    text = unicodedata.normalize("NFD", unicodedata.normalize("NFKC", text))
    text = "".join(c for c in text if unicodedata.category(c) != "Mn").lower().translate(_SPACES)
    while "  " in text:
        text = text.replace("  ", " ")
    return (_LONE_SPACE if text == " " else text).strip().replace(_LONE_SPACE, " ")


def token_classes(tokenizer: Tokenizer) -> np.ndarray:
    """int64 [V]: class of every token id, numbered by first appearance."""
    classes: dict[str, int] = {}
    out = np.empty(tokenizer.get_vocab_size(), dtype=np.int64)
    for token in range(len(out)):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = str(tokenizer.id_to_token(token)) if "\ufffd" in text else normalise(text) or text
        out[token] = classes.setdefault(key, len(classes))
    return out


def bucket_primes(first: int, layers: int, columns: int) -> list[list[int]]:
    """[layers][columns] successive primes >= ``first``; no prime is used twice."""
    found: list[int] = []
    n = first
    while len(found) < layers * columns:
        if n > 1 and all(n % d for d in range(2, int(n**0.5) + 1)):
            found.append(n)
        n += 1
    return [found[i * columns : (i + 1) * columns] for i in range(layers)]


def multipliers(layer: int, orders: int, classes: int) -> list[int]:
    """Odd int64 multipliers of one layer, one per lag; class x multiplier never overflows."""
    bound = max(1, (2**63 - 1) // classes // 2)
    draw = np.random.default_rng(10007 * layer).integers(0, bound, size=orders, dtype=np.int64)
    return [int(v) * 2 + 1 for v in draw]


def row_ids(
    classes_BT: torch.Tensor,
    *,
    pad_class: int,
    mults: Sequence[int],
    primes: Sequence[int],
    heads: int,
    start_BT: torch.Tensor | None = None,
) -> torch.Tensor:
    """int64 [B, T, columns]: table rows of the n-grams that end at each position.

    Sequences start at 0, or chats at the positions ``start_BT``; what lies before counts as the pad class.
    """
    position = torch.arange(classes_BT.shape[1], device=classes_BT.device)
    rolled = classes_BT * mults[0]
    out: list[torch.Tensor] = []
    offset = 0
    for lag in range(1, len(mults)):
        earlier = classes_BT[:, : max(classes_BT.shape[1] - lag, 0)]
        shifted = torch.nn.functional.pad(earlier, (lag, 0), value=pad_class)[:, : classes_BT.shape[1]]
        if start_BT is not None:
            shifted = torch.where(position - lag >= start_BT, shifted, pad_class)
        rolled = rolled ^ (shifted * mults[lag])
        for head in range(heads):
            prime = primes[(lag - 1) * heads + head]
            out.append(rolled % prime + offset)
            offset += prime
    return torch.stack(out, -1)


class _TableRows(torch.autograd.Function):
    """Rows of a table; the gradient is one indexed addition that never waits for the device."""

    @staticmethod
    def forward(ctx, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(ids)
        ctx.shape = table.shape
        return table[ids]

    @staticmethod
    def backward(ctx, grad: torch.Tensor):  # pyright: ignore[reportIncompatibleMethodOverride]
        (ids,) = ctx.saved_tensors
        out = torch.zeros(ctx.shape, dtype=grad.dtype, device=grad.device)
        return out.index_add_(0, ids.flatten(), grad.reshape(-1, grad.shape[-1])), None


def table_rows(table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """[..., D]: the rows ``ids`` of ``table``."""
    return _TableRows.apply(table, ids)
