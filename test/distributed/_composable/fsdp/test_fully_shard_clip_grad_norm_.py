"""``torch.nn.utils.clip_grad_norm_`` over sharded gradients returns the norm of the whole model on all ranks. It runs
one all-reduce for each mesh dimension over which the gradients are sharded.
"""

from __future__ import annotations

import copy
import itertools
import math

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.utils._pytree import tree_leaves

from torch_fsdp_tests.common_distributed import at_most, requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, FSDPTestMultiThread, MLPStack
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, manual_seed, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average, full, replicated
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.training import shard_each

ITERATIONS = 2  # no optimizer steps, so a third iteration would repeat the second
ALL_REDUCE = torch.ops.c10d_functional.all_reduce


def norm_by_hand(tensors: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    return torch.linalg.vector_norm(torch.cat([tensor.flatten() for tensor in tensors]), norm_type)


class _TestClipGradNormBase(FSDPTest):
    def _test_clip_grad_norm(
        self, max_norm: float, norm_type: float, ref_model: nn.Module, model: nn.Module, inp: torch.Tensor
    ) -> None:
        """Clip the gradients of both models to ``max_norm``, which is below their norm. Compare norms and gradients."""
        for _ in range(ITERATIONS):
            for module in (ref_model, model):
                module.zero_grad()
                output = full(module(inp))
                # The plain sum of a layer norm's outputs is constant, so all gradients before the norm would be zero.
                (output * torch.linspace(-1, 1, output.numel(), device=self.device).view_as(output)).sum().backward()
            ref_grads = [param.grad.detach().clone() for param in ref_model.parameters()]
            local_grads = [param.grad.to_local().clone() for param in model.parameters()]
            for ref_grad, param in zip(ref_grads, model.parameters(), strict=True):
                self.assertEqual(param.grad.full_tensor(), ref_grad)
            for grads in (ref_grads, local_grads):
                norms = [torch.linalg.vector_norm(grad, norm_type).item() for grad in grads]
                self.assertGreater(max(norms), max_norm, "there is nothing to clip")

            ref_norm = torch.nn.utils.clip_grad_norm_(ref_model.parameters(), max_norm, norm_type)
            with CommDebugMode() as communication:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            self.assertEqual(ref_norm, norm_by_hand(ref_grads, norm_type))
            self._check_alike(norm, ref_norm)
            counts = dict(communication.get_comm_counts())
            self.assertEqual(counts, {ALL_REDUCE: len(norm.placements)})

            for param, grad in zip(ref_model.parameters(), ref_grads):
                self._check_clipped(param.grad, grad, max_norm, norm_type)
            for param, local_grad, ref_param in zip(model.parameters(), local_grads, ref_model.parameters()):
                self._check_clipped(param.grad.to_local(), local_grad, max_norm, norm_type)
                self.assertEqual(param.grad.full_tensor(), ref_param.grad)
            clipped = [param.grad.full_tensor() for param in model.parameters()]
            # Clipping adds 1e-6 to the norm, so the result is slightly below the limit.
            self.assertEqual(norm_by_hand(clipped, norm_type).item(), max_norm, rtol=1e-5, atol=0)

    def _check_alike(self, norm: torch.Tensor, expected: torch.Tensor) -> None:
        """The norm must be the expected one, and bitwise the same on all ranks."""
        self.assertIsInstance(norm, DTensor)
        self.assertEqual(actual := norm.full_tensor(), expected)
        everywhere = [torch.empty_like(actual) for _ in range(self.world_size)]
        dist.all_gather(everywhere, actual)
        self.assertEqual(len({value.item() for value in everywhere}), 1, f"{everywhere}")

    def _check_clipped(self, grad: torch.Tensor, before: torch.Tensor, max_norm: float, norm_type: float) -> None:
        if before.numel():
            self.assertLessEqual(torch.linalg.vector_norm(grad, norm_type).item(), max_norm)
        if before.any():
            self.assertNotEqual(grad, before, rtol=0, atol=0)


class TestClipGradNormWorldSize2(_TestClipGradNormBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_clip_grad_norm_1d(self):
        for norm_type in (2, 1, math.inf):
            self._test_clip_grad_norm_1d(norm_type, seed_of_tokens=42)

    @skip_if_lt_x_gpu(2)
    def test_clip_grad_norm_1d_rank_dependent_input(self):
        """The norm is right if the unreduced gradients and the norms of the local shards differ by rank."""
        for norm_type in (2, 1, math.inf):
            self._test_clip_grad_norm_1d(norm_type, seed_of_tokens=42 + self.rank)

    def _test_clip_grad_norm_1d(self, norm_type: float, seed_of_tokens: int) -> None:
        manual_seed(42)
        args = ModelArgs(dropout_p=0.0)
        model = Transformer(args).double()  # in float32, long sums depend on the order in which the device adds
        ref_model = replicated(model)
        shard_each((*model.layers, model))
        manual_seed(seed_of_tokens)
        tokens = torch.randint(0, args.vocab_size, (3, 16), device=self.device)
        self._test_clip_grad_norm(1, norm_type, ref_model, model, tokens)


class TestClipGradNormWorldSize4(_TestClipGradNormBase):
    world_size = at_most(4)
    power_of_two_ranks = True

    @skip_if_lt_x_gpu(4)
    def test_clip_grad_norm_2d(self):
        for norm_type in (2, 1, 3, math.inf):
            self._test_clip_grad_norm_2d(norm_type)

    def _test_clip_grad_norm_2d(self, norm_type: float) -> None:
        """With tensor parallelism a gradient is sharded over two mesh dimensions."""
        mesh = make_mesh(2, self.world_size // 2, names=("dp", "tp"))
        dp_mesh, tp_mesh = mesh["dp"], mesh["tp"]
        manual_seed(42)
        model = MLPStack(16, with_seq_parallel=True)
        ref_model = replicated(model, process_group=dp_mesh.get_group())
        model.to(self.device).parallelize(
            tp_mesh, dp_mesh, use_activation_checkpointing=False, reshard_after_forward=True
        )
        manual_seed(7 + dp_mesh.get_local_rank())
        inp = torch.randn(2, 16, device=self.device)
        self._test_clip_grad_norm(0.5, norm_type, ref_model, model, inp)

    def _uneven(self, mesh: DeviceMesh) -> tuple[nn.Sequential, list[torch.Tensor]]:
        """Return sharded layers of 3, 6 and 1 features after a backward, and the expected gradients of the first two.
        Most local shards of the last rank are empty. The loss does not use the last layer.
        """
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 6), nn.Linear(6, 1)).to(self.device)
        model = copy.deepcopy(ref_model)
        shard_each((*model, model), mesh=mesh)
        inp = torch.arange(10.0, device=self.device).view(2, 5).sin() * (self.rank + 1)
        for module in (ref_model, model):
            for linear in list(module)[:2]:
                linear(inp[:, : linear.in_features]).square().sum().backward()
        ref_grads = [param.grad for param in list(ref_model.parameters())[:4]]
        average(ref_grads)
        return model, ref_grads

    @skip_if_lt_x_gpu(4)
    @subtests(foreach=[True, False, None], norm_type=[2.0, 1.0, 3.0], mesh_shape=[(4,), (2, 2)])
    def test_uneven_shards(self, foreach, norm_type, mesh_shape):
        """The norm is right with uneven or empty shards and with parameters without gradients. Replicas count once."""
        names = ("replicate", "shard")[-len(mesh_shape) :]
        model, ref_grads = self._uneven(make_mesh(*mesh_shape, names=names))
        if mesh_shape == (4,):
            self.assertEqual(model[0].weight.grad.to_local().size(0), 0 if self.rank == 3 else 1)
        expected = norm_by_hand(ref_grads, norm_type)
        with CommDebugMode() as communication:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type, foreach=foreach)
        self.assertEqual(dict(communication.get_comm_counts()), {ALL_REDUCE: 1})
        self._check_alike(norm, expected)
        params = list(model.parameters())
        for param, ref_grad in zip(params[:4], ref_grads, strict=True):
            self.assertEqual(param.grad.full_tensor(), ref_grad * (0.5 / expected))
        self.assertEqual([param.grad for param in params[4:]], [None, None])

    @skip_if_lt_x_gpu(4)
    @subtests(second_mesh=["tensor parallelism", "replicas"], foreach=[None, True, False])
    def test_two_meshes(self, second_mesh, foreach):
        """Clipping uses the norm of all parameters, although the two layers are on different meshes."""
        mesh = make_mesh(2, 2, names=("dp", "second"))
        manual_seed(42)
        ref_model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(self.device)
        model = copy.deepcopy(ref_model)
        if second_mesh == "tensor parallelism":
            parallelize_module(model[0], mesh["second"], ColwiseParallel(output_layouts=Replicate()))
            fully_shard(model, mesh=mesh["dp"])
        else:
            fully_shard(model[0], mesh=mesh)
            fully_shard(model, mesh=make_mesh(4))
        data_rank = mesh.get_local_rank("dp") if second_mesh == "tensor parallelism" else self.rank
        inp = torch.arange(8.0, device=self.device).view(2, 4).sin() * (data_rank + 1)
        for module in (ref_model, model):
            module(inp).square().sum().backward()
        ref_grads = [param.grad for param in ref_model.parameters()]
        average(ref_grads)
        expected = norm_by_hand(ref_grads, 2)
        with torch_defect("optimizer_clip_grad_norm_over_two_meshes_raises"):
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, foreach=foreach)
            self.assertEqual(full(norm), expected)
            for param, ref_grad in zip(model.parameters(), ref_grads, strict=True):
                self.assertEqual(param.grad.full_tensor(), ref_grad * (0.5 / expected))

    @skip_if_lt_x_gpu(2)
    def test_below_max_norm(self):
        """Gradients below the limit do not change."""
        model, ref_grads = self._uneven(make_mesh(self.world_size))
        before = [param.grad.to_local().clone() for param in list(model.parameters())[:4]]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 10 * norm_by_hand(ref_grads, 2).item())
        self._check_alike(norm, norm_by_hand(ref_grads, 2))
        for param, grad in zip(model.parameters(), before):
            self.assertEqual(param.grad.to_local(), grad, rtol=0, atol=0, may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(norm_type=[2.0, 1.0, 3.0])
    def test_norm_and_clip_apart(self, norm_type):
        """``get_total_norm`` and ``clip_grads_with_norm_`` have the same results and collectives as
        ``clip_grad_norm_``.
        """
        (model, ref_grads), (split, _) = (self._uneven(make_mesh(self.world_size)) for _ in range(2))
        with CommDebugMode() as in_one:
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5, norm_type)
        with CommDebugMode() as apart:
            grads = [param.grad for param in split.parameters() if param.grad is not None]
            split_norm = torch.nn.utils.get_total_norm(grads, norm_type)
            torch.nn.utils.clip_grads_with_norm_(split.parameters(), 0.5, split_norm)
        self.assertEqual(dict(in_one.get_comm_counts()), {ALL_REDUCE: 1})
        self.assertEqual(apart.get_comm_counts(), in_one.get_comm_counts())
        self._check_alike(split_norm, norm_by_hand(ref_grads, norm_type))
        self.assertEqual(split_norm.full_tensor(), norm.full_tensor(), rtol=0, atol=0)
        for param, split_param in list(zip(model.parameters(), split.parameters()))[:4]:
            self.assertEqual(split_param.grad.to_local(), param.grad.to_local(), rtol=0, atol=0, may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_foreach_norm_without_foreach_kernels(self):
        """``get_total_norm(foreach=True)`` raises on a device that has no foreach kernels, such as meta."""
        grads = [torch.empty_like(param) for param in fully_shard(nn.Linear(4, 4, device="meta")).parameters()]
        with self.assertRaisesRegex(RuntimeError, "can't use the foreach API on meta tensors"):
            torch.nn.utils.get_total_norm(grads, foreach=True)
        self.assertTrue(torch.nn.utils.get_total_norm(grads).is_meta)

    def _raises(self, rank: int, value: float, norm_type: float) -> bool:
        """Set one gradient element of ``rank`` to ``value`` and clip. Return whether clipping raises on this rank.
        Clipping that raises must not change the gradients.
        """
        manual_seed(42)
        layer = fully_shard(nn.Linear(4, 4, bias=False, device=self.device))
        layer(torch.ones(2, 4, device=self.device) + self.rank).sum().backward()
        local = layer.weight.grad.to_local()
        if self.rank == rank:
            local[0, 1] = value
        before = local.clone()
        try:
            torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.1, norm_type, error_if_nonfinite=True)
        except RuntimeError as error:
            self.assertIn("non-finite", str(error))
            self.assertEqual(local, before, rtol=0, atol=0, may_be="nonfinite")
            return True
        return False

    def _check_raises_on_all_ranks(self, rank: int, value: float, norm_type: float) -> None:
        raised = torch.tensor(int(self._raises(rank, value, norm_type)), device=self.device)
        dist.all_reduce(raised)  # also checks that all ranks get here
        self.assertEqual(raised.item(), self.world_size, "ranks that raise")

    @skip_if_lt_x_gpu(2)
    def test_error_if_nonfinite(self):
        """One non-finite value on one rank is an error on all ranks."""
        config = {"rank": list(range(self.world_size)), "value": [math.inf, -math.inf, math.nan], "norm_type": [2.0]}
        self.run_subtests(config, self._check_raises_on_all_ranks)
        config |= {"value": [math.inf, -math.inf], "norm_type": [math.inf]}
        self.run_subtests(config, self._check_raises_on_all_ranks)
        self.assertFalse(self._raises(0, 1.0, 2.0))

    @requires(lambda: None if accelerator.current().backend == "gloo" else "the defect was seen with gloo alone")
    @skip_if_lt_x_gpu(2)
    @subtests(rank=lambda: range(dist.get_world_size()))
    def test_nan_in_largest_magnitude(self, rank):
        """A NaN on one rank makes the infinity norm NaN, so all ranks raise an error."""
        with torch_defect("dtensor_inf_norm_loses_nan", when=rank > 0):
            self._check_raises_on_all_ranks(rank, math.nan, math.inf)


