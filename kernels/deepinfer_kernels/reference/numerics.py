"""The three numerics, as data: which rounding points an operation applies.

``reference`` has every rounding of the release (bf16 activations, FP8 inputs of quantised linears, official cache
records, bf16 index scores, bf16 probabilities in tiles of 64 keys). ``float`` has none: f32 throughout, cache rows
in f32. ``fast`` keeps the official weights and cache records and lets each operation choose its precision.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Mode = Literal["reference", "float", "fast"]


@dataclass(frozen=True)
class Numerics:
    """``act``: dtype between modules. ``weight``: dtype dequantised weights are kept in.

    ``quantise_inputs``: FP8-quantise the input of FP8/FP4 linears. ``records``: cache rows are official records
    (else f32 rows). ``index_bf16``: round index scores at the release's points. ``prob_tile``: keys per
    online-softmax tile with bf16 probabilities, 0 = one exact f32 softmax.
    """

    mode: Mode
    act: torch.dtype
    weight: torch.dtype
    quantise_inputs: bool
    records: bool
    index_bf16: bool
    prob_tile: int

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """To the activation dtype: bf16 rounding, or nothing in f32."""
        return x.to(self.act)


NUMERICS: dict[str, Numerics] = {
    # 64 keys per tile: the release's attention kernel
    "reference": Numerics("reference", torch.bfloat16, torch.float32, True, True, True, 64),
    "float": Numerics("float", torch.float32, torch.float32, False, False, False, 0),
    "fast": Numerics("fast", torch.bfloat16, torch.bfloat16, False, True, False, 0),
}
