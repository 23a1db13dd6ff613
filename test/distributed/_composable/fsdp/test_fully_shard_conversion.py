"""Conversions of an FSDP2 model: ``to``, ``half``, ``cpu`` and the like convert shards as they convert a plain module.

Before the first forward every conversion works. After it FSDP2 has buffers of one dtype. A later conversion either
works or is rejected, and no forward uses the parameters from before the conversion.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTestMultiThread
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.shards import local_of, shard_largest_dim, shard_of
from torch_fsdp_tests.fsdp.training import loss_of
from torch_fsdp_tests.installed_torch import torch_facts

HOST = torch.device("cpu")  # the CPU is the subject
bf16, f32 = torch.bfloat16, torch.float32

CONVERSIONS: dict[str, Callable[[nn.Module, torch.device], nn.Module]] = {
    "half": lambda module, device: module.half(),
    "bfloat16": lambda module, device: module.bfloat16(),
    "double": lambda module, device: module.double(),
    "to_dtype": lambda module, device: module.to(torch.bfloat16),
    "to_device_and_dtype": lambda module, device: module.to(device, torch.float16),
    "to_tensor": lambda module, device: module.to(torch.empty((), dtype=torch.float64, device=device)),
}


class Model(nn.Module):
    """Two layers with a shared weight, a frozen layer, a layer with fewer rows than ranks, and two kinds of buffers."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, device=device)
        self.second = nn.Linear(4, 4, device=device)
        self.tied = nn.Linear(4, 4, bias=False, device=device)
        self.tied.weight = self.second.weight
        self.frozen = nn.Linear(4, 4, device=device).requires_grad_(False)
        self.last = nn.Linear(4, 1, bias=False, device=device)
        self.register_buffer("scale", torch.tensor([0.7], device=device))
        self.register_buffer("count", torch.tensor([3], device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.first(x))
        x = self.frozen(self.tied(self.second(x))) * self.scale.to(x.dtype)
        return self.last(x)


def sharded(model: Model, **kwargs: Any) -> Any:
    """Shard the model with one group for a layer, one for two layers, and one for the rest."""
    fully_shard(model.first, **kwargs)
    fully_shard([model.second, model.tied], **kwargs)
    return fully_shard(model, **kwargs)


@contextlib.contextmanager
def rejecting(param: torch.Tensor) -> Iterator[None]:
    """Within the context, conversions of this parameter raise: tensors with weak references cannot be swapped."""
    reference = weakref.ref(param)
    yield
    del reference


class TestFullyShardConversion(FSDPTestMultiThread):
    world_size = 2

    def _pair(self, **kwargs: Any) -> tuple[Model, Any]:
        """Return a plain model and a sharded copy."""
        plain = filled(Model(self.device))
        return plain, sharded(copy.deepcopy(plain), **kwargs)

    def _check_same(self, model: nn.Module, plain: nn.Module) -> None:
        """Check that parameters, gradients and buffers have the dtypes and values of the plain model."""
        self.assertEqual([name for name, _ in model.named_parameters()], [name for name, _ in plain.named_parameters()])
        for name, param in model.named_parameters():
            ref_param = plain.get_parameter(name)
            self.assertIsInstance(param, DTensor)
            self.assertEqual(param.requires_grad, ref_param.requires_grad)
            self._check_identical(param.detach(), ref_param.detach(), name)
        for name, buffer in model.named_buffers():
            self._check_identical(buffer, plain.get_buffer(name), name)
        self._check_gradients(model, plain)

    def _check_gradients(self, model: nn.Module, plain: nn.Module) -> None:
        for name, param in model.named_parameters():
            ref_param = plain.get_parameter(name)
            self.assertEqual(param.grad is None, ref_param.grad is None, name)
            if param.grad is not None:
                self._check_identical(param.grad, ref_param.grad, name)

    def _check_identical(self, found: torch.Tensor, wanted: torch.Tensor, name: str) -> None:
        if isinstance(found, DTensor):
            self.assertEqual(found.to_local().dtype, found.dtype, msg=name)
            wanted = shard_of(wanted, found)
        self.assertEqual(local_of(found), wanted, rtol=0, atol=0, msg=name, exact_device=True, may_be="empty")

    def _convert(self, conversion: str, *models: nn.Module) -> None:
        for model in models:
            self.assertIs(CONVERSIONS[conversion](model, self.device), model)

    def _backward(self, plain: Any, model: Any, param_dtype: torch.dtype | None = None, seed: int = 0) -> None:
        """Run a backward of both models on data that differs by rank. Outputs and gradients must be bitwise equal."""
        inp = uniform(3, 4, seed=10 * seed + self.rank).to(plain.first.weight.dtype)
        output = model(inp)
        loss_of(output).backward()
        computing = copy.deepcopy(plain).to(param_dtype)
        computing.zero_grad()
        expected = computing(inp.to(param_dtype))
        self.assertEqual(output, expected, rtol=0, atol=0)
        loss_of(expected).backward()
        for param, computed in zip(plain.parameters(), computing.parameters()):
            if computed.grad is not None:
                average([mean := computed.grad.to(f32 if param_dtype else computed.grad.dtype)])
                mean = mean.to(param.dtype)
                param.grad = mean if param.grad is None else param.grad + mean
        self._check_gradients(model, plain)

    def _step(self, *models: nn.Module, clears: bool = True) -> None:
        """Take a step of gradient descent, and clear the gradients."""
        for model in models:
            for param in model.parameters():
                if param.grad is not None:
                    local_of(param.detach()).sub_(local_of(param.grad) * 0.5)
            if clears:
                model.zero_grad()

    @skip_if_lt_x_gpu(1)
    @subtests(conversion=list(CONVERSIONS), shard_placement_fn=[None, shard_largest_dim])
    def test_to_matches_plain_module(self, conversion, shard_placement_fn):
        """The shards have the values of the converted plain model and train like it."""
        plain, model = self._pair(shard_placement_fn=shard_placement_fn)
        self._convert(conversion, plain, model)
        self._check_same(model, plain)
        self.assertIs(model.tied.weight, model.second.weight)
        for step in range(2):
            self._backward(plain, model, seed=step)
            self._step(plain, model)
        self._check_same(model, plain)

    @skip_if_lt_x_gpu(1)
    @subtests(
        pairwise=True,
        conversion=list(CONVERSIONS),
        param_dtype=[None, bf16],
        keeps_gradients=[True, False],
        unsharded=[True, False],
    )
    def test_between_steps(self, conversion, param_dtype, keeps_gradients, unsharded):
        """After a conversion the next step equals that of the converted plain model, or it is rejected.

        After a reset, a rejected model works again in the dtype of the first forward, with the current values.
        """
        plain, model = self._pair(mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=f32))
        self._backward(plain, model, param_dtype)
        self._step(plain, model, clears=not keeps_gradients)
        if unsharded:
            model.unshard()
            model.first.unshard()
        self._convert(conversion, plain, model)
        self._check_same(model, plain)

        for each in (plain, model):
            for param in each.parameters():
                local_of(param.detach()).mul_(1.5)
        try:
            self._backward(plain, model, param_dtype, seed=1)
        except RuntimeError as error:
            self.assertIn("dtype", str(error))
            torch.get_device_module(self.device.type).synchronize()  # wait for work of the rejected forward
            if not torch_facts.RESET_DROPS_ACCUMULATED_GRADIENTS:
                return  # the model is no longer usable
            model.reset_iter_state()
            plain.zero_grad()
            self._check_same(model, plain)
            for each in (plain, model):
                each.float()
            self._backward(plain, model, param_dtype, seed=2)
        self._step(plain, model)
        self._check_same(model, plain)

    @skip_if_lt_x_gpu(1)
    @subtests(name=["", "first", "frozen", "last"], trained=[False, True])
    def test_part_of_a_model(self, name, trained):
        """If a submodule is converted and converted back, the next forward uses the current values of its parameters.

        ``frozen`` and ``last`` belong to the root's group. The others are wrapped by ``fully_shard`` themselves.
        """
        plain, model = self._pair()
        if trained:
            self._backward(plain, model)
            self._step(plain, model)
        model.get_submodule(name).double().float()
        for each in (plain, model):
            for param in each.parameters():
                local_of(param.detach()).mul_(1.5)
        self._check_same(model, plain)
        inp = uniform(3, 4, seed=self.rank)
        output, expected = model(inp), plain(inp)
        is_inside = name in ("frozen", "last")
        with torch_defect("fsdp2_replaced_parameter_is_dropped", when=trained and is_inside):
            self.assertEqual(output, expected, rtol=0, atol=0)

    @skip_if_lt_x_gpu(1)
    def test_the_module_itself_is_returned(self):
        """A conversion returns the module on which it was called, also if FSDP has no parameters to shard in it."""
        for wrapped in (fully_shard(nn.Linear(2, 2)), fully_shard(nn.Sequential(fully_shard(nn.Linear(2, 2))))):
            for convert in CONVERSIONS.values():
                self.assertIs(convert(wrapped, self.device), wrapped)

    @skip_if_lt_x_gpu(2)
    def test_integers_are_refused(self):
        """A conversion to integers is rejected and changes nothing. Training continues."""
        plain, model = self._pair()
        for step in range(2):
            for each in (plain, model):
                with self.assertRaisesRegex(TypeError, "only accepts floating point"):
                    each.to(torch.int32)
            self._check_same(model, plain)
            self._backward(plain, model, seed=step)
            self._step(plain, model, clears=False)

    @skip_if_lt_x_gpu(1)
    @subtests(trained=[False, True])
    def test_repeat_after_failure(self, trained):
        """If a conversion raises halfway, a second call completes it. Each value is converted once."""
        plain, model = self._pair()
        if trained:
            self._backward(plain, model)
        with rejecting(model.second.bias), self.assertRaisesRegex(RuntimeError, "Couldn't swap"):
            model.half()
        self.assertEqual([model.second.weight.dtype, model.second.bias.dtype], [torch.float16, f32])
        self._convert("half", plain, model)
        self._check_same(model, plain)
        if not trained:
            self._backward(plain, model)

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(grad_dtype=[torch.float64, None])
    def test_gradients_after_failure(self, grad_dtype):
        """A conversion that raises does not change the gradients of parameters with a grad_dtype."""
        model = filled(Model(self.device))
        for param in model.parameters():
            param.grad_dtype = grad_dtype
        sharded(model)
        model(uniform(3, 4, seed=self.rank)).sum().backward()
        grads = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
        before = {name: grad.to_local().clone() for name, grad in grads.items()}
        self.assertGreater(len(before), 0)
        with rejecting(model.second.bias), self.assertRaisesRegex(RuntimeError, "Couldn't swap"):
            model.half()
        with torch_defect("fsdp2_failed_conversion_loses_gradients"):
            for name, grad in before.items():
                actual = model.get_parameter(name).grad
                self.assertIsNotNone(actual, name)
                self.assertEqual(actual.to_local(), grad, msg=name, may_be="empty")

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(conversion=list(CONVERSIONS), grad_dtype=[torch.float64, None, f32])
    def test_grad_dtype_is_kept(self, conversion, grad_dtype):
        """A parameter with a grad_dtype keeps it, and its gradient is not converted. Other gradients are converted."""
        model = filled(Model(self.device))
        for param in (model.first.weight, model.second.weight):
            param.grad_dtype = grad_dtype
        sharded(model)
        asking = (model.first.weight, model.second.weight)
        model(uniform(3, 4, seed=self.rank)).sum().backward()
        before = {param: param.grad.to_local().clone() for param in model.parameters() if param.grad is not None}
        self._convert(conversion, model)
        dtype = model.last.weight.dtype
        self.assertNotEqual(dtype, f32)
        for param, grad in before.items():
            asked = any(param is each for each in asking)
            self.assertEqual((param.dtype, param.grad_dtype), (dtype, grad_dtype if asked else dtype))
            expected = grad if asked else grad.to(dtype)
            self.assertEqual(param.grad.to_local(), expected, rtol=0, atol=0, may_be="empty")  # one row

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(conversion=list(CONVERSIONS), loads=[False, True])
    def test_grad_dtype_policy_preserved_after_conversion_and_replacement(self, conversion, loads):
        """Parameters keep their grad_dtype if they are converted before the first forward, or replaced by loading."""
        model = filled(Model(self.device))
        model.first.weight.grad_dtype = f32
        reference = copy.deepcopy(model)
        self._convert(conversion, reference)
        sharded(model)
        self._convert(conversion, model)
        if loads:
            state = {name: value.clone() for name, value in model.state_dict().items()}
            model.load_state_dict(state, assign=True)
        self.assertEqual(model.first.weight.grad_dtype, f32)
        inp = uniform(3, 4, seed=self.rank).to(reference.last.weight.dtype)
        loss_of(model(inp)).backward()
        loss_of(reference(inp)).backward()
        for name, param in model.named_parameters():
            if param.grad is not None:
                grad = reference.get_parameter(name).grad
                average([mean := grad.to(f32) if name == "first.weight" else grad])
                self.assertEqual(param.grad.to_local(), shard_of(mean, param), msg=name, may_be="empty")  # one row

    @skip_if_lt_x_gpu(1)
    @subtests(trained=[False, True], unsharded=[False, True])
    def test_to_host_and_back(self, trained, unsharded):
        """Shards and their gradients move with the model, and training does not change."""
        plain, model = self._pair()
        if trained:
            self._backward(plain, model)
        shards = [local_of(param.detach()).clone() for param in model.parameters()]
        grads = [param.grad if param.grad is None else local_of(param.grad).clone() for param in model.parameters()]
        if unsharded:
            model.unshard()
        self.assertIs(model.cpu(), model)
        for param, shard, grad in zip(model.parameters(), shards, grads, strict=True):
            self.assertEqual(local_of(param.detach()), shard.to(HOST), exact_device=True, may_be="empty")
            self.assertEqual(param.grad is None, grad is None)
            if grad is not None:
                self.assertEqual(local_of(param.grad), grad.to(HOST), exact_device=True, may_be="empty")
        self.assertEqual({buffer.device for buffer in model.buffers()}, {HOST})
        model.to(self.device)
        self._check_same(model, plain)
        self._backward(plain, model, seed=1)
        self._step(plain, model)
        self._check_same(model, plain)

    @skip_if_lt_x_gpu(2)
    def test_conversion_between_steps(self):
        """A model cannot be converted after its first forward, which allocates the buffers of the all-gather."""
        model = fully_shard(nn.Linear(2, 2, bias=False, device=self.device))
        x = torch.ones(1, 2, device=self.device)
        model(x).sum().backward()
        model.to(torch.bfloat16)
        with self.assertRaisesRegex(RuntimeError, "dtype"):
            model(x.bfloat16())


if __name__ == "__main__":
    run_tests()
