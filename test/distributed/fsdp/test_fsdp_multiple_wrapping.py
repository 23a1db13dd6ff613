"""A module that ran under one FSDP1 root can be wrapped by a second root. A root that ran cannot be wrapped."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.installed_torch import torch_names


class InnerModel(nn.Module):
    """One layer, (5) to (5), in FSDP. The module itself is not in FSDP."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(FSDP(nn.Linear(5, 5).to(device), device_id=torch.device(device)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class TestMultipleWrapping(FewRanksTest):
    def _train_under_root(self, inner: InnerModel, device: str) -> FSDP:
        """Wrap the module in a root, train it for three steps, and return the root."""
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
        """The second root computes with the parameters that the first one trained."""
        inner = InnerModel(device)
        first = self._train_under_root(inner, device)
        x = torch.rand(1, 5, device=device)
        output = first(x)
        second = FSDP(inner, device_id=torch.device(device))
        self.assertEqual(second(x), output)

    @skip_if_lt_x_gpu(2)
    def test_second_root_owns_shared_state(self, device):
        """After its first forward, the second root shares streams and execution order with the inner instance."""
        inner = InnerModel(device)
        first = self._train_under_root(inner, device)
        (unit,) = inner.layers
        self._assert_shared(unit, first)
        second = FSDP(inner, device_id=torch.device(device))
        second(torch.rand(1, 5, device=device))
        self._assert_shared(unit, second)
        self.assertIsNot(internals.execution_order(unit), internals.execution_order(first))
        self.assertEqual((internals.is_root(unit), internals.is_root(second)), (False, True))

    def _assert_shared(self, unit: FSDP, root: FSDP) -> None:
        self.assertIs(internals.execution_order(unit), internals.execution_order(root))
        streams = ("default", "unshard", "pre_unshard", "post_backward", "all_reduce")
        for name in ("_free_event_queue", *(f"_{stream}_stream" for stream in streams)):
            self.assertIs(torch_names.attribute(unit, name), torch_names.attribute(root, name), msg=name)

    @skip_if_lt_x_gpu(2)
    def test_training_through_second_root(self, device):
        """Steps through the second root match a local copy with averaged gradients."""
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
            average_gradients(reference)
            for optim in optims:
                optim.step()
            with FSDP.summon_full_params(second):
                self.assertEqual(list(second.parameters()), list(reference.parameters()), rtol=1e-5, atol=1e-5)

    @skip_if_lt_x_gpu(2)
    def test_root_that_ran_is_refused(self, device):
        """An instance that ran as a root cannot run inside another root."""
        first = self._train_under_root(InnerModel(device), device)
        second = FSDP(first, device_id=torch.device(device))
        with self.assertRaisesRegex(AssertionError, "Non-root FSDP instance's `_is_root` should not have been set yet"):
            second(torch.rand(1, 5, device=device))


instantiate_device_type_tests(TestMultipleWrapping, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
