"""Tables in the README are those of the recorded rows; recorded folders are whole and small."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from deepinfer_engine.errors import ArtefactError
from deepinfer_engine.sweep.readme import main, refreshed
from deepinfer_engine.sweep.results import csv_text, read_recorded

ROOT = Path(__file__).resolve().parents[3]
RECORDED = sorted((ROOT / "recipes" / "results" / "sweeps").glob("*/manifest.json"))


def test_the_readme_matches_its_rows():
    """``python -m deepinfer_engine.sweep.readme README.md`` writes them anew."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("<!-- sweep: ") > 0 and refreshed(text, ROOT) == text


def test_a_changed_number_is_found_and_mended(tmp_path: Path):
    folder = RECORDED[0].parent
    shutil.copytree(folder, tmp_path / "rows")
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- sweep: rows -->\n| typed by hand |\n<!-- end sweep -->\nafter\n")
    assert main([str(page), "--check"]) == 6
    assert main([str(page)]) == 0 and main([str(page), "--check"]) == 0
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("<!-- end sweep -->\nafter\n") and "typed by hand" not in text
    with pytest.raises(ArtefactError, match="has no"):
        refreshed("<!-- sweep: rows -->\n", tmp_path)


@pytest.mark.parametrize("manifest", RECORDED, ids=lambda p: p.parent.name)
def test_a_recorded_sweep_is_complete_and_its_table_is_its_rows(manifest: Path):
    folder = manifest.parent
    about = json.loads(manifest.read_text())
    recorded = read_recorded(folder)
    assert about["state"] == "complete" and len(recorded.rows) == about["cells"] * about["repeats"]
    assert all(row["kind"] == about["identity"]["kind"] for row in recorded.rows)
    ordered = sorted(recorded.rows, key=lambda r: (r["cell"], r["repeat"]))
    assert (folder / "rows.csv").read_text() == csv_text(ordered)
    kept = [p for p in folder.iterdir() if p.suffix in (".json", ".jsonl", ".csv", ".png")]
    assert all(p.stat().st_size < 500_000 for p in kept)  # page and requests are made again, not kept
