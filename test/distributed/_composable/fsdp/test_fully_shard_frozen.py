"""FSDP2 with frozen parameters, in parameter groups with trainable ones and in groups of their own.

Only the gradients of trainable parameters are reduced. Each group reduces during the backward, not at its end. The set
of frozen parameters may change between iterations.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, check_sharded_parity, patch_register_post_backward_hook_backward
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import ShardAdamW
from torch_fsdp_tests.fsdp.references import average_gradients, full, replicated
from torch_fsdp_tests.fsdp.training import optimizers, shard_each, take_step
from torch_fsdp_tests.installed_torch import torch_facts

ITERATIONS = 4  # the first has no gradients to clear; the others clear them with both values of set_to_none


def is_bias(name: str) -> bool:
    return name.endswith("bias")


def train_only(model: nn.Module, trainable: Callable[[str], bool]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(trainable(name))


class MultiForward(nn.Module):
    """Three times in a row, calls a trainable and a frozen layer, and the trainable one again under ``no_grad``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.layer_0 = nn.Linear(5, 5, device=device)
        self.layer_no_grad = nn.Linear(5, 5, device=device).requires_grad_(False)
        self.layer_with_grad = nn.Linear(5, 5, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer_0(x)
        for _ in range(3):
            x = self.layer_no_grad(torch.relu(self.layer_with_grad(x)))
            with torch.no_grad():
                x += torch.relu(self.layer_with_grad(x))
        return x


class TestFullyShardFrozen(FSDPTest):
    world_size = at_most(4)
    power_of_two_ranks = True

    @contextlib.contextmanager
    def _counted_post_backwards(self) -> Iterator[list[int]]:
        """Yield a list with one entry for each post-backward that autograd runs. Those that run in the final callback
        are not counted.
        """
        calls: list[int] = []
        original = internals.fsdp2_param_group.RegisterPostBackwardFunction.backward

        def backward(*args: Any) -> Any:
            calls.append(1)
            return original(*args)

        with patch_register_post_backward_hook_backward(backward):
            yield calls

    def _inputs(self, seed: int, *shape: int, requires_grad: bool = False) -> torch.Tensor:
        """Numbers that differ by rank and seed, and do not depend on the parameters."""
        manual_seed(100 * seed + self.rank + 1)
        return torch.randn(shape, device=self.device, requires_grad=requires_grad)

    def _check_step(
        self, ref_model: nn.Module, model: nn.Module, optims: list[torch.optim.Optimizer], iteration: int, dim: int
    ) -> None:
        """Check that both models have the same loss, gradients, and parameters after a step."""
        inp = self._inputs(iteration, 8, dim)
        losses = []
        for module, optim in zip((ref_model, model), optims):
            optim.zero_grad(set_to_none=iteration % 2 == 0)
            losses.append(module(inp).sum())
            losses[-1].backward()
            optim.step()
        self.assertEqual(losses[1], losses[0])
        check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(
        reshard_after_forward=[False, True, 2],
        use_activation_checkpointing=[False, True],
        freeze_after_init=[False, True],
    )
    def test_train_mixed_requires_grad_per_group(
        self, reshard_after_forward, use_activation_checkpointing, freeze_after_init
    ):
        """Biases are trainable and weights frozen. Only the biases are reduced."""
        dim = 32
        manual_seed(42)
        model = nn.Sequential(*(MLP(dim) for _ in range(3)))
        if not freeze_after_init:
            train_only(model, is_bias)
        ref_model = replicated(model, find_unused_parameters=freeze_after_init)
        for mlp in model:
            if use_activation_checkpointing:
                internals.composable.checkpoint(mlp)
            fully_shard(mlp, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        optims = optimizers(ref_model, model)
        if freeze_after_init:
            for module in (ref_model, model):
                train_only(module, is_bias)
        numel = (4 * dim + dim) // self.world_size
        start = {name: param.detach().clone() for name, param in ref_model.named_parameters()}
        with self._counted_post_backwards() as post_backwards, recorded() as calls:
            for iteration in range(ITERATIONS):
                self._check_step(ref_model, model, optims, iteration, dim)
                self.assertEqual([output.numel() for output in calls.values("reduce_scatter", "output")], [numel] * 3)
                self.assertEqual(len(post_backwards), 2)  # the input of the first MLP has no gradient
                calls.clear()
                post_backwards.clear()
        for name, param in ref_model.named_parameters():
            self.assertEqual(torch.equal(param, start[name]), not is_bias(name), name)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[False, True, 2], unfreeze_params=[False, True])
    def test_train_mixed_requires_grad_across_groups(self, reshard_after_forward, unfreeze_params):
        """Frozen groups alternate with trainable ones. With ``unfreeze_params`` all are trainable in the last one of
        three iterations.
        """
        manual_seed(42)
        modules: list[nn.Module] = []
        for _ in range(6):
            modules += [nn.Linear(32, 32, device=self.device), nn.ReLU()]
        model = nn.Sequential(*modules)
        ref_model = copy.deepcopy(model)
        for linear in list(model)[::2]:
            fully_shard(linear, reshard_after_forward=reshard_after_forward)
        optims = optimizers(ref_model, model)
        frozen = ("0.", "4.", "8.")
        for module in (ref_model, model):
            train_only(module, lambda name: not name.startswith(frozen))
        inp, ref_losses = self._inputs(0, 2, 32), []
        with self._counted_post_backwards() as post_backwards:
            for iteration in range(3):
                if unfreeze_params and iteration == 2:
                    for module in (ref_model, model):
                        train_only(module, lambda name: True)
                losses = []
                for module, optim in zip((ref_model, model), optims):
                    optim.zero_grad()
                    with torch.set_grad_enabled(iteration != 1):
                        losses.append(module(inp).sum())
                    if iteration == 1:
                        continue
                    losses[-1].backward()
                    if module is ref_model:
                        average_gradients(ref_model)
                    optim.step()
                self.assertEqual(losses[1], losses[0])
                ref_losses += losses[:1] if iteration != 1 else []  # the second iteration has no step
                for linear in list(model)[::2]:
                    linear.reshard()  # it may still be unsharded if no backward has run through it
                check_sharded_parity(self, ref_model, model)
                # The first layer's input needs no gradient, nor does the second's while the first layer is frozen.
                expected = 0 if iteration == 1 else 5 if unfreeze_params and iteration == 2 else 4
                self.assertEqual(len(post_backwards), expected)
                post_backwards.clear()
        check_losses(ref_losses)
        self.assertEqual(model[0].weight.grad is not None, unfreeze_params)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, 2])
    def test_multi_forward_mixed_requires_grad(self, reshard_after_forward):
        manual_seed(42)
        model = MultiForward(self.device)
        ref_model = replicated(model)
        shard_each((*model.children(), model), reshard_after_forward=reshard_after_forward)
        optims = optimizers(ref_model, model)
        for iteration in range(ITERATIONS):
            self._check_step(ref_model, model, optims, iteration, dim=5)

    def _mixed_model(self, **kwargs: Any) -> tuple[nn.Sequential, nn.Sequential]:
        """A plain and a sharded model of three MLPs: one with trainable biases, one trainable, one frozen."""
        manual_seed(42)
        ref_model = nn.Sequential(*(MLP(6, self.device, dim_multiplier=2) for _ in range(3)))
        for mlp in ref_model:
            nn.init.uniform_(mlp.out_proj.bias, 0.5, 1.0)  # to keep most ReLUs active
        train_only(ref_model, lambda name: name.startswith("1.") or (name.startswith("0.") and is_bias(name)))
        model = copy.deepcopy(ref_model)
        shard_each((*model, model), **kwargs)
        return ref_model, model

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, 2])
    def test_frozen_parameters_stay(self, reshard_after_forward):
        """In ten steps a frozen parameter gets no gradient and stays bitwise equal."""
        ref_model, model = self._mixed_model(reshard_after_forward=reshard_after_forward)
        optim = ShardAdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        start = {name: param.to_local().clone() for name, param in model.named_parameters()}
        trainable = {name for name, param in ref_model.named_parameters() if param.requires_grad}
        self.assertEqual(len(trainable), 6)
        for iteration in range(10):
            model(self._inputs(iteration, 4, 6)).sum().backward()
            for name, param in model.named_parameters():
                self.assertEqual(param.grad is not None, name in trainable, name)
                self.assertEqual(param.requires_grad, name in trainable, name)
            optim.step()
            optim.zero_grad(set_to_none=iteration % 2 == 0)
        model.unshard()  # unsharded frozen parameters have no gradients either
        for name, param in model.named_parameters():
            self.assertTrue(name in trainable or param.grad is None, name)
        model.reshard()
        for name, param in model.named_parameters():
            unchanged = torch.equal(param.to_local(), start[name])
            self.assertEqual(unchanged, name not in trainable or param.to_local().numel() == 0, name)

    @skip_if_lt_x_gpu(4)
    @subtests(reshard_after_forward=[True, False], input_requires_grad=[False, True])
    def test_communication(self, reshard_after_forward, input_requires_grad):
        """A frozen group is unsharded in forward and in backward, for the gradient of its input, but never reduces.

        The number of post-backwards that autograd runs depends on whether the model's input requires a gradient.
        """
        ref_model, model = self._mixed_model(reshard_after_forward=reshard_after_forward)
        for iteration in range(3):
            inp, ref_inp = (self._inputs(iteration, 4, 6, requires_grad=input_requires_grad) for _ in range(2))
            with (
                self._counted_post_backwards() as post_backwards,
                recorded() as calls,
                CommDebugMode() as communication,
            ):
                model(inp).square().sum().backward()
            # Numels in the order of the backward. Six rows are padded to eight, a multiple of the world size.
            biases = 12 + 8
            expected = [(12 * 6 + 8 * 12 + biases) // 4, biases // 4]
            self.assertEqual([output.numel() for output in calls.values("reduce_scatter", "output")], expected)
            self.assertEqual(len(post_backwards), 3 if input_requires_grad else 2)
            counts = {str(op): count for op, count in communication.get_comm_counts().items()}
            gathers = 6 if reshard_after_forward else 3
            self.assertEqual(counts, {"c10d._allgather_base_": gathers, "c10d._reduce_scatter_base_": 2})
            if not reshard_after_forward:
                for mlp in model:
                    self.assertTrue(internals.group_of(mlp).is_sharded)
            ref_model(ref_inp).square().sum().backward()
            average_gradients(ref_model)
            check_sharded_parity(self, ref_model, model)
            self.assertEqual(inp.grad, ref_inp.grad)
            for module in (ref_model, model):
                module.zero_grad()

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, 2], input_requires_grad=[False, True])
    def test_toggle_every_iteration(self, reshard_after_forward, input_requires_grad):
        """If the set of trainable parameters changes in each iteration, exactly these parameters are reduced."""
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)).to(self.device)
        model = fully_shard(copy.deepcopy(ref_model), reshard_after_forward=reshard_after_forward)
        optims = optimizers(ref_model, model)
        numels = {"0.weight": 32, "0.bias": 8, "2.weight": 32, "2.bias": 4}
        choices = [("0.bias", "2.bias"), tuple(numels), ("2.weight",), ("0.bias", "2.bias"), (), ("0.weight",)]
        with recorded() as calls:
            for iteration, trainable in enumerate(choices):
                for module in (ref_model, model):
                    train_only(module, trainable.__contains__)
                for seed in (2 * iteration, 2 * iteration + 1):  # the second accumulates gradients
                    for module in (ref_model, model):
                        output = module(self._inputs(seed, 2, 4, requires_grad=input_requires_grad))
                        if output.requires_grad:
                            output.square().sum().backward()
                model.reshard()  # it may still be unsharded if no backward has run through it
                expected = [sum(numels[name] for name in trainable) // self.world_size] * 2 if trainable else []
                self.assertEqual(
                    [output.numel() for output in calls.values("reduce_scatter", "output")], expected, may_be="empty"
                )
                calls.clear()
                average_gradients(ref_model)
                check_sharded_parity(self, ref_model, model)
                actual = {name for name, param in model.named_parameters() if param.grad is not None}
                self.assertEqual(actual, set(trainable), may_be="empty")
                take_step(optims)
            check_sharded_parity(self, ref_model, model)

    def _test_requires_grad(self, reshard_after_forward: bool | int, shows: torch_defect = NO_DEFECT) -> None:
        """``requires_grad`` of a parameter is the same in each state of its group: unsharded, resharded after forward,
        and sharded. It may change between iterations.

        ``shows`` is a known defect of ``requires_grad`` of a frozen parameter after forward.
        """
        layer: Any = nn.Linear(4, 4, device=self.device)
        fully_shard(layer, reshard_after_forward=reshard_after_forward)
        seen: list[list[bool]] = []

        def look(*unused: Any) -> None:
            seen.append([param.requires_grad for param in layer.parameters()])

        layer.register_forward_hook(look, prepend=True)  # before FSDP reshards
        for trainable in ((True, False), (False, True), (True, True), (True, False)):
            for param, requires_grad in zip(layer.parameters(), trainable):
                param.requires_grad_(requires_grad)
            output = layer(self._inputs(0, 2, 4))
            look()
            output.sum().backward()
            look()
            layer.unshard()
            look()
            layer.reshard()
            after_forward = seen.pop(1)
            with shows if not all(trainable) else contextlib.nullcontext():
                self.assertEqual(after_forward, list(trainable))
            self.assertEqual(seen, [list(trainable)] * 3)
            seen.clear()

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_requires_grad_in_each_state(self, reshard_after_forward):
        self._test_requires_grad(reshard_after_forward)

    @skip_if_lt_x_gpu(2)
    def test_requires_grad_on_smaller_mesh(self):
        self._test_requires_grad(2, torch_defect("fsdp2_frozen_looks_trainable_on_smaller_mesh"))

    @needs(torch_facts.SHARDS_INTEGER_PARAMETERS)
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        dtype=[torch.int64, torch.int8, torch.bool, torch.complex64, torch.bfloat16],
        reshard_after_forward=[True, False, 2],
        shape=[(4,), (1, 4)],
    )
    def test_frozen_parameter_of_any_dtype(self, dtype, reshard_after_forward, shape):
        """A frozen parameter of any dtype has its full values in forward and after it, beside a trainable parameter."""
        layer: Any = nn.Linear(4, 4, bias=False, device=self.device)
        values = torch.arange(32, device=self.device).view(8, 4).remainder(5).to(dtype)
        layer.table = nn.Parameter(values.clone(), requires_grad=False)
        seen: list[torch.Tensor] = []
        layer.register_forward_hook(lambda module, args, output: seen.append(module.table.detach().clone()))
        mesh = make_mesh(*shape, names=("replicate", "shard")[-len(shape) :])
        fully_shard(layer, mesh=mesh, reshard_after_forward=reshard_after_forward)
        for _ in range(2):
            output = layer(self._inputs(0, 2, 4))
            self.assertEqual((layer.table.dtype, layer.table.requires_grad), (dtype, False))
            self.assertTrue(torch.equal(full(layer.table.detach()), values))
            output.sum().backward()
            self.assertIsNone(layer.table.grad)
            self.assertTrue(torch.equal(full(layer.table.detach()), values))
            self.assertTrue(torch.equal(seen.pop(), values))

    @skip_if_lt_x_gpu(2)
    def test_frozen_model_runs_under_a_transform(self):
        """A model whose parameter is frozen after a training step runs under ``vmap`` after another forward."""
        linear = nn.Linear(2, 2, bias=False, device=self.device)
        model = fully_shard(linear, reshard_after_forward=True)
        x = torch.ones(1, 2, device=self.device)
        model(x).sum().backward()
        model.weight.requires_grad_(False)
        with torch.no_grad():
            model(x)  # freezes the unsharded parameter, which a transform rejects
        self.assertEqual(torch.vmap(model)(x), x @ model.weight.full_tensor().T)


if __name__ == "__main__":
    run_tests()
