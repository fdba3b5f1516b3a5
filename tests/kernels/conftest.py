"""Kernel caches for the tests of this folder, temporary ones unless KERNEL_CASES_CACHE names a folder for cases."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from deepinfer_kernels.cpp import Compiler, build
from deepinfer_kernels.cpu.binary import source
from deepinfer_kernels.cpu.families import FAMILIES


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel cache with every family; skips where there is no C++ compiler."""
    name = os.environ.get("CXX") or "g++"
    if shutil.which(name) is None:
        pytest.skip(f"no C++ compiler: {name} is not on the path")
    compiler = Compiler.find()
    cache = tmp_path_factory.mktemp("kernels")
    made = build(map(source, FAMILIES), compiler, cache)
    assert [(b.name, b.detail) for b in made if b.status != "built"] == []
    return cache


@pytest.fixture(scope="session")
def cases_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where programs of cases for a device are compiled: one folder for several runs if the environment names it."""
    named = os.environ.get("KERNEL_CASES_CACHE")
    return Path(named) if named else tmp_path_factory.mktemp("cases")
