"""What it takes to build a vendor library into the kernel cache: tools that must be there, then commands in order.

A library is fetched at the commit its adapters were written against, or taken from a source tree that is given; it is
installed into a folder of its own under a temporary name, which is renamed at the end. Nothing is ever taken from the
placeholder names of a package index, and nothing of the environment is changed.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from deepinfer_kernels import cuda_tools, kernel_cache
from deepinfer_kernels.processes import Programs, answer
from deepinfer_kernels.vendor.libraries import LIBRARIES, MADE_OF, Library, site

#: FlashMLA with all its instantiations takes the longest
_SECONDS = 3600


@dataclass(frozen=True)
class Need:
    """Something that must be there: what, what was found (None: nothing), the next step where it does not do."""

    what: str
    found: str | None
    fix: str | None = None


@dataclass(frozen=True)
class Step:
    """A command with the variables it is given."""

    what: str
    argv: tuple[str, ...]
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def shell(self) -> str:
        """The command as one would type it."""
        return " ".join([*(f"{k}={v}" for k, v in self.variables), shlex.join(self.argv)])


@dataclass(frozen=True)
class Plan:
    """How one library gets into ``target``. ``made_of``: what a build depends on, kept beside it; ``note``: what the
    state that would be built does not have."""

    library: str
    target: Path
    needs: tuple[Need, ...]
    steps: tuple[Step, ...]
    made_of: tuple[tuple[str, str], ...]
    note: str | None = None

    @property
    def lacking(self) -> tuple[Need, ...]:
        return tuple(need for need in self.needs if need.fix is not None)

    @property
    def built(self) -> bool:
        """Whether the cache has what would be built, not one of another state, platform, torch or Python."""
        try:
            known = json.loads((self.target / MADE_OF).read_text())
        except (OSError, ValueError):
            return False
        return known == dict(self.made_of) and (self.target / self.library).is_dir()


@dataclass(frozen=True)
class Done:
    """What became of a step; ``detail``: the line that says why it failed, and where all lines are."""

    step: Step
    status: Literal["done", "failed"]
    seconds: float
    detail: str | None = None


class SourceError(Exception):
    """A source tree that was given is not one of the library, or not complete."""


#: endings of what is compiled or installed of a tree
_SOURCES = (".py", ".cu", ".cuh", ".h", ".hpp", ".cpp", ".cc", ".inl", ".toml")
#: files that prove a source tree, and the submodule folders a build reads
_TREES = {
    "deep_gemm": (("setup.py", "deep_gemm/__init__.py"), ("third-party/cutlass/include", "third-party/fmt/include")),
    "flash_mla": (("setup.py", "flash_mla/__init__.py"), ("csrc/cutlass/include",)),
    "deep_ep": (("setup.py", "deep_ep/__init__.py"), ()),
    "deep_select": (("setup.py", "deep_select/interface.py"), ()),
    "tile_kernels": (("pyproject.toml", "tile_kernels/__init__.py"), ()),
}


def plan(name: str, cache: Path, *, source: Path | None = None, platform: str | None = None) -> Plan:
    """Tools and commands for one library, for one GPU platform or both. Raises ``SourceError``; writes nothing."""
    library = LIBRARIES[name]
    target = site(name, cache)
    if source is not None:
        _check_tree(name, source)
    needs = [need for check in _NEEDS[name] for need in [check(platform)]]
    steps: list[Step] = []
    tree = source
    if source is None and library.distribution is None:
        tree = target.parent / "source"
        if library.commit is None:
            what = f"a source tree with {library.capabilities[0].function}"
            fix = f"no public commit that has it is known: clone {library.repository} and name the folder in --source"
            needs.append(Need(what, None, fix))
        else:
            needs.insert(0, _git(platform))
            steps += _fetch(library, library.commit, tree)
    wanted = str(tree) if tree is not None else str(library.distribution)
    steps.append(_install(library, wanted, target, platform))
    made_of = _made_of(library, source, steps[-1])
    return Plan(name, target, tuple(needs), tuple(steps), made_of, _note(library, source, platform))


#: variables that say where something is, not what is made
_PLACES = ("CPATH", "CUDA_HOME")


def _made_of(library: Library, source: Path | None, install: Step) -> tuple[tuple[str, str], ...]:
    """What makes another library of the same name: its state, its variables, and what it is compiled against."""
    try:
        torch = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        torch = "none"
    return (
        ("state", str(library.commit or library.distribution) if source is None else _digest(source)),
        ("variables", " ".join(f"{name}={value}" for name, value in install.variables if name not in _PLACES)),
        ("torch", torch),
        ("python", f"{sys.version_info.major}.{sys.version_info.minor}"),
    )


def _digest(tree: Path) -> str:
    """Digest of a source tree by the names, sizes and times of its sources, without what builds leave in it."""
    found = []
    for folder, inner, files in os.walk(tree):
        inner[:] = sorted(d for d in inner if not d.startswith(".") and d not in ("build", "dist"))
        for path in (Path(folder, file) for file in sorted(files) if file.endswith(_SOURCES)):
            state = path.lstat()
            found.append(f"{path.relative_to(tree)} {state.st_size} {state.st_mtime_ns}")
    return f"{tree.resolve()} {hashlib.sha256(chr(10).join(found).encode()).hexdigest()[:16]}"


def _check_tree(name: str, source: Path) -> None:
    files, folders = _TREES[name]
    absent = [file for file in files if not (source / file).is_file()]
    if absent:
        raise SourceError(f"{source} is no source tree of {name}: it has no {absent[0]}")
    empty = [folder for folder in folders if not (source / folder).is_dir()]
    if empty:
        raise SourceError(
            f"{source} has no {empty[0]}: git -C {source} submodule update --init --recursive brings its submodules"
        )


def _fetch(library: Library, commit: str, tree: Path) -> list[Step]:
    git = ("git", "-C", str(tree))
    steps = []
    if not (tree / ".git").exists():
        steps.append(Step("clone", ("git", "clone", library.repository, str(tree))))
    elif _version([*git, "cat-file", "-t", commit], r"(commit)") is None:  # cloned before this state, or not to the end
        steps.append(Step("fetch", (*git, "fetch", "--quiet", "origin", commit)))
    return [
        *steps,
        Step("check out", (*git, "checkout", "--quiet", commit)),
        Step("submodules", (*git, "submodule", "update", "--init", "--recursive")),
    ]


def _install(library: Library, wanted: str, target: Path, platform: str | None) -> Step:
    pip = (sys.executable, "-m", "pip", "install", "--no-deps", "--target", str(target))
    if library.distribution is not None and wanted == library.distribution:
        return Step("install", (*pip, "--only-binary", ":all:", wanted))
    variables: dict[str, str] = {
        "deep_gemm": {"DG_FORCE_BUILD": "1"},  # or its build looks for a wheel on the network first
        "flash_mla": {
            "sm90": {"FLASH_MLA_DISABLE_SM100": "1"},
            "sm100": {"FLASH_MLA_DISABLE_SM90": "1"},
        }.get(platform or "", {}),
        "deep_select": {"sm90": {"DEEP_SELECT_CUDA_ARCHS": "90a"}}.get(platform or "", {}),
    }.get(library.name, {})
    if library.name == "flash_mla" and (headers := _cccl()):  # CUDA 13 moved them, its build does not know
        variables = {**variables, "CPATH": os.pathsep.join(p for p in (headers, os.environ.get("CPATH")) if p)}
    nvcc = cuda_tools.find("nvcc")
    if nvcc.path is not None and nvcc.package is not None:  # torch's extensions would not look there
        variables = {**variables, "CUDA_HOME": str(Path(nvcc.path).parents[1])}
    return Step("build", (*pip, "--no-build-isolation", wanted), tuple(variables.items()))


def _cccl() -> str | None:
    """The folder of CUDA's C++ headers where it is one of its own."""
    nvcc = cuda_tools.find("nvcc").path
    folder = Path(nvcc).resolve().parents[1] / "include" / "cccl" if nvcc else None
    return str(folder) if folder is not None and folder.is_dir() else None


