"""Where CUDA's tools are looked for, and what is said of one that is nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from deepinfer_kernels import cuda_tools


def executable(path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch(mode=0o755)
    return str(path)


def looked(name: cuda_tools.Name, environ=None, on_path=None, packages=None) -> cuda_tools.Found:
    found = {(package, name): path for package, path in (packages or {}).items()}
    return cuda_tools.find(name, environ or {}, lambda tool: on_path, lambda package, tool: found.get((package, tool)))


def test_cuda_home_is_before_the_path_and_the_path_before_packages(tmp_path):
    inside = executable(tmp_path / "bin" / "nvcc")
    packages = {"nvidia-cuda-nvcc": "/site/nvcc"}
    for variable in ("CUDA_HOME", "CUDA_PATH"):
        assert looked("nvcc", {variable: str(tmp_path)}, "/usr/bin/nvcc", packages).path == inside
    assert looked("nvcc", {}, "/usr/bin/nvcc", packages).path == "/usr/bin/nvcc"
    found = looked("nvcc", {}, None, packages)
    assert (found.path, found.package) == ("/site/nvcc", "nvidia-cuda-nvcc")


def test_a_cuda_home_without_nvcc_hides_every_other_one():
    found = looked("nvcc", {"CUDA_HOME": "/nonexistent"}, "/usr/bin/nvcc", {"nvidia-cuda-nvcc": "/site/nvcc"})
    assert found.path is None and found.absence == "there is no nvcc in CUDA_HOME (/nonexistent/bin)"
    assert "unset CUDA_HOME" in found.fix("12.9") and "'nvidia-cuda-nvcc>=12.9'" in found.fix("12.9")


@pytest.mark.parametrize("name", ["cuobjdump", "nvdisasm"])
def test_tools_that_nobody_else_looks_for_are_found_past_cuda_home_and_beside_triton(name):
    environ = {"CUDA_HOME": "/nonexistent"}
    assert looked(name, environ, packages={"triton": "/site/tool"}).path == "/site/tool"
    found = looked(name, environ)
    places = (
        f"CUDA_HOME (/nonexistent/bin), nor in PATH, nor in the package nvidia-cuda-{name}, nor in the package triton"
    )
    assert found.absence == f"there is no {name} in {places}"
    assert found.fix().startswith(f"pip install nvidia-cuda-{name}")


def test_a_file_of_a_distribution_is_found_where_it_lies():
    found = cuda_tools.of_package("pytest", "py.typed")
    assert found is not None and Path(found).is_file()
    assert cuda_tools.of_package("pytest", "nvcc") is None and cuda_tools.of_package("no-such-package", "x") is None
