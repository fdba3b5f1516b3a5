"""The same vectors through Triton's kernels where there is no GPU: see ``triton_golden.py``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_kernels.triton import families

if (reason := families.unusable()) is not None:
    pytest.skip(f"needs another triton: {reason}", allow_module_level=True)


@pytest.mark.timeout(900)
def test_recorded_tokens_through_the_kernels_in_the_interpreter():
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(Path(__file__).with_name("triton_golden.py")),
        "-q",
        "-p",
        "no:cacheprovider",
    ]
    env = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]
