"""Test cases whose rank processes stay for all tests of a class."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from torch_fsdp_tests import process_state
from torch_fsdp_tests.common_distributed.case import RankTestCase, limit_of, named_leaks, run_in_rank
from torch_fsdp_tests.common_distributed.requirements import ranks_of
from torch_fsdp_tests.common_utils import set_rng_seed
from torch_fsdp_tests.device import accelerator, substitutes
from torch_fsdp_tests.ranks import (
    COLLECTIVE_TIMEOUT_FRACTION,
    Assignment,
    HarnessError,
    RankGroup,
    RanksErred,
    start_ranks,
)
from torch_fsdp_tests.ranks.outcome import enters_test
from torch_fsdp_tests.verdict import Phase, RankResult, Verdict

__unittest = True

_UNSET = -2
_MESH = "mesh_"  # begins the descriptions of the groups that torch.distributed.device_mesh makes


class MultiProcContinuousTest(RankTestCase):
    """Every test runs in the same ``world_size`` rank processes, with one process group that the class makes.

    This saves time if starting a device takes long. The ranks start with the first test and exit after the last. In the
    parent, a test raises the same exceptions as one of :class:`MultiProcessTestCase`. The class raises
    :class:`~torch_fsdp_tests.ranks.RanksErred` if a rank dies after it passed a test.

    Differs from upstream's: a test that fails or skips never affects the next one, which gets new ranks (upstream skips
    the rest of the class). Settings that a test changed in a rank are restored. Groups that it left open are reported,
    and stay until the class ends, as upstream, because torch's caches may name those of meshes. The default
    ``world_size`` is that of the device under test (upstream's is the number of devices, and it skips if there is
    none). ``timeout`` is that of a collective. A test file may set ``poison_pill`` to skip the rest of the class. The
    harness never does.
    """

    MAIN_PROCESS_RANK = RankTestCase.MAIN_RANK
    _unsupported_hooks = {
        **RankTestCase._unsupported_hooks,
        "_spawn_processes": "override _init_pg, which each rank calls when it starts",
        "_ensure_processes_spawned": "override _init_pg, which each rank calls when it starts",
        "_processes_spawned": "override _init_pg, which each rank calls when it starts",
        "_worker_run_main_wait": "override join_or_run",
        "_get_world_size": "set world_size",
    }

    world_size: int = _UNSET  # by default that of the device under test
    rdvz_file: str | None = None
    timeout: timedelta = timedelta(seconds=120)
    poison_pill: bool = False
    pg: dist.ProcessGroup

    _assignment: Assignment  # in a rank
    _late_deaths: list[Verdict]
    _last_test: str = ""

    @classmethod
    def backend_str(cls) -> str | None:
        """The backend of the process group, such as ``gloo``. None leaves the choice to torch, as in upstream's."""
        return None

    @classmethod
    def device_type(cls) -> str:
        """The type of the device under test. Upstream's is that of the accelerator that torch finds, if any."""
        return accelerator.current().type

    @classmethod
    def opts(cls, high_priority_stream: bool = False) -> Any:
        """Options for the process group's backend. None means the backend's defaults, as in upstream's."""
        return None

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        """Make the process group in a rank. Subclasses extend this method with what every rank needs.

        Differs from upstream's: its collectives give up after ``timeout``, and in any case before a test's limit does.
        Raises what ``init_process_group`` raises, as the first test's error.
        """
        timeout = min(cls.timeout, timedelta(seconds=limit_of("") * COLLECTIVE_TIMEOUT_FRACTION))
        os.environ["LOCAL_RANK"] = str(rank)  # keeps init_device_mesh from guessing the device
        store = dist.FileStore(rdvz_file, world_size)
        dist.init_process_group(
            cls.backend_str(), world_size=world_size, rank=rank, store=store, pg_options=cls.opts(), timeout=timeout
        )
        cls.pg = c10d._get_default_group()

    def setUp(self) -> None:
        super().setUp()
        if self.poison_pill:
            self.skipTest("an earlier test has set poison_pill of the class")
        world_size = ranks_of(self) if self.world_size == _UNSET else int(self.world_size)
        self._ask_requirements(world_size)
        self._ensure_ranks(world_size)

    @classmethod
    def _ensure_ranks(cls, world_size: int) -> None:
        """Start the ranks, unless those of an earlier test can run one more."""
        if cls._group is not None and (cls._group.world_size != world_size or not cls._group.ready()):
            cls._end_group()
        if cls._group is None:
            cls._group = start_ranks(cls, None, world_size)
            cls.rdvz_file = cls._group.file_name
            if "_late_deaths" not in vars(cls):
                cls._late_deaths = []
                cls.addClassCleanup(cls._conclude_class)

    @classmethod
    def _end_group(cls) -> None:
        """End the ranks in an orderly way. Problems are kept until the end of the class."""
        if cls._group is None:
            return
        group, cls._group = cls._group, None
        try:
            group.close()
        except HarnessError as error:
            group.late_deaths.append(error.verdict)
        cls._keep_late_deaths(group)
        process_state.notes.add(f"{cls.__module__}.{cls.__qualname__}", group.take_leaks())

    @classmethod
    def _keep_late_deaths(cls, group: RankGroup) -> None:
        where = f"after {cls._last_test}: " if cls._last_test else ""
        for verdict in group.late_deaths:
            cls._late_deaths.append(dataclasses.replace(verdict, reason=f"{where}{verdict.reason}"))

    @classmethod
    def _conclude_class(cls) -> None:
        """Raise, for the class, what went wrong in ranks after a test had passed and its outcome was reported."""
        cls._end_group()
        deaths = cls._late_deaths
        del cls._late_deaths
        if deaths:
            raise RanksErred(Verdict(deaths[0].outcome, "; ".join(each.reason for each in deaths), Phase.FIXTURE))

    def _join_ranks(self, fn: Callable) -> None:
        self._run_in_ranks(self._testMethodName)

    def _run_in_ranks(self, method: str) -> None:
        """Run a method of the class in the ranks, and raise their verdict."""
        group = type(self)._group
        assert group is not None
        limit = limit_of(self.id())
        type(self)._last_test = method
        try:
            self._conclude(group.run(method, limit), limit)
            self._name_leaks(group)
        except BaseException:  # the ranks may be anywhere; the next test gets new ones
            type(self)._group = None
            self._close(group)
            self._keep_late_deaths(group)
            raise

    @classmethod
    @enters_test
    def _serve_rank(cls, assignment: Assignment) -> None:
        accelerator.expect(assignment.world_size)
        cls._assignment = assignment
        tests = _Tests(assignment)
        cls._worker_loop(assignment.index, assignment.world_size, assignment.file_name, tests, tests)

    @classmethod
    @enters_test
    def _worker_loop(cls, rank: int, world_size: int, rdvz_file: str, task_queue: Any, completion_queue: Any) -> None:
        """Run tests of the class in this rank until the queue has no more. Subclasses prepare the rank before this.

        The queues have only the methods that this method calls, so an override must call it.
        """
        assignment, started = cls._assignment, False
        cls.rank, cls.world_size = rank, world_size
        while (test := task_queue.get()) is not None:

            def live(test: str = test) -> None:
                nonlocal started
                if not started:
                    cls._init_pg(rank, world_size, rdvz_file)
                    assignment.meet()  # a rank that fails at once would break the connections of a slower one
                    started = True
                with named_leaks(assignment), _same_groups(assignment):
                    cls._run_test_given_id(test)

            result = run_in_rank(rank, live, cls)
            if result.state.is_bad:
                # The others may wait for this rank in a collective, and learn of its end when it exits. The group is
                # useless now, and to destroy it properly could take forever.
                assignment.leave()
                completion_queue.put(result)
                return
            completion_queue.put(result)
        if dist.is_initialized():
            dist.destroy_process_group()

    @classmethod
    def _run_test_given_id(cls, test_id: str, **kwargs: Any) -> None:
        """Run one test of the class and its clean-ups in this rank. ``test_id`` ends in the method's name.

        Subclasses extend this method with what every test needs before and after it. Raises what the test raises.
        """
        test_name = test_id.rsplit(".", 1)[-1]
        self = cls(test_name)
        self.rank = cls.rank
        set_rng_seed()
        self._run_body(test_name, **kwargs)


