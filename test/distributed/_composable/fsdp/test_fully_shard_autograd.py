"""FSDP2 and autograd: losses that use a part of the outputs, containers of activations, and hooks on gradients.

In backward, FSDP runs from hooks on the tensors that enter and leave a module. If FSDP does not find a tensor, or the
loss does not use it, all gradients must still be right, and be reduced in time.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import needs, ranks_of, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import (
    MLP,
    DoubleLinear,
    FSDPTest,
    FSDPTestMultiThread,
    check_sharded_parity,
    patch_reduce_scatter,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average, full
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.training import check_parity, optimizers, replicate_each, shard_each, take_step
from torch_fsdp_tests.installed_torch import torch_facts

DIM = 24
ITERATIONS = 10


class NamedPair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Module(nn.Module):
    """Transforms one tensor of a container and returns it in a container of the same kind."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.lin1 = nn.Linear(dim, dim)
        self.lin2 = nn.Linear(dim, dim)
        self.relu = nn.ReLU()

    def _forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.relu(self.lin2(self.relu(self.lin1(x))))

    def forward(self, inputs: Any) -> Any:
        if isinstance(inputs, NamedPair):  # a named tuple is a tuple too
            return inputs._replace(x=self._forward(inputs.x))
        if isinstance(inputs, (list, tuple)):
            return type(inputs)([self._forward(inputs[0])])
        if isinstance(inputs, dict):
            return {"x": self._forward(inputs["x"])}
        raise NotImplementedError(f"a container of type {type(inputs).__name__}")


class ToContainerType(nn.Module):
    """Puts a tensor into a container. The second field of a named tuple has no gradient."""

    def __init__(self, container_type: type) -> None:
        super().__init__()
        self.container_type = container_type

    def forward(self, x: torch.Tensor) -> Any:
        if self.container_type is collections.namedtuple:
            return NamedPair(x, torch.ones_like(x))
        if self.container_type is dict:
            return {"x": x}
        return self.container_type([x])


class FromContainerType(nn.Module):
    """Takes the tensor out again, and checks that the kind of container has not changed."""

    def __init__(self, container_type: type) -> None:
        super().__init__()
        self.expected_type = NamedPair if container_type is collections.namedtuple else container_type

    def forward(self, container: Any) -> torch.Tensor:
        kind = type(container)
        assert kind is self.expected_type, kind
        return container["x"] if isinstance(container, dict) else container[0]


class Adapted(nn.Module):
    """Two layers of the same size. The argument says whether to use the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.adapter, self.body = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, use_adapter: bool) -> torch.Tensor:
        return self.body(self.adapter(x) if use_adapter else x)


class EndsEarly(nn.Module):
    """Two layers of the same size, of which the last one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.uses_last = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        return self.last(x) if self.uses_last else x


class AddsOne(nn.Linear):
    """A layer that may add one instead of using its weight."""

    is_used = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if self.is_used else x + 1


def to_one(output: torch.Tensor) -> torch.Tensor:
    """The squared distance to 1. With a sum of the outputs, ReLUs and all gradients would be zero after a few steps."""
    return (output - 1).square().sum()


