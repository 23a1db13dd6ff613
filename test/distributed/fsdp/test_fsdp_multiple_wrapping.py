"""A module that ran under one FSDP1 root may be wrapped by a second one; a root that ran may not."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests


class InnerModel(nn.Module):
    """One layer, (5) to (5), in FSDP; the module itself is not."""

    def __init__(self, device):
        super().__init__()
        self.layers = nn.Sequential(FSDP(nn.Linear(5, 5).to(device), device_id=torch.device(device)))

    def forward(self, x):
        return self.layers(x)


class TestMultipleWrapping(FSDPTest):
    @property
    def world_size(self):
        return accelerator.current().few_ranks

    def _train_under_root(self, inner, device):
        """Three steps through a root over the module; the root is returned."""
        torch.manual_seed(10 + self.rank)
        model = FSDP(inner, device_id=torch.device(device))
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optim.zero_grad()
            x = torch.rand(1, 5, device=device, requires_grad=True)
            model(x).sum().backward()
            optim.step()
        return model

    @skip_if_lt_x_gpu(2)
    def test_multiple_wrapping(self, device):
        """The second root computes with what the first one trained."""
        inner = InnerModel(device)
        first = self._train_under_root(inner, device)
        x = torch.rand(1, 5, device=device)
        output = first(x)
        second = FSDP(inner, device_id=torch.device(device))
        self.assertEqual(second(x), output)

    @skip_if_lt_x_gpu(2)
    def test_second_root_owns_shared_state(self, device):
        """Beyond upstream: after its first forward the second root's streams and order are those of the inner unit."""
        inner = InnerModel(device)
        first = self._train_under_root(inner, device)
        (unit,) = inner.layers
        shared = ("_exec_order_data", "_free_event_queue", "_unshard_stream", "_post_backward_stream")
        shared += ("_pre_unshard_stream", "_default_stream", "_all_reduce_stream")
        for name in shared:
            self.assertIs(getattr(unit, name), getattr(first, name), msg=name)
        second = FSDP(inner, device_id=torch.device(device))
        second(torch.rand(1, 5, device=device))
        for name in shared:
            self.assertIs(getattr(unit, name), getattr(second, name), msg=name)
        self.assertIsNot(unit._exec_order_data, first._exec_order_data)
        self.assertEqual((unit._is_root, second._is_root), (False, True))

    @skip_if_lt_x_gpu(2)
    def test_training_through_second_root(self, device):
        """Beyond upstream: steps through the second root are those of a local copy with averaged gradients."""
        inner = InnerModel(device)
        self._train_under_root(inner, device)
        reference = nn.Linear(5, 5).to(device)
        with FSDP.summon_full_params(inner), torch.no_grad():
            for mine, trained in zip(reference.parameters(), inner.parameters(), strict=True):
                mine.copy_(trained)
        second = FSDP(inner, device_id=torch.device(device))
        models = (reference, second)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in models]
        for _ in range(2):
            x = torch.rand(3, 5, device=device)
            for each, optim in zip(models, optims):
                optim.zero_grad()
                each(x).square().sum().backward()
            for param in reference.parameters():
                dist.all_reduce(param.grad)
                param.grad.div_(self.world_size)
            for optim in optims:
                optim.step()
            with FSDP.summon_full_params(second):
                self.assertEqual(list(second.parameters()), list(reference.parameters()), rtol=1e-5, atol=1e-5)

    @skip_if_lt_x_gpu(2)
    def test_root_that_ran_is_refused(self, device):
        """Beyond upstream: what ran as a root stays one, and no other root takes it in."""
        first = self._train_under_root(InnerModel(device), device)
        second = FSDP(first, device_id=torch.device(device))
        with self.assertRaisesRegex(AssertionError, "Non-root FSDP instance's `_is_root` should not have been set yet"):
            second(torch.rand(1, 5, device=device))


instantiate_device_type_tests(TestMultipleWrapping, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
