"""Distributed state dicts of FSDP2, and checkpoints that are saved in one layout and loaded in another.

The reference is a plain model with its optimizer, trained on the same data. The loaded values are compared with it
before and after they are set in the model, and after more training.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecisionPolicy,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import always_wrap_policy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import implicit_replication
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import get_required_world_size, requires_world_size
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, manual_seed, run_tests
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import (
    EXACT,
    VerifyStateDictMixin,
    by_parameter,
    is_sharded,
    named_osd,
    whole_tree,
)
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.state_dict_pairs import ModelPair, optimizer
from torch_fsdp_tests.fsdp.training import loss_of, shard_each, train

FULL = StateDictOptions(full_state_dict=True)
FULL_ON_HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
SHARDED = StateDictOptions()
LAYOUTS = ("FSDP1", "FSDP2", "HSDP", "FSDP2 + TP", "TP")
PAIRS = [(saving, loading) for saving in LAYOUTS for loading in LAYOUTS]
# In addition to the pairs of upstream's tests: each layout is once on each side.
FEW_PAIRS = [("FSDP1", "TP"), ("FSDP2", "FSDP1"), ("HSDP", "FSDP2"), ("FSDP2 + TP", "HSDP"), ("TP", "FSDP2 + TP")]
DIM = 3  # the last of four ranks has none of three rows


class TestFullyShardWithDistributedStateDict(VerifyStateDictMixin, FSDPTest):
    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 4)

    def _get_base_model(self, dim: int = 2) -> nn.Sequential:
        manual_seed(42)
        inner = nn.Sequential(MLP(dim, self.device), nn.Linear(dim, dim, device=self.device))
        return nn.Sequential(MLP(dim, self.device), inner, MLP(dim, self.device))

    @requires_world_size(2)
    @subtests(dim=[2, 3, 4, 5], reshard_after_forward=[True, False])
    def test_1d_fsdp_get_model_state_dict(self, dim, reshard_after_forward):
        """DSD has the same live shards as ``state_dict``, even while parameters are unsharded after a forward."""
        base = self._get_base_model(dim)
        model = copy.deepcopy(base)
        shard_each((*model, model), reshard_after_forward=reshard_after_forward)
        for forward in (False, True):
            if forward:
                model(uniform(2, dim, seed=self.rank))
            actual, expected = get_model_state_dict(model), model.state_dict()
            self.assertEqual(list(actual), list(expected))
            for name, value in actual.items():
                self.assertIsInstance(value, DTensor)
                self.assertEqual(value.to_local().data_ptr(), expected[name].to_local().data_ptr())
            self._verify_msd(base.state_dict(), actual, **EXACT)

    @requires_world_size(2)
    def test_1d_fsdp_cpu_offload_full_model_state_dict(self):
        base = self._get_base_model(5)
        model = copy.deepcopy(base)
        shard_each((*model, model))
        actual = get_model_state_dict(model, options=FULL_ON_HOST)
        if self.rank > 0:
            self.assertEqual(actual, {}, may_be="empty")
        else:
            self._verify_msd(base.state_dict(), actual, FULL, offload_to_cpu=True, **EXACT)
            for value in actual.values():
                self.assertIs(type(value), torch.Tensor)
                value.fill_(-1)
        self._verify_msd(base.state_dict(), get_model_state_dict(model), **EXACT)

    # --- From one layout to another ---

    def _plain(self, seed: int, tied: bool = False) -> nn.Sequential:
        """Three MLPs with one frozen layer. If ``tied``, two layers share a weight."""
        # With random values around zero, the ReLUs of such a small model die, and its moments are zero.
        model = filled(nn.Sequential(*(MLP(DIM, self.device) for _ in range(3))), seed=seed)
        if tied:
            model[2].in_proj.weight = model[0].in_proj.weight
        model[1].out_proj.requires_grad_(False)
        return model

    def _parallelize(self, model: nn.Sequential, mesh: DeviceMesh, mlps: Sequence[int]) -> None:
        plan: dict[str, Any] = {f"{index}.in_proj": ColwiseParallel() for index in mlps}
        parallelize_module(model, mesh, plan | {f"{index}.out_proj": RowwiseParallel() for index in mlps})
        model[1].out_proj.requires_grad_(False)  # without TP_KEEPS_REQUIRES_GRAD this flag is lost

    def _pair(
        self, layout: str, seed: int, mlps: Sequence[int] = (0, 1, 2), plain: Any = None, **kwargs: Any
    ) -> ModelPair:
        """A pair whose second model has this layout. ``kwargs`` go to FSDP; ``mlps`` are the MLPs under TP."""
        plain = self._plain(seed) if plain is None else plain
        model: Any = copy.deepcopy(plain)
        data_rank = self.rank
        plane = functools.partial(make_mesh, 2, 2)
        if layout == "FSDP1":
            kwargs = {"device_mesh": make_mesh(self.world_size), **kwargs}
            model = FSDP(model, use_orig_params=True, **kwargs)
        elif layout == "HYBRID_SHARD":
            mesh = plane(names=("replicate", "shard"))
            model = FSDP(model, use_orig_params=True, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
        elif layout == "TP":
            self._parallelize(model, make_mesh(self.world_size), mlps)
            data_rank = 0
        else:
            mesh = make_mesh(self.world_size) if layout == "FSDP2" else plane(names=("dp", "tp"))
            if layout == "FSDP2 + TP":
                self._parallelize(model, mesh["tp"], mlps)
                data_rank, mesh = mesh.get_local_rank("dp"), mesh["dp"]
            shard_each((model[1], model), mesh=mesh, **kwargs)
        optims = (optimizer(torch.optim.AdamW, each.parameters()) for each in (plain, model))
        ref_optim, optim = optims
        return ModelPair(plain, ref_optim, model, [optim], data_rank, width=DIM)

    def _reference(self, pair: ModelPair) -> dict[str, Any]:
        """The values of the plain model and its optimizer, by names as in :meth:`_values`."""
        osd = by_parameter(named_osd(pair.ref_model, pair.ref_optim))
        return copy.deepcopy({**pair.ref_model.state_dict(), **osd})

    def _values(self, msd: dict[str, Any], osd: dict[str, Any]) -> dict[str, Any]:
        """All values of two state dicts, as full tensors, by name. All ranks must call this."""
        return whole_tree({**msd, **by_parameter(osd)})

    def _check(self, found: dict[str, Any], wanted: dict[str, Any], **kwargs: Any) -> None:
        """Compare all values. Each parameter and its moments must be there."""
        moments = [value for name, value in wanted.items() if name.endswith(".exp_avg")]
        self.assertIn(len(moments), (9, 10))
        self.assertTrue(all(map(torch.any, moments)))
        self._compare_dicts(wanted, found, **kwargs)

    def _test_conversion(self, saving: ModelPair, state: dict[str, Any], loading: ModelPair) -> None:
        """Save the trained state of one pair in a checkpoint, load it into another pair, and train that one."""
        expected = self._reference(saving)
        path = os.path.join(self.temp_dir, str(len(os.listdir(self.temp_dir))))
        dist.barrier()
        dcp.save(state, checkpoint_id=path)
        loading.ref_model, loading.ref_optim = saving.ref_model, saving.ref_optim

        msd, osd = loading.states()
        self.assertNotEqual(self._values(msd, osd), expected)
        read = {"model": msd, "optim": osd}
        dcp.load(read, checkpoint_id=path)
        self._check(self._values(read["model"], read["optim"]), expected)
        self.assertEqual(loading.load(read["model"], read["optim"]), ([], []), may_be="empty")
        self._check(self._values(*loading.states()), expected)
        on_host = loading.states(FULL_ON_HOST) if not self._is_fsdp1(loading) else loading.states(FULL)
        if self.rank == 0:
            self.assertFalse(any(map(is_sharded, on_host[0].values())))
            self._check({**on_host[0], **by_parameter(on_host[1])}, expected)
        loading.train(range(3, 5))
        self._check(self._values(*loading.states()), self._reference(loading))

    def _is_fsdp1(self, pair: ModelPair) -> bool:
        """Whether the pair uses FSDP1. Its full state dicts on the CPU have wrong states if the CPU is the device."""
        return isinstance(pair.model, FSDP)

    def _state(self, pair: ModelPair, options: StateDictOptions) -> dict[str, Any]:
        msd, osd = pair.states(options)
        return {"model": msd, "optim": osd}

    def _plain_state(self, pair: ModelPair) -> dict[str, Any]:
        return {"model": pair.ref_model.state_dict(), "optim": named_osd(pair.ref_model, pair.ref_optim)}

    @requires_world_size(4, least=2)
    @with_temp_dir
    @subtests(kind=[StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT])
    def test_save_with_fsdp1_and_load_with_fsdp2(self, kind):
        """FSDP2 loads a checkpoint of FSDP1's own state dicts, from a model without a mesh."""
        saving = self._pair("FSDP1", 0, device_mesh=None, auto_wrap_policy=always_wrap_policy)
        saving.train(range(3))
        configs: tuple[Any, ...] = ()
        if kind is StateDictType.FULL_STATE_DICT:
            configs = FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=False, offload_to_cpu=False)
        with FSDP.state_dict_type(saving.model, kind, *configs):
            state = {"model": saving.model.state_dict(), "optim": FSDP.optim_state_dict(saving.model, saving.optims[0])}
        self._test_conversion(saving, state, self._pair("FSDP2", 1))

    @requires_world_size(4)
    @with_temp_dir
    @subtests(saved=["plain model", "FSDP1", "HYBRID_SHARD"])
    def test_save_with_fsdp1_and_load_with_fsdp2_tp(self, saved):
        saving = self._pair("HYBRID_SHARD" if saved == "HYBRID_SHARD" else "FSDP1", 0)
        saving.train(range(3))
        state = self._plain_state(saving) if saved == "plain model" else self._state(saving, SHARDED)
        self._test_conversion(saving, state, self._pair("FSDP2 + TP", 1))

    @requires_world_size(4)
    @with_temp_dir
    @subtests(options=[FULL, SHARDED])
    def test_save_with_tp_and_load_with_fsdp2_tp(self, options):
        saving = self._pair("TP", 0)
        saving.train(range(3))
        self._test_conversion(saving, self._state(saving, options), self._pair("FSDP2 + TP", 1))

    @requires_world_size(4)
    @with_temp_dir
    @subtests(allow_implicit_replication=[True, False], options=[FULL, SHARDED])
    def test_save_with_fsdp2_tp_and_load_with_tp(self, allow_implicit_replication, options):
        """With implicit replication, the first MLP is not under TP, and has plain parameters among DTensors."""
        mlps = (1, 2) if allow_implicit_replication else (0, 1, 2)
        with implicit_replication() if allow_implicit_replication else contextlib.nullcontext():
            saving, loading = (
                self._pair(
                    layout,
                    seed,
                    mlps,
                )
                for seed, layout in enumerate(("FSDP2 + TP", "TP"))
            )
            saving.train(range(3))
            replicated = {name for name, param in loading.model.named_parameters() if not isinstance(param, DTensor)}
            self.assertEqual(
                {name[0] for name in replicated}, {"0"} if allow_implicit_replication else set(), may_be="empty"
            )
            self._test_conversion(saving, self._state(saving, options), loading)

    @requires_world_size(4)
    @with_temp_dir
    @subtests(pair=PAIRS if TEST_WITH_SLOW else FEW_PAIRS)
    def test_every_pair_of_layouts(self, pair):
        """Each layout loads checkpoints of the others, with a frozen layer and, without TP, a shared weight.

        Tensor parallelism distributes each layer separately, so it makes two weights of a shared one.
        """
        tied = not any("TP" in layout for layout in pair)
        saving, loading = (self._pair(layout, seed, plain=self._plain(seed, tied)) for seed, layout in enumerate(pair))
        saving.train(range(3))
        self._test_conversion(saving, self._state(saving, SHARDED), loading)

    @requires_world_size(4)
    @with_temp_dir
    def test_fewer_ranks_load(self):
        """Two of four ranks load what four ranks have saved."""
        saving = self._pair("FSDP2", 0)
        saving.train(range(3))
        dcp.save(self._state(saving, SHARDED), checkpoint_id=self.temp_dir)
        expected = self._reference(saving)
        mesh = DeviceMesh(self.device.type, [0, 1])
        if self.rank < 2:
            loading = self._pair("FSDP1", 1, device_mesh=mesh)
            model = shard_each((copy.deepcopy(self._plain(1)),), mesh=mesh)
            loading.model, loading.optims = model, [optimizer(torch.optim.AdamW, model.parameters())]
            read = self._state(loading, SHARDED)
            dcp.load(read, checkpoint_id=self.temp_dir, process_group=mesh.get_group())
            loading.load(read["model"], read["optim"])
            self._check(self._values(*loading.states()), expected)

    @requires_world_size(4)
    @with_temp_dir
    def test_replicas_agree_after_load(self):
        """Replicas under TP that differ on purpose are equal after a load."""
        saving, loading = (self._pair("FSDP2 + TP", seed) for seed in (0, 1))
        tp_group = loading.model[0].out_proj.bias.device_mesh.get_group(1)

        def replicas() -> list[torch.Tensor]:
            return of_all_ranks(loading.model[0].out_proj.bias.to_local().detach(), tp_group)

        with torch.no_grad():
            loading.model[0].out_proj.bias.to_local().fill_(self.rank)
        self.assertNotEqual(*replicas())
        dcp.save({"model": get_model_state_dict(saving.model)}, checkpoint_id=self.temp_dir)
        state = {"model": get_model_state_dict(loading.model)}
        dcp.load(state, checkpoint_id=self.temp_dir)
        set_model_state_dict(loading.model, state["model"])
        self.assertEqual(*replicas(), **EXACT)
        self._verify_msd(saving.ref_model.state_dict(), get_model_state_dict(loading.model), **EXACT)

    @requires_world_size(2)
    @with_temp_dir
    def test_low_precision(self):
        """FSDP2 that computes in bfloat16 saves float32, and converts bfloat16 values on load."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plain = self._get_base_model(5)
        model = copy.deepcopy(plain)
        shard_each((*model, model), mp_policy=policy, reshard_after_forward=False)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        output = model(uniform(2, 5, seed=self.rank))
        self.assertEqual(output.dtype, torch.bfloat16)
        self._verify_msd(plain.state_dict(), get_model_state_dict(model), **EXACT)
        loss_of(output).backward()
        optim.step()
        state = get_model_state_dict(model)
        self.assertEqual({value.dtype for value in state.values()}, {torch.float32})
        self.assertNotEqual(whole_tree(state), plain.state_dict())

        low = {name: value.to(torch.bfloat16) for name, value in plain.state_dict().items()}
        dcp.save({"model": low}, checkpoint_id=self.temp_dir)
        dcp.load({"model": state}, checkpoint_id=self.temp_dir)
        set_model_state_dict(model, state)
        self._verify_msd({name: value.float() for name, value in low.items()}, get_model_state_dict(model), **EXACT)
        self.assertTrue(torch.isfinite(train(model, uniform(2, 5, seed=self.rank))))


if __name__ == "__main__":
    run_tests()
