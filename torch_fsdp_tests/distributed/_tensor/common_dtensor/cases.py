"""Test cases for DTensor: ranks with a device mesh."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from torch_fsdp_tests.common_distributed import (
    DeviceContinuousTest,
    MultiProcessTestCase,
    MultiThreadedTestCase,
    RankTestCase,
    at_most,
    requires,
)
from torch_fsdp_tests.device import accelerator, substitutes

from .converter import DTensorConverter

__unittest = True

MOST_DEVICES = 4  # as upstream: 4 ranks are enough

Test = Callable[..., Any]
Result = TypeVar("Result")


def num_devices() -> int:
    """The default world size of a test: that of the device under test, but at most 4."""
    return min(MOST_DEVICES, accelerator.current().ranks)


def _get_device_type(world_size: int) -> str:
    """The type of the device under test. With too few devices for so many ranks, upstream returns ``cpu``."""
    return accelerator.current().type


def reduce_local_int(val: Any, func: Callable[[Mapping[int, int]], Result]) -> Result:
    """Call ``func`` with the numbers by rank that a ``torch.SymInt`` of torch's local tensors represents."""
    return func(val.node._local_ints)


def skip_unless_torch_gpu(method: Test) -> Test:
    """Skip unless there is room for the default number of ranks. Unlike upstream's, accepts the CPU."""
    return requires(lambda: accelerator.current().lacks_room_for(num_devices()))(method)


class DTensorTestMixin(RankTestCase):
    """What all DTensor test cases share."""

    world_size: Any

    @property
    def is_local_tensor_enabled(self) -> bool:
        """Whether one process simulates all ranks. Always False here."""
        return False

    @property
    def device_type(self) -> str:
        """The type of the device under test. With too few devices, upstream uses the CPU; here the test skips."""
        return accelerator.current().type

    def build_device_mesh(self) -> DeviceMesh:
        """A new one-dimensional mesh of all ranks."""
        return init_device_mesh(self.device_type, (int(self.world_size),))

    @functools.cached_property
    def mesh(self) -> DeviceMesh:
        """The mesh of :meth:`build_device_mesh`, which is built once per test. A test may assign its own."""
        return self.build_device_mesh()

    def init_manual_seed_for_rank(self) -> None:
        """Let each rank draw other random numbers."""
        torch.manual_seed(self.rank)

    def _test_op_on_dtensor(self, op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Fail unless the operator gives the same for DTensors and full tensors. All outputs must be DTensors."""

        def full(value: Any) -> Any:
            return value.full_tensor().detach().clone() if isinstance(value, DTensor) else value

        expected = op_call(*tree_map(full, args), **tree_map(full, kwargs))
        results = tree_leaves(op_call(*args, **kwargs))
        self.assertEqual([each.full_tensor() for each in results], tree_leaves(expected))

    def _test_op(self, mesh: DeviceMesh, op_call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Fail unless the operator gives the same for all ways to distribute its arguments over the mesh."""
        expected = tree_leaves(op_call(*args, **kwargs))
        converter = DTensorConverter(mesh, args, kwargs)
        for d_args, d_kwargs in converter:
            self.assertTrue(converter.successful(), "DTensor does not support the arguments")
            results = tree_leaves(op_call(*d_args, **d_kwargs))
            self.assertEqual([each.full_tensor() for each in results], expected)


class DTensorTestBase(DTensorTestMixin, MultiProcessTestCase):
    """Every test runs in ``world_size`` rank processes. :func:`with_comms` makes its process group.

    ``world_size`` is that of the device under test, at most 4. As with ``FSDPTest``, a device without a runtime of
    its own gets the substitutes of :mod:`torch_fsdp_tests.device.substitutes`.
    """

    world_size = at_most(MOST_DEVICES)

    @property
    def backend(self) -> str:
        """The backend of the process group."""
        return accelerator.current().backend

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_pg(self, eager_init: bool, backend: str | None = None) -> None:
        """Make the default group with :attr:`backend` or the given one. ``eager_init`` connects its ranks at once."""
        device = accelerator.current()
        own_device = device.bind(self.rank)
        substitutes.install(device)
        device_id = own_device if eager_init and own_device.index is not None else None
        self._init_default_group(self.backend if backend is None else backend, device_id=device_id)

    def destroy_pg(self, device_id: int | None = None) -> None:
        """Wait for all ranks, over the given device or this rank's device, and destroy the default group."""
        if device_id is None:
            device_id = accelerator.current().device(self.rank).index
        dist.barrier(device_ids=None if device_id is None else [device_id])
        dist.destroy_process_group()


def with_comms(eager_init: Test | bool = False, backend: str | None = None) -> Any:
    """Run a test method between ``init_pg`` and ``destroy_pg`` of its test case; with arguments or without parentheses.

    A test case without ``init_pg`` has its group already. After an exception the harness ends the group, because the
    other ranks may be in a collective.
    """

    def decorator(func: Test) -> Test:
        @functools.wraps(func)
        def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
            if not hasattr(self, "init_pg"):
                return func(self, *args, **kwargs)
            self.init_pg(eager_init is True, backend)
            returned = func(self, *args, **kwargs)
            self.destroy_pg()
            return returned

        return wrapper

    return decorator(eager_init) if callable(eager_init) else decorator


class DTensorOpTestBase(DTensorTestMixin, MultiThreadedTestCase):
    """Like :class:`DTensorTestBase`, but the ranks are threads, whose group exists already."""

    world_size = at_most(MOST_DEVICES)

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()


class DTensorContinuousTestBase(DTensorTestMixin, DeviceContinuousTest):
    """Like :class:`DTensorTestBase`, but the ranks and their process group stay for all tests of the class."""

    device_type = DTensorTestMixin.device_type  # type: ignore[assignment]  # upstream's is also a property here