class _Tests:
    """The queues of :meth:`MultiProcContinuousTest._worker_loop`: of the tests to run, and of their outcomes."""

    def __init__(self, assignment: Assignment) -> None:
        self._assignment = assignment
        self._tests = iter(assignment.orders())

    def get(self) -> str | None:
        return next(self._tests, None)

    def put(self, result: RankResult) -> None:
        if not isinstance(result, RankResult):
            raise TypeError(f"{result!r} is not the outcome of a test: let _worker_loop call super()._worker_loop()")
        self._assignment.report(result)


class DeviceContinuousTest(MultiProcContinuousTest):
    """Every rank has its device and the backend under test, and what :mod:`.device.substitutes` replaces."""

    @classmethod
    def backend_str(cls) -> str:
        return accelerator.current().backend

    @classmethod
    def _init_pg(cls, rank: int, world_size: int, rdvz_file: str) -> None:
        device = accelerator.current()
        device.bind(rank)
        substitutes.install(device)
        super()._init_pg(rank, world_size, rdvz_file)


@contextlib.contextmanager
def _same_groups(assignment: Assignment) -> Iterator[None]:
    """Report the process groups that a test has left open. If the class' own group is gone, run no further test.

    They stay open: torch caches what it has computed for a mesh, and uses it and its groups for an equal one.
    """
    before = list(c10d._world.pg_map)
    yield
    assignment.meet()
    if any(group not in c10d._world.pg_map for group in before):
        assignment.name_leak("destroyed the process group of the class")
        assignment.leave()
    left = [group for group in c10d._world.pg_map if group not in before]
    meant = [group for group in left if not group.group_desc.startswith(_MESH)]  # a device mesh cannot be closed
    if meant:
        assignment.name_leak(f"left {len(meant)} process group{'s' if len(meant) > 1 else ''} open")
