"""A directory that all ranks of a test of torch.distributed.checkpoint share."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "with_temp_dir",
]

__getattr__ = upstream_names.complete(__name__)

TestMethod = Callable[..., Any]


def with_temp_dir(func: TestMethod) -> TestMethod:
    """Run a test method with `self.temp_dir`: an empty directory that all ranks share, and that is removed afterwards.

    Decorate the method that the ranks run, with the default group made: rank 0 chooses and broadcasts the name, so the
    ranks must see one file system. Without a group each caller gets a directory of its own.

    The last rank that leaves removes the directory, whether the ranks pass or fail (upstream: the first one does). This
    needs no collective, which a failed rank would not join. If a rank is killed, the directory stays, and the owner of
    the temporary directory around it removes it.
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
