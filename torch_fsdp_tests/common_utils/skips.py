"""Decorators that skip tests, and decorators that run a test with other settings."""

from __future__ import annotations

import contextlib
import functools
import threading
import unittest
from collections.abc import Callable, Iterator
from typing import Any

import torch

from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

from . import flags

Decorator = Callable[[Any], Any]


def lazy_skip_if(condition: Callable[[], object], reason: str) -> Decorator:
    """Skip a test if ``condition()`` is true when it runs; for a class, if it is true when the class is decorated."""

    def decorate(target: Any) -> Any:
        if isinstance(target, type):
            return unittest.skipIf(condition(), reason)(target)

        @functools.wraps(target)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            if condition():
                raise Skipped(reason)
            return target(*args, **kwargs)

        return guarded

    return decorate


def skipIfTorchDynamo(msg: str = "") -> Decorator:
    """Change nothing. Upstream can compile a whole run, and then skips such a test; this suite has no such run."""
    if not isinstance(msg, str):
        raise AssertionError("skipIfTorchDynamo needs parentheses: write @skipIfTorchDynamo()")
    return lambda target: target


def unMarkDynamoStrictTest(cls: type | None = None) -> Any:
    """Change nothing, with and without parentheses, for the same reason as :func:`skipIfTorchDynamo`."""
    return (lambda decorated: decorated) if cls is None else cls


def _platform_skip(name: str, condition: Callable[[], object], msg: str) -> Callable[..., Any]:
    """Make a decorator that works with and without parentheses, like upstream's ``skipIf<Platform>``."""

    def decorator(func: Any = None, *, msg: str = msg) -> Any:
        decorate = lazy_skip_if(condition, Reason(f"{name}: {msg}", SkipKind.DEVICE))
        return decorate if func is None else decorate(func)

    decorator.__name__ = decorator.__qualname__ = name
    return decorator


skipIfRocm = _platform_skip("skipIfRocm", lambda: flags.TEST_WITH_ROCM, "not meant to run on ROCm")
skipIfXpu = _platform_skip("skipIfXpu", lambda: flags.has_devices("xpu"), "not meant to run on XPU")
skipIfHpu = _platform_skip("skipIfHpu", lambda: flags.has_devices("hpu"), "not meant to run on HPU")


def isRocmArchAnyOf(arch: tuple[str, ...]) -> bool:
    """Whether the first device is of one of these ROCm architectures."""
    if torch.version.hip is None or not flags.has_devices("cuda"):
        return False
    return any(name in torch.cuda.get_device_properties(0).gcnArchName for name in arch)


def skipIfRocmArch(arch: tuple[str, ...]) -> Decorator:
    """Skip when ROCm tests run on one of these architectures."""
    return lazy_skip_if(lambda: flags.TEST_WITH_ROCM and isRocmArchAnyOf(arch), f"not meant to run on ROCm's {arch}")


def xfailIf(condition: object) -> Decorator:
    """``unittest.expectedFailure`` if the condition is true."""
    return unittest.expectedFailure if condition else lambda fn: fn


def slowTest(fn: Any) -> Any:
    """Skip unless ``PYTORCH_TEST_WITH_SLOW=1``."""
    reason = Reason("slow: runs with PYTORCH_TEST_WITH_SLOW=1", SkipKind.SLOW)
    slow = lazy_skip_if(lambda: not flags.TEST_WITH_SLOW, reason)(fn)
    slow.slow_test = True
    return slow


# Upstream's counts as passed in its own CI. Here a test that does not run never passes.
skip_but_pass_in_sandcastle_if = unittest.skipIf


_swapping = threading.Lock()
_swapped: list[bool] = []  # the value that each rank in a thread has found. The original is first in and last out


@contextlib.contextmanager
def wrapSwapTensorsTest(swap: bool) -> Iterator[None]:
    """Run the test with this choice whether ``nn.Module`` conversions swap parameters.

    Differs from upstream's: ranks in threads may use it together, with one value.
    """
    future = torch.__future__
    with _swapping:
        _swapped.append(future.get_swap_module_params_on_conversion())
        future.set_swap_module_params_on_conversion(swap)
    try:
        yield
    finally:
        with _swapping:
            future.set_swap_module_params_on_conversion(_swapped.pop())
