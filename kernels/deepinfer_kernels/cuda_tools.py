"""Where a tool of CUDA is: one search for everything that calls, checks or names one."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Name = Literal["nvcc", "cuobjdump", "nvdisasm"]
#: tool → packages that bring one, the first to be installed
PACKAGES: dict[Name, tuple[str, ...]] = {
    "nvcc": ("nvidia-cuda-nvcc",),
    "cuobjdump": ("nvidia-cuda-cuobjdump", "triton"),
    "nvdisasm": ("nvidia-cuda-nvdisasm", "triton"),
}
#: what else has to be installed with a package
_BESIDE = {"nvidia-cuda-nvcc": "nvidia-cuda-cccl"}


@dataclass(frozen=True)
class Found:
    """``path`` is None where there is none in ``looked``, the places in order; ``package`` brought it, if one did."""

    name: Name
    path: str | None
    looked: tuple[str, ...]
    package: str | None = None
    home: str | None = None

    @property
    def absence(self) -> str:
        """That there is none, and where it was looked for."""
        return f"there is no {self.name} in {', nor in '.join(self.looked)}"

    def fix(self, minimum: str | None = None) -> str:
        """How to get one, or one that is not older than ``minimum``."""
        package = PACKAGES[self.name][0]
        wanted = f"'{package}>={minimum}'" if minimum else package
        beside = _BESIDE.get(package)
        pip = f"pip install {wanted}{f' {beside}' if beside else ''}"
        newer = f" of {minimum} or newer" if minimum else ""
        first = f"{pip} and unset CUDA_HOME" if self.home else pip
        return f"{first}, or name the folder of a CUDA toolkit{newer} in CUDA_HOME"


def of_package(package: str, name: str) -> str | None:
    """The file of that name which an installed distribution has; None without one."""
    try:
        files = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next(
        (str(path) for file in files if file.name == name if (path := Path(str(file.locate()))).is_file()), None
    )


def find(
    name: Name,
    environ: Mapping[str, str] = os.environ,
    which: Callable[[str], str | None] = shutil.which,
    of_package: Callable[[str, str], str | None] = of_package,
) -> Found:
    """The tool in $CUDA_HOME (or $CUDA_PATH), on the path, or of a package, in this order.

    An nvcc is looked for in $CUDA_HOME alone where that is set: TileLang and torch's extensions look nowhere else.
    """
    looked: list[str] = []
    variable = next((v for v in ("CUDA_HOME", "CUDA_PATH") if environ.get(v)), None)
    home = environ[variable] if variable else None
    if home is not None:
        looked.append(f"{variable} ({home}/bin)")
        path = shutil.which(name, path=f"{home}/bin")
        if path is not None or name == "nvcc":
            return Found(name, path, tuple(looked), home=home)
    looked.append("PATH")
    path = which(name)
    if path is not None:
        return Found(name, path, tuple(looked), home=home)
    for package in PACKAGES[name]:
        looked.append(f"the package {package}")
        path = of_package(package, name)
        if path is not None:
            return Found(name, path, tuple(looked), package, home)
    return Found(name, None, tuple(looked), home=home)
