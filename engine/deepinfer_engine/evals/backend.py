"""Who answers: the contract that our engine and an HTTP endpoint both fulfil."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, Protocol

from deepinfer_engine.evals.prompt import Prompt


@dataclass(frozen=True)
class Reply:
    """One answer, or the reason there is none. Reasoning is kept apart from content and never graded.

    ``finish`` is ``length`` when the answer was cut at max_tokens, ``error`` with a sentence in ``error``.
    ``reproducible`` and ``rendered_sha256`` (of the prompt with its chat frame) are None where we cannot know them.
    """

    key: str
    content: str
    reasoning: str
    finish: Literal["stop", "length", "error"]
    error: str | None = None
    prompt_tokens: int | None = None
    generated_tokens: int | None = None
    seconds: float = 0.0
    attempts: int = 1
    reproducible: bool | None = None
    rendered_sha256: str | None = None


class Backend(Protocol):
    """Answers prompts in any order; a failing prompt yields an ``error`` reply and the others go on."""

    def answers(self, prompts: Iterable[Prompt]) -> Iterator[Reply]:
        """One reply for each prompt."""
        ...

    def close(self) -> None:
        """Drop what is in flight."""
        ...
