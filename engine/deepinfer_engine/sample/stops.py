"""Stop strings over a stream of tokens: where the answer ends, and which tokens may be shown already. No torch.

Works on bytes, so a stop string may begin and end anywhere, inside tokens and inside characters' encodings; UTF-8 has
no false matches. What has been seen is held back only as far as it could still become a stop string.

Worked example, stop "END", tokens "a", "E", "x", "EN", "Dz": "a" is shown at once, "E" waits, "x" releases "E" and
itself, "EN" waits, "Dz" completes the stop: the answer is "aEx".
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Cut(NamedTuple):
    """A stop string was met: its text, and the bytes of the token in which it began that precede it."""

    stop: str
    tail: bytes


class StopScanner(Generic[T]):
    """Scans the tokens of one answer. ``released`` items come out in order, each at most once."""

    def __init__(self, stops: Iterable[str]):
        self._stops = [(s.encode(), s) for s in stops]
        self._longest = max((len(b) for b, _ in self._stops), default=0)
        self._held: list[tuple[T, bytes]] = []
        self._bytes = b""  # the bytes of held tokens

    def push(self, item: T, data: bytes) -> tuple[list[T], Cut | None]:
        """Add one token (``data``: its bytes). Items that are surely part of the answer, and the cut if it ends here.

        The earliest match wins; of two that begin together, the longer one.
        """
        self._held.append((item, data))
        self._bytes += data
        found = min(
            ((at, -len(b), s) for b, s in self._stops if (at := self._bytes.find(b)) >= 0),
            default=None,
        )
        if found is not None:
            released, tail = self._split(found[0])
            self._held, self._bytes = [], b""
            return released, Cut(found[2], tail)
        released, _ = self._split(len(self._bytes) - self._undecided())
        self._held = self._held[len(released) :]
        self._bytes = b"".join(d for _, d in self._held)
        return released, None

    def flush(self) -> list[T]:
        """Everything still held: the answer ended without a stop string, or reasoning went on."""
        released = [item for item, _ in self._held]
        self._held, self._bytes = [], b""
        return released

    def _undecided(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        for size in range(min(self._longest - 1, len(self._bytes)), 0, -1):
            end = self._bytes[-size:]
            if any(b.startswith(end) for b, _ in self._stops if len(b) > size):
                return size
        return 0

    def _split(self, end: int) -> tuple[list[T], bytes]:
        """Items that lie wholly before byte ``end``, and the bytes before it of the one that crosses it."""
        released = []
        at = 0
        for item, data in self._held:
            if at + len(data) > end:
                return released, data[: max(0, end - at)]
            released.append(item)
            at += len(data)
        return released, b""
