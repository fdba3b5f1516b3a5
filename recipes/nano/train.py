"""Train nano in one time-boxed run, on one GPU or several.

    torchrun --nproc_per_node=2 -m recipes.nano.train --data DIR --out DIR --minutes 6 [--recipe FILE] [--init DIR]

``--data`` is what ``recipes.nano.data`` wrote. The schedule follows the clock of the first process: warm-up, constant,
linear decay; longer rows, and the official formats with the indexer's selection, in the last part; so the run ends on
time on any machine. On a GPU a step is one recorded graph per row length and numerics; where recording fails the step
runs as it is and the log says so. Written to ``--out`` (by the first process, repeatedly): weights-{i}.safetensors
(training values, pieces of at most 15 MB; ``--init`` continues from such a folder or from a checkpoint), log.jsonl,
result.json (held-out scores and the load of the experts).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing import Value
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from safetensors.torch import save_file
from torch import Tensor

from deepinfer_engine.config.model import ModelConfig, load_model_config
from recipes.nano import experts
from recipes.nano.engram import token_classes
from recipes.nano.export import load_start
from recipes.nano.judge import Judge
from recipes.nano.model import Layout, Model, Numerics, Ops, Trace, stored
from recipes.nano.optimiser import Flat, rate_at
from recipes.nano.packing import Batch, Rows, Writer, loader
from recipes.nano.parameters import initial_parameters, kind_of

HERE = Path(__file__).resolve().parent
PIECE_BYTES = 15_000_000
EVALUATION_SEED = 9000  # of the held-out tasks that published scores are about


class Log:
    """JSON lines in a file, open inside a ``with`` block, and on stderr."""

    def __init__(self, path: Path):
        self._file = path.open("w", encoding="utf-8")
        self.start = time.monotonic()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()

    def __call__(self, event: str, **values: Any) -> None:
        plain = {k: str(v) if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        line = json.dumps({"s": round(time.monotonic() - self.start, 2), "event": event, **plain}, allow_nan=False)
        print(line, file=self._file, flush=True)
        print(line, file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Variant:
    """What a step computes: the length of its rows, and whether formats and selection are those of inference."""

    length: int
    official: bool


class Trainer:
    """One run: parameters, optimiser, recorded steps, recovery from a non-finite loss."""

    def __init__(self, model: Model, recipe: dict[str, Any], params: dict[str, Tensor], log: Log, world: int):
        self.model, self.train, self.log, self.world = model, recipe["train"], log, world
        self.params = params
        c = model.config
        self.load_shape = (c.num_hidden_layers, c.n_routed_experts)
        self.flat = Flat(params, self.train, c.num_hidden_layers * c.n_routed_experts + 3)
        self.step_number = 0
        self.scale = 1.0  # halved after every recovery
        self.compute: dict[Variant, Callable[[Batch], None]] = {}
        self._safe = {n: v.detach().clone() for n, v in params.items()}
        self._pool: Any = None

    # ------------------------------------------------------------------ one step

    def gradients(self, batch: Batch, variant: Variant) -> None:
        """Forward and backward of one batch; gradients, loads and losses go to the flat buffer."""
        train = self.train
        model = self.model
        model.numerics = Numerics(model.numerics.dtype, official=variant.official)
        trace = Trace()
        layout = Layout(batch.start, batch.queries, select=variant.official)
        w = stored(self.params, weights=variant.official)
        hidden = model.hidden(w, batch.ids, trace, layout).flatten(0, 1).index_select(0, batch.place)
        target = batch.ids.flatten()[batch.place + 1]
        losses = torch.nn.functional.cross_entropy(model.logits(w, hidden), target, reduction="none")
        loss = (losses * batch.weight).sum() / batch.weight.sum().clamp(min=1)
        index, balance = torch.stack(trace.index).mean(), torch.stack(trace.balance).mean()
        total = loss + train["balance_loss"] * balance + train["index_loss"] * index
        wanted = [self.params[n] for n in self.flat.names]
        grads = torch.autograd.grad(total, wanted, allow_unused=True)
        with torch.no_grad():
            whole = [torch.zeros_like(p) if g is None else g for g, p in zip(grads, wanted, strict=True)]
            extras = [torch.stack(trace.loads_LE).flatten(), torch.stack((loss, index, balance))]
            torch.cat([t.detach().flatten() for t in (*whole, *extras)], out=self.flat.grad)

    def step(self, batch: Batch, progress: float) -> None:
        """One update from one batch of this process."""
        variant = Variant(batch.ids.shape[1], progress >= self.train["official_from"])
        compute = self.compute.get(variant)
        if compute is None:
            compute = self.compute[variant] = self._prepared(batch, variant)
        compute(batch)
        if self.world > 1:
            dist.all_reduce(self.flat.grad)
            self.flat.grad.div_(self.world)
        self.flat.step(rate_at(progress, self.train) * self.scale)
        if progress < 0.9:  # the last part keeps the routes still
            self._balance()
        self.step_number += 1

    def _prepared(self, batch: Batch, variant: Variant) -> Callable[[Batch], None]:
        """The variant as a recorded graph, or as it is where there is no GPU or recording fails."""
        device = self.flat.grad.device

        def plain(b: Batch) -> None:
            self.gradients(b.to(device), variant)

        if device.type != "cuda":
            return plain
        start = time.monotonic()
        try:
            static = batch.to(device)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(2):
                    self.gradients(static, variant)
            torch.cuda.current_stream().wait_stream(stream)
            torch.cuda.synchronize()
            compiled = time.monotonic()
            graph = torch.cuda.CUDAGraph()
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            with torch.cuda.graph(graph, pool=self._pool):
                self.gradients(static, variant)
            torch.cuda.synchronize()
        except Exception as exc:  # whatever the recorder refuses: the run goes on without it and says so
            self.log("not_recorded", variant=str(variant), reason=f"{type(exc).__name__}: {exc}"[:600])
            torch.cuda.synchronize()
            return plain
        seconds = (round(compiled - start, 1), round(time.monotonic() - compiled, 1))
        memory = round(torch.cuda.max_memory_allocated() / 2**30, 1)
        self.log("recorded", variant=str(variant), compile_s=seconds[0], record_s=seconds[1], memory_gib=memory)

        def replay(b: Batch) -> None:
            for target, source in zip(static.tensors(), b.tensors(), strict=True):
                target.copy_(source.pin_memory(), non_blocking=True)
            graph.replay()

        return replay

    @torch.no_grad()
    def _balance(self) -> None:
        """Move the selection bias of every expert against its load; no gradient is involved."""
        for layer, load in enumerate(self.loads()):
            bias = self.params[f"layers.{layer}.ffn.gate.bias"]
            bias.add_(torch.sign(1 / len(load) - load), alpha=self.train["balance_rate"])

    def loads(self) -> Tensor:
        """f32 [L, E]: shares of the last step."""
        count = self.load_shape[0] * self.load_shape[1]
        return self.flat.grad[self.flat.size : self.flat.size + count].view(self.load_shape)

    @torch.no_grad()
    def report(self, progress: float, step_ms: float, wait_ms: float) -> bool:
        """Log one line; on a non-finite loss restore the last good parameters with half the rate and say so."""
        loss, index, balance = self.flat.grad[-3:].tolist()
        loads = self.loads() * self.load_shape[1]
        finite = math.isfinite(loss)
        self.log(
            "step" if finite else "restored",
            step=self.step_number,
            progress=round(progress, 4),
            loss=round(loss, 5),
            index=round(index, 4),
            balance=round(balance, 4),
            load_max=round(float(loads.max()), 2),
            load_min=round(float(loads.min()), 3),
            rate=round(rate_at(progress, self.train) * self.scale, 4),
            step_ms=round(step_ms, 1),
            wait_ms=round(wait_ms, 1),
            official=progress >= self.train["official_from"],
        )
        source, target = (self.params, self._safe) if finite else (self._safe, self.params)
        for name, value in target.items():
            value.copy_(source[name])
        if not finite:
            self.scale *= 0.5
            self.flat.restart()
        return finite

    def weights(self) -> dict[str, Tensor]:
        """Training values as they are saved; the image bias is the text's."""
        out = {n: v.detach() for n, v in self.params.items()}
        for name in list(out):
            if name.endswith("gate.bias_vl"):
                out[name] = out[name.removesuffix("_vl")]
        return saved(out)


