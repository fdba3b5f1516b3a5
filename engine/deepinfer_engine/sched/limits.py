"""``Limits``: capacities of a scheduler, and the refusal of what can never fit them. No torch."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer_engine.config.model import BLOCK_TOKENS
from deepinfer_engine.errors import CapacityError, UsageError


@dataclass(frozen=True)
class Limits:
    """Capacities: data-parallel ranks, and per rank the rows, blocks and prompt tokens of a step.

    ``step_budget_ms`` 0 means that prompt chunks are cut by tokens only. ``draft_tokens`` 0: no drafts are verified.
    ``context_tokens`` is the profile's longest prompt and answer, ``positions`` the model's (None: as many);
    ``profile`` is what refusals call the profile.
    """

    dp: int
    rows: int
    blocks: int
    chunk_tokens: int
    context_tokens: int
    eos_token_id: int
    step_budget_ms: float = 0.0
    draft_tokens: int = 0
    positions: int | None = None
    profile: str = "the profile"

    def check(self, name: str, prompt: int, new: int) -> None:
        """Refuse a prompt of ``prompt`` tokens and an answer of up to ``new``, with need, have and the knob.

        ``UsageError`` for more than the model has positions, which no setting changes; ``CapacityError`` for more than
        the profile has room for.
        """
        if not prompt:
            raise UsageError(f"{name} has an empty prompt")
        need = f"{name} needs {prompt} prompt + {new} new tokens"
        fits = self.context_tokens - prompt
        lower = f"at most {fits} of max_tokens fit behind this prompt" if fits > 0 else "shorten the prompt"
        if self.positions is not None and prompt + new > self.positions:
            raise UsageError(
                f"{need}, the model has {self.positions} positions (max_position_embeddings in its config.json)",
                hint=lower,
            )
        if prompt + new > self.context_tokens:
            raise CapacityError(
                f"{need}, the context holds {self.context_tokens} (sched.max_context_tokens of {self.profile})",
                hint=f"{lower}, or --set sched.max_context_tokens={prompt + new}",
            )
        blocks = -(-(prompt + new) // BLOCK_TOKENS)
        if blocks > self.blocks:
            raise CapacityError(
                f"{need}, {blocks} blocks of {BLOCK_TOKENS}, a rank has {self.blocks} "
                f"(cache.hbm_tokens_per_rank of {self.profile})",
                hint=f"lower max_tokens, or --set cache.hbm_tokens_per_rank={blocks * BLOCK_TOKENS}",
            )
