"""How fast the embedded model decodes on this CPU with compiled operations, beside torch and beside the floor.

    PYTHONPATH=.:engine:kernels python -m recipes.kernels.cpu_steps --rows 1 16 64 --threads 1 2 \\
        --out recipes/results/cpu-steps.jsonl --markdown recipes/results/cpu-kernels.md README.md

Every number of threads is measured in a process of its own (``recipes.kernels.cpu_decode``, which says how), whose
OMP_NUM_THREADS is set before torch is imported. ``--out`` keeps the rows as JSON lines, ``--markdown`` puts the table
where pages have ``<!-- cpu-steps -->`` and ``<!-- end cpu-steps -->``, ``--read FILE`` takes rows that were kept
instead of measuring.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepinfer_engine.sweep.results import write_file

COLUMNS = (
    "rows",
    "threads",
    "torch, tok/s",
    "compiled, tok/s",
    "ratio",
    "ms/step",
    "MB a step touches",
    "floor, ms",
    "times the floor",
)
_ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(<!-- cpu-steps -->\n).*?(<!-- end cpu-steps -->)", re.DOTALL)


def cells(line: dict[str, Any]) -> list[str]:
    """One row of the table."""
    mb = sum(line[f"{kind}_bytes"] for kind in ("dense", "experts", "records")) / 1e6
    return [
        str(line["rows"]),
        str(line["threads"]),
        f"{line['torch_tok_s']:,.1f}",
        f"{line['compiled_tok_s']:,.1f}",
        f"{line['ratio']:.1f}",
        f"{line['compiled_ms']:.2f}",
        f"{mb:.1f}",
        f"{line['floor_ms']:.2f}",
        f"{line['times_floor']:.1f}",
    ]


def plain(lines: Sequence[dict[str, Any]]) -> str:
    """The table for a terminal."""
    table = [list(COLUMNS), *map(cells, lines)]
    widths = [max(len(row[i]) for row in table) for i in range(len(COLUMNS))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in table)


def markdown(lines: Sequence[dict[str, Any]]) -> str:
    """The table for a page, and where it is from."""
    table = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for line in lines:
        row = cells(line)
        row[4] = f"**{row[4]}**"
        table.append(row)
    commits = ", ".join(dict.fromkeys(line["commit"] or "installed" for line in lines))
    loads = [line["load"] for line in lines]
    here, copies = lines[0]["hardware"], [f"{rate:.0f}" for rate in sorted({line["copy_gb_s"] for line in lines})]
    about = (
        f"nano, profile `{lines[0]['profile']}`, {here['cores']} cores of {here['cpu']}, torch {here['torch']}, commit "
        f"{commits}, load {min(loads)} to {max(loads)} when rows began; copies of {copies[0]} to {copies[-1]} GB/s."
    )
    return "\n".join("| " + " | ".join(row) + " |" for row in table) + "\n\n" + about


def read_page(path: Path) -> str:
    """The text of a page with one block for the table. Raises ``OSError``, or ``ValueError`` for more or none."""
    text = path.read_text(encoding="utf-8")
    if (count := len(_BLOCK.findall(text))) != 1:
        raise ValueError(f"{path}: {count} blocks <!-- cpu-steps --> … <!-- end cpu-steps -->, expected one")
    return text


def refreshed(text: str, lines: Sequence[dict[str, Any]]) -> str:
    """A page with its block made anew."""
    return _BLOCK.sub(lambda m: f"{m[1]}\n{markdown(lines)}\n\n{m[2]}", text)


def measured(threads: int, rows: Sequence[int], extra: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of a fresh process with so many threads; ends with the exit code of one that fails."""
    command = [sys.executable, "-m", "recipes.kernels.cpu_decode", "--rows", *map(str, rows), *extra]
    env = os.environ | {"OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, cwd=_ROOT, env=env, stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        sys.exit(done.returncode)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    if used := {line["threads"] for line in lines} - {threads}:
        sys.exit(f"torch used {used} threads where {threads} were asked for")
    return lines


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--quads", type=int, default=8, help="windows: torch, compiled, compiled, torch, so often")
    parser.add_argument("--cache", type=Path, help="kernel cache (default: the user's)")
    parser.add_argument("--out", type=Path, help="JSON lines")
    parser.add_argument("--markdown", type=Path, nargs="+", default=[], metavar="PAGE", help="pages with the block")
    parser.add_argument("--read", type=Path, metavar="FILE", help="rows kept by --out, instead of measuring")
    args = parser.parse_args(arguments)
    if args.read is not None and args.out is not None:
        parser.error("--read measures nothing that --out could keep")
    for page in args.markdown:  # before minutes of measuring
        try:
            read_page(page)
        except (OSError, ValueError) as exc:
            parser.error(str(exc))
    lines: list[dict[str, Any]] = []
    if args.read is not None:
        lines = [json.loads(line) for line in args.read.read_text(encoding="utf-8").splitlines()]
    extra = ["--quads", str(args.quads), *(["--cache", str(args.cache.resolve())] if args.cache else [])]
    for threads in args.threads if args.read is None else ():
        lines += measured(threads, args.rows, extra)
    print(plain(lines), flush=True)
    if args.out is not None:
        write_file(args.out, "".join(json.dumps(line, allow_nan=False) + "\n" for line in lines))
    for page in args.markdown:
        write_file(page, refreshed(read_page(page), lines))


if __name__ == "__main__":
    main()
