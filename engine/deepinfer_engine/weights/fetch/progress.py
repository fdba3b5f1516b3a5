"""What a fetch tells whoever watches it. Methods are called from several threads."""

from __future__ import annotations

from typing import Literal, Protocol

Activity = Literal["fetch", "check"]


class Progress(Protocol):
    """Receives bytes as they come; ``activity`` is fetching from the network or checking what is on disk."""

    def expect(self, activity: Activity, nbytes: int) -> None:
        """``nbytes`` more are to be fetched or checked in all."""
        ...

    def begin(self, activity: Activity, path: str, size: int, done: int) -> None:
        """A file of ``size`` bytes begins, ``done`` of them are there already."""
        ...

    def advance(self, activity: Activity, path: str, nbytes: int) -> None:
        """``nbytes`` more of the file."""
        ...

    def end(self, activity: Activity, path: str) -> None:
        """Nothing more comes for the file."""
        ...

    def note(self, text: str) -> None:
        """Something worth a line: a retry, a wait, a decision."""
        ...
