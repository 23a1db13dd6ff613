"""Mixed precision under the ``replicate`` of FSDP2: the dtypes of computation, all-reduces, accumulation and casts.

Training is compared bitwise with a plain model that casts explicitly.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, FSDPTestMultiThread, check_sharded_parity
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import collectives
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.mixed_precision import DIM, ITERATIONS, CastsMixin, Replica, ReplicaMixin
from torch_fsdp_tests.fsdp.optimizers import ShardAdam
from torch_fsdp_tests.fsdp.training import replicate_each
from torch_fsdp_tests.installed_torch import torch_facts

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def replicate(module: Any, **kwargs: Any) -> Any:
    return replicate_each([module], **kwargs)


def loss_and_tangent(model: nn.Module, inp: torch.Tensor) -> torch.Tensor:
    """A loss of the model's output and of its ``jvp`` with the sine of the input as tangent."""
    output, tangent = torch.func.jvp(model, (inp,), (inp.sin(),))
    return output.float().sum() + tangent.float().square().sum()


@needs(torch_facts.REPLICATES_WITHOUT_SHARDS)
class TestReplicateMixedPrecisionTraining(ReplicaMixin, FSDPTest):
    world_size = 2

    def _init(
        self, param_dtype: torch.dtype | None, reduce_dtype: torch.dtype | None, **kwargs: Any
    ) -> tuple[Replica, nn.Module, torch.optim.Optimizer]:
        """A reference replica, and a replicated model with its optimizer. ``kwargs`` are for the reference."""
        manual_seed(42)
        model = nn.Sequential(*(MLP(DIM) for _ in range(3))).to(self.device)
        for mlp in model:
            nn.init.uniform_(mlp.out_proj.bias, 0.5, 1)  # to keep ReLUs active, so that all weights get gradients
        computed_in = param_dtype or FP32
        by_default = FP32 if torch_facts.REDUCES_IN_PARAMETER_DTYPE else computed_in
        replica = Replica(model, computed_in, reduce_dtype or by_default, **kwargs)
        replicate_each([*model, model], mp_policy=MixedPrecisionPolicy(param_dtype, reduce_dtype))
        return replica, model, ShardAdam(model.parameters(), lr=1e-2)

    def _check_reductions(self, calls: collectives.Calls, dtype: torch.dtype, times: int) -> None:
        """There must be ``times`` all-reduces, all in ``dtype``, and no other collective."""
        self.assertEqual(calls.counts(), {"all_reduce": times})
        self.assertEqual(set(calls.dtypes("all_reduce")), {dtype})

    @skip_if_lt_x_gpu(2)
    @subtests(param_dtype=[BF16, FP16])
    def test_compute_dtype(self, param_dtype):
        """Without a ``reduce_dtype`` gradients are reduced in one dtype, see ``REDUCES_IN_PARAMETER_DTYPE``."""
        calls = self._check_training(*self._init(param_dtype, None), inp_dtype=param_dtype)
        reduced_in = FP32 if torch_facts.REDUCES_IN_PARAMETER_DTYPE else param_dtype
        self._check_reductions(calls, reduced_in, 3 * ITERATIONS)

    @skip_if_lt_x_gpu(2)
    @subtests(dtypes=[(BF16, FP32), (FP32, BF16)])
    def test_reduce_dtype(self, dtypes):
        param_dtype, reduce_dtype = dtypes
        calls = self._check_training(*self._init(param_dtype, reduce_dtype), inp_dtype=param_dtype)
        self._check_reductions(calls, reduce_dtype, 3 * ITERATIONS)

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_backward=[True, False], all_reduce_only=[False, True])
    def test_grad_acc_with_reduce_dtype(self, reshard_after_backward, all_reduce_only):
        """Gradients accumulate in ``reduce_dtype``, whichever setter turns off all-reduces of microbatches."""
        replica, model, optim = self._init(BF16, FP32)
        manual_seed(42 + self.rank + 1)
        for _ in range(ITERATIONS):
            microbatches = torch.randn((4, 8, DIM), device=self.device, dtype=BF16)
            with collectives.recorded() as calls:
                for index, inp in enumerate(microbatches, 1):
                    last = index == len(microbatches)
                    (model.set_requires_all_reduce if all_reduce_only else model.set_requires_gradient_sync)(last)
                    model.set_reshard_after_backward(last or reshard_after_backward)
                    loss = model(inp).sum()
                    loss.backward()
                    self._check_identical(loss.detach(), replica.backward(inp))
            self._check_reductions(calls, FP32, 3)
            replica.reduce()
            check_sharded_parity(self, replica.model, model)
            replica.step()
            optim.step()
            optim.zero_grad()
        self.assertTrue(replica.trained_all())

    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    @skip_if_lt_x_gpu(2)
    def test_input_jvp(self):
        """The model computes the right output under ``vmap``, and trains with a loss that contains its ``jvp``."""
        replica, model, optim = self._init(BF16, FP32, loss_of=loss_and_tangent)
        batch = torch.randn(3, 4, DIM, device=self.device)
        mapped = torch.vmap(model)(batch)
        self.assertEqual(mapped.dtype, BF16)
        self.assertEqual(mapped, torch.vmap(replica.computing)(batch.to(BF16)))
        both = torch.vmap(lambda inp: (model(inp), inp.sum()))(batch)
        self.assertEqual(both, (mapped, batch.sum((1, 2))))
        self._check_training(replica, model, optim, inp_dtype=BF16)

    @skip_if_lt_x_gpu(2)
    def test_gradient_divide_factor_fp16(self):
        """With float16 reductions, the sum over the replicas is divided by the factor once."""
        model = replicate(nn.Linear(2, 1, bias=False, device=self.device), mp_policy=MixedPrecisionPolicy(FP16, FP16))
        model.set_gradient_divide_factor(4.0)
        model(torch.full((3, 2), 1.0 + self.rank, device=self.device)).sum().backward()
        with torch_defect("fsdp2_divides_twice"):
            self._check_identical(model.weight.grad.to_local(), torch.full((1, 2), (3 + 6) / 4, device=self.device))

    @skip_if_lt_x_gpu(2)
    def test_states_keep_their_precision(self):
        """State dicts are float32, also between forward and backward. Optimizer states are float32."""
        _, model, _ = self._init(BF16, FP32)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        before = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        loss = model(torch.ones(2, DIM, device=self.device)).sum()
        self.assertEqual({param.dtype for param in model.parameters()}, {BF16})
        state = model.state_dict()
        self.assertEqual({(type(value), value.dtype) for value in state.values()}, {(DTensor, FP32)})
        self.assertEqual({name: value.to_local() for name, value in state.items()}, before)
        loss.backward()
        optim.step()
        tensors = [*model.parameters(), *(param.grad for param in model.parameters())]
        tensors += [value for each in optim.state.values() for name, value in each.items() if name != "step"]
        self.assertEqual({(each.dtype, each.placements) for each in tensors}, {(FP32, (Replicate(),))})
        self.assertEqual(len(tensors), 4 * 12)

    @skip_if_lt_x_gpu(2)
    def test_policies_of_root_and_child(self):
        """Each module computes, reduces and casts by its own policy, not by the root's."""
        manual_seed(42)
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        seen: list[tuple[torch.dtype, torch.dtype, torch.dtype]] = []
        replicate(model[0], mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP32))
        replicate(model[1], mp_policy=MixedPrecisionPolicy(FP32, BF16, cast_forward_inputs=False))
        replicate(model, mp_policy=MixedPrecisionPolicy(output_dtype=FP16))
        for linear in model:
            linear.register_forward_hook(
                lambda linear, args, output: seen.append((args[0].dtype, linear.weight.dtype, output.dtype))
            )
        inp = torch.randn(2, 4, device=self.device)
        with collectives.recorded() as calls:
            output = model(inp)
            output.sum().backward()
        self.assertEqual(seen, [(BF16, BF16, FP32), (FP32, FP32, FP32), (FP32, FP32, FP32)])
        self.assertEqual(output.dtype, FP16)
        self.assertEqual(sorted(map(str, calls.dtypes("all_reduce"))), sorted(map(str, (FP32, BF16, FP32))))


