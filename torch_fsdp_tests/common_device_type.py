"""Makes test classes for the device under test, with upstream's generated names.

Upstream asks the devices at import, and makes a class for each type that it finds. Here one class is made, for the
device that :mod:`torch_fsdp_tests.accelerator` names, and no device is touched.
"""

from __future__ import annotations

import functools
import inspect
import os
import unittest
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_utils import dtype_name
from torch_fsdp_tests.common_utils.flags import device_type_under_test, privateuse1_name
from torch_fsdp_tests.common_utils.parametrization import (
    RECIPE,
    Parameters,
    Test,
    Variant,
    add_test,
    bound_test,
    compose_parametrize_fns,
    no_decorators,
)

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

ONLY_FOR_VARIABLE = "PYTORCH_TESTING_DEVICE_ONLY_FOR"
EXCEPT_FOR_VARIABLE = "PYTORCH_TESTING_DEVICE_EXCEPT_FOR"
ALSO_FOR_VARIABLE = "PYTORCH_TESTING_DEVICE_FOR_CUSTOM"

Names = str | Iterable[str] | None


class DeviceTypeTestBase:
    """What an instantiated class knows about its device, in addition to its generic class."""

    device_type: str = ""

    @classmethod
    def get_primary_device(cls) -> str:
        """The device of rank 0 as text. It has index 0, or no index if devices have none (``cpu``)."""
        return str(accelerator.current().device(0))

    @classmethod
    def get_all_devices(cls) -> list[str]:
        """All visible devices of the type under test, the primary one first."""
        under_test = accelerator.current()
        return [str(under_test.device(index)) for index in range(max(under_test.count, 1))]

    @classmethod
    def distributed_backend(cls) -> str:
        return accelerator.current().backend


def instantiate_device_type_tests(
    generic_test_class: type,
    scope: MutableMapping[str, Any],
    except_for: Names = None,
    only_for: Names = None,
    include_lazy: bool = False,
    allow_mps: bool = False,
    allow_xpu: bool = False,
) -> None:
    """Replace a generic test class in ``scope`` by one for the device under test.

    ``TestX.test_y`` becomes ``TestXCPU.test_y_cpu`` on the CPU and ``TestXFOO.test_y_foo`` on a device type ``foo``,
    with the suffixes of parameters before the device's and those of dtypes after it. A test with a parameter ``device``
    gets the device as text (``cpu``, ``foo:0``).

    Differs from upstream's. One class is made and not several. In a rank ``device`` is the device of that rank;
    upstream gives the first one to all. Where ``except_for``, ``only_for`` or the environment variables
    ``PYTORCH_TESTING_DEVICE_*`` leave the device out, the tests are made and skip with that reason; upstream lets them
    vanish. ``include_lazy``, ``allow_mps`` and ``allow_xpu`` are accepted and change nothing: one asks for a device by
    name.

    The generic class stays as it is, so that a class derived from it earlier keeps what it inherits; upstream deletes
    the tests from it.

    Raises ``AssertionError`` for a device type both in ``except_for`` and ``only_for``.
    """
    device_type = device_type_under_test()
    reason = _left_out(device_type, except_for, only_for)
    name = generic_test_class.__name__ + device_type.upper()
    namespace = {
        # Set these before the class is made, because a base class may read them at once.
        "__module__": generic_test_class.__module__,
        "__qualname__": name,
        "__doc__": generic_test_class.__doc__,
        "device_type": device_type,
    }
    generic_tests = {
        attribute: test
        for attribute, test in vars(generic_test_class).items()
        if attribute.startswith("test") and callable(test)
    }
    # Loaders ignore None. The inherited tests would lack their arguments, and they cannot be deleted from the generic
    # class, because other classes may have been made from it.
    namespace |= dict.fromkeys(generic_tests)
    made = type(name, (DeviceTypeTestBase, generic_test_class), namespace)
    for attribute, test in generic_tests.items():
        for variant_name, variant in _variants(attribute, test, generic_test_class, made):
            add_test(made, variant_name, variant if reason is None else unittest.skip(reason)(variant))
    scope.pop(generic_test_class.__name__, None)
    scope[name] = made


