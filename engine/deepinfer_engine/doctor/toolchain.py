"""Compilers and the small tools they need, for the platform that kernels are built for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal

from deepinfer_engine.doctor.finding import Finding, passed, warned
from deepinfer_engine.doctor.system import System, at_least

#: Lowest versions: C++20 for kernel sources; nvcc 12.9 is the first that knows sm_100a.
_GXX_MIN = "11"
_NVCC_MIN = "12.9"
_TRITON_MIN = "3.6"
_TILELANG = "0.1.15"


def check_tools(system: System, platform: str) -> Sequence[Finding]:
    """The tools of one platform: a C++ compiler everywhere, then what CUDA or CANN kernels need."""
    findings = [_cxx(system)]
    if platform.startswith("sm"):
        findings += [_nvcc(system), _package(system, "triton", _TRITON_MIN), _tilelang(system)]
        findings += [_inspector(system, "cuobjdump"), _inspector(system, "nvdisasm")]
    if platform.startswith("ascend"):
        findings += [_bisheng(system), _tilelang(system)]
    return findings


def _cxx(system: System) -> Finding:
    name = system.environ.get("CXX") or "g++"
    path = system.which(name)
    if path is None:
        fix = "install one: apt install g++"
        return warned("C++ compiler", f"{name} is not on PATH; CPU kernels written in C++ cannot be built", fix)
    text = system.output(path, "--version") or ""
    match = re.search(r"\d+\.\d+(?:\.\d+)?", text)
    if match is None:
        return warned("C++ compiler", f"{path} does not print a version", "set CXX to a working compiler")
    if not at_least(match[0], _GXX_MIN):
        return warned(
            "C++ compiler",
            f"{path} {match[0]}, C++20 needs {_GXX_MIN}",
            f"apt install g++-{_GXX_MIN}, and name it in CXX",
        )
    return passed("C++ compiler", f"{path} {match[0]}")


def _nvcc(system: System) -> Finding:
    nvcc = system.cuda_tool("nvcc")
    if nvcc.path is None:
        return warned("nvcc", f"{nvcc.absence}; TileLang kernels cannot be built", nvcc.fix(_NVCC_MIN))
    match = re.search(r"release (\d+\.\d+)", system.output(nvcc.path, "--version") or "")
    if match is None or not at_least(match[1], _NVCC_MIN):
        version = match[1] if match else "of unknown version"
        return warned("nvcc", f"{nvcc.path} {version}, sm_100 needs {_NVCC_MIN}", nvcc.fix(_NVCC_MIN))
    return passed("nvcc", f"{nvcc.path} {match[1]}")


def _package(system: System, name: str, minimum: str) -> Finding:
    have = system.distributions.get(name)
    fix = "pip install 'deepinfer-cli[cuda]'"
    if have is None:
        return warned(name, "not installed; its kernels are not used", fix)
    if not at_least(have.version, minimum):
        return warned(name, f"{have.version}, {minimum} or newer is needed", fix)
    return passed(name, have.version)


def _tilelang(system: System) -> Finding:
    have = system.distributions.get("tilelang")
    fix = "pip install 'deepinfer-cli[tilelang]'"
    if have is None:
        return warned("tilelang", "not installed; its kernels are not used", fix)
    if have.version.split("+")[0] != _TILELANG:
        return warned("tilelang", f"{have.version}, kernels are written for {_TILELANG}", fix)
    ffi = system.distributions.get("apache-tvm-ffi")
    if ffi is not None and at_least(ffi.version, "0.1.13"):
        # 0.1.13 changed the interface that tilelang 0.1.15 was built against
        fix = "pip install 'apache-tvm-ffi>=0.1.11,<0.1.13'"
        return warned("tilelang", f"{have.version} with apache-tvm-ffi {ffi.version}, which is too new for it", fix)
    return passed("tilelang", have.version)


def _inspector(system: System, name: Literal["cuobjdump", "nvdisasm"]) -> Finding:
    tool = system.cuda_tool(name)
    if tool.path is None:
        return warned(name, f"{tool.absence}; compiled kernels cannot be inspected", tool.fix())
    return passed(name, tool.path)


def _bisheng(system: System) -> Finding:
    path = system.which("bisheng")
    if path is None:
        fix = "source the set_env.sh of CANN 9.2 or newer"
        return warned("bisheng", "not on PATH; Ascend kernels can be written but not compiled", fix)
    return passed("bisheng", path)