@needs(torch_facts.REPLICATES_WITHOUT_SHARDS)
class TestReplicateMixedPrecisionCasts(CastsMixin, FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_float16_on_one_submodule(self):
        self._check_float16_on_one_submodule(replicate)

    @skip_if_lt_x_gpu(1)
    @subtests(enable_submodule_cast=[False, True])
    def test_submodules_with_external_inputs(self, enable_submodule_cast):
        """An input that does not pass through the root is cast only if the submodule's policy casts inputs."""
        self._check_submodules_with_external_inputs(replicate, enable_submodule_cast)

    @skip_if_lt_x_gpu(1)
    def test_norm_modules_bf16(self):
        self._check_norm_modules(replicate, MixedPrecisionPolicy(param_dtype=BF16))

    @skip_if_lt_x_gpu(1)
    def test_norm_modules_fp16(self):
        self._check_norm_modules(replicate, MixedPrecisionPolicy(param_dtype=FP16))

    @skip_if_lt_x_gpu(1)
    def test_clamp_reduce_dtype(self):
        """FSDP keeps a ``reduce_dtype`` that equals ``param_dtype``, also if parameters are cast after wrapping."""
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        model = nn.Sequential(*(nn.Linear(32, 32, device=self.device, dtype=BF16) for _ in range(2)))
        reduced: list[torch.dtype] = []
        replicate_each([*model, model], mp_policy=policy)
        for linear in model:
            linear.set_all_reduce_hook(lambda flat: reduced.append(flat.dtype))
        self.assertEqual(policy.reduce_dtype, BF16)
        model.to(FP32)
        model(torch.ones(2, 32, device=self.device)).sum().backward()
        self.assertEqual(reduced, [BF16] * 2)
        self.assertEqual([param.grad.dtype for param in model.parameters()], [FP32] * 4)

    @skip_if_lt_x_gpu(1)
    def test_dataclass_input(self):
        self._check_dataclass_input(replicate)


if __name__ == "__main__":
    run_tests()
