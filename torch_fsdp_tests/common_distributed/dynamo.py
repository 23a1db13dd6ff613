"""Upstream's helpers for tests of compiled models that need a process group."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.common_utils import TestCase
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.ranks.fake_pg import FakeStore

__unittest = True


def _forget_compiled() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@contextlib.contextmanager
def _dynamo_dist_per_rank_init(
    rank: int,
    world_size: int,
    backend: str | None = None,
    init_pg: bool = True,
    fake_pg: bool = False,
    *,
    rdvz_file: str | None = None,
) -> Iterator[None]:
    """In a rank, make the default group of ``world_size`` ranks around a block, which starts without compiled code.

    The ranks meet at the file ``rdvz_file``, which must be empty, or at ``MASTER_ADDR`` and ``MASTER_PORT`` of the
    environment. Upstream's fixes the port at 6789, so two runs on one machine would meet.
    """
    device = accelerator.current()
    if not fake_pg:
        device.bind(rank)
    if init_pg:
        store: Any = FakeStore() if fake_pg else rdvz_file and dist.FileStore(rdvz_file, world_size)
        name = "fake" if fake_pg else backend or device.backend
        dist.init_process_group(name, store=store or None, rank=rank, world_size=world_size)
    _forget_compiled()
    try:
        yield
    finally:
        _forget_compiled()
        if init_pg:
            dist.destroy_process_group()


class DynamoDistributedSingleProcTestCase(TestCase):
    """Tests of one process, which is the only rank of the default group. The class makes the group.

    Each test starts without compiled code. ``device`` is the device under test, such as ``cpu`` or ``foo:0``.
    """

    rank = 0
    device: str
    device_ids: list[int] | None = None

    @classmethod
    def setUpClass(cls) -> None:
        super().setUpClass()
        device = accelerator.current()
        cls.device = str(device.bind(cls.rank))
        folder = tempfile.TemporaryDirectory()
        cls.addClassCleanup(folder.cleanup)
        store = dist.FileStore(os.path.join(folder.name, "rendezvous"), 1)
        dist.init_process_group(device.backend, store=store, rank=cls.rank, world_size=1)
        cls.addClassCleanup(dist.destroy_process_group)

    def setUp(self) -> None:
        super().setUp()
        _forget_compiled()
        self.addCleanup(_forget_compiled)
