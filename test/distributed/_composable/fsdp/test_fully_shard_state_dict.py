"""Sharded state dicts of FSDP2: they alias the current shards, load into them, and have the values of the whole model.

The tests cover FSDP, HSDP, tensor parallelism, offloaded parameters, and worlds of different size.
"""

from __future__ import annotations

import copy
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import get_required_world_size, ranks_of, requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, FSDPTestMultiThread, check_sharded_parity
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import mean_backward
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.shards import shard_largest_dim
from torch_fsdp_tests.fsdp.training import shard_each
from torch_fsdp_tests.installed_torch import torch_facts

HOST = torch.device("cpu")  # the CPU is the subject
StateDict = dict[str, Any]


def is_evenly_sharded(param: DTensor) -> bool:
    """Whether all ranks have shards of the same size."""
    for dim in range(param.ndim):
        shards = 1
        for placement, size in zip(param.placements, param.device_mesh.shape, strict=True):
            if not placement.is_replicate() and placement.dim == dim:
                shards *= size
        if param.size(dim) % shards:
            return False
    return True


def pointer_of(tensor: DTensor) -> int:
    return tensor.to_local().untyped_storage().data_ptr()


def local_copies(state_dict: StateDict) -> dict[str, torch.Tensor]:
    return {name: value.to_local().clone() for name, value in state_dict.items()}


def filled_like(tensor: DTensor, value: float) -> DTensor:
    local = torch.full_like(tensor.to_local(), value)
    return DTensor.from_local(
        local, tensor.device_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )


def full_values(state_dict: StateDict) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in state_dict.items()}