def _note(library: Library, source: Path | None, platform: str | None) -> str | None:
    if library.name == "flash_mla" and source is None and platform != "sm90":
        return (
            "the pinned state attends over BF16 rows; 528 and 288 byte records on sm100 need a tree of September 2026 "
            "or newer in --source, and nvcc 13.1"
        )
    return None


# ------------------------------------------------------------------------- needs


def _version(argv: list[str], pattern: str) -> str | None:
    match = re.search(pattern, answer(*argv) or "")
    return match[1] if match else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:3])


def _judged(what: str, minimum: str, found: str | None, fix: str) -> Need:
    enough = found is not None and _numbers(found.split()[-1]) >= _numbers(minimum)
    return Need(f"{what} {minimum} or newer", found, None if enough else fix)


def _git(platform: str | None) -> Need:
    path = shutil.which("git")
    return Need("git", path, None if path else "install it: apt install git; or give a tree with --source")


def _gxx(minimum: str) -> Callable[[str | None], Need]:
    def check(platform: str | None) -> Need:
        path = shutil.which(os.environ.get("CXX") or "g++")
        version = _version([path, "-dumpfullversion"], r"(\d+(?:\.\d+)*)") if path else None
        fix = f"install it: apt install g++-{minimum}, and name it in CXX"
        return _judged("g++", minimum, f"{path} {version}" if version else None, fix)

    return check


def _nvcc(oldest: dict[str, str]) -> Callable[[str | None], Need]:
    def check(platform: str | None) -> Need:
        minimum = oldest.get(platform or "sm100", oldest["sm100"])
        nvcc = cuda_tools.find("nvcc")
        version = _version([nvcc.path, "--version"], r"release (\d+\.\d+)") if nvcc.path else None
        fix = nvcc.fix(minimum) if nvcc.path else f"{nvcc.absence}: {nvcc.fix(minimum)}"
        return _judged("nvcc", minimum, f"{nvcc.path} {version}" if version else None, fix)

    return check


