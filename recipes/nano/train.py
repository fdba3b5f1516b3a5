"""Train nano in one time-boxed run.

    python -m recipes.nano.train --data DIR --out DIR --minutes 6 [--recipe FILE] [--device cuda|cpu]

``--data`` is what ``recipes.nano.data`` wrote. The schedule follows the clock: warm-up, constant, linear decay, and the
official formats in the loop for the last part, so the run ends on time on any machine. Written to ``--out``:
weights-{i}.safetensors (float values that the official formats hold exactly; pieces of at most 15 MB), log.jsonl (one
line per report, and the events), result.json (held-out scores and the load of the experts), wrong.txt.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from deepinfer_engine.config.model import ModelConfig, load_model_config
from recipes.nano import experts
from recipes.nano.engram import token_classes
from recipes.nano.evaluate import Rows, evaluate, load_rows
from recipes.nano.model import Model, Numerics, Ops, Trace, stored
from recipes.nano.parameters import initial_parameters, kind_of

HERE = Path(__file__).resolve().parent
PIECE_BYTES = 15_000_000
MEAN_TARGETS = 32  # loss positions per row that fit the head; the data has 26 to 28 on average


class Log:
    """JSON lines in a file and on stderr."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")
        self.start = time.monotonic()

    def __call__(self, event: str, **values: Any) -> None:
        plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"s": round(time.monotonic() - self.start, 2), "event": event, **plain}, allow_nan=False)
        print(line, file=self._file, flush=True)
        print(line, file=sys.stderr, flush=True)


class Batches:
    """Random rows of the training set, on the device; reproducible for a seed and device kind."""

    def __init__(self, rows: Rows, batch: int, seed: int):
        self.rows, self.batch = rows, batch
        self._generator = torch.Generator(device=rows.ids.device).manual_seed(seed)
        self._column = torch.arange(rows.ids.shape[1], device=rows.ids.device)

    def draw(self) -> tuple[Tensor, Tensor]:
        """(ids int64 [B, T], bool [B, T]: positions whose next token is learned)."""
        r = self.rows
        pick = torch.randint(len(r.lengths), (self.batch,), generator=self._generator, device=r.ids.device)
        lengths, prompts = r.lengths[pick].unsqueeze(1), r.prompts[pick].unsqueeze(1)
        return r.ids[pick].long(), (self._column >= prompts - 1) & (self._column < lengths - 1)


def loss_of(model: Model, w: dict[str, Tensor], ids: Tensor, learn: Tensor, trace: Trace) -> Tensor:
    """Mean cross-entropy of the next token over the learned positions (a fixed number is fed to the head)."""
    hidden = model.hidden(w, ids, trace).flatten(0, 1)
    room = min(MEAN_TARGETS * len(ids), learn.numel())
    wanted = learn.flatten()
    place = torch.argsort(wanted.to(torch.uint8), descending=True, stable=True)[:room]
    target = torch.roll(ids, -1, 1).flatten()[place]
    loss = torch.nn.functional.cross_entropy(model.logits(w, hidden[place]), target, reduction="none")
    used = wanted[place]
    return torch.where(used, loss, 0.0).sum() / used.sum()


def make_optimiser(params: dict[str, Tensor], train: dict[str, Any]) -> torch.optim.AdamW:
    """AdamW; n-gram tables learn faster (each row is seen rarely), stream mixing slower, norms without decay."""
    groups: dict[str, list[Tensor]] = {"matrix": [], "vector": [], "table": [], "mixing": []}
    for name, value in params.items():
        if not value.requires_grad:
            continue
        if kind_of(name) == "rows":
            groups["table"].append(value)
        elif "hc_" in name:
            groups["mixing"].append(value)
        else:
            groups["matrix" if value.dim() > 1 and "_weight" not in name else "vector"].append(value)
    rate = {"matrix": train["lr"], "vector": train["lr"], "table": train["engram_lr"], "mixing": 0.1 * train["lr"]}
    decay = {"matrix": train["weight_decay"]}
    return torch.optim.AdamW(
        [
            {"params": values, "lr": rate[name], "peak": rate[name], "weight_decay": decay.get(name, 0.0)}
            for name, values in groups.items()
            if values
        ],
        betas=(0.9, 0.95),
        fused=next(iter(params.values())).is_cuda,
    )


def rate_at(progress: float, train: dict[str, Any]) -> float:
    """Share of the peak learning rate at a share of the budget: warm-up, constant, linear decay to 1 %."""
    if progress < train["warmup"]:
        return max(progress / train["warmup"], 0.02)
    if progress < train["decay_from"]:
        return 1.0
    return max(1 - (progress - train["decay_from"]) / (1 - train["decay_from"]), 0.01)


