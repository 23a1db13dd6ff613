"""FSDP2's mixed precision: which dtype a module computes in, gradients are reduced and accumulated in, and tensors are
cast to on the way in and out.

The trainings are compared bit for bit with replicas that cast by hand. They use two ranks: a sum of two numbers
does not depend on the order of the summands, in whatever precision.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_fsdp_tests import accelerator, torch_facts
from torch_fsdp_tests.common_distributed import SaveForwardInputsModel, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, FSDPTestMultiThread, check_sharded_parity
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp.collectives import RecordingAllGather, RecordingReduceScatter, recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import ShardAdam
from torch_fsdp_tests.fsdp.references import average, average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import shard_largest_dim
from torch_fsdp_tests.fsdp.training import shard_each

DIM = 16
ITERATIONS = 4  # the state of Adam counts from the second on
BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mean_of_two_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The mean in the dtype of the tensor. Float16 is halved before it is added, since the sum may not fit."""
    first, second = (torch.empty_like(tensor) for _ in range(2))
    dist.all_gather([first, second], tensor)
    return first / 2 + second / 2 if tensor.dtype == torch.float16 else (first + second) / 2


class Replica:
    """A float32 model with its optimizer, and a copy in ``param_dtype`` that computes for it.

    Gradients are cast to ``reduce_dtype``, added up over backwards and averaged over the ranks in it.
    """

    def __init__(self, model: nn.Module, param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> None:
        self.model = copy.deepcopy(model)
        self._copy = copy.deepcopy(model).to(param_dtype)
        self._reduce_dtype = reduce_dtype
        self._optim = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self._start = [param.detach().clone() for param in self.model.parameters()]

    def backward(self, inp: torch.Tensor) -> torch.Tensor:
        loss = self._copy(inp).sum()
        loss.backward()
        for param, computed in zip(self.model.parameters(), self._copy.parameters()):
            grad = computed.grad.to(self._reduce_dtype)
            computed.grad = None
            param.accumulated = grad if (before := getattr(param, "accumulated", None)) is None else before + grad
        return loss.detach()

    def reduce(self) -> None:
        for param in self.model.parameters():
            param.grad = mean_of_two_ranks(param.accumulated).float()
            param.accumulated = None

    def step(self) -> None:
        self._optim.step()
        self._optim.zero_grad()
        with torch.no_grad():
            for param, computed in zip(self.model.parameters(), self._copy.parameters()):
                computed.copy_(param)

    def trained_all(self) -> bool:
        return not any(map(torch.equal, self._start, self.model.parameters()))


@dataclasses.dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Nested:
    pair: Pair
    z: Any


class NamedPair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


# Each kind: how many tensors it has, how they are put in, and how they are taken out.
CONTAINERS: dict[str, tuple[int, Callable[..., Any], Callable[[Any], tuple[torch.Tensor, ...]]]] = {
    "dataclass": (2, Pair, lambda c: (c.x, c.y)),
    "nested_dataclass": (3, lambda x, y, z: Nested(Pair(x, y), z), lambda c: (c.pair.x, c.pair.y, c.z)),
    "namedtuple": (2, NamedPair, tuple),
}


class ToContainer(nn.Module):
    """A container of clones, so that each has a path of its own through autograd."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.count, self.pack, _ = CONTAINERS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(*(x.clone() * (i + 1) for i in range(self.count)))


class ContainerLinear(nn.Module):
    """One layer for all tensors of a container. Remembers their dtypes."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        _, self.pack, self.unpack = CONTAINERS[kind]
        self.lin = nn.Linear(DIM, DIM)
        self.seen: list[torch.dtype] = []

    def forward(self, container: Any) -> Any:
        self.seen.extend(tensor.dtype for tensor in self.unpack(container))
        return self.pack(*(torch.tanh(self.lin(tensor)) for tensor in self.unpack(container)))


class FromContainer(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.unpack = CONTAINERS[kind][2]

    def forward(self, container: Any) -> torch.Tensor:
        return sum(self.unpack(container))


class TestFullyShardMixedPrecisionTraining(FSDPTest):
    world_size = 2

    def _init_models_and_optims(
        self,
        reshard_after_forward: bool | int,
        param_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        use_shard_placement_fn: bool,
    ) -> tuple[Replica, nn.Module, torch.optim.Optimizer]:
        manual_seed(42)
        model = nn.Sequential(*(MLP(DIM) for _ in range(3)))
        for mlp in model:
            nn.init.uniform_(mlp.out_proj.bias, 0.5, 1)  # or so many ReLUs are closed that some weights rest
        computed_in = param_dtype or torch.float32
        by_default = torch.float32 if torch_facts.REDUCES_IN_PARAMETER_DTYPE else computed_in
        replica = Replica(model.to(self.device), computed_in, reduce_dtype or by_default)

        fsdp = functools.partial(
            fully_shard,
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype),
            shard_placement_fn=shard_largest_dim if use_shard_placement_fn else None,
        )
        for mlp in model:
            fsdp(mlp)
        fsdp(model)
        self.assertEqual(model[0].out_proj.weight.placements, (Shard(1 if use_shard_placement_fn else 0),))
        return replica, model, ShardAdam(model.parameters(), lr=1e-2)

    def _check_identical(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        self.assertEqual(found, expected, rtol=0, atol=0)

    def _train_and_compare(
        self, replica: Replica, model: nn.Module, optim: torch.optim.Optimizer, inp_dtype: torch.dtype
    ) -> list[torch.dtype]:
        """Some steps with inputs of this rank's own. Returns the dtypes of all reduce-scatters."""
        manual_seed(42 + self.rank + 1)
        with recorded() as calls:
            for _ in range(ITERATIONS):
                inp = torch.randn((4, DIM), device=self.device, dtype=inp_dtype)
                ref_loss = replica.backward(inp)
                replica.reduce()
                loss = model(inp).sum()
                loss.backward()
                self._check_identical(loss.detach(), ref_loss)
                check_sharded_parity(self, replica.model, model)
                replica.step()
                optim.step()
                optim.zero_grad()
        check_sharded_parity(self, replica.model, model)
        self.assertTrue(replica.trained_all())
        return [output.dtype for output in calls.values("reduce_scatter", "output")]

    @skip_if_lt_x_gpu(2)
    @subtests(
        param_dtype=[torch.bfloat16, torch.float16],
        reshard_after_forward=[False, True, 2],
        use_shard_placement_fn=[False, True],
    )
    def test_compute_dtype(self, param_dtype, reshard_after_forward, use_shard_placement_fn):
        """Without a reduce dtype gradients are reduced as they were computed; since 2.15 in the parameters' dtype."""
        made = self._init_models_and_optims(reshard_after_forward, param_dtype, None, use_shard_placement_fn)
        dtypes = self._train_and_compare(*made, inp_dtype=param_dtype)
        reduced_in = torch.float32 if torch_facts.REDUCES_IN_PARAMETER_DTYPE else param_dtype
        self.assertEqual(dtypes, [reduced_in] * 3 * ITERATIONS)

    @skip_if_lt_x_gpu(2)
    def test_reduce_dtype(self):
        config = {"reshard_after_forward": [False, True, 2], "use_shard_placement_fn": [False, True]}
        self.run_subtests(config, self._test_reduce_dtype_fp32_reduce)
        self.run_subtests(config, self._test_reduce_dtype_bf16_reduce)

    def _test_reduce_dtype_fp32_reduce(self, reshard_after_forward: bool | int, use_shard_placement_fn: bool) -> None:
        made = self._init_models_and_optims(
            reshard_after_forward, torch.bfloat16, torch.float32, use_shard_placement_fn
        )
        dtypes = self._train_and_compare(*made, inp_dtype=torch.bfloat16)
        self.assertEqual(dtypes, [torch.float32] * 3 * ITERATIONS)

    def _test_reduce_dtype_bf16_reduce(self, reshard_after_forward: bool | int, use_shard_placement_fn: bool) -> None:
        made = self._init_models_and_optims(
            reshard_after_forward, torch.float32, torch.bfloat16, use_shard_placement_fn
        )
        dtypes = self._train_and_compare(*made, inp_dtype=torch.float32)
        self.assertEqual(dtypes, [torch.bfloat16] * 3 * ITERATIONS)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_grad_acc_with_reduce_dtype(self, reshard_after_forward):
        """Gradients of microbatches that are not reduced wait for the last one in the reduce dtype."""
        replica, model, optim = self._init_models_and_optims(
            reshard_after_forward, torch.bfloat16, torch.float32, use_shard_placement_fn=False
        )
        manual_seed(42 + self.rank + 1)
        device = self.device
        microbatches = list(torch.randn((4, 8, DIM), device=device, dtype=torch.bfloat16))
        for _ in range(ITERATIONS):
            with recorded() as calls:
                for index, inp in enumerate(microbatches):
                    last = index == len(microbatches) - 1
                    model.set_requires_gradient_sync(last)
                    model.set_reshard_after_backward(last or reshard_after_forward)
                    loss = model(inp).sum()
                    loss.backward()
                    self.assertEqual(loss.dtype, torch.bfloat16)
                    self._check_identical(loss.detach(), replica.backward(inp))
            self.assertEqual([output.dtype for output in calls.values("reduce_scatter", "output")], [torch.float32] * 3)
            replica.reduce()
            check_sharded_parity(self, replica.model, model)
            replica.step()
            optim.step()
            optim.zero_grad()
        self.assertTrue(replica.trained_all())

    @skip_if_lt_x_gpu(2)
    @subtests(
        container=list(CONTAINERS),
        dtypes=[(None, None), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    )
    def test_structured_input_output(self, container, dtypes):
        """Tensors in a container are cast, and found for the backward. Each rank compares its part of the batch."""
        if "dataclass" in container:
            skip_unless([torch_facts.FINDS_TENSORS_IN_DATACLASSES.lacks])
        param_dtype, reduce_dtype = dtypes
        manual_seed(42)
        model = nn.Sequential(
            ToContainer(container), ContainerLinear(container), ContainerLinear(container), FromContainer(container)
        ).to(self.device)
        replica = Replica(model, param_dtype or torch.float32, reduce_dtype or torch.float32)
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        shard_each((*model, model), mp_policy=policy)
        optim = ShardAdam(model.parameters(), lr=1e-2)
        manual_seed(1)
        for _ in range(ITERATIONS):
            rows = torch.randn((2 * self.world_size, DIM), device=self.device)
            mine = rows[2 * self.rank : 2 * self.rank + 2]
            loss = model(mine).sum()
            loss.backward()
            self._check_identical(loss.detach(), replica.backward(mine.to(param_dtype)))
            replica.reduce()
            check_sharded_parity(self, replica.model, model)
            replica.step()
            optim.step()
            optim.zero_grad()
        self.assertEqual(set(model[1].seen + model[2].seen), {param_dtype or torch.float32})
        self.assertTrue(replica.trained_all())


class TestFullyShardMixedPrecisionJVP(FSDPTest):
    world_size = 2

    def _materialized(self, in_features: int, out_features: int, generator: torch.Generator) -> nn.Linear:
        linear = nn.Linear(in_features, out_features, bias=False, device="meta")
        fully_shard(linear, mp_policy=BF16_FP32, reshard_after_forward=False)
        linear.to_empty(device=accelerator.current().type)
        whole = torch.randn((out_features, in_features), generator=generator) / math.sqrt(in_features)
        local = linear.weight.to_local()
        local.data.copy_(whole.chunk(self.world_size)[self.rank])
        linear.whole = whole.to(local.device)
        return linear

    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    @skip_if_lt_x_gpu(2)
    def test_no_warmup_jvp_reshard_after_forward_false(self):
        """The first forward of a module may be inside ``jvp``, which must not see how parameters are gathered."""
        generator = torch.Generator().manual_seed(42)
        encoder, decoder = self._materialized(128, 256, generator), self._materialized(256, 320, generator)
        inp = torch.randn(128, generator=generator).bfloat16().to(self.device)
        encoded = encoder(inp)
        primal = torch.randn(4, generator=generator).to(inp.device).requires_grad_()
        output, tangent = torch.func.jvp(lambda ignored: decoder(encoded), (primal,), (torch.ones_like(primal),))
        self.assertEqual(output.shape, (320,))
        self.assertEqual(output.dtype, torch.bfloat16)
        self.assertEqual(tangent, torch.zeros_like(output))
        expected = F.linear(F.linear(inp, encoder.whole.bfloat16()), decoder.whole.bfloat16())
        self.assertEqual(output, expected)

    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    @skip_if_lt_x_gpu(2)
    def test_jvp_casts_and_differentiates(self):
        """Beyond upstream: the tangent of a float32 input is cast with it, and is that of the whole weight."""
        generator = torch.Generator().manual_seed(42)
        layer = self._materialized(8, 6, generator)
        primal, direction = (torch.randn(8, generator=generator).to(layer.whole.device) for _ in range(2))
        for _ in range(2):  # the second finds the weight gathered
            output, tangent = torch.func.jvp(layer, (primal,), (direction,))
            weight = layer.whole.bfloat16()
            self.assertEqual(output, F.linear(primal.bfloat16(), weight))
            self.assertEqual(tangent, F.linear(direction.bfloat16(), weight))


class Recording(nn.Linear):
    """A layer that remembers the dtypes of what its forward received and, by a hook of the test, returned."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        super().__init__(in_features, out_features, device=device)
        self.inputs: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x.dtype)
        return super().forward(x)


class Through(nn.Module):
    """Hands its arguments on as they come, and remembers them; ``returns`` may put something else in their place."""

    def __init__(self, device: torch.device, returns: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))
        self.returns = returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return args[0] * self.weight if self.returns is None else self.returns


class WithCount(nn.Module):
    """A floating-point parameter beside one of integers that bfloat16 cannot hold."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0, device=device).view(6, 2) / 7)
        self.count = nn.Parameter(torch.arange(10**9, 10**9 + 5, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.weight.dtype, self.count.dtype, self.count.detach().clone())
        return F.linear(x, self.weight)


class TestFullyShardMixedPrecisionCasts(FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_float16_on_one_submodule(self):
        half, single = torch.float16, torch.float32
        to_half = MixedPrecisionPolicy(param_dtype=half)
        # Which child has a policy, the policy, whether the model casts by itself, and the inputs of model, c1 and c2.
        cases = [
            ("c2", to_half, False, (single, single, half)),
            ("c2", dataclasses.replace(to_half, cast_forward_inputs=False), True, (single, single, single)),
            ("c1", dataclasses.replace(to_half, output_dtype=single), False, (single, half, single)),
        ]
        for child, policy, user_casts, expected in cases:
            inputs: dict[nn.Module, torch.Tensor] = {}
            model = SaveForwardInputsModel(inputs, cast_forward_inputs=user_casts).to(self.device)
            fully_shard(model.get_submodule(child), mp_policy=policy)
            fully_shard(model)
            output = model(torch.zeros(2, 100, device=self.device))
            found = tuple(inputs[module].dtype for module in (model, model.c1, model.c2))
            self.assertEqual(found, expected)
            self.assertEqual(output.dtype, half if child == "c2" else single)
            output.sum().backward()
            self.assertEqual([param.grad.dtype for param in model.parameters()], [single] * 4)

    @skip_if_lt_x_gpu(1)
    @subtests(enable_submodule_cast=[False, True])
    def test_submodules_with_external_inputs(self, enable_submodule_cast):
        """A tensor that a submodule gets from elsewhere than the root is cast by the submodule or not at all."""

        class Adder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                self.inputs = (x.dtype, y.dtype)
                return self.lin(x.to(self.lin.weight.dtype) + y.to(self.lin.weight.dtype))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l1, self.l2 = nn.Linear(4, 4), Adder()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.input = x.dtype
                return self.l2(self.l1(x), torch.ones(4, 4, device=x.device))

        half = torch.float16
        model = Model().to(self.device)
        fully_shard(
            model.l2, mp_policy=MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=enable_submodule_cast)
        )
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=half))
        model(torch.randn(4, 4, device=self.device)).sum().backward()
        self.assertEqual(model.input, half)
        self.assertEqual(model.l2.inputs, (half, half if enable_submodule_cast else torch.float32))

    def _test_checkpoint_recompute_casts(self, policy: MixedPrecisionPolicy, inp_dtype: torch.dtype) -> Any:
        """Run a wrapped layer under checkpoint to its end, forward and backward, and return inputs and outputs."""

        class Model(nn.Module):
            def __init__(self, device: torch.device) -> None:
                super().__init__()
                self.lin = Recording(1, 1, device)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with set_checkpoint_early_stop(False):
                    return checkpoint(self._inner, x, use_reentrant=False)

            def _inner(self, x: torch.Tensor) -> torch.Tensor:
                # The root's cast is undone, so that what the layer receives and returns is its own doing.
                output = self.lin(x.to(inp_dtype))
                outputs.append(output.dtype)
                return output

        outputs: list[torch.dtype] = []
        model = Model(self.device)
        fully_shard(model.lin, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model(torch.ones(1, 1, device=self.device, dtype=inp_dtype, requires_grad=True)).sum().backward()
        return model.lin.inputs, outputs

    @needs(torch_facts.CASTS_RECOMPUTED_INPUTS)
    @skip_if_lt_x_gpu(1)
    def test_checkpoint_recompute_casts_forward_inputs(self):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        inputs, _ = self._test_checkpoint_recompute_casts(policy, torch.float32)
        self.assertEqual(inputs, [torch.bfloat16] * 2)

    @needs(torch_facts.CASTS_RECOMPUTED_INPUTS)
    @skip_if_lt_x_gpu(1)
    def test_checkpoint_recompute_casts_outputs(self):
        policy = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16,
            reduce_dtype=torch.bfloat16,
            output_dtype=torch.float32,
            cast_forward_inputs=False,
        )
        _, outputs = self._test_checkpoint_recompute_casts(policy, torch.bfloat16)
        self.assertEqual(outputs, [torch.float32] * 2)

    @skip_if_lt_x_gpu(1)
    def test_norm_modules_bf16(self):
        self._test_norm_modules(MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    @skip_if_lt_x_gpu(1)
    def test_norm_modules_fp16(self):
        self._test_norm_modules(MixedPrecisionPolicy(param_dtype=torch.float16))

    def _test_norm_modules(self, policy: MixedPrecisionPolicy) -> None:
        """Norms work under the policy. Where running statistics in float32 beside weights in ``param_dtype`` are too
        much for this device, FSDP says what the device says; both remedies work on all."""
        linear, convolution = functools.partial(nn.Linear, 32, 32), functools.partial(nn.Conv2d, kernel_size=3)
        self._check_norm(nn.Sequential(linear(), nn.LayerNorm(32), linear()), (4, 32), policy)
        for make, shape in (
            (lambda: nn.Sequential(linear(), nn.BatchNorm1d(32), linear()), (4, 32)),
            (lambda: nn.Sequential(convolution(1, 5), nn.BatchNorm2d(5), convolution(5, 4)), (3, 1, 9, 9)),
        ):
            self._check_norm(make(), shape, policy, may_be_refused=True)
            model = make()
            for name, buffer in model[1].named_buffers():
                if buffer.is_floating_point():
                    setattr(model[1], name, buffer.to(policy.param_dtype))
            self._check_norm(model, shape, policy)
            # Or the norm keeps its parameters too, and takes what comes.
            self._check_norm(make(), shape, policy, MixedPrecisionPolicy(output_dtype=policy.param_dtype))

    def _check_norm(
        self,
        model: nn.Sequential,
        shape: tuple[int, ...],
        policy: MixedPrecisionPolicy,
        norm_policy: MixedPrecisionPolicy | None = None,
        may_be_refused: bool = False,
    ) -> None:
        """Compare the output and the buffers with those of a copy whose parameters are cast once and for all."""
        model = filled(model).to(self.device)
        replica = copy.deepcopy(model)
        for index, module in enumerate(replica):
            for param in module.parameters():
                if index != 1 or norm_policy is None:
                    param.data = param.data.to(policy.param_dtype)
        for index, module in enumerate(model):
            fully_shard(module, mp_policy=norm_policy or policy if index == 1 else policy)
        fully_shard(model, mp_policy=policy)
        inp = torch.sin(torch.arange(math.prod(shape), device=self.device).view(shape)) + self.rank
        try:
            expected = replica(inp.to(policy.param_dtype))
        except RuntimeError as refusal:
            if not may_be_refused:
                raise
            with self.assertRaisesRegex(RuntimeError, re.escape(str(refusal))):
                model(inp)
            return
        output = model(inp)
        self.assertEqual(output.dtype, policy.param_dtype)
        self.assertEqual(output, expected)
        self.assertEqual(dict(model.named_buffers()), dict(replica.named_buffers()))
        output.sum().backward()
        for name, param in model.named_parameters():
            self.assertEqual(param.grad.dtype, torch.float32, msg=name)
            self.assertTrue(param.grad.to_local().isfinite().all(), name)

    @skip_if_lt_x_gpu(1)
    def test_clamp_reduce_dtype(self):
        """A reduce dtype equal to the parameters' is not forgotten when the parameters are cast after wrapping."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        model = nn.Sequential(*(nn.Linear(32, 32, device=self.device, dtype=torch.bfloat16) for _ in range(2)))
        recording = RecordingReduceScatter()
        shard_each((*model, model), mp_policy=policy)
        for linear in model:
            linear.set_custom_reduce_scatter(recording)
        self.assertEqual(policy.reduce_dtype, torch.bfloat16)
        model.to(torch.float32)
        model(torch.ones(2, 32, device=self.device)).sum().backward()
        self.assertEqual([output.dtype for output in recording.outputs], [torch.bfloat16] * 2)
        self.assertEqual([param.grad.dtype for param in model.parameters()], [torch.float32] * 4)

    @skip_if_lt_x_gpu(1)
    def test_dataclass_input(self):
        @dataclasses.dataclass
        class Input:
            x: torch.Tensor

        class Model(nn.Module):
            def __init__(self, device: torch.device) -> None:
                super().__init__()
                self.lin = nn.Linear(10, 10, device=device)

            def forward(self, inp: Input) -> torch.Tensor:
                self.seen = inp.x.dtype
                return self.lin(inp.x)

        model = Model(self.device)
        bf16 = torch.bfloat16
        fully_shard(model, mp_policy=MixedPrecisionPolicy(bf16, bf16, bf16, True))
        inp = Input(torch.randn(2, 10, device=self.device))
        output = model(inp)
        output.sum().backward()
        self.assertEqual((model.seen, output.dtype, inp.x.dtype), (bf16, bf16, torch.float32))
        self.assertTrue(model.lin.weight.grad.to_local().any())

    def _nested(self) -> tuple[dict[str, Any], list[Any]]:
        """A container with all kinds of members, and its members in order."""
        half, single = (torch.ones(2, device=self.device, dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
        double, count = single.double(), torch.ones(2, device=self.device, dtype=torch.int64)
        mask = count.bool()
        nested = Nested(Pair(single, count), NamedPair(double, mask))
        container = {"deep": (half, [collections.OrderedDict(nested=nested)]), "name": "n", "none": None}
        return container, [half, single, double, count, mask, "n", None]

    def _members(self, container: dict[str, Any]) -> list[Any]:
        half, (ordered,) = container["deep"]
        nested = ordered["nested"]
        types = [type(part) for part in (ordered, nested, nested.pair, nested.z)]
        self.assertEqual(types, [collections.OrderedDict, Nested, Pair, NamedPair])
        others = [nested.pair.y, nested.z.y, container["name"], container["none"]]
        return [half, nested.pair.x, nested.z.x, *others]

    def _check_cast_members(self, container: dict[str, Any], members: list[Any]) -> None:
        """All floating-point tensors must be bfloat16 now; what was that already, or is no such thing, is itself."""
        half, single, double, *others = self._members(container)
        self.assertIs(half, members[0])
        for cast, original in ((single, members[1]), (double, members[2])):
            self.assertEqual(cast.dtype, torch.bfloat16)
            self.assertEqual(cast, original.bfloat16())
        for other, original in zip(others, members[3:], strict=True):
            self.assertIs(other, original)

    @skip_if_lt_x_gpu(1)
    def test_output_dtype_of_containers(self):
        """Beyond upstream: every floating-point tensor of what a forward returns is cast, and nothing else."""
        container, members = self._nested()
        model = Through(self.device, returns=container)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
        self._check_cast_members(model(), members)

    @skip_if_lt_x_gpu(1)
    def test_param_dtype_of_containers(self):
        """Beyond upstream: every floating-point tensor that a forward receives is cast, positional or by name."""
        container, members = self._nested()
        model = Through(self.device, returns=members[1])
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        output = model(container, named=container)
        self._check_cast_members(model.args[0], members)
        self._check_cast_members(model.kwargs["named"], members)
        self.assertIs(output, members[1])  # without an output dtype

    @needs(torch_facts.GROUPS_CAST_EACH_INPUT)
    @skip_if_lt_x_gpu(1)
    def test_grouped_modules_cast_inputs(self):
        """Beyond upstream: modules that share one FSDP group each cast what they receive and return."""
        bf16, single = torch.bfloat16, torch.float32
        first, second = (filled(Recording(4, 4, self.device)) for _ in range(2))
        root = nn.Sequential(first, nn.Identity(), second)
        replica = copy.deepcopy(root)
        outputs: list[torch.dtype] = []
        root[1].register_forward_hook(lambda module, args, output: output.float())
        fully_shard([first, second], mp_policy=MixedPrecisionPolicy(bf16, single, output_dtype=single))
        fully_shard(root)
        for linear in (first, second):
            linear.register_forward_hook(lambda module, args, output: outputs.append(output.dtype))
        inp = torch.ones(2, 4, device=self.device) / 3 + self.rank
        output = root(inp)
        self.assertEqual((first.inputs, second.inputs), ([bf16], [bf16]))
        self.assertEqual(outputs, [single, single])
        replica.to(bf16)
        expected = replica(inp.to(bf16))
        self.assertEqual(output, expected.float())
        output.sum().backward()
        expected.sum().backward()
        for param, ref_param in zip(root.parameters(), replica.parameters()):
            average([mean := ref_param.grad.float()])
            self.assertEqual(param.grad.full_tensor(), mean)

    @skip_if_lt_x_gpu(1)
    @subtests(param_dtype=[None, torch.bfloat16, torch.float16])
    def test_all_gather_dtype(self, param_dtype):
        """Beyond upstream: parameters travel in the param dtype, in forward and in backward."""
        model = filled(MLP(4, self.device))
        recording = RecordingAllGather()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype), reshard_after_forward=True)
        model.set_custom_all_gather(recording)
        for _ in range(2):
            model(torch.ones(2, 4, device=self.device)).sum().backward()
        numel = 2 * 4 * 16 + 16 + 4
        self.assertEqual(recording.outputs, [(param_dtype or torch.float32, numel, 2)] * 4)

    @needs(torch_facts.SHARDS_INTEGER_PARAMETERS)
    @skip_if_lt_x_gpu(1)
    def test_integers_are_not_cast(self):
        """Beyond upstream: a parameter of integers is gathered as it is, as bytes beside the others' param dtype."""
        bf16 = torch.bfloat16
        model = WithCount(self.device)
        weight, count = model.weight.detach().clone(), model.count.detach().clone()
        recording = RecordingAllGather()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=bf16), reshard_after_forward=True)
        model.set_custom_all_gather(recording)
        inp = torch.ones(3, 2, device=self.device) / 3
        for step in range(2):
            output = model(inp)
            self.assertEqual(model.seen, (bf16, torch.int64, count))
            self.assertEqual(output, F.linear(inp.to(bf16), weight.to(bf16)))
            output.sum().backward()
            self.assertEqual(model.weight.grad.full_tensor(), (step + 1) * inp.to(bf16).sum(0).float().expand(6, 2))
            self.assertIsNone(model.count.grad)
        numel = 6 * 2 * 2 + 6 * 8  # bytes; the five integers are padded to six
        self.assertEqual(recording.outputs, [(torch.uint8, numel, 2)] * 4)
        self.assertEqual(model.count.dtype, torch.int64)
        self.assertEqual(model.count.full_tensor(), count)


class TestFullyShardMixedPrecisionReduction(FSDPTestMultiThread):
    world_size = 8

    @skip_if_lt_x_gpu(1)
    @subtests(
        param_dtype=[torch.float16, torch.bfloat16], mesh_shape=[(4, 2), (2, 4), (1, 8)], replicates=[False, True]
    )
    def test_float16_divides_before_and_after(self, param_dtype, mesh_shape, replicates):
        """Beyond upstream: float16 is divided in part before it is summed, by powers of two, which costs no bit.

        What overflows when it is summed first comes out exact. Other dtypes are divided by the collective itself.
        """
        mesh = make_mesh(*mesh_shape, names=("replicate", "shard"))
        mesh = mesh if replicates else mesh["shard"]
        ranks = mesh.size()
        layer = fully_shard(
            nn.Linear(2, 8, bias=False, device=self.device),
            mesh=mesh,
            mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=param_dtype),
        )
        recording = RecordingReduceScatter()
        layer.set_custom_reduce_scatter(recording)
        before = {2: 2, 4: 2, 8: 4}[ranks] if param_dtype == torch.float16 else 1
        large = 20000.0 if param_dtype == torch.float16 else 2.0**100
        others = self.rank % mesh_shape[1] if not replicates else self.rank  # a number of its own in its group
        for value, mean in ((1.0, 1.0), (2.0 * others, ranks - 1.0), (large, large)):
            layer.weight.grad = None
            layer(torch.full((1, 2), value, device=self.device)).sum().backward()
            self.assertEqual(recording.inputs[-1].dtype, param_dtype)
            # The gradients of a linear layer are its inputs.
            self._check_identical(recording.inputs[-1], value / before)
            self._check_identical(layer.weight.grad.to_local(), mean)

    def _check_identical(self, found: torch.Tensor, expected: float) -> None:
        self.assertEqual(found, torch.full_like(found, expected), rtol=0, atol=0)


