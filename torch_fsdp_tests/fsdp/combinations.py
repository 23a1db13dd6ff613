"""Selects parameter sets so that every pair of values occurs."""

from __future__ import annotations

import functools
import itertools
import operator
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from torch_fsdp_tests.common_distributed import run_subtests
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW

Test = TypeVar("Test", bound=Callable[..., None])
Values = Sequence[Any] | Callable[[], Sequence[Any]]


def pairwise_cases(
    config: Mapping[str, Sequence[Any]],
    valid: Callable[..., bool] = lambda **case: True,
    among: int | None = None,
) -> list[dict[str, Any]]:
    """Select valid combinations so that each pair of values occurs. If slow tests run, return all of them.

    ``config`` has the values of each parameter, as for ``run_subtests``; ``valid`` takes a combination by keyword.
    Defects of this code have depended on two values at once, and all combinations would take minutes. The selection is
    greedy, and the same on all ranks. With ``among``, only so many valid combinations are considered, which a fixed
    seed chooses: many parameters have too many combinations to compare.
    """

    def case_of(indices: tuple[int, ...]) -> dict[str, Any]:
        return {name: values[index] for (name, values), index in zip(config.items(), indices)}

    bits: dict[Any, int] = {}

    def pairs(indices: tuple[int, ...]) -> int:
        """The pairs of values in a combination, as a bit set: thousands of combinations are compared many times."""
        pairs_of_values = itertools.combinations(enumerate(indices), 2)
        return sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs_of_values)

    sizes = [len(values) for values in config.values()]
    if among is None:
        every = [indices for indices in itertools.product(*map(range, sizes)) if valid(**case_of(indices))]
    else:
        generator = random.Random(among)
        drawn = (tuple(map(generator.randrange, sizes)) for _ in itertools.count())
        every = list(itertools.islice((indices for indices in drawn if valid(**case_of(indices))), among))
    if TEST_WITH_SLOW or len(config) < 2:
        return [case_of(indices) for indices in every]
    pairs_of = {indices: pairs(indices) for indices in every}
    chosen: list[tuple[int, ...]] = []
    missing = functools.reduce(operator.or_, pairs_of.values(), 0)
    while missing:
        chosen.append(max(every, key=lambda indices: (pairs_of[indices] & missing).bit_count()))
        missing &= ~pairs_of[chosen[-1]]
        every = [indices for indices in every if pairs_of[indices] & missing]
    return [case_of(indices) for indices in chosen]


def one_by_one(cases: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Sequence[Any]]]:
    """Make a separate configuration for ``run_subtests`` from each case."""
    for case in cases:
        yield {name: [value] for name, value in case.items()}


def subtests(
    *,
    pairwise: bool = False,
    among: int | None = None,
    valid: Callable[..., bool] = lambda **case: True,
    **config: Values,
) -> Callable[[Test], Test]:
    """Run a test method for every combination of its parameters' values that is ``valid``, each as a subtest.

    If ``pairwise``, it is run only for the combinations that :func:`pairwise_cases` selects ``among`` some or all.
    Subtests share their ranks, as with ``run_subtests``. If values are known only inside a rank, pass a function
    without arguments that returns them. Use it as the innermost decorator. Other parameters of the method, such as
    ``device``, are passed on.
    """

    def cases() -> list[dict[str, Any]]:
        known = {name: values() if callable(values) else values for name, values in config.items()}
        if pairwise:
            return pairwise_cases(known, valid, among)
        combinations = (dict(zip(known, values)) for values in itertools.product(*known.values()))
        return [case for case in combinations if valid(**case)]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def run(self: Any, *args: Any, **kwargs: Any) -> None:
            chosen = cases()
            if not chosen:
                raise ValueError(f"no subtest to run: no combination of {', '.join(config)} is left")
            for case in one_by_one(chosen):
                run_subtests(self, case, test, self, *args, **kwargs)

        return run  # type: ignore[return-value]

    return decorate