class Head(nn.Module):
    """A layer that may ignore its second input."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        self.layer, self.uses_second = nn.Linear(DIM, DIM), uses_second

    def forward(self, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        return self.layer(first + second if self.uses_second else first)


class TwoInputs(nn.Module):
    """Two layers whose outputs are the inputs of a head."""

    def __init__(self, uses_second: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), Head(uses_second)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.first(x), self.second(x))


def _having_gradients(model: nn.Module) -> dict[str, bool]:
    """Whether each parameter has a gradient."""
    return {name: param.grad is not None for name, param in model.named_parameters()}


class Forces(nn.Module):
    """Differentiates an energy in its forward, and scales this derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1))
        self.scale = nn.Linear(DIM, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(self.energy(x).sum(), x)
        return self.scale(force)


class Empty(nn.Module):
    """A parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight.sum()


class TestFullyShardAutograd(FSDPTest):
    power_of_two_ranks = True

    @property
    def world_size(self) -> int:
        return ranks_of(self, 4)

    def _reduce_1d_partial_grads(self, module: nn.Module) -> None:
        """Turn the gradients of a sum over the global batch into the mean over ranks, which FSDP computes."""
        for param in module.parameters():
            if param.grad is not None:
                param.grad.div_(self.world_size)

    def _global_and_local_input(self, requires_grad: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
        """The global batch with two rows for each rank, and this rank's two rows."""
        rows = torch.rand((2 * self.world_size, DIM), device=self.device)
        mine = self._of_this_rank(rows).clone()
        return rows.requires_grad_(requires_grad), mine.requires_grad_(requires_grad)

    def _of_this_rank(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[2 * self.rank : 2 * self.rank + 2]

    def _check_gradients(self, ref_model: nn.Module, model: nn.Module, rows: torch.Tensor, mine: torch.Tensor) -> None:
        """Compare the gradients of parameters and inputs, and check that the backward has cleared its state.

        Gradients of parameters are means over ranks. Gradients of inputs are local and not divided.
        """
        check_sharded_parity(self, ref_model, model)
        if mine.requires_grad:
            self.assertEqual(mine.grad, self._of_this_rank(rows.grad))
        context = internals.comm_context(model)
        self.assertEqual(context.post_forward_order, [], may_be="empty")
        if torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS:
            self.assertEqual(context.reduce_scatter_states, [], may_be="empty")
        for group in internals.groups_of(model):
            self.assertEqual(internals.forward_positions(group), [], may_be="empty")

    def _check_loss(self, ref_loss: torch.Tensor, loss: torch.Tensor) -> None:
        """The sum of the ranks' losses must equal the loss of the reference, which gets all rows."""
        total = loss.detach().clone()
        dist.all_reduce(total)
        self.assertEqual(total, ref_loss.detach())

    def _replica(self, model: nn.Module) -> nn.Module:
        return copy.deepcopy(model).to(self.device)

    def _check_training(self, ref_model: nn.Module, model: nn.Module) -> None:
        """Train ten steps towards outputs of one. Compare gradients before each step."""
        start = [param.detach().clone() for param in ref_model.parameters()]
        optims = optimizers(ref_model, model)
        manual_seed(1)  # all ranks use the same rows
        for iteration in range(ITERATIONS):
            rows, mine = self._global_and_local_input()
            ref_loss, loss = to_one(ref_model(rows)), to_one(model(mine))
            ref_loss.backward()
            loss.backward()
            self._reduce_1d_partial_grads(ref_model)
            self._check_loss(ref_loss, loss)
            check_sharded_parity(self, ref_model, model)
            take_step(optims, set_to_none=bool(iteration % 2))
        check_sharded_parity(self, ref_model, model)
        self.assertFalse(all(map(torch.equal, start, ref_model.parameters())), "nothing was trained")

    @skip_if_lt_x_gpu(2)
    def test_unused_forward_output(self):
        self.run_subtests({"reshard_after_forward": [True, False, 2]}, self._test_unused_forward_output)

    def _test_unused_forward_output(self, reshard_after_forward: bool | int) -> None:
        manual_seed(42)
        model = DoubleLinear(dim=DIM, use_second_linear=True)
        ref_model = self._replica(model)
        fully_shard(model.lin1, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)  # lin2 belongs to the root
        ref_optim, optim = optimizers(ref_model, model)
        manual_seed(1)
        for iteration in range(ITERATIONS):
            rows, mine = self._global_and_local_input()
            losses = []
            for module, module_optim, inputs in ((ref_model, ref_optim, rows), (model, optim, mine)):
                first, second = module(inputs)
                losses.append(to_one(first * second if iteration < 3 else first))
                losses[-1].backward()
                if module is ref_model:
                    self._reduce_1d_partial_grads(ref_model)
                module_optim.step()
            self._check_loss(*losses)
            for module_optim in (ref_optim, optim):
                module_optim.zero_grad(set_to_none=bool(iteration % 2))
            check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(
        reshard_after_forward=[True, False, 2], wrapped=[("",), ("lin1", "lin2", "")], input_requires_grad=[True, False]
    )
    def test_unused_forward_output_gradients(self, reshard_after_forward, wrapped, input_requires_grad):
        """Gradients are right in each step, whichever outputs the loss uses."""
        manual_seed(42)
        model = DoubleLinear(dim=DIM)
        ref_model = self._replica(model)
        for name in wrapped:
            fully_shard(model.get_submodule(name), reshard_after_forward=reshard_after_forward)
        optims = optimizers(ref_model, model)
        both, first, second = (lambda x, y: to_one(x * y)), (lambda x, y: to_one(x)), (lambda x, y: to_one(y))
        manual_seed(1)
        for step, loss_of in enumerate((both, first, second, first, both)):
            rows, mine = self._global_and_local_input(input_requires_grad)
            loss_of(*ref_model(rows)).backward()
            loss_of(*model(mine)).backward()
            self._reduce_1d_partial_grads(ref_model)
            self._check_gradients(ref_model, model, rows, mine)
            take_step(optims, set_to_none=step >= 2)  # Adam also moves unused parameters with zero gradients

    @skip_if_lt_x_gpu(2)
    @subtests(wrap_each=[shard_each, replicate_each], uses_second=[True, False])
    def test_unused_forward_input(self, wrap_each, uses_second):
        """Parameters behind an input that a unit does not use have no gradient, and no optimizer moves them."""
        manual_seed(42)
        model = TwoInputs(uses_second)
        ref_model = self._replica(model)
        wrap_each((model.head, model))
        optims = [torch.optim.AdamW(each.parameters(), lr=0.1, weight_decay=0.5) for each in (ref_model, model)]
        rows, mine = self._global_and_local_input()
        to_one(ref_model(rows)).backward()
        to_one(model(mine)).backward()
        self._reduce_1d_partial_grads(ref_model)
        with torch_defect("fsdp2_unused_input_gets_zeros", when=not uses_second):
            self.assertEqual(_having_gradients(model), _having_gradients(ref_model))
            take_step(optims)
            check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(input_requires_grad=[True, False])
    def test_loss_of_inner_output(self, input_requires_grad):
        """The loss may use the output of an inner module, and not that of the root."""
        manual_seed(42)
        model = DoubleLinear(dim=DIM)
        ref_model = self._replica(model)
        shard_each((model.lin1, model))
        inner: list[torch.Tensor] = []
        for module in (ref_model.lin1, model.lin1):
            module.register_forward_hook(lambda module, args, output: inner.append(output))
        manual_seed(1)
        for _ in range(2):
            rows, mine = self._global_and_local_input(input_requires_grad)
            ref_model(rows)
            model(mine)
            ref_output, output = inner
            ref_output.square().sum().backward()
            output.square().sum().backward()
            inner.clear()
            self._reduce_1d_partial_grads(ref_model)
            self._check_gradients(ref_model, model, rows, mine)
            ref_model.zero_grad()
            model.zero_grad()

    @skip_if_lt_x_gpu(2)
    @subtests(wanted=["everything", "input", "parameters"], reshard_after_forward=[True, False])
    def test_backward_for_some_leaves(self, wanted, reshard_after_forward):
        """``backward(inputs=leaves)`` computes the gradients of these leaves, and no others. None for parameters."""
        manual_seed(42)
        model = MLP(DIM)
        ref_model = self._replica(model)
        shard_each((model.in_proj, model.out_proj, model), reshard_after_forward=reshard_after_forward)
        rows, mine = self._global_and_local_input(requires_grad=wanted != "parameters")
        for each, inp in ((ref_model, rows), (model, mine)):
            leaves = {"everything": None, "input": inp, "parameters": list(each.in_proj.parameters())}
            to_one(each(inp)).backward(inputs=leaves[wanted])
        self._reduce_1d_partial_grads(ref_model)
        if wanted == "parameters":  # they are no leaves: those of the graph are the unsharded parameters
            self.assertEqual([param.grad for param in model.in_proj.parameters()], [None, None])
        else:
            self._check_gradients(ref_model, model, rows, mine)

    @skip_if_lt_x_gpu(2)
    @subtests(register=["register_hook", "register_post_accumulate_grad_hook"], reshard_after_forward=[True, False])
    def test_hooks_of_parameters_change_gradients(self, register, reshard_after_forward):
        """A hook on a parameter can change its gradient, also if gradients accumulate."""
        manual_seed(42)
        model = MLP(DIM)
        ref_model = self._replica(model)
        shard_each((model.in_proj, model.out_proj, model), reshard_after_forward=reshard_after_forward)

        def double(param: nn.Parameter) -> None:
            param.grad *= 2

        for param in (*ref_model.parameters(), *model.parameters()):
            getattr(param, register)(double if "accumulate" in register else lambda grad: 2 * grad)
        for _ in range(2):
            rows, mine = self._global_and_local_input()
            to_one(ref_model(rows)).backward()
            to_one(model(mine)).backward()
        self._reduce_1d_partial_grads(ref_model)
        with torch_defect("fsdp2_hooks_of_parameters_do_not_run", when=register == "register_hook"):
            check_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(wrapped=[("",), ("energy", ""), ("energy", "scale", "")], reshard_after_forward=[True, False, None])
    def test_gradient_inside_forward(self, wrapped, reshard_after_forward):
        """A forward may call ``torch.autograd.grad``, as a model of forces does, and then use other parameters."""
        manual_seed(42)
        model = Forces()
        ref_model = self._replica(model)
        units = [model.get_submodule(name) for name in wrapped]
        shard_each(units, reshard_after_forward=reshard_after_forward)
        rows, mine = self._global_and_local_input()
        if wrapped == ("energy", ""):  # the end of a backward reshards the root, which has the scale
            with self.assertRaisesRegex(RuntimeError, "mixed torch.Tensor and DTensor"):
                model(mine)
            return
        for _ in range(2):
            ref_loss, loss = to_one(ref_model(rows)), to_one(model(mine))
            self._check_loss(ref_loss, loss)
            ref_loss.backward()
            loss.backward()
        self._reduce_1d_partial_grads(ref_model)
        check_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(4)
    def test_unused_forward_output_gathers_in_smaller_mesh(self):
        """A module resharded to two ranks is all-gathered over these two ranks, and only if the loss uses it.

        An all-gather over all four ranks would give the same parameter with twice the traffic.
        """
        manual_seed(42)
        model = DoubleLinear(dim=DIM)
        shard_each((model.lin1, model.lin2), reshard_after_forward=2)
        fully_shard(model)
        with recorded() as calls:
            first, _ = model(self._global_and_local_input()[1])
            first.sum().backward()  # the output of the first module, so there is no prefetch
        groups = [dist.get_process_group_ranks(group) for group in calls.values("all_gather", "group")]
        self.assertEqual(groups, [[0, 1, 2, 3]] * 2 + [[0, 1] if self.rank < 2 else [2, 3]])

    @skip_if_lt_x_gpu(2)
    def test_unused_forward_module(self):
        self.run_subtests({"reshard_after_forward": [True, False, 2]}, self._test_unused_forward_module)

    def _test_unused_forward_module(self, reshard_after_forward: bool | int) -> None:
        manual_seed(42)
        model = DoubleLinear(dim=DIM, use_second_linear=False)
        ref_model = self._replica(model)
        shard_each((model.lin1, model.lin2, model), reshard_after_forward=reshard_after_forward)
        self._check_training(ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(by_keyword=[False, True])
    def test_gradients_are_reduced_before_backward_leaves_the_module(self, by_keyword):
        """When the gradient of an input is there, the module's own are sharded, and its parameters are resharded."""
        first, second = (filled(nn.Linear(DIM, DIM, device=self.device)) for _ in range(2))
        shard_each((first, second))
        hidden = first(uniform(2, DIM, seed=self.rank).to(self.device))
        seen: list[tuple[bool, bool]] = []
        hidden.register_hook(
            lambda _: seen.append((second.weight.grad is not None, isinstance(second.weight, DTensor)))
        )
        output = second(input=hidden) if by_keyword else second(hidden)
        output.sum().backward()
        self.assertEqual(seen, [(True, True)])

    @skip_if_lt_x_gpu(2)
    @subtests(output_dtype=[None, torch.float64], reshard_after_forward=[True, False])
    def test_forward_without_gradients(self, output_dtype, reshard_after_forward):
        """A forward under ``no_grad`` gives the output of the plain model, also between two training steps."""
        manual_seed(42)
        model = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
        ref_model = self._replica(model)
        policy = MixedPrecisionPolicy(output_dtype=output_dtype)
        fully_shard(model[0], reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward, mp_policy=policy)
        for _ in range(2):
            rows, mine = self._global_and_local_input()
            with torch.no_grad():
                self.assertEqual(model(mine), ref_model(mine).to(output_dtype or mine.dtype))
            ref_model(rows).sum().backward()
            model(mine).sum().backward()
            self._reduce_1d_partial_grads(ref_model)
            self._check_gradients(ref_model, model, rows, mine)
            ref_model.zero_grad()
            model.zero_grad()

    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False], loss_of=["output", "tangent", "both"])
    def test_backward_through_jvp(self, reshard_after_forward, loss_of):
        """A loss may use the output of ``jvp``, its tangent, or both."""
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 4)).to(self.device)
        model = copy.deepcopy(ref_model)
        shard_each((model[0], model[2], model), reshard_after_forward=reshard_after_forward)
        manual_seed(42 + self.rank + 1)
        rows, directions = torch.randn(2, 3, DIM).to(self.device)
        actual: list[tuple[Any, ...]] = []
        for each in (ref_model, model):
            primal = rows.clone().requires_grad_()
            output, tangent = torch.func.jvp(each, (primal,), (directions,))
            losses = {"output": output.square().sum(), "tangent": tangent.square().sum()}
            torch.stack(list(losses.values()) if loss_of == "both" else [losses[loss_of]]).sum().backward()
            actual.append((output, tangent, primal.grad))
        self.assertEqual(actual[1], actual[0])
        average([param.grad for param in ref_model.parameters() if param.grad is not None])
        self.assertEqual(ref_model[2].bias.grad is None, loss_of == "tangent")
        check_parity(self, ref_model, model)

    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    @skip_if_lt_x_gpu(2)
    @subtests(
        reshard_after_forward=[True, False],
        transform=["vjp", "vmap"],
        trained=[False, True],
        dtype=[torch.float32, torch.complex64],
        valid=lambda transform, dtype, **_: transform == "vmap" or not dtype.is_complex,
    )
    def test_backward_through_vjp_and_vmap(self, reshard_after_forward, transform, trained, dtype):
        """Outputs, and gradients that ``vjp`` computes, are right. A loss of the output of ``vmap`` has a backward."""
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(DIM, 6), nn.Tanh(), nn.Linear(6, 4), nn.Tanh()).to(self.device, dtype)
        model: Any = copy.deepcopy(ref_model)
        shard_each((model[0], model[2], model), reshard_after_forward=reshard_after_forward)
        manual_seed(42 + self.rank + 1)
        rows = torch.randn(3, DIM).to(self.device, dtype)
        cotangents = torch.randn(3, 4).to(self.device)
        if trained:
            model(rows).abs().sum().backward()
            model.zero_grad()

        def outputs_of(each: nn.Module) -> tuple[torch.Tensor, ...]:
            if transform == "vmap":
                return (torch.vmap(each)(rows),)
            output, pullback = torch.func.vjp(each, rows)
            return output, *pullback(cotangents)

        actual, expected = outputs_of(model), outputs_of(ref_model)
        self.assertEqual(actual, expected)
        if transform == "vjp":  # the hook that unshards for backward is on a tensor inside of the transform
            self.assertRaises(RuntimeError, actual[0].abs().square().sum().backward)
            return
        for outputs in (expected, actual):
            outputs[0].abs().square().sum().backward()
        average([param.grad for param in ref_model.parameters()])
        check_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False], keeps_parameters=[False, True], in_own_thread=[False, True])
    def test_gradient_of_a_gradient(self, reshard_after_forward, keeps_parameters, in_own_thread):
        """A loss may penalize the gradient of the input, with and without a reshard after the first backward.

        An accelerator computes gradients in a thread of its own. On the CPU, ``in_own_thread`` has the same effect.
        """
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 1)).to(self.device)
        model: Any = copy.deepcopy(ref_model)
        shard_each((model[0], model), reshard_after_forward=reshard_after_forward)
        model.set_reshard_after_backward(not keeps_parameters)
        manual_seed(42 + self.rank + 1)
        rows = torch.randn(2, DIM).to(self.device)
        is_late = in_own_thread or not accelerator.current().is_cpu
        with (
            torch_defect("fsdp2_second_order_gradients_raise", when=not keeps_parameters),
            torch_defect("fsdp2_late_gradients_are_lost", when=keeps_parameters and is_late),
            ThreadPoolExecutor(1) as other,
        ):
            for each in (ref_model, model):
                primal = rows.clone().requires_grad_()
                output = each(primal)
                differentiate = functools.partial(torch.autograd.grad, output.sum(), primal, create_graph=True)
                (gradient,) = other.submit(differentiate).result() if in_own_thread else differentiate()
                (output + gradient.square().sum()).sum().backward()
            model.reshard()
            model[0].reshard()
            average([param.grad for param in ref_model.parameters()])
            check_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    def test_nontensor_activations(self):
        container_types = [list, collections.namedtuple, tuple, dict]
        self.run_subtests({"container_type": container_types}, self._test_nontensor_activations)

    def _test_nontensor_activations(self, container_type: type) -> None:
        manual_seed(42)
        stages = (Module(DIM) for _ in range(3))
        model = nn.Sequential(ToContainerType(container_type), *stages, FromContainerType(container_type))
        ref_model = self._replica(model)
        for child in model:
            fully_shard(child)
        self._check_training(ref_model, fully_shard(model))

    @torch_defect("fsdp2_outputs_in_dataclasses_raise")
    @skip_if_lt_x_gpu(2)
    def test_dataclasses_between_modules(self):
        """Backward finds the tensors that modules pass on in dataclasses."""
        pack, unpack = CONTAINERS["frozen dataclass"]
        model = nn.Sequential(*(PairStage(index, pack, unpack) for index in range(2)))
        ref_model = self._replica(model)
        shard_each((*model, model))
        rows, mine = self._global_and_local_input(requires_grad=True)
        for each, inp in ((ref_model, rows), (model, mine)):
            x, _, _ = unpack(each(pack(inp, inp + 1, torch.ones(DIM, device=self.device))))
            x.sum().backward()
        self._reduce_1d_partial_grads(ref_model)
        self._check_gradients(ref_model, model, rows, mine)

    @skip_if_lt_x_gpu(2)
    @subtests(container=lambda: list(CONTAINERS), loss_uses=["x", "y", "both"])
    def test_container_kinds(self, container, loss_uses):
        """Nested containers keep their structure, and each module reduces in turn during backward."""
        if "dataclass" in container:
            skip_unless([torch_facts.FINDS_TENSORS_IN_DATACLASSES.lacks])
        pack, unpack = CONTAINERS[container]
        events: list[str] = []
        manual_seed(42)
        model = nn.Sequential(*(PairStage(index, pack, unpack) for index in range(3)))
        ref_model = self._replica(model)
        for stage in model:
            stage.events = events
            fully_shard(stage)
        fully_shard(model)
        mask = torch.ones(DIM, device=self.device)
        manual_seed(1)
        for _ in range(2):
            rows, mine = self._global_and_local_input(requires_grad=True)
            x, y, ref_mask = unpack(ref_model(pack(rows, rows + 1, mask)))
            _loss_of(x, y, loss_uses).backward()
            self._reduce_1d_partial_grads(ref_model)

            events.clear()
            with patch_reduce_scatter(_recording(events, "reduced")):
                x, y, out_mask = unpack(model(pack(mine, mine + 1, mask)))
                _loss_of(x, y, loss_uses).backward()
            # If FSDP did not find a module's tensors, it would reduce at the end of the backward.
            in_turn = [event for index in (2, 1, 0) for event in (f"gradients at {index}", "reduced")]
            self.assertEqual(events, in_turn)
            self.assertIs(ref_mask, mask)
            self.assertIs(out_mask, mask)
            for stage in model:
                self.assertIs(stage.received_type, type(pack(x, y, mask)))
                self.assertIs(stage.received_mask, mask)
            self._check_gradients(ref_model, model, rows, mine)
            ref_model.zero_grad()
            model.zero_grad()

    @skip_if_lt_x_gpu(2)
    @subtests(container=["list", "dict", "object"], has_inner=[True, False])
    def test_root_returns_a_container(self, container, has_inner):
        """Gradients are reduced for any list or dict in which the root returns its output, or with inner modules."""
        pack, unpack = {
            "list": (lambda x: [x], lambda packed: packed[0]),
            "dict": (lambda x: {"x": x}, lambda packed: packed["x"]),
            "object": (lambda x: SimpleNamespace(x=x), lambda packed: packed.x),
        }[container]

        class Packing(nn.Sequential):
            def forward(self, x: torch.Tensor) -> Any:
                return pack(super().forward(x))

        manual_seed(42)
        model = Packing(nn.Linear(DIM, DIM), nn.Tanh(), nn.Linear(DIM, 4))
        ref_model = self._replica(model)
        shard_each([*([model[0]] if has_inner else []), model])
        rows, mine = self._global_and_local_input()
        for each, inp in ((ref_model, rows), (model, mine)):
            to_one(unpack(each(inp))).backward()
        self._reduce_1d_partial_grads(ref_model)
        if container == "object" and not has_inner:  # FSDP2 finds no tensor in it, so nothing ends this backward
            self.assertNotIsInstance(model[0].weight, DTensor)
        else:
            check_parity(self, ref_model, model)

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False, 2], input_requires_grad=[True, False])
    def test_rank_dependent_use(self, reshard_after_forward, input_requires_grad):
        """If one rank does not use a parameter, that rank contributes zeros to the reduction."""
        manual_seed(42)
        model = DoubleLinear(dim=DIM)
        ref_model = self._replica(model)
        fully_shard(model.lin1, reshard_after_forward=reshard_after_forward)
        fully_shard(model, reshard_after_forward=reshard_after_forward)
        model.set_reduce_scatter_unused_params(True)
        manual_seed(1)
        for abstains in (0, 0, self.world_size - 1):  # the rank whose loss uses only the first output
            rows, mine = self._global_and_local_input(input_requires_grad)
            used = torch.arange(2 * self.world_size, device=rows.device).unsqueeze(1) // 2 != abstains
            first, second = ref_model(rows)
            (first.sum() + (second * used).sum()).backward()
            self._reduce_1d_partial_grads(ref_model)

            first, second = model(mine)
            loss = first.sum() if self.rank == abstains else first.sum() + second.sum()
            loss.backward()
            self._check_gradients(ref_model, model, rows, mine)
            ref_model.zero_grad()
            model.zero_grad()

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    @subtests(user=["first", "last"])
    def test_layer_of_one_rank(self, user):
        """If only one rank uses the first layer, both parameter groups get their own gradients, not each other's.

        Only on that rank, the input of the other group requires a gradient. Both groups have the same size.
        """
        manual_seed(42)
        model: Any = Adapted().to(self.device)
        ref_model = copy.deepcopy(model)
        shard_each((model.body, model)).set_reduce_scatter_unused_params(True)
        for each in (ref_model, model):
            uses = self.rank == (0 if user == "first" else self.world_size - 1)
            each(torch.arange(4.0, device=self.device) + self.rank, uses).square().sum().backward()
        for param in ref_model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average([param.grad for param in ref_model.parameters()])
        with torch_defect("fsdp2_unused_parameters_are_reduced_out_of_order"):
            check_parity(self, ref_model, model, what=("gradient",))

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    def test_layers_that_are_used_twice(self):
        """Gradients of both uses add up, also if unused parameters would get zeros."""
        manual_seed(42)
        layers = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        model = nn.Sequential(*layers, nn.Tanh(), *layers)
        ref_model = self._replica(model)
        shard_each((*layers, model)).set_reduce_scatter_unused_params(True)
        rows, mine = self._global_and_local_input(requires_grad=True)
        for each, inp in ((ref_model, rows), (model, mine)):
            each(inp).sum().backward()
        self._reduce_1d_partial_grads(ref_model)
        self._check_gradients(ref_model, model, rows, mine)

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    def test_each_layer_is_reduced_before_the_next_backward(self):
        """If unused parameters would get zeros, unsharded gradients of used ones do not wait for them."""
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3))).to(self.device)
        shard_each((*model, model)).set_reduce_scatter_unused_params(True)
        events: list[str] = []
        for layer in model:
            layer.register_full_backward_pre_hook(lambda *_: events.append("backward"))
        with patch_reduce_scatter(_recording(events, "reduced")):
            model(torch.ones(2, 4, device=self.device, requires_grad=True)).sum().backward()
        self.assertEqual(events, ["backward", "reduced"] * 3)

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    def test_block_that_ends_early_on_a_rank(self):
        """If only rank 0 uses the last layer of a block, backward still all-gathers the same group on all ranks."""
        manual_seed(42)
        model: Any = nn.Sequential(nn.Linear(4, 4), EndsEarly()).to(self.device)
        model[1].uses_last = self.rank == 0
        ref_model = copy.deepcopy(model)
        shard_each((model[1].inner, model[1], model)).set_reduce_scatter_unused_params(True)
        for each in (ref_model, model):
            each(torch.arange(4.0, device=self.device) + self.rank).square().sum().backward()
        for param in ref_model.parameters():
            param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        average([param.grad for param in ref_model.parameters()])
        with torch_defect("fsdp2_unused_layer_gathers_out_of_order"):
            check_parity(self, ref_model, model, what=("gradient",))

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    @subtests(is_one_unit=[True, False])
    def test_recomputation_of_an_unused_layer(self, is_one_unit):
        """The order of collectives does not depend on whether a rank uses the last layer of a recomputed block.

        All ranks do the same here, so that a wrong order does not hang. The second of two backwards does not prefetch.
        """

        def collectives(is_used: bool) -> list[tuple[str, int]]:
            model: Any = EndsEarly().to(self.device)
            model.last = AddsOne(4, 4, bias=False).to(self.device)
            model.last.is_used = is_used
            units = (model,) if is_one_unit else (model.inner, model.last)
            root = shard_each((*units, checkpoint_wrapper(model)))
            root.set_reduce_scatter_unused_params(True)
            first, second = (root(torch.ones(1, 4, device=self.device, requires_grad=True)).sum() for _ in range(2))
            first.backward()
            with recorded("all_gather", "reduce_scatter") as calls:
                second.backward()
            return [(call.name, call.numel) for call in calls]

        with torch_defect("fsdp2_recomputation_orders_collectives_by_use", when=not is_one_unit):
            self.assertEqual(collectives(is_used=False), collectives(is_used=True))

    @needs(torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS)
    @skip_if_lt_x_gpu(2)
    @subtests(use_adapter=[True, False])
    def test_frozen_parameter_gets_no_zeros(self, use_adapter):
        """Only trainable parameters get zeros as gradients, also if a step does not use a frozen parameter's module."""
        model: Any = Adapted().to(self.device)
        shard_each((model.adapter, model)).set_reduce_scatter_unused_params(True)
        rows = torch.ones(2, 4, device=self.device)
        to_one(model(rows, True)).backward()
        model.zero_grad()
        model.adapter.bias.requires_grad_(False)
        to_one(model(rows, use_adapter)).backward()
        self.assertIsNotNone(model.adapter.weight.grad)
        with torch_defect("fsdp2_frozen_parameter_of_unused_unit_gets_zeros", when=not use_adapter):
            self.assertIsNone(model.adapter.bias.grad)

    @needs(torch_facts.HAS_DERIVED_SHARDING_RULES)
    @skip_if_lt_x_gpu(2)
    @subtests(
        loss=[F.l1_loss, F.mse_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy],
        reduction=["mean", "sum"],
        shards=["even", "uneven", "empty"],
    )
    def test_loss_of_the_parameters(self, loss, reduction, shards):
        """Value and gradients equal those of the unsharded parameters. FSDP does not average these gradients."""
        rows = {"even": 2 * self.world_size, "uneven": 2 * self.world_size - 1, "empty": self.world_size - 1}[shards]
        ref_model = filled(nn.Linear(3, rows, bias=False), 0.1, 0.9).to(self.device)
        model = fully_shard(self._replica(ref_model))
        weights = [ref_model.weight, model.weight]
        losses = [loss(weight, torch.full_like(weight, 0.5), reduction=reduction) for weight in weights]
        for each in losses:
            each.backward()
        is_derived_mean = reduction == "mean" and loss is not F.l1_loss
        with torch_defect("dtensor_mean_loss_of_uneven_shards_is_wrong", when=is_derived_mean and shards == "uneven"):
            self.assertEqual(full(losses[1]), losses[0])
        with torch_defect("dtensor_gradient_of_mean_loss_is_too_large", when=is_derived_mean and shards != "empty"):
            self.assertEqual(full(model.weight.grad), ref_model.weight.grad)

    @skip_if_lt_x_gpu(2)
    @torch_defect("fsdp2_unit_without_elements_raises")
    def test_parameter_without_elements(self):
        model = nn.Sequential(nn.Linear(2, 2), Empty()).to(self.device)
        shard_each((*model, model))
        model(torch.ones(1, 2, device=self.device)).sum().backward()
        self.assertEqual(model[1].weight.grad.shape, (0,))


