"""Adapters to other engines' planners, for measuring: used when they are installed, never needed.

Each takes counts [M, L, E] and returns slots [L, R, S]. Their code is imported from where the user installed it;
nothing of it is here.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from deepinfer_engine.eplb.layout import identity

Planner = Callable[[np.ndarray, int, int], np.ndarray]


@dataclass(frozen=True)
class Peer:
    """A planner found on this machine."""

    name: str
    origin: str
    plan: Planner


def _deepseek(module: Any) -> Planner:
    def plan(counts_MLE: np.ndarray, ranks: int, slots: int) -> np.ndarray:
        import torch

        totals = torch.from_numpy(counts_MLE.sum(axis=0))
        physical, _, _ = module.rebalance_experts(totals, ranks * slots, 1, 1, ranks)
        return physical.numpy().reshape(counts_MLE.shape[1], ranks, slots)

    return plan


def _vllm(module: Any) -> Planner:
    def plan(counts_MLE: np.ndarray, ranks: int, slots: int) -> np.ndarray:
        import torch

        totals = torch.from_numpy(counts_MLE.sum(axis=0))
        physical = module.DefaultEplbPolicy.rebalance_experts(totals, ranks * slots, 1, 1, ranks)
        physical = physical[0] if isinstance(physical, tuple) else physical
        return np.asarray(physical).reshape(counts_MLE.shape[1], ranks, slots)

    return plan


def _sglang_vec(module: Any) -> Planner:
    def plan(counts_MLE: np.ndarray, ranks: int, slots: int) -> np.ndarray:
        import torch

        counts = torch.from_numpy(counts_MLE.astype(np.int32))
        physical, _, _ = module.rebalance_experts(counts, ranks * slots, slots, 1, 1, False)
        return physical.numpy().reshape(counts_MLE.shape[1], ranks, slots)

    return plan


def _flashlb(module: Any) -> Planner:
    def plan(counts_MLE: np.ndarray, ranks: int, slots: int) -> np.ndarray:
        # Its entry point takes the running table [L, R, S] and one sample of every slot's load per step.
        import torch

        _, layers, experts = counts_MLE.shape
        table_RS = identity(experts, ranks, slots)
        copies_E = np.bincount(table_RS.reshape(-1), minlength=experts)
        loads = np.rint(counts_MLE / copies_E)[:, :, table_RS].astype(np.int64)
        _, _, new = module.FlashLB().rebalance_experts(
            torch.from_numpy(np.stack([table_RS] * layers)), torch.from_numpy(loads)
        )
        return np.asarray(new)

    return plan


#: (name, module, adapter): where each peer keeps its planner.
_KNOWN: tuple[tuple[str, str, Callable[[Any], Planner]], ...] = (
    ("DeepSeek EPLB", "eplb", _deepseek),
    ("vLLM default", "vllm.distributed.eplb.policy.default", _vllm),
    ("SGLang deepseek_vec", "sglang.srt.eplb.eplb_algorithms.deepseek_vec", _sglang_vec),
    ("vllm-ascend FlashLB", "vllm_ascend.eplb.core.policy.policy_flashlb", _flashlb),
)


def installed() -> tuple[list[Peer], list[str]]:
    """The peers that can be imported here, and a line for each that cannot."""
    found, missing = [], []
    for name, module, adapter in _KNOWN:
        try:
            if importlib.util.find_spec(module) is None:
                raise ImportError("not installed")
            found.append(Peer(name, module, adapter(importlib.import_module(module))))
        except ImportError as e:
            missing.append(f"{name}: {module} cannot be imported ({e})")
    return found, missing
