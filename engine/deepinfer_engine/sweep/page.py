"""One self-contained HTML page of a sweep: provenance, pictures inline, the table and the rows. No script, no link."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from deepinfer_engine.sweep import columns
from deepinfer_engine.sweep.noise import Interval
from deepinfer_engine.sweep.plot import Picture
from deepinfer_engine.sweep.results import Row
from deepinfer_engine.sweep.series import shown
from deepinfer_engine.sweep.table import Table, figure_text

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8884; text-align: right; white-space: nowrap; }
th { vertical-align: bottom; } th.text, td.text { text-align: left; }
figure { margin: 1.5rem 0; } img { max-width: 100%; background: #fff; } figcaption { opacity: .75; }
.scroll { overflow-x: auto; } .warn { border-left: 4px solid #d55e00; padding-left: .8rem; }
"""


def page(
    manifest: Mapping[str, Any],
    table: Table,
    rows: Sequence[Row],
    pictures: Sequence[Picture],
    failures: Sequence[Mapping[str, Any]],
    notes: Sequence[str],
) -> str:
    """The page as text."""
    name = str(manifest.get("name", "sweep"))
    body = [
        f"<h1>{escape(name)}</h1>",
        f"<p>{escape(str(manifest.get('description', '')))}</p>",
        *(f'<p class="warn">{escape(note)}</p>' for note in notes),
        *(_picture(picture) for picture in pictures),
        "<h2>Table</h2>",
        _table(table),
        *([_failures(failures)] if failures else []),
        "<h2>Where this is from</h2>",
        _facts(manifest),
        "<details><summary>All rows</summary>",
        _rows(rows),
        "</details>",
    ]
    head = f'<meta charset="utf-8"><title>{escape(name)}</title><style>{_STYLE}</style>'
    return f'<!DOCTYPE html>\n<html lang="en"><head>{head}</head><body>\n' + "\n".join(body) + "\n</body></html>\n"


def _picture(picture: Picture) -> str:
    if picture.png is None:
        return f"<p>{escape(picture.title)}: {escape(picture.note)}</p>"
    data = base64.b64encode(picture.png).decode("ascii")
    image = f'<img alt="{escape(picture.title)}" src="data:image/png;base64,{data}">'
    return f"<figure>{image}<figcaption>{escape(picture.note)}</figcaption></figure>"


def _table(table: Table) -> str:
    head = "".join(f"<th>{escape(columns.label(c))}</th>" for c in table.columns)
    lines = []
    for line in table.lines:
        cells = "".join(f"<td>{escape(_cell(value))}</td>" for value in line)
        lines.append(f"<tr>{cells}</tr>")
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'


def _cell(value: Any) -> str:
    return figure_text(value) if isinstance(value, Interval) else "–" if value is None else shown(value)


def _failures(failures: Sequence[Mapping[str, Any]]) -> str:
    items = "".join(f"<li>cell {f.get('cell')}: {escape(str(f.get('message')))}</li>" for f in failures)
    return f'<h2>Failures</h2><ul class="warn">{items}</ul>'


def _facts(manifest: Mapping[str, Any]) -> str:
    lines = "".join(
        f'<tr><td class="text">{escape(key)}</td><td class="text">{escape(shown(value))}</td></tr>'
        for key, value in _flat(manifest)
    )
    return f'<div class="scroll"><table><tbody>{lines}</tbody></table></div>'


def _flat(tree: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    out: list[tuple[str, Any]] = []
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out += _flat(value, f"{prefix}{key}.")
        else:
            out.append((prefix + key, ", ".join(map(shown, value)) if isinstance(value, list) else value))
    return out


def _rows(rows: Sequence[Row]) -> str:
    names = list(dict.fromkeys(key for row in rows for key in row))
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    lines = "".join(
        "<tr>" + "".join(f"<td>{escape('' if row.get(n) is None else shown(row[n]))}</td>" for n in names) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
