"""Python packages: the interpreter, our requirements, and other distributions that get in the way."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System

_OURS = "deepinfer-cli"
_PACKAGES = ("deepinfer_cli", "deepinfer_engine", "deepinfer_kernels")


def check_interpreter() -> Sequence[Finding]:
    """Which Python this is; an older one than 3.11 cannot install or import the package at all."""
    return [passed("Python", f"{sys.version.split()[0]} at {sys.executable}")]


def check_conflicts(system: System) -> Sequence[Finding]:
    """The upstream engine under its own name, a foreign `deepinfer` command, and two copies of our packages."""
    findings: list[Finding] = []
    upstream = system.distributions.get("deepinfer")
    if upstream is not None:
        text = f"the upstream engine deepinfer {upstream.version} is installed; it is not part of this tool"
        findings.append(warned("deepinfer", text, "pip uninstall deepinfer, unless you use that engine too"))
    for name, item in system.distributions.items():
        if name != _OURS and "deepinfer" in item.scripts:
            text = f"{item.name} {item.version} installs a command called deepinfer too"
            findings.append(failed("deepinfer command", text, f"pip uninstall {item.name}, then reinstall {_OURS}"))
    for package in _PACKAGES:
        owners = sorted(set(system.providers.get(package, ())))
        if len(owners) > 1:
            text = f"{package} is installed by {', '.join(owners)}"
            findings.append(failed("packages", text, f"pip uninstall {' '.join(owners)}, then reinstall {_OURS}"))
    return findings or [passed("conflicts", "no other distribution uses our names")]


def check_requirements(system: System) -> Sequence[Finding]:
    """Installed versions against what our own distribution declares."""
    requirements = system.requirements(_OURS)
    if requirements is None:
        return [passed("requirements", "running from a source tree; versions are not compared")]
    problems = []
    for text in requirements:
        if "extra ==" in text:
            continue
        match = re.match(r"([A-Za-z0-9._-]+)\s*(?:\[[^]]*\])?\s*([^;]*)", text)
        assert match is not None, text
        name, spec = re.sub(r"[-_.]+", "-", match[1]).lower(), match[2].strip(" ()")
        have = system.distributions.get(name)
        if have is None:
            problems.append(f"{name} is not installed, {spec or 'any version'} is needed")
        elif not satisfies(have.version, spec):
            problems.append(f"{name} {have.version} does not satisfy {spec}")
    if problems:
        fix = f"pip install --upgrade {_OURS}"
        return [failed("requirements", f"{len(problems)} not satisfied", fix, problems)]
    return [passed("requirements", "all satisfied")]


def satisfies(version: str, spec: str) -> bool:
    """Whether a version fulfils a version specifier; pre-releases count as releases, build labels do not matter."""
    return SpecifierSet(spec).contains(Version(version), prereleases=True)