@dataclasses.dataclass(frozen=True)
class FrozenTriple:
    x: torch.Tensor
    y: torch.Tensor
    mask: torch.Tensor


# For each kind: a function that packs two tensors and a mask without gradient, and a function that unpacks them.
CONTAINERS: dict[str, tuple[Any, Any]] = {
    "frozen dataclass": (FrozenTriple, lambda c: (c.x, c.y, c.mask)),
    "dict of tuples": (
        lambda x, y, mask: {"first": (x, {"mask": mask}), "rest": ([y],)},
        lambda c: (c["first"][0], c["rest"][0][0], c["first"][1]["mask"]),
    ),
    "OrderedDict": (
        lambda x, y, mask: collections.OrderedDict(mask=mask, y=y, x=x),
        lambda c: (c["x"], c["y"], c["mask"]),
    ),
    "tuple with a named tuple": (
        lambda x, y, mask: (NamedPair(x, y), mask),
        lambda c: (c[0].x, c[0].y, c[1]),
    ),
    "named tuple of dataclass": (
        lambda x, y, mask: NamedPair(FrozenTriple(x, y, mask), mask),
        lambda c: (c.x.x, c.x.y, c.y),
    ),
}


class PairStage(nn.Module):
    """Mixes two tensors of a container. Records the container that it received, and an event in backward."""

    def __init__(self, index: int, pack: Any, unpack: Any) -> None:
        super().__init__()
        self.index, self.pack, self.unpack = index, pack, unpack
        self.lin1 = nn.Linear(DIM, DIM)
        self.lin2 = nn.Linear(DIM, DIM)
        self.events: list[str] = []

    def forward(self, container: Any) -> Any:
        x, y, mask = self.unpack(container)
        self.received_type, self.received_mask = type(container), mask
        mixed = torch.tanh(x + 2 * y) * mask
        if mixed.requires_grad:
            mixed.register_hook(lambda _: self.events.append(f"gradients at {self.index}"))
        return self.pack(self.lin1(mixed), self.lin2(mixed), mask)


