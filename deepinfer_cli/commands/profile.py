"""``deepinfer profile``: list, show, validate and compare deployment profiles."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_cli.options import OutputFormat
from deepinfer_engine.errors import DeepInferError, ProfileError, UsageError

if TYPE_CHECKING:
    from deepinfer_engine.config.profile import LoadedProfile

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    context_settings=_CONTEXT,
    help="List, show, validate and compare deployment profiles.",
)

_Name = Annotated[
    str,
    typer.Argument(
        metavar="NAME|PATH",
        help="A shipped profile, or a file (with a / or ending in .yaml).",
        autocompletion=options.complete_profile,
    ),
]

_COLUMNS = (
    "name",
    "role",
    "platform",
    "gpus",
    "ep",
    "dp",
    "redundant",
    "rows",
    "chunk",
    "eplb",
    "verify",
    "description",
)


@app.command("list", context_settings=_CONTEXT)
def list_profiles(format: options.Format = OutputFormat.table, out: options.Out = None) -> None:
    """List the shipped profiles.

    rows and redundant are per rank, chunk is prompt tokens per rank and step, eplb is window/period in steps.

    \b
    Examples:
      deepinfer profile list
      deepinfer profile list --format csv
    """
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.config.resources import profile_names

    options.accept(format, *_ROWS_FORMATS, verb="profile list")
    rows: list[tuple[render.Cell, ...]] = []
    for name in profile_names():
        p = load_profile(name).profile
        eplb = f"{p.eplb.window_steps}/{p.eplb.period_steps}" if p.eplb.period_steps else "off"
        rows.append(
            (p.name, p.role, p.hardware.platform, p.hardware.gpus, p.parallel.ep, p.parallel.dp,
             p.parallel.redundant_experts_per_rank, p.sched.max_rows_per_rank, p.sched.prefill_chunk_tokens, eplb,
             p.spec.verify, p.description)
        )  # fmt: skip
    render.deliver(render.rows_text(format, "profile-list", _COLUMNS, rows), out)


_ROWS_FORMATS = (OutputFormat.table, OutputFormat.json, OutputFormat.jsonl, OutputFormat.csv)


@app.command("show", context_settings=_CONTEXT)
def show(
    name: _Name,
    resolved: Annotated[bool, typer.Option("--resolved", help="Every key, defaults included.")] = False,
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value comes from.")] = False,
    set_: options.Set = None,
    format: options.Format = OutputFormat.text,
    out: options.Out = None,
) -> None:
    """Show a profile with its reasons or origins.

    Text is YAML, with the reason of each value behind it; the table describes every key. Without --resolved, the
    keys that the profile, its base and --set state. The resolved YAML is a complete profile: loading it gives the
    same digest.

    \b
    Examples:
      deepinfer profile show decode-ep64
      deepinfer profile show decode-ep128 --resolved --origin
      deepinfer profile show cpu-nano --set sched.max_rows_per_rank=4 --resolved > mine.yaml
    """
    from deepinfer_engine.config.profile import load_profile, render_yaml
    from deepinfer_engine.config.schema import describe_key, leaves

    options.accept(format, OutputFormat.text, *_ROWS_FORMATS, verb="profile show")
    loaded = load_profile(name, set_ or ())
    keys = list(loaded.origins) if resolved else list(loaded.stated)
    if format is OutputFormat.text:
        notes = {k: loaded.origins[k] for k in keys} if origin else dict(loaded.reasons)
        if resolved:
            keys.remove("extends")  # the base's values are all stated, the result stands alone
        text = f"# digest {loaded.digest}\n{render_yaml(loaded, keys, notes)}"
    elif format is OutputFormat.json:
        text = render.json_text(_show_document(loaded, keys, origin))
    else:
        values = leaves(loaded.profile)
        columns = ("key", "value", *(("origin",) if origin else ()), "description")
        rows = [
            (key, _shown(values[key]), *((loaded.origins[key],) if origin else ()), describe_key(key)) for key in keys
        ]
        text = render.rows_text(format, "profile-show", columns, rows)
    render.deliver(text, out)


def _show_document(loaded: LoadedProfile, keys: list[str], origin: bool) -> dict[str, object]:
    from deepinfer_engine.config.schema import leaves

    values = leaves(loaded.profile)
    content: dict[str, object] = {"digest": loaded.digest, "values": {key: values[key] for key in keys}}
    if origin:
        content["origins"] = {key: loaded.origins[key] for key in keys}
    return render.document("profile-show", content)


def _shown(value: object) -> str:
    from deepinfer_engine.config.yaml import format_scalar

    return format_scalar(value)


@app.command("validate", context_settings=_CONTEXT)
def validate(
    files: Annotated[list[str], typer.Argument(metavar="NAME|PATH...", help="Profiles to check.")],
    model: Annotated[
        Path | None, typer.Option("--model", metavar="DIR", help="Also check against this model's config.json.")
    ] = None,
    set_: options.Set = None,
    format: options.Format = OutputFormat.table,
) -> None:
    """Check profiles, and their fit to a model.

    All problems of all of them are printed; one bad profile makes the exit code 2.

    \b
    Examples:
      deepinfer profile validate my.yaml other.yaml
      deepinfer profile validate decode-ep64 --model /models/DeepSeek-V4.1-Flash
    """
    options.accept(format, *_ROWS_FORMATS, verb="profile validate")
    rows: list[tuple[render.Cell, ...]] = []
    failures: list[DeepInferError] = []
    for name in files:
        try:
            digest = _check(name, set_ or [], model)
        except UsageError as exc:
            failures.append(exc)
            rows.append((name, "invalid", None, exc.message))
        else:
            rows.append((name, "ok", digest, None))
    if format is OutputFormat.table:
        rows = [row[:3] for row in rows]
    columns = ("profile", "result", "digest", "problem")[: len(rows[0])]
    render.out(render.rows_text(format, "profile-validate", columns, rows))
    if failures:
        messages = "\n".join(exc.message for exc in failures)
        hints = [exc.hint for exc in failures if exc.hint]
        raise ProfileError(messages, hint=hints[0] if hints else None)


def _check(name: str, sets: list[str], model: Path | None) -> str:
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.config.rules import check_against_model

    loaded = load_profile(name, sets)
    if model is not None:
        from deepinfer_engine.config.model import load_model_config

        config = load_model_config(model)
        bad = check_against_model(
            loaded.profile,
            config.n_routed_experts,
            max_position_embeddings=config.max_position_embeddings,
            window=config.sliding_window,
            draft_tokens=config.dspark_block_size if config.num_nextn_predict_layers else 0,
        )
        if bad:
            raise ProfileError("\n".join(f"{loaded.source}: {text}" for text in bad))
    return loaded.digest


@app.command("diff", context_settings=_CONTEXT)
def diff(
    left: _Name,
    right: _Name,
    format: options.Format = OutputFormat.table,
    out: options.Out = None,
) -> None:
    """Show the keys in which two profiles differ.

    Resolved values are compared, names and descriptions are not; no rows when both do the same.

    \b
    Examples:
      deepinfer profile diff decode-ep64 decode-ep128
      deepinfer profile diff cpu-nano ./mine.yaml --format json
    """
    from deepinfer_engine.config.profile import load_profile
    from deepinfer_engine.config.schema import LABELS, leaves

    options.accept(format, *_ROWS_FORMATS, verb="profile diff")
    one, two = load_profile(left), load_profile(right)
    a, b = leaves(one.profile), leaves(two.profile)
    rows: list[tuple[render.Cell, ...]] = []
    for key in [*a, *(k for k in b if k not in a)]:
        if key not in LABELS and (key not in a or key not in b or a[key] != b[key]):
            rows.append((key, *(_side(values, loaded, key) for values, loaded in ((a, one), (b, two)))))
    columns = ("key", left, right) if format is OutputFormat.table else ("key", "left", "right")
    render.deliver(render.rows_text(format, "profile-diff", columns, rows), out)


def _side(values: dict[str, object], loaded: LoadedProfile, key: str) -> str | None:
    if key not in values:
        return None
    return f"{_shown(values[key])} ({loaded.origins[key]})"
