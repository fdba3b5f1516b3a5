"""``IncrementalDetokenizer``: token ids to text as they come, for output that is shown raw."""

from __future__ import annotations

import codecs

from deepinfer_engine.tokens.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Turns one id at a time into text; all returned text plus ``finish()`` equals ``Tokenizer.decode`` of all ids.

    Only the bytes of an incomplete UTF-8 character (at most three) are held back, so time is linear in the output.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        """Text that this id completes, possibly empty; ``UsageError`` for an id outside the vocabulary."""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def finish(self) -> str:
        """U+FFFD for a character that never became complete, else nothing; the object starts afresh afterwards."""
        return self._decoder.decode(b"", final=True)

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._decoder.getstate()[0])
