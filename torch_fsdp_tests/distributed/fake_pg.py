"""The "fake" backend: one process stands for one rank of a world of any size, and no data moves between ranks.

`init_process_group("fake", rank=r, world_size=1024, store=FakeStore())` takes milliseconds. Shapes, memory and order
of calls are those of the real thing; values are not: a collective fills its outputs from this rank's inputs where it
can, and leaves them alone otherwise (torch's FakeProcessGroup.hpp says which).

torch keeps the name and the C++ class, but leaves the registration to a test module; importing this one is it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup


class FakeStore(dist.HashStore):
    """A store for one rank: what it wrote it can read.

    To wait for a key that only another rank would write is an error after a millisecond; with upstream's, which has
    no methods, every use is one.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_timeout(timedelta(milliseconds=1))


# TORCH FACT: the static method is what 2.11 to 2.13 offer. Before it there was a constructor of the same arguments.
_make_group = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)


def _create_fake_pg(common_opts: Any, backend_opts: Any) -> FakeProcessGroup:
    """What torch.distributed calls for each group of a fake world.

    `backend_opts` is a `FakeProcessGroup.Options` or None; with `error_on_collective` set on it, any collective of the
    group raises, which proves that none runs.
    """
    options = () if backend_opts is None else (backend_opts,)
    return _make_group(common_opts.group_rank, common_opts.group_size, *options)


# Every device type that has a default backend, and so is known to torch by now: naming another one here would make
# "fake" the default backend of that type.
dist.Backend.register_backend(
    dist.Backend.FAKE, _create_fake_pg, extended_api=True, devices=list(dist.Backend.default_device_backend_map)
)
