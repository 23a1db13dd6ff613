"""The slots that are lent to jobs: devices by their index, or places on the CPU."""

from __future__ import annotations

from collections.abc import Sequence


class DevicePool:
    """Lends free slots, the lowest first. A slot is never lent twice at the same time."""

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
        """Lend ``count`` slots, and return their positions. Raises ``ValueError`` if fewer are free."""
        if not 0 < count <= len(self._free):
            raise ValueError(f"{count} slots were requested, but only {len(self._free)} of {self.size} are free")
        lent, self._free = tuple(self._free[:count]), self._free[count:]
        return lent

    def give_back(self, lent: Sequence[int]) -> None:
        """Take back lent slots. Raises ``ValueError`` for a slot that is not lent."""
        if set(lent) & set(self._free) or not set(lent) <= set(range(self.size)):
            raise ValueError(f"not all of the slots {sorted(lent)} are lent")
        self._free = sorted([*self._free, *lent])
