"""The dtype of FSDP2's gradients: during accumulation, in the reduction, and on the parameter.

A parameter requests a dtype with ``grad_dtype``. The default is the dtype of the parameter. None accepts the dtype that
autograd computes. The gradients are exact in float32 but rounded in bfloat16, so their values show which dtypes were
used on the way.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor.parallel import SequenceParallel, parallelize_module

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.custom_comms import RecordingReduceScatter
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.shards import shard_of
from torch_fsdp_tests.fsdp.training import check_parity, shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts

HOST = torch.device("cpu")  # the CPU is the subject
OFFLOADING = [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)]
bf16, f16, f32 = torch.bfloat16, torch.float16, torch.float32
UNSET = "unset"  # a grad_dtype that is not set; None is a valid value
BIT = 2.0**-7  # the last bit of 1.0 in bfloat16


def ask_for(param: torch.Tensor, grad_dtype: Any) -> None:
    """Set the ``grad_dtype`` of a parameter, unless it is UNSET."""
    if grad_dtype != UNSET:
        param.grad_dtype = grad_dtype


class Products(nn.Module):
    """Returns the sum of ``weight * factor * input`` over all parameters, so the gradients are ``factor * input``.

    All elements have different gradients, so a misplaced element changes the result.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, *rows: int) -> None:
        super().__init__()
        shapes = [(each, 2) for each in rows]
        self.weights = nn.ParameterList(torch.ones(shape, device=device, dtype=dtype) for shape in shapes)
        starts = [2 * sum(rows[:index]) for index in range(len(rows))]
        self.factors = [
            torch.arange(start, start + 2 * each, device=device).view(each, 2) for start, each in zip(starts, rows)
        ]

    def forward(self, x: torch.Tensor, used: tuple[int, ...] | None = None) -> torch.Tensor:
        chosen = range(len(self.factors)) if used is None else used
        return sum((self.weights[index] * self.factors[index] * x).sum() for index in chosen)


class GradDtypeTest(FSDPTestMultiThread):
    """Helpers for tests with one layer. The gradient of the layer is its input."""

    def _layer(self, dtype: torch.dtype, grad_dtype: Any, **kwargs: Any) -> Any:
        """A sharded layer with four rows and no bias. ``self.reduced`` records its reductions."""
        layer = nn.Linear(2, 4, bias=False, device=self.device, dtype=dtype)
        ask_for(layer.weight, grad_dtype)
        return self._noted(fully_shard(layer, **kwargs))

    def _noted(self, module: Any) -> Any:
        self.reduced = RecordingReduceScatter()
        module.set_custom_reduce_scatter(self.reduced)
        return module

    def _backward(self, layer: Any, value: float) -> None:
        """Run a backward that makes ``value`` the gradient of every element on this rank."""
        layer(torch.full((1, 2), value, device=self.device, dtype=layer.weight.dtype)).sum().backward()

    def _check_layer(self, layer: Any, dtype: torch.dtype, value: float) -> None:
        """All elements of this rank's shard of the gradient must be ``value``, on the device of the parameter."""
        grad, shard = layer.weight.grad, layer.weight.to_local()
        self.assertEqual((grad.dtype, grad.to_local().dtype), (dtype, dtype))
        self.assertEqual(grad.to_local(), torch.full_like(shard, value, dtype=dtype), rtol=0, atol=0, exact_device=True)

    def _dtypes_reduced(self) -> list[torch.dtype]:
        return [output.dtype for output in self.reduced.outputs]


# The dtype of the parameter, its grad_dtype, param_dtype and reduce_dtype; then the expected dtypes of the reduction
# and of the parameter's gradient.
DTYPES = [
    (f32, UNSET, None, None, f32, f32),
    (f32, UNSET, bf16, None, f32, f32),
    (f32, UNSET, f16, None, f32, f32),
    (f32, f32, bf16, None, f32, f32),
    (f32, bf16, None, None, bf16, bf16),
    (f32, bf16, bf16, None, bf16, bf16),
    (f32, bf16, bf16, f32, f32, bf16),
    (f32, None, None, None, f32, f32),
    (f32, None, bf16, None, bf16, bf16),
    (f32, None, bf16, f32, f32, f32),
    (bf16, UNSET, None, None, bf16, bf16),
    (bf16, UNSET, f32, None, bf16, bf16),
    (bf16, UNSET, None, f32, f32, bf16),
    (bf16, f32, None, None, f32, f32),
    (bf16, f32, None, bf16, bf16, f32),
    (bf16, f32, f32, None, f32, f32),
    (bf16, None, None, None, bf16, bf16),
    (bf16, None, f32, None, f32, f32),
]

