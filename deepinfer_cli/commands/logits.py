"""``deepinfer logits``: teacher-forced logits of token lists, for acceptance tests."""

from __future__ import annotations

import os
import tempfile
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from deepinfer_cli import options, render
from deepinfer_engine.errors import ArtefactError


class _Numerics(StrEnum):
    reference = "reference"
    float = "float"
    fast = "fast"


def command(
    model: Annotated[Path, typer.Option("--model", metavar="DIR", help="Checkpoint in the official format.")],
    tokens: Annotated[Path, typer.Option("--tokens", metavar="FILE", help="JSON list of token-id lists.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Result, in safetensors format.")],
    numerics: Annotated[_Numerics, typer.Option("--numerics", help="Rounding points applied.")] = _Numerics.reference,
    chunk: Annotated[
        int | None, typer.Option("--chunk", min=1, help="Feed prompts in pieces of this many tokens.")
    ] = None,
    greedy: Annotated[int, typer.Option("--greedy", min=0, help="Tokens of greedy continuation, EOS ignored.")] = 0,
    quiet: options.Quiet = False,
) -> None:
    """Logits at every prompt position, and greedy continuations.

    Writes logits.{i} f32 [T, V] and greedy.{i} int64 for the i-th list of --tokens.

    \b
    Examples:
      deepinfer logits --model DIR --tokens prompts.json --out logits.safetensors
      deepinfer logits --model DIR --tokens prompts.json --numerics float --chunk 64 --greedy 32 --out l.safetensors
    """
    from deepinfer_engine.config.strict_json import read_json
    from deepinfer_engine.runtime.threads import set_thread_defaults

    prompts = _prompts(read_json(tokens), tokens)
    options.writable(out)
    set_thread_defaults(rows=64)
    from safetensors.torch import save_file

    from deepinfer_engine.verify.logits import forced_logits

    def progress(done: int, total: int) -> None:
        render.note(f"{done}/{total} prompts", quiet=quiet)

    result = forced_logits(model, prompts, numerics=numerics.value, chunk=chunk, greedy=greedy, progress=progress)
    handle, part = tempfile.mkstemp(dir=out.parent, prefix=f".{out.name}.", suffix=".part")
    os.close(handle)
    try:
        save_file({name: t.contiguous() for name, t in result.items()}, part)
        os.chmod(part, 0o644)  # mkstemp makes private files; a result is an ordinary one
        os.replace(part, out)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise
    render.note(f"wrote {len(result)} tensors to {out}", quiet=quiet)


def _prompts(value: object, path: Path) -> list[list[int]]:
    if not isinstance(value, list) or not value:
        raise ArtefactError(f"{path}: expected a non-empty JSON list of token-id lists")
    for i, ids in enumerate(value):
        if not isinstance(ids, list) or any(isinstance(t, bool) or not isinstance(t, int) for t in ids):
            raise ArtefactError(f"{path}: item {i} is not a list of integers")
    return value
