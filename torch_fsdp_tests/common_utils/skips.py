"""Decorators that skip tests, and decorators that run a test with other settings."""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import unittest
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

from . import flags
from .parametrization import Test, Variant, _TestParametrizer, no_decorators

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


def skipIfTorchDynamo(msg: str = "not meant to run under dynamo") -> Decorator:
    """Skip if the whole run is compiled (``PYTORCH_TEST_WITH_DYNAMO=1``)."""
    if not isinstance(msg, str):
        raise AssertionError("skipIfTorchDynamo needs parentheses: write @skipIfTorchDynamo()")
    return lazy_skip_if(lambda: flags.TEST_WITH_TORCHDYNAMO, msg)


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


def skip_but_pass_in_sandcastle_if(condition: object, reason: str) -> Decorator:
    """:func:`skip_but_pass_in_sandcastle` if the condition is true when the test is decorated."""

    def decorate(target: Any) -> Any:
        if not condition:
            return target
        if not flags.IS_SANDCASTLE:
            return unittest.skip(reason)(target)

        @functools.wraps(target)
        def passed(*args: Any, **kwargs: Any) -> None:
            print(f"{target.__name__} is not run: {reason}", file=sys.stderr)

        return passed

    return decorate


class _Setting:
    """A setting of the whole process, which ranks in threads change together.

    The value that the latest rank set is in force. When the last rank leaves, the original value is restored.
    """

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], object]) -> None:
        self._read, self._write = read, write
        self._lock = threading.Lock()
        self._wishes: list[tuple[object, Any]] = []

    @contextlib.contextmanager
    def at(self, value: Any) -> Iterator[None]:
        """Set the value inside the context."""
        wish = (object(), value)
        with self._lock:
            if not self._wishes:
                self._before = self._read()
            self._wishes.append(wish)
            self._write(value)
        try:
            yield
        finally:
            with self._lock:
                self._wishes.remove(wish)
                self._write(self._wishes[-1][1] if self._wishes else self._before)


_swapping = _Setting(
    torch.__future__.get_swap_module_params_on_conversion, torch.__future__.set_swap_module_params_on_conversion
)
_default_dtype = _Setting(torch.get_default_dtype, torch.set_default_dtype)


def SwapTensorsGuard(use_swap_tensors: bool | None) -> AbstractContextManager[None]:
    """Set whether ``nn.Module`` conversions swap parameters (None changes nothing), and restore it afterwards.

    Differs from upstream's, like the two below: ranks in threads may use it together.
    """
    return contextlib.nullcontext() if use_swap_tensors is None else _swapping.at(use_swap_tensors)


def set_default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    """Set torch's default dtype, and restore it afterwards."""
    return _default_dtype.at(dtype)


def _run_within(guard: Callable[[], AbstractContextManager[None]]) -> Decorator:
    def decorate(fn: Test) -> Test:
        @functools.wraps(fn)
        def guarded(*args: Any, **kwargs: Any) -> Any:
            with guard():
                return fn(*args, **kwargs)

        return guarded

    return decorate


def wrapSwapTensorsTest(swap: bool | None = None) -> Decorator:
    """Run the test inside :func:`SwapTensorsGuard`."""
    return _run_within(lambda: SwapTensorsGuard(swap))


class swap(_TestParametrizer):
    """Parametrize over :func:`wrapSwapTensorsTest`: one test for each value, named ``swap_<value>``."""

    def __init__(self, swap_values: tuple[bool, ...]) -> None:
        self.swap_values = swap_values

    def _parametrize_test(self, test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        for value in self.swap_values:
            yield wrapSwapTensorsTest(value)(test), f"swap_{value}", {}, no_decorators
