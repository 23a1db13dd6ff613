"""Fewer parameter sets than all, in which every pair of values still occurs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch_fsdp_tests.common_utils import TEST_WITH_SLOW


def pairwise(
    config: Mapping[str, Sequence[Any]], valid: Callable[..., bool] = lambda **case: True
) -> list[dict[str, Any]]:
    """So many of the valid combinations that each pair of values occurs; all of them where slow tests are asked for.

    ``config`` has the values of each parameter, as for ``run_subtests``; ``valid`` takes a combination by keyword. The
    defects of this code have depended on two values at once, and all combinations take minutes. The choice is greedy
    and the same on all ranks.
    """

    def case_of(indices: tuple[int, ...]) -> dict[str, Any]:
        return {name: values[index] for (name, values), index in zip(config.items(), indices)}

    def pairs(indices: tuple[int, ...]) -> set[Any]:
        return set(itertools.combinations(enumerate(indices), 2))

    every = [
        indices for indices in itertools.product(*map(range, map(len, config.values()))) if valid(**case_of(indices))
    ]
    if TEST_WITH_SLOW or len(config) < 2:
        return [case_of(indices) for indices in every]
    chosen: list[tuple[int, ...]] = []
    missing: set[Any] = set().union(*map(pairs, every))
    while missing:
        chosen.append(max(every, key=lambda indices: len(pairs(indices) & missing)))
        missing -= pairs(chosen[-1])
    return [case_of(indices) for indices in chosen]


def one_by_one(cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, list[Any]]]:
    """Each case as a configuration of its own for ``run_subtests``."""
    for case in cases:
        yield {name: [value] for name, value in case.items()}
