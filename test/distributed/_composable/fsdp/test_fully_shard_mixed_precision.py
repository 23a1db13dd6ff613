"""FSDP2's mixed precision: the dtypes of the computation, of the reduction and accumulation of gradients, and of inputs
and outputs.

Training is compared bitwise with replicas that cast explicitly. It uses two ranks, because a sum of two numbers does
not depend on their order in any precision.
"""

from __future__ import annotations

import collections
import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, FSDPTestMultiThread, check_sharded_parity
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.custom_comms import RecordingAllGather, RecordingReduceScatter
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.mixed_precision import DIM, ITERATIONS, CastsMixin, Replica, ReplicaMixin
from torch_fsdp_tests.fsdp.optimizers import ShardAdam
from torch_fsdp_tests.fsdp.references import average, average_gradients
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.shards import shard_largest_dim
from torch_fsdp_tests.fsdp.training import shard_each
from torch_fsdp_tests.installed_torch import torch_facts

BF16_FP32 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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


# For each kind: the number of tensors, a function that packs them, and a function that unpacks them.
CONTAINERS: dict[str, tuple[int, Callable[..., Any], Callable[[Any], tuple[torch.Tensor, ...]]]] = {
    "dataclass": (2, Pair, lambda c: (c.x, c.y)),
    "nested_dataclass": (3, lambda x, y, z: Nested(Pair(x, y), z), lambda c: (c.pair.x, c.pair.y, c.z)),
    "namedtuple": (2, NamedPair, tuple),
}


