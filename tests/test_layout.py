"""The shape of the repository: component roots, file names, what committed text may not contain, the wheel."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("deepinfer_cli", "engine/deepinfer_engine", "kernels/deepinfer_kernels")

WHEEL_DATA = (
    "deepinfer_kernels/cpu/*.cpp",
    "deepinfer_kernels/cpu/*.h",
    "deepinfer_kernels/tilelang/*.cuh",
    "deepinfer_engine/eplb/loops.cpp",
    "deepinfer_engine/data/configs/*.json",
    "deepinfer_engine/data/models/nano/*.safetensors",
    "deepinfer_engine/data/models/nano/card.json",
    "deepinfer_engine/data/models/nano/stats.npz",
    "deepinfer_engine/data/profiles/*.yaml",
    "deepinfer_engine/data/recipes/bench/prompts/*.jsonl",
    "deepinfer_engine/data/recipes/evals/*.jsonl",
    "deepinfer_engine/data/recipes/sweeps/*.yaml",
    "deepinfer_engine/data/recipes/nano/*.py",
    "deepinfer_engine/data/recipes/nano/config.json",
    "deepinfer_engine/data/recipes/nano/words.txt",
)

# Written in two parts, so that this file does not contain what it looks for.
FORBIDDEN = {
    "a path of one machine": r"(?<![\w.~-])/" + r"(?:work|tmp|root)/\w" + "|/opt/" + "(?:wheels|pypi)",
    "an unfinished part": r"\bTO" + r"DO\b|\bFIX" + r"ME\b|\bNotImplemented" + "Error",
    "a page that is not in this repository": r"\b(?:decisions|design|brief)" + r"\.md\b|\bdecision" + r" \d",
    "the name of another distribution": r"^\s*(?:import|from) deep" + r"infer\b(?!_)",
    "an environment variable with our name": r"\bDEEP" + "INFER_[A-Z]",
}


def git(*args: str) -> list[str]:
    """The NUL-separated output of a git command in the repository; skips in a tree without git's data."""
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", args[0], "-z", *args[1:]]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=True)
    return [name for name in done.stdout.split("\0") if name]


def tracked_text() -> dict[str, str]:
    """Tracked text files by name; binary files and the numbers under tests/vectors are left out."""
    texts = {}
    for name in git("ls-files"):
        path = ROOT / name
        if name.startswith("tests/vectors/") or not path.is_file():
            continue
        data = path.read_bytes()
        if b"\0" not in data[:8192]:
            texts[name] = data.decode("utf-8")
    return texts


@pytest.mark.parametrize("folder", ["engine", "kernels", "tests/engine", "tests/kernels"])
def test_component_root_is_not_a_package(folder: str):
    assert not (ROOT / folder / "__init__.py").exists(), (
        f"{folder}/__init__.py makes a package called {Path(folder).name}; transformers imports a library of that name"
    )


def test_no_module_is_named_for_being_a_collection():
    banned = {"utils.py", "common.py", "helpers.py", "manager.py"}
    assert [name for name in git("ls-files") if Path(name).name in banned] == []


@pytest.mark.parametrize("what", FORBIDDEN)
def test_committed_text_does_not_contain(what: str):
    pattern = re.compile(FORBIDDEN[what], re.MULTILINE)
    found = [
        f"{name}:{text.count(chr(10), 0, match.start()) + 1}: {match.group()}"
        for name, text in tracked_text().items()
        for match in pattern.finditer(text)
    ]
    assert found == []


def test_product_never_reads_the_shared_folder():
    product = ("deepinfer_cli/", "engine/", "kernels/", "profiles/", "recipes/")
    assert [n for n, text in tracked_text().items() if n.startswith(product) and "../shared" in text] == []


def test_git_ignores_no_source_file():
    """A pattern such as ``dist/`` also matches a package of that name."""
    ignored = git("ls-files", "--others", "--ignored", "--exclude-standard", "--", *PACKAGES, "profiles", "recipes")
    assert [name for name in ignored if name.endswith((".py", ".yaml"))] == []


def test_version_has_one_value():
    from deepinfer_engine import __version__

    assert PROJECT["version"] == __version__
    assert f"## {__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_constraints_pin_every_direct_dependency():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines if line and not line.startswith("#")}
    wanted = PROJECT["dependencies"] + PROJECT["optional-dependencies"]["dev"]
    names = {re.split(r"[\[><=;]", requirement)[0].lower().replace("_", "-") for requirement in wanted}
    assert names - pinned == set()


def test_runs_from_the_source_tree_without_an_install():
    env = os.environ | {"PYTHONPATH": os.pathsep.join([".", "engine", "kernels"])}
    command = [sys.executable, "-m", "deepinfer_cli", "--help"]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "Usage" in done.stdout


def test_install_exposes_the_three_packages_and_no_component_root(tmp_path: Path):
    code = (
        "from importlib.util import find_spec\n"
        "for name in ('deepinfer_cli', 'deepinfer_engine', 'deepinfer_kernels', 'engine', 'kernels'):\n"
        "    spec = find_spec(name)\n"
        "    print(name, *(spec.submodule_search_locations if spec else ()))\n"
    )
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60, check=True
    )
    found = {line.split(" ")[0]: line.split(" ")[1:] for line in done.stdout.splitlines()}
    if not any(found[Path(package).name] for package in PACKAGES):
        pytest.skip("deepinfer-cli is not installed in this environment")
    for package in PACKAGES:
        assert found[Path(package).name] == [str(ROOT / package)]
    for name in ("engine", "kernels"):
        assert str(ROOT / name) not in found[name]


def test_wheel_carries_packages_profiles_and_recipes(tmp_path: Path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT,
        capture_output=True,
        timeout=100,
        check=True,
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = set(archive.namelist())
    info = f"deepinfer_cli-{PROJECT['version']}.dist-info"
    assert {name.split("/")[0] for name in carried} == {*(Path(package).name for package in PACKAGES), info}

    expected = set()
    for name in git("ls-files"):
        if name.startswith(tuple(f"{package}/" for package in PACKAGES)):
            expected.add(name.removeprefix("engine/").removeprefix("kernels/"))
        elif re.match(r"profiles/.*\.yaml$|recipes/(?!results/).*\.(yaml|py|jsonl|json|txt)$", name):
            expected.add(f"deepinfer_engine/data/{name}")
    assert expected - carried == set()
    # what is no module and is read at run time, kind by kind, so that a kind cannot leave both sets at once
    for pattern in WHEEL_DATA:
        assert any(fnmatchcase(name, pattern) for name in expected), pattern
    assert [name for name in carried if name.startswith("deepinfer_engine/data/recipes/results/")] == []
