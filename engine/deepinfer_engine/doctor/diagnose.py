"""``diagnose``: every check, in the order an operator reads them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer_engine.doctor import (
    accelerator,
    implementations,
    libraries,
    network,
    packages,
    storage,
    toolchain,
    vendor,
)
from deepinfer_engine.doctor.finding import Check, Diagnosis, run_checks
from deepinfer_engine.doctor.system import System

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile


def diagnose(profile: Profile | None = None, *, model: Path | None = None, system: System | None = None) -> Diagnosis:
    """Look at this machine, for a profile where one is given; ``model`` replaces the embedded model."""
    return run_checks(checks(profile, model, System() if system is None else system))


def checks(profile: Profile | None, model: Path | None, system: System) -> list[Check]:
    """The checks of one diagnosis; nothing is looked at yet."""

    def on_platform(check):
        def run():
            return check(_platform(system))

        return run

    chosen = partial(implementations.check_implementations, profile, model=model)
    items = [
        Check("python", "Python", packages.check_interpreter),
        Check("python", "torch", partial(accelerator.check_torch, system)),
        Check("python", "requirements", partial(packages.check_requirements, system)),
        Check("python", "conflicts", partial(packages.check_conflicts, system)),
        Check("accelerator", "device", partial(accelerator.check_devices, system)),
        Check("accelerator", "versions", partial(accelerator.check_driver, system, profile)),
        Check("libraries", "collectives", partial(libraries.check_mapped, system, profile)),
        Check("kernels", "tools", on_platform(partial(toolchain.check_tools, system))),
        Check("kernels", "package names", partial(vendor.check_names, system)),
        Check("kernels", "vendor libraries", on_platform(partial(vendor.check_capabilities, system, profile))),
        Check("kernels", "operations", on_platform(chosen)),
        Check("kernels", "Ascend kernels", on_platform(partial(implementations.check_ascend, profile))),
        Check("kernels", "step loop", on_platform(partial(implementations.check_step_loop, profile))),
        Check("kernels", "compiled kernels", on_platform(partial(implementations.check_compiled, profile))),
        Check("kernels", "kernel cache", partial(implementations.check_cache, system, profile)),
        Check("storage", "disk", partial(storage.check_disk, system)),
        Check("storage", "host memory", partial(storage.check_memory, system, profile)),
        Check("storage", "shared memory", partial(storage.check_shared_memory, system, profile)),
        Check("storage", "weights", partial(storage.check_weights, model)),
        Check("network", "interface", partial(network.check_interfaces, system, profile)),
    ]
    if model is not None:
        after = next(n for n, item in enumerate(items) if item.subject == "weights") + 1
        items.insert(after, Check("storage", "weights manifest", partial(storage.check_manifest, model)))
    if profile is not None:
        items.insert(
            5, Check("accelerator", "profile hardware", partial(accelerator.check_profile_hardware, system, profile))
        )
    return items


def _platform(system: System) -> str:
    """The platform kernels are chosen for; torch that cannot be imported is another check's finding."""
    try:
        found = accelerator.probe(system).platform
    except ImportError:
        return "cpu"
    return found.split("+")[0]
