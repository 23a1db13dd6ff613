"""What a test needs before it can run, declared where the test is and judged before any rank starts.

A decorator of this module leaves a requirement on the function or class: a callable that returns, in words, why the
test cannot run here, or None. The rank-hosting test cases ask them all in the parent, so that a skip costs no process
and its reason arrives as written. The wrapped function asks again when somebody calls it without such a test case.
"""

from __future__ import annotations

import functools
import os
import sys
import unittest
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.torch_facts import Fact

__unittest = True

Reason = Callable[[], "str | None"]
Decorated = TypeVar("Decorated", bound=Callable)

_REQUIREMENTS = "__requirements__"


class TestSkip(NamedTuple):
    """An exit code by which a rank says that it skips, and what the code means.

    The codes of :data:`TEST_SKIPS` are upstream's, so that the decorators of others are understood; none of ours leaves
    by one.
    """

    exit_code: int
    message: str


TestSkip.__test__ = False  # type: ignore[attr-defined]  # not a test, whatever pytest makes of its name


TEST_SKIPS: dict[str, TestSkip] = {
    "backend_unavailable": TestSkip(72, "the distributed backend is not available"),
    "small_worldsize": TestSkip(73, "the world size is too small"),
    "no_cuda": TestSkip(74, "CUDA is not available"),
    **{
        f"multi-gpu-{count}": TestSkip(code, f"needs {count} or more accelerators")
        for count, code in {1: 75, 2: 77, 3: 80, 4: 81, 5: 82, 6: 83, 7: 84, 8: 85}.items()
    },
    "nccl": TestSkip(76, "torch was built without NCCL"),
    "skipIfRocm": TestSkip(78, "not for ROCm"),
    "no_peer_access": TestSkip(79, "the devices cannot reach each other's memory"),
    "generic": TestSkip(86, "skipped in the ranks, which gave no reason in words"),
    "odd_worldsize": TestSkip(87, "the world size is odd"),
    "importerror": TestSkip(88, "an import is missing"),
    "no_accelerator": TestSkip(89, "no accelerator is available"),
}

SKIP_CODES: dict[int, str] = {skip.exit_code: skip.message for skip in TEST_SKIPS.values()}


def requires(*reasons: Reason) -> Callable[[Decorated], Decorated]:
    """Decorate a test function or a test class with reasons not to run, asked late and in the parent.

    Each reason is called without arguments and returns a sentence, or None. The test, or the class' ``setUpClass``,
    raises ``unittest.SkipTest`` with all that speak against it.
    """

    def decorate(decorated: Decorated) -> Decorated:
        if isinstance(decorated, type):
            return _on_class(decorated, reasons)

        @functools.wraps(decorated)
        def asked(*args: Any, **kwargs: Any) -> Any:
            skip_unless(reasons)
            return decorated(*args, **kwargs)

        setattr(asked, _REQUIREMENTS, [*getattr(decorated, _REQUIREMENTS, ()), *reasons])
        return asked  # type: ignore[return-value]

    return decorate


def _on_class(cls: Any, reasons: tuple[Reason, ...]) -> Any:
    set_up = cls.setUpClass.__func__

    def ask_first(cls: Any) -> None:
        skip_unless(reasons)
        set_up(cls)

    cls.setUpClass = classmethod(ask_first)
    return cls


def skip_unless(reasons: Iterable[Reason]) -> None:
    """Raise ``unittest.SkipTest`` with every reason that speaks against the test; return when there is none."""
    found = [reason for ask in reasons if (reason := ask()) is not None]
    if found:
        raise unittest.SkipTest("; ".join(dict.fromkeys(found)))


def requirements_of(function: Callable) -> list[Reason]:
    """The requirements that decorators have left on a test function."""
    return list(getattr(function, _REQUIREMENTS, ()))


def needs(*facts: Fact) -> Callable[[Decorated], Decorated]:
    """Skip unless the installed torch does all this (facts of :mod:`torch_fsdp_tests.torch_facts`)."""
    return requires(*(fact.lacks for fact in facts))


def requires_capability(*names: str) -> Callable[[Decorated], Decorated]:
    """Skip unless the device under test has all these capabilities (names of ``accelerator.CAPABILITIES``).

    Raises ``KeyError``, when the test is asked for, for a name that is no capability.
    """
    return requires(lambda: accelerator.current().lacks(*names))


def _devices() -> int | None:
    """Devices of the accelerator under test; None on the CPU, which hosts any number of ranks."""
    device = accelerator.current()
    return None if device.is_host else device.count


def at_least_x_gpu(x: int) -> bool:
    """Whether ``x`` accelerators of the kind under test are visible. False on the CPU, as upstream's.

    Upstream's counts devices of three kinds, whichever is under test.
    """
    count = _devices()
    return count is not None and count >= x


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = True) -> Callable[[Decorated], Decorated]:
    """Skip unless ``x`` ranks find room: ``x`` devices, or devices that ranks can share, or the CPU.

    Differs from upstream's of the same name: the CPU is allowed unless ``allow_cpu=False`` says otherwise, and the
    answer comes before any rank starts.
    """

    def reason() -> str | None:
        device = accelerator.current()
        if device.is_host:
            return None if allow_cpu else f"needs {x} or more accelerators; the device under test is the CPU"
        return device.lacks_room_for(x)

    return requires(reason)


def requires_world_size(n: int) -> Callable[[Decorated], Decorated]:
    """Ask for ``n`` ranks for one test; see :func:`get_required_world_size`. Skips where ``n`` find no room.

    Upstream's wants ``n`` CUDA devices, and asks when the file is imported.
    """

    def decorate(function: Decorated) -> Decorated:
        wrapped = requires(lambda: accelerator.current().lacks_room_for(n))(function)
        wrapped._required_world_size = n  # type: ignore[attr-defined]
        return wrapped

    return decorate


