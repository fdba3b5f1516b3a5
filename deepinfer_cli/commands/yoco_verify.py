"""``deepinfer yoco-verify``: prove what prefix hits and replays do, in integers and on real weights."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import ArtefactError, CheckFailed, UsageError

_FORMATS = (OutputFormat.table, OutputFormat.json)


def command(
    level: Annotated[int, typer.Option("--level", min=1, max=2, help="1: integers, no weights. 2: numbers.")] = 1,
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Checkpoint instead of the embedded model.")
    ] = None,
    mutate: Annotated[
        str | None, typer.Option("--mutate", metavar="NAME|all", help="Inject known faults, which must be noticed.")
    ] = None,
    tokens: Annotated[
        Path | None, typer.Option("--tokens", metavar="FILE", help="Level 2: JSON list of token ids to force.")
    ] = None,
    ranks: Annotated[
        int, typer.Option("--ranks", min=1, max=1024, help="Level 2: virtual ranks it runs on, judged by one.")
    ] = 1,
    max_kl: Annotated[
        float | None,
        typer.Option("--max-kl", min=0, help="Level 2: most mean KL of a replay, nat (0.005; after a hit 0.02)."),
    ] = None,
    min_top1: Annotated[
        float | None,
        typer.Option("--min-top1", min=0, max=1, help="Level 2: least share of equal best tokens (0.98; 0.96)."),
    ] = None,
    min_overlap: Annotated[
        float | None,
        typer.Option("--min-overlap", min=0, max=1, help="Level 2: least overlap of the top 20 (0.95)."),
    ] = None,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
    quiet: options.Quiet = False,
) -> None:
    """Check prefix hits and bounded replay; exit 6 when a check fails or a fault goes unnoticed.

    Level 1 compares every integer (plans, chunks, floors, slots, cached names) with the definitions, for the model
    and for the released config. Level 2 forces a fixed conversation through the model: what must be equal bit by bit
    is, and bounded replays drift no further than the budget.

    \b
    Examples:
      deepinfer yoco-verify --level 1
      deepinfer yoco-verify --level 2 --model DIR --format json
      deepinfer yoco-verify --level 2 --ranks 64
      deepinfer yoco-verify --level 1 --mutate all
      deepinfer yoco-verify --level 2 --mutate ring-short
    """
    from deepinfer_engine.verify.yoco_subject import MUTATIONS
    from deepinfer_engine.verify.yoco_subject import mutate as check_name

    options.accept(format, *_FORMATS, verb="yoco-verify")
    if level == 1 and (tokens is not None or ranks > 1):
        raise UsageError("--tokens and --ranks belong to --level 2")
    if mutate not in (None, "all"):
        check_name(mutate)
        if level not in MUTATIONS[mutate].levels:
            raise UsageError(f"mutation {mutate} changes no number that level {level} looks at", hint="use --level 1")
    names = [n for n, m in MUTATIONS.items() if level in m.levels] if mutate == "all" else [mutate] if mutate else []
    if level == 1:
        text, bad = _level1(model, names, format, quiet)
    else:
        given = {k: v for k, v in (("kl", max_kl), ("top1", min_top1), ("overlap", min_overlap)) if v is not None}
        text, bad = _level2(model, names, tokens, ranks, given, format, quiet)
    render.deliver(text, out)
    if bad:
        shown = "\n".join(f"  {line}" for line in bad)
        raise CheckFailed(f"yoco-verify level {level}: {len(bad)} failed\n{shown}")
    render.note(f"yoco-verify level {level}: passed", quiet=quiet)


def _level1(model: Path | None, names: list[str], form: OutputFormat, quiet: bool) -> tuple[str, list[str]]:
    from deepinfer_engine.runtime.threads import set_thread_defaults

    set_thread_defaults(rows=1)
    from deepinfer_engine.sim.models import EMBEDDED, RELEASE, find_model
    from deepinfer_engine.verify.yoco_level1 import noticed_at_level1, verify_level1
    from deepinfer_engine.verify.yoco_subject import MUTATIONS

    mine, release = find_model(str(model or EMBEDDED)), find_model(RELEASE)
    configs = {mine.name: mine.config, release.name: release.config}
    rows: list[tuple[render.Cell, ...]] = []
    bad: list[str] = []
    for label, config in configs.items():
        if names:
            for name in names:
                by = noticed_at_level1(config, name)
                rows.append((label, name, MUTATIONS[name].what, by or "nothing"))
                bad += [] if by else [f"{label}: mutation {name} was not noticed"]
            continue
        render.note(f"level 1: {label}", quiet=quiet)
        for r in verify_level1(config):
            rows.append((label, r.check, r.title, r.compared, r.failed, r.first or None))
            bad += [f"{label} {r.check}: {r.first}"] if r.failed else []
    columns = ("model", "mutation", "fault", "noticed by") if names else (
        "model", "check", "what", "compared", "failed", "first")  # fmt: skip
    if form is OutputFormat.table and not names:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return _text(form, 1, columns, rows, bad), bad


def _level2(
    model: Path | None,
    names: list[str],
    tokens: Path | None,
    ranks: int,
    limits: dict[str, float],
    form: OutputFormat,
    quiet: bool,
) -> tuple[str, list[str]]:
    from deepinfer_engine.config.resources import model_dir
    from deepinfer_engine.config.strict_json import read_json
    from deepinfer_engine.runtime.threads import set_thread_defaults

    ids = None
    if tokens is not None:
        ids = read_json(tokens)
        if not isinstance(ids, list) or any(isinstance(t, bool) or not isinstance(t, int) for t in ids):
            raise ArtefactError(f"{tokens}: expected a JSON list of integers")
    set_thread_defaults(rows=64)
    from dataclasses import replace

    from deepinfer_engine.verify.yoco import open_level2
    from deepinfer_engine.verify.yoco_level2 import FROZEN
    from deepinfer_engine.verify.yoco_subject import MUTATIONS, Subject

    def story(text: str) -> None:
        render.note(f"level 2: {text}", quiet=quiet)

    check, more = open_level2(model or model_dir("nano"), ids, ranks=ranks, progress=story)
    if names:
        caught = []
        for name in names:
            story(f"mutation {name}")
            caught.append((name, MUTATIONS[name].what, check.noticed(name)))
        bad = [f"mutation {name} was not noticed" for name, _, by in caught if not by]
        rows = [(name, what, by or "nothing") for name, what, by in caught]
        return _text(form, 2, ("mutation", "fault", "noticed by"), rows, bad), bad
    budgets = {name: replace(budget, **limits) for name, budget in FROZEN.items()}
    result = check.judge(Subject(), progress=story)
    result = replace(result, rows=(*more, *result.rows))
    bad = result.verdict(budgets)
    equal = [(r.name, r.compared, r.largest, r.good) for r in result.rows]
    drift = [
        (
            d.name,
            d.positions,
            d.mean_kl,
            d.max_kl,
            d.late_kl,
            d.top1,
            d.overlap,
            d.max_logprob,
            d.within(budgets[d.name]),
        )
        for d in result.drifts
    ]
    first = ("bit-identical", "compared", "largest", "good")
    second = ("drift", "positions", "mean_kl", "max_kl", "late_kl", "top1", "overlap20", "max_logprob", "within")
    if form is OutputFormat.json:
        content = {
            "level": 2,
            "prompt": result.prompt,
            "forced": result.forced,
            "budgets": {name: vars(budget) for name, budget in budgets.items()},
            "comparisons": [dict(zip(first, row, strict=True)) for row in equal],
            "drifts": [dict(zip(second, row, strict=True)) for row in drift],
            "passed": not bad,
        }
        return render.json_text(render.document("yoco-verify", content)), bad
    head = f"prompt {result.prompt} tokens, {result.forced} forced, float\n"
    return head + render.table(first, equal) + "\n" + render.table(second, drift), bad


def _text(
    form: OutputFormat, level: int, columns: tuple[str, ...], rows: list[tuple[render.Cell, ...]], bad: list[str]
) -> str:
    if form is OutputFormat.table:
        return render.table(columns, rows)
    listed = [dict(zip(columns, row, strict=True)) for row in rows]
    return render.json_text(render.document("yoco-verify", {"level": level, "rows": listed, "passed": not bad}))
