"""A process group that does not communicate."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch


class DummyProcessGroup:
    """Has the rank and size that it was made with, and does not communicate."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """The rank that it was made with."""
        return self._rank

    def size(self) -> int:
        """The size that it was made with."""
        return self._size

    def allreduce(self, *args: Any, **kwargs: Any) -> mock.Mock:
        """Return a work object whose future has the result 1 already. The tensors do not change."""

        def get_future() -> torch.futures.Future:
            future: torch.futures.Future = torch.futures.Future()
            future.set_result(1)
            return future

        return mock.Mock(get_future=get_future)
