"""The models and test cases for DTensor: parallel models compute like plain ones, and test cases make groups."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from torch_fsdp_tests.common_distributed import needs
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import (
    DTensorContinuousTestBase,
    DTensorConverter,
    DTensorTestBase,
    MLPModule,
    MLPStacked,
    ModelArgs,
    Transformer,
    reduce_local_int,
    skip_if_lt_x_gpu,
    skip_unless_torch_gpu,
    with_comms,
)
from torch_fsdp_tests.installed_torch import torch_facts

TOKENS = (4, 8)  # batch and sequence


def transformer(**kwargs: Any) -> Transformer:
    torch.manual_seed(7)
    return Transformer(ModelArgs(dropout_p=0.0, **kwargs)).to(accelerator.current().type)


def tokens(length: int = TOKENS[1]) -> torch.Tensor:
    torch.manual_seed(11)
    return torch.randint(0, 8, (TOKENS[0], length), device=accelerator.current().type)


class TestModels(TestCase):
    """Without it, a model could ignore its mask, dropout or checkpointing, and tests of these would prove nothing."""

    def test_mask_hides_later_positions(self):
        x = tokens()
        changed = x.clone()
        changed[:, -1] = (x[:, -1] + 1) % 8
        for use_attn_mask in (True, False):
            model = transformer(use_attn_mask=use_attn_mask)
            before, after = model(x)[:, :-1], model(changed)[:, :-1]
            (self.assertEqual if use_attn_mask else self.assertNotEqual)(before, after)

    def test_dropout_only_in_training(self):
        torch.manual_seed(7)
        model = Transformer(ModelArgs(dropout_p=0.5))
        x = tokens().cpu()
        self.assertNotEqual(model(x), model(x))
        model.eval()
        self.assertEqual(model(x), model(x))

    def test_checkpointed_activations_are_computed_twice(self):
        x = tokens()
        gradients = []
        for checkpoint_activations, calls in ((False, 1), (True, 2)):
            model = transformer(checkpoint_activations=checkpoint_activations)
            block = model.layers[0]
            with mock.patch.object(block.attention, "forward", side_effect=block.attention.forward) as forward:
                model(x).sum().backward()
            self.assertEqual(forward.call_count, calls)
            gradients.append([param.grad for param in model.parameters()])
        once, twice = gradients
        self.assertEqual(once, twice)

    def test_stacked_layers(self):
        x = torch.randn(2, 10)
        once = MLPModule("cpu")
        for n_layers, expected in ((1, once(x)), (2, once(once(x)))):
            self.assertEqual(MLPStacked("cpu", n_layers)(x), expected)
        self.assertEqual(len(MLPStacked("cpu").layers), 2)

    def test_numbers_of_all_ranks(self):
        value = mock.Mock(**{"node._local_ints": {0: 3, 1: 4}})
        self.assertEqual(reduce_local_int(value, lambda by_rank: max(by_rank.values())), 4)


class TestParallelModels(DTensorTestBase):
    """Without it, FSDP with tensor parallelism could be compared with a model that computes something else."""

    world_size = 4

    def compare(
        self,
        plain: nn.Module,
        parallel: nn.Module,
        local: Callable[[torch.Tensor], torch.Tensor],
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Compare outputs and all gradients. ``local(x)`` is this rank's part of the input, which ``group`` splits."""
        x = tokens()
        expected = plain(x)
        expected.square().sum().backward()
        output = parallel(local(x))
        self.assertEqual(output, local(expected))
        output.square().sum().backward()
        names = dict(plain.named_parameters())
        self.assertEqual([name for name, _ in parallel.named_parameters()], list(names))
        for name, param in parallel.named_parameters():
            grad = param.grad
            if isinstance(grad, DTensor):
                grad = grad.full_tensor()
            if "experts" not in name and local(x).size(0) != x.size(0):
                dist.all_reduce(grad, group=group)  # the gradients come from this rank's tokens only
            self.assertEqual(grad, names[name].grad, atol=1e-4, rtol=1e-4, msg=name)

    @with_comms
    def test_tensor_parallelism(self):
        options = ((False, True, False), (True, True, False), (True, False, False), (True, True, True))
        for use_seq_parallel, weight_tying, local_heads in options:
            plain = transformer(weight_tying=weight_tying)
            parallel = Transformer.parallelize(copy.deepcopy(plain), self.mesh, use_seq_parallel, local_heads)
            hook = mock.Mock(return_value=None)
            parallel.layers[0].attention.wq.register_forward_hook(hook)
            self.assertEqual(parallel.output.weight is parallel.tok_embeddings.weight, weight_tying)
            self.assertIsInstance(parallel.layers[1].attention.wo.weight, DTensor)
            self.compare(plain, parallel, local=lambda x: x)
            self.assertIs(type(hook.call_args.args[-1]), torch.Tensor if local_heads else DTensor)

    @with_comms
    def test_expert_parallelism(self):
        plain = transformer(num_experts=4)
        parallel = Transformer.parallelize(copy.deepcopy(plain), None, False, ep_mesh=self.mesh)
        weight = parallel.layers[0].expert_layer.experts.w1
        self.assertEqual(tuple(weight.to_local().shape), (1, 64, 16))
        self.compare(plain, parallel, local=lambda x: x[self.rank : self.rank + 1])

    @needs(torch_facts.CONCATENATES_MESHES)
    @with_comms
    def test_expert_and_tensor_parallelism(self):
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("ep", "tp"))
        plain = transformer(num_experts=4)
        parallel = Transformer.parallelize(copy.deepcopy(plain), mesh["tp"], False, ep_mesh=mesh["ep"])
        weight = parallel.layers[0].expert_layer.experts.w2
        self.assertEqual(tuple(weight.to_local().shape), (2, 16, 32))
        half = slice(0, 2) if self.rank < 2 else slice(2, 4)
        self.compare(plain, parallel, local=lambda x: x[half], group=mesh.get_group("ep"))

    @with_comms
    def test_misuse_is_refused(self):
        with self.assertRaisesRegex(TypeError, "not a Linear"):
            Transformer.parallelize(nn.Linear(1, 1), self.mesh, False)
        with self.assertRaisesRegex(ValueError, "give a mesh"):
            Transformer.parallelize(transformer(), None, False)
        for ep_mesh, use_seq_parallel in ((None, False), (self.mesh, True)):
            with self.assertRaisesRegex(ValueError, "experts need"):
                Transformer.parallelize(transformer(num_experts=4), self.mesh, use_seq_parallel, ep_mesh=ep_mesh)