def _loss_of(x: torch.Tensor, y: torch.Tensor, uses: str) -> torch.Tensor:
    return {"x": x.sum, "y": y.sum, "both": (x * y).sum}[uses]()


def _recording(events: list[str], event: str) -> Any:
    reduce_scatter = internals.reduce_scatter()

    def record(*args: Any, **kwargs: Any) -> Any:
        events.append(event)
        return reduce_scatter(*args, **kwargs)

    return record


class TestFullyShardPostAccGradHookMultiThread(FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_post_acc_grad_hook_runs(self):
        device = self.device
        model = MLP(8, device)
        shard_each((model.in_proj, model.out_proj, model))
        names = {param: name for name, param in model.named_parameters()}
        counts: collections.Counter[str] = collections.Counter()

        def hook(param: nn.Parameter) -> None:
            counts[names[param]] += 1

        for param in names:
            param.register_post_accumulate_grad_hook(hook)
        model(torch.randn((2, 8), device=device) + self.rank).sum().backward()
        layers, kinds = ("in_proj", "out_proj"), ("weight", "bias")
        self.assertEqual(counts, {f"{layer}.{kind}": 1 for layer in layers for kind in kinds})


class TestFullyShardPostAccGradHookMultiProcess(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_post_acc_grad_hook_optim_parity(self):
        manual_seed(42)
        device = self.device
        args = ModelArgs(dropout_p=0.0)
        base_model = Transformer(args).to(device)
        ref_model, model = copy.deepcopy(base_model), copy.deepcopy(base_model)
        for some_model in (ref_model, model):
            shard_each((*some_model.layers, some_model))
        adamw = functools.partial(torch.optim.AdamW, lr=1e-2, foreach=False)
        step_lr = functools.partial(torch.optim.lr_scheduler.StepLR, step_size=5)
        ref_optim = adamw(ref_model.parameters())
        ref_scheduler = step_lr(ref_optim)
        optims = {param: adamw([param]) for param in model.parameters()}
        schedulers = {param: step_lr(optim) for param, optim in optims.items()}

        def optim_hook(param: nn.Parameter) -> None:
            optims[param].step()
            optims[param].zero_grad()
            schedulers[param].step()

        for param in model.parameters():
            param.register_post_accumulate_grad_hook(optim_hook)
        manual_seed(42 + self.rank)
        tokens = torch.randint(0, args.vocab_size, (2, 16), device=device)
        losses = []
        for _ in range(ITERATIONS):
            ref_loss, loss = ref_model(tokens).sum(), model(tokens).sum()
            ref_loss.backward()
            loss.backward()
            ref_optim.step()
            ref_optim.zero_grad()
            ref_scheduler.step()
            losses.append(loss.item())
            self.assertTrue(torch.equal(loss, ref_loss), f"{loss} is not {ref_loss}")
            self._check_identical(ref_model, model)
        self.assertEqual(len(set(losses)), ITERATIONS)  # each step has changed the loss
        rates = {rate for scheduler in (ref_scheduler, *schedulers.values()) for rate in scheduler.get_last_lr()}
        self.assertEqual(len(rates), 1)
        self.assertEqual(rates.pop(), 1e-4)  # StepLR has reduced the rate twice

    def _check_identical(self, ref_model: nn.Module, model: nn.Module) -> None:
        refs, params = dict(ref_model.named_parameters()), dict(model.named_parameters())
        self.assertEqual(list(refs), list(params))
        for name, param in params.items():
            self.assertTrue(torch.equal(param.to_local(), refs[name].to_local()), name)

    def _sharded_mlp(self, **kwargs: Any) -> tuple[nn.Module, nn.Module]:
        """A plain model, and a copy whose layers are wrapped one by one. The root has no parameters of its own."""
        manual_seed(42)
        ref_model = MLP(8, self.device)
        model = copy.deepcopy(ref_model)
        shard_each((model.in_proj, model.out_proj, model), **kwargs)
        return ref_model, model

    def _backward(self, model: nn.Module, seed: int, dtype: torch.dtype = torch.float32) -> None:
        manual_seed(100 * seed + self.rank)
        inputs = torch.rand((4, 8), device=self.device, requires_grad=True)
        model(inputs.to(dtype)).square().sum().backward()

    def _ref_backward(self, ref_model: nn.Module, seed: int, dtype: torch.dtype) -> None:
        """Compute in ``dtype``, and accumulate the gradients in float32."""
        replica = copy.deepcopy(ref_model).to(dtype)
        self._backward(replica, seed, dtype)
        for param, computed in zip(ref_model.parameters(), replica.parameters()):
            grad = computed.grad.float()
            param.grad = grad if param.grad is None else param.grad + grad

    def _mean_over_ranks(self, ref_model: nn.Module) -> dict[str, torch.Tensor]:
        """The expected shard of each gradient on this rank, from the gradients of the replicas."""
        means = {name: param.grad.clone() for name, param in ref_model.named_parameters()}
        average(means.values())
        return {name: mean.chunk(self.world_size)[self.rank] for name, mean in means.items()}

    @skip_if_lt_x_gpu(2)
    @subtests(
        reshard_after_forward=[True, False],
        reshard_after_backward=[True, False],
        param_dtype=[torch.float32, torch.bfloat16],
    )
    def test_post_acc_grad_hook_gradient_accumulation(self, reshard_after_forward, reshard_after_backward, param_dtype):
        """Hooks run once, in the microbatch that reduces, and get the accumulated gradient."""
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        ref_model, model = self._sharded_mlp(reshard_after_forward=reshard_after_forward, mp_policy=policy)
        model.set_reshard_after_backward(reshard_after_backward)
        sharded = dict(model.named_parameters())
        seen: list[tuple[str, torch.Tensor]] = []

        def hook(name: str, param: nn.Parameter) -> None:
            self.assertIsInstance(param.grad, DTensor)
            seen.append((name, param.grad.to_local().clone()))

        for name, param in sharded.items():
            param.register_post_accumulate_grad_hook(functools.partial(hook, name))
        for step in range(2):
            for microbatch in range(3):
                last = microbatch == 2
                model.set_requires_gradient_sync(last)
                self._ref_backward(ref_model, 3 * step + microbatch, param_dtype)
                self._backward(model, 3 * step + microbatch)
                if not last:
                    self.assertEqual(seen, [], may_be="empty")
                    self.assertEqual(
                        [name for name, param in sharded.items() if param.grad is not None], [], may_be="empty"
                    )
            expected = self._mean_over_ranks(ref_model)
            self.assertEqual(sorted(name for name, _ in seen), sorted(expected))
            for name, grad in seen:
                self.assertEqual(grad, expected[name])
                self.assertEqual(sharded[name].grad.to_local(), expected[name])
            seen.clear()
            for param in (*ref_model.parameters(), *sharded.values()):
                param.grad = None

    @skip_if_lt_x_gpu(2)
    @subtests(
        offload_policy=[OffloadPolicy(), CPUOffloadPolicy(pin_memory=False), CPUOffloadPolicy(pin_memory=True)],
        reshard_after_forward=[True, False],
    )
    def test_post_acc_grad_hook_sees_final_gradient(self, offload_policy, reshard_after_forward):
        """A hook gets the registered parameter with the final gradient.

        With offload, the gradient must be on the CPU before the hook is called.
        """
        ref_model, model = self._sharded_mlp(offload_policy=offload_policy, reshard_after_forward=reshard_after_forward)
        sharded = dict(model.named_parameters())
        seen: dict[str, torch.Tensor] = {}
        calls: list[tuple[str, str]] = []

        def hook(name: str, which: str, param: nn.Parameter) -> None:
            self.assertIs(param, sharded[name])
            self.assertIs(param, model.get_parameter(name))
            calls.append((name, which))
            seen[name] = param.grad.to_local().clone()

        for name, param in sharded.items():
            for which in ("first", "second"):
                param.register_post_accumulate_grad_hook(functools.partial(hook, name, which))
        for step in range(2):  # the second step accumulates gradients
            self._backward(ref_model, step)
            self._backward(model, step)
            expected = self._mean_over_ranks(ref_model)
            self.assertEqual(sorted(calls), sorted((name, which) for name in expected for which in ("first", "second")))
            calls.clear()
            for name, grad in seen.items():
                self.assertTrue(torch.equal(grad, sharded[name].grad.to_local()), name)
                self.assertEqual(grad, expected[name].to(grad.device))


if __name__ == "__main__":
    run_tests()