# --------------------------------------------------------------------- set-up


def choose_ops(model: Model, device: torch.device, log: Log, *, compile_ops: bool) -> Ops:
    """Grouped experts when the device's product agrees with the dense path; then the compiled functions if asked."""
    ops = replace(model.ops)
    if device.type == "cuda":
        problem = grouped_problem(model.config, device)
        if problem is None:
            ops.routed = experts.grouped_experts
        log("experts", path="dense" if problem else "grouped", reason=problem)
    if not compile_ops:
        return ops
    torch._dynamo.config.recompile_limit = 64  # one function serves several shapes
    return ops.compiled()


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


def saved(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Values in the types of the files: bf16 except what the checkpoint holds in f32."""
    return {n: v.to(torch.float32 if kind_of(n) == "f32" else torch.bfloat16) for n, v in weights.items()}


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


def group_up(device: str) -> tuple[int, int, torch.device, Any]:
    """(rank, processes, device, CPU group); one process unless started by torchrun."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        return 0, 1, torch.device(device), None
    rank = int(os.environ["LOCAL_RANK"])
    place = torch.device(device, rank) if device == "cuda" else torch.device(device)
    if device == "cuda":
        torch.cuda.set_device(place)
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return rank, world, place, dist.new_group(backend="gloo")


def run(args: argparse.Namespace) -> dict[str, Any]:
    """The whole run; returns what result.json holds (empty in all processes but the first)."""
    args.out.mkdir(parents=True, exist_ok=True)
    recipe = yaml.safe_load(args.recipe.read_text(encoding="utf-8"))
    recipe["train"] |= {k: yaml.safe_load(v) for k, v in (pair.split("=", 1) for pair in args.set)}
    rank_hint = int(os.environ.get("LOCAL_RANK", "0"))
    with Log(args.out / ("log.jsonl" if rank_hint == 0 else f"log-{rank_hint}.jsonl")) as log:
        return logged_run(args, recipe, log, rank_hint)


def logged_run(args: argparse.Namespace, recipe: dict[str, Any], log: Log, rank_hint: int) -> dict[str, Any]:
    """The run of a recipe with the command line's values in it."""
    train = recipe["train"]
    shared = Value("d", 0.0)
    # the writers start before the device does: a forked process must not inherit it
    stream = loader(Rows(args.data, train, train["seed"] + 17 * rank_hint, shared), args.workers)
    first = next(stream)
    rank, world, device, group = group_up(args.device)
    torch.set_float32_matmul_precision("high")
    config = load_model_config(args.data / "config.json")
    writer = Writer(args.data)
    numerics = Numerics(torch.bfloat16 if device.type == "cuda" else torch.float32)
    classes = torch.from_numpy(token_classes(writer.tokenizer)).to(device)
    model = Model(config, classes, numerics=numerics)
    params = initial_parameters(config, seed=train["seed"], device=device)
    if args.init is not None:
        start = load_start(args.init)
        params = {n: start[n].to(device).requires_grad_(v.requires_grad) for n, v in params.items()}
    trainer = Trainer(model, recipe, params, log, world)
    judge = Judge(model, writer, train, seed=train["seed"] + 5, count=train["judged"] if rank == 0 else 1)
    count = sum(v.numel() for v in params.values())
    log("start", torch=torch.__version__, device=str(device), parameters=count, processes=world, init=str(args.init),
        settings=train)  # fmt: skip
    model.ops = choose_ops(model, device, log, compile_ops=args.compile == "auto" and device.type == "cuda")
    train_until(trainer, judge, log, args, rank=rank, group=group, stream=stream, first=first, shared=shared)
    if rank:
        return {}
    weights = trainer.weights()
    pieces = save_pieces(args.out, weights)
    last = Judge(model, writer, train, seed=EVALUATION_SEED, count=train["judged_last"])
    scores = last.score({n: v.float() for n, v in weights.items()})
    loads = (trainer.loads() * config.n_routed_experts).tolist()
    result = {"scores": scores, "steps": trainer.step_number, "pieces": pieces, "rate_scale": trainer.scale}
    result |= {"seconds": round(time.monotonic() - log.start, 1)}
    log("done", **result)
    result["loads"] = [[round(v, 3) for v in layer] for layer in loads]
    (args.out / "result.json").write_text(json.dumps(result) + "\n", encoding="utf-8")
    return result


def train_until(
    trainer: Trainer,
    judge: Judge,
    log: Log,
    args: argparse.Namespace,
    *,
    rank: int,
    group: Any,
    stream: Iterator[Batch],
    first: Batch,
    shared: Any,
) -> None:
    """Steps until ``--minutes`` after the log's start, or exactly ``--steps`` of them.

    Progress is the share of the time that remained after set-up, or of the steps; the first process decides it.
    """
    end = log.start + args.minutes * 60
    begin = last = time.monotonic()
    next_eval = begin + args.eval_every
    done = since = 0
    waited = 0.0
    batch = first
    running: deque[Any] = deque()
    clock = torch.zeros(1, dtype=torch.float64)
    cuda = trainer.flat.grad.is_cuda
    while True:
        progress = (time.monotonic() - begin) / max(end - begin, 1e-3) if args.steps is None else done / args.steps
        if group is not None:
            clock[0] = progress
            dist.broadcast(clock, 0, group=group)
            progress = float(clock[0])
        if progress >= 1:
            break
        shared.value = progress
        trainer.step(batch, progress)
        done += 1
        since += 1
        if cuda:  # the host runs at most two steps ahead
            event = torch.cuda.Event()
            event.record()
            running.append(event)
            if len(running) > 2:
                running.popleft().synchronize()
        before = time.monotonic()
        batch = next(stream)
        waited += time.monotonic() - before
        if done % args.report_every == 0:
            float(trainer.flat.grad[-1])
            now = time.monotonic()
            trainer.report(progress, (now - last) / since * 1e3, waited / since * 1e3)
            if rank == 0 and now >= next_eval:
                save_pieces(args.out, trainer.weights())  # so that a run that is cut short still leaves a model
                log("eval", step=trainer.step_number, progress=round(progress, 3), scores=judge.score(trainer.params))
                next_eval = time.monotonic() + args.eval_every
            last, since, waited = time.monotonic(), 0, 0.0


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="train nano")
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--recipe", type=Path, default=HERE / "nano.yaml")
    parser.add_argument("--init", type=Path, help="continue from a run's folder or from a checkpoint")
    parser.add_argument("--minutes", type=float, default=6.0)
    parser.add_argument("--steps", type=int, help="train this many steps instead of --minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", choices=("auto", "off"), default="auto")
    parser.add_argument("--workers", type=int, default=10, help="processes that write rows, per GPU")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="a train value of the recipe")
    parser.add_argument("--eval-every", type=float, default=45.0, help="seconds between held-out scores")
    parser.add_argument("--report-every", type=int, default=25, help="steps between log lines; each waits once")
    return parser.parse_args(argv)


def main() -> None:
    args = arguments()
    try:
        run(args)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


if __name__ == "__main__":
    main()