def _distribution(name: str, minimum: str, fix: str) -> Callable[[str | None], Need]:
    def check(platform: str | None) -> Need:
        try:
            found = f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            found = None
        return _judged(name, minimum, found, fix)

    return check


#: its headers are what is compiled against
_TORCH = "pip install --force-reinstall 'torch>=2.11,<2.15', whose default wheel on Linux is built for CUDA"


def _torch(platform: str | None) -> Need:
    what = "torch built for CUDA"
    if importlib.util.find_spec("torch") is None:
        return Need(what, None, _TORCH)
    import torch

    cuda = torch.version.cuda
    found = f"torch {torch.__version__}"
    return Need(what, found, None if cuda else _TORCH)


def _python(platform: str | None) -> Need:
    return _judged(
        "Python",
        "3.12",
        f"Python {sys.version.split()[0]}",
        "apt install python3.12 python3.12-venv, and install deepinfer-cli there",
    )


def _pip(platform: str | None) -> Need:
    found = "pip" if importlib.util.find_spec("pip") else None
    return Need("pip", found, None if found else f"{sys.executable} -m ensurepip")


#: what each build asks for, as its setup and README state; g++ 13 is the first with <format>
_NEEDS: dict[str, tuple[Callable[[str | None], Need], ...]] = {
    "deep_gemm": (_gxx("11"), _nvcc({"sm90": "12.3", "sm100": "12.9"}), _torch, _pip),
    "flash_mla": (_gxx("11"), _nvcc({"sm90": "12.8", "sm100": "12.9"}), _torch, _pip),
    "deep_ep": (
        _gxx("13"),
        _nvcc({"sm90": "13.1", "sm100": "13.1"}),
        _torch,
        _distribution("nvidia-nccl-cu13", "2.32.3", "pip install 'nvidia-nccl-cu13>=2.32.3'; torch must load the same"),
        _pip,
    ),
    "deep_select": (_gxx("13"), _nvcc({"sm90": "12.9", "sm100": "12.9"}), _torch, _pip),
    "tile_kernels": (
        _python,
        _distribution("tilelang", "0.1.15", "pip install 'deepinfer-cli[cuda]'"),
        _nvcc({"sm90": "12.9", "sm100": "12.9"}),
        _pip,
    ),
}


# --------------------------------------------------------------------------- run


def run(made: Plan, note: Callable[[str], None] | None = None) -> list[Done]:
    """Run the steps of a plan that lacks nothing, to the first failure; the library appears whole or not at all.

    ``note`` is told when another build is waited for. Raises ``BuildError`` where the cache cannot be written.
    """
    folder = made.target.parent
    done: list[Done] = []
    with kernel_cache.locked(folder, note):
        if made.built:
            return done
        with kernel_cache.scratch(folder) as work, Programs() as programs:
            part = work / "site"
            for step in made.steps:
                argv = tuple(str(part) if word == str(made.target) else word for word in step.argv)
                done.append(_run(step, argv, folder, work, programs))
                if done[-1].status == "failed":
                    return done
            if not (part / made.library).is_dir():
                detail = f"what was installed has no package {made.library}"
                return [*done[:-1], Done(done[-1].step, "failed", done[-1].seconds, detail)]
            with kernel_cache.writing(folder):
                (part / MADE_OF).write_text(json.dumps(dict(made.made_of)))
                if made.target.exists():
                    made.target.replace(work / "older")
                part.replace(made.target)
                (folder / _LOG).unlink(missing_ok=True)
    return done


#: what a step printed that failed
_LOG = "build.log"
#: what pip says of any failure, beside the reason
_EMPTY = re.compile(
    r"subprocess-exited|did not run successfully|Failed building|metadata-generation|failed-wheel|^note:"
)


def _run(step: Step, argv: tuple[str, ...], folder: Path, work: Path, programs: Programs) -> Done:
    began = time.perf_counter()
    variables = dict(step.variables) | {"GIT_TERMINAL_PROMPT": "0", "TMPDIR": str(work)}

    def failed(detail: str) -> Done:
        return Done(step, "failed", time.perf_counter() - began, detail)

    try:
        status, text = programs.run(argv, _SECONDS, variables)
    except TimeoutError as exc:
        return failed(str(exc))
    except OSError as exc:
        return failed(f"{argv[0]}: {exc.strerror}")
    if status == 0:
        return Done(step, "done", time.perf_counter() - began)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _EMPTY.search(line)]
    reasons = (r"error:|undefined reference|cannot find", r"fatal|assert|Error\b", "")  # a compiler's before a script's
    said = next((line for reason in reasons for line in lines if re.search(reason, line)), f"exit status {status}")
    kernel_cache.refuse_full_disk(text, folder)
    with kernel_cache.writing(folder):
        (folder / _LOG).write_text(text)
    return failed(f"{said} ({folder / _LOG} has all of it)")
