"""Peaks of accelerators as their vendors state them; used as ratios only, to carry a fit from one to another."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Peak:
    """Vendor figures of one accelerator: memory bytes/s and dense FP8 FLOP/s."""

    name: str
    memory_bytes_s: float
    fp8_flops: float


_B200 = Peak("B200", 8.0e12, 4.5e15)  # NVIDIA HGX B200 datasheet: 8 TB/s; 72 PFLOPS FP8 sparse for 8 = 4.5 dense each
_H200 = Peak("H200", 4.8e12, 1.979e15)  # NVIDIA H200 datasheet: 4.8 TB/s, 3,958 TFLOPS FP8 with sparsity
_950PR = Peak("Ascend 950PR", 1.6e12, 1.0e15)  # Huawei Connect 2025: 128 GB at 1.6 TB/s, 1 PFLOPS FP8
_950DT = Peak("Ascend 950DT", 4.0e12, 1.0e15)  # Huawei Connect 2025: 144 GB at 4 TB/s, 1 PFLOPS FP8

#: A 950 with more usable memory than this is the decode variant (144 GB), else the prefill variant (128 GB).
_950_SPLIT_GIB = 125.0

#: What the published step times were measured on.
REFERENCE = _B200


def peak_of(platform: str, hbm_gib: float) -> Peak | None:
    """The accelerator behind a platform name; None for a CPU, for which nothing is published."""
    if platform == "ascend950":
        return _950DT if hbm_gib > _950_SPLIT_GIB else _950PR
    return {"sm100": _B200, "sm90": _H200}.get(platform)