def _names(value: Names) -> list[str]:
    if isinstance(value, str):
        return [name.strip() for name in value.split(",") if name.strip()]
    return list(value or ())


def _left_out(device_type: str, except_for: Names, only_for: Names) -> str | None:
    """The reason why the tests of a class are not for this device, or None."""
    excepted, only = _names(except_for), _names(only_for)
    both = set(excepted) & set(only)
    if both:
        raise AssertionError(f"the device types {', '.join(sorted(both))} are both in except_for and in only_for")
    # Test files use the name of torch's spare slot for a vendor's device.
    called = {device_type, "privateuse1"} if device_type == privateuse1_name() else {device_type}
    environment_only = _names(os.environ.get(ONLY_FOR_VARIABLE))
    if called & set(_names(os.environ.get(EXCEPT_FOR_VARIABLE))):
        return f"{EXCEPT_FOR_VARIABLE} excludes {device_type}"
    if environment_only and not called & set(environment_only):
        return f"{ONLY_FOR_VARIABLE} allows only {', '.join(environment_only)}, not {device_type}"
    if called & set(_names(os.environ.get(ALSO_FOR_VARIABLE))):
        return None
    if called & set(excepted):
        return f"written for all devices except {', '.join(excepted)}, and the device under test is {device_type}"
    if only and not called & set(only):
        return f"written for {', '.join(only)} only, and the device under test is {device_type}"
    return None


def _variants(name: str, test: Test, generic: type, made: type) -> Iterator[tuple[str, Test]]:
    """The tests of one generic method, under their new names."""
    recipe = getattr(test, RECIPE, _unchanged)
    by_device = getattr(test, "dtypes", None)
    device_type = made.device_type  # type: ignore[attr-defined]
    if by_device is not None:
        recipe = compose_parametrize_fns(_over_dtypes(by_device.get(device_type, by_device["all"])), recipe)
    for variant, suffix, arguments, decorators in recipe(test, generic_cls=generic, device_cls=made):
        dtypes = arguments.get("dtypes", arguments.get("dtype"))
        dtype_names = [dtype_name(each) for each in (dtypes if isinstance(dtypes, tuple | list) else [dtypes]) if each]
        full_name = "_".join(filter(None, (name, suffix, device_type, *dtype_names)))
        takes = inspect.signature(variant).parameters
        argument = next((each for each in ("device", "devices") if each in takes), None)
        # Decorators may read the arguments, including the device, of which only the type is known here.
        known = arguments if argument is None else {**arguments, argument: device_type}
        yield full_name, bound_test(_with_device(variant, argument), arguments, decorators(known))


