"""FSDP over some mesh dimensions and tensor parallelism over the last: training, and saving and loading of states.

The tests cover FSDP2 and FSDP1 over two mesh dimensions, and over three with replicas. Ranks of one tensor-parallel
group share their data. The reference is a plain model on the data of all ranks.
"""

from __future__ import annotations

import copy
import functools
import io
import math
import os
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.parallel.input_reshard import input_reshard

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, MLPStack
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, Transformer, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.checkpoints import TENSOR, Layout, LayoutsMixin, SavedRun, before_tensor, plain_run
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import ShardAdamW, fused_on_host
from torch_fsdp_tests.fsdp.references import average_gradients, full, of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.sharded_states import (
    ShardedStatesMixin,
    SimpleModel,
    SimpleModelUneven,
    moments,
    sharded_state_dicts,
    step_counts,
    train_on_share,
    use_sharded_state_dicts,
)
from torch_fsdp_tests.fsdp.stacks import StacksMixin
from torch_fsdp_tests.fsdp.training import (
    ITERATIONS,
    Loop,
    TrainingMixin,
    accumulating,
    backward,
    check_full,
    check_gradients,
    loss_of,
    optimizers,
    shard_each,
    tiny_transformer,
    train,
)
from torch_fsdp_tests.installed_torch import torch_facts

HOST = torch.device("cpu")  # the CPU is the subject
ALL_REDUCE, REDUCE_SCATTER = torch.ops.c10d_functional.all_reduce, torch.ops.c10d._reduce_scatter_base_
EXACT: dict[str, Any] = {"rtol": 0, "atol": 0}

SQUARE, CUBE = (2, 2), (2, 2, 2)

# The placements of SimpleModel's parameters that tensor parallelism shards. It does not shard the third layer.
CUT = {"net1.weight": Shard(0), "net1.bias": Shard(0), "net2.weight": Shard(1)}


