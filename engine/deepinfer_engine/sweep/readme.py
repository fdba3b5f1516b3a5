"""Tables of a Markdown page from recorded sweeps: ``python -m deepinfer_engine.sweep.readme README.md [--check]``.

A block of the page starts with ``<!-- sweep: FOLDER -->`` (relative to the page) and ends with ``<!-- end sweep -->``;
what stands between is replaced by the table of that folder's rows: swept keys that vary, then the columns its pictures
show. Nobody types a number. ``--check`` changes nothing and exits 6 when a block differs from its rows.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from deepinfer_engine.errors import ArtefactError, DeepInferError, UsageError
from deepinfer_engine.sweep.columns import PER_PROCESS
from deepinfer_engine.sweep.recipe import plots_of
from deepinfer_engine.sweep.results import Recorded, read_recorded, write_file
from deepinfer_engine.sweep.series import PER_GPU, PER_USER
from deepinfer_engine.sweep.table import Table, markdown, tabulate

_BLOCK = re.compile(r"(<!-- sweep: (\S+) -->\n)(.*?)(<!-- end sweep -->)", re.DOTALL)


def refreshed(text: str, folder: Path) -> str:
    """The page with every block made anew. Raises ``ArtefactError`` for a block without its end."""
    if text.count("<!-- sweep: ") != len(_BLOCK.findall(text)):
        raise ArtefactError("a block <!-- sweep: FOLDER --> has no <!-- end sweep -->")
    return _BLOCK.sub(lambda m: f"{m[1]}\n{block(read_recorded(folder / m[2]))}\n{m[4]}", text)


def block(recorded: Recorded) -> str:
    """Table and origin of one folder."""
    about = recorded.manifest
    if not about:
        raise UsageError(f"{recorded.path}: is no results folder of a sweep")
    table = _picked(recorded)
    here = about["identity"]["machine"] or {}
    where = f"{here.get('name')}, {here.get('threads')} threads" if here else "simulated"
    origin = (
        f"{about['identity']['model']}, profile `{about['identity']['profile']}`, {where}, "
        f"{about['repeats']} repeats, commit {about['identity']['commit']}; ± is a 95 % interval."
    )
    return f"{markdown(table)}\n{origin}\n"


def _picked(recorded: Recorded) -> Table:
    """Swept keys that vary and the columns of the pictures."""
    drawn = {PER_PROCESS, PER_GPU, PER_USER} if any(p.kind == "pareto" for p in plots_of(recorded)) else set()
    drawn |= {name for p in plots_of(recorded) for name in (p.x, p.y) if name}
    keys: list[str] = []
    seen: list[tuple[object, ...]] = []
    for key in recorded.manifest.get("keys", ()):
        values = tuple(row.get(key) for row in recorded.rows)
        twin = any(_same_partition(values, other) for other in seen)  # keys that advance together say one thing
        if len({repr(v) for v in values}) > 1 and not twin:
            keys.append(key)
            seen.append(values)
    whole = tabulate(recorded.rows, keys)
    kept = [i for i, name in enumerate(whole.columns) if name in keys or name in drawn]
    return Table(
        tuple(whole.columns[i] for i in kept), tuple(tuple(line[i] for i in kept) for line in whole.lines)
    )  # fmt: skip


def _same_partition(a: Sequence[object], b: Sequence[object]) -> bool:
    """Whether two columns tell the same rows apart."""
    pairs = {(repr(x), repr(y)) for x, y in zip(a, b, strict=True)}
    return len(pairs) == len({x for x, _ in pairs}) == len({y for _, y in pairs})


def main(args: Sequence[str]) -> int:
    """Refresh or check one page; the exit code."""
    check = "--check" in args
    names = [a for a in args if a != "--check"]
    if len(names) != 1:
        print("usage: python -m deepinfer_engine.sweep.readme PAGE.md [--check]", file=sys.stderr)
        return 2
    page = Path(names[0])
    try:
        text = page.read_text(encoding="utf-8")
        new = refreshed(text, page.parent)
    except OSError as exc:
        print(f"error: {page}: {exc.strerror}", file=sys.stderr)
        return 2
    except DeepInferError as exc:
        print(f"error: {exc.message}", file=sys.stderr)
        return exc.exit_code
    if new == text:
        return 0
    if check:
        print(f"error: {page} differs from its rows", file=sys.stderr)
        return 6
    write_file(page, new)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
