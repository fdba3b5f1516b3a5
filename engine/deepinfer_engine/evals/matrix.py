"""The deployment matrix: one task under every combination of numerics, replay, speculation and expert parallelism.

Which combinations are legal is not written here: each one is given to the profile validator, the check against the
model and the list of features that are not built, and a refusal is shown with the sentence they give. The cells that
run are compared with the first of them, question by question; since they compute the same thing up to rounding, a
difference beyond noise is a fault. The threshold is divided by the number of comparisons (Bonferroni), so that a
matrix of equal cells is called different in at most 5 % of runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from deepinfer_engine.config.inactive import inactive_features
from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.profile import LoadedProfile, load_profile
from deepinfer_engine.config.rules import check_against_model
from deepinfer_engine.errors import ProfileError
from deepinfer_engine.evals.log import LogContent
from deepinfer_engine.evals.report import ALPHA, compared, summary_of
from deepinfer_engine.evals.score import Comparison, Summary

#: The axes in the order of the table; the last varies fastest.
AXES: Mapping[str, tuple[str, ...]] = {
    "numerics.mode": ("fast", "float", "reference"),
    "replay.decoder": ("off", "exact", "bounded"),
    "spec.verify": ("off", "fixed", "adaptive"),
    "parallel.ep": ("1", "2", "4"),
}


@dataclass(frozen=True)
class Cell:
    """One combination: its values in the order of ``AXES``, and the profile, or the sentence that refuses it."""

    values: tuple[str, ...]
    loaded: LoadedProfile | None
    refused: str | None


@dataclass(frozen=True)
class Outcome:
    """A cell after its run. ``comparison`` is with the first cell that ran; None for that one."""

    cell: Cell
    summary: Summary
    comparison: Comparison | None
    agrees: bool


def cells(profile: str, sets: Sequence[str], config: ModelConfig) -> Iterator[Cell]:
    """Every combination on top of a profile and its overrides; an axis that ``sets`` fixes has that one value."""
    fixed = {text.partition("=")[0] for text in sets}
    axes = {key: values for key, values in AXES.items() if key not in fixed}
    for values in itertools.product(*axes.values()):
        overrides = [f"{key}={value}" for key, value in zip(axes, values, strict=True)]
        shown = tuple(dict(zip(axes, values, strict=True)).get(key) or _fixed_value(sets, key) for key in AXES)
        yield _cell(profile, [*sets, *overrides], shown, config)


def _fixed_value(sets: Sequence[str], key: str) -> str:
    return next(text.partition("=")[2] for text in sets if text.partition("=")[0] == key)


def _cell(profile: str, sets: list[str], values: tuple[str, ...], config: ModelConfig) -> Cell:
    try:
        loaded = load_profile(profile, sets)
    except ProfileError as exc:
        return Cell(values, None, _one_line(exc.message))
    problems = check_against_model(
        loaded.profile,
        config.n_routed_experts,
        window=config.sliding_window,
        draft_tokens=config.dspark_block_size if config.num_nextn_predict_layers else 0,
    )
    if problems:
        return Cell(values, None, "; ".join(problems))
    missing = [
        f"{i.key} {i.value} is not built: {i.reason}" for i in inactive_features(loaded.profile) if i.key in AXES
    ]
    return Cell(values, None, "; ".join(missing)) if missing else Cell(values, loaded, None)


def _one_line(message: str) -> str:
    """A refusal without the places it names: all come from the matrix itself."""
    lines = [line.strip() for line in message.splitlines()]
    sentences = [line.rpartition("=")[2].partition(": ")[2] or line for line in lines if line]
    return "; ".join(dict.fromkeys(sentences))


def judge(runs: Sequence[tuple[Cell, LogContent]]) -> list[Outcome]:
    """Compare every cell with the first, each at 5 % divided by the number of comparisons."""
    base = runs[0][1]
    alpha = ALPHA / max(1, len(runs) - 1)
    outcomes = [Outcome(runs[0][0], summary_of(base), None, True)]
    for cell, content in runs[1:]:
        comparison = compared(content, base)
        outcomes.append(Outcome(cell, summary_of(content), comparison, comparison.p_value >= alpha))
    return outcomes
