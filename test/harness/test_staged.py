"""The staged backend, which moves tensors of a device through the host. Here it takes CPU tensors for a device's."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from samples import Processes
from test_multi_threaded_pg import every_case, objects

from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import staged


class TestStaged(Processes):
    """Without it, ranks that share a device could get wrong results, or results before they wait for them."""

    world_size = 4

    def over(self, backend: str, body: Callable[[int, int], Any]) -> Any:
        store = dist.FileStore(f"{self.file_name}-{backend}", self.world_size)
        dist.init_process_group(backend, rank=self.rank, world_size=self.world_size, store=store)
        try:
            with mock.patch.object(staged, "_is_on_host", lambda tensor: False):
                return body(self.rank, self.world_size)
        finally:
            dist.destroy_process_group()

    def test_every_collective_as_in_gloo(self):
        of_gloo, of_staged = self.over("gloo", every_case), self.over("staged", every_case)
        self.assertGreater(len(of_gloo), 400)
        self.assertEqual(of_staged.keys(), of_gloo.keys())
        for key, expected in of_gloo.items():
            self.assertEqual(of_staged[key], expected, msg=str(key))

    def test_objects(self):
        self.assertEqual(self.over("staged", objects), self.over("gloo", objects))

    def test_mean(self):
        """gloo has no ``ReduceOp.AVG``."""

        def body(rank: int, size: int) -> None:
            part, whole = torch.zeros(2), torch.arange(2.0 * size) + rank
            dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.AVG)
            dist.all_reduce(whole, dist.ReduceOp.AVG)
            expected = torch.arange(2.0 * size) + (size - 1) / 2
            self.assertEqual([whole, part], [expected, expected.view(size, 2)[rank]])

        self.over("staged", body)

    def test_ranks_that_send_to_each_other(self):
        """Also if all ranks send before they receive."""

        def body(rank: int, size: int) -> None:
            own, other = torch.full((3,), float(rank)), torch.zeros(3)
            after, before = (rank + 1) % size, (rank - 1) % size
            requests = [dist.P2POp(dist.isend, own, after), dist.P2POp(dist.irecv, other, before)]
            for work in dist.batch_isend_irecv(requests):
                work.wait()
            self.assertEqual(other, torch.full((3,), float(before)))
            if rank == 0:
                self.assertEqual({dist.recv(other) for _ in range(1, size)}, set(range(1, size)))
            else:
                dist.send(own, 0)

        self.over("staged", body)

    def test_result_is_there_after_the_wait(self):
        def body(rank: int, size: int) -> None:
            output, own = torch.zeros(size), torch.ones(1)
            work = dist.all_gather_into_tensor(output, own, async_op=True)
            dist.barrier()
            self.assertEqual(output, torch.zeros(size))
            own.fill_(5)  # a rank may change its input at once
            work.wait()
            self.assertEqual(output, torch.ones(size))
            output.zero_()
            work.wait()  # writes nothing again
            self.assertEqual(output, torch.zeros(size))

        self.over("staged", body)


if __name__ == "__main__":
    run_tests()
