"""Accelerators: what is there, whether torch can use it, and whether it is what the profile was written for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from deepinfer_engine.doctor.finding import Finding, failed, passed, warned
from deepinfer_engine.doctor.system import System, at_least

if TYPE_CHECKING:
    from deepinfer_engine.config.schema import Profile

_GIB = 2**30


@dataclass(frozen=True)
class Accelerators:
    """What torch sees: platform (cpu, smXY, ascend950 or ascend), names, memory of the smallest device in bytes."""

    platform: str
    names: tuple[str, ...] = ()
    memory_bytes: int = 0
    #: architectures the torch build carries code for, such as sm_90
    built_for: tuple[str, ...] = ()


def probe(system: System) -> Accelerators:
    """Devices that torch can use in this process."""
    torch = system.torch()
    if torch.cuda.is_available():
        devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
        platforms = sorted({f"sm{d.major}{d.minor}" for d in devices})
        return Accelerators(
            "+".join(platforms),
            tuple(d.name for d in devices),
            min(d.total_memory for d in devices),
            tuple(torch.cuda.get_arch_list()),
        )
    if system.module_file("torch_npu") is not None and hasattr(torch, "npu") and torch.npu.is_available():
        count = torch.npu.device_count()
        names = tuple(torch.npu.get_device_name(i) for i in range(count))
        memory = min(torch.npu.get_device_properties(i).total_memory for i in range(count))
        # devices call themselves Ascend950PR_…; another generation is another platform
        platform = "ascend950" if all("950" in name for name in names) else "ascend"
        return Accelerators(platform, names, memory)
    return Accelerators("cpu")


def check_devices(system: System) -> Sequence[Finding]:
    """Devices that exist, and whether torch was built for them."""
    have = probe(system)
    on_bus = [n for n in system.names("/dev") if re.fullmatch(r"nvidia\d+", n)]
    davinci = [n for n in system.names("/dev") if re.fullmatch(r"davinci\d+", n)]
    if have.platform == "cpu":
        if on_bus or davinci:
            what, build = ("NVIDIA", "CUDA") if on_bus else ("Ascend", "torch_npu")
            return [
                failed(
                    "device",
                    f"{len(on_bus or davinci)} {what} devices under /dev, torch cannot use any",
                    f"install a {build} build of torch that matches the driver, and check the visible devices setting",
                )
            ]
        return [passed("device", "no accelerator; the CPU runs the embedded model")]
    text = f"{len(have.names)} x {', '.join(sorted(set(have.names)))} ({have.platform})"
    text += f", {have.memory_bytes / _GIB:.0f} GiB each"
    findings = [passed("device", text)]
    if "+" in have.platform:
        findings.append(
            failed("device mix", f"devices of {have.platform} in one host", "show this process one kind only")
        )
    if have.platform.startswith("sm"):
        findings.append(_built_for(have))
    return findings


def _built_for(have: Accelerators) -> Finding:
    """Code for sm_XY runs on X.Z with Z >= Y of the same X; an 'a' suffix runs on exactly that one."""
    wanted = have.platform.split("+")[0].removeprefix("sm")
    major, minor = int(wanted[:-1]), int(wanted[-1])
    for arch in have.built_for:
        match = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", arch)
        if match is None:
            continue
        kind, a, b, exact = match[1], int(match[2]), int(match[3]), match[4]
        same = (a, b) == (major, minor) if exact == "a" else a == major and b <= minor
        if same or (kind == "compute" and (a, b) <= (major, minor)):
            return passed("torch code", f"torch carries {arch}, the device is sm_{wanted}")
    return failed(
        "torch code",
        f"torch carries code for {', '.join(have.built_for) or 'nothing'}, the device is sm_{wanted}",
        "install a torch build for this architecture: https://pytorch.org/get-started/locally",
    )


def check_profile_hardware(system: System, profile: Profile) -> Sequence[Finding]:
    """Whether this machine is what the profile's hardware section names; one host of it is enough."""
    want, have = profile.hardware, probe(system)
    if want.platform == "cpu":
        return [passed("profile hardware", "the profile runs on any CPU")]
    here = have.platform
    fix = f"run profile {profile.name} on its hardware; with the embedded model `deepinfer run` emulates it here"
    if here != want.platform:
        note = ""
        if here[:-1] == want.platform[:-1]:  # sm103 for sm100: same family, but not the same kernels
            note = "; kernels built for one do not load on the other"
        return [failed("profile hardware", f"the profile is for {want.platform}, this machine has {here}{note}", fix)]
    count = min(want.gpus, want.gpus_per_node)
    if len(have.names) < count:
        return [failed("profile hardware", f"the profile needs {count} devices per host, {len(have.names)} here", fix)]
    smallest = have.memory_bytes / _GIB
    if smallest < want.hbm_gib:
        return [
            failed(
                "profile hardware",
                f"the profile counts on {want.hbm_gib:g} GiB per device, the smallest has {smallest:.1f}",
                f"deepinfer plan --profile {profile.name} --set hardware.hbm_gib={int(smallest)}",
            )
        ]
    return [passed("profile hardware", f"{count} x {want.platform} per host, as the profile needs")]


def check_driver(system: System, profile: Profile | None) -> Sequence[Finding]:
    """Driver, CUDA or CANN version against the profile's requirements."""
    requires = profile.requires if profile is not None else None
    findings: list[Finding] = []
    text = system.read("/proc/driver/nvidia/version") or ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+(\d+\.\d+(?:\.\d+)?)", text)
    driver = match[1] if match else None
    findings += _versioned("driver", driver, requires.driver_min if requires else None, "no NVIDIA driver is loaded")
    torch = system.torch()
    cuda = torch.version.cuda
    findings += _versioned("CUDA", cuda, requires.cuda_min if requires else None, "torch is built without CUDA")
    cann = _cann_version(system)
    findings += _versioned("CANN", cann, requires.cann_min if requires else None, "no CANN toolkit is installed")
    return findings


def _versioned(name: str, found: str | None, wanted: str | None, absent: str) -> list[Finding]:
    if found is None:
        if wanted is None:
            return []  # nobody asked for it
        return [failed(name, f"{absent}; the profile needs {wanted} or newer", f"install {name} {wanted} or newer")]
    if wanted is not None and not at_least(found, wanted):
        return [failed(name, f"{found}; the profile needs {wanted} or newer", f"install {name} {wanted} or newer")]
    return [passed(name, found + (f" (the profile needs {wanted})" if wanted else ""))]


def _cann_version(system: System) -> str | None:
    homes = [
        system.environ.get("ASCEND_HOME_PATH"),
        "/usr/local/Ascend/ascend-toolkit/latest",
        "/usr/local/Ascend/latest",
    ]
    for home in homes:
        for name in ("version.cfg", "opp/version.info", "compiler/version.info"):
            text = system.read(f"{home}/{name}") if home else None
            match = re.search(r"[Vv]ersion\D{0,40}?(\d+\.\d+(?:\.\d+)?)", text or "")
            if match:
                return match[1]
    return None


def check_torch(system: System) -> Sequence[Finding]:
    """The torch build: version, and whether the threads setting suits a small machine."""
    torch = system.torch()
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    found = f"{torch.__version__} ({build})"
    if not (at_least(torch.__version__, "2.11") and not at_least(torch.__version__, "2.15")):
        return [warned("torch", f"{found}, tested with 2.11 to 2.14", "pip install 'torch>=2.11,<2.15'")]
    return [passed("torch", found)]
