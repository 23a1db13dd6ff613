"""The "fake" backend. One process is one rank of a world of any size, and no data moves between ranks.

`init_process_group("fake", rank=r, world_size=1024, store=FakeStore())` takes milliseconds. Shapes, memory and order of
calls are real, but values are not. A collective fills its outputs from this rank's inputs if it can, and otherwise does
not change them (torch's FakeProcessGroup.hpp says which).

torch has the name and the C++ class, but a test module must register them. Importing this module does that.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup


class FakeStore(dist.HashStore):
    """A store for one rank, which can read what it wrote. Waiting for a key that only another rank would write is an
    error after a millisecond. Upstream's has no methods, so there every use is an error.
    """

    def __init__(self) -> None:
        super().__init__()
        self.set_timeout(timedelta(milliseconds=1))


# TORCH FACT: 2.11 to 2.13 have the static method. Older versions have a constructor with the same arguments.
_make_group = getattr(FakeProcessGroup, "_create_internal", FakeProcessGroup)


def _create_fake_pg(common_opts: Any, backend_opts: Any) -> FakeProcessGroup:
    """What torch.distributed calls for each group of a fake world.

    `backend_opts` is a `FakeProcessGroup.Options` or None; with `error_on_collective`, any collective of the group
    raises, which proves that none runs.
    """
    options = () if backend_opts is None else (backend_opts,)
    return _make_group(common_opts.group_rank, common_opts.group_size, *options)


# All device types that have a default backend. Naming another one here would make "fake" its default backend.
dist.Backend.register_backend(
    dist.Backend.FAKE, _create_fake_pg, extended_api=True, devices=list(dist.Backend.default_device_backend_map)
)
