"""Decorators for tests of torch.distributed.checkpoint: a directory that all ranks share, and a more verbose log."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

TestMethod = Callable[..., Any]


def with_temp_dir(func: TestMethod) -> TestMethod:
    """Run a test method with `self.temp_dir`: an empty directory that all ranks share, and that is removed afterwards.

    Decorate the method that the ranks run, with the default group made: rank 0 chooses and broadcasts the name, so the
    ranks must see one file system. Without a group each caller gets a directory of its own.

    Unlike upstream's, where the first rank out removes the directory under the others, the last one out does, whether
    the ranks pass or fail; no collective is needed for that, which a failed rank would not join. A rank that is
    killed never leaves, and then the directory stays for whoever owns the temporary directory around it.
    """

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _shared_directory() as self.temp_dir:
            return func(self, *args, **kwargs)

    return wrapper


@contextmanager
def _shared_directory() -> Iterator[str]:
    together = dist.is_initialized()
    # Read now, because a test may destroy its group before it ends.
    rank, size = (dist.get_rank(), dist.get_world_size()) if together else (0, 1)
    chosen = [tempfile.mkdtemp(prefix="shared_")] if rank == 0 else [""]
    if together:
        dist.broadcast_object_list(chosen, src=0)
    # The ranks sign out beside the directory and not inside it, because a test may list its files.
    base = chosen[0]
    shared = os.path.join(base, "files")
    os.makedirs(shared, exist_ok=True)
    try:
        yield shared
    finally:
        # After a failure the parent directory may be gone already. This must not hide the exception of a late rank.
        with contextlib.suppress(FileNotFoundError):
            with open(os.path.join(base, f"rank_{rank}_left"), "x"):
                pass
            if len(os.listdir(base)) == size + 1:
                # Two ranks may both be last. The second one finds less to remove, or nothing.
                shutil.rmtree(base, ignore_errors=True)


def with_checkpoint_logging(
    func: TestMethod | None = None,
    logger_name: str = "torch.distributed.checkpoint",
    level: int = logging.INFO,
) -> Any:
    """Run a test method with the logger `logger_name` at `level`, and restore its level.

    With or without arguments: `@with_checkpoint_logging` or `@with_checkpoint_logging(level=logging.DEBUG)`, of which
    upstream has the first form only. Loggers belong to the process: among ranks that are threads the first one in
    raises the level, and the last one out puts it back.
    """
    if func is None:
        return functools.partial(with_checkpoint_logging, logger_name=logger_name, level=level)

    @functools.wraps(func)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with _log_level(logging.getLogger(logger_name), level):
            return func(*args, **kwargs)

    return wrapper


_levels_lock = threading.Lock()
_levels: dict[str, tuple[int, int]] = {}  # logger name: how many are inside, and the level before the first


@contextmanager
def _log_level(logger: logging.Logger, level: int) -> Iterator[None]:
    with _levels_lock:
        inside, before = _levels.get(logger.name, (0, logger.level))
        _levels[logger.name] = inside + 1, before
        logger.setLevel(level)
    try:
        yield
    finally:
        with _levels_lock:
            inside, before = _levels.pop(logger.name)
            if inside > 1:
                _levels[logger.name] = inside - 1, before
            else:
                logger.setLevel(before)
