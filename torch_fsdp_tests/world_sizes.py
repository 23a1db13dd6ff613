"""How many ranks a test has. Whoever needs the number, or a part of it, asks here.

What the class of the test sets as its ``world_size`` counts: a number, or a property that calls :func:`of_test` with
the number that :func:`requested` found, a number of its own, or none. A number that a class or a decorator asks for is
an upper limit where there are fewer devices. Without any, these follow, and the first of them counts:

1. ``--ranks`` or its variable, then the place of the ranks, if so many are there (:func:`asked`);
2. the device under test: a rank for each, but at least two; on the CPU :data:`USUAL` ranks (:func:`by_default`).

The functions that depend on the device take it as an argument, because this module is below it, and needs no torch.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from torch_fsdp_tests import extension, settings

if TYPE_CHECKING:
    import unittest

# Of a test that does not set its own number, on the CPU. The dispatcher assigns a file at most as many devices.
USUAL = 4
FEW = 2  # on the CPU, of a test for which a few ranks are enough

_LEAST = "__least_ranks__"  # the attribute with the number of ranks that a test, or all of a class, declares
_REQUESTED = "_required_world_size"  # upstream's name


class Device(Protocol):
    """What the number of ranks depends on. ``ranks`` is that of a test which does not set its own."""

    @property
    def is_cpu(self) -> bool: ...

    @property
    def count(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def lacks_room_for(self, world_size: int) -> str | None: ...


# --- from options and devices -----------------------------------------------------------------------------------------


def asked() -> int | None:
    """The number that the user asks for, or else that of the ranks that there are; None without either."""
    requested = settings.ranks(os.environ)
    return extension.place().world_size if requested is None else requested


def by_default(devices: int) -> int:
    """The number for a process that sees this many devices (0: the CPU), if nobody asks for another one."""
    return max(devices, 2) if devices else USUAL


def planned(option: int | None, made: int | None) -> int:
    """The number with which the dispatcher plans. It has not asked for the devices, which only torch knows."""
    return option or made or USUAL


def few(device: Device) -> int:
    """The number for a test for which a few ranks are enough: fewer only on the CPU, where every rank costs time."""
    return FEW if device.is_cpu else device.ranks


def up_to(most: int, device: Device, least: int = 2) -> int:
    """The number for a test that takes from ``least`` to ``most`` ranks: one rank for each device.

    On the CPU that is ``most``, or fewer if fewer are asked for. Ranks share devices only if there
    are fewer devices than ``least`` or than the requested ranks.
    """
    limit = asked() if device.is_cpu else max(device.count, device.ranks)
    largest = most if limit is None else min(most, limit)
    return next((size for size in range(largest, least, -1) if device.lacks_room_for(size) is None), least)


# --- from decorators --------------------------------------------------------------------------------------------------


def declare(function: Callable, least: int) -> None:
    """Note on a test method or class that it needs at least so many ranks."""
    setattr(function, _LEAST, least)


def declared_by(function: object, default: int = 0) -> int:
    """The least number of ranks that decorators have declared on a test method or class."""
    return int(getattr(function, _LEAST, default))


def declared(test: unittest.TestCase) -> int:
    """The least number of ranks that decorators of a test or of its class declare; 0 if they declare none."""
    return max(map(declared_by, (type(test), _method(test))))


def request(function: Any, number: int) -> None:
    """Note on a test method that it asks for so many ranks."""
    setattr(function, _REQUESTED, number)


def requested(test: Any) -> int | None:
    """The number of ranks for which a decorator of a test asks, or None."""
    number: int | None = getattr(_method(test), _REQUESTED, None)
    return number


def _method(test: Any) -> Any:
    return getattr(type(test), getattr(test, "_testMethodName", ""), None)


# --- of a test --------------------------------------------------------------------------------------------------------


def of_test(test: Any, device: Device, most: int | None = None) -> int:
    """The number for a test whose class sets none. ``most`` is what its class or decorator asks for.

    It is never less than what the method declares. With ``power_of_two_ranks = True`` in the class, it is rounded down.
    """
    least = declared_by(_method(test), 1)
    ranks = max(device.ranks, least) if most is None else up_to(most, device, max(least, 2))
    return 1 << (ranks.bit_length() - 1) if getattr(test, "power_of_two_ranks", False) else ranks


def too_few(test: unittest.TestCase, world_size: int, device: Device) -> str | None:
    """Why so many ranks are too few, or None: the class has one for each device, and the test needs more devices.

    Only a world size that is computed can count devices. One below zero is no number of ranks, so it is a mistake.
    """
    if world_size < 0:
        return None
    is_counted = not isinstance(inspect.getattr_static(test, "world_size"), int)
    least = max(declared(test), int(is_counted))
    if world_size >= least or (not device.is_cpu and device.count >= least):
        return None
    return f"needs {least} or more ranks, but the world size of {type(test).__qualname__} is {world_size} here"
