"""Compiled CPU operations for the tests of this folder: built once per session into a temporary kernel cache."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_kernels.cpu.build import Compiler, CompilerError, build
from deepinfer_kernels.cpu.families import FAMILIES


@pytest.fixture(scope="session")
def kernel_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A kernel cache with every family; skips where there is no C++ compiler."""
    try:
        compiler = Compiler.find()
    except CompilerError as exc:
        pytest.skip(str(exc))
    cache = tmp_path_factory.mktemp("kernels")
    assert [(b.family, b.detail) for b in build(FAMILIES, compiler, cache) if b.status != "built"] == []
    return cache
