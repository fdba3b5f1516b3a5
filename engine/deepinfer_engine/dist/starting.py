"""Where experts are when a run starts: as a plan file says, or each rank's own ones and replicas round robin."""

from __future__ import annotations

from deepinfer_engine.config.schema import Profile
from deepinfer_engine.dist.placement import Placement
from deepinfer_engine.eplb.start_plan import read_start_plan
from deepinfer_engine.weights.checkpoint import Checkpoint


def starting_placement(checkpoint: Checkpoint, profile: Profile) -> Placement:
    """Slots of the plan file ``eplb.plan_path`` (``ArtefactError`` when it does not fit), or the built-in ones."""
    config, eplb = checkpoint.config, profile.eplb
    if eplb.plan_path is None:
        return Placement.static(
            config.num_hidden_layers,
            config.n_routed_experts,
            ranks=profile.parallel.ep,
            redundant_per_rank=profile.parallel.redundant_experts_per_rank,
        )
    plan = read_start_plan(
        eplb.plan_path,
        layers=config.num_hidden_layers,
        experts=config.n_routed_experts,
        ranks=profile.parallel.ep,
        slots_per_rank=profile.slots_per_rank(config.n_routed_experts),
        config_digest=config.digest,
        weights_digest=checkpoint.digest,
    )
    return Placement.of(plan.slot_expert_LRS)
