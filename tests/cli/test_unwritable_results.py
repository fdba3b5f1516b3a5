"""Results that cannot be written: a full disk is no bug, a device is never replaced, nobody may be reading stdout."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FULL = Path("/dev/full")
COMMAND = [sys.executable, "-m", "deepinfer_cli", "profile", "show", "cpu-nano"]


@pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")
def test_a_full_disk_is_said_and_no_bug():
    with FULL.open("w") as full:
        ran = subprocess.run(COMMAND, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert ran.returncode == 3 and ran.stderr.startswith("error: cannot write: No space left on device\n")
    assert "Exception ignored" not in ran.stderr


@pytest.mark.skipif(not FULL.is_char_device(), reason="needs /dev/full")
def test_a_device_is_not_replaced_by_a_result():
    ran = subprocess.run([*COMMAND, "--out", str(FULL)], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and "/dev/full: is not a regular file" in ran.stderr and FULL.is_char_device()


def test_a_closed_stdout_is_nobody_reading():
    ran = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND], stderr=subprocess.PIPE, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
