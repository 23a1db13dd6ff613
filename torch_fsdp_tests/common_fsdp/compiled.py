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
from torch_fsdp_tests.verdict import returned

from .modes import FullyShardMode
from .patches import swapped

_inductor_config = torch_names.module("torch._inductor.config")

Test = TypeVar("Test", bound=Callable[..., Any])

_PATCHED_NAME = "fully_shard"


def fully_shard_with_compiled_compute(
    module: nn.Module, *args: Any, compile_compute_on_module: type | None = None, **kwargs: Any
) -> Any:
    """Call ``fully_shard(module, ...)``, and ``module.compile()`` if the module has the given type or none is given."""
    sharded = torch.distributed.fsdp.fully_shard(module, *args, **kwargs)
    if compile_compute_on_module is None or isinstance(module, compile_compute_on_module):
        module.compile()
    return sharded


def compiled_fsdp_test(compile_compute_on_module: type | None = None) -> Callable[[Test], Test]:
    """Run an FSDP2 test in every :class:`FullyShardMode`, one after the other.

    In the compiled mode, the global name ``fully_shard`` of the test's module is replaced by
    :func:`fully_shard_with_compiled_compute`, so the test must call it by that name. If Inductor cannot compile for the
    device under test, that mode is skipped with a warning. Differs from upstream's: code is compiled for the CPU too if
    slow tests run, and patches are undone even if the test fails.
    """
    compiling = functools.partial(
        fully_shard_with_compiled_compute, compile_compute_on_module=compile_compute_on_module
    )

    def decorator(func: Test) -> Test:
        names = inspect.unwrap(func).__globals__

        def run(*args: Any, **kwargs: Any) -> None:
            returned.check_returned(func(*args, **kwargs))

        def run_compiled(*args: Any, **kwargs: Any) -> None:
            # A pool of compile processes would outlive the rank that started it.
            single = functools.partial(setattr, _inductor_config, "compile_threads")
            put = functools.partial(names.__setitem__, _PATCHED_NAME)
            with swapped(single, _inductor_config.compile_threads, 1), swapped(put, names[_PATCHED_NAME], compiling):
                run(*args, **kwargs)

        @functools.wraps(func)
        def wrapper(*args: Any, **kwargs: Any) -> None:
            for mode in FullyShardMode:
                if mode is FullyShardMode.EAGER:
                    run(*args, **kwargs)
                elif _PATCHED_NAME not in names:
                    raise AssertionError(
                        f"{func.__module__} has no global {_PATCHED_NAME!r}, so this test would run eagerly twice"
                    )
                elif (reason := why_no_inductor()) is not None:
                    warnings.warn(f"only the eager mode ran: {reason}")
                else:
                    run_compiled(*args, **kwargs)

        return wrapper  # type: ignore[return-value]

    return decorator


compiled_fsdp_test.__test__ = False  # type: ignore[attr-defined]  # its older name looks like a test to pytest
test_compiled_fsdp = compiled_fsdp_test
