"""Custom collectives and copy functions of parameter groups, and the streams that read gradients."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torch_fsdp_tests.common_distributed import (
    at_most,
    needs,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_fsdp import (
    FSDPTestContinuous,
    check_sharded_parity,
)
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.custom_comms import ReusingAllGather, ReusingReduceScatter
from torch_fsdp_tests.fsdp.references import average_gradients, copy_values, move_gradients
from torch_fsdp_tests.fsdp.seeded import normal
from torch_fsdp_tests.fsdp.training import (
    TrainingMixin,
    check_gradients,
    optimizers,
    shard_each,
    take_step,
)
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

AVG, SUM = dist.ReduceOp.AVG, dist.ReduceOp.SUM
fsdp_collectives = internals.fsdp2_collectives


class TestFullyShardCommunication(TrainingMixin, FSDPTestContinuous):
    world_size = at_most(4)
    power_of_two_ranks = True

    @skip_if_lt_x_gpu(4)
    @subtests(
        policy=[MixedPrecisionPolicy(), MixedPrecisionPolicy(torch.bfloat16, torch.float32)], shape=[(4,), (2, 2)]
    )
    def test_set_custom_comms(self, policy, shape):
        """FSDP calls the custom collectives for every all-gather and reduce-scatter. Training does not change.

        The collectives reuse their buffers. One layer is sharded unevenly. In even steps a microbatch without reduction
        comes first.
        """
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)).to(self.device)
        computing = copy.deepcopy(ref_model).to(policy.param_dtype or torch.float32)
        model: Any = copy.deepcopy(ref_model)
        mesh = self._mesh(*shape)
        comms = {}
        for index in (0, 2):
            fully_shard(model[index], mesh=mesh, mp_policy=policy)
            out_features, in_features = model[index].weight.shape
            shard = -(-out_features // shape[-1]) * (in_features + 1)  # weight and bias, with padding
            comms[index] = ReusingAllGather(shard * shape[-1]), ReusingReduceScatter(shard * shape[-1])
            model[index].set_custom_all_gather(comms[index][0])
            model[index].set_custom_reduce_scatter(comms[index][1])
        fully_shard(model, mesh=mesh, mp_policy=policy)
        optims = optimizers(ref_model, model)
        for step in range(10):
            for last in (False, True)[step % 2 :]:
                model.set_requires_gradient_sync(last)
                inputs = normal(4, 6, seed=100 * (2 * step + last) + self.rank + 1)
                computing(inputs.to(computing[0].weight.dtype)).square().sum().backward()
                model(inputs).square().sum().backward()
                move_gradients(computing, ref_model)
                for gather, reduction in comms.values():
                    self.assertEqual(gather.take(), [(gather.numel, policy.param_dtype or torch.float32, None)] * 2)
                    sizes = (reduction.numel, reduction.numel // shape[-1])
                    self.assertEqual(reduction.take(), [(sizes, torch.float32, AVG)] if last else [], may_be="empty")
                    self.assertEqual({*gather.groups, *reduction.groups}, {mesh.get_group("shard")})
            average_gradients(ref_model)
            check_gradients(self, ref_model, model)
            take_step(optims)
            copy_values(ref_model, computing)
        check_sharded_parity(self, ref_model, model)
        self.assertEqual(len({buffer for gather, _ in comms.values() for buffer in gather.buffers}), 2)

    @skip_if_lt_x_gpu(2)
    @subtests(factor=[8.0, 3.0, 0.5])
    def test_divide_factor_of_a_custom_reduction(self, factor):
        """Without a forced sum, a custom reduce-scatter gets a PREMUL_SUM by the reciprocal of the factor."""
        model: Any = nn.Linear(6, 8, bias=False, device=self.device)
        fully_shard(model, mesh=self._mesh(self.world_size))
        factors: list[float] = []

        class Summing(ReusingReduceScatter):
            def __call__(
                self,
                output_tensor: torch.Tensor,
                input_tensor: torch.Tensor,
                group: Any,
                op: Any,
                async_op: bool = False,
            ) -> Any:
                kind, factor = op.__getstate__()
                assert kind == dist.ReduceOp.PREMUL_SUM, kind
                factors.append(factor)
                return super().__call__(output_tensor, input_tensor * factor, group, dist.ReduceOp.SUM)

        model.set_custom_reduce_scatter(Summing(48))
        model.set_gradient_divide_factor(factor)
        model(torch.full((1, 6), 1.0 + self.rank, device=self.device)).sum().backward()
        self.assertEqual(factors, [1 / factor])
        total = sum(range(1, self.world_size + 1))
        self.assertEqual(model.weight.grad.to_local(), torch.full_like(model.weight.grad.to_local(), total / factor))

    @needs(torch_facts.HAS_COPY_FUNCTIONS_PER_GROUP)
    @skip_if_lt_x_gpu(2)
    @subtests(dim=[0, 1])
    def test_copies_of_a_group(self, dim):
        """A parameter group may have its own functions that copy after the all-gather and before the reduction."""
        manual_seed(42)
        weight = torch.randn(8, 4, device=self.device)
        model: Any = nn.Linear(4, 8, bias=False, device=self.device)
        model.weight = nn.Parameter(weight.clone())
        fully_shard(model, shard_placement_fn=lambda param: Shard(dim), reshard_after_forward=True)
        group = internals.group_of(model)

        def negated(params: Any, result: Any, world_size: int) -> None:
            fsdp_collectives._default_all_gather_output_fn(params, result, world_size)
            for output in (output for param in params for output in param.all_gather_outputs):
                with torch.no_grad(), internals.keeping_version(output):
                    output.neg_()

        def doubled(params: Any, grads: list[torch.Tensor], world_size: int) -> Any:
            grads[:] = [2 * grad for grad in grads]
            return fsdp_collectives._default_reduce_scatter_input_fn(params, grads, world_size)

        group._all_gather_output_fn, group._prepare_reduce_scatter_inputs = negated, doubled
        inputs = normal(2, 4, seed=self.rank + 1).requires_grad_()
        output = model(inputs)
        self.assertEqual(output, -inputs @ weight.T)
        output.sum().backward()
        self.assertEqual(inputs.grad, -weight.sum(0).expand(2, 4))
        mean = torch.stack([normal(2, 4, seed=rank + 1) for rank in range(self.world_size)]).mean(0)
        self.assertEqual(model.weight.grad.full_tensor(), 2 * mean.sum(0).expand(8, 4))

    @needs(torch_facts.RECORDS_STREAM_OF_OUTPUT_GRADIENTS)
    @skip_if_lt_x_gpu(2)
    @subtests(policy=[MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)], shape=[(4,), (2, 2)])
    def test_readers_of_gradients(self, policy, shape):
        """FSDP passes the memory of each gradient, and the stream that reads it, to ``record_grad_output_stream``."""
        streams: dict[int, Any] = {}

        def record(buffer: torch.Tensor, stream: Any) -> None:
            streams[internals.storage_id(buffer)] = stream

        model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)).to(self.device)
        shard_each((*model, model), mesh=self._mesh(*shape), mp_policy=policy)
        with torch_names.patched(fsdp_collectives, "record_grad_output_stream", record):
            model(normal(2, 4, seed=self.rank + 1)).sum().backward()
        current = torch.get_device_module(self.device.type).current_stream()
        for name, param in model.named_parameters():
            self.assertEqual(streams[internals.storage_id(param.grad.to_local())], current, name)

    @needs(torch_facts.RECORDS_STREAM_OF_OUTPUT_GRADIENTS)
    @skip_if_lt_x_gpu(1)
    def test_readers_of_gradients_by_default(self):
        """The default ``record_grad_output_stream`` does nothing; a backend may register its own."""
        buffer = torch.arange(4.0, device=self.device)
        torch.ops.fsdp.record_grad_output_stream(buffer, 0, 0, 0)
        stream = torch.get_device_module(self.device.type).current_stream()
        fsdp_collectives.record_grad_output_stream(buffer, stream)
        self.assertEqual(buffer.tolist(), [0, 1, 2, 3])

    @needs(torch_facts.HAS_MESH_PER_PARAMETER)
    @skip_if_lt_x_gpu(4)
    def test_set_custom_comms_of_two_groups(self):
        """A module with parameters on several meshes rejects a custom collective."""
        linear = nn.Linear(8, 8, device=self.device)
        other = internals.fsdp2_common.FSDPMeshInfo(self._mesh(2, 2)["shard"], 0)
        result = internals.fsdp2_common.ShardPlacementResult(Shard(0), other)
        bias = linear.bias
        model: Any = fully_shard(linear, shard_placement_fn=lambda param: result if param is bias else None)
        self.assertEqual(len(internals.groups_in(model)), 2)
        rejected = "{} is not supported with multiple param groups"
        with self.assertRaisesRegex(ValueError, rejected.format("set_custom_all_gather")):
            model.set_custom_all_gather(ReusingAllGather(8))
        with self.assertRaisesRegex(ValueError, rejected.format("set_custom_reduce_scatter")):
            model.set_custom_reduce_scatter(ReusingReduceScatter(8))


if __name__ == "__main__":
    run_tests()
