"""Decorators that say what a test needs. They are checked before any rank starts.

A decorator of this module attaches a requirement to the function or class: a callable that returns the reason why the
test cannot run here, or None. Test cases with ranks check all requirements in the parent, so a skip costs no process.
The wrapped function checks them again if it is called without such a test case.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist

from torch_fsdp_tests import world_sizes
from torch_fsdp_tests.common_utils.flags import TEST_WITH_ROCM
from torch_fsdp_tests.common_utils.skips import isRocmArchAnyOf
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch.torch_facts import Fact
from torch_fsdp_tests.installed_torch.version_ranges import dotted
from torch_fsdp_tests.verdict import Reason, SkipKind
from torch_fsdp_tests.verdict.events import Skipped

__unittest = True

Requirement = Callable[[], "str | None"]
Decorated = TypeVar("Decorated", bound=Callable)

_REQUIREMENTS = "__requirements__"


class TestSkip(NamedTuple):
    """An exit code that means that a rank skips, and the reason.

    The codes of :data:`TEST_SKIPS` are upstream's, so that decorators from elsewhere work. No decorator here uses them.
    """

    exit_code: int
    message: str


TestSkip.__test__ = False  # type: ignore[attr-defined]  # pytest would take it for a test because of its name


TEST_SKIPS: dict[str, TestSkip] = {
    "backend_unavailable": TestSkip(72, "the distributed backend is not available"),
    "small_worldsize": TestSkip(73, "the world size is too small"),
    "no_cuda": TestSkip(74, "CUDA is not available"),
    **{
        f"multi-{kind}-{count}": TestSkip(code, f"needs {count} or more accelerators")
        for kind in ("gpu", "device")  # the later name replaced the earlier one in upstream's
        for count, code in {1: 75, 2: 77, 3: 80, 4: 81, 5: 82, 6: 83, 7: 84, 8: 85}.items()
    },
    "nccl": TestSkip(76, "torch was built without NCCL"),
    "skipIfRocm": TestSkip(78, "not for ROCm"),
    "no_peer_access": TestSkip(79, "the devices cannot reach each other's memory"),
    "generic": TestSkip(86, "the ranks skipped without a reason"),
    "odd_worldsize": TestSkip(87, "the world size is odd"),
    "importerror": TestSkip(88, "an import is missing"),
    "no_accelerator": TestSkip(89, "no accelerator is available"),
}

_UPSTREAMS = dict(TEST_SKIPS)
_OF_DEVICES = _UPSTREAMS.keys() - {"generic", "importerror"}


def skip_codes() -> dict[int, str]:
    """The reason that each exit code of :data:`TEST_SKIPS` means now. Test files add entries, and replace upstream's.

    If several entries have one code, the last one that a file has set counts.
    """
    entries = sorted(TEST_SKIPS.items(), key=lambda item: item[1] is not _UPSTREAMS.get(item[0]))
    return {
        skip.exit_code: Reason(skip.message, SkipKind.DEVICE if name in _OF_DEVICES else SkipKind.OTHER)
        for name, skip in entries
    }


def requires(*reasons: Requirement) -> Callable[[Decorated], Decorated]:
    """Decorate a test function or a test class with requirements, which are checked late and in the parent.

    Each one is called without arguments, and returns a reason not to run or None. The test, or the class'
    ``setUpClass``, raises ``unittest.SkipTest`` with all reasons.
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


def _on_class(cls: Any, reasons: tuple[Requirement, ...]) -> Any:
    set_up = cls.setUpClass.__func__

    def ask_first(cls: Any) -> None:
        skip_unless(reasons)
        set_up(cls)

    cls.setUpClass = classmethod(ask_first)
    return cls


def skip_unless(reasons: Iterable[Requirement]) -> None:
    """Raise a skip with all reasons not to run; return if there is none. A reason without a kind is the device's."""
    unmet = [reason for ask in reasons if (reason := ask()) is not None]
    if unmet:
        raise Skipped(Reason.joined(unmet, SkipKind.DEVICE))