class Trainer:
    """One run: parameters, optimiser, schedule by the clock, recovery from a non-finite loss."""

    def __init__(self, model: Model, recipe: dict[str, Any], batches: Batches, log: Log):
        self.model, self.train, self.batches, self.log = model, recipe["train"], batches, log
        device = batches.rows.ids.device
        self.params = initial_parameters(model.config, seed=self.train["seed"], device=device)
        self.trained = [v for v in self.params.values() if v.requires_grad]
        self.optimiser = make_optimiser(self.params, self.train)
        self.step_number = 0
        self.scale = 1.0  # halved after every recovery
        self._safe = {n: v.detach().clone() for n, v in self.params.items()}

    def step(self, progress: float) -> tuple[Tensor, Trace]:
        """One update; returns the (not awaited) loss and the trace."""
        train = self.train
        for group in self.optimiser.param_groups:
            group["lr"] = group["peak"] * rate_at(progress, train) * self.scale
        quantised = progress >= train["quantise_from"]
        ids, learn = self.batches.draw()
        trace = Trace()
        loss = loss_of(self.model, stored(self.params, weights=quantised), ids, learn, trace)
        total = loss
        total = total + train["balance_loss"] * torch.stack(trace.balance).mean()
        total = total + train["index_loss"] * torch.stack(trace.index).mean()
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.trained, 1.0)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        if progress < 0.9:  # the last part keeps the routes still
            self._balance(trace.loads_LE)
        self.step_number += 1
        return loss.detach(), trace

    @torch.no_grad()
    def _balance(self, loads_LE: list[Tensor]) -> None:
        """Move the selection bias of every expert against its load; no gradient is involved."""
        for layer, load in enumerate(loads_LE):
            bias = self.params[f"layers.{layer}.ffn.gate.bias"]
            bias.add_(torch.sign(1 / len(load) - load), alpha=self.train["balance_rate"])

    @torch.no_grad()
    def report(self, loss: Tensor, trace: Trace, progress: float, step_ms: float) -> bool:
        """Log one line; on a non-finite loss restore the last good parameters with half the rate and say so."""
        value = float(loss)
        loads = torch.stack(trace.loads_LE) * self.model.config.n_routed_experts
        finite = math.isfinite(value)
        self.log(
            "step" if finite else "restored",
            step=self.step_number,
            progress=round(progress, 4),
            loss=round(value, 5),
            index=round(float(torch.stack(trace.index).mean()), 4),
            balance=round(float(torch.stack(trace.balance).mean()), 4),
            load_max=round(float(loads.max()), 2),
            load_min=round(float(loads.min()), 3),
            lr=self.optimiser.param_groups[0]["lr"],
            step_ms=round(step_ms, 1),
            quantised=progress >= self.train["quantise_from"],
        )
        source, target = (self.params, self._safe) if finite else (self._safe, self.params)
        for name, value in target.items():
            value.copy_(source[name])
        if not finite:
            self.scale *= 0.5
            self.optimiser = make_optimiser(self.params, self.train)
        return finite

    def final_weights(self) -> dict[str, Tensor]:
        """Values that the official formats hold exactly; the image router bias copies the text one."""
        with torch.no_grad():
            out = {n: v.detach() for n, v in stored(self.params, weights=True).items()}
        for name in list(out):
            if name.endswith("gate.bias_vl"):
                out[name] = out[name.removesuffix("_vl")]
        return {n: v.to(torch.float32 if kind_of(n) == "f32" else torch.bfloat16) for n, v in out.items()}


# --------------------------------------------------------------------- set-up


def choose_ops(model: Model, trainer: Trainer, log: Log, *, compile_ops: bool) -> Ops:
    """Grouped experts when the device's product agrees with the dense path; then the compiled functions if asked."""
    ops = replace(model.ops)
    if trainer.batches.rows.ids.is_cuda:
        problem = grouped_problem(model.config, trainer.batches.rows.ids.device)
        if problem is None:
            ops.routed = experts.grouped_experts
        log("experts", path="dense" if problem else "grouped", reason=problem)
    return ops.compiled() if compile_ops else ops


