"""FSDP with experts: an expert is sharded over the ranks that have it, and everything else over all ranks."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed._tensor.common_dtensor import (
    DTensorTestBase,
    ExpertLayer,
    ExpertParallel,
    with_comms,
)
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.sharded_states import moments, step_counts

DIM = 6
EXPERTS = 2


class Dummymodel(nn.Module):
    """Replaces an expert that another rank has."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros_like(x)


class EPModel(nn.Module):
    """An expert."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net2(self.net1(x).tanh())


class SecondTier(nn.Module):
    """The experts in ``ep_layers``, and a shared layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ep_layers = nn.ModuleList(EPModel() for _ in range(EXPERTS))
        self.net = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        return self.net(x if expert is None else x + self.ep_layers[expert](x))


class TopModel(nn.Module):
    """The tier with the experts, and a shared layer. ``expert`` selects the expert; None selects none."""

    def __init__(self) -> None:
        super().__init__()
        self.second = SecondTier()
        self.net = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, expert: int | None) -> torch.Tensor:
        return self.net(self.second(x, expert).tanh())


class TestFSDPWithEP(DTensorTestBase):
    world_size = 4

    @property
    def _expert(self) -> int:
        return self.rank % EXPERTS

    def _meshes(self) -> tuple[DeviceMesh, DeviceMesh]:
        """The mesh of all ranks, and the mesh of the ranks with this rank's expert, which has no parent mesh."""
        group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        assert group is not None
        return self.mesh, DeviceMesh.from_group(group, self.device_type)

    def _build(self, meshes: tuple[DeviceMesh, DeviceMesh], seed: int) -> tuple[FSDP, torch.optim.Optimizer]:
        every, own = meshes
        model = filled(TopModel(), seed=seed).to(self.device)
        layers = model.second.ep_layers
        for index, layer in enumerate(layers):
            kept = layer if index == self._expert else Dummymodel()
            layers[index] = FSDP(kept, device_mesh=own, use_orig_params=True)
        model.second = FSDP(model.second, device_mesh=every, use_orig_params=True)
        whole = FSDP(model, device_mesh=every, use_orig_params=True)
        return whole, torch.optim.Adam(whole.parameters(), lr=0.1)

    def _tokens(self, step: int, rank: int) -> torch.Tensor:
        return uniform(3, DIM, seed=10 * step + rank)

    def _train(self, model: FSDP, optim: torch.optim.Optimizer, steps: range, idle: int | None = None) -> None:
        """Train on this rank's own tokens. They go to its expert, unless that expert is ``idle``."""
        for step in steps:
            optim.zero_grad()
            expert = None if self._expert == idle else self._expert
            model(self._tokens(step, self.rank), expert).square().sum().backward()
            optim.step()

    def _plain(self, seed: int, steps: range, idle: int | None, later: range = range(0)) -> dict[str, torch.Tensor]:
        """The parameters of a plain model with all experts and all tokens. No expert is idle in ``later``."""
        model = filled(TopModel().to(self.device), seed=seed)
        optim = torch.optim.Adam(model.parameters(), lr=0.1)
        for step in (*steps, *later):
            optim.zero_grad()
            for rank in range(self.world_size):
                expert = None if rank % EXPERTS == idle and step in steps else rank % EXPERTS
                model(self._tokens(step, rank), expert).square().sum().backward()
            for name, param in model.named_parameters():
                if param.grad is not None:
                    param.grad /= self.world_size // EXPERTS if "ep_layers" in name else self.world_size
            optim.step()
        return {name: param.detach() for name, param in model.named_parameters()}

    def _states(self, model: FSDP, optim: torch.optim.Optimizer) -> dict[str, Any]:
        msd, osd = get_state_dict(model, optimizers=optim)
        return {"model": msd, "optim": osd}

    def _own_names(self) -> list[str]:
        """The names of the parameters of which this rank has a local shard."""
        names = [name for name, _ in TopModel().named_parameters()]
        others = f"second.ep_layers.{1 - self._expert}."
        return [name for name in names if not name.startswith(others)]

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_e2e(self):
        """Both state dicts have this rank's parameters on their own meshes, and nothing of the other expert."""
        meshes = self._meshes()
        model, optim = self._build(meshes, seed=0)
        state = self._states(model, optim)
        names = self._own_names()
        self.assertEqual(len(names), 8)
        self.assertEqual(set(state["model"]), set(names))
        self.assertEqual(set(state["optim"]["state"]), set(names))
        expected = dict(filled(TopModel(), seed=0).named_parameters())
        for name, value in state["model"].items():
            mesh = meshes["ep_layers" in name]
            for tensor in (value, *(state["optim"]["state"][name][key] for key in ("exp_avg", "exp_avg_sq"))):
                self.assertIsInstance(tensor, DTensor, name)
                self.assertEqual(tensor.device_mesh.mesh.tolist(), mesh.mesh.tolist(), name)
            self.assertEqual(value.full_tensor(), expected[name], msg=name, rtol=0, atol=0, exact_device=False)
        self.assertEqual(meshes[1].mesh.tolist(), [self._expert, self._expert + 2])

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_training_goes_on(self):
        """A fresh model loads the state after two steps, and then trains like a plain model with all experts."""
        self._test_training_goes_on(idle=None)

    @torch_defect("dsd_missing_optim_state_raises_key_error")
    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_training_goes_on_with_idle_expert(self):
        """An idle expert has no optimizer state. It is saved and loaded, and learns later."""
        self._test_training_goes_on(idle=1)

    def _test_training_goes_on(self, idle: int | None) -> None:
        meshes = self._meshes()
        path = self.temp_dir
        model, optim = self._build(meshes, seed=0)
        self._train(model, optim, range(2), idle)
        saved = copy.deepcopy(self._states(model, optim))
        dcp.save(saved, checkpoint_id=path)
        self._check_plain(saved["model"], self._plain(0, range(2), idle))
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        self.assertLessEqual({f"model.{name}" for name, _ in TopModel().named_parameters()}, set(stored))

        model, optim = self._build(meshes, seed=1)
        self._train(model, optim, range(7, 8), idle)
        state = self._states(model, optim)
        dcp.load(state, checkpoint_id=path)
        # A strict load rejects an expert without an optimizer state.
        options = StateDictOptions(strict=idle is None)
        states = {"model_state_dict": state["model"], "optim_state_dict": state["optim"]}
        set_state_dict(model, optim, **states, options=options)
        found = self._states(model, optim)
        for name, value in {**saved["model"], **moments(saved["optim"])}.items():
            tensor = {**found["model"], **moments(found["optim"])}[name]
            self.assertEqual(tensor.to_local(), value.to_local(), msg=name, rtol=0, atol=0, may_be="empty")
        self.assertEqual(step_counts(found["optim"]), step_counts(saved["optim"]))
        self.assertEqual(len(step_counts(saved["optim"])), 4 if self._expert == idle else 8)
        self._train(model, optim, range(2, 4))
        self._check_plain(self._states(model, optim)["model"], self._plain(0, range(2), idle, range(2, 4)))

    def _check_plain(self, msd: dict[str, Any], wanted: dict[str, torch.Tensor]) -> None:
        self.assertEqual(set(msd), set(self._own_names()))
        for name, value in msd.items():
            self.assertEqual(value.full_tensor(), wanted[name], msg=name)

    @with_comms
    @skip_if_lt_x_gpu(4)
    @with_temp_dir
    def test_fully_shard(self):
        """Expert parallelism shards the experts over one mesh dimension, and FSDP2 shards them over the other.

        The checkpoint is loaded in this layout, with expert parallelism alone, and with FSDP2 alone.
        """
        shapes = {"2x2": (2, 2), "1x4": (1, 4), "without": (4, 1)}
        meshes = {
            name: init_device_mesh(self.device_type, shape, mesh_dim_names=("shard", "expert"))
            for name, shape in shapes.items()
        }

        def build(where: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            layer = filled(ExpertLayer(num_experts=4, dim=2, hidden_dim=3), seed=seed).to(self.device)
            if where != "without":
                parallelize_module(layer.experts, meshes[where]["expert"], ExpertParallel())
            fully_shard(layer.experts, mesh=meshes[where]["shard"])
            return layer, torch.optim.Adam(layer.parameters(), lr=0.1)

        def step(model: nn.Module, optim: torch.optim.Optimizer) -> None:
            model(uniform(2, 3, 2, seed=self.rank)).square().sum().backward()
            optim.step()

        model, optim = build("2x2", seed=0)
        step(model, optim)
        msd, osd = get_state_dict(model, optim)
        dcp.save({"model": msd, "optim": osd}, checkpoint_id=self.temp_dir)
        expected = {name: full(value).detach().clone() for name, value in {**msd, **moments(osd)}.items()}
        self.assertEqual(len(expected), 2 + 4)
        for where in shapes:
            other, other_optim = build(where, seed=1)
            step(other, other_optim)
            self.assertNotEqual(full(get_model_state_dict(other)["experts.w1"]), expected["experts.w1"])
            msd, osd = get_state_dict(other, other_optim)
            dcp.load({"model": msd, "optim": osd}, checkpoint_id=self.temp_dir)
            set_state_dict(other, other_optim, model_state_dict=msd, optim_state_dict=osd)
            msd, osd = get_state_dict(other, other_optim)
            for name, value in {**msd, **moments(osd)}.items():
                self.assertEqual(full(value), expected[name], msg=f"{where} {name}", rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
