"""Markdown tables from recorded comparisons: ``python -m deepinfer_engine.eplb.results FILE.jsonl``.

Every line of the file is one run of ``deepinfer eplb-plan --bench`` with the command, the commit and the machine beside
its result. Numbers in prose come from these tables only.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Planners in table order, and their column titles.
COLUMNS = (
    ("identity layout", "initial"),
    ("DeepSeek EPLB", "DeepSeek EPLB"),
    ("vLLM default", "vLLM"),
    ("SGLang deepseek_vec", "SGLang vec"),
    ("vllm-ascend FlashLB", "FlashLB"),
    ("greedy on observed peaks", "greedy on peaks"),
    ("deepinfer (compiled)", "**deepinfer**"),
)


def read_records(path: Path) -> list[dict[str, Any]]:
    """One record a line, in file order."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def _table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)


def quality_table(records: list[dict[str, Any]]) -> str:
    """moe_lb_step on the window after the planning window, with the noise floor and our share of DeepSeek EPLB's
    excess."""
    rows = []
    for record in records:
        result = record["result"]
        found = {row["planner"]: row for row in result.get("rows", []) if "planner" in row}
        if not found:
            continue
        ours, theirs = found["deepinfer (compiled)"], found["DeepSeek EPLB"]
        cells = [f"{found[name]['next']:.4f}" if name in found else "–" for name, _ in COLUMNS]
        cells[-1] = f"**{cells[-1]}**"
        ratio = f"{ours['excess'] / theirs['excess']:.2f}" if ours["excess"] > 0 else "0"
        rows.append([result["recipe"], *cells, f"{result['floor']:.4f}", ratio])
    return _table(["recipe", *(title for _, title in COLUMNS), "noise floor", "excess ÷ DeepSeek's"], rows)


def speed_table(records: list[dict[str, Any]], recipe: str = "speed-ep64") -> str:
    """CPU seconds of one thread, best of the seeds, and each planner's time over ours."""
    (result,) = (r["result"] for r in records if r["result"]["recipe"] == recipe)
    found = {row["planner"]: row for row in result["rows"]}
    ours = found["deepinfer (compiled)"]["cpu_s"]
    rows = [
        [title, f"{found[name]['cpu_s']:.3f}", f"{found[name]['cpu_s'] / ours:.2f}", f"{found[name]['train']:.4f}"]
        for name, title in (*COLUMNS[1:], ("deepinfer (numpy)", "deepinfer, numpy path"))
        if name in found
    ]
    return _table(["planner", "CPU s", "÷ deepinfer", "moe_lb_step, train"], rows)


def replan_table(records: list[dict[str, Any]]) -> str:
    """Received experts per layer at each re-plan, and balance on the window that follows."""
    (result,) = (r["result"] for r in records if "replans" in r["result"])
    rows = [
        [row["strategy"], f"{row['moves']:.1f}", f"{row['share']:.1%}", f"{row['next']:.4f}"] for row in result["rows"]
    ]
    return _table(["strategy", "moves per layer", "of the slots", "moe_lb_step, next"], rows)


def tables(path: Path) -> str:
    """All three tables of a results file."""
    records = read_records(path)
    return "\n\n".join((quality_table(records), speed_table(records), replan_table(records)))


if __name__ == "__main__":
    print(tables(Path(sys.argv[1])))
