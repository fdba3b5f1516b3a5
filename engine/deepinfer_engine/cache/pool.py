"""``IdPool``: a free list of blocks or slots with its invariant used + free = total. No torch."""

from __future__ import annotations

from deepinfer_engine.errors import CapacityError


class IdPool:
    """Ids 1..total (0 is the PAD target and never handed out). Lowest free id first, so runs repeat."""

    def __init__(self, total: int, what: str):
        self.total = total
        self.what = what
        self._free = list(range(total, 0, -1))
        self._used: set[int] = set()

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def used(self) -> int:
        return len(self._used)

    def take(self, count: int) -> list[int]:
        """Remove ``count`` ids from the pool; ``CapacityError`` when fewer are free (nothing is taken then)."""
        if count > len(self._free):
            raise CapacityError(f"{count} {self.what} needed, {len(self._free)} of {self.total} free")
        ids = [self._free.pop() for _ in range(count)]
        self._used.update(ids)
        return ids

    def give(self, ids: list[int]) -> None:
        """Return ids; giving back an id that is not in use is a bug."""
        for i in ids:
            self._used.remove(i)
            self._free.append(i)
        self._free.sort(reverse=True)

    def check(self) -> None:
        """Assert the invariant (call when idle)."""
        assert self.used + self.free == self.total > 0, (self.what, self.used, self.free, self.total)
