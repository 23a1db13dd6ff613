"""Runs an FSDP2 test eagerly, and then again with the modules' computation compiled."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed.fsdp
from torch import nn

from torch_fsdp_tests.inductor_utils import why_no_inductor
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.verdict import events

from .patches import swapped

_inductor_config = torch_names.module("torch._inductor.config")

Test = TypeVar("Test", bound=Callable[..., Any])

_PATCHED_NAME = "fully_shard"


def compiled_fsdp_test(compile_compute_on_module: type | None = None) -> Callable[[Test], Test]:
    """Run an FSDP2 test eagerly, and then again with the computation of modules compiled: of all, or of one type.

    For the second run, the global name ``fully_shard`` of the test's module is replaced by a function that also calls
    ``module.compile()``, so the test must call it by that name. If Inductor cannot compile for the device under test,
    that run is skipped with a warning. Differs from upstream's: code is compiled for the CPU too if slow tests run, and
    patches are undone even if the test fails.
    """

    def compiling(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sharded = torch.distributed.fsdp.fully_shard(module, *args, **kwargs)
        if compile_compute_on_module is None or isinstance(module, compile_compute_on_module):
            module.compile()
        return sharded

    def decorator(func: Test) -> Test:
        names = inspect.unwrap(func).__globals__

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            events.check_returned(func(*args, **kwargs))
            if _PATCHED_NAME not in names:
                raise AssertionError(
                    f"{func.__module__} has no global {_PATCHED_NAME!r}, so this test would run eagerly twice"
                )
            if (reason := why_no_inductor()) is not None:
                warnings.warn(f"only the eager mode ran: {reason}")
                return
            # A pool of compile processes would outlive the rank that started it.
            single = functools.partial(setattr, _inductor_config, "compile_threads")
            put = functools.partial(names.__setitem__, _PATCHED_NAME)
            with swapped(single, _inductor_config.compile_threads, 1), swapped(put, names[_PATCHED_NAME], compiling):
                events.check_returned(func(*args, **kwargs))

        return wrapper  # type: ignore[return-value]

    return decorator


compiled_fsdp_test.__test__ = False  # type: ignore[attr-defined]  # its older name looks like a test to pytest
test_compiled_fsdp = compiled_fsdp_test
