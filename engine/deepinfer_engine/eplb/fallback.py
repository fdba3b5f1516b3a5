"""Whether an earlier placement would have carried the newest steps better than the one that runs, and pays to restore.

Statement. A plan is fitted to the window it was made from; when traffic changes after that, it may be worse than what
it replaced. Routing does not depend on where experts live, so the counts of the newest steps tell what any placement
would have come to on them. Of the earlier placements the one with the least moe_lb there is taken (the first of
equals), and restored when

    horizon_steps · moe_ms · (moe_lb_running − moe_lb_earlier)  >  most bytes one rank receives ÷ link bandwidth

where the horizon is what is left until the next plan.

Worked example, 1 layer, 2 ranks × 2 slots, 4 experts: [0 2 | 1 3] runs, [0 1 | 2 3] ran before, a step routes
[5, 1, 4, 0] tokens. Running: ranks carry 9 and 1, moe_lb 9 ÷ 5 = 1.8. Earlier: 6 and 4, 1.2. Each rank would receive
one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.eplb.record import Balance, BalanceMeter, CountChunk
from deepinfer_engine.eplb.report import Economics


@dataclass(frozen=True, eq=False)
class Fallback:
    """The slots int64 [L, R, S] to restore; moe_lb of the looked-at steps as they run and with these, what that is by
    layer, and the sentence that says why."""

    slot_LRS: np.ndarray
    before: float
    after: float
    gain_L: tuple[float, ...]
    sentence: str


def fallback(
    chunks: Sequence[CountChunk], running_LRS: np.ndarray, earlier: Sequence[np.ndarray], economics: Economics
) -> Fallback | None:
    """What to restore of ``earlier`` after the steps of ``chunks``; None when nothing pays or no step had a token."""
    now = _balance(chunks, running_LRS)
    if now.moe_lb is None:
        return None
    best: tuple[float, np.ndarray, Balance] | None = None
    for slot_LRS in earlier:
        then = _balance(chunks, slot_LRS)
        if then.moe_lb is not None and (best is None or then.moe_lb < best[0]):
            best = (then.moe_lb, slot_LRS, then)
    if best is None:
        return None
    after, slot_LRS, then = best
    most = most_received(slot_LRS, running_LRS)
    saved_s, cost_s = economics.saved_s(now.moe_lb, after), economics.transfer_s(most)
    if saved_s <= cost_s:
        return None
    return Fallback(
        slot_LRS,
        now.moe_lb,
        after,
        tuple((now.moe_lb_L - then.moe_lb_L).tolist()),
        f"back to an earlier placement: moe_lb {now.moe_lb:.4f} of the newest {now.steps} steps would be {after:.4f} "
        f"with it; saves {saved_s:.2f} s in {economics.horizon_steps} steps, cost {cost_s:.2f} s",
    )


def most_received(new_LRS: np.ndarray, old_LRS: np.ndarray) -> int:
    """Experts that the busiest rank must receive, over all layers, to go from ``old`` to ``new``."""
    return max(
        sum(len(set(new) - set(old) - {-1}) for new, old in zip(new_LS, old_LS, strict=True))
        for new_LS, old_LS in zip(new_LRS.swapaxes(0, 1).tolist(), old_LRS.swapaxes(0, 1).tolist(), strict=True)
    )


def _balance(chunks: Sequence[CountChunk], slot_LRS: np.ndarray) -> Balance:
    """Balance of the steps, as if all of them had run with these slots."""
    meter = BalanceMeter(slot_LRS, chunks[0].counts_MLE.shape[2])
    for chunk in chunks:
        meter.add(CountChunk(chunk.counts_MLE, chunk.tokens_M, np.zeros_like(chunk.epoch_M)))
    return meter.balance()