class ToContainer(nn.Module):
    """Returns a container of clones, so each tensor has its own path through autograd."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.count, self.pack, _ = CONTAINERS[kind]

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(*(x.clone() * (i + 1) for i in range(self.count)))


class ContainerLinear(nn.Module):
    """Applies one layer to all tensors of a container. Records their dtypes."""

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


class Scale(nn.Module):
    """Computes in the dtype of its weight and returns the dtype of its input. Records these dtypes."""

    def __init__(self, dim: int, device: torch.device | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, dim, device=device))
        self.bias = nn.Parameter(torch.zeros(dim, device=device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.weight.dtype, self.bias.dtype, x.dtype)
        return (x.to(self.weight.dtype) * self.weight + self.bias).to(x.dtype)


class TestFullyShardMixedPrecisionTraining(ReplicaMixin, FSDPTest):
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
            nn.init.uniform_(mlp.out_proj.bias, 0.5, 1)  # to keep ReLUs active, so all weights train
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

    @skip_if_lt_x_gpu(2)
    @subtests(
        param_dtype=[torch.bfloat16, torch.float16],
        reshard_after_forward=[False, True, 2],
        use_shard_placement_fn=[False, True],
    )
    def test_compute_dtype(self, param_dtype, reshard_after_forward, use_shard_placement_fn):
        """Without a reduce dtype, gradients are reduced in one dtype, see ``REDUCES_IN_PARAMETER_DTYPE``."""
        made = self._init_models_and_optims(reshard_after_forward, param_dtype, None, use_shard_placement_fn)
        calls = self._check_training(*made, inp_dtype=param_dtype)
        reduced_in = torch.float32 if torch_facts.REDUCES_IN_PARAMETER_DTYPE else param_dtype
        self.assertEqual(calls.dtypes("reduce_scatter"), [reduced_in] * 3 * ITERATIONS)

    @skip_if_lt_x_gpu(2)
    @subtests(
        dtypes=[(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)],
        reshard_after_forward=[False, True, 2],
        use_shard_placement_fn=[False, True],
    )
    def test_reduce_dtype(self, dtypes, reshard_after_forward, use_shard_placement_fn):
        param_dtype, reduce_dtype = dtypes
        made = self._init_models_and_optims(reshard_after_forward, param_dtype, reduce_dtype, use_shard_placement_fn)
        calls = self._check_training(*made, inp_dtype=param_dtype)
        self.assertEqual(calls.dtypes("reduce_scatter"), [reduce_dtype] * 3 * ITERATIONS)

    def _check_reduce_dtype_after(
        self,
        first_is_frozen: bool,
        policy: MixedPrecisionPolicy,
        beside: torch.dtype | None = None,
        grad_mode: type = torch.enable_grad,
    ) -> None:
        """Train a layer after a forward in which it was frozen or trainable. All values are exact in bfloat16.

        The first forward runs in ``grad_mode``. ``beside`` is the dtype of another parameter, which stays frozen.
        """
        manual_seed(42 + self.rank)
        layer = nn.Linear(4, 4, bias=False, device=self.device)
        if beside is not None:
            layer.table = nn.Parameter(torch.arange(4, device=self.device, dtype=beside), requires_grad=False)
        fully_shard(layer, mp_policy=policy, reshard_after_forward=True)
        layer.weight.requires_grad_(not first_is_frozen)
        first, inp = torch.randint(1, 9, (2, 2, 4), device=self.device).float()
        with grad_mode():
            layer(first)
        layer.weight.requires_grad_(True)
        with recorded() as calls:
            layer(inp).sum().backward()
        self.assertEqual(calls.dtypes("reduce_scatter"), [policy.reduce_dtype])
        self.assertEqual(layer.weight.grad.dtype, torch.float32)
        average([expected := inp.sum(0)])
        self.assertEqual(layer.weight.grad.to_local(), expected.expand(4 // self.world_size, 4), rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(dtypes=[(torch.bfloat16, torch.float32), (None, torch.bfloat16)])
    def test_reduce_dtype_after_trainable_forward(self, dtypes):
        """A layer that is trainable in its first forward reduces in the requested dtype."""
        self._check_reduce_dtype_after(False, MixedPrecisionPolicy(*dtypes))

    @skip_if_lt_x_gpu(2)
    @subtests(
        dtypes=[(torch.bfloat16, torch.float32), (None, torch.bfloat16)],
        beside=[None, torch.int64],
        grad_mode=[torch.enable_grad, torch.no_grad],
    )
    def test_reduce_dtype_after_frozen_first_forward(self, dtypes, beside, grad_mode):
        """A layer that is frozen in its first forward and trained later reduces in the requested dtype."""
        if beside is not None:
            skip_unless([torch_facts.SHARDS_INTEGER_PARAMETERS.lacks])
        with torch_defect("fsdp2_frozen_first_forward_breaks_training"):
            self._check_reduce_dtype_after(True, MixedPrecisionPolicy(*dtypes), beside, grad_mode)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_grad_acc_with_reduce_dtype(self, reshard_after_forward):
        """Gradients of microbatches without reduction accumulate in the reduce dtype."""
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
            self.assertEqual(calls.dtypes("reduce_scatter"), [torch.float32] * 3)
            replica.reduce()
            check_sharded_parity(self, replica.model, model)
            replica.step()
            optim.step()
            optim.zero_grad()
        self.assertTrue(replica.trained_all())

    @needs(torch_facts.CASTS_EACH_PARAMETER)
    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        param_dtype=[torch.bfloat16, torch.float16],
        reduce_dtype=[None, torch.float32, torch.bfloat16],
        reshard_after_forward=[False, True],
        use_shard_placement_fn=[False, True],
    )
    def test_param_dtype_override(self, param_dtype, reduce_dtype, reshard_after_forward, use_shard_placement_fn):
        """Some parameters of a group compute in float32, others in low precision. All reduce in one dtype."""
        manual_seed(42)
        model = nn.Sequential(MLP(DIM), Scale(DIM), MLP(DIM)).to(self.device)
        for mlp in (model[0], model[2]):
            nn.init.uniform_(mlp.out_proj.bias, 0.5, 1)  # to keep ReLUs active, so that no loss becomes zero
        replica = Replica(model, param_dtype, reduce_dtype or torch.float32, keeps=lambda name: name.startswith("1."))
        kept = set(model[1].parameters())
        policy = MixedPrecisionPolicy(
            param_dtype,
            reduce_dtype,
            param_dtype_override_fn=lambda param: torch.float32 if param in kept else None,
        )
        fully_shard(
            model,
            mp_policy=policy,
            reshard_after_forward=reshard_after_forward,
            shard_placement_fn=shard_largest_dim if use_shard_placement_fn else None,
        )
        optim = ShardAdam(model.parameters(), lr=1e-2)
        calls = self._check_training(replica, model, optim, inp_dtype=param_dtype)
        self.assertEqual(calls.dtypes("reduce_scatter"), [reduce_dtype or torch.float32] * ITERATIONS)
        self.assertEqual(model[1].seen, (torch.float32, torch.float32, param_dtype))

    @skip_if_lt_x_gpu(2)
    @subtests(
        container=list(CONTAINERS),
        dtypes=[(None, None), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)],
    )
    def test_structured_input_output(self, container, dtypes):
        """FSDP casts tensors in a container and finds them for backward. Each rank compares its part of a batch."""
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
        """The first forward of a module may be inside ``jvp``, which must not trace the all-gather."""
        generator = torch.Generator().manual_seed(42)
        encoder, decoder = self._materialized(128, 256, generator), self._materialized(256, 320, generator)
        inp = torch.randn(128, generator=generator).bfloat16().to(self.device)
        encoded = encoder(inp)
        primal = torch.randn(4, generator=generator).to(inp.device).requires_grad_()
        output, tangent = torch.func.jvp(lambda ignored: decoder(encoded), (primal,), (torch.ones_like(primal),))
        self.assertEqual(output.shape, (320,))
        self.assertEqual(output.dtype, torch.bfloat16)
        self.assertEqual(tangent, torch.zeros_like(output), may_be="zero")
        expected = F.linear(F.linear(inp, encoder.whole.bfloat16()), decoder.whole.bfloat16())
        self.assertEqual(output, expected)

    @torch_defect("fsdp2_first_forward_in_jvp_raises")
    @skip_if_lt_x_gpu(2)
    def test_jvp_casts_and_differentiates(self):
        """FSDP casts the tangent of a float32 input as well. The output's tangent uses the unsharded weight."""
        generator = torch.Generator().manual_seed(42)
        layer = self._materialized(8, 6, generator)
        primal, direction = (torch.randn(8, generator=generator).to(layer.whole.device) for _ in range(2))
        for _ in range(2):  # in the second, the weight is already unsharded
            output, tangent = torch.func.jvp(layer, (primal,), (direction,))
            weight = layer.whole.bfloat16()
            self.assertEqual(output, F.linear(primal.bfloat16(), weight))
            self.assertEqual(tangent, F.linear(direction.bfloat16(), weight))