def get_required_world_size(obj: Any, default: int) -> int:
    """The world size that :func:`requires_world_size` asked for the current test of ``obj``, else ``default``.

    ``obj`` is a test case. Upstream's returns ``default`` for whatever goes wrong, ours only where nothing was asked.
    """
    function = getattr(type(obj), getattr(obj, "_testMethodName", ""), None)
    return int(getattr(function, "_required_world_size", default))


def nccl_skip_if_lt_x_gpu(backend: str, x: int) -> Callable[[Decorated], Decorated]:
    """As :func:`skip_if_lt_x_gpu` without the CPU, but only when ``backend`` is nccl."""
    return skip_if_lt_x_gpu(x, allow_cpu=False) if backend == "nccl" else requires()


def skip_if_no_gpu(function: Decorated) -> Decorated:
    """Skip unless an accelerator is under test.

    Upstream's also counts a device for each rank of ``WORLD_SIZE``; here the test cases ask for room for all ranks.
    """
    return requires(
        lambda: "needs an accelerator; the device under test is the CPU" if accelerator.current().is_host else None
    )(function)


def skip_if_small_worldsize(function: Decorated) -> Decorated:
    """Skip where the environment's ``WORLD_SIZE``, or without one the number of ranks under test, is 2 or less.

    Upstream's wants 8 or more, for the sake of its CI.
    """
    return requires(lambda: "the world size is 2 or less" if _world_size_variable() <= 2 else None)(function)


def skip_if_odd_worldsize(function: Decorated) -> Decorated:
    """Skip where the environment's ``WORLD_SIZE``, or without one the number of ranks under test, is odd.

    Upstream's raises ``KeyError`` without one.
    """
    return requires(lambda: "the world size is odd" if _world_size_variable() % 2 else None)(function)


def _world_size_variable() -> int:
    return int(os.environ.get("WORLD_SIZE", accelerator.current().ranks))


def _requires_backend(name: str, built_in: Callable[[], bool]) -> Callable[[Decorated], Decorated]:
    return requires(lambda: None if built_in() else f"torch was built without the backend {name}")


def requires_gloo() -> Callable[[Decorated], Decorated]:
    """Skip where torch was built without gloo. Upstream's asks when the file is imported, as all of its kind do."""
    return _requires_backend("gloo", dist.is_gloo_available)


def requires_ucc() -> Callable[[Decorated], Decorated]:
    """Skip where torch was built without UCC."""
    return _requires_backend("ucc", dist.is_ucc_available)


def requires_mpi() -> Callable[[Decorated], Decorated]:
    """Skip where torch was built without MPI."""
    return _requires_backend("mpi", dist.is_mpi_available)


def requires_nccl() -> Callable[[Decorated], Decorated]:
    """Skip where the backend under test is nccl and torch was built without it.

    Differs from upstream's: with another backend under test it asks nothing, since the test then runs over that one.
    """
    return requires(
        lambda: (
            "torch was built without the backend nccl"
            if accelerator.current().backend == "nccl" and not dist.is_nccl_available()
            else None
        )
    )


def requires_nccl_version(version: tuple[int, ...], msg: str) -> Callable[[Decorated], Decorated]:
    """Skip where the backend under test is an NCCL older than ``version``; ``msg`` says what for.

    ``version`` is as in ``torch.cuda.nccl.version()``: ``(2, 27)`` or longer. With another backend under test it asks
    nothing (upstream's asks wherever CUDA is).
    """

    def reason() -> str | None:
        if accelerator.current().backend != "nccl":
            return None
        found = torch.cuda.nccl.version()
        return None if found >= version else f"needs NCCL {_dotted(version)} or newer, found {_dotted(found)}: {msg}"

    return requires(reason)


def requires_nccl_shrink() -> Callable[[Decorated], Decorated]:
    """Skip where the backend under test is an NCCL that cannot shrink a group: one before 2.27."""
    return requires_nccl_version((2, 27), "shrinking a process group")


def requires_accelerator_dist_backend(backends: list[str] | None = None) -> Callable[[Decorated], Decorated]:
    """Skip unless the backend under test is one of ``backends``, by default any backend of an accelerator.

    Upstream's asks whether torch was built with one of them, by default of three that it knows.
    """

    def reason() -> str | None:
        device = accelerator.current()
        if device.is_host or (backends is not None and device.backend not in backends):
            return f"needs the backend {' or '.join(backends or ['of an accelerator'])}; {device.backend} is under test"
        return None

    return requires(reason)


def requires_multicast_support() -> Callable[[Decorated], Decorated]:
    """Skip unless there is symmetric memory.

    Upstream's asks the first CUDA device for multicast, a part of it that is not asked for here: the question would
    start the device in the process that forks.
    """
    return requires_capability("symmetric_memory")


def skip_if_rocm_multiprocess(function: Decorated) -> Decorated:
    """Skip where torch was built for ROCm. Upstream's asks when the file is imported."""
    return requires(lambda: "not for ROCm" if torch.version.hip is not None else None)(function)


def skip_if_win32() -> Callable[[Decorated], Decorated]:
    """Skip on Windows (where this package refuses to run at all)."""
    return requires(lambda: "not for Windows" if sys.platform == "win32" else None)


def sm_is_or_higher_than(device: torch.device, major: int, minor: int) -> bool:
    """Whether a CUDA device has compute capability ``major.minor`` or higher.

    As upstream's: True for any other kind of device, False for ROCm, whose numbers mean something else. Raises
    ``RuntimeError`` for a device that is not there.
    """
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (major, minor)


def _dotted(version: Iterable[int]) -> str:
    return ".".join(map(str, version))
