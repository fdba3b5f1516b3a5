"""Who may import whom: the static contracts of pyproject.toml, and torch-free modules checked by importing them.

The static check does not see what third-party modules and parent packages import; the run-time check does.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ENGINE = ROOT / "engine" / "deepinfer_engine"
CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
NO_TORCH = [name.removeprefix("*.") for name in CONTRACTS["no-torch"]["source_modules"]]
#: Under the contract before it exists; every other module of the contract must be there.
MAY_BE_ABSENT = {"spec.budget"}
LAYERS = CONTRACTS["layers"]["layers"]


def run_python(*args: str) -> subprocess.CompletedProcess[str]:
    paths = [str(ROOT), str(ROOT / "engine"), str(ROOT / "kernels")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "default"}
    return subprocess.run(
        [sys.executable, *args], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False
    )


def modules_of(name: str) -> list[str]:
    """All module names at and below ``deepinfer_engine.<name>``; empty where nothing of it exists.

    Raises AssertionError for a folder with files but without a module of its own.
    """
    base = ENGINE.joinpath(*name.split("."))
    if base.with_suffix(".py").is_file():
        assert not base.is_dir(), f"{name} is both a module and a folder"
        return [f"deepinfer_engine.{name}"]
    files = [path for path in base.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    if not files:
        return []
    assert (base / "__init__.py").is_file(), f"{base.relative_to(ROOT)} has files but no __init__.py"
    found = []
    for path in sorted(file for file in files if file.suffix == ".py"):
        parts = path.relative_to(ENGINE.parent).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return found


def assert_imports_without_torch(modules: list[str]) -> None:
    code = (
        "import importlib, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "    if 'torch' in sys.modules:\n"
        "        sys.exit(f'importing {name} imports torch')\n"
    )
    done = run_python("-c", code, *modules)
    assert done.returncode == 0, done.stderr


def test_static_contracts_hold():
    done = run_python("-c", "from importlinter.cli import lint_imports_command; lint_imports_command()")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {len(CONTRACTS)} kept, 0 broken." in done.stdout


@pytest.mark.parametrize("name", NO_TORCH)
def test_planning_module_imports_without_torch(name: str):
    modules = modules_of(name)
    if not modules:
        assert name in MAY_BE_ABSENT, f"deepinfer_engine.{name} is under the contract but does not exist"
        pytest.skip(f"deepinfer_engine.{name} is not built yet")
    assert_imports_without_torch(modules)


def test_command_line_imports_without_torch():
    assert_imports_without_torch(["deepinfer_cli.main"])


def test_kernels_import_without_engine_or_command_line():
    code = (
        "import importlib, sys\n"
        "importlib.import_module('deepinfer_kernels')\n"
        "seen = [m for m in sys.modules if m.split('.')[0] in ('deepinfer_engine', 'deepinfer_cli')]\n"
        "sys.exit(f'deepinfer_kernels imports {seen}' if seen else 0)\n"
    )
    done = run_python("-c", code)
    assert done.returncode == 0, done.stderr


def test_every_shipped_package_is_under_the_layers_contract():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert sorted(Path(package).name for package in wheel["packages"]) == sorted(LAYERS)
