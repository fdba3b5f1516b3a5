"""How evaluations look: the running score, the result in every form, the list of tasks, a dry run."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepinfer_cli import render
from deepinfer_cli.options import OutputFormat, accept

if TYPE_CHECKING:
    from deepinfer_engine.evals.items import ItemSet
    from deepinfer_engine.evals.log import LogContent
    from deepinfer_engine.evals.prompt import Plan
    from deepinfer_engine.evals.report import Expect
    from deepinfer_engine.evals.score import Comparison
    from deepinfer_engine.evals.task import LoadedTask

FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)
#: Seconds between two lines of progress where there is no terminal to redraw.
_LINE_EVERY_S = 30.0
#: Seconds between two redraws on a terminal.
_DRAW_EVERY_S = 0.2


class Meter:
    """Progress with the running score and its interval: a redrawn line on a terminal, a line now and then elsewhere."""

    def __init__(self, task: str, *, quiet: bool):
        self._task = task
        self._quiet = quiet
        self._live = sys.stderr.isatty()
        self._next = time.monotonic() + (0.0 if self._live else _LINE_EVERY_S)
        self._drawn = False

    def __call__(self, done: int, total: int, correct: int, graded: int) -> None:
        now = time.monotonic()
        if self._quiet or (now < self._next and done < total) or (not self._live and now < self._next):
            return
        self._next = now + (_DRAW_EVERY_S if self._live else _LINE_EVERY_S)
        text = f"{self._task} {done}/{total}  {_running(correct, graded)}"
        if self._live:
            sys.stderr.write(f"\r\x1b[K{text}")
            sys.stderr.flush()
            self._drawn = True
        else:
            render.note(text)

    def end(self) -> None:
        if self._drawn:
            sys.stderr.write("\n")
            self._drawn = False


def _running(correct: int, graded: int) -> str:
    from deepinfer_engine.evals.report import percent
    from deepinfer_engine.evals.score import wilson

    if not graded:
        return "no score yet"
    low, high = wilson(correct, graded)
    return f"{percent(correct / graded)} % so far, 95 % {percent(low)} to {percent(high)}"


def task_list(form: OutputFormat) -> str:
    """Every shipped task, where its questions are and how they are asked."""
    from deepinfer_engine.evals.task import shipped_tasks

    accept(form, *FORMATS, verb="eval list")
    columns = ("task", "aliases", "questions", "k", "grader", "vendor", "data", "description")
    rows: list[tuple[render.Cell, ...]] = []
    for loaded in shipped_tasks():
        t = loaded.task
        where = "shipped" if t.data.hub is None else f"{t.data.hub}@{str(t.data.revision)[:8]}"
        rows.append(
            (t.name, " ".join(t.aliases) or None, _count(loaded), t.k, t.grader, t.vendor.score if t.vendor else None,
             where + (" (gated)" if t.data.gated else ""), t.description)
        )  # fmt: skip
    return render.rows_text(form, "eval-list", columns, rows)


def _count(loaded: LoadedTask) -> int | None:
    path = loaded.data_file
    if path is None:
        return None if loaded.task.data.skip_where else loaded.task.data.rows
    return sum(bool(line.strip()) for line in path.read_text(encoding="utf-8").splitlines())


def dry_run(
    form: OutputFormat, loaded: LoadedTask, items: ItemSet | None, plan: Plan, identity: Mapping[str, Any]
) -> str:
    """What would run: questions, samples, sampling, who answers, which file would be written."""
    from deepinfer_engine.evals.report import flat

    data = loaded.task.data
    content: dict[str, Any] = {
        "task": loaded.task.name,
        "task_digest": loaded.digest,
        "data": items.source if items else f"{data.hub}:{data.file} (not on this machine, would be downloaded)",
        "data_revision": data.revision if items is None or items.revision else None,
        "data_sha256": items.sha256 if items else None,
        "questions": len(items.items) if items else data.rows,
        "skipped": items.skipped if items else None,
        "k": plan.k,
        "samples": len(items.items) * plan.k if items else None,
        "seeds": list(plan.seeds),
        "sampling": plan.sampling.model_dump(mode="json"),
        "grader": loaded.task.grader,
        "backend": dict(identity),
        "log": f"eval-{loaded.task.name}-*.jsonl",
    }
    return _key_values(form, "eval-dry-run", content, flat(content))


def _key_values(form: OutputFormat, schema: str, content: dict[str, Any], flat: Mapping[str, Any]) -> str:
    if form is OutputFormat.json:
        return render.json_text(render.document(schema, content))
    rows = [(key, ", ".join(map(str, v)) if isinstance(v, list) else v) for key, v in flat.items()]
    return render.rows_text(form, schema, ("key", "value"), rows)


# ------------------------------------------------------------------- results


def result(
    form: OutputFormat,
    content: LogContent,
    log: Path,
    expect: Expect | None,
    verdict: str | None,
    comparison: Comparison | None,
    changed: Mapping[str, list[Any]],
) -> str:
    """The result: a page, one JSON document, or one row per question."""
    from dataclasses import asdict

    from deepinfer_engine.evals.report import document, per_question

    if form in (OutputFormat.jsonl, OutputFormat.csv):
        columns = ("question", "correct", "samples", "gold", "extracted")
        return render.rows_text(form, "eval-questions", columns, per_question(content))
    found = document(content, log)
    found["expect"] = None if expect is None else {**asdict(expect), "met": verdict is None, "reason": verdict}
    found["compare"] = None if comparison is None else {**asdict(comparison), "differences": dict(changed)}
    if form is OutputFormat.json:
        return render.json_text(render.document("eval", found))
    return _page(found)


def _page(found: Mapping[str, Any]) -> str:
    identity, k = found["identity"], found["k"]
    questions = f"{found['questions']} questions" + (
        f", {identity['skipped']} rows left out" if identity.get("skipped") else ""
    )
    sampling = ", ".join(f"{name} {value}" for name, value in identity["sampling"].items())
    lines = [
        f"{found['task']}: {_headline(found)}",
        "",
        _scores(found),
        _outcomes(found),
        f"questions  {questions} from {identity['data']} (sha256 {identity['data_sha256'][:12]})",
        f"answered   {_who(identity['backend'])}",
        f"sampling   {sampling}",
        f"seeds      {_seeds(found['seeds'])}{_repeatable(found['reproducible'])}",
        f"grader     {identity['grader']}" + (f" by {identity['judge']['model']}" if identity["judge"] else ""),
        f"interval   {found['interval']}",
        f"log        {found['log']}",
    ]
    if not found["complete"]:
        lines.insert(1, f"not complete: {found['samples']} of {found['samples_expected']} samples")
    for error, count in found["errors"].items():
        lines.append(f"errored    {count} x {error}")
    if found["expect"] is not None:
        lines.append(f"expected   {found['expect']['label']}: {found['expect']['reason'] or 'inside the interval'}")
    if found["compare"] is not None:
        lines += _compared(found["compare"])
    if k == 1 and found["avg_at_k"]["of"] and found["questions"] <= 100:
        lines.append(f"one question is {100 / found['questions']:.1f} points; --k raises the number of samples")
    return "\n".join(lines) + "\n"


def _headline(found: Mapping[str, Any]) -> str:
    from deepinfer_engine.evals.report import percent

    share = found["avg_at_k"]
    if share["value"] is None:
        return "ungraded" if found["outcomes"]["ungraded"] else "no sample was answered"
    return (
        f"{percent(share['value'])} % (avg@{found['k']}, {share['hits']} of {share['of']} samples), "
        f"95 % {percent(share['low'])} to {percent(share['high'])} %"
    )


def _scores(found: Mapping[str, Any]) -> str:
    from deepinfer_engine.evals.report import percent

    k = found["k"]
    names = {"avg_at_k": f"avg@{k}"} | ({"pass_at_k": f"pass@{k}", "cons_at_k": f"cons@{k}"} if k > 1 else {})
    rows = [
        (name, *(None if s[x] is None else percent(s[x]) for x in ("value", "low", "high")), s["hits"], s["of"],
         "samples" if key == "avg_at_k" else "questions")
        for key, name in names.items()
        for s in (found[key],)
    ]  # fmt: skip
    return render.table(("score", "%", "low", "high", "hits", "of", "unit"), rows)


def _outcomes(found: Mapping[str, Any]) -> str:
    outcomes = found["outcomes"]
    return render.table((*outcomes, "samples"), [(*outcomes.values(), found["samples"])])


def _who(backend: Mapping[str, Any]) -> str:
    if backend["kind"] == "endpoint":
        return f"{backend['model']} at {backend['url']}"
    weights = "embedded weights" if backend["embedded"] else f"weights {backend['weights_digest'][:12]}"
    return f"profile {backend['profile']} ({backend['profile_digest'][:12]}), {weights}, on {backend['device']}"


def _seeds(seeds: list[int]) -> str:
    if len(seeds) > 1 and seeds == list(range(seeds[0], seeds[0] + len(seeds))):
        return f"{seeds[0]} to {seeds[-1]}"
    return ", ".join(map(str, seeds))


def _repeatable(flag: bool | None) -> str:
    return "" if flag is None else ", reproducible" if flag else ", not reproducible (numerics.batch_invariant is off)"


def _compared(found: Mapping[str, Any]) -> list[str]:
    significant = found["p_value"] < 0.05
    word = "no difference beyond luck"
    if significant:
        word = "this run is worse" if found["worse"] > found["better"] else "this run is better"
    lines = [
        f"compared   better on {found['better']}, worse on {found['worse']}, same on {found['same']} questions; "
        f"p = {found['p_value']:.2g} ({found['test']}): {word}"
    ]
    for name, (here, there) in found["differences"].items():
        lines.append(f"           {name}: {here} here, {there} there")
    return lines
