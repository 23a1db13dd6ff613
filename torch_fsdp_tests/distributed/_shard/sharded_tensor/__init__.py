"""The test case of ``ShardedTensor``, whose ranks have a process group and can call each other (RPC)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed import rpc

from torch_fsdp_tests.common_distributed import MultiProcessTestCase, requires
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "TEST_GPU_NUM",
    "ShardedTensorTestBase",
    "with_comms",
]

__getattr__ = upstream_names.complete(__name__)

__unittest = True

TEST_GPU_NUM = 4
_OF_EVERY_MACHINE = ("gloo", "mpi")


class ShardedTensorTestBase(MultiProcessTestCase):
    """Every test runs in ``world_size`` rank processes. :func:`with_comms` makes its process group."""

    world_size = TEST_GPU_NUM

    def setUp(self) -> None:
        super().setUp()
        self._spawn_processes()

    def init_pg(self, backend: str = "nccl") -> None:
        """Make the default group, and bind the rank to its device if the backend is that of the device under test."""
        device = accelerator.current()
        if backend == device.backend:
            device.bind(self.rank)
        self._init_default_group(backend)

    def init_rpc(self) -> None:
        """Make RPC between all ranks, which are called ``worker0`` and so on. Each sends tensors of its device."""
        options = rpc.TensorPipeRpcBackendOptions(
            init_method=f"file://{self.file_name}", rpc_timeout=self.collective_timeout, _transports=["shm", "uv"]
        )
        device = accelerator.current()
        for peer in range(int(self.world_size)):
            if not device.is_cpu:
                options.set_device_map(f"worker{peer}", {device.device(self.rank): device.device(peer)})
        rpc.init_rpc(f"worker{self.rank}", rank=self.rank, world_size=int(self.world_size), rpc_backend_options=options)

    def init_comms(self, init_rpc: bool = True, backend: str = "nccl") -> None:
        """Make RPC, if requested, and the default group."""
        if init_rpc:
            self.init_rpc()
        self.init_pg(backend)

    def destroy_comms(self, destroy_rpc: bool = True) -> None:
        """Wait for all ranks, and end RPC and the default group."""
        dist.barrier()
        if destroy_rpc:
            rpc.shutdown()
        dist.destroy_process_group()

    def assert_sharded_tensor_equal(self, st1: Any, st2: Any) -> None:
        """Fail unless two ``ShardedTensor`` have the same local shards, metadata and number of remote shards."""
        for of in ("metadata", "sharding_spec"):
            self.assertEqual(getattr(st1, of)(), getattr(st2, of)())
        first, second = st1.local_shards(), st2.local_shards()
        self.assertEqual([shard.metadata for shard in first], [shard.metadata for shard in second])
        self.assertEqual([shard.tensor for shard in first], [shard.tensor for shard in second])
        self.assertEqual(len(st1.remote_shards()), len(st2.remote_shards()))


def with_comms(
    func: Callable[..., Any] | None = None, init_rpc: bool = True, backend: str = "nccl"
) -> Callable[..., Any]:
    """Run a test method between ``init_comms`` and ``destroy_comms`` of its test case.

    It works with and without parentheses. As with upstream's, the test skips if the backend is that of another
    accelerator than the one under test. After an exception the harness ends the group.
    """
    if func is None:
        return functools.partial(with_comms, init_rpc=init_rpc, backend=backend)

    def reason() -> str | None:
        under_test = accelerator.current().backend
        if backend in (under_test, *_OF_EVERY_MACHINE):
            return None
        return f"needs the backend {backend}, but {under_test} is under test"

    @functools.wraps(func)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.init_comms(init_rpc=init_rpc, backend=backend)
        returned = func(self, *args, **kwargs)
        self.destroy_comms(destroy_rpc=init_rpc)
        return returned

    return requires(reason)(wrapper)
