"""Machines that the checks are shown: a file tree, an environment, installed distributions, a torch look-alike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from deepinfer_engine.doctor.system import Distribution, System, Usage

GIB = 2**30


class Machine(System):
    """A ``System`` whose every answer is given; nothing of the real machine shows through."""

    def __init__(self, root: Path, *, environ=None, files=None, tools=None, installed=(), modules=(), torch=None,
                 free=1000 * GIB, attributes=None, requirements=None, owners=None):  # fmt: skip
        super().__init__(root, environ or {})
        for name, text in (files or {}).items():
            path = self.path(name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.tools = tools or {}
        self.distributions = {d.name: d for d in installed}  # type: ignore[misc]
        self.providers = owners or {}  # type: ignore[misc]
        self.modules = set(modules)
        self.free = free
        self.given_attributes = attributes or {}
        self.given_requirements = requirements
        self.given_torch = cpu_torch() if torch is None else torch

    def which(self, tool):
        return f"/usr/bin/{tool}" if tool in self.tools else None

    def package_file(self, package, name):
        return f"/site/{package}/bin/{name}" if package in self.distributions and name in self.tools else None

    def output(self, *argv, seconds=20):
        return self.tools.get(argv[0].rsplit("/", 1)[-1])

    def disk(self, path):
        return Usage(2 * self.free, self.free)

    def module_file(self, name):
        return f"/site/{name}/__init__.py" if name in self.modules else None

    def attributes(self, module, names, folder=None):
        found = self.given_attributes[module]
        return (list(found), None) if isinstance(found, tuple) else ([], found)

    def requirements(self, name):
        return self.given_requirements

    def torch(self):
        if isinstance(self.given_torch, Exception):
            raise self.given_torch
        return self.given_torch


def cpu_torch(version="2.13.0+cpu"):
    return SimpleNamespace(
        __version__=version,
        version=SimpleNamespace(cuda=None),
        cuda=SimpleNamespace(is_available=lambda: False),
    )


def cuda_torch(capabilities=((9, 0),), memory_gib=139.8, built_for=("sm_80", "sm_90", "sm_100"), cuda="13.0"):
    devices = [
        SimpleNamespace(major=a, minor=b, name="NVIDIA H200", total_memory=int(memory_gib * GIB))
        for a, b in capabilities
    ]
    return SimpleNamespace(
        __version__="2.13.0+cu130",
        version=SimpleNamespace(cuda=cuda),
        cuda=SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: len(devices),
            get_device_properties=lambda i: devices[i],
            get_arch_list=lambda: list(built_for),
        ),
    )


def npu_torch(name, count, memory_gib):
    return SimpleNamespace(
        __version__="2.13.0",
        version=SimpleNamespace(cuda=None),
        cuda=SimpleNamespace(is_available=lambda: False),
        npu=SimpleNamespace(
            is_available=lambda: True,
            device_count=lambda: count,
            get_device_name=lambda i: name,
            get_device_properties=lambda i: SimpleNamespace(total_memory=memory_gib * GIB),
        ),
    )


def distribution(name, version, *, from_index=True, scripts=()):
    return Distribution(name, version, from_index, tuple(scripts))