# The same four dtypes, then the expected sums of the gradients 1, BIT / 4 and BIT / 4: with one reduction of the sum,
# and with a reduction of each. The sums are in units of 1.5, the mean over ranks. In bfloat16, 1 + BIT / 4 is rounded
# to 1, and 1.5 * (1 + BIT / 2) is rounded up.
SUMS = [
    (f32, UNSET, bf16, None, 1 + BIT / 2, 1 + BIT / 2),
    (f32, UNSET, bf16, bf16, 1.0, 1 + BIT / 2),
    (f32, None, bf16, None, 1.0, 1.0),
    (f32, None, bf16, f32, 1 + BIT / 2, 1 + BIT / 2),
    (f32, bf16, None, f32, 1 + BIT / 1.5, 1.0),
    (bf16, UNSET, None, None, 1.0, 1.0),
    (bf16, f32, None, None, 1 + BIT / 2, 1 + BIT / 2),
    (bf16, f32, None, bf16, 1.0, 1 + BIT / 2),
    (bf16, f32, f32, None, 1 + BIT / 2, 1 + BIT / 2),
]


class TestFullyShardGradDtype(GradDtypeTest):
    world_size = 2

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(case=DTYPES, offload_policy=OFFLOADING)
    def test_reduce_in_grad_dtype(self, case, offload_policy):
        """Gradients are reduced in ``reduce_dtype`` if it is set, and always end up in the parameter's grad_dtype."""
        storage, grad_dtype, param_dtype, reduce_dtype, reduced_in, expected = case
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        layer = self._layer(storage, grad_dtype, mp_policy=policy, offload_policy=offload_policy)
        mean = 1 + BIT / 2 if reduced_in == expected == f32 else 1.0
        for backward in (1, 2):  # the second adds to the first
            self._backward(layer, 1 + BIT * self.rank)
            self._check_layer(layer, expected, backward * mean)
        self.assertEqual(self._dtypes_reduced(), [reduced_in] * 2)
        self.assertEqual(layer.weight.dtype, storage)
        self.assertEqual(layer.weight.device, HOST if offload_policy is OFFLOADING[1] else self.device)
        self.assertEqual(layer.weight.grad_dtype, storage if grad_dtype == UNSET else grad_dtype)

    @needs(torch_facts.HAS_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(on_shard=[False, True])
    def test_grad_dtype_is_kept(self, on_shard):
        """A low-precision parameter gets its gradients in float32, if it or its shard has asked for that."""
        layer = self._layer(bf16, UNSET if on_shard else f32, mp_policy=MixedPrecisionPolicy(reduce_dtype=f32))
        if on_shard:
            layer.weight.grad_dtype = f32
        with torch_defect("fsdp2_grad_dtype_is_lost"):
            self._backward(layer, 1 + BIT * self.rank)
            self._check_layer(layer, f32, 1 + BIT / 2)

    @skip_if_lt_x_gpu(1)
    @subtests(param_dtype=[bf16, f16])
    def test_reduce_in_param_dtype(self, param_dtype):
        """If ``reduce_dtype`` equals ``param_dtype``, every version of PyTorch reduces gradients in that dtype."""
        layer = self._layer(f32, UNSET, mp_policy=MixedPrecisionPolicy(param_dtype, param_dtype))
        bit = torch.finfo(param_dtype).eps
        self._backward(layer, 1 + bit * self.rank)
        self.assertEqual(self._dtypes_reduced(), [param_dtype])
        self._check_layer(layer, f32, 1.0)

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(case=SUMS, reduces_each=[False, True], reshards=[True, False])
    def test_accumulate_in_grad_dtype(self, case, reduces_each, reshards):
        """Unreduced gradients accumulate in the dtype of the reduction, reduced ones in the parameter's grad_dtype."""
        storage, grad_dtype, param_dtype, reduce_dtype, *sums = case
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        layer = self._layer(storage, grad_dtype, mp_policy=policy)
        expected = {UNSET: storage, None: reduce_dtype or param_dtype}.get(grad_dtype, grad_dtype)
        parts = [1.0, BIT / 4, BIT / 4]
        for index, part in enumerate(parts, 1):
            last = index == len(parts)
            layer.set_requires_gradient_sync(reduces_each or last)
            layer.set_reshard_after_backward(reshards or last)
            self._backward(layer, part * (1 + self.rank))
            if not (reduces_each or last):
                layer.unshard()
                self.assertEqual(layer.weight.grad.dtype, reduce_dtype or expected)
        self.assertEqual(len(self.reduced.outputs), 3 if reduces_each else 1)
        self._check_layer(layer, expected, 1.5 * sums[reduces_each])

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(
        grad_dtypes=[(bf16, f32, bf16), (f32, bf16, None), (bf16, f16, bf16), (UNSET, bf16, UNSET), (bf16, bf16, bf16)],
        reduce_dtype=[None, f32],
        accumulates=[False, True],
    )
    def test_mixed_grad_dtypes(self, grad_dtypes, reduce_dtype, accumulates):
        """A group with several grad_dtypes is reduced in the promoted dtype. Each parameter gets its own dtype."""
        model = Products(self.device, f32, 3, 4, 1)
        for weight, grad_dtype in zip(model.weights, grad_dtypes):
            ask_for(weight, grad_dtype)
        self._noted(fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)))
        inputs = [1 + BIT, 1 + 3 * BIT] if accumulates else [1 + BIT]
        for index, inp in enumerate(inputs, 1):
            model.set_requires_gradient_sync(index == len(inputs))
            model(torch.tensor(inp + self.rank, device=self.device)).backward()

        computed = [f32 if each in (UNSET, None) else each for each in grad_dtypes]
        reduced_in = reduce_dtype or functools.reduce(torch.promote_types, computed)
        self.assertEqual(self._dtypes_reduced(), [reduced_in])
        for weight, factor, dtype in zip(model.weights, model.factors, computed):
            waiting = reduce_dtype or dtype
            of_ranks = [sum((factor * (inp + rank)).to(waiting) for inp in inputs) for rank in range(2)]
            mean = ((of_ranks[0].to(reduced_in) + of_ranks[1].to(reduced_in)) / 2).to(dtype)
            self.assertEqual(weight.grad.dtype, dtype)
            expected = shard_of(mean, weight)
            self.assertEqual(weight.grad.to_local(), expected, rtol=0, atol=0, may_be="empty")  # one row

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(frozen=[True, False], storage=[f32, bf16])
    def test_unused_and_frozen_do_not_widen(self, frozen, storage):
        """A parameter without a gradient does not influence the dtype of the reduction, whatever its grad_dtype is."""
        model = Products(self.device, f32, 3, 2, 4)
        ask_for(model.weights[0], bf16)
        ask_for(model.weights[2], bf16)
        other = model.weights[1]
        if frozen:
            other.data = other.data.to(storage)
            other.requires_grad_(False)
        ask_for(other, f32)
        self._noted(fully_shard(model))
        model(torch.tensor(1 + BIT * self.rank, device=self.device), used=(0, 2)).backward()
        self.assertEqual(self._dtypes_reduced(), [bf16])
        self.assertIsNone(model.weights[1].grad)
        for index in (0, 2):
            weight, factor = model.weights[index], model.factors[index]
            first, second = ((factor * (1 + BIT * rank)).bfloat16() for rank in range(2))
            self.assertEqual(weight.grad.to_local(), shard_of((first + second) / 2, weight), rtol=0, atol=0)

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(grad_dtype=[f32, UNSET], reduce_dtype=[None, f32])
    def test_unused_on_one_rank(self, grad_dtype, reduce_dtype):
        """If a rank did not use a parameter, its zeros have the dtype of the other ranks' gradients."""
        model = Products(self.device, bf16, 3, 2)
        for weight in model.weights:
            ask_for(weight, grad_dtype)
        self._noted(fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype)))
        model.set_reduce_scatter_unused_params(True)
        model(torch.tensor(1 + BIT, device=self.device, dtype=bf16), used=(0, 1)[: 2 - self.rank]).backward()
        expected = bf16 if grad_dtype == UNSET else f32
        self.assertEqual(self._dtypes_reduced(), [reduce_dtype or expected])
        for weight, factor, users in zip(model.weights, model.factors, (2, 1)):
            computed = (factor * torch.tensor(1 + BIT, device=self.device, dtype=bf16)).float()
            mean = (computed * users / 2).to(expected)
            self.assertEqual(weight.grad.to_local(), shard_of(mean, weight), rtol=0, atol=0)

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    def test_unused_of_any_dtype_is_refused(self):
        """With ``grad_dtype=None`` the dtype of a missing gradient is unknown. All ranks raise, and none hangs."""
        model = Products(self.device, f32, 3, 2)
        ask_for(model.weights[1], None)
        fully_shard(model).set_reduce_scatter_unused_params(True)
        loss = model(torch.ones((), device=self.device), used=(0, 1)[: 2 - self.rank])
        with self.assertRaisesRegex(ValueError, "grad_dtype=None requires an explicit .*reduce_dtype"):
            loss.backward()

        model = Products(self.device, f32, 3, 2)
        ask_for(model.weights[1], None)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(reduce_dtype=bf16)).set_reduce_scatter_unused_params(True)
        model(torch.ones((), device=self.device), used=(0, 1)[: 2 - self.rank]).backward()
        self.assertEqual([weight.grad.dtype for weight in model.weights], [f32, bf16])
        self.assertEqual(model.weights[1].grad.full_tensor(), (model.factors[1] / 2).bfloat16())

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(grad_dtype=[f32, None, f16], reduce_dtype=[None, bf16], offload_policy=OFFLOADING)
    def test_ask_after_wrapping(self, grad_dtype, reduce_dtype, offload_policy):
        """A sharded parameter's grad_dtype may change until the first forward. After a later change backward raises."""
        policy = MixedPrecisionPolicy(reduce_dtype=reduce_dtype)
        layer = self._layer(bf16, UNSET, mp_policy=policy, offload_policy=offload_policy)
        layer.weight.grad_dtype = grad_dtype
        self._backward(layer, 1.0 + self.rank)
        expected = grad_dtype or bf16
        self.assertEqual(self._dtypes_reduced(), [reduce_dtype or expected])
        self._check_layer(layer, expected, 1.5)

        layer.weight.grad = None
        layer.weight.grad_dtype = torch.float64
        with self.assertRaisesRegex(RuntimeError, "grad_dtype"):
            self._backward(layer, 1.0)

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(offload_policy=OFFLOADING)
    def test_hooks_see_grad_dtype(self, offload_policy):
        """A post-accumulate-grad hook sees the reduced gradient in the requested dtype."""
        layer = self._layer(bf16, f32, offload_policy=offload_policy)
        seen = []
        layer.weight.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.to_local().clone()))
        self._backward(layer, 1 + BIT * self.rank)
        self.assertEqual([grad.dtype for grad in seen], [f32])
        self.assertEqual(seen[0], torch.full_like(seen[0], 1 + BIT / 2), rtol=0, atol=0)

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(grad_dtype=[f32, None, f16], reshard_after_forward=[True, False, 1], microbatches=[1, 2])
    def test_train_parity(self, grad_dtype, reshard_after_forward, microbatches):
        """bfloat16 parameters with another grad_dtype train like those of a plain model, where autograd casts."""
        model = filled(nn.Sequential(MLP(4, dim_multiplier=2), nn.Linear(4, 3)).to(self.device, bf16))
        for param in model.parameters():
            param.grad_dtype = grad_dtype
        replica = copy.deepcopy(model)
        for param in replica.parameters():
            param.grad_dtype = grad_dtype
        shard_each((*model, model), reshard_after_forward=reshard_after_forward)
        start = copy.deepcopy(replica)
        for step in range(3):
            for index in range(microbatches):
                model.set_requires_gradient_sync(index == microbatches - 1)
                inp = uniform(2, 4, seed=10 * step + 2 * index + self.rank).to(bf16)
                self.assertEqual(train(model, inp), train(replica, inp), rtol=0, atol=0)
            average_gradients(replica)
            check_parity(self, replica, model, what=("gradient",), rtol=0, atol=0)
            self.assertEqual({param.grad.dtype for param in model.parameters()}, {grad_dtype or bf16})
            with torch.no_grad():
                for param in (*replica.parameters(), *model.parameters()):
                    param.sub_(param.grad.to(bf16) * 0.5)
                    param.grad = None
            check_parity(self, replica, model, what=("parameter",), rtol=0, atol=0)
        self.assertFalse(any(map(torch.equal, start.parameters(), replica.parameters())))


