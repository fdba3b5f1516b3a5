"""``AnswerTrack``: what one choice has shown so far, and where its answer ends. No torch.

A choice starts inside the reasoning when the last thinking marker of its prompt is the opening one. Stop strings and
grammars apply from the closing marker on (stop strings everywhere with ``stop_scope`` all).
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np

from deepinfer_engine.sample.grammar import GrammarState
from deepinfer_engine.sample.stops import Cut, StopScanner
from deepinfer_engine.tokens import tokenizer as spelling
from deepinfer_engine.tokens.tokenizer import Tokenizer
from deepinfer_engine.types import Sequence, TokenEvent, TokenLogprob


@dataclass(frozen=True)
class ThinkMarks:
    """Ids of the thinking markers; None where the tokenizer has none (then nothing is ever reasoning)."""

    start: int | None
    end: int | None

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> ThinkMarks:
        return cls(tokenizer.added.get(spelling.THINK_START), tokenizer.added.get(spelling.THINK_END))

    def open_at_end(self, token_ids: Ids[int]) -> bool:
        """Whether these ids end inside the reasoning."""
        if self.start is None or self.end is None:
            return False
        for token in reversed(token_ids):
            if token == self.start:
                return True
            if token == self.end:
                return False
        return False


class AnswerTrack:
    """Follows one choice token by token.

    ``kept`` are the answer's tokens; ``cut`` the stop string, or ``stop_token`` the id other than EOS, that ended it.
    """

    def __init__(self, seq: Sequence, tokenizer: Tokenizer, marks: ThinkMarks):
        sampling = seq.request.sampling
        self._tokenizer = tokenizer
        self._marks = marks
        self._request_id = seq.request.id
        self._index = seq.index
        self._scanner: StopScanner[TokenEvent] | None = StopScanner(sampling.stop) if sampling.stop else None
        self._everywhere = sampling.stop_scope == "all"
        self.thinking = marks.open_at_end(seq.request.token_ids)
        self.grammar: GrammarState | None = None
        self.kept: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.cut: Cut | None = None
        self.stop_token: int | None = None

    def push(self, token: int, logprob: TokenLogprob | None) -> list[TokenEvent]:
        """Add a token of the answer; events that may be shown now. ``cut`` is set when a stop string was met."""
        assert self.cut is None
        event = TokenEvent(self._request_id, token, self._index, logprob)
        if self.grammar is not None and not self.thinking:
            allowed = self.grammar.accept(token)
            assert allowed, f"token {token} was drawn outside the grammar"
        if token == self._marks.end:
            was, self.thinking = self.thinking, False
        elif token == self._marks.start:
            was, self.thinking = self.thinking, True
        else:
            was = self.thinking
        if self._scanner is None:
            return self._show([event])
        if not self._everywhere and (was or self.thinking):
            return self._show([*self._scanner.flush(), event])
        events, self.cut = self._scanner.push(event, self._tokenizer.token_bytes(token))
        return self._show(events)

    def masks(self, thoughts: np.ndarray, drafts: Ids[int] = ()) -> list[np.ndarray | None]:
        """int32 words of the tokens the grammar allows now and after each of ``drafts`` (``thoughts`` inside the
        reasoning); None: all. Behind a draft it does not allow nothing will be used, and nothing is masked."""
        if self.grammar is None:
            return [None] * (1 + len(drafts))
        thinking, taken, out = self.thinking, 0, [thoughts if self.thinking else self.grammar.mask()]
        for token in drafts:
            if not thinking:
                if self.grammar.ended or not self.grammar.accept(token):
                    break
                taken += 1
            thinking = token == self._marks.start or (thinking and token != self._marks.end)
            out.append(thoughts if thinking else None if self.grammar.ended else self.grammar.mask())
        self.grammar.rollback(taken)
        return out + [None] * (1 + len(drafts) - len(out))

    def finish(self) -> list[TokenEvent]:
        """Events still held back when the answer ended for another reason than a stop string."""
        if self._scanner is None or self.cut is not None:
            return []
        return self._show(self._scanner.flush())

    def _show(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            self.kept.append(event.token_id)
            if event.logprob is not None:
                self.logprobs.append(event.logprob)
        return events

    @property
    def tail(self) -> str:
        """Text of the token in which the stop string began, up to it."""
        return self.cut.tail.decode("utf-8", errors="replace") if self.cut is not None else ""
