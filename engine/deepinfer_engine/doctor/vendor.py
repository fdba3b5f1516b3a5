"""Vendor kernel libraries, recognised by what they can do, and the operations that a profile may give to them.

What a library must have and which distributions are not it is written in ``deepinfer_kernels.vendor.libraries``. Here
libraries are imported in a child process, and only where their device exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System
from deepinfer_kernels.vendor.libraries import LIBRARIES, PLACEHOLDERS, Library, site

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile


def check_names(system: System) -> Sequence[Finding]:
    """Distributions that hold a vendor's name without being the vendor's library."""
    findings: list[Finding] = []
    for name, known in PLACEHOLDERS.items():
        have = system.distributions.get(name)
        if have is None or known.version not in (None, have.version):
            continue
        if known.version is None:
            fix = f"pip uninstall {name}, and build {known.package} from its repository"
            findings.append(
                warned("package names", f"{name} {have.version} is {known.what.format(known.package)}", fix)
            )
        elif have.from_index:
            found = f"{name} {have.version} from the package index is {known.what}; it shadows {known.package}"
            findings.append(failed("package names", found, f"pip uninstall {name}"))
    return findings or [passed("package names", "no placeholder of a vendor library is installed")]


def check_capabilities(system: System, profile: Profile | None, platform: str) -> Sequence[Finding]:
    """What each installed vendor library can do; absence is no fault, the torch reference computes the same."""
    cache = profile.kernels.folder if profile is not None else None
    findings: list[Finding] = []
    absent: list[str] = []
    for library in LIBRARIES.values():
        built = site(library.name, cache)
        if not (built / library.name).is_dir() and system.module_file(library.name) is None:
            absent.append(library.name)
        elif platform == "cpu":
            findings.append(passed(library.name, "installed, not loaded: it needs an accelerator"))
        else:
            findings.append(_probe(system, library, built, platform))
    if absent:
        findings.append(passed("vendor libraries", f"not installed: {', '.join(absent)}", _adapters(platform, absent)))
    return findings


def _adapters(platform: str, libraries: Sequence[str]) -> list[str]:
    """For each library, the operations a profile may give to it on a platform, and whether they ran there."""
    from deepinfer_kernels.vendor.families import ADAPTERS

    said: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for adapter in ADAPTERS:
        if adapter.library in libraries and platform in adapter.platforms:
            ran = f"compared with the reference on {platform}" if platform in adapter.verified else "unverified"
            said[adapter.library][ran].append(f"{adapter.op} ({', '.join(sorted(adapter.numerics))})")
    return [
        f"{name}, when kernels.overrides names it, {ran}: {', '.join(ops)}"
        for name, by_state in said.items()
        for ran, ops in by_state.items()
    ]


def _probe(system: System, library: Library, built: Path, platform: str) -> Finding:
    by_module: dict[str, list[str]] = defaultdict(list)
    for capability in library.capabilities:
        by_module[library.module_of(capability.function)].append(capability.function)
    has: list[str] = []
    for module, names in by_module.items():
        found, reason = system.attributes(module, tuple(names), built)
        if reason is not None:
            return warned(library.name, f"installed, but it cannot be imported: {reason}", library.install)
        has += found
    can = [c.purpose for c in library.capabilities if c.function in has]
    cannot = [c.purpose for c in library.capabilities if c.function not in has]
    if not can:
        names = ", ".join(c.function for c in library.capabilities)
        found = f"has none of {names}: not the library of this name, or years too old"
        return failed(library.name, found, f"pip uninstall it; {library.install}")
    lines = _adapters(platform, [library.name])
    if cannot:
        return warned(library.name, f"can {', '.join(can)}; lacks {', '.join(cannot)}", library.install, lines)
    return passed(library.name, f"can {', '.join(can)}", lines)