class TestFullyShardGradDtypeHSDP(GradDtypeTest):
    world_size = 4

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(grad_dtype=[f32, UNSET], reduce_dtype=[None, f32, bf16])
    def test_all_reduce_in_grad_dtype(self, grad_dtype, reduce_dtype):
        """The all-reduce uses the dtype of the reduce-scatter. Partial reductions also accumulate in that dtype."""
        mesh = make_mesh(2, 2, names=("replicate", "shard"))
        layer = self._layer(bf16, grad_dtype, mesh=mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=reduce_dtype))
        expected = bf16 if grad_dtype == UNSET else f32
        reduced_in = reduce_dtype or expected
        all_reduced = []
        layer.set_all_reduce_hook(lambda output: all_reduced.append(output.dtype))
        parts = [1.0, BIT / 4, BIT / 4]
        for index, part in enumerate(parts, 1):
            layer.set_requires_all_reduce(index == len(parts))
            self._backward(layer, part * (1 + self.rank))
        self.assertEqual((self._dtypes_reduced(), all_reduced), ([reduced_in] * 3, [reduced_in]))
        mean = torch.tensor(2.5 * (1 + BIT / 2) if reduced_in == f32 else 2.5)
        self._check_layer(layer, expected, mean.to(expected).item())

    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(grad_dtype=[f32, UNSET], param_dtype=[None, bf16])
    def test_tensor_parallel_sum_in_grad_dtype(self, grad_dtype, param_dtype):
        """The sum of partial gradients over TP ranks, before FSDP's reduction, is also in the requested dtype."""
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        storage = f32 if param_dtype else bf16
        norm = nn.LayerNorm(2, device=self.device, dtype=storage)
        parallelize_module(norm, mesh["tp"], SequenceParallel())
        for param in norm.parameters():
            ask_for(param, grad_dtype)
        fully_shard(norm, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype))
        output = norm(torch.ones(1, 1, 2, device=self.device, dtype=bf16)).to_local()
        part = BIT / 4 if mesh.get_local_rank("tp") else 1.0
        (output * part * (1 + mesh.get_local_rank("dp"))).sum().backward()
        grad = norm.bias.grad
        expected = bf16 if grad_dtype == UNSET and storage == bf16 else f32
        self.assertEqual((grad.dtype, grad.to_local().dtype), (expected, expected))
        mean = 1.5 * (1 + BIT / 4 if expected == f32 else 1)
        self.assertEqual(grad.full_tensor(), torch.full((2,), mean, device=self.device, dtype=expected), rtol=0, atol=0)

    @skip_if_lt_x_gpu(1)
    def test_tensor_parallel_sum_in_reduce_dtype(self):
        """The sum over TP ranks is in ``reduce_dtype`` if no ``grad_dtype`` requests another dtype."""
        mesh = make_mesh(2, 2, names=("dp", "tp"))
        norm = nn.LayerNorm(2, device=self.device)
        parallelize_module(norm, mesh["tp"], SequenceParallel())
        fully_shard(norm, mesh=mesh["dp"], mp_policy=MixedPrecisionPolicy(param_dtype=bf16, reduce_dtype=f32))
        output = norm(torch.ones(1, 1, 2, device=self.device)).to_local()
        part = BIT / 4 if mesh.get_local_rank("tp") else 1.0
        (output * part * (1 + mesh.get_local_rank("dp"))).sum().backward()
        actual, mean = norm.bias.grad.full_tensor(), 1.5 * (1 + BIT / 4)
        with torch_defect("fsdp2_tp_reduction_ignores_reduce_dtype"):
            self.assertEqual(actual, torch.full((2,), mean, device=self.device), rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
