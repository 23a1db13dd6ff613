"""Many configurations of one test in one set of ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist


def run_subtests(
    cls_inst: Any,
    subtest_config: dict[str, Sequence[Any]],
    test_fn: Callable[..., object],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Call ``test_fn`` once for every combination of the listed keyword values, each as a subtest of ``cls_inst``.

    ``subtest_config`` maps the name of a keyword of ``test_fn`` to the values it is to take; ``test_args`` and
    ``test_kwargs`` are passed on as they are. A barrier of the default group follows each subtest, and what torch
    compiled is forgotten before and after it.

    Raises ``ValueError`` when there is no combination to run, which would pass without testing anything; in a rank the
    first failure of a subtest, after which no other is run. Differs from upstream's in both, in needing no default
    group, and in not importing the compiler.
    """
    combinations = list(itertools.product(*subtest_config.values()))
    if not combinations:
        empty = [name for name, values in subtest_config.items() if not values]
        raise ValueError(f"no subtest to run: {', '.join(empty)} has no values")
    for values in combinations:
        chosen = dict(zip(subtest_config, values))
        with cls_inst.subTest(**chosen):
            _forget_compiled()
            test_fn(*test_args, **test_kwargs, **chosen)
            _forget_compiled()
        if dist.is_initialized():
            dist.barrier()


def _forget_compiled() -> None:
    """What one subtest compiled is not to serve the next."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
