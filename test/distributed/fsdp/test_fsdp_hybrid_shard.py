"""HYBRID_SHARD and _HYBRID_SHARD_ZERO2: parameters sharded within a group of ranks and replicated over such groups.

The four ranks are two "nodes" of two: shard groups (0, 1) and (2, 3), replicate groups (0, 2) and (1, 3).
"""

from __future__ import annotations

import copy
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullStateDictConfig, ShardingStrategy, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_distributed import at_most, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    FSDPTestMultiThread,
    TransformerWithSharedParams,
)
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import machines_of, states_may_be_synced
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters

Groups = tuple[dist.ProcessGroup, dist.ProcessGroup]
LAYERS = ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer})
LINEARS = ModuleWrapPolicy({nn.Linear})


class MyModel(nn.Module):
    def __init__(self, *widths: int) -> None:
        super().__init__()
        first, second, third, fourth = widths or (10, 10, 10, 10)
        self.lin1 = nn.Linear(first, second)
        self.lin2 = nn.Linear(second, third)
        self.lin3 = nn.Linear(third, fourth)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin3(self.lin2(self.lin1(x)))


class ShardingStrategyMode(Enum):
    ALL_HYBRID_SHARD = auto()
    MIXED_HYBRID_FULL_SHARD = auto()


