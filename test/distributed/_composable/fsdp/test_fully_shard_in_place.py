"""In-place operations on inputs and outputs of ``fully_shard`` modules, and losses of activations from inside them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.training import TrainingMixin, loss_of

OPERATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "scale": lambda output: output.div_(2),
    "mask": lambda output: output.masked_fill_(output > 0.5, 0.25),
    "assign": lambda output: output.index_fill_(0, torch.tensor([0], device=output.device), 0.5),
}


class Head(nn.Module):
    """Returns a view, or a tensor that is not a view. Backward needs the weight of the second layer."""

    def __init__(self, is_view: bool) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.is_view = is_view

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.layers(x)
        return output.view(2, 2, 4) if self.is_view else output


class Changed(nn.Module):
    """Applies an operation to the output of its first module, and passes the result on."""

    def __init__(self, first: nn.Module, operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.operation, self.second = first, operation, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.operation(self.first(x)))


class TestInPlace(TrainingMixin, FSDPTest):
    def _check_gradients(
        self, plain: nn.Module, model: nn.Module, loss: Callable[[nn.Module, torch.Tensor], torch.Tensor]
    ) -> None:
        """Run two backwards. The current sharded parameters of ``model`` must get the mean gradients of all ranks."""
        params = dict(model.named_parameters())
        for seed in range(2):
            x = uniform(4, 4, seed=10 * seed + self.rank)
            for each in (plain, model):
                loss(each, x).backward()
        average_gradients(plain)
        for name, param in plain.named_parameters():
            if isinstance(params[name], DTensor) and param.grad is not None:
                self.assertIsNotNone(params[name].grad, name)
                self.assertEqual(full(params[name].grad), param.grad, msg=name)

    @skip_if_lt_x_gpu(2)
    @subtests(with_root=[True, False], operation=list(OPERATIONS), is_view=[True, False], reshards=[True, False])
    def test_output_changed_in_place(self, with_root, operation, is_view, reshards):
        """After an in-place operation on a module's output, backward still unshards and reduces."""
        plain = filled(Changed(Head(is_view), OPERATIONS[operation])).to(self.device)
        model = copy.deepcopy(plain)
        for module in (model.first, model)[: 1 + with_root]:
            fully_shard(module, reshard_after_forward=reshards)
        loses_hook = is_view and (reshards or not with_root)
        with torch_defect("fsdp2_in_place_change_of_output_drops_backward", when=loses_hook):
            self._check_gradients(plain, model, lambda each, x: loss_of(each(x)))

    @skip_if_lt_x_gpu(2)
    @subtests(is_view=[True, False], reshards=[True, False])
    def test_output_of_root_changed_in_place(self, is_view, reshards):
        """The same holds if only the root is sharded, as in ``logits.div_(temperature)``."""
        plain = filled(Head(is_view)).to(self.device)
        model = fully_shard(copy.deepcopy(plain), reshard_after_forward=reshards)
        with torch_defect("fsdp2_in_place_change_of_output_drops_backward", when=is_view):
            self._check_gradients(plain, model, lambda each, x: loss_of(each(x).div_(2)))

    @skip_if_lt_x_gpu(2)
    @subtests(in_place=[True, False], input_requires_grad=[True, False])
    def test_input_changed_in_place(self, in_place, input_requires_grad):
        """The first operation of a module may be in place."""
        block = nn.Sequential(nn.ReLU(inplace=in_place), nn.Linear(4, 4))
        plain = filled(nn.Sequential(nn.Linear(4, 4), block)).to(self.device)
        plain[0].requires_grad_(input_requires_grad)
        model = copy.deepcopy(plain)
        for module in (model[1], model):
            fully_shard(module)
        with torch_defect("fsdp2_in_place_change_of_input_raises", when=in_place and input_requires_grad):
            self._check_gradients(plain, model, lambda each, x: loss_of(each(x)))

    @skip_if_lt_x_gpu(2)
    @subtests(uses_output=[True, False], reshards=[True, False])
    def test_loss_of_inner_activations(self, uses_output, reshards):
        """A loss may use activations that a forward hook has collected inside a module."""
        plain = filled(nn.Sequential(nn.Linear(4, 4), nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))))).to(
            self.device
        )
        model = copy.deepcopy(plain)
        for module in (model[1], model):
            fully_shard(module, reshard_after_forward=reshards)
        collected: list[torch.Tensor] = []
        for each in (plain, model):
            each[1][1].register_forward_hook(lambda module, args, output: collected.append(output))

        def loss(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            output = loss_of(each(x))
            return loss_of(collected.pop()) + (output if uses_output else 0)

        with torch_defect("fsdp2_loss_of_inner_activations_loses_gradients", when=not uses_output):
            self._check_gradients(plain, model, loss)


if __name__ == "__main__":
    run_tests()
