"""Pretrain and save; then train a larger model around the frozen one, save the trained part, and resume."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorTestBase, with_comms
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import full
from torch_fsdp_tests.fsdp.seeded import filled
from torch_fsdp_tests.fsdp.sharded_states import moments, step_counts, train_on_share

DIM = 6  # four ranks do not divide the rows, so the last rank has no rows of a layer
FAMILIES = ["FSDP1", "FSDP2"]
TRAINED_ONLY = StateDictOptions(ignore_frozen_params=True, strict=False)
Trained = tuple[nn.Module, torch.optim.Optimizer]


class _Rows(nn.Module):
    def get_input(self, generator: torch.Generator | None = None) -> torch.Tensor:
        return torch.rand(2, DIM, generator=generator)


class PreTrainedModel(_Rows):
    """Square layers, one of them in a Sequential and one in a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(DIM, DIM)
        self.layer2 = nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh())
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[0](self.layer2(self.layer1(x).tanh())).tanh()


class FineTuningModel(_Rows):
    """Trained layers after the frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.pretrain = PreTrainedModel().requires_grad_(False)
        self.layer1, self.layer2 = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer2(self.layer1(self.pretrain(x)).tanh())


class LowRankPair(nn.Module):
    """A frozen layer, and a pair of small trained layers beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(DIM, 2, bias=False), nn.Linear(2, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


class LowRankModel(_Rows):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(LowRankPair(nn.Linear(DIM, DIM)), nn.Tanh(), LowRankPair(nn.Linear(DIM, DIM)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """A new Adam for the trained parameters."""
    trained = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.Adam(trained, lr=1e-2, **fused_on_host())


class TestFineTuning(DTensorTestBase):
    world_size = at_most(4)

    def _parallel(self, family: str, model: nn.Module) -> nn.Module:
        """Wrap the model as a whole, so that frozen and trained parameters are communicated together."""
        model.to(self.device)
        if family == "FSDP1":
            return FSDP(model, device_mesh=self.mesh, use_orig_params=True)
        return fully_shard(model, mesh=self.mesh)

    def _train(self, model: nn.Module, optim: torch.optim.Optimizer, steps: range) -> None:
        train_on_share(model, optim, steps, self.rank, self.world_size)

    def _full(self, model: nn.Module) -> dict[str, torch.Tensor]:
        return {name: full(value).detach().clone() for name, value in get_model_state_dict(model).items()}

    def _pretrain(self, family: str, path: str) -> dict[str, torch.Tensor]:
        """Train three steps and save to this path. Returns the parameters, which must equal those of a plain model."""
        model = self._parallel(family, filled(PreTrainedModel(), seed=0))
        optim = adam(model)
        self._train(model, optim, range(3))
        msd, osd = get_state_dict(model, optimizers=optim)
        dcp.save({"model": msd, "optim": osd}, checkpoint_id=path)
        plain = filled(PreTrainedModel().to(self.device), seed=0)
        train_on_share(plain, adam(plain), range(3))
        actual = self._full(model)
        self.assertEqual(actual, plain.state_dict())
        return actual

    def _load_pretrained_by_prefix(self, model: nn.Module, path: str) -> None:
        """The recommended way: filter the dict."""
        prefix = "pretrain."
        msd = get_model_state_dict(model)
        part = {name.removeprefix(prefix): value for name, value in msd.items() if name.startswith(prefix)}
        dcp.load({"model": part}, checkpoint_id=path)
        renamed = {prefix + name: value for name, value in part.items()}
        set_model_state_dict(model, renamed, options=StateDictOptions(strict=False))

    def _load_pretrained_by_module(self, model: nn.Module, path: str) -> None:
        """The deprecated way: get the state dict of the submodule, and set it with the submodule as the key."""
        pretrain = next(each for each in model.modules() if isinstance(each, PreTrainedModel))
        options = StateDictOptions(keep_submodule_prefixes=False)
        with self.assertWarnsRegex(FutureWarning, "submodules only model/optim state_dict is deprecated"):
            part = get_model_state_dict(model, submodules={pretrain}, options=options)
        dcp.load({"model": part}, checkpoint_id=path)
        with self.assertWarnsRegex(FutureWarning, "Passing model_state_dict as a .*is deprecated"):
            set_model_state_dict(model, {pretrain: part}, options=StateDictOptions(strict=False))

    def _resume(self, model: nn.Module, optim: torch.optim.Optimizer, path: str) -> None:
        msd, osd = get_state_dict(model, optimizers=optim, options=TRAINED_ONLY)
        dcp.load({"model": msd, "optim": osd}, checkpoint_id=path)
        set_state_dict(model, optimizers=optim, model_state_dict=msd, optim_state_dict=osd, options=TRAINED_ONLY)

    def _save_trained(self, model: nn.Module, optim: torch.optim.Optimizer, path: str) -> dict[str, Any]:
        """Save the trained parameters and their states, and return them as full tensors."""
        msd, osd = get_state_dict(model, optimizers=optim, options=TRAINED_ONLY)
        dcp.save({"model": msd, "optim": osd}, checkpoint_id=path)
        states = {name: full(value).detach().clone() for name, value in {**msd, **moments(osd)}.items()}
        return {**states, "steps": step_counts(osd)}

    def _frozen(self, model: nn.Module) -> dict[str, torch.Tensor]:
        prefix = "pretrain."
        return {
            name.removeprefix(prefix): value for name, value in self._full(model).items() if name.startswith(prefix)
        }

    def _fine_tuned_plain(self, pretrained: dict[str, torch.Tensor], steps: range) -> dict[str, torch.Tensor]:
        plain = filled(FineTuningModel().to(self.device), seed=1)
        plain.pretrain.load_state_dict(pretrained)
        train_on_share(plain, adam(plain), steps)
        return plain.state_dict()

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(family=FAMILIES, way=["by prefix", "by module"])
    def test_fine_tuning(self, family, way):
        """The frozen part keeps the pretrained values. The second round continues from the end of the first.

        Both rounds together equal six steps of a plain model without a break.
        """
        load: Callable[[nn.Module, str], None]
        load = self._load_pretrained_by_prefix if way == "by prefix" else self._load_pretrained_by_module
        pretrained_path, path = (os.path.join(self.temp_dir, f"{family} {way} {name}") for name in ("first", "second"))
        pretrained = self._pretrain(family, pretrained_path)
        ended: dict[str, Any] = {}
        for steps in (range(3), range(3, 6)):
            model = self._parallel(family, filled(FineTuningModel(), seed=1 + steps.start))
            optim = adam(model)
            self.assertNotEqual(self._frozen(model)["layer1.weight"], pretrained["layer1.weight"])
            load(model, pretrained_path)
            self.assertEqual(self._frozen(model), pretrained, rtol=0, atol=0)
            if steps.start == 0:
                # The pretrained model does not have the new layers.
                with self.assertRaisesRegex(CheckpointException, "Missing key in checkpoint state_dict"):
                    self._resume(model, optim, pretrained_path)
                optim = adam(model)
            else:
                self._resume(model, optim, path)
                self.assertEqual(self._save_trained(model, optim, f"{path} again"), ended, rtol=0, atol=0)
            self._train(model, optim, steps)
            self.assertEqual(self._frozen(model), pretrained, rtol=0, atol=0)
            ended = self._save_trained(model, optim, path)
            self.assertEqual(len(ended), 4 + 8 + 1)
        self.assertEqual(self._full(model), self._fine_tuned_plain(pretrained, range(6)))

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(family=FAMILIES)
    def test_low_rank_pairs(self, family):
        """If low-rank pairs are trained beside frozen layers, only the pairs are saved. Training resumes from them."""
        path = os.path.join(self.temp_dir, family)
        model = self._parallel(family, filled(LowRankModel(), seed=0))
        optim = adam(model)
        self._train(model, optim, range(2))
        expected = self._save_trained(model, optim, path)
        stored = FileSystemReader(path).read_metadata().state_dict_metadata
        names = {name for name, _ in LowRankModel().named_parameters() if ".layer." not in name}
        self.assertEqual({name.removeprefix("model.") for name in stored if name.startswith("model.")}, names)
        moved = {name for name in stored if name.endswith(("exp_avg", "exp_avg_sq"))}
        self.assertEqual(moved, {f"optim.state.{name}.{key}" for name in names for key in ("exp_avg", "exp_avg_sq")})
        sizes = [value.size.numel() for name, value in stored.items() if name.startswith("model.")]
        self.assertEqual(sum(sizes), 4 * 2 * DIM)

        other = self._parallel(family, filled(LowRankModel(), seed=0))
        other_optim = adam(other)
        self._resume(other, other_optim, path)
        self.assertEqual(self._save_trained(other, other_optim, f"{path} again"), expected, rtol=0, atol=0)
        for trained in ((model, optim), (other, other_optim)):
            self._train(*trained, range(2, 4))
        self.assertEqual(self._full(other), self._full(model), rtol=0, atol=0)

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_unfreeze_after_resuming(self):
        """Newly trained parameters have no state yet; earlier ones continue with their own."""
        model = self._parallel("FSDP2", filled(FineTuningModel(), seed=0))
        optim = adam(model)
        self._train(model, optim, range(2))
        expected = self._save_trained(model, optim, self.temp_dir)
        plain = filled(FineTuningModel().to(self.device), seed=0)
        plain_optim = adam(plain)
        train_on_share(plain, plain_optim, range(2))

        model = self._parallel("FSDP2", filled(FineTuningModel(), seed=0))
        optim = adam(model)
        self._resume(model, optim, self.temp_dir)
        for each, its_optim in ((model, optim), (plain, plain_optim)):
            newly = each.pretrain.layers[0].requires_grad_(True)
            its_optim.add_param_group({"params": list(newly.parameters()), "lr": 1e-3})
        self._train(model, optim, range(2, 4))
        train_on_share(plain, plain_optim, range(2, 4))
        self.assertEqual(self._full(model), plain.state_dict())
        state = get_state_dict(model, optimizers=optim)[1]["state"]
        self.assertEqual(set(expected["steps"]), {2.0})
        steps = {name: float(value["step"]) for name, value in state.items()}
        self.assertEqual(
            {name for name, count in steps.items() if count == 2.0},
            {"pretrain.layers.0.weight", "pretrain.layers.0.bias"},
        )
        self.assertEqual(sorted(steps.values()), [2.0, 2.0, 4.0, 4.0, 4.0, 4.0])

    @with_comms
    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    @subtests(family=FAMILIES)
    def test_load_what_is_there(self, family):
        """A partial load does not change layers that are not in the checkpoint."""
        path = os.path.join(self.temp_dir, family)
        pretrained = self._pretrain(family, path)
        model = self._parallel(family, filled(FineTuningModel(), seed=1))
        before = self._full(model)
        msd = {name.removeprefix("pretrain."): value for name, value in get_model_state_dict(model).items()}
        self.assertEqual(len(msd), 6 + 4 - 2)  # ``layer1`` replaces ``pretrain.layer1``, which gets the same name
        dcp.load({"model": msd}, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
        self.assertEqual(full(msd["layers.0.weight"]), pretrained["layers.0.weight"], rtol=0, atol=0)
        self.assertEqual(full(msd["layer2.weight"]), before["layer2.weight"], rtol=0, atol=0)


if __name__ == "__main__":
    run_tests()