def columns_and_rows(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Shard the first layer by columns and the second by rows. Leave the third layer whole."""
    return parallelize_module(model, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})


def fsdp1_and_tp(model: nn.Module, mesh: DeviceMesh, **kwargs: Any) -> nn.Module:
    """Apply tensor parallelism over the last mesh dimension, then FSDP1 with the whole model as one unit."""
    strategy = ShardingStrategy.HYBRID_SHARD if mesh.ndim == 3 else ShardingStrategy.FULL_SHARD
    columns_and_rows(model, mesh["tensor"])
    return FSDP(model, device_mesh=before_tensor(mesh), sharding_strategy=strategy, **kwargs)


def fsdp2_and_tp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Apply tensor parallelism over the last mesh dimension to every layer, then FSDP2."""
    columns_and_rows(model, mesh["tensor"])
    parallelize_module(model, mesh["tensor"], {"net3": ColwiseParallel(output_layouts=Replicate())})
    return shard_each([*model.children(), model], mesh=before_tensor(mesh))


class TestFullyShard2DTraining(StacksMixin, FSDPTest):
    world_size = at_most(4)
    power_of_two_ranks = True

    def _data_and_tensor(self, *shape: int) -> tuple[DeviceMesh, DeviceMesh]:
        mesh = self._mesh(*shape, names=("dp", "tp"))
        return mesh["dp"], mesh["tp"]

    @skip_if_lt_x_gpu(2)
    def test_train_parity_2d_mlp(self):
        """Stacks of MLPs train with even, uneven and empty shards, and with activation checkpointing."""
        dp_mesh, tp_mesh = self._data_and_tensor(self.world_size // 2, 2)
        self._check_stacks(tp_mesh, dp_mesh, dp_mesh, pairwise=True, iterations=ITERATIONS)

    @skip_if_lt_x_gpu(2)
    @subtests(other_dim=[False, True])
    def test_train_parity_2d_transformer(self, other_dim):
        """With sequence parallelism a norm sees a part of the sequence, so its gradient is also summed over TP ranks.

        The gradients of two microbatches are reduced together. FSDP shards either the first dimension or the one that
        tensor parallelism does not shard.
        """
        dp_mesh, tp_mesh = self._data_and_tensor(self.world_size // 2, 2)
        manual_seed(42)
        model = tiny_transformer(n_layers=2)
        ref_model = self._replica(model)
        Transformer.parallelize(model.to(self.device), tp_mesh, use_seq_parallel=True)
        shard_each([*model.layers, model], mesh=dp_mesh, shard_placement_fn=_other_dim if other_dim else None)
        check_full(self, ref_model, model)
        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 4, 16).unbind(),
            Loop(
                step=accumulating(model, model.set_requires_gradient_sync),
                average=functools.partial(average_gradients, group=dp_mesh.get_group()),
                data_rank=dp_mesh.get_local_rank(),
            ),
            optims=optimizers(ref_model, model, cls=ShardAdamW),
        )
        positions = model.pos_embeddings.weight
        for tensor in (positions, positions.grad):
            self.assertEqual(tensor.placements[1], Shard(0))
            self.assertEqual(tensor.placements[0].dim, 1 if other_dim else 0)

    @skip_if_lt_x_gpu(2)
    @subtests(
        optim_cls=[torch.optim.AdamW, torch.optim.SGD],
        kind=[{"foreach": True}, {"foreach": False}, {"fused": True}],
        # DTensor does not have the operator of a fused SGD.
        valid=lambda optim_cls, kind: optim_cls is not torch.optim.SGD or "fused" not in kind,
    )
    def test_optimizers_over_two_meshes(self, optim_cls, kind):
        """One optimizer steps on two meshes, since TP shards one layer only (#134212, #153268)."""
        dp_mesh, tp_mesh = self._data_and_tensor(self.world_size // 2, 2)
        manual_seed(42)
        model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).to(self.device)
        ref_model = self._replica(model)
        parallelize_module(model[0], tp_mesh, ColwiseParallel(output_layouts=Replicate()))
        shard_each([model], mesh=dp_mesh)
        self.assertEqual(len({param.device_mesh for param in model.parameters()}), 2)
        self._check_training(
            ref_model,
            model,
            lambda: self._inputs(2, 4),
            Loop(
                average=functools.partial(average_gradients, group=dp_mesh.get_group()),
                data_rank=dp_mesh.get_local_rank(),
            ),
            optimizers(ref_model, model, cls=optim_cls, **kind),
        )

    @skip_if_lt_x_gpu(2)
    def test_tied_parameters_are_moved(self):
        """``model.to`` keeps parameters tied that FSDP and TP share (#151085)."""
        dp_mesh, tp_mesh = self._data_and_tensor(self.world_size // 2, 2)
        manual_seed(42)
        model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)).to(self.device)
        model[1].weight = model[0].weight
        ref_model = self._replica(model)
        rows, columns = RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate())
        parallelize_module(model, tp_mesh, {"0": rows, "1": columns})
        model[1].weight = model[0].weight
        shard_each([model], mesh=dp_mesh)
        model.to(self.device).to(torch.float32)
        self.assertIs(model[1].weight, model[0].weight)
        self._check_training(
            ref_model,
            model,
            lambda: self._tokens(2, 3),
            Loop(
                average=functools.partial(average_gradients, group=dp_mesh.get_group()),
                data_rank=dp_mesh.get_local_rank(),
            ),
        )

    @skip_if_lt_x_gpu(2)
    def test_tp_with_fsdp_offloading(self):
        """With FSDP over one rank, the only collectives are those of tensor parallelism."""
        dp_mesh, tp_mesh = self._data_and_tensor(1, self.world_size)
        manual_seed(42)
        model = MLPStack(16)
        ref_model = self._replica(model)
        policy = CPUOffloadPolicy(pin_memory=False)
        model.parallelize(tp_mesh, dp_mesh, use_activation_checkpointing=False, offload_policy=policy)

        # Older versions of PyTorch issue one reduction for each MLP.
        reductions = {} if torch_facts.SKIPS_REDUCTION_OVER_ONE_RANK else {REDUCE_SCATTER: 3}

        def step(each: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if each is ref_model:
                return train(each, batch)
            with CommDebugMode() as in_forward:
                loss = loss_of(each(batch))
            with CommDebugMode() as in_backward:
                loss = backward(loss)
            # Forward has an all-reduce after each row-sharded layer. Backward has one for each column-sharded layer
            # except the first, whose input needs no gradient.
            self.assertEqual(dict(in_forward.get_comm_counts()), {ALL_REDUCE: 3})
            self.assertEqual(dict(in_backward.get_comm_counts()), {ALL_REDUCE: 2, **reductions})
            for param in each.parameters():
                self.assertEqual([param.to_local().device, param.grad.to_local().device], [HOST, HOST])
            return loss

        self._check_training(
            ref_model,
            model,
            lambda: self._inputs(8, 16),
            Loop(step=step, average=lambda ref_model: None, data_rank=0, iterations=5),
        )

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(
        pairwise=True,
        use_seq_parallel=[False, True],
        reuse_model=[True, False],
        optimizer_class=[torch.optim.Adam, torch.optim.AdamW],
    )
    def test_train_parity_2d_transformer_checkpoint_resume(self, use_seq_parallel, reuse_model, optimizer_class):
        """Training that resumes from a checkpoint has bitwise the losses of uninterrupted training.

        The second loss depends on the loaded parameters, and the third also on the loaded optimizer states.
        """
        dp_mesh, tp_mesh = self._data_and_tensor(self.world_size // 2, 2)

        def build(seed: int, parallel: bool = True) -> tuple[Transformer, torch.optim.Optimizer]:
            manual_seed(seed)
            model = tiny_transformer(n_layers=1).to(self.device)
            if parallel:
                Transformer.parallelize(model, tp_mesh, use_seq_parallel)
                shard_each([*model.layers, model], mesh=dp_mesh)
            return model, *optimizers(model, cls=optimizer_class)

        def loss_in_step(number: int, model: Transformer, optim: torch.optim.Optimizer) -> torch.Tensor:
            manual_seed(10 * number + dp_mesh.get_local_rank())
            optim.zero_grad()
            loss = train(model, self._tokens(3, 8))
            if model is plain[0]:
                average_gradients(model, dp_mesh.get_group())
            optim.step()
            return loss

        plain, trained = build(42, parallel=False), build(42)
        losses = [loss_in_step(number, *trained) for number in range(3)]
        self.assertEqual(losses, [loss_in_step(number, *plain) for number in range(3)])

        model, optim = build(42)
        self.assertEqual(loss_in_step(0, model, optim), losses[0], **EXACT)
        path = os.path.join(self.temp_dir, f"{use_seq_parallel} {reuse_model}")
        dcp.save(dict(zip(("model", "optim"), get_state_dict(model, optim))), checkpoint_id=path)
        if not reuse_model:
            model, optim = build(7)
        for tensor in (*model.parameters(), *(each for state in optim.state.values() for each in state.values())):
            tensor.detach().zero_()
        self.assertNotEqual(loss_in_step(1, model, optim), losses[1])
        state = dict(zip(("model", "optim"), get_state_dict(model, optim)))
        dcp.load(state, checkpoint_id=path)
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.assertEqual([loss_in_step(number, model, optim) for number in (1, 2)], losses[1:], **EXACT)


def _other_dim(param: nn.Parameter) -> Shard | None:
    """A ``shard_placement_fn`` that shards the dimension of a matrix that tensor parallelism does not shard."""
    (placement,) = param.placements if isinstance(param, DTensor) else (Replicate(),)
    return Shard(1 - placement.dim) if isinstance(placement, Shard) and param.ndim == 2 else None


class TestFullyShard3DTraining(TrainingMixin, FSDPTest):
    """Gradients on a three-dimensional mesh, for replicas, shards and tensor parallelism."""

    world_size = 8

    def _models(self) -> tuple[SimpleModel, Any, DeviceMesh]:
        """The plain model, a sharded copy, and the mesh."""
        mesh = make_mesh(*CUBE, names=("replicate", "shard", "tensor"))
        ref_model = filled(SimpleModel().to(self.device))
        return ref_model, fsdp2_and_tp(self._replica(ref_model), mesh), mesh

    def _loss(self, model: nn.Module) -> torch.Tensor:
        return model(uniform(3, 5, seed=self.rank // 2)).square().sum()

    @skip_if_lt_x_gpu(8)
    @subtests(norm_type=[2.0, 1.0, math.inf])
    def test_clip_grad_norm(self, norm_type):
        """The norm counts each element once, although several ranks have it, and all ranks clip alike."""
        ref_model, model, _ = self._models()
        for each in (ref_model, model):
            self._loss(each).backward()
        average_gradients(ref_model)
        check_gradients(self, ref_model, model)
        norm, found = (nn.utils.clip_grad_norm_(each.parameters(), 0.5, norm_type) for each in (ref_model, model))
        self.assertGreater(norm.item(), 0.5)
        self.assertEqual(of_all_ranks(found.full_tensor().item()), [norm.item()] * self.world_size)
        check_gradients(self, ref_model, model)

    @skip_if_lt_x_gpu(8)
    @subtests(spoilt=[(0, 0), (1, 1)])
    def test_grad_scaler(self, spoilt):
        """If one shard has a non-finite gradient, all ranks skip the step. The next step equals a plain model's.

        The test changes all replicas of the shard, because they have equal gradients after a reduction.
        """
        ref_model, model, mesh = self._models()
        scaler = torch.amp.GradScaler(self.device.type, init_scale=4.0)
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ref_model, model)]
        scaler.scale(self._loss(model)).backward()
        if tuple(mesh.get_coordinate())[1:] == spoilt:
            model.net2.weight.grad.to_local()[0, 0] = math.inf
        scaler.step(optims[1])
        scaler.update()
        self.assertEqual(of_all_ranks(scaler.get_scale()), [2.0] * self.world_size)
        check_full(self, ref_model, model)

        model.zero_grad()
        scaler.scale(self._loss(model)).backward()
        scaler.step(optims[1])
        scaler.update()
        self._loss(ref_model).backward()
        average_gradients(ref_model)
        optims[0].step()
        self.assertEqual(scaler.get_scale(), 2.0)
        check_full(self, ref_model, model)


# Full states on every rank, or only on rank 0, which broadcasts them when they are loaded.
ON_ALL_RANKS = StateDictOptions(full_state_dict=True)
ON_FIRST_RANK = StateDictOptions(full_state_dict=True, cpu_offload=True, broadcast_from_rank0=True)


class FullStatesMixin(ShardedStatesMixin):
    """Saves full states from one run of FSDP2 and tensor parallelism, and loads them into another run."""

    def _test_full_states(
        self, shape: tuple[int, ...], model_class: type[SimpleModel], options: StateDictOptions
    ) -> None:
        layout = Layout(shape, fsdp2_and_tp, TENSOR)
        run = SavedRun(layout, model_class=model_class).train(range(2))
        msd = get_model_state_dict(run.model, options=options)
        osd = get_optimizer_state_dict(run.model, run.optim, options=options)
        expected = plain_run(range(2), model_class=model_class)
        if options.cpu_offload and self.rank > 0:
            self.assertEqual((msd, osd), ({}, {}), may_be="empty")
        else:
            actual = {**msd, **moments(osd)}
            self.assertEqual({type(value) for value in actual.values()}, {torch.Tensor})
            actual = {name: value.cpu() for name, value in actual.items()}
            self.assertEqual(actual, {name: value for name, value in expected.items() if name != "steps"})

        other = SavedRun(layout, seed=1, model_class=model_class).train(range(9, 10))
        self._check_all_differ(other, expected)
        set_model_state_dict(other.model, msd, options=options)
        set_optimizer_state_dict(other.model, other.optim, osd, options=options)
        self.assertEqual(other.full(), run.full(), **EXACT)
        self.assertEqual(other.train(range(2, 4)).full(), plain_run(range(4), model_class=model_class))


class TestFullyShard2DStateDict(FullStatesMixin, LayoutsMixin, DTensorTestBase):
    world_size = 4

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        case=[
            (SQUARE, SimpleModel, ON_ALL_RANKS),
            (SQUARE, SimpleModel, ON_FIRST_RANK),
            # Loading full states on all ranks fails here: dsd_tp_uneven_full_state_dict_is_not_loaded.
            ((2, 1, 2), SimpleModelUneven, ON_FIRST_RANK),
        ]
    )
    def test_fully_shard_tp_2d_set_full_state_dict(self, case):
        """Full states equal those of a plain model. Another run that loads them continues like the first one."""
        self._test_full_states(*case)


class TestFullyShard3DStateDict(FullStatesMixin, LayoutsMixin, DTensorTestBase):
    """HSDP of FSDP2 with two replicas, and tensor parallelism."""

    world_size = 8

    @with_comms
    @skip_if_lt_x_gpu(8)
    def test_set_full_state_dict(self):
        self._test_full_states(CUBE, SimpleModel, ON_FIRST_RANK)

    @with_comms
    @skip_if_lt_x_gpu(8)
    @with_temp_dir
    @subtests(other=["plain", "FSDP1 on 4", "FSDP2 and TP on 2x2"])
    def test_checkpoint_of_other_layout(self, other):
        """Training resumes from checkpoints of other layouts, and other layouts resume from checkpoints of this one."""
        self._check_goes_on("FSDP2 and TP on 2x2x2", other)
        self._check_goes_on(other, "FSDP2 and TP on 2x2x2")


class FSDP1Run(SavedRun):
    """A run that gets its states from FSDP1's own functions; see ``test_2d_optim_state_dict_of_flat_parameters``."""

    def state_dict(self) -> dict[str, Any]:
        return sharded_state_dicts(self.model, self.optim)


class FSDP1AndTPMixin(ShardedStatesMixin, LayoutsMixin):
    """Runs of FSDP1 with tensor parallelism and sharded state dicts."""

    def _fsdp1_run(
        self,
        shape: tuple[int, ...] = SQUARE,
        seed: int = 0,
        model_class: type[SimpleModel] = SimpleModel,
        **kwargs: Any,
    ) -> FSDP1Run:
        return FSDP1Run(Layout(shape, functools.partial(fsdp1_and_tp, **kwargs), TENSOR), seed, model_class)

    def _extension(self, mesh: DeviceMesh) -> Any:
        """FSDP1's tensor extension for a model that is sharded over this mesh."""
        return internals.tensor_extension(FSDP(SimpleModel().to(self.device), device_mesh=mesh))

    def _test_2d_e2e_training(self, run: SavedRun) -> None:
        """Train five steps. Outputs before and after each step, and all final states, equal a plain model's."""
        plain = filled(SimpleModel().to(self.device), seed=0)
        optim = torch.optim.Adam(plain.parameters(), lr=1e-2, **fused_on_host())
        probe = uniform(3, 5, seed=99)
        for step in range(5):
            self.assertEqual(run.model(probe), plain(probe))
            train_on_share(plain, optim, range(step, step + 1))
            run.train(range(step, step + 1))
        self.assertEqual(run.model(probe), plain(probe))
        # Adam's steps do not depend on the scale of gradients, but its moments do.
        self.assertEqual(run.full(), plain_run(range(5), model_class=SimpleModel))


class TestNew2dParallelTraining(FSDP1AndTPMixin, DTensorTestBase):
    world_size = 4

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_fsdp_state_enable_extension(self):
        """On a submesh, which implies tensor parallelism, FSDP1 uses ``DTensorExtensions``."""
        mesh = make_mesh(*SQUARE, names=("dp", "tp"))
        self.assertIs(type(self._extension(mesh["dp"])), internals.tensor_parallel_fsdp.DTensorExtensions)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_e2e_training_default(self):
        self._test_2d_e2e_training(self._fsdp1_run())

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_e2e_training_use_orig_params(self):
        self._test_2d_e2e_training(self._fsdp1_run(use_orig_params=True))

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_e2e_training_not_use_orig_params(self):
        """With ``input_reshard`` each tensor-parallel rank saves a shard of the first layer's input for backward."""
        run = self._fsdp1_run(use_orig_params=False)
        input_reshard(run.model.module.net1, run.mesh["tensor"], 0)
        self._test_2d_e2e_training(run)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(use_orig_params=[True, False], norm_type=[2.0, 1.0, math.inf])
    def test_clip_grad_norm(self, use_orig_params, norm_type):
        """All ranks get the norm of all gradients of the model."""
        model = self._fsdp1_run(use_orig_params=use_orig_params).model
        plain = filled(SimpleModel().to(self.device), seed=0)
        for each in (model, plain):
            each(uniform(3, 5, seed=self.rank // 2)).square().sum().backward()
        average_gradients(plain)
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
        self.assertGreater(norm.item(), 0.5)
        actual = of_all_ranks(model.clip_grad_norm_(0.5, norm_type).item())
        with torch_defect("fsdp1_clip_grad_norm_leaves_out_tp"):
            self.assertEqual(actual, [norm.item()] * self.world_size)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_replicas_of_one_rank(self):
        """Gradients are averaged over replicas also if each replica has only one shard rank."""
        with torch_defect("fsdp1_hybrid_shard_of_one_rank_is_not_reduced"):
            self._test_2d_e2e_training(self._fsdp1_run((2, 1, 2), use_orig_params=False))

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_fsdp_of_one_rank(self):
        """Training equals a plain model's if tensor parallelism uses all ranks and FSDP shards over one rank."""
        self._test_2d_e2e_training(self._fsdp1_run((1, 4), use_orig_params=False))
        # Each parameter is compared with its place in the flat parameter: a global shape with a local one.
        with self.assertRaisesRegex(RuntimeError, "Cannot writeback when the parameter shape changes"):
            self._test_2d_e2e_training(self._fsdp1_run((1, 4), use_orig_params=True))


class TestNew2dParallelStateDict(FSDP1AndTPMixin, DTensorTestBase):
    world_size = 4

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_fsdp_2d_extension(self):
        """FSDP1 uses ``DTensorExtensions`` only on a submesh. On a root mesh there is no tensor parallelism."""
        square, line = make_mesh(*SQUARE, names=("dp", "tp")), make_mesh(self.world_size)
        self.assertIs(type(self._extension(square["dp"])), internals.tensor_parallel_fsdp.DTensorExtensions)
        self.assertIsNone(self._extension(line))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(shape=[SQUARE, (1, 2, 2)], model_class=[SimpleModel, SimpleModelUneven])
    def test_2d_state_dict(self, shape, model_class):
        """Sharded state dicts have DTensors on the whole mesh, with the values of the plain model."""
        run = self._fsdp1_run(shape, model_class=model_class)
        state = get_model_state_dict(run.model)
        for name, value in state.items():
            self.assertIs(type(value), DTensor, name)
            self.assertEqual(value.device_mesh, run.mesh)
            self.assertEqual(value.placements[-1], CUT.get(name, Replicate()))
            if shape == SQUARE:
                self.assertEqual(value.placements[0], Shard(0))
        expected = dict(filled(model_class().to(self.device), seed=0).named_parameters())
        self.assertEqual({name: full(value) for name, value in state.items()}, expected)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(shape=[SQUARE, (1, 2, 2)], model_class=[SimpleModel, SimpleModelUneven])
    def test_2d_load_state_dict(self, shape, model_class):
        """A step after saving changes every parameter. Loading restores each shard."""
        run = self._fsdp1_run(shape, model_class=model_class)
        use_sharded_state_dicts(run.model)
        file = io.BytesIO()
        torch.save(run.model.state_dict(), file)
        expected = copy.deepcopy(run.model.state_dict())
        run.train(range(1))
        for name, value in run.model.state_dict().items():
            self.assertNotEqual(full(value), full(expected[name]), msg=name)
        file.seek(0)
        run.model.load_state_dict(torch.load(file))
        actual = run.model.state_dict()
        self._check_same_dtensors(actual, expected)
        self.assertEqual({value.device_mesh for value in actual.values()}, {run.mesh})
        probe = uniform(3, 5, seed=99)
        self.assertEqual(run.model(probe), filled(model_class().to(self.device), seed=0)(probe))

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        shape=[SQUARE, (1, 2, 2)],
        model_class=[SimpleModel, SimpleModelUneven],
        use_orig_params=[True, False],
    )
    def test_2d_optim_state_dict(self, shape, model_class, use_orig_params):
        """The optimizer states have the names and the full values of a plain model's states."""
        run = self._fsdp1_run(shape, model_class=model_class, use_orig_params=use_orig_params).train(range(1))
        self._check_optim_state(run, run.state_dict()["optim"], model_class)
        if use_orig_params:
            self._check_optim_state(run, get_optimizer_state_dict(run.model, run.optim), model_class)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_optim_state_dict_of_flat_parameters(self):
        """DSD gets the same optimizer states from flat parameters, also in shard groups without rank 0."""
        run = self._fsdp1_run(use_orig_params=False).train(range(1))
        original, sources = dist.broadcast_object_list, []

        def broadcast(objects: list[Any], src: int | None = None, group: Any = None, **kwargs: Any) -> None:
            sources.append(src is None or src in dist.get_process_group_ranks(group))
            original(objects, group=group, **{**kwargs, "group_src": 0})

        with mock.patch.object(dist, "broadcast_object_list", broadcast):
            osd = get_optimizer_state_dict(run.model, run.optim)
        with torch_defect("fsdp1_optim_state_of_group_without_first_rank_raises"):
            self.assertTrue(all(sources))
        self._check_optim_state(run, osd, SimpleModel)

    def _check_optim_state(self, run: SavedRun, osd: dict[str, Any], model_class: type[SimpleModel]) -> None:
        """The moments must be DTensors on the whole mesh, with the values of a plain model after one step."""
        actual = moments(osd)
        self.assertEqual({(type(value), value.device_mesh) for value in actual.values()}, {(DTensor, run.mesh)})
        expected = plain_run(range(1), model_class=model_class)
        self.assertEqual(
            {name: full(value).cpu() for name, value in actual.items()},
            {name: value for name, value in expected.items() if "exp_avg" in name},
        )
        self.assertEqual(step_counts(osd), expected["steps"].tolist())

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_2d_optim_state_dict_is_loaded(self):
        """Loading after another step restores the saved optimizer states.

        Upstream compares the saved states with themselves.
        """
        run = self._fsdp1_run(use_orig_params=True).train(range(1))
        saved = run.full()
        osd = copy.deepcopy(get_optimizer_state_dict(run.model, run.optim))
        run.train(range(1, 2))
        set_optimizer_state_dict(run.model, run.optim, osd)
        actual = run.full()
        for name in moments({"state": get_optimizer_state_dict(run.model, run.optim)["state"]}):
            with torch_defect("fsdp1_optim_state_is_loaded_wrong_with_tp", when=name.rpartition(".")[0] in CUT):
                self.assertEqual(actual[name], saved[name], msg=name, **EXACT)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(pairwise=True, shape=[SQUARE, (1, 2, 2)], model_class=[SimpleModel, SimpleModelUneven])
    def test_fsdp1_tp_2d_set_full_state_dict(self, shape, model_class):
        """A run with sharded states loads a checkpoint of full model parameters."""
        path = os.path.join(self.temp_dir, f"{shape} {model_class.__name__}")
        source = SavedRun(Layout((4,), lambda model, mesh: FSDP(model, device_mesh=mesh)), model_class=model_class)
        source.train(range(2))
        saved = get_model_state_dict(source.model, options=ON_ALL_RANKS)
        self.assertEqual({type(value) for value in saved.values()}, {torch.Tensor})
        dcp.save(saved, checkpoint_id=path)

        run = self._fsdp1_run(shape, seed=1, model_class=model_class)
        state = get_model_state_dict(run.model)
        for name, value in state.items():
            self.assertNotEqual(full(value), saved[name], msg=name)
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(run.model, state)
        actual = {name: full(value) for name, value in get_model_state_dict(run.model).items()}
        self.assertEqual(actual, saved, **EXACT)
        expected = plain_run(range(2), model_class=model_class)
        self.assertEqual(
            {name: value.cpu() for name, value in actual.items()}, {name: expected[name] for name in actual}
        )


class TestNew3dParallel(FSDP1AndTPMixin, DTensorTestBase):
    """FSDP1's hybrid sharding with tensor parallelism."""

    world_size = 8

    @with_comms
    @skip_if_lt_x_gpu(8)
    def test_3d_e2e_training(self):
        self._test_2d_e2e_training(self._fsdp1_run(CUBE, use_orig_params=True))

    @with_comms
    @skip_if_lt_x_gpu(8)
    def test_3d_state_dict(self):
        """A run loads the sharded model state of another run, with uneven rows."""
        model_class = SimpleModelUneven
        run = self._fsdp1_run(CUBE, model_class=model_class).train(range(1))
        other = self._fsdp1_run(CUBE, seed=1, model_class=model_class)
        state = get_model_state_dict(run.model)
        self.assertEqual({value.device_mesh for value in state.values()}, {run.mesh})
        set_model_state_dict(other.model, copy.deepcopy(state))
        self._check_same_dtensors(get_model_state_dict(other.model), state)
        expected = plain_run(range(1), model_class=model_class)
        actual = {name: full(value).cpu() for name, value in get_model_state_dict(other.model).items()}
        self.assertEqual(actual, {name: expected[name] for name in actual})


if __name__ == "__main__":
    run_tests()
