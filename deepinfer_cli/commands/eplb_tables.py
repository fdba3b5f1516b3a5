"""Tables of ``deepinfer eplb-plan``: the report of one plan, and the comparison of planners."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from deepinfer_engine.eplb.bench import BenchResult
    from deepinfer_engine.eplb.planner import Job, Outcome
    from deepinfer_engine.eplb.replan import ReplanResult
    from deepinfer_engine.eplb.report import PlanReport

#: Wide enough for every column when output is not a terminal.
_PIPE_WIDTH = 160


def _console() -> Console:
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=_PIPE_WIDTH)


def _num(value: float | None) -> str:
    return "–" if value is None else f"{value:.4f}"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    for k, name in enumerate(columns):
        table.add_column(name, justify="left" if k == 0 else "right", no_wrap=True)
    return table


def print_report(outcome: Outcome, job: Job, notes: list[str], written: list[str]) -> None:
    """The whole report on stdout: what was planned, balance, layers, ladder, moves, verdict."""
    report, console = outcome.report, _console()
    s = report.shape
    held = f" + {s['held_out']} held out" if s["held_out"] else ""
    console.print(
        f"{s['layers']} layers x {s['experts']} experts on {s['live_ranks']} ranks x {s['slots_per_rank']} slots, "
        f"{s['steps']} steps{held}, {s['dispatch']} dispatch, planned in {s['plan_s']:.2f} s ({s['loop']} loop)\n",
        soft_wrap=True,
    )
    console.print(_windows(report, job))
    console.print()
    console.print(_layers(report, job))
    if report.ladder:
        console.print()
        console.print(_ladder(report))
    console.print()
    m = report.moves
    against = "the old plan" if job.old is not None else "the identity layout"
    console.print(
        f"moves from {against}: {m['total']} experts ({m['mean_per_layer']:.1f} of {m['slots_per_layer']} per layer), "
        f"{m['bytes'] / 2**30:.2f} GiB; busiest rank {m['max_rank']} experts, "
        f"{m['max_rank_bytes'] / 2**30:.2f} GiB, {m['transfer_s']:.2f} s",
        soft_wrap=True,
    )
    console.print(f"replicas that share a rank: {report.colocations}")
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
    console.print(f"\n{report.verdict.sentence}", soft_wrap=True, markup=False)
    for line in written:
        console.print(line, soft_wrap=True, markup=False)


def _windows(report: PlanReport, job: Job) -> Table:
    table = _table(
        "balance (1 is perfect)", "plan, window", "moe_lb", "excess over noise", "moe_lb_step", "p99", "noise floor"
    )
    on = "holdout" if "holdout" in report.windows else "train"
    names = {
        "before": ("old plan" if job.old else "identity layout") + f", {on}",
        "train": "new plan, train",
        "holdout": "new plan, holdout",
    }
    for key in ("before", "train", "holdout"):
        if key in report.windows:
            w = report.windows[key]
            table.add_row(names[key], _num(w.moe_lb), _num(w.excess), _num(w.moe_lb_step), _num(w.p99), _num(w.floor))
    return table


def _layers(report: PlanReport, job: Job) -> Table:
    old = "old" if job.old is not None else "identity"
    table = _table(
        "layers, moe_lb", "layer", old, "train", "holdout", "floor", "excess", "most copies", "moves", "start"
    )
    for row in report.layers:
        best = row.holdout if row.holdout is not None else row.train
        excess = None if best is None or row.floor is None else best - row.floor
        name = f"{row.layer_id} {row.kind}".strip() + ("" if row.signal else "  no signal")
        table.add_row(
            name,
            _num(row.before),
            _num(row.train),
            _num(row.holdout),
            _num(row.floor),
            _num(excess),
            str(row.hottest_copies),
            str(row.moves),
            row.start,
        )
    return table


def _ladder(report: PlanReport) -> Table:
    table = _table("redundancy", "extra per rank", "slots", "moe_lb", "GiB per rank", "break-even steps")
    for rung in report.ladder:
        even = "–" if rung.break_even_steps is None else f"{rung.break_even_steps:,}"
        table.add_row(
            str(rung.redundant), str(rung.slots_per_rank), _num(rung.moe_lb), f"{rung.gib_per_rank:.2f}", even
        )
    return table


def print_bench(result: BenchResult, notes: list[str]) -> None:
    """One row per planner: balance, excess, moves, seconds."""
    console = _console()
    table = _table(
        f"{result.recipe}: {result.shape}",
        "planner",
        "train",
        "next",
        "excess",
        "vs totals",
        "p99",
        "wasted slots",
        "CPU s",
        "from",
    )
    for row in result.rows:
        ratio = "–" if row.excess_ratio is None else f"{row.excess_ratio:.2f}x"
        cpu = "–" if row.cpu_s is None else f"{row.cpu_s:.3f}"
        table.add_row(
            row.planner,
            _num(row.train),
            _num(row.next),
            _num(row.excess),
            ratio,
            _num(row.p99),
            f"{row.wasted:.1f}",
            cpu,
            row.origin,
        )
    console.print(table)
    console.print(
        f"moe_lb_step, mean of seeds {list(result.seeds)}; noise floor {_num(result.floor)}; "
        "vs totals = excess ÷ that of longest-first"
    )
    for note in (*result.notes, *notes):
        console.print(f"note: {note}", soft_wrap=True, markup=False)


def print_replan(result: ReplanResult, notes: list[str]) -> None:
    """One row per strategy: what it moves at each re-plan and how it does until the next."""
    console = _console()
    table = _table(
        f"{result.recipe}: {result.shape}", "strategy", "moves per layer", "of the slots", "moe_lb_step, next window"
    )
    for row in result.rows:
        table.add_row(row.strategy, f"{row.moves:.1f}", f"{row.share:.1%}", _num(row.next))
    console.print(table)
    console.print(f"mean of {result.replans} re-plans on seeds {list(result.seeds)}")
    for note in notes:
        console.print(f"note: {note}", soft_wrap=True, markup=False)
