"""The test case of ``ShardedTensor``: its group, its RPC, and its comparison."""

from __future__ import annotations

import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed._shard.sharded_tensor as st
from samples import under_test
from torch.distributed import rpc
from torch.distributed._shard.sharding_spec import ChunkShardingSpec

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device.accelerator import Accelerator
from torch_fsdp_tests.distributed._shard.sharded_tensor import TEST_GPU_NUM, ShardedTensorTestBase, with_comms


class TestComms(TestCase):
    """Without it, a test for another accelerator could run, or a tensor be sent to another rank's device."""

    def test_another_accelerator_is_a_skip(self):
        body, case = mock.Mock(__name__="body"), mock.Mock()
        with under_test(Accelerator("foo", "foos", 2, 2)):
            with_comms(init_rpc=False, backend="foos")(body)(case, "argument")
            with self.assertRaisesRegex(unittest.SkipTest, "needs the backend nccl, but foos is under test"):
                with_comms(body)(case)
        begin, end = mock.call.init_comms(init_rpc=False, backend="foos"), mock.call.destroy_comms(destroy_rpc=False)
        self.assertEqual(case.method_calls, [begin, end])
        body.assert_called_once_with(case, "argument")

    def test_a_device_is_mapped_to_that_of_the_peer(self):
        cuda = Accelerator("cuda", "nccl", 4, 4, frozenset({"device_index"}))
        case = mock.Mock(rank=1, world_size=4, file_name="/file", collective_timeout=7)
        with under_test(cuda), mock.patch.object(rpc, "init_rpc") as init_rpc:
            ShardedTensorTestBase.init_rpc(case)
        options = init_rpc.call_args.kwargs["rpc_backend_options"]
        own = torch.device("cuda", 1)
        maps = {f"worker{peer}": {own: torch.device("cuda", peer)} for peer in range(4)}
        self.assertEqual((options.device_maps, options.rpc_timeout), (maps, 7))


class TestRanks(ShardedTensorTestBase):
    """Without it, an upstream test of ``ShardedTensor`` could lack its group or RPC, or compare nothing."""

    def _sharded(self, size: int = 8, filled: int = 0) -> st.ShardedTensor:
        placements = [f"rank:{rank}/cpu" for rank in range(TEST_GPU_NUM)]  # gloo has no other device
        made = st.zeros(ChunkShardingSpec(dim=0, placements=placements), size, 2, init_rrefs=True)
        made.local_tensor().fill_(self.rank + filled)
        return made

    @with_comms(init_rpc=False, backend="gloo")
    def test_group(self):
        self.assertEqual((dist.get_rank(), dist.get_world_size(), dist.get_backend()), (self.rank, 4, "gloo"))
        self.assertFalse(rpc.api._is_current_rpc_agent_set())

    @with_comms(backend="gloo")
    def test_calls_and_comparisons(self):
        peer = (self.rank + 1) % self.world_size
        dist.barrier()  # RPC starts before the group, so a fast rank could call one that has no group yet
        self.assertEqual(rpc.rpc_sync(f"worker{peer}", dist.get_rank), peer)
        first = self._sharded()
        self.assert_sharded_tensor_equal(first, self._sharded())
        for other in (self._sharded(filled=1), self._sharded(size=12)):
            with self.assertRaises(AssertionError):
                self.assert_sharded_tensor_equal(first, other)

    @with_comms
    def test_the_usual_backend(self):
        self.assertEqual(dist.get_backend(), "nccl")


if __name__ == "__main__":
    run_tests()