class Recording(nn.Linear):
    """A layer that records the dtypes of its inputs and, by a hook of the test, of its outputs."""

    def __init__(self, in_features: int, out_features: int, device: torch.device) -> None:
        super().__init__(in_features, out_features, device=device)
        self.inputs: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.inputs.append(x.dtype)
        return super().forward(x)


class Through(nn.Module):
    """Records its arguments and returns them, or ``returns`` if that is set."""

    def __init__(self, device: torch.device, returns: Any = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, device=device))
        self.returns = returns

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        return args[0] * self.weight if self.returns is None else self.returns

    other = forward


class Sharing(nn.Sequential):
    """Passes one container to all of its layers. Each layer writes its output into the container."""

    def __init__(self, container: Any, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.container = container

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self):
            x = layer(x, self.container, index)
        return x


class Writing(nn.Linear):
    detaches = False

    def forward(self, x: torch.Tensor, container: Any, index: int) -> torch.Tensor:
        output = super().forward(x)
        container[index] = output.detach() if self.detaches else output
        return output


class WithCount(nn.Module):
    """Has a floating-point parameter, and one of integers that bfloat16 cannot hold exactly."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(1.0, 13.0, device=device).view(6, 2) / 7)
        self.count = nn.Parameter(torch.arange(10**9, 10**9 + 5, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = (self.weight.dtype, self.count.dtype, self.count.detach().clone())
        return F.linear(x, self.weight)


class TestFullyShardMixedPrecisionCasts(CastsMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_policy_is_a_constant(self):
        """Layers may share a policy, because it is immutable. Equal policies have the same hash."""
        policy = MixedPrecisionPolicy(torch.bfloat16)
        fully_shard(nn.Linear(2, 2, device=self.device), mp_policy=policy)
        with self.assertRaises(dataclasses.FrozenInstanceError):
            policy.param_dtype = torch.float16
        self.assertEqual({policy, MixedPrecisionPolicy(torch.bfloat16)}, {policy})

    @skip_if_lt_x_gpu(1)
    def test_float16_on_one_submodule(self):
        self._check_float16_on_one_submodule(fully_shard)

    @skip_if_lt_x_gpu(1)
    @subtests(enable_submodule_cast=[False, True])
    def test_submodules_with_external_inputs(self, enable_submodule_cast):
        """An input that does not come through the root is cast by the submodule or not at all."""
        self._check_submodules_with_external_inputs(fully_shard, enable_submodule_cast)

    def _test_checkpoint_recompute_casts(self, policy: MixedPrecisionPolicy, inp_dtype: torch.dtype) -> Any:
        """Run forward and backward of a wrapped layer in a checkpoint without early stop. Return the dtypes of its
        inputs and outputs.
        """

        class Model(nn.Module):
            def __init__(self, device: torch.device) -> None:
                super().__init__()
                self.lin = Recording(1, 1, device)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with set_checkpoint_early_stop(False):
                    return checkpoint(self._inner, x, use_reentrant=False)

            def _inner(self, x: torch.Tensor) -> torch.Tensor:
                # Undo the root's cast, so that only the layer's own casts are visible.
                output = self.lin(x.to(inp_dtype))
                outputs.append(output.dtype)
                return output

        outputs: list[torch.dtype] = []
        model = Model(self.device)
        fully_shard(model.lin, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        model(torch.ones(1, 1, device=self.device, dtype=inp_dtype, requires_grad=True)).sum().backward()
        return model.lin.inputs, outputs

    @torch_defect("fsdp2_recomputed_inputs_are_not_cast")
    @skip_if_lt_x_gpu(1)
    def test_checkpoint_recompute_casts_forward_inputs(self):
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        inputs, _ = self._test_checkpoint_recompute_casts(policy, torch.float32)
        self.assertEqual(inputs, [torch.bfloat16] * 2)

    @torch_defect("fsdp2_recomputed_inputs_are_not_cast")
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
        self._check_norm_modules(fully_shard, MixedPrecisionPolicy(param_dtype=torch.bfloat16))

    @skip_if_lt_x_gpu(1)
    def test_norm_modules_fp16(self):
        self._check_norm_modules(fully_shard, MixedPrecisionPolicy(param_dtype=torch.float16))

    @skip_if_lt_x_gpu(1)
    def test_clamp_reduce_dtype(self):
        """FSDP keeps a reduce dtype equal to the parameters' dtype, also if parameters are cast after wrapping."""
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
        self._check_dataclass_input(fully_shard)

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
        """All floating-point tensors must be bfloat16 now. Other members must be the same objects as before."""
        half, single, double, *others = self._members(container)
        self.assertIs(half, members[0])
        for cast, original in ((single, members[1]), (double, members[2])):
            self.assertEqual(cast.dtype, torch.bfloat16)
            self.assertEqual(cast, original.bfloat16())
        for other, original in zip(others, members[3:], strict=True):
            self.assertIs(other, original)

    @skip_if_lt_x_gpu(1)
    def test_output_dtype_of_containers(self):
        """FSDP casts every floating-point tensor in a forward's output, and nothing else."""
        container, members = self._nested()
        model = Through(self.device, returns=container)
        fully_shard(model, mp_policy=MixedPrecisionPolicy(output_dtype=torch.bfloat16))
        # Without an input, some versions raise on an accelerator (fsdp2_root_without_inputs_raises).
        self._check_cast_members(model(members[1]), members)

    @skip_if_lt_x_gpu(1)
    @subtests(method=["__call__", "other"])
    def test_param_dtype_of_containers(self, method):
        """FSDP casts every floating-point tensor in the inputs of a forward or a registered method, positional or
        keyword.
        """
        container, members = self._nested()
        model = Through(self.device, returns=members[1])
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        register_fsdp_forward_method(model, "other")
        output = getattr(model, method)(container, named=container)
        self._check_cast_members(model.args[0], members)
        self._check_cast_members(model.kwargs["named"], members)
        self.assertIs(output, members[1])  # without an output dtype

    @skip_if_lt_x_gpu(1)
    @subtests(
        container=[[None, None], {}, collections.OrderedDict(), collections.UserDict()],
        param_dtype=[None, torch.bfloat16],
        cast_forward_inputs=[True, False],
    )
    def test_layers_share_a_container(self, container, param_dtype, cast_forward_inputs):
        """A layer may write into a container among its inputs, but lists and dicts are copied when inputs are cast."""
        layers = [filled(Writing(4, 4, device=self.device)) for _ in range(2)]
        plain, model = (Sharing(copy.copy(container), *copy.deepcopy(layers)) for _ in range(2))
        policy = MixedPrecisionPolicy(param_dtype, cast_forward_inputs=cast_forward_inputs)
        shard_each((*model, model), mp_policy=policy)
        inp = torch.ones(2, 4, device=self.device, dtype=param_dtype) / 3 + self.rank
        with torch.no_grad():
            self.assertEqual(model(inp), plain.to(inp.dtype)(inp))
        is_rebuilt = param_dtype is not None and cast_forward_inputs and isinstance(container, (list, dict))
        self.assertEqual(model.container, container if is_rebuilt else plain.container, may_be="empty")

    @skip_if_lt_x_gpu(1)
    @subtests(container=[[None, None], {}, collections.OrderedDict(), collections.UserDict()], detaches=[True, False])
    def test_layers_share_a_container_in_training(self, container, detaches):
        """In training, all layers get the same container, but a list or dict with a gradient in it is copied."""
        layers = [filled(Writing(4, 4, device=self.device)) for _ in range(2)]
        plain, model = (Sharing(copy.copy(container), *copy.deepcopy(layers)) for _ in range(2))
        shard_each((*model, model))
        for layer in (*plain, *model):
            layer.detaches = detaches
        inp = torch.ones(2, 4, device=self.device) / 3 + self.rank
        self.assertEqual(model(inp), plain(inp))
        # A version that does not look into dataclasses copies all containers beside an input with a gradient.
        is_copied = not (detaches and torch_facts.FINDS_TENSORS_IN_DATACLASSES) and isinstance(container, (list, dict))
        expected = copy.copy(container)
        for index in range(1 if is_copied else 2):  # the second layer, whose input has a gradient, gets the copy
            expected[index] = plain.container[index]
        self.assertEqual(model.container, expected)

    @needs(torch_facts.CASTS_INPUTS_OF_EACH_MODULE)
    @skip_if_lt_x_gpu(1)
    def test_grouped_modules_cast_inputs(self):
        """Each module of an FSDP group casts its own inputs and outputs."""
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
        """Parameters are all-gathered in the param dtype, in forward and in backward."""
        model = filled(MLP(4, self.device))
        recording = RecordingAllGather()
        fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype), reshard_after_forward=True)
        model.set_custom_all_gather(recording)
        for _ in range(2):
            model(torch.ones(2, 4, device=self.device)).sum().backward()
        numel = 2 * 4 * 16 + 16 + 4
        self.assertEqual(recording.outputs, [(param_dtype or torch.float32, numel, 2)] * 4)

    @torch_defect("fsdp2_integer_parameters_are_refused")
    @skip_if_lt_x_gpu(1)
    def test_integers_are_not_cast(self):
        """An integer parameter is gathered without a cast, as bytes together with cast parameters."""
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


