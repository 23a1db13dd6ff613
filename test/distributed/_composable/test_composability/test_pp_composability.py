"""Pipelines with FSDP2, DDP, ``replicate``, HSDP or tensor parallelism in their stages, and their checkpoints.

The reference is the whole plain model on the same microbatches. Its gradients are averaged over the data-parallel
ranks.
"""

from __future__ import annotations

import copy
import functools
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests, slowTest
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.optimizers import ShardAdamW, fused_on_host
from torch_fsdp_tests.fsdp.pipelines import (
    SCHEDULES,
    SPLIT_BACKWARD,
    Batch,
    Pipeline,
    PipelineMixin,
    microbatched,
    microbatched_in_bfloat16,
    shard_stage,
    units_of,
)
from torch_fsdp_tests.fsdp.references import average_gradients, named
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.training import ITERATIONS, Loop, check_parity, optimizers, replicate_each
from torch_fsdp_tests.installed_torch import torch_facts

FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


def on_one_rank() -> list[str]:
    """Schedules for a pipeline on a single rank, with one stage and, if supported, with neighboring stages."""
    neighbors = ["ScheduleInterleavedZeroBubble"] if torch_facts.PIPELINES_SEND_NOTHING_TO_THEMSELVES else []
    return ["Schedule1F1B", *neighbors]


def replicate_stage(stage: Any, **kwargs: Any) -> Any:
    """Like ``shard_stage``, but with the ``replicate`` that is built on FSDP2."""
    return replicate_each(units_of(stage), **kwargs)


def check_whole(test: Any, ref_model: nn.Module, model: nn.Module) -> None:
    """Compare unsharded parameters and gradients."""
    actual, expected = (
        {name: (param.detach(), param.grad) for name, param in named(each).items()} for each in (model, ref_model)
    )
    test.assertEqual(actual, expected)


def tensor_parallel(stage: nn.Sequential, mesh: DeviceMesh) -> nn.Sequential:
    """Split each block's first layer by columns and its second by rows. Returns the stage."""
    for block in stage:
        parallelize_module(block, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    return stage


def by_block(modules: Iterable[nn.Module]) -> nn.Sequential:
    """Collect the blocks of all stages of a rank under their names in the whole model."""
    return nn.Sequential(OrderedDict(child for module in modules for child in module.named_children()))


def part_of(plain: nn.Module, blocks: nn.Module) -> nn.Sequential:
    """Return the blocks of the plain model that have the names of ``blocks``."""
    return nn.Sequential(OrderedDict((name, plain.get_submodule(name)) for name, _ in blocks.named_children()))


def adam(model: nn.Module) -> torch.optim.Adam:
    return torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-3, **fused_on_host())


def states_of(model: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Any]:
    model_state, optim_state = get_state_dict(model, optim, options=FLATTENED)
    return {"model": model_state, "optim": optim_state}


class PipelineTest(PipelineMixin, FSDPTest):
    """The base class of the test cases in this file."""

    def _test_3d(self, data: int, schedule: str, param_dtype: torch.dtype) -> None:
        """Compare with a plain model on a mesh for data, pipeline and tensors.

        In float32 the losses, gradients and parameters of several steps are compared, in bfloat16 the losses and
        gradients of one step. In bfloat16, tensor-parallel ranks round their partial sums. The plain bfloat16 model
        does not, so the test compares with a tolerance.
        """
        mesh = self._mesh(data, 2, 2, names=("data", "pipeline", "tensor"))
        policy = MixedPrecisionPolicy(param_dtype=param_dtype, reduce_dtype=torch.float32)
        plain = self._plain(hidden=6)
        pipeline = Pipeline(
            schedule,
            plain,
            mesh.get_group("pipeline"),
            lambda stage: shard_stage(tensor_parallel(stage, mesh["tensor"]), mesh=mesh["data"], mp_policy=policy),
            boundary_dtype=param_dtype,
        )
        if param_dtype == torch.float32:
            self._check_trains(
                plain, pipeline, mesh.get_group("data"), optims=optimizers(plain, pipeline.modules, cls=ShardAdamW)
            )
            return
        self._seed(mesh.get_local_rank("data"))
        batch = self._batch()
        losses = pipeline.step(batch)
        self.assertEqual(losses, microbatched_in_bfloat16(plain, batch), rtol=0.02, atol=0)
        average_gradients(plain, mesh.get_group("data"))
        pipeline.check(self, check_parity, what=("gradient",), rtol=0.05, atol=0.02)


