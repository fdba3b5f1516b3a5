"""What every test shares: markers that skip with a reason, the optional shared data folder, one torch thread."""

from __future__ import annotations

import importlib.util
import sys
from functools import cache
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]

# Wall-clock deadlines per example fail at random on a busy machine; pytest-timeout bounds the whole test instead.
# The same examples every time, so that a run judges the change; `--hypothesis-profile explore` looks further.
settings.register_profile("deepinfer", deadline=None, derandomize=True)
settings.register_profile("explore", deadline=None)
settings.load_profile("deepinfer")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run the tests marked slow")
    parser.addoption("--run-bench", action="store_true", help="also run the tests marked bench")


@cache
def _cuda_capability() -> tuple[int, int] | None:
    """Compute capability of CUDA device 0, or None without one."""
    import torch

    return torch.cuda.get_device_capability(0) if torch.cuda.is_available() else None


@cache
def _npu_available() -> bool:
    if importlib.util.find_spec("torch_npu") is None:
        return False
    import torch
    import torch_npu  # noqa: F401  # pyright: ignore[reportMissingImports]

    return torch.npu.is_available()


def _cuda_reason(major: int | None) -> str | None:
    """Why this machine cannot run a test for CUDA (of compute capability ``major``.x), or None if it can."""
    wanted = "a CUDA device" if major is None else f"a CUDA device of compute capability {major}.x"
    found = _cuda_capability()
    if found is None:
        return f"needs {wanted}, found none"
    if major is not None and found[0] != major:
        return f"needs {wanted}, found {found[0]}.{found[1]}"
    return None


def _skip_reason(item: pytest.Item) -> str | None:
    marks = {mark.name for mark in item.iter_markers()}
    if "slow" in marks and not item.config.getoption("--run-slow"):
        return "slow, enable with --run-slow"
    if "bench" in marks and not item.config.getoption("--run-bench"):
        return "benchmark, enable with --run-bench"
    for name, major in (("gpu", None), ("sm90", 9), ("sm100", 10)):
        if name in marks and (reason := _cuda_reason(major)):
            return reason
    if "npu" in marks and not _npu_available():
        return "needs an Ascend NPU with torch_npu, found none"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if reason := _skip_reason(item):
        pytest.skip(reason)
    # Only where torch is imported already: a test of a torch-free module must not pay for it.
    if (torch := sys.modules.get("torch")) is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder ``shared`` beside the repository, with more vectors than the repository carries."""
    path = ROOT.parent / "shared"
    if not path.is_dir():
        pytest.skip("no folder `shared` beside the repository")
    return path
