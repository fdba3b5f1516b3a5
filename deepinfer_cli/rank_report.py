"""What every rank did in a run, compact enough for 128 of them: ``deepinfer run --explain``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render

if TYPE_CHECKING:
    import numpy as np

    from deepinfer_engine.engine import Engine
    from deepinfer_engine.eplb.record import Balance

#: cells of a grid line, and most ranks a grid shows; beyond it only the ends are listed
_WIDTH, _MOST = 8, 128
#: ranks and layers listed by name
_ENDS = 5


def rank_report(engine: Engine, balance: Balance | None) -> str:
    """Rows and tokens of every attention rank, expert load of every expert-parallel rank, and the uneven layers."""
    work = engine.rank_work
    steps = max(engine.steps, 1)
    dp = len(work.tokens)
    lines = [f"{dp} attention {'rank' if dp == 1 else 'ranks'}: tokens computed, and rows per step in brackets"]
    lines += grid([f"{t:d} ({r / steps:.1f})" for t, r in zip(work.tokens, work.rows, strict=True)])
    if balance is None or balance.moe_lb is None or balance.load_LR.shape[1] == 1:
        return "\n".join(lines) + "\n"
    known = balance.load_LR.any(axis=1)
    load_R = balance.load_LR[known].mean(axis=0)
    ranks = len(load_R)
    slots = engine.runner.mesh.placement.slots_per_rank
    lines += [
        "",
        f"{ranks} expert ranks of {slots} slots: load over an equal share (1 = equal), mean of {int(known.sum())} "
        f"layers; moe_lb {balance.moe_lb:.3f}, per step {balance.moe_lb_step:.3f}",
    ]
    lines += grid([f"{v:.2f}" for v in load_R])
    lines += ["", *ends(load_R, balance), "", *_layers(balance)]
    return "\n".join(lines) + "\n"


def grid(cells: Sequence[str]) -> list[str]:
    """Cells by rank, eight to a line, the line's first rank in front; nothing beyond 128 ranks."""
    if len(cells) > _MOST:
        return [f"  ({len(cells)} ranks: no grid beyond {_MOST})"]
    width, front = max(map(len, cells)), len(str(len(cells) - 1))
    out = []
    for first in range(0, len(cells), _WIDTH):
        row = "  ".join(cell.rjust(width) for cell in cells[first : first + _WIDTH])
        out.append(f"  {first:>{front}} | {row}")
    return out


def ends(load_R: np.ndarray, balance: Balance) -> list[str]:
    """The most and the least loaded ranks, with the layer where each of the first is worst."""
    order = sorted(range(len(load_R)), key=lambda r: (-load_R[r], r))
    few = min(_ENDS, max(1, len(order) // 2))
    hot = []
    for r in order[:few]:
        layer = int(balance.load_LR[:, r].argmax())
        hot.append(f"{r}: {load_R[r]:.2f} (layer {layer}: {balance.load_LR[layer, r]:.2f})")
    cold = [f"{r}: {load_R[r]:.2f}" for r in order[-few:][::-1]]
    return [f"  hottest  {', '.join(hot)}", f"  coldest  {', '.join(cold)}"]


def _layers(balance: Balance) -> list[str]:
    """The least balanced layers."""
    known = [k for k in range(len(balance.moe_lb_L)) if balance.moe_lb_L[k] > 0]
    worst = sorted(known, key=lambda k: (-balance.moe_lb_L[k], k))[:_ENDS]
    rows = [
        (k, round(float(balance.moe_lb_L[k]), 3), int(balance.load_LR[k].argmax()),
         round(float(balance.load_LR[k].max()), 2), round(float(balance.load_LR[k].min()), 2))
        for k in worst
    ]  # fmt: skip
    return render.table(("layer", "moe_lb", "hottest rank", "load", "least load"), rows).splitlines()


def rank_rows(engine: Engine, balance: Balance | None) -> dict[str, Any]:
    """The same as plain values, for a JSON document."""
    work = engine.rank_work
    out: dict[str, Any] = {"attention_tokens": list(work.tokens), "attention_rows": list(work.rows)}
    if balance is not None:
        out["expert_load"] = [[round(float(v), 6) for v in row] for row in balance.load_LR]
        out["moe_lb_per_layer"] = [round(float(v), 6) if v > 0 else None for v in balance.moe_lb_L]
    return out