def grouped_problem(c: ModelConfig, device: torch.device) -> str | None:
    """Why the grouped product cannot be used here, or None; compares values and gradients with the dense path."""
    g = torch.Generator(device=device).manual_seed(1)
    e, i, h = c.n_routed_experts, c.moe_intermediate_size, c.hidden_size

    def rand(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=g, device=device) * 0.1).to(torch.bfloat16).requires_grad_()

    inputs = [rand(512, h), rand(e, i, h), rand(e, i, h), rand(e, h, i)]
    ids = torch.rand(512, e, generator=g, device=device).topk(c.num_experts_per_tok, -1).indices
    weights = torch.rand(ids.shape, generator=g, device=device)
    results = []
    for path in (experts.dense_experts, experts.grouped_experts):
        try:
            y = path(inputs[0], ids, weights, *inputs[1:], limit=c.swiglu_limit, act=lambda t: t)
            results.append([y, *torch.autograd.grad(y.square().sum(), inputs)])
        except (RuntimeError, AttributeError) as exc:
            return f"{path.__name__}: {type(exc).__name__}: {str(exc).splitlines()[0][:200]}"
    for a, b in zip(*results, strict=True):
        error = float((a.detach().float() - b.detach().float()).norm() / a.detach().float().norm())
        if not error < 0.03:
            return f"differs from the dense path by {error:.3g}"
    return None


def timed_steps(trainer: Trainer, count: int) -> float:
    """Mean milliseconds of ``count`` real steps at the start of the schedule, after one that may compile."""
    device = trainer.batches.rows.ids.device
    loss, _ = trainer.step(0.0)
    float(loss)
    start = time.monotonic()
    for _ in range(count):
        loss, _ = trainer.step(0.0)
    float(loss)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.monotonic() - start) / count * 1e3


def warm_up(model: Model, trainer: Trainer, log: Log, *, compile_mode: str) -> None:
    """Set ``model.ops``: eager, or compiled when that works and is faster; both timings are logged."""
    model.ops = choose_ops(model, trainer, log, compile_ops=False)
    eager = timed_steps(trainer, 3)
    log("eager", step_ms=round(eager, 1))
    if compile_mode == "off":
        return
    plain = model.ops
    start = time.monotonic()
    try:
        torch._dynamo.config.recompile_limit = 64  # one function serves several shapes
        model.ops = plain.compiled()
        fused = timed_steps(trainer, 3)
    except Exception as exc:  # any compiler failure: the run goes on without it and says so
        log("compile_failed", seconds=round(time.monotonic() - start, 1), reason=f"{type(exc).__name__}: {exc}"[:500])
        trainer.optimiser.zero_grad(set_to_none=True)  # the failed step may have left gradients
        model.ops = plain
        return
    keep = fused < eager
    log("compiled", seconds=round(time.monotonic() - start, 1), step_ms=round(fused, 1), kept=keep)
    if not keep:
        model.ops = plain


def save_pieces(out: Path, weights: dict[str, Tensor]) -> list[str]:
    """weights-{i}.safetensors, whole tensors, at most ``PIECE_BYTES`` each."""
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, value in weights.items():
        n = value.numel() * value.element_size()
        if size + n > PIECE_BYTES and pieces[-1]:
            pieces.append({})
            size = 0
        pieces[-1][name] = value.detach().cpu().contiguous().clone()
        size += n
    names = []
    for i, piece in enumerate(pieces):
        name = f"weights-{i}.safetensors"
        save_file(piece, str(out / f"{name}.part"))
        os.replace(out / f"{name}.part", out / name)
        names.append(name)
    return names