class TestProcesses(DTensorTestBase):
    """Without it, ``with_comms`` could give a test the wrong group, leak it, or hang after a failure."""

    world_size = 2

    @with_comms
    def test_bare(self):
        self.assertEqual((dist.get_rank(), dist.get_world_size()), (self.rank, 2))
        self.assertEqual(dist.get_backend(), self.backend)
        self.assertIs(self.mesh, self.mesh)
        self.assertEqual((self.mesh.size(), self.mesh.device_type), (2, accelerator.current().type))
        self.mesh = None  # upstream's tests assign it

    @skip_if_lt_x_gpu(2)
    @skip_unless_torch_gpu
    @with_comms(backend="fake")
    def test_with_a_backend(self):
        self.assertEqual(dist.get_backend(), "fake")

    def test_the_group_ends_with_the_test(self):
        """And there is none without ``with_comms``."""
        self.assertFalse(dist.is_initialized())
        body = mock.Mock(__name__="body")
        with_comms(body)(self, "argument", key=1)
        body.assert_called_once_with(self, "argument", key=1)
        self.assertFalse(dist.is_initialized())

    def test_an_exception_waits_for_nobody(self):
        init_pg, destroy_pg = mock.Mock(), mock.Mock()
        self.__dict__.update(init_pg=init_pg, destroy_pg=destroy_pg)
        with self.assertRaises(ZeroDivisionError):
            with_comms(eager_init=True, backend="some")(mock.Mock(__name__="body", side_effect=ZeroDivisionError))(self)
        init_pg.assert_called_once_with(True, "some")
        destroy_pg.assert_not_called()

    @with_comms
    def test_op_on_dtensor(self):
        x = distribute_tensor(torch.arange(6.0).view(2, 3), self.mesh, [Shard(0)])
        self._test_op_on_dtensor(torch.add, x, 1)
        with self.assertRaises(AssertionError):
            # The sum of a rank's local shard is not the sum of the full tensor.
            self._test_op_on_dtensor(self._local_sum, x)

    @with_comms
    def test_op_with_all_placements(self):
        x, y = torch.arange(8.0).view(2, 4) + 1, torch.tensor(3.0)
        seen = []

        def recorded(x: torch.Tensor, other: torch.Tensor, both: bool) -> Any:
            if isinstance(x, DTensor):
                seen.append(x.placements)
            return (x + other, x * other) if both else x + other

        self._test_op(self.mesh, recorded, x, other=y, both=True)
        self._test_op(self.mesh, recorded, x, other=y, both=False)
        self.assertEqual(seen, [(Replicate(),), (Shard(0),), (Shard(1),)] * 2)
        for wrong, arguments in ((self._local_sum, [x]), (torch.add, [1, 2]), (torch.neg, [x.to_sparse()])):
            with self.assertRaises(AssertionError):
                self._test_op(self.mesh, wrong, *arguments)

    @with_comms
    def test_converter(self):
        weight = nn.Parameter(torch.ones(4, 3), requires_grad=False)
        args, kwargs = (weight, [torch.ones(2, dtype=torch.bool), "text"]), {"scale": torch.ones(1, 4), "n": 5}
        converter = DTensorConverter(self.mesh, args, kwargs)
        placements = []
        for (new_weight, (flags, text)), new_kwargs in converter:
            self.assertIsInstance(new_weight, nn.Parameter)
            self.assertEqual((new_weight.requires_grad, text), (False, "text"))
            self.assertEqual([new_kwargs["scale"].full_tensor(), new_kwargs["n"]], [torch.ones(1, 4), 5])
            tensors = (new_weight, flags, new_kwargs["scale"])
            placements.append([each.placements[0] for each in tensors])
        whole = Replicate()
        pairs = [(first, second) for first in (whole, Shard(0)) for second in (whole, Shard(1))]
        self.assertEqual(placements, [[first, whole, second] for first, second in pairs])
        self.assertEqual((converter.hit, converter.miss, converter.successful()), (12, 0, True))
        self.assertEqual(len(list(DTensorConverter(self.mesh, args, kwargs, replicate_only=True))), 1)

    @with_comms
    def test_converter_leaves_what_dtensor_does_not_support(self):
        class Other(torch.Tensor):
            pass

        strange = [torch.ones(2, device="meta"), torch.ones(2).to_sparse(), torch.ones(2, dtype=torch.cfloat).conj()]
        strange += [torch.ones(2).as_subclass(Other), strange[2].imag]
        self.assertTrue(strange[-1].is_neg())
        for tensor in strange:
            converter = DTensorConverter(self.mesh, (tensor, torch.ones(1)), {})
            ((new, _), _), *_ = converter
            self.assertIs(new, tensor)
            self.assertEqual(converter.hit, converter.miss)
            self.assertFalse(converter.successful())
        self.assertFalse(DTensorConverter(self.mesh, (), {}).successful())
        with self.assertRaisesRegex(RuntimeError, "cannot make a DTensor of int: give a tensor"):
            converter.to_dist_tensor(1, self.mesh, [Replicate()])

    def _local_sum(self, x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, DTensor):
            return x + x.sum()
        return DTensor.from_local(x.to_local() + x.to_local().sum(), self.mesh, [Shard(0)])


class TestContinuous(DTensorContinuousTestBase):
    """Without it, a class of DTensor tests that keeps its ranks could start new ones for each test."""

    world_size = 2
    ids: dict = {}

    def test_first(self):
        self.assertEqual(self.device_type, accelerator.current().type)
        self.assertEqual(self.mesh.size(), 2)
        self.assertEqual(self.ids.setdefault(self.rank, os.getpid()), os.getpid())
        self.assertEqual(dist.get_backend(), accelerator.current().backend)

    test_second = test_first


class TestEqualMeshes(DTensorContinuousTestBase):
    """Without it, the caches of torch could name groups of an equal mesh that the harness has destroyed."""

    world_size = 4

    def test_first(self):
        mesh = init_device_mesh(self.device_type, (2, 2), mesh_dim_names=("dp", "tp"))
        x = torch.arange(8.0, device=self.device_type)
        doubled = distribute_tensor(x, mesh["tp"], [Shard(0)]) * 2
        self.assertEqual(doubled.full_tensor(), 2 * x)

    test_second = test_first


if __name__ == "__main__":
    run_tests()
