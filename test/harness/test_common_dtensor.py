"""The models and test cases for DTensor: parallel models compute like plain ones, and test cases make groups."""

from __future__ import annotations

import copy
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

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

TOKENS = (4, 8)  # batch and sequence


def transformer(**kwargs: Any) -> Transformer:
    torch.manual_seed(7)
    return Transformer(ModelArgs(dropout_p=0.0, **kwargs)).to(accelerator.current().type)


def tokens() -> torch.Tensor:
    torch.manual_seed(11)
    return torch.randint(0, 8, TOKENS, device=accelerator.current().type)


class TestModels(TestCase):
    """Without it, a model could ignore its mask or its dropout, and tests of these would prove nothing."""

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
    """Without it, attention could get DTensors where a test asks for this rank's heads, or a wrong mesh be accepted."""

    world_size = 2

    @with_comms
    def test_attention_gets_local_heads(self):
        plain = transformer()
        parallel = Transformer.parallelize(copy.deepcopy(plain), self.mesh, True, local_output_for_attn=True)
        hook = mock.Mock(return_value=None)
        parallel.layers[0].attention.wq.register_forward_hook(hook)
        self.assertEqual(parallel(tokens()), plain(tokens()))
        self.assertIs(type(hook.call_args.args[-1]), torch.Tensor)

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
