"""The ``replicate`` that is built on FSDP2: full parameters on each rank, and one all-reduce for each parameter group.

The reference is a plain model, whose gradients the tests average over the ranks. Inputs differ by rank.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module

from torch_fsdp_tests.common_distributed import needs, ranks_of, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, MLPStack, check_sharded_parity
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, of_all_ranks
from torch_fsdp_tests.fsdp.training import (
    FEW,
    Loop,
    TrainingMixin,
    accumulating,
    backward,
    loss_of,
    optimizers,
    replicate_each,
    tiny_transformer,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts


class Net(nn.Sequential):
    """Three layers in a row."""

    def __init__(self, dim: int = 2) -> None:
        super().__init__(*(nn.Linear(dim, dim) for _ in range(3)))


def replicate(module: Any, **kwargs: Any) -> Any:
    return replicate_each([module], **kwargs)


def dp_mesh_dims(**kwargs: Any) -> Any:
    """``DataParallelMeshDims``, looked up late because older versions of PyTorch lack it."""
    return torch.distributed.fsdp.DataParallelMeshDims(**kwargs)


ROOTS: dict[str, Callable[..., Any]] = {"replicate": replicate, "fully_shard": fully_shard}


@needs(torch_facts.REPLICATES_WITHOUT_SHARDS)
class ReplicateTest(TrainingMixin, FSDPTest):
    power_of_two_ranks = True

    @property
    def world_size(self) -> int:
        has_mesh = "mesh" in self._testMethodName or "2d" in self._testMethodName
        return ranks_of(self, 4 if has_mesh else 2)

    def _net(self, dim: int = 4) -> Any:
        """Three layers with the same values in each call."""
        manual_seed(42)
        return Net(dim).to(self.device)

    def _check_placements(self, model: nn.Module, *placements: Any) -> None:
        params = list(model.parameters())
        self.assertEqual({type(param) for param in params}, {DTensor})
        self.assertEqual({param.placements for param in params}, {placements})

    # Wrapping.

    @skip_if_lt_x_gpu(2)
    @subtests(root=list(ROOTS))
    def test_replicate_transformer(self, root):
        """Each module is registered under the name of its API, and its parameters have the matching placements."""
        model = tiny_transformer(n_layers=4)
        for index, layer in enumerate(model.layers):
            ROOTS["fully_shard" if index % 2 else "replicate"](layer)
        ROOTS[root](model)
        for index, layer in enumerate(model.layers):
            (api,) = internals.composable_contract._get_registry(layer)
            self.assertEqual(api, "fully_shard" if index % 2 else "replicate")
            self._check_placements(layer, Shard(0) if index % 2 else Replicate())
        self.assertEqual(list(internals.composable_contract._get_registry(model)), [root])
        self._check_placements(model.output, Replicate() if root == "replicate" else Shard(0))

    @skip_if_lt_x_gpu(2)
    def test_replicate_transformer_managed_modules(self):
        """``replicate`` manages all modules except those already wrapped with either API and their submodules."""
        replication = internals.replicate_on_fsdp2
        managed = functools.partial(
            internals.fsdp2_init._get_managed_modules,
            is_composable_fn=replication.is_composable_with_replicate,
            get_state_fn=replication._get_module_replicate_state,
        )
        model = tiny_transformer(n_layers=3)
        self.assertEqual(set(managed((model,))), set(model.modules()))
        replicate(model.layers[0])
        fully_shard(model.layers[1])
        wrapped = {module for layer in model.layers[:2] for module in layer.modules()}
        self.assertEqual(set(managed((model,))), set(model.modules()) - wrapped)
        self.assertIn(model.layers[2].attention, managed((model,)))

    @skip_if_lt_x_gpu(2)
    def test_replicate_tp_device_mesh(self):
        """``replicate`` uses one dimension of a three-dimensional mesh."""
        mesh = self._mesh(2, 1, self.world_size // 2, names=("replicate", "shard", "tp"))
        model = self._net()
        for linear in model:
            replicate(linear, mesh=mesh["replicate"])
            self._check_placements(linear, Replicate())
            for param in linear.parameters():
                self.assertEqual(param.device_mesh, mesh["replicate"])
                self.assertEqual(param.device_mesh.shape, (2,))
                self.assertIs(param.device_mesh.get_group(), mesh.get_group("replicate"))

    @skip_if_lt_x_gpu(2)
    def test_default_mesh(self):
        """Without a mesh all ranks are replicas."""
        model = replicate(self._net())
        mesh = model[0].weight.device_mesh
        self.assertEqual((mesh.shape, mesh.mesh_dim_names), ((self.world_size,), ("replicate",)))
        self.assertEqual(mesh.device_type, self.device.type)

    @skip_if_lt_x_gpu(2)
    def test_class_of_module(self):
        """A replicated module is still an instance of its class. A slice of it is a plain module."""
        model = replicate(self._net())
        self.assertEqual(type(model).__name__, "ReplicateNet")
        self.assertIsInstance(model, Net)
        self.assertIsInstance(model, internals.replicate_on_fsdp2.ReplicateModule)
        self.assertIs(type(replicate(self._net())), type(model))
        layers = replicate(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))
        self.assertIs(type(layers[:1]), nn.Sequential)
        with self.assertRaisesRegex(AssertionError, "^FSDP does not support deepcopy"):
            copy.deepcopy(model)

    @skip_if_lt_x_gpu(2)
    def test_refusals(self):
        """``replicate`` rejects invalid modules and meshes. Modules that are already wrapped do not change."""
        mesh = self._mesh(2, 1)
        with self.assertRaisesRegex(ValueError, "replicate expects a 1D DeviceMesh"):
            replicate(self._net(), mesh=mesh)
        with self.assertRaisesRegex(ValueError, "replicate does not support containers that do not implement forward"):
            replicate(nn.ModuleList(self._net()))
        sharded, replicated = fully_shard(self._net()), replicate(self._net())
        with self.assertRaisesRegex(RuntimeError, "Cannot apply `replicate\\(\\)` on a Module already managed"):
            replicate(sharded)
        with self.assertRaisesRegex(AssertionError, "can only be applied to a module once"):
            replicate(replicated)
        with self.assertRaisesRegex(AssertionError, "more than once"):
            fully_shard(replicated)
        self._check_placements(sharded, Shard(0))
        self._check_placements(replicated, Replicate())

    @skip_if_lt_x_gpu(2)
    @subtests(grouped=[False, True])
    def test_ignored_params(self, grouped):
        """An ignored parameter stays a plain parameter, whose gradient is not reduced."""
        ref_model, model = self._net(), self._net()
        ignored = model[1].weight
        if grouped:
            replicate([model[0], model[1]], ignored_params={ignored})
        replicate(model, ignored_params={ignored})
        self.assertIs(model[1].weight, ignored)
        self._seed()
        inp = self._inputs(3, 4)
        for each in (ref_model, model):
            train(each, inp)
        self.assertEqual(ignored.grad, ref_model[1].weight.grad)
        self.assertNotEqual(*of_all_ranks(ignored.grad))
        average_gradients(ref_model)
        for name, param in model.named_parameters():
            if param is not ignored:
                self.assertEqual(param.grad.to_local(), ref_model.get_parameter(name).grad)

    # Mesh dimensions by name.

    @needs(torch_facts.REPLICATES_OVER_NAMED_DIMS)
    @skip_if_lt_x_gpu(4)
    @subtests(both=[False, True])
    def test_named_mesh_dims(self, both):
        """A model of DTensors on a 2D mesh can be replicated over one or both of the mesh dimensions."""
        inner = f"inner_{both}"
        names = f"outer_{both}", inner  # meshes with the same names would be equal
        mesh = self._mesh(2, 2, names=names)
        ref_model, model = self._net(), distribute_module(self._net(), mesh)
        replicate(model, mesh=mesh, dp_mesh_dims=dp_mesh_dims(replicate=names if both else inner))
        self._check_placements(model, Replicate(), Replicate())
        self._seed(self.rank if both else mesh.get_local_rank(inner))
        inp = self._inputs(3, 4)
        train(ref_model, inp)
        average_gradients(ref_model, None if both else mesh.get_group(inner))
        whole = DTensor.from_local(inp, mesh, [Replicate()] * 2, run_check=False)
        with collectives.recorded() as calls:
            backward(loss_of(model(whole).to_local()))
        self.assertEqual(calls.counts(), {"all_reduce": 1})
        for name, param in model.named_parameters():
            ref = ref_model.get_parameter(name)
            self.assertEqual((param.to_local(), param.grad.to_local()), (ref, ref.grad))

    def _check_dims_rejected(self, message: str, **dims: Any) -> None:
        mesh = self._mesh(2, 2)
        with self.assertRaisesRegex(ValueError, message):
            replicate(distribute_module(self._net(), mesh), mesh=mesh, dp_mesh_dims=dp_mesh_dims(**dims))

    @needs(torch_facts.REPLICATES_OVER_NAMED_DIMS)
    @skip_if_lt_x_gpu(4)
    def test_named_mesh_dims_refused(self):
        """``replicate`` rejects a shard dimension, an unknown dimension, or no dimension."""
        self._check_dims_rejected("requires replicate-only", shard="shard")
        self._check_dims_rejected("'nowhere' not found in mesh.mesh_dim_names", replicate="nowhere")
        self._check_dims_rejected("At least one of shard or replicate")

    # Training.

    @skip_if_lt_x_gpu(2)
    @subtests(optim_cls=[torch.optim.SGD, torch.optim.Adam])
    def test_train_replicate_fsdp(self, optim_cls):
        """The model trains like a plain model with averaged gradients, with one all-reduce per parameter group. SGD
        detects a wrong factor of the gradients, Adam alone does not.
        """
        manual_seed(42)
        model = tiny_transformer()
        ref_model = self._replica(model)
        replicate_each([*model.layers, model])

        def step(each: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            with collectives.recorded() as calls:
                loss = train(each, tokens)
            self.assertEqual(calls.counts(), {"all_reduce": 4} if each is model else {}, may_be="empty")
            return loss

        kwargs: dict[str, Any] = {"momentum": 0.9} if optim_cls is torch.optim.SGD else {}
        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 8),
            Loop(step=step, compare=check_sharded_parity),
            optimizers(ref_model, model, cls=optim_cls, **kwargs),
        )

    @skip_if_lt_x_gpu(2)
    @subtests(
        # Checkpointing does not depend on the size, so only slow tests run all combinations.
        case=list(itertools.product([False, True], [3, 16, 17]))
        if TEST_WITH_SLOW
        else [(False, 3), (True, 16), (False, 17)]
    )
    def test_train_parity_2d_mlp(self, case):
        """``replicate`` trains like the plain model. HSDP with TP on the same mesh does as well."""
        use_activation_checkpointing, mlp_dim = case
        mesh = self._mesh(2, 1, self.world_size // 2, names=("replicate", "shard", "tp"))
        manual_seed(42)
        plain = MLPStack(mlp_dim)
        two_d = self._replica(plain).parallelize(mesh["tp"], mesh["replicate", "shard"], use_activation_checkpointing)
        replicated = self._replica(plain)
        if use_activation_checkpointing:
            for mlp in replicated:
                internals.composable.checkpoint(mlp)
        replicate_each([*replicated, replicated], mesh=mesh["replicate"])
        loop = Loop(
            average=functools.partial(average_gradients, group=mesh.get_group("replicate")),
            data_rank=mesh.get_local_rank("replicate"),
            iterations=FEW,
        )
        for model in (replicated, two_d):
            ref_model = self._replica(plain)
            optims = optimizers(ref_model, model, cls=torch.optim.SGD, foreach=False)
            self._check_training(ref_model, model, lambda: self._inputs(8, mlp_dim), loop, optims)

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, root=list(ROOTS), accumulate=[False, True], frozen=[False, True])
    def test_train_mixed_model(self, root, accumulate, frozen):
        """Some layers are replicated and some sharded. Each kind uses its own collectives."""
        manual_seed(42)
        model = nn.Sequential(*(MLP(4) for _ in range(4)), nn.Linear(4, 4))
        if frozen:
            for index in (0, 1):  # one of each kind
                model[index].in_proj.weight.requires_grad_(False)
        ref_model = self._replica(model)
        for index in range(4):
            ROOTS["fully_shard" if index % 2 else "replicate"](model[index])
        ROOTS[root](model)

        microbatches = 3 if accumulate else 1
        step = accumulating(model, model.set_requires_gradient_sync)

        def counted(each: nn.Module, batch: Any) -> torch.Tensor:
            with collectives.recorded() as calls:
                losses = step(each, batch)
            counts = calls.counts()
            counts.pop("all_gather", None)  # depends on the root: test_sharded_layers_reshard_under_replicated_root
            by_root = {"replicate": (2, 3), "fully_shard": (3, 2)}[root]
            expected = Counter(dict(zip(("reduce_scatter", "all_reduce"), by_root)))
            self.assertEqual(counts, expected if each is model else Counter(), may_be="empty")
            return losses

        self._check_training(
            ref_model,
            model,
            lambda: self._inputs(microbatches, 3, 4).unbind(),
            Loop(step=counted),
            optims=optimizers(ref_model, model, cls=torch.optim.SGD, momentum=0.9),
        )

    @skip_if_lt_x_gpu(2)
    def test_sharded_layers_reshard_under_replicated_root(self):
        """Sharded layers reshard after forward, but under a root of ``replicate`` each is a root, and does not."""
        for root in ("fully_shard", "replicate"):
            model = self._net()
            fully_shard(model[1])
            ROOTS[root](model)
            model(self._inputs(2, 4))
            self.assertEqual(isinstance(model[1].weight, DTensor), root == "fully_shard")

    @skip_if_lt_x_gpu(2)
    def test_sharded_group_under_replicated_root(self):
        """A group of sharded layers is rejected, because it would be a root itself."""
        model = self._net()
        fully_shard([model[0], model[1]])
        replicate(model)
        with self.assertRaisesRegex(RuntimeError, "requires a single root module"):
            model(self._inputs(2, 4))

    @skip_if_lt_x_gpu(2)
    @subtests(root=list(ROOTS))
    def test_replicated_group(self, root):
        """Layers that are replicated as one group share an all-reduce."""
        ref_model, model = self._net(), self._net()
        self.assertEqual([type(each).__name__ for each in replicate([model[0], model[1]])], ["ReplicateLinear"] * 2)
        ROOTS[root](model)

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            with collectives.recorded("all_reduce") as calls:
                loss = train(each, inp)
            by_root = 1 if root == "replicate" else 0
            self.assertEqual(len(calls), 1 + by_root if each is model else 0)
            return loss

        self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(step=step))

    @skip_if_lt_x_gpu(2)
    @subtests(tied=[False, True], frozen=[(), ("layers.0", "norm"), ("tok_embeddings", "pos_embeddings")])
    def test_tied_and_frozen(self, tied, frozen):
        """Models with tied and frozen parameters train correctly."""
        manual_seed(42)
        model = tiny_transformer(weight_tying=tied)
        for name in frozen:
            model.get_submodule(name).requires_grad_(False)
        ref_model = self._replica(model)
        replicate_each([*model.layers, model])
        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 8),
            Loop(iterations=FEW),
            optims=optimizers(ref_model, model, cls=torch.optim.SGD),
        )
        self.assertEqual(model.tok_embeddings.weight is model.output.weight, tied)

    # Reductions of gradients.

    @skip_if_lt_x_gpu(2)
    @subtests(factor=[None, 0.5, 1.0, 3.0, 4.0])
    def test_gradient_divide_factor(self, factor):
        """The sum over the replicas is divided by the factor, or by the number of replicas."""
        model: Any = replicate(nn.Linear(2, 1, bias=False, device=self.device))
        if factor is not None:
            model.set_gradient_divide_factor(factor)
        model(torch.full((3, 2), 1.0 + self.rank, device=self.device)).sum().backward()
        total = 3 * sum(range(1, self.world_size + 1))
        expected = total / (self.world_size if factor is None else factor)
        self.assertEqual(model.weight.grad.to_local(), torch.full((1, 2), expected, device=self.device))

    @skip_if_lt_x_gpu(2)
    def test_gradient_divide_factor_forced_sum(self):
        """With ``set_force_sum_reduction_for_comms`` the sum is divided by the factor once."""
        model: Any = replicate(nn.Linear(2, 1, bias=False, device=self.device))
        model.set_gradient_divide_factor(4.0)
        model.set_force_sum_reduction_for_comms(True)
        model(torch.full((3, 2), 1.0 + self.rank, device=self.device)).sum().backward()
        expected = 3 * sum(range(1, self.world_size + 1)) / 4
        with torch_defect("fsdp2_divides_twice"):
            self.assertEqual(model.weight.grad.to_local(), torch.full((1, 2), expected, device=self.device))

    @skip_if_lt_x_gpu(2)
    def test_forced_sum(self):
        """With forced sums and without a factor, gradients are averaged."""
        ref_model, model = self._net(), replicate(self._net())
        model.set_force_sum_reduction_for_comms(True)
        self._check_training(
            ref_model, model, lambda: self._inputs(2, 4), optims=optimizers(ref_model, model, cls=torch.optim.SGD)
        )

    @skip_if_lt_x_gpu(2)
    def test_all_reduce_hook(self):
        """A hook gets the averaged gradients of a group as a flat tensor, and may change them."""
        ref_model, model = self._net(), self._net()
        replicate_each([*model])
        replicate(model)
        seen: list[torch.Tensor] = []

        def halve(flat: torch.Tensor) -> None:
            seen.append(flat.clone())
            flat.mul_(0.5)

        model[1].set_all_reduce_hook(halve)
        self._seed()
        inp = self._inputs(3, 4)
        for each in (ref_model, model):
            train(each, inp)
        average_gradients(ref_model)
        expected = torch.cat([param.grad.flatten() for param in ref_model[1].parameters()])
        self.assertEqual(seen, [expected])
        for param in ref_model[1].parameters():
            param.grad.mul_(0.5)
        check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    def test_replicas_stay_equal(self):
        """After 20 steps on different data, replicas are bitwise equal."""
        model = self._net()
        replicate_each([*model, model])
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
        self._seed()
        for _ in range(20):
            train(model, self._inputs(3, 4))
            optim.step()
            optim.zero_grad()
        first, second = of_all_ranks([param.to_local().detach() for param in model.parameters()])
        self.assertEqual(first, second, rtol=0, atol=0)
        self.assertNotEqual(first, [param.detach() for param in self._net().parameters()])

    @skip_if_lt_x_gpu(2)
    def test_replicas_are_not_compared(self):
        """Unlike DDP, ``replicate`` broadcasts nothing. Each rank keeps its own initial values."""
        model = nn.Linear(2, 2, device=self.device)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(self.rank + 1)
        replicate(model)
        for _ in range(2):
            for value in model.state_dict().values():
                self.assertEqual(value.to_local(), torch.full_like(value.to_local(), self.rank + 1))
            model(self._inputs(2, 2)).sum().backward()

    # State.

    @skip_if_lt_x_gpu(2)
    def test_state_dict(self):
        """State dicts have the plain model's names and values, also between forward and backward."""
        ref_model, model = self._net(), self._net()
        replicate_each([*model, model])
        other = replicate(nn.Sequential(*(nn.Linear(4, 4, device=self.device) for _ in range(3))))
        for forward_first in (False, True):
            if forward_first:
                model(self._inputs(2, 4))
            state = model.state_dict()
            self.assertEqual(list(state), list(ref_model.state_dict()))
            self.assertEqual({type(value) for value in state.values()}, {DTensor})
            self.assertEqual({name: value.to_local() for name, value in state.items()}, ref_model.state_dict())
        other(self._inputs(2, 4))
        other.load_state_dict(state)
        inp = self._inputs(2, 4)
        self.assertEqual(other(inp), ref_model(inp))

    @skip_if_lt_x_gpu(2)
    def test_meta_device(self):
        """A model may be replicated on the meta device, then materialized and trained."""
        ref_model = self._net()
        with torch.device("meta"):
            model = Net(4)
        replicate_each([*model, model])
        with self.assertRaisesRegex(RuntimeError, "parameters should be materialized from meta device"):
            model(self._inputs(2, 4))
        with torch.device("meta"):
            model = Net(4)
        replicate_each([*model, model])
        model.to_empty(device=self.device)
        for param, value in zip(model.parameters(), ref_model.parameters()):
            param.to_local().detach().copy_(value)
        self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(iterations=FEW))

    @skip_if_lt_x_gpu(2)
    def test_clip_grad_norm(self):
        """The norm of replicated gradients counts each gradient once, not once per replica."""
        ref_model, model = self._net(), replicate(self._net())
        self._seed()
        inp = self._inputs(3, 4)
        for each in (ref_model, model):
            train(each, inp)
        average_gradients(ref_model)
        for norm_type in (2.0, 1.0, float("inf")):
            norms = [
                torch.nn.utils.get_total_norm([p.grad for p in each.parameters()], norm_type)
                for each in (ref_model, model)
            ]
            self.assertEqual(norms[1].full_tensor(), norms[0])
        ref_norm, norm = (torch.nn.utils.clip_grad_norm_(each.parameters(), 0.01) for each in (ref_model, model))
        self.assertEqual(norm.full_tensor(), ref_norm)
        check_sharded_parity(self, ref_model, model)


if __name__ == "__main__":
    run_tests()