class TestFullyShardMixedPrecisionOverride(FSDPTestMultiThread):
    """``param_dtype_override_fn`` lets single parameters keep their dtype."""

    world_size = 2

    def _shard(self, model: Any, override: Callable[[nn.Parameter], Any], **policy: Any) -> Any:
        """Shard the model as one group that computes in bfloat16. Record all-gathers and reductions."""
        policy = {"param_dtype": torch.bfloat16, **policy}
        fully_shard(model, mp_policy=MixedPrecisionPolicy(**policy, param_dtype_override_fn=override))
        self.gathered, self.reduced = RecordingAllGather(), RecordingReduceScatter()
        model.set_custom_all_gather(self.gathered)
        model.set_custom_reduce_scatter(self.reduced)
        return model

    @needs(torch_facts.CASTS_EACH_PARAMETER)
    @skip_if_lt_x_gpu(1)
    def test_asks_once_for_each_parameter(self):
        """``fully_shard`` calls the function once for each parameter that it manages. Later steps do not call it."""
        model = nn.Sequential(Scale(4), Scale(4), Scale(4), Scale(4)).to(self.device)
        model[2].weight = model[0].weight
        ignored = set(model[3].parameters())
        expected = [model[0].weight, model[0].bias, model[2].bias]
        asked: list[nn.Parameter] = []
        fully_shard(model[1])
        policy = MixedPrecisionPolicy(torch.bfloat16, param_dtype_override_fn=asked.append)
        fully_shard(model, mp_policy=policy, ignored_params=ignored)
        for _ in range(2):
            model(torch.ones(2, 4, device=self.device)).sum().backward()
        self.assertEqual(list(map(id, asked)), list(map(id, expected)))

    @needs(torch_facts.CASTS_EACH_PARAMETER)
    @skip_if_lt_x_gpu(1)
    @subtests(answers=[(None, None), ("low", None), ("own", None), (None, "own"), ("own", "own")])
    def test_answers(self, answers):
        """If the answer is None or ``param_dtype``, the policy applies. If it is the parameter's dtype, that is kept.

        Inputs are always cast. Parameters of two dtypes are gathered as bytes.
        """
        low, own = torch.bfloat16, torch.float32
        model = Scale(4, self.device)
        by_param = dict(zip(model.parameters(), ({"low": low, "own": own}.get(answer) for answer in answers)))
        dtypes = tuple(own if answer == "own" else low for answer in answers)
        replica = copy.deepcopy(model)
        for param, dtype in zip(replica.parameters(), dtypes):
            param.data = param.data.to(dtype)
        self._shard(model, by_param.__getitem__)
        inp = torch.linspace(1, 2, 4, device=self.device)
        self.assertEqual(model(inp), replica(inp.to(low)), rtol=0, atol=0)
        self.assertEqual(model.seen, (*dtypes, low))
        gathered = (dtypes[0], 8, 2) if len(set(dtypes)) == 1 else (torch.uint8, 4 * sum(d.itemsize for d in dtypes), 2)
        self.assertEqual(self.gathered.outputs, [gathered])

    @needs(torch_facts.CASTS_EACH_PARAMETER)
    @skip_if_lt_x_gpu(1)
    @subtests(param_dtype=[None, torch.bfloat16], answer=[torch.float16, torch.float64, "bfloat16"])
    def test_other_answers_are_refused(self, param_dtype, answer):
        message = (
            "must return a torch.dtype or None" if answer == "bfloat16" else "must return None, param_dtype, or the"
        )
        policy = MixedPrecisionPolicy(param_dtype, param_dtype_override_fn=lambda param: answer)
        with self.assertRaisesRegex(ValueError, message):
            fully_shard(Scale(4, self.device), mp_policy=policy)

    @needs(torch_facts.CASTS_EACH_PARAMETER)
    @skip_if_lt_x_gpu(1)
    def test_frozen_parameter_keeps_its_dtype(self):
        """A frozen float64 parameter may keep its dtype, so it is not rounded to the ``param_dtype``."""
        model = Scale(4, self.device)
        table = torch.linspace(1, 2, 4, device=self.device, dtype=torch.float64) / 3
        model.bias = nn.Parameter(table.clone(), requires_grad=False)
        self._shard(model, lambda param: param.dtype if param.dtype == torch.float64 else None)
        values = []
        model.register_forward_hook(lambda module, args, output: values.append(module.bias.detach().clone()))
        model(torch.full((1, 4), self.rank + 1.0, device=self.device)).sum().backward()
        self.assertEqual(model.seen[:2], (torch.bfloat16, torch.float64))
        self.assertEqual(values, [table], rtol=0, atol=0)
        self.assertEqual(model.weight.grad.full_tensor(), torch.full((4,), 1.5, device=self.device))

    @needs(torch_facts.CASTS_EACH_PARAMETER)
    @needs(torch_facts.ASKS_PARAMETERS_FOR_GRAD_DTYPE)
    @skip_if_lt_x_gpu(1)
    @subtests(keeps=[False, True], reduce_dtype=[None, torch.bfloat16])
    def test_mixed_gradients_are_promoted(self, keeps, reduce_dtype):
        """With ``grad_dtype=None``, gradients in bfloat16 and float32 are reduced in the wider dtype."""
        model = nn.Sequential(nn.Linear(4, 4, bias=False), Scale(4)).to(self.device)
        nn.init.eye_(model[0].weight)
        nn.init.ones_(model[1].weight)
        for param in model.parameters():
            param.grad_dtype = None
        kept = set(model[1].parameters()) if keeps else ()
        self._shard(model, lambda param: torch.float32 if param in kept else None, reduce_dtype=reduce_dtype)
        model(torch.full((1, 4), 1 + self.rank * 2.0**-7, device=self.device)).sum().backward()
        expected = reduce_dtype or (torch.float32 if keeps else torch.bfloat16)
        self.assertEqual([output.dtype for output in self.reduced.outputs], [expected])
        for param in (model[0].weight, model[1].weight):
            # The gradient is the input. bfloat16 cannot hold the mean and rounds it to 1.
            mean = torch.full_like(param.to_local(), 1 + 2.0**-8, dtype=expected)
            self.assertEqual(param.grad.to_local(), mean, rtol=0, atol=0)


