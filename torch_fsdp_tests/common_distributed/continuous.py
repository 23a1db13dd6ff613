"""Test cases whose rank processes stay for all tests of a class."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_distributed.case import RankTestCase, get_timeout, run_in_rank
from torch_fsdp_tests.common_utils import set_rng_seed, state
from torch_fsdp_tests.ranks import Assignment, RankGroup

__unittest = True

_UNSET = -2


class MultiProcContinuousTest(RankTestCase):
    """Every test runs in the same ``world_size`` rank processes with one process group, made for the class.

    Worth it where starting a device is dear. The group's ranks start with the first test and leave after the last.

    Differs from upstream's: a test that fails or skips never touches the next one, which gets new ranks (upstream skips
    the rest of the class); what a test leaves changed in a rank is put back. ``poison_pill`` is kept for its name and
    never set.
    """

    MAIN_PROCESS_RANK = RankTestCase.MAIN_RANK

    world_size: int = _UNSET  # by default that of the device under test
    rdvz_file: str | None = None
    timeout: timedelta = timedelta(seconds=120)
    poison_pill: bool = False
    pg: dist.ProcessGroup

    _group: RankGroup | None = None

    @classmethod
    def backend_str(cls) -> str | None:
        """The backend of the process group; None leaves the choice to torch."""
        return None

    @classmethod
    def device_type(cls) -> str:
        return accelerator.current().type

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> Any:
        """Options for the process group's backend."""
        return None

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        """Make the process group in a rank; subclasses extend it with what every rank needs."""
        os.environ["LOCAL_RANK"] = str(rank)  # keeps init_device_mesh from guessing the device
        store = dist.FileStore(rdvz_file, world_size)
        dist.init_process_group(
            cls.backend_str(), world_size=world_size, rank=rank, store=store, pg_options=cls.opts(), timeout=cls.timeout
        )
        cls.pg = dist.distributed_c10d._get_default_group()

    @classmethod
    def _world_size_of_class(cls) -> int:
        stated = inspect.getattr_static(cls, "world_size", _UNSET)
        if isinstance(stated, property) and stated.fget is not None:
            return int(stated.fget(object.__new__(cls)))  # what it computes must not need an instance with a test
        return accelerator.current().ranks if stated == _UNSET else int(stated)

    def setUp(self) -> None:
        super().setUp()
        self.rank = self.MAIN_PROCESS_RANK
        world_size = self._world_size_of_class()
        self._ask_requirements(world_size)
        cls = type(self)
        if cls._group is None:
            cls._group = RankGroup(cls, None, world_size)
            cls.rdvz_file = cls._group.file_name
            cls.addClassCleanup(cls._end_group)

    @classmethod
    def _end_group(cls) -> None:
        if cls._group is not None:
            group, cls._group = cls._group, None
            group.close()
            state.notes.add(f"{cls.__module__}.{cls.__qualname__}", group.leaks)

    def _join_ranks(self, fn: Callable) -> None:
        group = type(self)._group
        assert group is not None
        limit = get_timeout(self.id())
        kept = False
        try:
            self._conclude(group.run(self._testMethodName, limit), limit)
            kept = True
            state.notes.add(self.id(), list(dict.fromkeys(group.leaks)))
            group.leaks.clear()
        finally:
            if not kept:  # the ranks may be anywhere; the next test gets new ones
                type(self)._group = None
                self._close(group)

    @classmethod
    def _serve_rank(cls, assignment: Assignment) -> None:
        rank = cls.rank = assignment.index
        cls.world_size = assignment.world_size
        started = False
        for test in assignment.orders():

            def live(test: str = test) -> None:
                nonlocal started
                if not started:
                    cls._init_pg(rank, assignment.world_size, assignment.file_name)
                    started = True
                with state.saved_state() as leaks:
                    cls._run_test_given_id(test)
                for leak in leaks:
                    assignment.name_leak(leak)

            assignment.report(run_in_rank(rank, live))
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        """Run one test of the class in this rank; ``test_id`` ends in the method's name."""
        test_name = test_id.rsplit(".", 1)[-1]
        self = cls(test_name)
        self.rank = cls.rank
        set_rng_seed()
        getattr(self, test_name)(**kwargs)