class TestFullyShardMixedPrecisionSmallerMesh(FSDPTestMultiThread):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_gather_in_smaller_mesh(self):
        """Beyond upstream: what is resharded to two ranks after forward stays in the param dtype until the step.

        At two ranks in all, where the comparisons above are exact, this cannot be told from full resharding.
        """
        replica = filled(MLP(4, self.device, dim_multiplier=2))
        replica.out_proj.bias.data.add_(2)
        model = copy.deepcopy(replica)
        recording = RecordingAllGather()
        fully_shard(model, mp_policy=BF16_FP32, reshard_after_forward=2)
        model.set_custom_all_gather(recording)
        inp = torch.sin(torch.arange(12.0, device=self.device)).view(3, 4) + self.rank / 4
        for _ in range(3):
            lowered = copy.deepcopy(replica).bfloat16()
            ref_loss, loss = lowered(inp.bfloat16()).sum(), model(inp).sum()
            self.assertEqual(model.in_proj.weight.to_local().dtype, torch.bfloat16)
            ref_loss.backward()
            loss.backward()
            self.assertEqual(loss.detach(), ref_loss.detach(), rtol=0, atol=0)
            for param, computed in zip(replica.parameters(), lowered.parameters()):
                param.grad = computed.grad.float()
            average_gradients(replica)
            check_sharded_parity(self, replica, model)
            with torch.no_grad():
                for param in (*replica.parameters(), *model.parameters()):
                    param.sub_(param.grad * 0.03)
                    param.grad = None
        numel = 2 * 4 * 8 + 8 + 4
        in_all, in_two = (torch.bfloat16, numel, 4), (torch.bfloat16, numel, 2)
        self.assertEqual(recording.outputs, [in_all, in_two] * 3)


if __name__ == "__main__":
    run_tests()
