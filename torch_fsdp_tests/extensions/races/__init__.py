"""``--check-streams``: a race detector for streams, which also works on the CPU.

- ``calls``: what an operator reads and writes, and which line of FSDP called it;
- ``recording``: clocks of streams, accesses to memory, and the races among them;
- ``ordering``: the recordings of a rank, and the patches of torch that report to them;
- ``explained``: the known defects that explain races.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch_fsdp_tests.extension import AddOption, Extension, Feature

if TYPE_CHECKING:
    import unittest


class _Feature(Feature):
    in_tests = True

    def repeating(self, test: str | None) -> Sequence[str]:
        return ["--check-streams"]


class _Extension(Extension):
    def add_options(self, group: Callable[[str], AddOption]) -> None:
        words = "fail a test if streams, or the CPU, do not wait for each other where they share memory; also on the "
        group("how they run")("--check-streams", action="store_true", help=f"{words}CPU")

    def feature(self, run: Any, given: Mapping[str, Any], environment: Mapping[str, str]) -> Feature | None:
        return _Feature() if given.get("check_streams") else None

    @contextlib.contextmanager
    def around(self, test: unittest.TestCase, rank: int) -> Iterator[None]:
        from torch_fsdp_tests.common_utils import defect_blocks
        from torch_fsdp_tests.extensions.races import explained, ordering  # they import DTensor

        ordering.check_thread()
        # A defect that a block shows also explains the block's races.
        with defect_blocks.watched(ordering.mark), ordering.checked(explained.conclude):
            yield


EXTENSION = _Extension()
