"""``System``: everything the checks ask of the machine, in one place, so that tests can hand them another one."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer_kernels import cuda_tools

#: Longest time a tool may take to print its version; importing a CUDA library in a child needs the longer one.
_TOOL_SECONDS = 20
_IMPORT_SECONDS = 120


class Distribution(NamedTuple):
    """An installed distribution; ``from_index`` is False when it was installed from a path or a repository."""

    name: str
    version: str
    from_index: bool
    scripts: tuple[str, ...]


class Usage(NamedTuple):
    """Bytes of a file system."""

    total: int
    free: int


class System:
    """The machine this process runs on. ``root`` is where /proc, /sys and /dev are looked for."""

    def __init__(self, root: Path = Path("/"), environ: Mapping[str, str] | None = None):
        self.root = root
        self.environ = os.environ if environ is None else environ

    def path(self, name: str) -> Path:
        """A path of the file tree under ``root``."""
        return self.root / name.lstrip("/")

    def read(self, name: str) -> str | None:
        """Text of a small file, None where there is none or it may not be read."""
        try:
            return self.path(name).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return None

    def names(self, folder: str) -> list[str]:
        """Sorted names in a folder; empty where there is none."""
        try:
            return sorted(os.listdir(self.path(folder)))
        except OSError:
            return []

    def which(self, tool: str) -> str | None:
        return shutil.which(tool, path=self.environ.get("PATH"))

    def cuda_tool(self, name: cuda_tools.Name) -> cuda_tools.Found:
        return cuda_tools.find(name, self.environ, self.which, self.package_file)

    def package_file(self, package: str, name: str) -> str | None:
        """The file of that name which an installed distribution has; None without one."""
        return cuda_tools.of_package(package, name)

    def output(self, *argv: str, seconds: int = _TOOL_SECONDS) -> str | None:
        """stdout and stderr of a tool that ended well; None when it is absent, fails or takes too long."""
        try:
            done = subprocess.run(
                argv,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=seconds,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout + done.stderr if done.returncode == 0 else None

    def disk(self, path: Path) -> Usage | None:
        """Size and free bytes of the file system that holds ``path`` or its nearest existing parent."""
        for place in (path, *path.parents):
            try:
                usage = shutil.disk_usage(place)
            except OSError:
                continue
            return Usage(usage.total, usage.free)
        return None

    @functools.cached_property
    def distributions(self) -> dict[str, Distribution]:
        """Installed distributions by normalised name."""
        found: dict[str, Distribution] = {}
        for item in importlib.metadata.distributions():
            name = item.metadata["Name"]
            if name:
                scripts = tuple(e.name for e in item.entry_points if e.group == "console_scripts")
                key = re.sub(r"[-_.]+", "-", name).lower()
                found.setdefault(
                    key, Distribution(name, item.version, item.read_text("direct_url.json") is None, scripts)
                )
        return found

    def requirements(self, name: str) -> list[str] | None:
        """Requirements that a distribution declares, None when it is not installed."""
        try:
            return importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            return None

    @functools.cached_property
    def providers(self) -> Mapping[str, list[str]]:
        """Import package to the distributions that install it."""
        return importlib.metadata.packages_distributions()

    def module_file(self, name: str) -> str | None:
        """Where an import package would come from, without importing it; None when there is none."""
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            return None
        if spec is None:
            return None
        return spec.origin or next(iter(spec.submodule_search_locations or ()), None)

    def attributes(
        self, module: str, names: tuple[str, ...], folder: Path | None = None
    ) -> tuple[list[str], str | None]:
        """Which of ``names`` a module has, found in a child process, so that a crashing import harms nobody.

        ``folder`` is looked into before the environment. The second value is the reason when it cannot be imported.
        """
        code = (
            "import importlib, json, sys\n"
            "sys.path.insert(0, sys.argv[1])\n"
            "m = importlib.import_module(sys.argv[2])\n"
            "print(json.dumps([n for n in sys.argv[3:] if hasattr(m, n)]))\n"
        )
        argv = [sys.executable, "-c", code, str(folder or ""), module, *names]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            return [], f"importing it took more than {_IMPORT_SECONDS} s"
        if done.returncode:
            last = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
            return [], last
        return json.loads(done.stdout.splitlines()[-1]), None

    def torch(self) -> Any:
        """The torch module; ImportError when it is absent or broken."""
        import torch

        return torch


def version_tuple(text: str) -> tuple[int, ...]:
    """Leading numbers of a version: ``2.13.0+cpu`` is (2, 13, 0)."""
    match = re.match(r"\d+(?:\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def at_least(found: str, wanted: str) -> bool:
    """Whether one dotted version is not below another; missing parts are zero."""
    have, need = version_tuple(found), version_tuple(wanted)
    width = max(len(have), len(need))
    return have + (0,) * (width - len(have)) >= need + (0,) * (width - len(need))