class TestFullyShardStateDictMultiProcess(FSDPTest):
    power_of_two_ranks = True

    @property
    def world_size(self) -> int:
        return get_required_world_size(self, ranks_of(self, 4))

    def _mlps(self, dim: int) -> nn.Sequential:
        manual_seed(42)
        return nn.Sequential(*(MLP(dim, self.device) for _ in range(3)))

    def _with_tp(self, model: nn.Sequential, tp_mesh: DeviceMesh) -> nn.Sequential:
        plan = {f"{index}.in_proj": ColwiseParallel() for index in range(3)}
        plan |= {f"{index}.out_proj": RowwiseParallel() for index in range(3)}
        return parallelize_module(model, tp_mesh, plan)

    def _sharded(self, model: nn.Module, **kwargs: Any) -> nn.Module:
        return shard_each((*model.children(), model), **kwargs)

    def _two_linears(self, dim: int, seed: int = 42) -> nn.Sequential:
        """Two layers of ``dim`` rows. With fewer rows than ranks, some ranks have empty shards."""
        manual_seed(seed)
        layers = (nn.Linear(5, dim, device=self.device), nn.Tanh(), nn.Linear(dim, dim, device=self.device))
        return nn.Sequential(*layers)

    def _shard_two_linears(self, model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
        fully_shard(model[0], **kwargs)
        fully_shard(model[2], **kwargs)
        return fully_shard(model, **kwargs)

    def _shards_of(self, model: nn.Module, mesh: DeviceMesh | None = None) -> dict[str, DTensor]:
        """The state dict of a plain model, sharded by rows without FSDP."""
        mesh = mesh or make_mesh(self.world_size)
        return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model.state_dict().items()}

    def _rows_of(self, rank: int, step: int = 0, features: int = 5) -> torch.Tensor:
        return uniform(2, features, seed=1000 * step + rank)

    def _ref_backward(self, ref_model: nn.Module, step: int = 0, features: int = 5) -> None:
        mean_backward(ref_model, [self._rows_of(rank, step, features) for rank in range(self.world_size)])

    def _train_step(self, model: nn.Module, optim: torch.optim.Optimizer, step: int, features: int = 5) -> None:
        model(self._rows_of(self.rank, step, features)).square().sum().backward()
        optim.step()
        optim.zero_grad()

    @skip_if_lt_x_gpu(2)
    def test_dp_state_dict_save_load(self):
        flat = make_mesh(self.world_size)
        hsdp = make_mesh(self.world_size // 2, 2, names=("dp_replicate", "dp_shard"))
        self.run_subtests({"mesh": [flat, hsdp], "mlp_dim": [2, 3, 4, 5]}, self._test_dp_state_dict_save_load)
        config = {"mesh": [flat, hsdp], "mlp_dim": [16], "shard_placement_fn": [shard_largest_dim]}
        self.run_subtests(config, self._test_dp_state_dict_save_load)

    def _test_dp_state_dict_save_load(
        self, mesh: DeviceMesh, mlp_dim: int, shard_placement_fn: Callable | None = None
    ) -> None:
        def base_model() -> nn.Sequential:
            manual_seed(42)
            inner = nn.Sequential(MLP(mlp_dim, self.device), nn.Linear(mlp_dim, mlp_dim, device=self.device))
            return nn.Sequential(MLP(mlp_dim, self.device), inner, MLP(mlp_dim, self.device))

        shard = functools.partial(self._sharded, mesh=mesh, shard_placement_fn=shard_placement_fn)
        self._test_state_dict_save_load(shard(base_model()), base_model().state_dict())

        model = shard(base_model(), reshard_after_forward=False)
        self._test_state_dict_save_load(model, base_model().state_dict())
        before = model.state_dict()
        pointers, values = {name: pointer_of(value) for name, value in before.items()}, local_copies(before)
        model(torch.rand((2, mlp_dim), device=self.device))
        self.assertFalse(any(isinstance(param, DTensor) for param in model.parameters()))
        after = model.state_dict()
        self.assertTrue(all(isinstance(param, DTensor) for param in model.parameters()))
        self.assertEqual(list(after), list(before))
        self.assertEqual(local_copies(after), values)
        for name, value in after.items():
            if torch_facts.KEEPS_PADDED_STORAGE or is_evenly_sharded(value):
                self.assertEqual(pointer_of(value), pointers[name], name)

    def _test_state_dict_save_load(self, model: nn.Module, whole: StateDict) -> None:
        """``whole`` is the state dict of the model before it was sharded."""
        self.assertEqual(full_values(model.state_dict()), whole)
        params = dict(model.named_parameters())
        for param in params.values():
            self.assertIsInstance(param, DTensor)
            param.detach().fill_(1)
        pointers = {name: pointer_of(param) for name, param in params.items()}
        sizes = {name: param.to_local().size() for name, param in params.items()}

        state_dict = model.state_dict()
        self.assertEqual(list(state_dict), list(params))
        for name, param in model.named_parameters():
            self.assertIs(param, params[name])
            self.assertIsInstance(param, nn.Parameter)
            self.assertEqual(param.to_local().size(), sizes[name])
            value = state_dict[name]
            self.assertIsInstance(value, DTensor)
            self.assertEqual(pointer_of(value), pointers[name], name)
            if pointers[name] == 0:  # an empty shard has no storage; rank 0 never has one
                self.assertGreater(self.rank, 0)
                self.assertEqual(value.to_local().numel(), 0)

        new_value = 42 + self.rank
        loaded = {name: filled_like(value, new_value) for name, value in state_dict.items()}
        for param in params.values():
            self.assertEqual(param.to_local(), torch.ones_like(param.to_local()), may_be="empty")
        self.assertEqual(str(model.load_state_dict(loaded)), "<All keys matched successfully>")
        for name, param in model.named_parameters():
            self.assertIs(param, params[name])
            self.assertEqual(param.to_local(), torch.full_like(param.to_local(), new_value), name, may_be="empty")
            self.assertEqual(param.to_local().size(), sizes[name])
            if is_evenly_sharded(param):
                self.assertEqual(pointer_of(param), pointers[name], name)

    @skip_if_lt_x_gpu(2)
    @subtests(mlp_dim=[2, 3, 4, 5], mutate_after_state_dict=[True, False])
    def test_cached_state_dict(self, mlp_dim, mutate_after_state_dict):
        """A state dict from before the first step keeps aliasing the parameters, unless they get new storage."""
        # Only five rows leave a shard that is shorter than the others and not empty.
        is_padded = mlp_dim == 5 and not mutate_after_state_dict
        manual_seed(42)
        model = nn.Linear(mlp_dim, mlp_dim, bias=False, device=self.device)
        ref_model = copy.deepcopy(model)
        fully_shard(model, reshard_after_forward=True)
        cached = model.state_dict()["weight"]
        has_rows = cached.to_local().numel() > 0
        start = cached.to_local().clone()
        if mutate_after_state_dict:
            self._move_to_new_storage(model)
        settings: dict[str, Any] = {"lr": 1e-2, **fused_on_host()}
        ref_optim, optim = (torch.optim.AdamW(each.parameters(), **settings) for each in (ref_model, model))
        for step in range(6):
            live = model.weight
            with torch_defect("fsdp2_early_state_dict_goes_stale", when=is_padded and step > 0):
                if has_rows:
                    self.assertEqual(pointer_of(live) == pointer_of(cached), not mutate_after_state_dict)
                self.assertEqual(
                    cached.to_local(), start if mutate_after_state_dict else live.to_local(), may_be=("empty", "same")
                )
            check_sharded_parity(self, ref_model, model)
            if step == 5:
                break
            if mutate_after_state_dict and step == 2:  # again, after lazy initialization
                self._move_to_new_storage(model)
            self._ref_backward(ref_model, step, features=mlp_dim)
            ref_optim.step()
            ref_optim.zero_grad()
            self._train_step(model, optim, step, features=mlp_dim)
        self.assertEqual(torch.equal(model.weight.to_local(), start), not has_rows)

    def _move_to_new_storage(self, model: nn.Module) -> None:
        """Move to the CPU and back. If the device is the CPU, convert to another precision and back."""
        if accelerator.current().has("device_memory"):
            model.to(HOST).to(self.device)
        else:
            model.double().float()

    @skip_if_lt_x_gpu(2)
    @subtests(
        offload_policy=[CPUOffloadPolicy(pin_memory=True), CPUOffloadPolicy(pin_memory=False)],
        cpu_state_dict=[True, False],
    )
    def test_dp_state_dict_cpu_offload(self, offload_policy, cpu_state_dict):
        """Offloaded parameters may be loaded one at a time. If one is on the device, forward raises with its name."""
        if not cpu_state_dict:
            skip_unless([lambda: accelerator.current().lacks("device_memory")])
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
        self._sharded(model, offload_policy=offload_policy)
        manual_seed(42)
        whole = {name: torch.randn(4, 4, device=self.device) for name, _ in model.named_parameters()}
        for name, param in list(model.named_parameters()):
            self.assertTrue(param.is_meta)
            value = distribute_tensor(whole[name], param.device_mesh, param.placements)
            loaded = value.to(HOST) if cpu_state_dict else value
            result = model.load_state_dict({name: loaded}, strict=False, assign=True)
            self.assertEqual((len(result.missing_keys), result.unexpected_keys), (1, []))
            self.assertFalse(model.get_parameter(name).is_meta)

        inp = self._rows_of(self.rank, features=4)
        if not cpu_state_dict:
            words = f"Found following parameters on non-CPU device: [('0.weight', device(type='{self.device.type}'"
            with self.assertRaisesRegex(RuntimeError, re.escape(words)):
                model(inp)
            return
        self.assertEqual(model(inp), inp @ whole["0.weight"].T @ whole["1.weight"].T)
        for name, value in model.state_dict().items():
            self.assertEqual(value.device, HOST)
            self.assertEqual(value.to_local().device, HOST)
            self.assertEqual(value.to_local(), whole[name].chunk(self.world_size)[self.rank].to(HOST))

    @skip_if_lt_x_gpu(2)
    @subtests(pin_memory=[True, False], rows=[4, 5])
    def test_offloaded_parameters_are_pinned(self, pin_memory, rows):
        """If requested, offloaded parameters are pinned from the start, and again after a load with ``assign=True``."""
        model = nn.Linear(3, rows, bias=False)
        fully_shard(model, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory))
        self.assertEqual(model.weight.to_local().is_pinned(), pin_memory)
        values = {"weight": model.weight.detach() + 1}
        expected = values["weight"].to_local().clone()
        self.assertFalse(values["weight"].to_local().is_pinned())
        model.load_state_dict(values, assign=True)
        for _ in range(2):
            model(torch.ones(1, 3, device=self.device)).sum().backward()
            self.assertEqual(model.weight.to_local().is_pinned(), pin_memory)
            self.assertEqual(model.weight.to_local(), expected, may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_2d_state_dict_correctness(self):
        mesh = make_mesh(2, self.world_size // 2, names=("dp", "tp"))
        model = self._sharded(self._with_tp(self._mlps(4), mesh["tp"]), mesh=mesh["dp"])
        whole, state_dict = self._mlps(4).state_dict(), model.state_dict()
        self.assertEqual(list(state_dict), list(whole))
        for name, value in state_dict.items():
            self.assertIsInstance(value, DTensor)
            self.assertEqual(value.device_mesh.mesh_dim_names, ("dp", "tp"))
            self.assertEqual(value.full_tensor(), whole[name], name)

    @skip_if_lt_x_gpu(2)
    @subtests(mlp_dim=[4, 6, 8, 10])
    def test_dp_tp_state_dict_save_load(self, mlp_dim):
        mesh = make_mesh(2, self.world_size // 2, names=("dp", "tp"))
        model = self._sharded(self._with_tp(self._mlps(mlp_dim), mesh["tp"]), mesh=mesh["dp"])
        self._test_state_dict_save_load(model, self._mlps(mlp_dim).state_dict())

    @requires_world_size(8, least=4)
    @subtests(mlp_dim=[4, 6, 8, 10])
    def test_hsdp_tp_state_dict_save_load(self, mlp_dim):
        mesh = make_mesh(2, 2, self.world_size // 4, names=("dp_replicate", "dp_shard", "tp"))
        model = self._with_tp(self._mlps(mlp_dim), mesh["tp"])
        self._sharded(model, mesh=mesh["dp_replicate", "dp_shard"])
        self._test_state_dict_save_load(model, self._mlps(mlp_dim).state_dict())

    @skip_if_lt_x_gpu(2)
    @subtests(index=[0, 2])
    def test_state_dict_of_one_module_of_a_group(self, index):
        """The state dict of each module of a parameter group is sharded."""
        model = self._two_linears(5)
        fully_shard([model[0], model[2]], reshard_after_forward=False)
        fully_shard(model)(self._rows_of(self.rank))
        for value in model[index].state_dict().values():
            self.assertIsInstance(value, DTensor)

    @skip_if_lt_x_gpu(2)
    @subtests(index=[0, 2], how=["saved", "loaded", "assigned"])
    def test_submodule_after_evaluation(self, index, how):
        """A module inside an FSDP2 module saves its shards, and later forwards use all that it has loaded.

        The forward before, without gradients, leaves its parameters unsharded.
        """
        model, plain = fully_shard(self._two_linears(5), reshard_after_forward=False), self._two_linears(5)
        inp = self._rows_of(self.rank)
        with torch.no_grad():
            model(inp)
            if how == "saved":
                self.assertEqual(full_values(model[index].state_dict()), plain[index].state_dict())
                return
            plain[index] = self._two_linears(5, seed=43)[index]
            model[index].load_state_dict(self._shards_of(plain[index]), assign=how == "assigned")
            self.assertEqual(model(inp), plain(inp))
        self.assertEqual(full_values(model.state_dict()), plain.state_dict())

    @skip_if_lt_x_gpu(2)
    @subtests(dim=[3, 5], assign=[True, False], reshard_after_forward=[True, False])
    def test_state_dict_between_steps(self, dim, assign, reshard_after_forward):
        """A model may load between steps, also with ``assign``. The next step uses the loaded values.

        Assigned values have no padding, and FSDP does not know them until it resets its sharded parameters.
        """
        model = self._shard_two_linears(self._two_linears(dim), reshard_after_forward=reshard_after_forward)
        for seed in (1, 2):
            model(self._rows_of(self.rank)).sum().backward()
            model.zero_grad()
            model(self._rows_of(self.rank))  # without a reshard, parameters stay unsharded
            ref_model = self._two_linears(dim, seed)
            model.load_state_dict(self._shards_of(ref_model), assign=assign)
            check_sharded_parity(self, ref_model, model)
            self._ref_backward(ref_model)
            loss = model(self._rows_of(self.rank)).square().sum()
            loss.backward()
            self.assertEqual(loss, ref_model(self._rows_of(self.rank)).square().sum())
            check_sharded_parity(self, ref_model, model)
            model.zero_grad()

    @skip_if_lt_x_gpu(2)
    @subtests(
        dim=[3, 5],
        options=[
            StateDictOptions(full_state_dict=full, cpu_offload=offload, broadcast_from_rank0=broadcast)
            for full, offload, broadcast in itertools.product([False, True], [False, True], [False, True])
            if full or not broadcast
        ],
    )
    def test_get_and_set_model_state_dict(self, dim, options):
        """``get_model_state_dict`` and ``set_model_state_dict`` save and load the full model with all options."""
        full, offload, broadcast = options.full_state_dict, options.cpu_offload, options.broadcast_from_rank0
        ref_model = self._two_linears(dim)
        whole = ref_model.state_dict()
        model = self._shard_two_linears(self._two_linears(dim))
        taken = get_model_state_dict(model, options=options)
        if full and offload and self.rank > 0:
            self.assertEqual(taken, {}, may_be="empty")
        else:
            self.assertEqual(list(taken), list(whole))
            for name, value in taken.items():
                self.assertEqual(isinstance(value, DTensor), not full)
                self.assertEqual(value.device.type, HOST.type if offload else self.device.type)
                actual = value.to(self.device)  # the backend may lack collectives on the CPU
                self.assertEqual(actual if full else actual.full_tensor(), whole[name], name)

        other = self._shard_two_linears(self._two_linears(dim, seed=43))
        if full and offload and not broadcast:  # only rank 0 has the values, but all ranks must pass them
            taken = whole
        taken = {name: value.clone() for name, value in taken.items()}
        result = set_model_state_dict(other, taken, options=options)
        if not broadcast:
            self.assertEqual((result.missing_keys, result.unexpected_keys), ([], []), may_be="empty")
        check_sharded_parity(self, ref_model, other)
        inp = self._rows_of(self.rank)
        self.assertEqual(other(inp), ref_model(inp))

    @skip_if_lt_x_gpu(2)
    @subtests(dim=[3, 5], how=["plain", "sharded", "full"])
    def test_optimizer_state_round_trip(self, dim, how):
        """Training that resumes from a saved model and optimizer is bitwise the same."""
        model = self._shard_two_linears(self._two_linears(dim))
        adam = functools.partial(torch.optim.Adam, lr=1e-2, amsgrad=True)
        optim = adam(model.parameters())
        for step in range(3):
            self._train_step(model, optim, step)
        saved = copy.deepcopy(self._states(model, optim, how))
        expected = []
        for step in range(3, 6):
            self._train_step(model, optim, step)
            expected.append(local_copies(model.state_dict()))

        other = self._shard_two_linears(self._two_linears(dim, seed=43))
        other_optim = adam(other.parameters(), betas=(0.5, 0.5))
        for step in range(2):  # creates a state for the load to replace
            self._train_step(other, other_optim, step)
        self._load_states(other, other_optim, saved, how)
        for step, values in enumerate(expected, start=3):
            self._train_step(other, other_optim, step)
            for name, value in local_copies(other.state_dict()).items():
                self.assertTrue(torch.equal(value, values[name]), f"{name} after step {step}")
        self.assertEqual({state["step"].item() for state in other_optim.state.values()}, {6})

    def _states(self, model: nn.Module, optim: torch.optim.Optimizer, how: str) -> tuple[StateDict, StateDict]:
        if how == "plain":
            return model.state_dict(), optim.state_dict()
        options = StateDictOptions(full_state_dict=how == "full")
        return get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optim, options=options)

    def _load_states(
        self, model: nn.Module, optim: torch.optim.Optimizer, saved: tuple[StateDict, StateDict], how: str
    ) -> None:
        if how == "plain":
            model.load_state_dict(saved[0])
            optim.load_state_dict(saved[1])
            return
        options = StateDictOptions(full_state_dict=how == "full")
        set_model_state_dict(model, saved[0], options=options)
        set_optimizer_state_dict(model, optim, saved[1], options=options)

    @skip_if_lt_x_gpu(4)
    @subtests(dim=[1, 3, 5], sizes=[(4, 2), (2, 4)])
    def test_load_at_other_world_size(self, dim, sizes):
        """Four ranks save and two ranks load, or the reverse. Model and optimizer continue training.

        With fewer rows than ranks, some ranks have empty shards.
        """
        pairs = make_mesh(2, 2, names=("pair", "shard"))["shard"]  # two worlds of two ranks run the same steps
        meshes = [make_mesh(4) if size == 4 else pairs for size in sizes]
        ref_model = self._two_linears(dim)
        ref_optim = torch.optim.Adam(ref_model.parameters(), lr=1e-2, **fused_on_host())
        models = [self._shard_two_linears(self._two_linears(dim, seed), mesh=mesh) for seed, mesh in enumerate(meshes)]
        models[0].load_state_dict(self._shards_of(ref_model, meshes[0]))
        optims = [torch.optim.Adam(model.parameters(), lr=1e-2, **fused_on_host()) for model in models]
        for index, (model, optim) in enumerate(zip(models, optims, strict=True)):
            if index == 1:
                self._load_states(model, optim, self._states(models[0], optims[0], "full"), "full")
                check_sharded_parity(self, ref_model, model)
            for step in (2 * index, 2 * index + 1):  # loading an optimizer's state also runs a step
                # All ranks have the same rows, so the mean over two ranks equals that over four.
                for each, each_optim in ((ref_model, ref_optim), (model, optim)):
                    each(self._rows_of(0, step)).square().sum().backward()
                    each_optim.step()
                    each_optim.zero_grad()
                check_sharded_parity(self, ref_model, model)

    @skip_if_lt_x_gpu(2)
    @subtests(wrong=["missing", "unexpected", "shape", "plain tensor"])
    def test_strict_errors(self, wrong):
        """Every rank raises an error that names the wrong entry, as with a plain module.

        PyTorch loads all valid entries before it raises, so only the parameter in the error is unchanged.
        """
        model = self._shard_two_linears(self._two_linears(5))
        inp = self._rows_of(self.rank)
        model(inp)
        values = self._shards_of(self._two_linears(5, 43))
        mesh = values["2.weight"].device_mesh
        errors = {
            "missing": 'Missing key(s) in state_dict: "2.weight"',
            "unexpected": 'Unexpected key(s) in state_dict: "2.scale"',
            "shape": "size mismatch for 2.weight",
            "plain tensor": "got mixed torch.Tensor and DTensor",
        }
        if wrong == "missing":
            del values["2.weight"]
        elif wrong == "unexpected":
            values["2.scale"] = distribute_tensor(torch.ones(5, device=self.device), mesh, [Shard(0)])
        elif wrong == "shape":
            values["2.weight"] = distribute_tensor(torch.ones(6, 5, device=self.device), mesh, [Shard(0)])
        else:
            values["2.weight"] = values["2.weight"].full_tensor()
        with self.assertRaisesRegex(RuntimeError, re.escape(errors[wrong])):
            model.load_state_dict(values)

        expected = self._two_linears(5, 43)
        if wrong != "unexpected":
            expected[2].weight = self._two_linears(5)[2].weight
        check_sharded_parity(self, expected, model)
        self.assertEqual(model(inp), expected(inp))

    @skip_if_lt_x_gpu(2)
    def test_load_between_forward_and_backward(self):
        """If parameters are unsharded after forward, the next forward still uses the loaded values."""
        model = self._shard_two_linears(self._two_linears(5), reshard_after_forward=False)
        inp = self._rows_of(self.rank)
        model(inp)
        self.assertNotIsInstance(model[0].weight, DTensor)
        ref_model = self._two_linears(5, 43)
        model.load_state_dict(self._shards_of(ref_model))
        self.assertEqual(model(inp), ref_model(inp))

    @skip_if_lt_x_gpu(2)
    def test_backward_after_load(self):
        """If weights are loaded between forward and backward, backward raises as in a plain module."""
        plain, model = self._two_linears(5), self._shard_two_linears(self._two_linears(5), reshard_after_forward=False)
        other = self._two_linears(5, 43)
        for module, values in ((plain, other.state_dict()), (model, self._shards_of(other))):
            loss = module(self._rows_of(self.rank)).square().sum()
            module.load_state_dict(values)
            with (
                torch_defect("fsdp2_load_between_forward_and_backward", when=module is model),
                self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"),
            ):
                loss.backward()


class TestFullyShardStateDictMultiThread(FSDPTestMultiThread):
    world_size = 2

    @skip_if_lt_x_gpu(1)
    def test_rank0_offload_full_state_dict(self):
        device = self.device
        ref_model = Transformer(ModelArgs()).to(device)
        for param in ref_model.parameters():
            dist.broadcast(param.detach(), src=0)  # threads share one random generator
        model = copy.deepcopy(ref_model)
        shard_each((*model.layers, model))

        whole = {}
        for name, value in model.state_dict().items():
            full = value.full_tensor()
            if self.rank == 0:
                whole[name] = full.to(HOST)
        if self.rank > 0:
            self.assertEqual(whole, {}, may_be="empty")
            return
        expected = {name: value.to(HOST) for name, value in ref_model.state_dict().items()}
        self.assertEqual(list(whole), list(expected))
        for name, value in whole.items():
            self.assertNotIsInstance(value, DTensor)
            self.assertEqual(value.device, HOST)
            self.assertTrue(torch.equal(value, expected[name]), name)


if __name__ == "__main__":
    run_tests()
