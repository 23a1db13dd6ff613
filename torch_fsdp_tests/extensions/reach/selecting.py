"""Selects the tests for a change, and finds what no test would detect."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Iterable, Sequence

from torch_fsdp_tests.extensions.reach.reach_map import Reached, ReachMap
from torch_fsdp_tests.verdict import first_few


@dataclasses.dataclass(frozen=True)
class Selected:
    """Tests in the order in which they should run, and remarks on them."""

    tests: tuple[Reached, ...]
    functions: int  # that change
    unreached: tuple[str, ...]  # of these, the ones that no test enters
    remarks: tuple[str, ...]


def select(
    names: Iterable[str],
    known: ReachMap,
    sort: Callable[[Sequence[Reached]], Iterable[Reached]] = iter,
    also: Collection[str] = (),
) -> Selected:
    """The tests that reach any of these functions, classes and modules.

    First come the tests that enter a named function. Then come those that only enter some function of a named class or
    module, or of the scope around a name that the map does not know. ``sort`` gives the order in both groups; without
    it the most specific tests come first. The tests of the files ``also`` belong to the first group.
    """
    entering = sum(1 << number for number, test in enumerate(known.tests) if test.file in also)
    around = 0
    unreached, instead = list[str](), dict[str, list[str]]()
    requested = list(dict.fromkeys(names))
    for name in requested:
        if known.is_function(name):
            here = known.bits_of(name)
            entering |= here
            if not here:
                unreached.append(name)
            continue
        enclosing = known.enclosing(name)
        if enclosing is None:
            unreached.append(name)
            continue
        around |= known.bits_of(enclosing)
        if not known.knows(name):
            instead.setdefault(enclosing, []).append(name)
    tests = (*sort(known.in_order(entering)), *sort(known.in_order(around & ~entering)))
    remarks: tuple[str, ...] = ()
    if instead:
        new = first_few(name for names in instead.values() for name in names)
        remarks = (f"not in the map: {new}; the tests of {first_few(instead)} run instead",)
    return Selected(tests, len(requested), tuple(unreached), remarks)
