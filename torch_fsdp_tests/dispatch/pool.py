"""Slots that are lent to jobs and come back: devices by their index, or places on the CPU."""

from __future__ import annotations

from collections.abc import Sequence


class DevicePool:
    """Lends what is free, the lowest first. Nothing is ever lent twice at a time."""

    def __init__(self, names: Sequence[str]) -> None:
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a pool holds one or more different slots, not {list(names)}")
        self.names = tuple(names)
        self._free = list(range(len(names)))

    @property
    def size(self) -> int:
        return len(self.names)

    @property
    def free(self) -> int:
        return len(self._free)

    def lend(self, count: int) -> tuple[int, ...]:
        """Positions of ``count`` slots, now the borrower's. Raises ``ValueError`` when fewer are free."""
        if not 0 < count <= len(self._free):
            raise ValueError(f"{count} slots were asked for and {len(self._free)} of {self.size} are free")
        lent, self._free = tuple(self._free[:count]), self._free[count:]
        return lent

    def give_back(self, lent: Sequence[int]) -> None:
        """Take back what was lent. Raises ``ValueError`` for a slot that is not out."""
        if set(lent) & set(self._free) or not set(lent) <= set(range(self.size)):
            raise ValueError(f"slots {sorted(lent)} come back and are not all out")
        self._free = sorted([*self._free, *lent])
