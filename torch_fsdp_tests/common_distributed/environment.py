"""What a test or its ranks find in the environment: the level of torch's checks, and shared directories."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from torch_fsdp_tests.common_utils import FILE_SCHEMA

__unittest = True

_DEBUG_VARIABLE = "TORCH_DISTRIBUTED_DEBUG"


def with_dist_debug_levels(levels: Sequence[str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run a test method once for each of these values of ``TORCH_DISTRIBUTED_DEBUG``, with a barrier after each run.

    The method makes the default group. Differs from upstream's: the previous level is restored afterwards. Raises
    ``ValueError`` if there is no level, because the test would not run.
    """
    if not levels:
        raise ValueError("with_dist_debug_levels has no level, so the test would not run: name one")

    def decorate(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def at_each_level(*args: Any, **kwargs: Any) -> Any:
            before, variable = dist.get_debug_level(), os.environ.get(_DEBUG_VARIABLE)
            try:
                for level in levels:
                    os.environ[_DEBUG_VARIABLE] = level
                    dist.set_debug_level_from_env()
                    returned = func(*args, **kwargs)
                    dist.barrier()
            finally:
                dist.set_debug_level(before)
                del os.environ[_DEBUG_VARIABLE]
                if variable is not None:
                    os.environ[_DEBUG_VARIABLE] = variable
            return returned

        return at_each_level

    return decorate


_directories: list[tempfile.TemporaryDirectory] = []


def directory() -> tempfile.TemporaryDirectory | None:
    """The directory that :func:`initialize_temp_directories` has made, or None."""
    return _directories[-1] if _directories else None


def initialize_temp_directories(init_method: str | None = None) -> None:
    """Make a directory for the ranks of a test, and name it in the environment.

    ``TEMP_DIR`` is the directory, with the empty folders ``barrier``, ``test_dir`` and ``init_dir``. ``INIT_METHOD`` is
    the given one, or a file in ``init_dir``.
    """
    cleanup_temp_dir()
    directory = tempfile.TemporaryDirectory()
    _directories.append(directory)
    for name in ("barrier", "test_dir", "init_dir"):
        os.mkdir(os.path.join(directory.name, name))
    rendezvous = os.path.join(directory.name, "init_dir", "shared_init_file")
    os.environ["TEMP_DIR"] = directory.name
    os.environ["INIT_METHOD"] = init_method or f"{FILE_SCHEMA}{rendezvous}"


def cleanup_temp_dir() -> None:
    """Remove the directory of :func:`initialize_temp_directories`, and its variables, if there is one."""
    while _directories:
        _directories.pop().cleanup()
        for name in ("TEMP_DIR", "INIT_METHOD"):
            os.environ.pop(name, None)


@contextlib.contextmanager
def core_dumps_disabled() -> Iterator[None]:
    """Allow no core dumps in the block: HIP ends a process whose kernel fails, unless their limit is zero.

    ``RLIMIT_CORE`` is restored afterwards. On Windows, which has no such limit, this does nothing.
    """
    if sys.platform == "win32":
        yield
        return
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