class Judge:
    """Held-out scores with the official weight values, greedy, outside the compiler."""

    def __init__(self, model: Model, sets: dict[str, Rows], tokenizer: Tokenizer, eos: int, batch: int):
        self.model = Model(model.config, model.classes, numerics=model.numerics, ops=Ops())
        self.plain, self.sets, self.tokenizer, self.eos, self.batch = model, sets, tokenizer, eos, batch

    def score(self, weights: dict[str, Tensor], names: list[str]) -> tuple[dict[str, float], list[str]]:
        """({set: share correct}, the wrong rows as text)."""
        self.model.ops.routed = self.plain.ops.routed
        scores, wrong = {}, []
        for name in names:
            rows = self.sets[name]
            scores[name], ids, hit = evaluate(self.model, weights, rows, eos=self.eos, batch=self.batch)
            for i in (~hit).nonzero().flatten().tolist()[:20]:
                prompt = int(rows.prompts[i])
                given, wanted = ids[i, prompt:].tolist(), rows.ids[i, prompt : int(rows.lengths[i])].tolist()
                question = self.tokenizer.decode(rows.ids[i, :prompt].tolist()[-20:])
                wrong.append(
                    f"{name}\t{question!r}\t{self.tokenizer.decode(given)!r}\t{self.tokenizer.decode(wanted)!r}"
                )
        return scores, wrong


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run; returns what result.json holds."""
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "log.jsonl")
    device = torch.device(args.device)
    torch.set_float32_matmul_precision("high")
    recipe = yaml.safe_load(args.recipe.read_text(encoding="utf-8"))
    config = load_model_config(args.data / "config.json")
    tokenizer = Tokenizer.from_file(str(args.data / "tokenizer.json"))
    with np.load(args.data / "data.npz") as file:
        arrays = {name: file[name] for name in file.files}
    width, pad, eos = recipe["data"]["length"], config.pad_token_id, config.eos_token_id
    sets = {n.split("/")[1] for n in arrays if n.startswith("eval/")}
    held_out = {n: load_rows(arrays, f"eval/{n}/", width, pad).to(device) for n in sorted(sets)}
    batches = Batches(load_rows(arrays, "", width, pad).to(device), recipe["train"]["batch"], recipe["train"]["seed"])
    numerics = Numerics(torch.bfloat16 if device.type == "cuda" else torch.float32, official=True)
    model = Model(config, torch.from_numpy(token_classes(tokenizer)).to(device), numerics=numerics)
    trainer = Trainer(model, recipe, batches, log)
    judge = Judge(model, held_out, tokenizer, eos, recipe["train"]["batch"])
    count = sum(v.numel() for v in trainer.params.values())
    log("start", torch=torch.__version__, device=str(device), parameters=count, rows=len(batches.rows.lengths))
    warm_up(model, trainer, log, compile_mode=args.compile)
    train_until(
        trainer,
        judge,
        log,
        args.out,
        budget=args.minutes * 60,
        steps=args.steps,
        eval_every=args.eval_every,
        report_every=args.report_every,
    )
    weights = trainer.final_weights()
    scores, wrong = judge.score(weights, list(held_out))
    pieces = save_pieces(args.out, weights)
    (args.out / "wrong.txt").write_text("\n".join(wrong) + "\n", encoding="utf-8")
    result = {"scores": scores, "steps": trainer.step_number, "pieces": pieces, "loads": final_loads(trainer)}
    result |= {"seconds": round(time.monotonic() - log.start, 1), "rate_scale": trainer.scale}
    (args.out / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    log("done", **{k: v for k, v in result.items() if k != "loads"})
    return result


def train_until(
    trainer: Trainer,
    judge: Judge,
    log: Log,
    out: Path,
    *,
    budget: float,
    steps: int | None,
    eval_every: float,
    report_every: int,
) -> None:
    """Steps until ``budget`` seconds after the log's start, or exactly ``steps`` of them.

    Progress is the share of the time that remained after set-up, or of the steps.
    """
    begin = last = time.monotonic()
    end = log.start + budget
    next_eval = begin + eval_every
    done = since = 0
    while True:
        progress = (time.monotonic() - begin) / max(end - begin, 1e-3) if steps is None else done / steps
        if progress >= 1:
            break
        loss, trace = trainer.step(progress)
        done += 1
        since += 1
        if done % report_every == 0:
            float(loss)
            now = time.monotonic()
            trainer.report(loss, trace, progress, (now - last) / since * 1e3)
            if now >= next_eval:
                weights = trainer.final_weights()
                save_pieces(out, weights)  # so that a run that is cut short still leaves a model
                scores, wrong = judge.score(weights, ["two_digit", "three_digit"])
                log("eval", step=trainer.step_number, scores=scores, example=wrong[:1])
                next_eval = time.monotonic() + eval_every
            last, since = time.monotonic(), 0


@torch.no_grad()
def final_loads(trainer: Trainer) -> list[list[float]]:
    """Per layer, the load of every expert relative to an even split, over one training batch."""
    ids, _ = trainer.batches.draw()
    trace = Trace()
    trainer.model.hidden(stored(trainer.params, weights=True), ids, trace)
    count = trainer.model.config.n_routed_experts
    return [[round(float(v) * count, 3) for v in loads] for loads in trace.loads_LE]


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="train nano")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=HERE / "nano.yaml")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, help="train this many steps instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    parser.add_argument("--eval-every", type=float, default=60.0, help="seconds between held-out scores")
    parser.add_argument("--report-every", type=int, default=20, help="steps between log lines; each waits once")
    return parser.parse_args(argv)


def main() -> None:
    run(arguments())


if __name__ == "__main__":
    main()
