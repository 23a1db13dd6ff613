"""Makes test classes for the device under test, with upstream's generated names.

Upstream asks the devices at import, and makes a class for each type that it finds. Here one class is made, for the
device that :mod:`torch_fsdp_tests.device.accelerator` names, and no device is touched.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import unittest
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch_fsdp_tests.common_utils.flags import device_type_under_test, privateuse1_name
from torch_fsdp_tests.common_utils.parametrization import (
    RECIPE,
    Test,
    add_test,
    bound_test,
    no_decorators,
)
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names

__unittest = True  # keeps the frames of this module out of the tracebacks that unittest prints

ONLY_FOR_VARIABLE = "PYTORCH_TESTING_DEVICE_ONLY_FOR"
EXCEPT_FOR_VARIABLE = "PYTORCH_TESTING_DEVICE_EXCEPT_FOR"
ALSO_FOR_VARIABLE = "PYTORCH_TESTING_DEVICE_FOR_CUSTOM"

Names = str | Iterable[str] | None


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
    with the suffixes of parameters before the device's. A test with a parameter ``device`` gets ``cpu`` or ``foo:0``.

    Differs from upstream's. One class is made and not several. In a rank ``device`` is the device of that rank;
    upstream gives the first one to all. Where ``except_for``, ``only_for`` or the environment variables
    ``PYTORCH_TESTING_DEVICE_*`` leave the device out, the tests are made and skip with that reason; upstream lets them
    vanish. ``include_lazy``, ``allow_mps`` and ``allow_xpu`` are accepted and change nothing.

    The generic class keeps its tests if a class derived from it earlier inherits them. Otherwise they are deleted, as
    upstream's are, because the class may have another name in its module, such as that of the variable of a loop.

    Raises ``AssertionError`` for a device type both in ``except_for`` and ``only_for``.
    """
    device_type = device_type_under_test()
    reason = _left_out(device_type, except_for, only_for)
    excluded = _excluded(device_type, generic_test_class.__name__)
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
    made = type(name, (generic_test_class,), namespace)
    for attribute, test in generic_tests.items():
        is_excluded = excluded == "*" or attribute in excluded
        why = f"the test configuration of {device_type} excludes it" if is_excluded else reason
        for variant_name, variant in _variants(attribute, test, generic_test_class, made):
            add_test(made, variant_name, variant if why is None else unittest.skip(why)(variant))
    if generic_test_class.__subclasses__() == [made]:
        for attribute in generic_tests:
            delattr(generic_test_class, attribute)
    scope.pop(generic_test_class.__name__, None)
    scope[name] = made


def _excluded(device_type: str, class_name: str) -> Collection[str]:
    """The tests of a class, or ``*``, that upstream's class of a device type excludes (``set_test_configs``)."""
    upstreams = sys.modules.get(f"{upstream_names.UPSTREAM}.common_device_type")
    called = {device_type, "privateuse1"} if device_type == privateuse1_name() else {device_type}
    for each in vars(upstreams).values() if upstreams is not None else ():
        if isinstance(each, type) and getattr(each, "device_type", None) in called:
            if excluded := (getattr(each, "test_exclusions", None) or {}).get(class_name):
                return excluded
    return ()


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
        return f"written for all devices except {', '.join(excepted)}, but the device under test is {device_type}"
    if only and not called & set(only):
        return f"written for {', '.join(only)} only, but the device under test is {device_type}"
    return None


def _variants(name: str, test: Test, generic: type, made: type) -> Iterator[tuple[str, Test]]:
    """The tests of one generic method, under their new names."""
    device_type = made.device_type  # type: ignore[attr-defined]
    recipe: Any = getattr(test, RECIPE, lambda test, **classes: [(test, "", {}, no_decorators)])
    for variant, suffix, given, decorators in recipe(test, generic_cls=generic, device_cls=made):
        takes_device = {"device", "devices"} & inspect.signature(variant).parameters.keys()
        with_device = _with_device(variant) if takes_device else variant
        for dtypes in [{}] if {"dtype", "dtypes"} & given.keys() else _dtypes(device_type, test):
            arguments = {**given, **dtypes}
            # Decorators may read the arguments, including the device, of which only the type is known here.
            known = {**arguments, "device": device_type} if takes_device else arguments
            made_name = "_".join(filter(None, (name, suffix, device_type, _dtype_suffix(arguments))))
            yield made_name, bound_test(with_device, arguments, decorators(known))


def deviceCountAtLeast(num_devices: int) -> Callable[[Test], Test]:
    """Skip a test of one process that takes ``devices``, unless one is enough. A process has one device here."""
    if num_devices > 1:
        return unittest.skip(f"needs {num_devices} devices in one process, which has one here")
    return lambda test: test


def _dtypes(device_type: str, test: Test) -> list[dict[str, Any]]:
    """An argument for each data type, or tuple of them, of upstream's decorators ``dtypes`` and ``dtypesIf``."""
    dtypes: Any = getattr(test, "dtypes", {})
    chosen = dtypes.get(device_type, dtypes.get("all"))
    if chosen is None:
        return [{}]
    return [{"dtypes" if isinstance(each, (list, tuple)) else "dtype": each} for each in chosen]


def _dtype_suffix(arguments: Mapping[str, Any]) -> str:
    """The end of a test's name: the data types among its arguments."""
    dtypes = arguments.get("dtypes", arguments.get("dtype"))
    dtypes = dtypes if isinstance(dtypes, (list, tuple)) else [dtypes]
    return "_".join(str(dtype).removeprefix("torch.") for dtype in dtypes if dtype is not None)


def _with_device(test: Test) -> Test:
    """Pass the device at the time of the call, when the rank is known."""

    @functools.wraps(test)
    def on_device(self: Any, *args: Any, **kwargs: Any) -> Any:
        rank = getattr(self, "rank", 0)
        # In the parent, a test case's rank is negative.
        device = str(accelerator.current().device(max(rank, 0) if isinstance(rank, int) else 0))
        given = {"devices": [device]} if "devices" in inspect.signature(test).parameters else {"device": device}
        return test(self, *args, **given, **kwargs)

    return on_device