@needs(torch_facts.PIPELINE_START_MESSAGES_MATCH)
class ComposabilityTest(PipelineTest):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        # DDP supports neither a split backward nor stages that infer shapes at run time. A split backward loses
        # gradients of modules that reshard after forward: see the defect pipeline_split_backward_loses_gradients.
        valid=lambda dp_type, schedule, boundary_dtype: (
            dp_type in ("FSDP", "replicate")
            or (schedule not in SPLIT_BACKWARD and (dp_type, boundary_dtype) != ("DDP", None))
        ),
        dp_type=["FSDP", "FSDP resharding", "replicate", "DDP"],
        schedule=SCHEDULES,
        boundary_dtype=[torch.float32, None],
    )
    def test_manual_with_data_parallel(self, dp_type, schedule, boundary_dtype):
        """Losses, gradients and parameters of several steps equal those of the plain model."""
        mesh = self._pipelines_and_data()
        wraps = {
            "FSDP": functools.partial(shard_stage, mesh=mesh["data"]),
            "FSDP resharding": functools.partial(shard_stage, mesh=mesh["data"], reshard_after_forward=None),
            "replicate": functools.partial(replicate_stage, mesh=mesh["data"]),
            "DDP": functools.partial(DDP, device_mesh=mesh["data"]),
        }
        plain = self._plain()
        pipeline = Pipeline(schedule, plain, mesh.get_group("pipeline"), wraps[dp_type], boundary_dtype)
        compare = check_whole if dp_type == "DDP" else check_parity
        self._check_trains(plain, pipeline, mesh.get_group("data"), Loop(compare=compare))

    @skip_if_lt_x_gpu(4)
    @subtests(pairwise=True, schedule=SCHEDULES, param_dtype=[torch.bfloat16, torch.float32])
    def test_3d_with_tp_dp_pp(self, schedule, param_dtype):
        """Tensor parallelism and a pipeline have two ranks each, FSDP2 has one (two in ``ThreeDimensionsTest``)."""
        self._test_3d(1, schedule, param_dtype)

    @skip_if_lt_x_gpu(4)
    @subtests(schedule=on_one_rank)
    def test_hsdp(self, schedule):
        """Each pipeline has all stages on one rank. HSDP uses two shards and two replicas."""
        mesh = self._mesh(1, 2, 2, names=("pipeline", "replicate", "shard"))
        plain = self._plain()
        wrap = functools.partial(shard_stage, mesh=mesh["replicate", "shard"])
        pipeline = Pipeline(schedule, plain, mesh.get_group("pipeline"), wrap)
        with recorded("reduce_scatter") as calls:
            self._check_trains(plain, pipeline, dist.group.WORLD)
        self.assertEqual(len(calls), 2 * len(plain) * ITERATIONS)

    @skip_if_lt_x_gpu(4)
    def test_fsdp1(self):
        """FSDP1 raises if all microbatches run forward before the first backward.

        After the first backward, FSDP1 frees the unsharded parameters, and does not unshard them for the next one.
        """
        mesh = self._mesh(4, 1, names=("data", "pipeline"))
        wrap = functools.partial(FSDP, device_mesh=mesh["data"], use_orig_params=True)
        pipeline = Pipeline("ScheduleGPipe", self._plain(), mesh.get_group("pipeline"), wrap)
        with self.assertRaisesRegex(RuntimeError, "Failed to run stage backward") as raised:
            pipeline.step(self._batch())
        self.assertRegex(str(raised.exception.__cause__), "storage of size 0")

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(loaded_by=["FSDP2", "ScheduleInterleaved1F1B", SCHEDULES[-1], "Schedule1F1B"])
    def test_pp_and_dcp(self, loaded_by):
        """Stages save their blocks and optimizer states under the names of the whole model.

        The same stages, other stages, or the whole model under FSDP2 load them and continue like the plain model.
        """
        mesh, path = self._pipelines_and_data(), os.path.join(self.temp_dir, loaded_by)
        plain = self._plain()
        optim = adam(plain)
        self._seed(mesh.get_local_rank("data"))
        first, second = self._batch(), self._batch()
        saved, step = self._distributed("Schedule1F1B", plain, mesh)
        saved_optim = adam(saved)
        step(first)
        saved_optim.step()
        states = states_of(saved, saved_optim)
        self.assertEqual(list(states["model"]), list(part_of(plain, saved).state_dict()))
        dcp.save(states, checkpoint_id=path)
        written = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        self.assertEqual(
            {name for name in written if name.startswith("model.")}, {f"model.{n}" for n in plain.state_dict()}
        )

        self._plain_step(plain, optim, first, mesh)
        loaded, step = self._distributed(loaded_by, filled(copy.deepcopy(plain)), mesh)
        loaded_optim = adam(loaded)
        states = states_of(loaded, loaded_optim)
        dcp.load(states, checkpoint_id=path)
        set_state_dict(
            loaded, loaded_optim, model_state_dict=states["model"], optim_state_dict=states["optim"], options=FLATTENED
        )
        losses = step(second)
        loaded_optim.step()
        self.assertEqual(losses, self._plain_step(plain, optim, second, mesh))
        check_parity(self, part_of(plain, loaded), loaded)

    def _distributed(
        self, kind: str, plain: nn.Sequential, mesh: DeviceMesh
    ) -> tuple[nn.Module, Callable[[Batch], torch.Tensor]]:
        """Return this rank's blocks of a copy of the model, under a schedule or FSDP2, and the function of a step."""
        if kind == "FSDP2":
            whole = shard_stage(copy.deepcopy(plain), mesh=self._mesh(4))
            return whole, functools.partial(microbatched, whole)
        wrap = functools.partial(shard_stage, mesh=mesh["data"])
        pipeline = Pipeline(kind, plain, mesh.get_group("pipeline"), wrap)
        return by_block(pipeline.modules), pipeline.step

    def _plain_step(
        self, plain: nn.Module, optim: torch.optim.Optimizer, batch: Batch, mesh: DeviceMesh
    ) -> torch.Tensor:
        """One step of the plain model on the batches of all data ranks. Returns this rank's losses."""
        optim.zero_grad()
        losses = microbatched(plain, batch)
        average_gradients(plain, mesh.get_group("data"))
        optim.step()
        return losses


@needs(torch_facts.PIPELINE_START_MESSAGES_MATCH)
class ThreeDimensionsTest(PipelineTest):
    world_size = 8

    @slowTest
    @skip_if_lt_x_gpu(8)
    @subtests(pairwise=True, schedule=SCHEDULES, param_dtype=[torch.bfloat16, torch.float32])
    def test_3d_with_tp_dp_pp(self, schedule, param_dtype):
        """Each mesh dimension has two ranks."""
        self._test_3d(2, schedule, param_dtype)


if __name__ == "__main__":
    run_tests()
