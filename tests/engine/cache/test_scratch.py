"""A scratch folder goes with its run: by an error, or with the next run once its process is dead."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from deepinfer_engine.cache.store.scratch import scratch_folder

_HOLD = """
import sys
from pathlib import Path
from deepinfer_engine.cache.store.scratch import scratch_folder
with scratch_folder(Path(sys.argv[1]), ".s-") as folder:
    (folder / "content").mkdir()
    print(folder.name, flush=True)
    sys.stdin.read()
"""


def held(parent: Path) -> tuple[subprocess.Popen[str], str]:
    """A process in such a folder, and the folder's name."""
    args = [sys.executable, "-c", _HOLD, str(parent)]
    process = subprocess.Popen(args, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def names(parent: Path) -> set[str]:
    return {path.name for path in parent.iterdir()}


@pytest.mark.parametrize("raised", [ValueError, KeyboardInterrupt])
def test_an_error_removes_it(tmp_path: Path, raised: type[BaseException]):
    with pytest.raises(raised), scratch_folder(tmp_path, ".s-") as folder:
        (folder / "file").write_text("x")
        raise raised
    assert names(tmp_path) == set()


def test_the_next_run_removes_those_of_dead_processes_and_no_other(tmp_path: Path):
    (tmp_path / ".s-empty").mkdir()  # killed before it had a lock
    (tmp_path / ".s-other").mkdir()
    (tmp_path / ".s-other" / "file").write_text("of something else")
    living, its = held(tmp_path)
    dying, left = held(tmp_path)
    dying.kill()
    dying.communicate()
    assert names(tmp_path) == {its, left, ".s-other"}
    with scratch_folder(tmp_path, ".s-") as folder:
        assert names(tmp_path) == {its, folder.name, ".s-other"}
    living.communicate("")
    assert living.returncode == 0 and names(tmp_path) == {".s-other"}
