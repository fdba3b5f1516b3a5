"""What this machine can run kernels on."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """``platform`` is cpu, sm90, sm100 or smXY for a CUDA device of another capability."""

    platform: str
    torch_device: str
    name: str
    memory_bytes: int


def probe_cuda() -> tuple[Device, ...]:
    """Every visible CUDA device; empty where there is none."""
    import torch

    if not torch.cuda.is_available():
        return ()
    found = []
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        platform = f"sm{properties.major}{properties.minor}"
        found.append(Device(platform, f"cuda:{i}", properties.name, properties.total_memory))
    return tuple(found)