class TestFSDPHybridShard(FSDPTest):
    world_size = at_most(4)

    def _groups(self) -> Groups:
        """This rank's shard group and replicate group, created by hand. Every rank creates all groups."""
        pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
        return pairs[self.rank // 2], pairs[2 + self.rank % 2]

    def _wrapped(self, model: nn.Module, groups: Groups | None, **kwargs: Any) -> FSDP:
        kwargs = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True, **kwargs}
        return FSDP(model, process_group=groups, auto_wrap_policy=LINEARS, **kwargs)

    def _assert_alike(self, tensor: torch.Tensor, group: dist.ProcessGroup | None = None, msg: str = "") -> None:
        """The tensor must be bitwise the same on all ranks of the group."""
        everywhere = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everywhere, tensor.contiguous(), group=group)
        for other in everywhere:
            self.assertEqual(other, tensor, msg=msg, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_raises_manual_wrap_hybrid_shard_when_none_policy(self):
        for strategy in internals.hybrid_strategies():
            with self.assertRaisesRegex(ValueError, "requires explicit specification of process group or device_mesh."):
                FSDP(MyModel().to(self.device), sharding_strategy=strategy)

    @skip_if_lt_x_gpu(2)
    def test_invalid_pg_specification_raises(self):
        group = dist.group.WORLD
        invalid: list[Any] = [group, (), (group,), (group,) * 3, (0, 1)]
        for groups in invalid:
            with self.assertRaisesRegex(ValueError, "Expected process_group to be passed in"):
                self._wrapped(MyModel().to(self.device), groups)

    @skip_if_lt_x_gpu(4)
    def test_invalid_mesh_specification_raises(self):
        """A mesh must have two dimensions and cannot be combined with process groups."""
        device_type = accelerator.current().type
        with self.assertRaisesRegex(ValueError, "Expected device_mesh to have ndim=2 but got 1"):
            self._wrapped(MyModel().to(self.device), None, device_mesh=init_device_mesh(device_type, (4,)))
        mesh = init_device_mesh(device_type, (2, 2))
        with self.assertRaisesRegex(ValueError, "Cannot pass both process_group and device_mesh"):
            self._wrapped(MyModel().to(self.device), self._groups(), device_mesh=mesh)

    @skip_if_lt_x_gpu(4)
    def test_hsdp_save_load_state_dict(self):
        groups = self._groups()
        model = self._wrapped(MyModel().to(self.device), groups)
        for module in FSDP.fsdp_modules(model):
            self.assertEqual((module.process_group, module._inter_node_pg), groups)
        optim = torch.optim.AdamW(model.parameters())
        torch.manual_seed(self.rank)
        model(torch.randn(2, 10, device=self.device)).sum().backward()
        optim.step()
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            saved = copy.deepcopy(model.state_dict()), FSDP.optim_state_dict(model, optim)

        torch.manual_seed(100)
        loaded = self._wrapped(MyModel().to(self.device), groups)
        loaded_optim = torch.optim.AdamW(loaded.parameters())
        with FSDP.state_dict_type(loaded, StateDictType.SHARDED_STATE_DICT):
            loaded.load_state_dict(saved[0])
            loaded_optim.load_state_dict(FSDP.optim_state_dict_to_load(loaded, loaded_optim, saved[1]))
        self._check_same_state(model, optim, loaded, loaded_optim)

    def _check_same_state(
        self, model: FSDP, optim: torch.optim.Optimizer, loaded: FSDP, loaded_optim: torch.optim.Optimizer
    ) -> None:
        """Full parameters and moments equal the source's and are the same on all ranks."""
        actual, expected = full_parameters(loaded), full_parameters(model)
        self.assertEqual(actual, expected, rtol=0, atol=0)
        for name, value in actual.items():
            self._assert_alike(value, msg=name)
        for each, each_optim in ((model, optim), (loaded, loaded_optim)):
            FSDP.set_state_dict_type(each, StateDictType.FULL_STATE_DICT)
            self.assertGreater(len(each_optim.state), 0)
        actual, expected = FSDP.optim_state_dict(loaded, loaded_optim), FSDP.optim_state_dict(model, optim)
        if self.rank == 0:  # by default, only rank 0 gets the FULL_STATE_DICT of an optimizer
            self.assertEqual(len(expected["state"]), 6)
        self.assertEqual(actual["state"], expected["state"], rtol=0, atol=0)
        for mine, theirs in zip(optim.state.values(), loaded_optim.state.values(), strict=True):
            self.assertEqual(theirs, mine, rtol=0, atol=0)

    @skip_if_lt_x_gpu(4)
    @subtests(replicas=[False, True], use_orig_params=[False, True])
    def test_rank0_only_is_one_rank_of_each_replica(self, replicas, use_orig_params):
        """With ``rank0_only``, only the first rank of each replica saves and summons full parameters."""
        torch.manual_seed(0)
        plain = MyModel(3, 5, 4, 2).to(self.device)
        strategy = ShardingStrategy.HYBRID_SHARD if replicas else ShardingStrategy.FULL_SHARD
        kwargs = {"sharding_strategy": strategy, "use_orig_params": use_orig_params}
        model = self._wrapped(copy.deepcopy(plain), self._groups() if replicas else None, **kwargs)
        with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(rank0_only=True)):
            saved = dict(model.state_dict())
        with FSDP.summon_full_params(model, rank0_only=True, writeback=False):
            shown = [param.shape for param in model.parameters()] == [param.shape for param in plain.parameters()]
        is_first = model.process_group.rank() == 0
        self.assertEqual((shown, saved), (True, dict(plain.state_dict())) if is_first else (False, {}))

    @skip_if_lt_x_gpu(4)
    def test_hsdp_sync_module_state(self):
        model = MyModel().to(self.device)
        groups = self._groups()
        for linear in model.children():
            nn.init.constant_(linear.weight, self.rank)
        with states_may_be_synced():
            model = self._wrapped(model, groups, sync_module_states=True)
        shards = [linear.weight for linear in (model.lin1, model.lin2, model.lin3)]
        self.assertGreater(sum(shard.numel() for shard in shards), 0)
        for shard in shards:
            self.assertEqual(shard.detach(), torch.zeros_like(shard), may_be="zero")

    @skip_if_lt_x_gpu(4)
    def test_sync_of_states_in_host_memory_is_refused(self):
        model = MyModel()
        with self.assertRaisesRegex(ValueError, "The module has CPU parameters or buffers when `sync_module_states"):
            host = torch.device("cpu")  # the CPU is the subject: with another device_id, the model would move first
            self._wrapped(model, self._groups(), sync_module_states=True, device_id=host)

    @skip_if_lt_x_gpu(4)
    def test_sync_of_uneven_shapes_and_buffers(self):
        """All ranks get rank 0's parameters and buffers, through either group."""
        torch.manual_seed(self.rank)
        model = MyModel(3, 7, 5, 1).to(self.device)
        model.register_buffer("buffer", torch.full((3,), self.rank + 1.0, device=self.device))
        expected = [tensor.detach().clone() for tensor in (*model.parameters(), *model.buffers())]
        for tensor in expected:
            dist.broadcast(tensor, 0)
        groups = self._groups()
        with states_may_be_synced():
            model = self._wrapped(model, groups, sync_module_states=True)
        *params, buffer = expected
        self.assertEqual([*full_parameters(model).values()], params, rtol=0, atol=0)
        with torch_defect("fsdp1_hybrid_shard_leaves_buffers", when=self.rank >= 2):
            self.assertEqual([*model.buffers()], [buffer], rtol=0, atol=0)

    def _init_fsdp_model(self, use_orig_params: bool) -> nn.Module:
        return TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_BEFORE,
            {"auto_wrap_policy": LAYERS, "use_orig_params": use_orig_params},
            deterministic=True,
        )

    def _init_hsdp_model(
        self,
        hsdp_sharding_strategy: ShardingStrategy,
        sharding_strategy_mode: ShardingStrategyMode,
        use_orig_params: bool,
        hsdp_device_mesh: DeviceMesh | None = None,
    ) -> nn.Module:
        """The transformer: either all instances are hybrid, or the root is sharded over all ranks."""
        hybrid = {
            "sharding_strategy": hsdp_sharding_strategy,
            "auto_wrap_policy": LAYERS,
            "use_orig_params": use_orig_params,
            "device_mesh": hsdp_device_mesh,
        }
        all_hybrid = sharding_strategy_mode is ShardingStrategyMode.ALL_HYBRID_SHARD
        model = TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.RECURSIVE if all_hybrid else FSDPInitMode.NO_FSDP,
            DEVICEInitMode.DEVICE_BEFORE,
            hybrid,
            deterministic=True,
        )
        if all_hybrid:
            return model
        model.transformer = FSDP(model.transformer, **hybrid)
        return FSDP(model, sharding_strategy=ShardingStrategy.FULL_SHARD, use_orig_params=use_orig_params)

    @skip_if_lt_x_gpu(2)
    @subtests(
        hsdp_sharding_strategy=internals.hybrid_strategies,
        sharding_strategy_mode=list(ShardingStrategyMode),
        use_orig_params=[False, True],
        use_device_mesh=[False, True],
    )
    def test_fsdp_hybrid_shard_basic_setup(
        self, hsdp_sharding_strategy, sharding_strategy_mode, use_orig_params, use_device_mesh
    ):
        """One node: all ranks form the shard group, and each replicate group has one rank. All-reduces still run.

        Without a mesh, FSDP makes both groups.
        """
        mesh = init_device_mesh(accelerator.current().type, (1, self.world_size)) if use_device_mesh else None
        with machines_of(self.world_size):
            model = self._init_hsdp_model(
                hsdp_sharding_strategy, sharding_strategy_mode, use_orig_params, hsdp_device_mesh=mesh
            )

        instances = FSDP.fsdp_modules(model)
        hybrid = [each for each in instances if each.sharding_strategy in internals.hybrid_strategies()]
        mixed = sharding_strategy_mode is ShardingStrategyMode.MIXED_HYBRID_FULL_SHARD
        self.assertEqual({each.sharding_strategy for each in hybrid}, {hsdp_sharding_strategy})
        rest = [each.sharding_strategy for each in instances if each not in hybrid]
        self.assertEqual(rest, [ShardingStrategy.FULL_SHARD] if mixed else [], may_be="empty")
        (shard_group,) = {each.process_group for each in hybrid}
        (replicate_group,) = {each._inter_node_pg for each in hybrid}
        self.assertEqual(dist.get_process_group_ranks(shard_group), list(range(self.world_size)))
        self.assertEqual(dist.get_process_group_ranks(replicate_group), [self.rank])

        inputs = model.get_input(self.device)
        loss = model.get_loss(inputs, model(*inputs))
        with recorded() as calls:
            loss.backward()
        counts = {name: [call.name for call in calls].count(name) for name in ("all_reduce", "reduce_scatter")}
        # Four layers and the rest. In the MIXED case, both the transformer and the root hold parts of the rest.
        self.assertEqual(counts, {"all_reduce": 5, "reduce_scatter": 6 if mixed else 5})

    @skip_if_lt_x_gpu(4)
    @subtests(hsdp_sharding_strategy=internals.hybrid_strategies, use_orig_params=[False, True])
    def test_fsdp_hybrid_shard_parity(self, hsdp_sharding_strategy, use_orig_params):
        """On two nodes, FSDP creates both groups itself, and losses match FULL_SHARD."""
        fsdp_model = self._init_fsdp_model(use_orig_params)
        with machines_of(2):
            hsdp_model = self._init_hsdp_model(
                hsdp_sharding_strategy, ShardingStrategyMode.ALL_HYBRID_SHARD, use_orig_params
            )
        groups = [
            dist.get_process_group_ranks(group) for group in (hsdp_model.process_group, hsdp_model._inter_node_pg)
        ]
        self.assertEqual(groups, [[[0, 1], [2, 3]][self.rank // 2], [[0, 2], [1, 3]][self.rank % 2]])
        models = fsdp_model, hsdp_model
        optims = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in models]
        inputs = fsdp_model.module.get_input(self.device)
        ref_losses = []
        for _ in range(5):
            losses = []
            for model, optim in zip(models, optims):
                optim.zero_grad()
                loss = model(*inputs).sum()
                losses.append(loss.detach())
                loss.backward()
                optim.step()
            ref_losses.append(losses[0])
            self.assertEqual(*losses)
        check_losses(ref_losses)

    @skip_if_lt_x_gpu(4)
    @subtests(strategy=internals.hybrid_strategies, use_orig_params=[False, True], use_device_mesh=[False, True])
    def test_parity_on_data_of_each_rank(self, strategy, use_orig_params, use_device_mesh):
        """With data that differs by rank, match FULL_SHARD and a replica averaged by hand."""
        mesh = init_device_mesh(accelerator.current().type, (2, 2)) if use_device_mesh else None
        groups = None if use_device_mesh else self._groups()
        torch.manual_seed(0)
        ref_model = MyModel(3, 7, 5, 1).to(self.device)
        kwargs = {"use_orig_params": use_orig_params, "auto_wrap_policy": LINEARS}
        full = FSDP(copy.deepcopy(ref_model), **kwargs)
        hybrid = FSDP(
            copy.deepcopy(ref_model), process_group=groups, device_mesh=mesh, sharding_strategy=strategy, **kwargs
        )
        models = ref_model, full, hybrid
        # SGD, because Adam would hide a wrong scale of gradients.
        optims = [torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9) for model in models]
        torch.manual_seed(1 + self.rank)
        for _ in range(3):
            inp = torch.randn(4, 3, device=self.device)
            for model, optim in zip(models, optims):
                optim.zero_grad()
                model(inp).square().sum().backward()
                if model is ref_model:
                    average_gradients(model)
                optim.step()
            for model in (full, hybrid):
                self.assertEqual(full_parameters(model), dict(ref_model.named_parameters()))
            for flat_param in internals.flat_params(hybrid):
                self._assert_alike(flat_param.detach(), hybrid._inter_node_pg)

    @skip_if_lt_x_gpu(4)
    def test_what_stays_unsharded(self):
        """After forward, HYBRID_SHARD keeps the root unsharded, _HYBRID_SHARD_ZERO2 all units. Backward frees all."""
        groups = self._groups()
        for strategy in internals.hybrid_strategies():
            model = self._wrapped(MyModel().to(self.device), groups, sharding_strategy=strategy)
            model = FSDP(
                nn.Sequential(model, nn.Linear(10, 1, device=self.device)),
                process_group=groups,
                sharding_strategy=strategy,
                use_orig_params=True,
            )
            for _ in range(2):
                loss = model(torch.randn(2, 10, device=self.device)).sum()
                # The root and the three linears. The model around them has no other parameters.
                flat_params = internals.flat_params(model)
                keeps = strategy is not ShardingStrategy.HYBRID_SHARD
                kept = [internals.is_unsharded(flat_param) for flat_param in flat_params]
                self.assertEqual(kept, [True, keeps, keeps, keeps])
                loss.backward()
                self.assertEqual(
                    [internals.unsharded_buffer(each).untyped_storage().size() for each in flat_params], [0] * 4
                )


class TestHSDPSyncModuleStates(FSDPTestMultiThread):
    world_size = 4

    @skip_if_lt_x_gpu(1)
    def test_hsdp_buffer_sync_from_meta_device(self):
        """All ranks get the states of rank 0, which is the only one that does not start on the meta device."""

        def materialize(module: nn.Module) -> None:
            module.to_empty(device=self.device, recurse=False)
            for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
                tensor.detach().fill_(-1)

        def layers(device: torch.device) -> nn.Sequential:
            return nn.Sequential(nn.Linear(3, 3, device=device), nn.BatchNorm1d(3, device=device))

        expected = layers(self.device)
        for number, tensor in enumerate((*expected.parameters(), *expected.buffers())):
            tensor.detach().fill_(number + 1)
        model = copy.deepcopy(expected) if self.rank == 0 else layers(torch.device("meta"))
        with states_may_be_synced():
            model = FSDP(
                model,
                device_mesh=init_device_mesh(accelerator.current().type, (2, 2)),
                sharding_strategy=ShardingStrategy.HYBRID_SHARD,
                use_orig_params=True,
                sync_module_states=True,
                param_init_fn=materialize,
            )
        self.assertEqual([*full_parameters(model).values()], [param.detach() for param in expected.parameters()])
        with torch_defect("fsdp1_hybrid_shard_leaves_buffers", when=self.rank >= 2):
            self.assertEqual([*model.buffers()], [*expected.buffers()])


instantiate_parametrized_tests(TestFSDPHybridShard)

if __name__ == "__main__":
    run_tests()
