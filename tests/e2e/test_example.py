"""The example of the Python interface runs as it is printed, on the embedded model."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_python_example_answers_every_question():
    paths = [str(ROOT / part) for part in (".", "engine", "kernels")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, str(ROOT / "examples" / "python_api.py")]
    done = subprocess.run(command, env=env, capture_output=True, encoding="utf-8", timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "17+25? -> 17+25=42 [stop]\n" in done.stdout
    for question in ("17+25?", "What is 12+30?", "Name a colour."):
        assert done.stdout.count(f"{question} -> ") == 1
