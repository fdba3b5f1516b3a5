"""The plan file that a deployment starts from, checked against the model and the mesh it is to run on."""

from __future__ import annotations

from pathlib import Path

from deepinfer_engine.eplb.plan import ExpertPlan, read_plan
from deepinfer_engine.errors import ArtefactError


def read_start_plan(
    path: str, *, layers: int, experts: int, ranks: int, slots_per_rank: int, config_digest: str, weights_digest: str
) -> ExpertPlan:
    """The plan at ``path``. Raises ArtefactError when it is not a plan, or one of another model or another mesh.

    A digest that the plan does not carry (statistics of another engine) cannot be compared; its sizes are.
    """
    plan = read_plan(Path(path))
    have = {"config": config_digest, "weights": weights_digest}
    for name, mine in have.items():
        stamped = getattr(plan.digests, name)
        if stamped and stamped != mine:
            raise ArtefactError(
                f"{path}: made for another model: its {name} digest is {stamped[:12]}…, this one's is {mine[:12]}…",
                hint="plan again from counts of this model: deepinfer run --record-experts, then eplb-plan",
            )
    if plan.experts != experts or plan.layer_ids != tuple(range(layers)):
        raise ArtefactError(
            f"{path}: {plan.layers} layers of {plan.experts} experts, the model has {layers} of {experts}"
        )
    if (plan.ranks, plan.slots_per_rank) != (ranks, slots_per_rank):
        raise ArtefactError(
            f"{path}: {plan.ranks} ranks x {plan.slots_per_rank} slots, "
            f"the profile has {ranks} ranks x {slots_per_rank} slots",
            hint=f"deepinfer eplb-plan STATS --ranks {ranks} --slots-per-rank {slots_per_rank}",
        )
    if plan.dead_ranks:
        raise ArtefactError(
            f"{path}: leaves rank {plan.dead_ranks[0]} of {ranks} empty, but all ranks of the profile run",
            hint="plan without --alive",
        )
    return plan
