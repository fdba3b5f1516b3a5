"""Which requests keep their promise of a seed under which kind of speculation. No torch.

Coupled verification emits what plain sampling would, so a seed means the same with and without drafts. Rejection draws
a token from another branch of noise when it was drafted than when it was not: with a budget that other rows compete
for, the same seed gives other tokens beside other requests. Greedy rows draw nothing.
"""

from __future__ import annotations

from deepinfer_engine.config.schema import Spec
from deepinfer_engine.errors import UsageError
from deepinfer_engine.types import SamplingParams


def check_seed(sampling: SamplingParams, spec: Spec, *, request: str) -> None:
    """Refuse a seed that adaptive rejection could not honour; ``UsageError`` names the request and the keys."""
    if sampling.seed is None or sampling.temperature == 0:
        return
    if spec.mode == "rejection" and spec.verify == "adaptive":
        raise UsageError(
            f"request {request!r}: seed {sampling.seed} with spec.mode rejection and spec.verify adaptive: which "
            "drafts are verified depends on other requests, and with it what is drawn",
            hint="use spec.mode coupled (same output as without drafts), or leave out the seed",
        )


def keeps_seed(sampling: SamplingParams, spec: Spec) -> bool:
    """Whether speculation leaves a seeded request's output alone, given logits that do not depend on the batch.

    With rejection the output also depends on which positions were drafted and from what context, which a preemption or
    a prefix hit changes; only coupled verification, or none, keeps it.
    """
    return sampling.temperature == 0 or spec.verify == "off" or spec.mode == "coupled"
