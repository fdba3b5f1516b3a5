"""Hash memory: n-gram row ids, values of table rows, and the gate into the streams."""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels.cpu.binary import Library, bf16, f32, i64, u8
from deepinfer_kernels.reference.numerics import Numerics

LIBRARY = Library(
    "engram",
    token_classes="ppipii",
    engram_hash="pippppiii",
    dequantise_table="pppii",
    engram_lookup="ppppiii",
    engram_gate="pppppppiiif",
)


def token_classes(num: Numerics, ids: Tensor, table: Tensor, image: int | None) -> Tensor:
    """Hash class of each token id; −1 for ids below 0 (before the start) and for ``image``."""
    ids, table = i64(ids), i64(table)
    classes = torch.empty_like(ids)
    at = (ids.data_ptr(), table.data_ptr(), -1 if image is None else image, classes.data_ptr())
    bad = LIBRARY.token_classes(*at, ids.numel(), table.numel())
    if bad >= 0:
        raise IndexError(f"token {int(ids.flatten()[bad])} is beyond a vocabulary of {table.numel()}")
    return classes


def engram_hash(
    num: Numerics, classes: Tensor, pad_class: int, multipliers: Tensor, primes: Tensor, offsets: Tensor
) -> Tensor:
    """Table row ids [T, columns] int64 of the n-grams ending at each token; classes [T, nmax]."""
    classes, multipliers, primes, offsets = i64(classes), i64(multipliers), i64(primes), i64(offsets)
    (T, nmax), heads = classes.shape, primes.shape[1]
    if multipliers.shape != (nmax,) or primes.shape != (nmax - 1, heads) or offsets.shape != primes.shape:
        shapes = [tuple(t.shape) for t in (multipliers, primes, offsets)]
        raise ValueError(f"classes {(T, nmax)}, multipliers, primes and offsets {shapes}")
    ids = torch.empty(T, (nmax - 1) * heads, dtype=torch.int64)
    at = [t.data_ptr() for t in (multipliers, primes, offsets, ids)]
    LIBRARY.engram_hash(classes.data_ptr(), pad_class, *at, T, nmax, heads)
    return ids


def dequantise_table(num: Numerics, weight: Tensor, scale: Tensor) -> Tensor:
    """Values [M, width] of gathered table rows: E4M3 bytes [M, width], one E8M0 scale per 32; exact in bf16."""
    weight, scale = u8(weight), u8(scale)
    M, width = weight.shape
    if width % 32 or scale.shape != (M, width // 32):
        raise ValueError(f"table rows {(M, width)}, scales {tuple(scale.shape)}")
    out = torch.empty(M, width, dtype=torch.bfloat16)
    LIBRARY.dequantise_table(weight.data_ptr(), scale.data_ptr(), out.data_ptr(), M, width)
    return out


def engram_lookup(num: Numerics, weight: Tensor, scale: Tensor, ids: Tensor) -> Tensor:
    """Values [T, columns · width] of table rows ids [T, columns]: E4M3 bytes [R, width], scales [R, width/32]."""
    weight, scale, ids = u8(weight), u8(scale), i64(ids)
    (rows, width), (T, columns) = weight.shape, ids.shape
    if width % 32 or scale.shape != (rows, width // 32):
        raise ValueError(f"table {(rows, width)}, scales {tuple(scale.shape)}")
    out = torch.empty(T, columns * width, dtype=torch.bfloat16)
    at = (weight.data_ptr(), scale.data_ptr(), ids.data_ptr(), out.data_ptr())
    bad = LIBRARY.engram_lookup(*at, ids.numel(), rows, width)
    if bad >= 0:
        raise IndexError(f"row {int(ids.flatten()[bad])} is not in a table of {rows}")
    return out


def engram_gate(
    num: Numerics, X: Tensor, projected: Tensor, q_weight: Tensor, k_weight: Tensor, dead: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(streams with the memory mixed in [T, C, H], gate [T, C] f32); projected [T, (C+1)·H]."""
    X, projected, q_weight, k_weight = bf16(X), bf16(projected), f32(q_weight), f32(k_weight)
    T, C, H = X.shape
    if any(w.shape != (C, H) for w in (q_weight, k_weight)):
        raise ValueError(f"streams {(T, C, H)}, weights {tuple(q_weight.shape)} and {tuple(k_weight.shape)}")
    if projected.shape != (T, (C + 1) * H) or (dead is not None and dead.shape != (T,)):
        raise ValueError(f"streams {(T, C, H)}, projection {tuple(projected.shape)}")
    mask = None if dead is None else u8(dead)
    out, gate = torch.empty_like(X), torch.empty(T, C)
    at = [t.data_ptr() for t in (X, projected, q_weight, k_weight)]
    at += [0 if mask is None else mask.data_ptr(), out.data_ptr(), gate.data_ptr()]
    LIBRARY.engram_gate(*at, T, C, H, eps)
    return out, gate


OPERATIONS = (token_classes, engram_hash, dequantise_table, engram_lookup, engram_gate)
