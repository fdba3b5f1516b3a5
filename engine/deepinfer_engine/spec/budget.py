"""Which drafts one step verifies. Pure, no torch: the device operation ``dspark_split`` gives the same bits.

A row offers J drafts with confidence c_k = P(draft k accepted | drafts before it accepted). Their running product is
the survival a_k, the expected number of tokens that verifying draft k adds. A step verifies a fixed number of drafts,
the budget: its size is chosen before the drafts exist, so batch shapes do not wait for them. The budget goes to the
largest survivals of all rows. Survival does not grow along a row, so the chosen drafts of a row are always its first
ones: no constraint has to say so.

Order of two drafts: survival descending, then position in the block ascending, then the order in which the rows were
admitted. Nothing here may depend on the token a draft holds: choosing by it would bias the output. c_k depends on the
tokens before k only, and position breaks ties, so a later draft of a row never displaces an earlier one.

Worked example, budget 4: confidences [[.9, .8, .5], [.95, .2, .9]] give survivals [[.9, .72, .36], [.95, .19, .171]];
the four largest are .95, .9, .72, .36, so the rows verify [3, 1] drafts.
"""

from __future__ import annotations

import numpy as np

from deepinfer_engine.errors import UsageError


def survival(confidence_BJ: np.ndarray) -> np.ndarray:
    """f32 [..., B, J] running product of confidences, the same f32 multiplications in the same order everywhere.

    Confidences are clamped to [0, 1]; one that is not a number counts as 0.
    """
    conf = np.asarray(confidence_BJ, dtype=np.float32)
    conf = np.where(np.isfinite(conf), conf, np.float32(0)).clip(0, 1)
    out = np.empty_like(conf)
    running = np.ones(conf.shape[:-1], dtype=np.float32)
    for k in range(conf.shape[-1]):
        running = running * conf[..., k]
        out[..., k] = running
    return out


def split_budget(
    confidence_BJ: np.ndarray, cap_B: np.ndarray, admission_B: np.ndarray, budget: int | np.ndarray
) -> np.ndarray:
    """int64 [..., B]: drafts that each row verifies, at most ``budget`` [...] in all and ``cap_B`` [..., B] per row.

    ``cap_B`` is what a row can use (0: none, such as a prefill row or a finished one; more than J means J).
    ``admission_B`` int64 is the admission sequence number, unique per row; the order of the rows themselves does not
    matter. A budget beyond the sum of caps admits every draft. Leading dimensions are separate splits, such as ranks.
    Raises ``UsageError`` for a negative budget.
    """
    limit = np.asarray(budget)
    if (limit < 0).any():
        raise UsageError(f"verify budget is {int(limit.min())}, expected 0 or more")
    scores = survival(confidence_BJ)
    flat = (*scores.shape[:-2], scores.shape[-2] * scores.shape[-1])
    position = np.broadcast_to(np.arange(scores.shape[-1]), scores.shape)
    admission = np.broadcast_to(np.asarray(admission_B)[..., None], scores.shape)
    barred = position >= np.asarray(cap_B)[..., None]
    # the last key is the first in rank: eligible drafts, then survival, position, admission
    keys = (admission, position, -scores, barred)
    order = np.lexsort(tuple(key.reshape(flat) for key in keys), axis=-1)
    taken = np.zeros(flat, dtype=bool)
    within = np.broadcast_to(np.arange(flat[-1]) < limit[..., None], flat)
    np.put_along_axis(taken, order, within, axis=-1)
    return (taken.reshape(scores.shape) & ~barred).sum(-1, dtype=np.int64)
