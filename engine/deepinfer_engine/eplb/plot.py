"""Draw the load of every rank before and after (matplotlib, extra ``plot``)."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import numpy as np

from deepinfer_engine.eplb.plan import ExpertPlan
from deepinfer_engine.eplb.score import rank_loads
from deepinfer_engine.errors import NotReadyError, UsageError


def require_matplotlib() -> None:
    """Raise NotReadyError with the install line when matplotlib is missing."""
    if importlib.util.find_spec("matplotlib") is None:
        raise NotReadyError("--plot needs matplotlib", hint="pip install 'deepinfer-cli[plot]'")


def relative_loads(counts_MLE: np.ndarray, plan: ExpertPlan) -> np.ndarray:
    """Load of every live rank ÷ mean rank load, averaged over layers with tokens: [2, R] as mean and worst step
    decile."""
    live = [r for r in range(plan.ranks) if r not in plan.dead_ranks]
    mean, high = [], []
    for k in range(plan.layers):
        if counts_MLE[:, k].any():
            loads = rank_loads(counts_MLE[:, k], plan.slot_expert_LRS[k, live], plan.replicas_LE[k]).astype(np.float64)
            loads = loads[loads.any(axis=1)]
            ratio = loads / loads.mean(axis=1, keepdims=True)
            mean.append(ratio.mean(axis=0))
            high.append(np.quantile(ratio, 0.9, axis=0))
    if not mean:
        return np.ones((2, len(live)))
    return np.stack([np.mean(mean, axis=0), np.mean(high, axis=0)])


def plot_loads(counts_MLE: np.ndarray, before: ExpertPlan, after: ExpertPlan, path: Path) -> None:
    """Write a picture of rank loads under both plans; the suffix of ``path`` chooses the format."""
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # pyright: ignore[reportMissingImports]
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(9, 6), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharey=True)
    for axes, plan, name in ((top, before, "before"), (bottom, after, "after")):
        mean, high = relative_loads(counts_MLE, plan)
        axes.bar(range(len(mean)), mean, color="tab:blue", label="mean over steps")
        axes.plot(range(len(high)), high, ".", color="tab:orange", label="90 % of steps below")
        axes.axhline(1.0, color="black", linewidth=0.8)
        axes.set(title=f"{name}: {plan.algorithm}", xlabel="rank", ylabel="load / mean rank load")
        axes.legend(loc="upper right")
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        figure.savefig(part, dpi=120, format=path.suffix.lstrip(".") or "png")
        os.replace(part, path)
    except ValueError as e:
        raise UsageError(f"{path}: {e}") from e
    except OSError as e:
        raise NotReadyError(f"cannot write {path}: {e.strerror}") from e
    finally:
        part.unlink(missing_ok=True)
