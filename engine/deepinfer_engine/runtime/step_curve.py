"""The step-time curve of an open engine: measured on its own runner at start, kept in the kernel cache folder.

A measured step is a real one (build, forward, verification, commit, drafts, record) over rows that stand still: their
device state is put back before every step, so a load can be repeated at one length. Nothing else runs meanwhile.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import numpy as np
import torch

from deepinfer_engine import __version__
from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.config.schema import Profile, leaves
from deepinfer_engine.config.strict_json import read_json_object
from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.runtime.runner import Runner
from deepinfer_engine.spec.calibrate import CONFIDENCE_FILE, temperature_table
from deepinfer_engine.spec.curve import CurveKey, Load, StepCurve, load_curve, measure_curve, save_curve
from deepinfer_engine.spec.planner import BudgetPlanner
from deepinfer_engine.types import PlannedRow, Request, SamplingParams, Sequence, StepPlan
from deepinfer_engine.weights.checkpoint import Checkpoint

#: tokens of a measured row: more than a window, so that every ring is full
_LENGTH = 2 * BLOCK_TOKENS
#: steps of one measurement; the first of them comes from another load and is not counted
_STEPS = 2
#: most rows measured, and rounds over all loads: a start takes seconds, and one disturbed step decides nothing
_MOST_ROWS = 128
_ROUNDS = {"cpu": 3, "cuda": 4}


def temperatures_of(profile: Profile, checkpoint: Checkpoint) -> np.ndarray:
    """f32 [regimes, J] that calibrate the confidence: the profile's, else those of the checkpoint, else ones."""
    own, path = {}, checkpoint.directory / CONFIDENCE_FILE
    if path.exists():
        record = read_json_object(path)
        own = record.get("temperatures")
        if not isinstance(own, dict):
            raise ArtefactError(f"{path}: temperatures is {own!r}, expected an object of sampling regimes")
        own = {name: values[: profile.spec.draft_tokens] for name, values in own.items()}
    return temperature_table(profile.spec.confidence_temperatures, own, profile.spec.draft_tokens)


def planner_for(profile: Profile, checkpoint: Checkpoint, runner: Runner, device: str) -> BudgetPlanner | None:
    """The planner of ``spec.verify: adaptive``, with a curve kept from before or measured now; None for fixed."""
    if profile.spec.verify != "adaptive" or runner.speculation is None:
        return None
    key = CurveKey(_hardware(device), _profile_digest(profile), checkpoint.digest, __version__)
    folder = _folder(profile)
    kept = load_curve(folder, key, ttl_s=profile.spec.curve_ttl_s, now_s=time.time())
    curve = kept.curve
    if curve is None:
        curve = StepTimer(runner).curve()
        save_curve(folder, key, curve, measured_s=time.time())
    return BudgetPlanner(curve, "adaptive")


class StepTimer:
    """Times steps of a runner that serves nobody else."""

    def __init__(self, runner: Runner):
        assert runner.speculation is not None
        self.runner = runner
        self.spec = runner.speculation
        per_row = -(-(_LENGTH + self.spec.tokens + 1) // BLOCK_TOKENS)
        self.kind = runner.device.split(":")[0]
        self.rows = min(runner.kv.slots, runner.kv.blocks // per_row, _MOST_ROWS)
        rng = np.random.default_rng(1)
        vocab = runner.model.config.vocab_size
        self.sequences = {
            i: Sequence(
                Request(
                    f"timed {i}", tuple(rng.integers(3, vocab, _LENGTH).tolist()), SamplingParams(max_tokens=2**30)
                ),
                token_ids=rng.integers(3, vocab, _LENGTH).tolist(),
                num_prompt=_LENGTH - 1,
                seed=i,
                uid=i,
                slot=i + 1,
                block_ids=list(range(1 + i * per_row, 1 + (i + 1) * per_row)),
            )
            for i in range(self.rows)
        }
        for uid in self.sequences:
            runner.drafts[uid] = (3,) * self.spec.tokens

    def curve(self) -> StepCurve:
        """All loads of a curve up to the rows there are."""
        try:
            return measure_curve(self.step_ms, self.rows, self.spec.tokens, rounds=_ROUNDS[self.kind], warmup=0)
        finally:
            for uid in self.sequences:
                self.runner.forget(uid)

    def step_ms(self, load: Load) -> float:
        """Milliseconds of one step of ``load``."""
        taken = []
        for _ in range(_STEPS):
            self._stand_still(load.rows)
            began = time.perf_counter()
            flight = self.runner.forward(self._plan(load), self.sequences, None)
            self.runner.sample(flight, self.sequences, {})
            self.runner.collect(flight)
            taken.append((time.perf_counter() - began) * 1000)
        return float(np.mean(taken[1:]))

    def _plan(self, load: Load) -> StepPlan:
        drafts = 0 if load.path == "off" or load.drafts == 0 else self.spec.tokens
        rows = tuple(PlannedRow(uid, 0, _LENGTH - 1, 1 + drafts, "decode", True, 0, drafts) for uid in range(load.rows))
        budget = load.rows * load.drafts if load.path == "adaptive" and drafts else None
        return StepPlan(0, rows, budget=budget, draft=load.path != "off")

    def _stand_still(self, rows: int) -> None:
        self.spec.length[1 : rows + 1] = _LENGTH
        self.spec.recent[1 : rows + 1] = 3  # a row that has verified nothing has no newest token
        if self.runner.device.startswith("cuda"):
            torch.cuda.synchronize()


def _hardware(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"cpu, {threads} of {os.cpu_count()} threads"


def _profile_digest(profile: Profile) -> str:
    values = {k: v for k, v in leaves(profile).items() if k not in ("name", "description", "extends")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _folder(profile: Profile) -> Path:
    return profile.kernels.folder or Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "deepinfer"