def _unchanged(test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
    yield test, "", {}, no_decorators


def _with_device(test: Test, argument: str | None) -> Test:
    """Pass the device at the time of the call, when the rank is known."""
    if argument is None:
        return test

    @functools.wraps(test)
    def on_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        if argument == "devices" or hasattr(test, "num_required_devices"):
            given: str | list[str] = self.get_all_devices()
        else:
            rank = getattr(self, "rank", 0)
            # In the parent, a test case's rank is negative.
            given = str(accelerator.current().device(max(rank, 0) if isinstance(rank, int) else 0))
        return test(self, *args, **{argument: given}, **kwargs)

    return on_device


def _over_dtypes(entries: Sequence[Any]) -> Callable[..., Iterator[Variant]]:
    def recipe(test: Test, generic_cls: type, device_cls: type | None) -> Iterator[Variant]:
        for entry in entries:
            arguments: Parameters = {"dtypes" if isinstance(entry, tuple | list) else "dtype": entry}
            yield test, "", arguments, no_decorators

    return recipe


class dtypes:
    """Make a test for each dtype, given as ``dtype``, or for each tuple of dtypes, given as ``dtypes``.

    With ``device_type`` the list replaces the general one on that device. For classes that
    :func:`instantiate_device_type_tests` instantiates.
    """

    def __init__(self, *args: torch.dtype | Sequence[torch.dtype], device_type: str = "all") -> None:
        kinds = {isinstance(arg, tuple | list) for arg in args}
        flat = [each for arg in args for each in (arg if isinstance(arg, tuple | list) else (arg,))]
        if len(kinds) > 1 or not all(isinstance(each, torch.dtype) for each in flat):
            raise AssertionError(f"dtypes takes dtypes or tuples of dtypes, not {args}")
        self.args = args
        self.device_type = device_type

    def __call__(self, fn: Any) -> Any:
        known = vars(fn).setdefault("dtypes", {})
        if self.device_type in known:
            raise AssertionError(f"{fn.__qualname__} has two lists of dtypes for {self.device_type}")
        known[self.device_type] = self.args
        return fn


dtypesIfCPU = functools.partial(dtypes, device_type="cpu")  # the CPU is the subject
dtypesIfCUDA = functools.partial(dtypes, device_type="cuda")
dtypesIfXPU = functools.partial(dtypes, device_type="xpu")
dtypesIfHPU = functools.partial(dtypes, device_type="hpu")


def _skip_when(refuses: Callable[[Any], str | None]) -> Callable[[Any], Any]:
    """A decorator that gets the reason to skip from the test case when the test runs."""

    def decorate(fn: Any) -> Any:
        @functools.wraps(fn)
        def guarded(self: Any, *args: Any, **kwargs: Any) -> Any:
            reason = refuses(self)
            if reason is not None:
                raise unittest.SkipTest(reason)
            return fn(self, *args, **kwargs)

        return guarded

    return decorate


class skipIf:
    """Skip on some device types (default: all) if ``dep`` is true, or if it names an attribute that is true."""

    def __init__(self, dep: bool | str, reason: str, device_type: Names = None) -> None:
        self.dep = dep
        self.reason = reason
        self.device_types = _names(device_type)

    def __call__(self, fn: Any) -> Any:
        def refuses(case: Any) -> str | None:
            if self.device_types and case.device_type not in self.device_types:
                return None
            dependency = getattr(case, self.dep, True) if isinstance(self.dep, str) else self.dep
            return self.reason if dependency else None

        return _skip_when(refuses)(fn)


skipCPUIf = functools.partial(skipIf, device_type="cpu")  # the CPU is the subject
skipCUDAIf = functools.partial(skipIf, device_type="cuda")
skipXPUIf = functools.partial(skipIf, device_type="xpu")
skipHPUIf = functools.partial(skipIf, device_type="hpu")


class onlyOn:
    """Skip except on these device types."""

    def __init__(self, device_type: str | Iterable[str]) -> None:
        self.device_types = _names(device_type)

    def __call__(self, fn: Any) -> Any:
        allowed = ", ".join(self.device_types)
        return _skip_when(lambda case: None if case.device_type in self.device_types else f"only for {allowed}")(fn)


onlyCPU = onlyOn("cpu")  # the CPU is the subject
onlyCUDA = onlyOn("cuda")
onlyXPU = onlyOn("xpu")
onlyHPU = onlyOn("hpu")
onlyMPS = onlyOn("mps")


def onlyPRIVATEUSE1(fn: Any) -> Any:
    """Skip unless the device is one that an extension has put into torch's spare slot."""
    return onlyOn(privateuse1_name())(fn)


def onlyAccelerator(fn: Any) -> Any:
    """Skip if the device under test is the CPU."""
    return _skip_when(lambda _: "only for accelerators" if accelerator.current().is_host else None)(fn)


def onlyNativeDeviceTypes(fn: Any) -> Any:
    """Does nothing, and exists for compatibility. Upstream's skips on devices that are not torch's own."""
    return fn


class deviceCountAtLeast:
    """Pass the list ``devices`` of all visible devices to a test, and skip if there are fewer than this number."""

    def __init__(self, num_required_devices: int) -> None:
        self.num_required_devices = num_required_devices

    def __call__(self, fn: Any) -> Any:
        def refuses(case: Any) -> str | None:
            visible = len(case.get_all_devices())
            needed = self.num_required_devices
            return f"needs {needed} {case.device_type} devices, but sees only {visible}" if visible < needed else None

        guarded = _skip_when(refuses)(fn)
        guarded.num_required_devices = self.num_required_devices
        return guarded
