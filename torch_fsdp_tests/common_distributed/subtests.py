"""Many configurations of one test in one set of ranks."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from torch_fsdp_tests.verdict import returned


def run_subtests(
    cls_inst: Any,
    subtest_config: dict[str, Sequence[Any]],
    test_fn: Callable[..., object],
    *test_args: Any,
    **test_kwargs: Any,
) -> None:
    """Call ``test_fn`` once for every combination of the listed keyword values, each as a subtest of ``cls_inst``.

    ``subtest_config`` maps the names of keywords of ``test_fn`` to their values. ``test_args`` and ``test_kwargs`` are
    passed on. After each subtest the ranks meet in a barrier of the default group. Each subtest compiles its own code.

    Raises ``ValueError`` if there is no combination to run, because such a test would pass without testing anything. In
    a rank, it raises the first failure of a subtest, and runs no other subtest. Upstream's passes without a
    combination, needs a default group, and imports the compiler.
    """
    combinations = list(itertools.product(*subtest_config.values()))
    if not combinations:
        empty = [name for name, values in subtest_config.items() if not values]
        raise ValueError(f"no subtest to run: {', '.join(empty)} has no values")
    for values in combinations:
        chosen = dict(zip(subtest_config, values))
        with cls_inst.subTest(**chosen):
            _forget_compiled()
            returned.check_ran(test_fn(*test_args, **test_kwargs, **chosen))
            _forget_compiled()
        if dist.is_initialized():
            dist.barrier()


def _forget_compiled() -> None:
    """Discard compiled code, so that the next subtest compiles its own."""
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