class TestClipGradNormEmptyShard(FSDPTestMultiThread):
    world_size = 4

    def _largest_magnitude(self, features: int) -> None:
        layer = nn.Linear(2, features, bias=False, device=self.device)
        fully_shard(layer, mesh=make_mesh(self.world_size))
        rows = torch.arange(1.0, features + 1, device=self.device)  # the gradients of all ranks differ in magnitude
        (layer(torch.ones(1, 2, device=self.device) * self.rank) * rows).sum().backward()
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5, math.inf)
        self.assertEqual(norm.full_tensor().item(), 1.5 * features)
        self.assertEqual(layer.weight.grad.full_tensor(), (0.5 * rows / features).unsqueeze(1).expand(-1, 2))

    @skip_if_lt_x_gpu(1)
    def test_largest_magnitude(self):
        """The infinity norm is right if every local shard has a row."""
        self._largest_magnitude(4)

    @torch_defect("dtensor_reduction_of_empty_shard_hangs")
    @skip_if_lt_x_gpu(1)
    def test_largest_magnitude_of_empty_shard(self):
        """The infinity norm is right if the local shard of the last rank is empty."""
        self._largest_magnitude(3)

    def _check_reduction(self, reduction: str, rows: int) -> None:
        layer = nn.Linear(2, rows, bias=False, device=self.device)
        layer.weight = nn.Parameter(uniform(rows, 2, seed=0))
        plain = layer.weight.detach().clone()
        fully_shard(layer, mesh=make_mesh(self.world_size))
        found, right = (getattr(each, reduction)() for each in (layer.weight.detach(), plain))
        self.assertEqual([full(each) for each in tree_leaves(found)], tree_leaves(right))

    @skip_if_lt_x_gpu(1)
    @subtests(
        case=[*itertools.product(["max", "min", "amax", "mean"], [4]), *itertools.product(["sum", "any"], [4, 3])]
    )
    def test_reduction(self, case):
        """A reduction of a sharded parameter equals that of the full parameter. With three rows the local shard of the
        last rank is empty.
        """
        self._check_reduction(*case)

    @torch_defect("dtensor_reduction_of_empty_shard_hangs")
    @skip_if_lt_x_gpu(1)
    @parametrize("reduction", ["max", "min", "amax"])
    def test_reduction_without_identity(self, reduction):
        """Reductions that raise for an empty tensor work although the local shard of the last rank is empty."""
        self._check_reduction(reduction, 3)


instantiate_parametrized_tests(TestClipGradNormEmptyShard)

if __name__ == "__main__":
    run_tests()