def requirements_of(function: Callable) -> list[Requirement]:
    """The requirements that decorators have attached to a test function."""
    return list(getattr(function, _REQUIREMENTS, ()))


def needs(*facts: Fact) -> Callable[[Decorated], Decorated]:
    """Skip unless all these facts of :mod:`~torch_fsdp_tests.installed_torch.torch_facts` hold."""
    return requires(*(fact.lacks for fact in facts))


def requires_capability(*names: str) -> Callable[[Decorated], Decorated]:
    """Skip unless the device under test has all these capabilities (names of ``accelerator.CAPABILITIES``).

    The check raises ``KeyError`` for a name that is not a capability.
    """
    return requires(lambda: accelerator.current().lacks(*names))


def at_least_x_gpu(x: int) -> bool:
    """Whether ``x`` accelerators of the type under test are visible. As in upstream's, False on the CPU.

    Upstream's counts devices of three types, regardless of the one under test.
    """
    device = accelerator.current()
    return not device.is_cpu and device.count >= x


def skip_if_lt_x_gpu(x: int, *, allow_cpu: bool = True) -> Callable[[Decorated], Decorated]:
    """Skip unless there is room for ``x`` ranks: ``x`` devices, devices that ranks can share, or the CPU.

    The test then has at least ``x`` ranks, unless its class sets the number (see :func:`ranks_of`). If the class has
    fewer, the test skips unless ``x`` devices are visible: such a class often has one rank for each device.

    Differs from upstream's: the CPU is allowed unless ``allow_cpu=False``, and no rank starts before the check.
    """

    def reason() -> str | None:
        device = accelerator.current()
        if device.is_cpu and not allow_cpu:
            return f"needs {x} or more accelerators, but the device under test is the CPU"
        return device.lacks_room_for(x)

    def decorate(function: Decorated) -> Decorated:
        wrapped = requires(reason)(function)
        world_sizes.declare(wrapped, max(x, world_sizes.declared_by(function)))
        # Upstream's, by which plugins of pytest select tests.
        wrapped._min_gpus_required = max(x, getattr(function, "_min_gpus_required", 0))  # type: ignore[attr-defined]
        return wrapped

    return decorate


def requires_world_size(n: int, least: int | None = None) -> Callable[[Decorated], Decorated]:
    """Request ``n`` ranks for one test; see :func:`get_required_world_size`. Skip if there is no room for them.

    With ``least`` the test takes fewer ranks if there are fewer devices, and skips below that number. Upstream's has no
    such parameter, needs ``n`` CUDA devices, and checks when the file is imported.
    """

    def decorate(function: Decorated) -> Decorated:
        wrapped = requires(lambda: accelerator.current().lacks_room_for(n if least is None else least))(function)
        world_sizes.request(wrapped, n)
        world_sizes.declare(wrapped, n if least is None else least)
        return wrapped

    return decorate


def ranks_of(test: Any, most: int | None = None) -> int:
    """The number of ranks of a test that does not set its own: one for each device, but at most ``most`` of them.

    It is never less than the number in the :func:`skip_if_lt_x_gpu` of the test method. ``test`` is the test case.
    Without ``most`` it is the default number of the device under test (4 on the CPU). If the class of ``test`` sets
    ``power_of_two_ranks = True``, because its shapes or meshes need that, the number is rounded down to a power of two.
    """
    return world_sizes.of_test(test, accelerator.current(), most)


def at_most(ranks: int) -> Any:
    """A ``world_size`` for a class: this many ranks, or one for each device if there are fewer devices.

    A test that needs more than two ranks says so with :func:`skip_if_lt_x_gpu`, and gets them where there is room.
    """
    return property(lambda self: ranks_of(self, ranks))


