"""The optimiser over flat buffers, and the learning rate over the run."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.nano.parameters import kind_of


class Flat:
    """All trained parameters as views of one buffer per optimiser group, and one buffer for everything reduced.

    ``grad`` f32 [P + extra]: the gradients in the order of the groups, then ``extra`` values that are averaged over the
    processes with them (loads, losses).
    """

    def __init__(self, params: dict[str, Tensor], train: dict[str, Any], extra: int):
        order: dict[str, list[str]] = {"matrix": [], "vector": [], "table": [], "mixing": []}
        for name, value in params.items():
            if value.requires_grad:
                order[_group(name, value)].append(name)
        self.names = [n for names in order.values() for n in names]
        total = sum(params[n].numel() for n in self.names)
        device = params[self.names[0]].device
        self.grad = torch.zeros(total + extra, device=device)
        self.size = total
        rate = {"matrix": train["lr"], "vector": train["lr"], "table": train["engram_lr"], "mixing": 0.1 * train["lr"]}
        groups: list[dict[str, Any]] = []
        at = 0
        for group, names in order.items():
            if not names:
                continue
            buffer = torch.cat([params[n].detach().flatten() for n in names])
            place = 0
            for n in names:
                shape, size = params[n].shape, params[n].numel()
                params[n] = buffer[place : place + size].view(shape).requires_grad_()
                place += size
            buffer.grad = self.grad[at : at + place]
            at += place
            decay = train["weight_decay"] if group == "matrix" else 0.0
            groups.append({"params": [buffer], "lr": 0.0, "peak": rate[group], "weight_decay": decay})
        self._groups = groups
        self.optimiser = self._new()

    def _new(self) -> torch.optim.AdamW:
        return torch.optim.AdamW([dict(g) for g in self._groups], betas=(0.9, 0.95), fused=self.grad.is_cuda)

    def restart(self) -> None:
        """Forget the optimiser's state."""
        self.optimiser = self._new()

    def step(self, rate: float) -> None:
        """Clip to norm 1 and update; a gradient that is not finite counts as zero."""
        grad = self.grad[: self.size]
        norm = torch.linalg.vector_norm(grad)
        grad.mul_((1.0 / norm.clamp(min=1.0)).nan_to_num(0.0, 0.0, 0.0)).nan_to_num_(0.0, 0.0, 0.0)
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * rate
        self.optimiser.step()


def _group(name: str, value: Tensor) -> str:
    if kind_of(name) == "rows":
        return "table"
    if "hc_" in name:
        return "mixing"
    return "matrix" if value.dim() > 1 and "_weight" not in name else "vector"


def rate_at(progress: float, train: dict[str, Any]) -> float:
    """Share of the peak learning rate at a share of the budget: warm-up, constant, linear decay to 1 %."""
    if progress < train["warmup"]:
        return max(progress / train["warmup"], 0.02)
    if progress < train["decay_from"]:
        return 1.0
    return max(1 - (progress - train["decay_from"]) / (1 - train["decay_from"]), 0.01)
