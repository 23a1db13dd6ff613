"""The stages of a pipeline each save their own layer, and a model with all layers loads them."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.sharded_states import moments, step_counts

DIM = 7
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


class PipelineModel(nn.Module):
    """Four layers, each of them a stage, with ReLU between."""

    def __init__(self) -> None:
        super().__init__()
        self.layer0, self.layer1, self.layer2, self.layer3 = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.children():
            x = layer(x).relu()
        return x


def stage_of(numbers: list[int], seed: int = 0) -> PipelineModel:
    """A model with the values of the whole model in these layers, and the other layers on the meta device."""
    model = filled(PipelineModel(), seed=seed)
    for number, layer in enumerate(model.children()):
        if number not in numbers:
            layer.to("meta")
    return model


def layer_step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
    """Take a step with each layer of this rank. A layer's gradients depend only on its own values."""
    for layer in model.children():
        if not next(layer.parameters()).is_meta:
            layer(uniform(3, DIM, seed=1)).square().sum().backward()
    optim.step()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam for this rank's parameters."""
    return torch.optim.Adam([param for param in model.parameters() if not param.is_meta], lr=0.1, **fused_on_host())


def materialized(state: dict[str, Any]) -> dict[str, Any]:
    """The state dict without tensors on the meta device."""
    return {name: value for name, value in state.items() if not (isinstance(value, torch.Tensor) and value.is_meta)}


class TestPipeline(FSDPTest):
    world_size = 4

    def _wanted(self) -> dict[str, Any]:
        """The parameters and states of a plain model after the same step of all layers."""
        model = filled(PipelineModel().to(self.device), seed=0)
        optim = adam(model)
        layer_step(model, optim)
        return self._states(*get_state_dict(model, optim))

    def _states(self, msd: dict[str, Any], osd: dict[str, Any]) -> dict[str, Any]:
        states = {name: full(value).detach().clone() for name, value in {**msd, **moments(osd)}.items()}
        return {**states, "steps": step_counts(osd)}

    def _load_into_fsdp(self, path: str, wrap: Any, options: StateDictOptions) -> dict[str, Any]:
        model = wrap(filled(PipelineModel().to(self.device), seed=1))
        optim = torch.optim.Adam(model.parameters(), lr=0.1, **fused_on_host())
        msd, osd = get_state_dict(model, optim, options=options)
        dcp.load({"model": msd, "optim": osd}, checkpoint_id=path)
        set_state_dict(model, optim, model_state_dict=msd, optim_state_dict=osd, options=options)
        return self._states(*get_state_dict(model, optim))

    def _fsdp1(self, model: nn.Module) -> nn.Module:
        mesh = init_device_mesh(self.device.type, (self.world_size,))
        return FSDP(model, device_mesh=mesh, use_orig_params=True)

    def _fsdp2(self, model: nn.Module) -> nn.Module:
        for module in (*model.children(), model):
            fully_shard(module, mesh=init_device_mesh(self.device.type, (self.world_size,)))
        return model

    def _stage(self) -> tuple[PipelineModel, torch.optim.Optimizer]:
        """This rank's layer, and its optimizer, after a step."""
        model = stage_of([self.rank])
        model.get_submodule(f"layer{self.rank}").to(self.device)
        optim = adam(model)
        layer_step(model, optim)
        return model, optim

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    @subtests(flatten_optimizer_state_dict=[False, True], family=["FSDP1", "FSDP2"])
    def test_pipeline(self, flatten_optimizer_state_dict, family):
        """Each rank saves one layer with its optimizer state, and FSDP loads all of them.

        The other layers of a rank's state dict are on the meta device, and are left out. Without flattening, the
        optimizers' groups have the same name, so only one rank's are saved. With flattening, each parameter has its own
        settings.
        """
        options = StateDictOptions(flatten_optimizer_state_dict=flatten_optimizer_state_dict)
        path = os.path.join(self.temp_dir, f"{family} {flatten_optimizer_state_dict}")
        msd, osd = get_state_dict(*self._stage(), options=options)
        own = materialized(msd)
        self.assertEqual(list(own), [f"layer{self.rank}.weight", f"layer{self.rank}.bias"])
        dcp.save({"model": own, "optim": osd}, checkpoint_id=path)
        wrap = self._fsdp1 if family == "FSDP1" else self._fsdp2
        self._check_same(self._load_into_fsdp(path, wrap, options), self._wanted())

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_layers_on_no_device(self):
        """If meta tensors are not left out, four ranks save each name, but only one has a value.

        All ranks reject this, and no checkpoint is left.
        """
        msd, osd = get_state_dict(*self._stage())
        self.assertEqual(len(msd), 8)
        # The writer copies tensors to the CPU, or expects that they are there if a stream copies those of the device.
        with self.assertRaisesRegex(CheckpointException, "Cannot copy out of meta tensor|Tensor must be on CPU"):
            dcp.save({"model": msd, "optim": osd}, checkpoint_id=self.temp_dir)
        self.assertFalse(os.path.exists(os.path.join(self.temp_dir, ".metadata")))

    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fully_sharded_stages(self):
        """Two stages of two layers, each over two ranks with FSDP2, are saved.

        They are loaded into stages of three layers and one layer, and then into a single one.
        """
        mesh = init_device_mesh(self.device.type, (2, 2), mesh_dim_names=("stage", "shard"))
        stage = mesh.get_local_rank("stage")

        def build(numbers: list[int], seed: int) -> tuple[PipelineModel, torch.optim.Optimizer]:
            model = stage_of(numbers, seed)
            for number in numbers:
                fully_shard(model.get_submodule(f"layer{number}").to(self.device), mesh=mesh["shard"])
            return model, adam(model)

        def own(model: PipelineModel, optim: torch.optim.Optimizer) -> dict[str, Any]:
            msd, osd = get_state_dict(model, optim, options=FLATTENED)
            return {"model": materialized(msd), "optim": osd}

        model, optim = build([0, 1] if stage == 0 else [2, 3], seed=0)
        layer_step(model, optim)
        dcp.save(own(model, optim), checkpoint_id=self.temp_dir)

        model, optim = build([0, 1, 2] if stage == 0 else [3], seed=1)
        state = own(model, optim)
        dcp.load(state, checkpoint_id=self.temp_dir)
        expected = self._wanted()
        self.assertEqual(len(state["model"]), 6 if stage == 0 else 2)
        for name, value in state["model"].items():
            self.assertEqual(full(value), expected[name], msg=name, rtol=0, atol=0)
            for key in ("exp_avg", "exp_avg_sq"):
                actual = full(state["optim"][f"state.{name}.{key}"])
                self.assertEqual(actual, expected[f"{name}.{key}"], msg=name, rtol=0, atol=0)
        self._check_same(self._load_into_fsdp(self.temp_dir, self._fsdp2, FLATTENED), expected)

    def _check_same(self, found: dict[str, Any], wanted: dict[str, Any]) -> None:
        self.assertEqual(len(wanted), 8 + 16 + 1)
        self.assertEqual(found, wanted, rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
