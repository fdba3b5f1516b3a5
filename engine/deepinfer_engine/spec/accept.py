"""Which drafts stand, and what a verify step emits. Launches device operations and waits for nothing.

One processed target distribution is used everywhere: penalties that count the drafts before a place, biases, grammar
and token masks, then temperature and filters. Two modes over the same layout:

* coupled: every verify row draws as plain sampling would at its position; drafts that equal it stand. The output is
  that of a run without speculation, bit for bit where the logits are.
* rejection: exact in distribution, and accepts more; the realised tokens depend on drafts and verify lengths.

Worked example, coupled, drafts [7, 4, 9] with length 3, drawn [7, 4, 2, 5]: tokens [7, 4, 2], num_accepted 2, the
last one in the place of the refused draft; had the third draft been 2, tokens [7, 4, 2, 5] and num_accepted 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from deepinfer_kernels.reference.sample import NON_FINITE as NON_FINITE
from deepinfer_kernels.reference.sample import NOTHING_ALLOWED as NOTHING_ALLOWED
from deepinfer_kernels.reference.speculate import NO_TOKEN as NO_TOKEN

Mode = Literal["coupled", "rejection"]

#: ``Verdict.ended``: goes on, drew a stop id, reached its length, could not be sampled
GOES_ON, STOPPED, FULL, FAILED = 0, 1, 2, 3


@dataclass(frozen=True)
class DraftBlock:
    """Drafts of B rows: ids int64 [B, J]; logprobs f32 [B, J, V] they were drawn from (rejection only)."""

    ids: Tensor
    logprobs: Tensor | None = None


@dataclass(frozen=True)
class VerifyInputs:
    """What verification needs beside logits and drafts, on the device.

    ``filters`` (temperature, top_k, top_p, min_p, seed, position; each [B]) is None when every row is greedy;
    ``position`` is the absolute index of the row's next token. ``adjust`` holds the arguments of
    ``adjust_verify_logits``, None when no row has penalties, biases or masks. ``stop`` int64 [B, S] padded with
    ``NO_TOKEN``, ``room`` int64 [B].
    """

    filters: dict[str, Tensor] | None
    adjust: dict[str, Tensor] | None
    stop: Tensor
    room: Tensor


@dataclass(frozen=True)
class Verdict:
    """Of B rows: tokens int64 [B, J+1], the first ``count`` [B] emitted; num_accepted [B] of them were drafts.

    A stop token is emitted as the last one; a failed draw is a negative last token with ``ended`` = ``FAILED``.
    ``drawn`` int64 [T] are the tokens drawn per verify row in coupled mode, for those who report them.
    """

    tokens: Tensor
    count: Tensor
    num_accepted: Tensor
    ended: Tensor
    drawn: Tensor | None = None


@torch.inference_mode()
def draft_token(
    ops: Any, logits: Tensor, filters: dict[str, Tensor] | None, *, place: int, mode: Mode
) -> tuple[Tensor, Tensor | None]:
    """(ids int64 [B], log-probabilities f32 [B, V] or None) of the draft at ``place`` 0..J−1, logits f32 [B, V].

    ``filters`` are those of ``VerifyInputs``: drafting through the target's own filters meets its draws most often.
    None: greedy, where coupled mode needs no distribution and rejection gets the point mass.
    """
    if filters is None and mode == "coupled":
        return logits.argmax(-1), None
    if filters is None:
        ids = logits.argmax(-1)
        point = torch.full_like(logits, float("-inf")).scatter_(1, ids.unsqueeze(1), 0.0)
        return ids, point
    at = {**filters, "position": filters["position"] + place}
    ids, logprobs = ops.draft_sample(logits, **at, coupled=mode == "coupled")
    return ids, None if mode == "coupled" else logprobs


@torch.inference_mode()
def verify(
    ops: Any, logits: Tensor, drafts: DraftBlock, first: Tensor, length: Tensor, inputs: VerifyInputs, *, mode: Mode
) -> Verdict:
    """Judge the drafts of B rows by raw target logits f32 [T, V], packed: a row's length + 1 side by side.

    first, length int64 [B]: a row's first logits row and how many of its drafts are under test (0: plain sampling).
    Rejection needs the drafts' ``logprobs``.
    """
    adjusted = logits
    if inputs.adjust is not None:
        adjusted = ops.adjust_verify_logits(logits, drafts=drafts.ids, first=first, length=length, **inputs.adjust)
    drawn = None
    if mode == "coupled" or inputs.filters is None:
        # greedy rejection is the same rule: p and q are points
        own = None if adjusted is logits else adjusted
        drawn = ops.next_tokens(logits, own, _of_rows(inputs.filters, first, logits.shape[0]))
        tokens, accepted = ops.accept_drawn(drawn, drafts.ids, first, length)
    else:
        assert drafts.logprobs is not None, "rejection needs the distributions the drafts were drawn from"
        failed = _failures(logits, adjusted, adjusted is not logits)
        tokens, accepted = ops.accept_rejection(
            adjusted, drafts=drafts.ids, draft_logprobs=drafts.logprobs, failed=failed, first=first, length=length,
            **inputs.filters,
        )  # fmt: skip
    count, accepted, ended = ops.truncate_emitted(tokens, accepted, stop=inputs.stop, room=inputs.room)
    return Verdict(tokens, count, accepted, ended, drawn)


def _failures(logits: Tensor, adjusted: Tensor, was_adjusted: bool) -> Tensor:
    """int64 [T]: 0, or why a row cannot be sampled; the rules of plain sampling."""
    failed = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
    if was_adjusted:
        failed = torch.where((adjusted > float("-inf")).any(-1), failed, NOTHING_ALLOWED)
    return torch.where(torch.isfinite(logits).all(-1), failed, NON_FINITE)


def _of_rows(filters: dict[str, Tensor] | None, first: Tensor, total: int) -> dict[str, Tensor] | None:
    """The filters of each of ``total`` verify rows, with its own position."""
    if filters is None:
        return None
    t = torch.arange(total, device=first.device)
    row = (torch.searchsorted(first, t, right=True) - 1).clamp(min=0)
    per_row = {name: value[row] for name, value in filters.items()}
    per_row["position"] = per_row["position"] + t - first[row]
    return per_row
