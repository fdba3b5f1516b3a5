"""Which transport carries tokens between processes: torch.distributed, or DeepEP where a profile asks for it."""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from deepinfer_engine.config.model import ModelConfig
from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.deepep import DeepEpMesh, open_buffer
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.dist.share import Share
from deepinfer_engine.dist.torch_mesh import TorchMesh
from deepinfer_engine.errors import NotReadyError

RankedMesh = TorchMesh | DeepEpMesh


def connector(
    profile: Profile, config: ModelConfig, share: Share, group: dist.ProcessGroup, device: str
) -> Callable[[Placement], RankedMesh]:
    """What makes this process's mesh of a placement. Raises NotReadyError for a transport that is not there."""
    experts, choice = config.n_routed_experts, profile.eplb.replica_choice
    if profile.parallel.transport == "torch":
        return lambda placement: TorchMesh(placement, experts, share, group, device, choice=choice)
    if not device.startswith("cuda"):
        raise NotReadyError("parallel.transport deepep needs devices", hint="--set parallel.transport=torch")
    if profile.numerics.mode != "fast" or profile.numerics.batch_invariant:
        raise NotReadyError(
            "parallel.transport deepep adds parts of a token's sum in bf16 in an order of its own: it has neither "
            f"numerics.mode {profile.numerics.mode} nor batch invariance",
            hint="--set parallel.transport=torch",
        )
    sched = profile.sched
    tokens = len(share.dp_ranks) * (sched.prefill_chunk_tokens + sched.max_rows_per_rank)
    buffer = open_buffer(group, tokens=tokens, hidden=config.hidden_size, choices=config.num_experts_per_tok)
    return lambda placement: DeepEpMesh(
        placement, experts, share, group, buffer, device, tokens=tokens, choice=choice
    )