def get_required_world_size(obj: Any, default: int) -> int:
    """The world size that :func:`requires_world_size` requested for the current test of ``obj``, else ``default``.

    ``obj`` is a test case. Upstream's also returns ``default`` after any error.
    """
    requested = world_sizes.requested(obj)
    return int(default) if requested is None else ranks_of(obj, requested)


def _not_built_in(backend: str) -> Reason:
    return Reason(f"torch was built without the backend {backend}", SkipKind.TORCH)


def requires_gloo() -> Callable[[Decorated], Decorated]:
    """Skip if torch was built without gloo. Upstream's decorators of this kind check when the file is imported."""
    return requires(lambda: None if dist.is_gloo_available() else _not_built_in("gloo"))


def requires_nccl() -> Callable[[Decorated], Decorated]:
    """Skip if torch was built without nccl, and nccl is the backend under test or the one that the test names.

    Differs from upstream's: a test that names no backend runs with the one under test.
    """

    def lacks() -> Reason | None:
        return None if dist.is_nccl_available() else _not_built_in("nccl")

    def decorate(decorated: Decorated) -> Decorated:
        asked = requires(lambda: lacks() if accelerator.current().backend == "nccl" else None)(decorated)
        return asked if isinstance(asked, type) else _skips_without("NCCL", lacks)(asked)

    return decorate


def _skips_without(name: str, lacks: Requirement) -> Callable[[Decorated], Decorated]:
    """Turn the error of torch about a backend that was not built in, ``name`` in its words, into a skip."""

    def decorate(function: Any) -> Any:
        @functools.wraps(function)
        def tried(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RuntimeError as error:
                if f"{name} built in" in str(error):
                    skip_unless([lacks])
                raise

        return tried

    return decorate


def requires_nccl_version(version: tuple[int, ...], msg: str) -> Callable[[Decorated], Decorated]:
    """Skip if the backend under test is an NCCL older than ``version``. ``msg`` says what needs the version.

    ``version`` has the form of ``torch.cuda.nccl.version()``: ``(2, 27)`` or longer. If another backend is under test,
    this does nothing, while upstream's checks wherever there is CUDA.
    """

    def reason() -> str | None:
        if accelerator.current().backend != "nccl":
            return None
        nccl = torch.cuda.nccl.version()
        return None if nccl >= version else f"needs NCCL {dotted(version)} or newer, found {dotted(nccl)}: {msg}"

    return requires(reason)


def requires_accelerator_dist_backend(backends: list[str] | None = None) -> Callable[[Decorated], Decorated]:
    """Skip unless the backend under test is one of ``backends`` (default: any backend of an accelerator).

    Upstream's checks whether torch was built with one of them, and its default is three that it knows.
    """

    def reason() -> str | None:
        device = accelerator.current()
        if device.is_cpu or (backends is not None and device.backend not in backends):
            accepted = " or ".join(backends or ["of an accelerator"])
            return f"needs the backend {accepted}, but {device.backend} is under test"
        return None

    return requires(reason)


def skip_if_rocm_multiprocess(function: Decorated) -> Decorated:
    """Skip if torch was built for ROCm. Upstream's checks when the file is imported."""
    return requires(lambda: "not for ROCm" if torch.version.hip is not None else None)(function)


def skip_if_rocm_arch_multiprocess(arch: tuple[str, ...]) -> Callable[[Decorated], Decorated]:
    """Skip when ROCm tests run on one of these architectures. Upstream's checks when the file is imported."""
    return requires(lambda: f"not for ROCm's {arch}" if TEST_WITH_ROCM and isRocmArchAnyOf(arch) else None)


def sm_is_or_higher_than(device: torch.device, major: int, minor: int) -> bool:
    """Whether a CUDA device has compute capability ``major.minor`` or higher.

    As in upstream's, True for any other type of device, and False for ROCm, whose numbers mean something else. Raises
    ``RuntimeError`` if the device does not exist.
    """
    if device.type != "cuda":
        return True
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (major, minor)