class TestFullyShardMixedPrecisionReduction(FSDPTestMultiThread):
    world_size = 8

    @skip_if_lt_x_gpu(1)
    @subtests(
        param_dtype=[torch.float16, torch.bfloat16], mesh_shape=[(4, 2), (2, 4), (1, 8)], replicates=[False, True]
    )
    def test_float16_divides_before_and_after(self, param_dtype, mesh_shape, replicates):
        """Float16 gradients are partly divided before the sum, by powers of two, which is exact.

        Gradients that would overflow in an undivided sum are exact. For other dtypes the collective divides.
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
        others = self.rank % mesh_shape[1] if not replicates else self.rank  # differs within the shard group
        for value, mean in ((1.0, 1.0), (2.0 * others, ranks - 1.0), (large, large)):
            layer.weight.grad = None
            layer(torch.full((1, 2), value, device=self.device)).sum().backward()
            self.assertEqual(recording.inputs[-1].dtype, param_dtype)
            # The gradients of a linear layer are its inputs.
            self._check_identical(recording.inputs[-1], value / before)
            self._check_identical(layer.weight.grad.to_local(), mean)

    def _check_identical(self, found: torch.Tensor, expected: float) -> None:
        self.assertEqual(found, torch.full_like(found, expected), rtol=0, atol=0, may_be="zero")


class TestFullyShardMixedPrecisionHSDP(FSDPTestMultiThread):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    @subtests(all_reduces_each=[True, False])
    def test_sums_over_microbatches(self, all_reduces_each):
        """Gradients of microbatches are added up in float32, and all-reduced in ``reduce_dtype``."""
        layer = nn.Linear(2, 2, bias=False, device=self.device)
        mesh = make_mesh(2, 2, names=("replicate", "shard"))
        fully_shard(layer, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16))
        sent: list[torch.dtype] = []
        layer.set_all_reduce_hook(lambda reduced: sent.append(reduced.dtype))
        for value in (256.0, 1.0, 1.0, 0.0):  # bfloat16 has 256 and 258, but not 257
            layer.set_requires_all_reduce(all_reduces_each or value == 0)
            layer(torch.full((1, 2), value, device=self.device)).sum().backward()
        self.assertEqual(sent, [torch.bfloat16] * (4 if all_reduces_each else 1))
        grad = layer.weight.grad.full_tensor()
        with torch_defect("fsdp2_partial_reduction_adds_up_in_low_precision", when=not all_reduces_each):
            self.assertEqual(grad, torch.full_like(grad, 258.0), rtol=0, atol=0)


class TestFullyShardMixedPrecisionSmallerMesh(FSDPTestMultiThread):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_gather_in_smaller_mesh(self):
        """Parameters resharded to two ranks after forward stay in the param dtype until backward.

        With only two ranks, as in the tests above, this would equal full resharding.
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
            params = internals.group_of(model).fsdp_params
            kept = [internals.attribute(param, "_sharded_post_forward_param_data") for param in params]
            self.assertEqual(kept, [None] * 4, "shards over two ranks")
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
