"""Communication libraries as they are mapped into a process that has imported torch, not as packages claim them."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_engine.doctor.finding import Finding, failed, passed
from deepinfer_engine.doctor.system import System, at_least

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile

_LIBRARIES = (("NCCL", "libnccl"), ("NVSHMEM", "libnvshmem_host"), ("HCCL", "libhccl"))


def mapped_files(maps: str, stem: str) -> list[str]:
    """Files of one library in the text of /proc/PID/maps, each once."""
    pattern = re.compile(rf"\s(/\S*/{re.escape(stem)}\.so[\w.]*)(?: \(deleted\))?$", re.MULTILINE)
    return sorted({match[1] for match in pattern.finditer(maps)})


def nccl_version(path: str) -> str | None:
    """Version that a mapped NCCL reports: 23203 is 2.32.3 (major·10000 + minor·100 + patch since 2.9)."""
    number = ctypes.c_int()
    if ctypes.CDLL(path).ncclGetVersion(ctypes.byref(number)) != 0:
        return None
    code = number.value
    return f"{code // 10000}.{code % 10000 // 100}.{code % 100}"


def _file_version(path: str) -> str | None:
    """The version in the name that a library file resolves to, such as libnvshmem_host.so.3.4.5."""
    match = re.search(r"\.so\.(\d[\d.]*)$", Path(path).resolve().name)
    return match[1] if match else None


def check_mapped(
    system: System, profile: Profile | None, *, version_of_nccl: Callable[[str], str | None] = nccl_version
) -> Sequence[Finding]:
    """Path and version of every communication library; two files of one library fail, an old NCCL too."""
    system.torch()  # its import is what maps them
    maps = system.read("/proc/self/maps") or ""
    findings: list[Finding] = []
    minimum = profile.requires.nccl_min if profile is not None else None
    for name, stem in _LIBRARIES:
        files = mapped_files(maps, stem)
        if len(files) > 1:
            findings.append(
                failed(
                    name, f"{len(files)} files are mapped: {', '.join(files)}", "uninstall or unset all but one of them"
                )
            )
        elif files:
            version = (version_of_nccl if name == "NCCL" else _file_version)(files[0])
            wanted = minimum if name == "NCCL" else None
            shown = f"{version or 'unknown version'}, mapped from {files[0]}"
            if wanted and (version is None or not at_least(version, wanted)):
                fix = f"pip install 'nvidia-nccl-cu13>={wanted}' into this environment"
                findings.append(failed(name, f"{shown}; the profile needs {wanted} or newer", fix))
            else:
                findings.append(passed(name, shown))
        elif name == "NCCL" and minimum:
            fix = "install a CUDA build of torch; it brings NCCL"
            findings.append(failed(name, f"none is mapped; the profile needs {minimum} or newer", fix))
    if not findings:
        findings.append(passed("collectives", "none is mapped; all ranks share one process"))
    return findings
