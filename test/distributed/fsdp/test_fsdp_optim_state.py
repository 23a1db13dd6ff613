"""Optimizer state of FSDP1 is saved with the original parameter names and shapes, and can be sharded again.

The new model may have another wrapping, other parameter groups, another parameter order or another number of ranks. The
saved state is compared by name with an unwrapped model that trains alone on the whole batch. With FSDP each rank sees
only its rows of the batch.
"""

from __future__ import annotations

import copy
import functools
import gc
import itertools
import math
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.fsdp import (
    CPUOffload,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import (
    get_required_world_size,
    requires,
    requires_world_size,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPInitMode, FSDPTest, TransformerWithSharedParams
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import flags, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.checkpoint_utils import with_temp_dir
from torch_fsdp_tests.distributed.common_state_dict import copied
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.internals import checkpoint_wrapping, sharded_tensors
from torch_fsdp_tests.fsdp.references import average, average_gradients, full_parameters
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

sys.path.insert(0, str(Path(__file__).parents[2]))
from distributed.fsdp.optim_states import (
    FULL,
    FULL_EVERYWHERE,
    FULL_ON_RANK_0,
    SCATTER_FULL,
    SHARD_FULL,
    SHARDED,
    SHARDS,
    Group,
    NestedModel,
    TestDummyModel,
    Training,
    Trio,
    TwoBlocks,
    Way,
    broadcast,
    by_full_state,
    by_settings,
    by_shards,
    full_of_original_parameters,
    group_of,
    load_into,
    moments_of,
    normal,
    set_state_dict_type,
)

optimizers = torch_names.module("torch.distributed.optim")
state_dict_utils = torch_names.module("torch.distributed._state_dict_utils")

BATCH = 8

MANY_GROUPS = parametrize("use_multiple_param_groups", [False, True])
TYPES = parametrize("state_dict_type", [FULL, SHARDED])


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that Python still holds, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors]
    return {each.data_ptr(): each for each in storages if each.nbytes() > 0}


class StoredInBfloat16(torch.Tensor):
    """An optimizer state that is stored in another format, with no more operators than its optimizer needs."""

    stored: torch.Tensor

    @staticmethod
    def __new__(cls, stored: torch.Tensor) -> StoredInBfloat16:
        self = torch.Tensor._make_wrapper_subclass(cls, stored.shape, dtype=torch.float32, device=stored.device)
        self.stored = stored
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].stored.detach())
        raise NotImplementedError(f"{cls.__name__} has no {func}")


class TestFSDPOptimState(FSDPTest):
    HALVED = {
        "halve_world_size": True,
        "use_multiple_param_groups": True,
        "wrap_alt": True,
        "use_diff_optim_inputs": True,
    }

    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 2)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        # The older interfaces give deprecation warnings. The test of such a warning catches it itself.
        warnings.filterwarnings("ignore", category=FutureWarning)
        super()._run(*args, **kwargs)

    # Training

    def _init_nested_model(
        self,
        wrap: Callable[..., None] | None,
        group: Group = None,
        use_multiple_param_groups: bool = False,
        use_diff_optim_inputs: bool = False,
        **fsdp_kwargs: Any,
    ) -> Training:
        """A nested model with Adam, in FSDP if there is a ``wrap``. Odd ranks may reverse their parameters."""
        model = NestedModel().to(self.device)
        if wrap is not None:
            wrap(model, process_group=group, **fsdp_kwargs)
        optim_input = model.optim_input(use_multiple_param_groups, use_diff_optim_inputs and self.rank % 2 == 1)
        return Training(model, torch.optim.Adam(optim_input, lr=0.01), optim_input)

    def _init_transformer_model(self, mode: FSDPInitMode, group: Group = None) -> Training:
        model = TransformerWithSharedParams.init(
            group or self.process_group,
            mode,
            DEVICEInitMode.DEVICE_BEFORE,
            deterministic=True,
            add_bn=False,  # its statistics would depend on the batch, and each rank has only a part of it
        )
        params = list(model.parameters())
        # The gradient of the attention's key bias is only rounding errors. A smaller eps would enlarge them.
        return Training(model, torch.optim.Adam(params, lr=0.01, eps=1e-3), params)

    def _loss(self, model: nn.Module, iteration: int, rank: int, size: int) -> torch.Tensor:
        """The mean loss over this rank's rows of the batch. Each of the ``size`` ranks has the same number of rows."""
        seed = 1000 + iteration
        if isinstance(getattr(model, "module", model), TransformerWithSharedParams):
            source, target = torch.randint(23, (10, BATCH), generator=torch.Generator().manual_seed(seed)).split([6, 4])
            ids = [tokens.chunk(size, dim=1)[rank].to(self.device) for tokens in (source, target)]
            return F.cross_entropy(model(*ids).flatten(0, -2), ids[1].flatten())
        rows = normal(seed, BATCH, model.features).chunk(size)[rank].to(self.device)
        return model(rows).sum() / len(rows)

    def _train(self, training: Training, iterations: int = 1, group: Group = None) -> list[torch.Tensor]:
        """Train a model in FSDP on this rank's rows, or any other model alone on all rows. Returns the losses.

        FSDP does not reduce gradients of parameters outside it, so they are averaged here.
        """
        model, instances = training.model, FSDP.fsdp_modules(training.model)
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if instances else (0, 1)
        managed = {param for instance in instances for param in instance.parameters()}
        losses = []
        for _ in range(iterations):
            model.zero_grad()
            loss = self._loss(model, training.iteration, rank, size)
            loss.backward()
            if instances:
                outside = [param for param in model.parameters() if param not in managed]
                average([param.grad for param in outside if param.grad is not None], group)
            training.optim.step()
            training.iteration += 1
            losses.append(loss.detach())
        check_losses(losses)
        return losses

    def _train_both(self, run: Training, reference: Training, iterations: int) -> None:
        """Train both, and compare their parameters."""
        self._train(run, iterations)
        self._train(reference, iterations)
        self.assertEqual(full_parameters(run.model), dict(reference.model.named_parameters()))

    # Comparisons

    def _check_same_osd(self, found: dict[str, Any], wanted: dict[str, Any], **tolerance: Any) -> None:
        """Both must have the same keys, states and parameter groups."""
        self.assertGreater(len(wanted["state"]), 0)
        self.assertEqual(found["state"], wanted["state"], exact_device=False, **tolerance)
        self.assertEqual(found["param_groups"], wanted["param_groups"])

    def _check_saved(
        self,
        osd: dict[str, Any],
        reference: Training,
        group: Group = None,
        rank0_only: bool = False,
    ) -> None:
        """States and parameter groups match the reference by name. With ``rank0_only`` other ranks have nothing."""
        if rank0_only and dist.get_rank(group) > 0:
            self.assertEqual(osd, {}, may_be="empty")
            return
        names = {param: name for name, param in reference.model.named_parameters()}
        wanted = {names[param]: state for param, state in reference.optim.state.items()}
        self.assertGreater(len(wanted), 0)
        found = state_dict_utils._gather_state_dict(copied(osd["state"]), pg=group)
        self.assertEqual(found, wanted, exact_device=False)
        groups = [
            {**each, "params": sorted(names[param] for param in each["params"])}
            for each in reference.optim.param_groups
        ]
        self.assertEqual([{**each, "params": sorted(each["params"])} for each in osd["param_groups"]], groups)

    # Loading into another model

    def _target_ranks(self, halve_world_size: bool) -> tuple[bool, Group]:
        """Whether this rank has the target, and the group of those that have it: all ranks, or every second one."""
        every = 2 if halve_world_size else 1
        return self.rank % every == 0, group_of(range(0, self.world_size, every))

    def _nested(
        self,
        halve_world_size: bool = False,
        wrap_alt: bool = False,
        use_multiple_param_groups: bool = False,
        **target_kwargs: bool,
    ) -> Trio:
        """Nested models. ``target_kwargs`` are for the second one only."""
        groups = {"use_multiple_param_groups": use_multiple_param_groups}
        source, reference = self._init_nested_model(NestedModel.wrap, **groups), self._init_nested_model(None, **groups)
        has_target, group = self._target_ranks(halve_world_size)
        if not has_target:
            return Trio(source, None, reference)
        wrap = NestedModel.wrap_alt if wrap_alt else NestedModel.wrap
        return Trio(source, self._init_nested_model(wrap, group, **groups, **target_kwargs), reference, group)

    def _transformers(self, halve_world_size: bool = False) -> Trio:
        init, in_fsdp = self._init_transformer_model, FSDPInitMode.RECURSIVE
        has_target, group = self._target_ranks(halve_world_size)
        return Trio(init(in_fsdp), init(in_fsdp, group) if has_target else None, init(FSDPInitMode.NO_FSDP), group)

    def _train_all(self, models: Trio, iterations: int) -> None:
        """Train the models, and compare the target's parameters with the reference's."""
        self._train(models.source, iterations)
        self._train(models.reference, iterations)
        if models.target is not None:
            self._train(models.target, iterations, models.group)
            wanted = dict(models.reference.model.named_parameters())
            self.assertEqual(full_parameters(models.target.model), wanted)

    def _test_load_optim_state(self, models: Trio, ways: Sequence[Way]) -> None:
        """In each way, save the source's state and load it into the target. All models go on like the reference."""
        self._train_all(models, 3)
        for way in ways:
            with self.subTest(way=way.name):
                saved = way.save(models.source)
                self._check_saved(saved, models.reference, rank0_only=way.rank0_only)
                if models.target is not None:
                    self._load(saved, way, models.target, models)
                self._train_all(models, 1)
        self._train_all(models, 2)

    def _load(self, saved: dict[str, Any], way: Way, target: Training, models: Trio) -> None:
        """Convert the saved state, and the target's own one, for the target. Both must be the state that it has."""
        group = models.group
        own = way.save(target, group)
        self._check_saved(own, models.reference, group, way.rank0_only)
        wanted = copy.deepcopy(target.optim.state_dict())
        self._check_same_osd(way.convert(own, target, group), wanted, rtol=0, atol=0)
        converted = way.convert(saved, target, group)
        # The state of parameters that are not in FSDP here is unchanged, even if it was saved in shards.
        converted["state"] = state_dict_utils._gather_state_dict(converted["state"], pg=group)
        self._check_same_osd(converted, wanted)
        load_into(target.optim, converted)

    # Saving

    @skip_if_lt_x_gpu(2)
    @TYPES
    @MANY_GROUPS
    @parametrize("rank0_only", [False, True])
    @parametrize("use_diff_optim_inputs", [False, True])
    def test_optim_state_dict_nested(
        self, state_dict_type, use_multiple_param_groups, rank0_only, use_diff_optim_inputs
    ):
        """The saved state matches a model without FSDP: on all ranks, on rank 0 only, or in shards."""
        if state_dict_type is SHARDED and rank0_only:
            return self._check_shards_are_for_all_ranks()
        kwargs = {
            "use_multiple_param_groups": use_multiple_param_groups,
            "use_diff_optim_inputs": use_diff_optim_inputs,
        }
        run, reference = self._init_nested_model(NestedModel.wrap, **kwargs), self._init_nested_model(None, **kwargs)
        losses = torch.stack(self._train(run, 3))
        average([losses])
        self.assertEqual(losses, torch.stack(self._train(reference, 3)))
        if state_dict_type is SHARDED:
            return self._check_saved(FSDP.sharded_optim_state_dict(run.model, run.optim), reference)
        for optim_input in (None, run.optim_input):
            with self.subTest(use_optim_input=optim_input is not None):
                osd = FSDP.full_optim_state_dict(run.model, run.optim, optim_input, rank0_only=rank0_only)
                self._check_saved(osd, reference, rank0_only=rank0_only)

    def _check_shards_are_for_all_ranks(self) -> None:
        """``rank0_only`` is only valid for FULL_STATE_DICT."""
        model = NestedModel().to(self.device)
        model.wrap()
        with self.assertRaisesRegex(TypeError, "unexpected keyword argument 'rank0_only'"):
            ShardedOptimStateDictConfig(rank0_only=True)
        with self.assertRaisesRegex(RuntimeError, "Expected optim_state_dict_config of type"):
            FSDP.set_state_dict_type(
                model, SHARDED, ShardedStateDictConfig(), FullOptimStateDictConfig(rank0_only=True)
            )
        optim = torch.optim.Adam(model.parameters())
        words = "rank0_only to be False" if torch_facts.ASSERTIONS_HAVE_MESSAGES else ""
        with self.assertRaisesRegex(AssertionError, words):
            FSDP._optim_state_dict_impl(model, optim, optim.state_dict(), rank0_only=True, full_state_dict=False)

    @skip_if_lt_x_gpu(2)
    def test_full_optim_state_dict_keys(self):
        """States have the names of the model's state dict, even with ignored modules and checkpoint wrappers."""
        model = NestedModel().to(self.device)
        model.wrap(ignore=True)
        checkpoint_wrapping.apply_activation_checkpointing(
            model, check_fn=lambda module: isinstance(module, nn.Sequential)
        )
        self.assertTrue(any(checkpoint_wrapping._CHECKPOINT_PREFIX in name for name, _ in model.named_modules()))
        params = list(model.parameters())
        run = Training(model, torch.optim.Adam(params, lr=1e-3), params)
        self._train(run)
        osd = FSDP.full_optim_state_dict(model, run.optim, rank0_only=False)
        with FSDP.state_dict_type(model, FULL):
            state_dict = model.state_dict()
        self.assertEqual(set(osd["state"]), set(state_dict))
        self.assertEqual(set(state_dict), {name for name, _ in NestedModel().named_parameters()})

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_state_of_a_shared_parameter(self, use_orig_params):
        """Its state has the first name of the parameter, and the values of the plain model's state."""
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4)).to(self.device)
        plain[2].weight = plain[0].weight
        model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (plain, model)]
        x = torch.randn(self.world_size, 3, 4).to(self.device)
        torch.stack([plain(mine).square().sum() for mine in x]).mean().backward()
        model(x[self.rank]).square().sum().backward()
        for optim in optims:
            optim.step()
        set_state_dict_type(model, full_of_original_parameters())
        found = FSDP.optim_state_dict(model, optims[1])
        wanted = {name: optims[0].state[param] for name, param in plain.named_parameters()}
        self.assertEqual(found["state"], wanted, exact_device=False)
        self.assertEqual([group["params"] for group in found["param_groups"]], [list(wanted)])

    @skip_if_lt_x_gpu(2)
    def test_full_optim_state_dict_nested_invalid(self):
        """All ranks raise an error if one of them lacks a state that rank 0 has."""
        model = NestedModel().to(self.device)
        model.wrap()
        params = list(model.parameters())[: None if self.rank == 0 else -1]
        run = Training(model, torch.optim.Adam(params, lr=0.01), params)
        self._train(run, 3)
        message = (
            "FSDP currently requires each rank to have at least the optimizer states needed by rank 0's optimizer "
            "but some ranks are missing some of those states"
        )
        with self.assertRaisesRegex(RuntimeError, message) as raised:
            FSDP.full_optim_state_dict(model, run.optim)
        accused = re.findall(r"Rank (\d+) is missing", str(raised.exception))
        self.assertEqual(accused, [str(rank) for rank in range(1, self.world_size)])

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], use_legacy=[False, True])
    def test_rank0_only_leaves_nothing_elsewhere(self, use_orig_params, use_legacy):
        """The other ranks free the memory that was gathered for rank 0."""
        run = self._init_nested_model(NestedModel.wrap, use_orig_params=use_orig_params)
        self._train(run, 3)
        set_state_dict_type(run.model, FULL_ON_RANK_0)
        save = FSDP.full_optim_state_dict if use_legacy else FSDP.optim_state_dict
        before = live_storages()
        osd = save(run.model, run.optim)
        new = live_storages().keys() - before.keys()
        if self.rank > 0:
            self.assertEqual(osd, {}, may_be="empty")
            # A backend thread may still hold the input and output of the last gather.
            self.assertLessEqual(len(new), 2)
        else:
            self.assertGreater(len(osd["state"]), 2)
            self.assertGreater(len(new), 2)

    # Full state, sharded by each rank

    @skip_if_lt_x_gpu(2)
    @MANY_GROUPS
    @parametrize("wrap_alt", [False, True])
    @parametrize("use_diff_optim_inputs", [False, True])
    def test_shard_full_optim_state_dict_nested(self, **config):
        self._test_load_optim_state(self._nested(**config), SHARD_FULL)

    @requires_world_size(4, least=2)
    def test_shard_full_optim_state_dict_nested_halve_world_size(self):
        self._test_load_optim_state(self._nested(**self.HALVED), SHARD_FULL)

    @requires_world_size(4, least=2)
    def test_shard_full_optim_state_dict_transformer(self):
        self._test_load_optim_state(self._transformers(halve_world_size=True), SHARD_FULL)

    # Full state on rank 0, scattered

    @skip_if_lt_x_gpu(2)
    @MANY_GROUPS
    @parametrize("wrap_alt", [False, True])
    @parametrize("use_diff_optim_inputs", [False, True])
    def test_scatter_full_optim_state_dict_nested(self, **config):
        self._test_load_optim_state(self._nested(**config), SCATTER_FULL)

    @requires_world_size(4, least=2)
    def test_scatter_full_optim_state_dict_nested_halve_world_size(self):
        self._test_load_optim_state(self._nested(**self.HALVED), SCATTER_FULL)

    @requires_world_size(4, least=2)
    def test_scatter_full_optim_state_dict_transformer(self):
        self._test_load_optim_state(self._transformers(halve_world_size=True), SCATTER_FULL)

    # Sharded state

    @skip_if_lt_x_gpu(2)
    def test_flatten_sharded_optim_state_dict_nested(self):
        # LOCAL_STATE_DICT, documented as not supported yet for optimizers, works like shards.
        local = StateDictSettings(StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig())
        ways = [by_shards(), by_settings(SHARDS), by_settings(local)]
        self._test_load_optim_state(self._nested(wrap_alt=True), ways)

    @skip_if_lt_x_gpu(2)
    def test_flatten_sharded_optim_state_dict_transformer(self):
        self._test_load_optim_state(self._transformers(), [by_shards(), by_settings(SHARDS)])

    @requires_world_size(4)
    def test_sharded_state_in_a_group_of_its_own(self):
        """The ranks of a group save the state of their model, while the other ranks have none."""
        reference, group = self._init_nested_model(None), group_of(range(0, self.world_size, 2))
        self._train(reference, 3)
        if self.rank % 2 == 0:
            run = self._init_nested_model(NestedModel.wrap, group)
            self._train(run, 3, group)
            self._check_saved(FSDP.sharded_optim_state_dict(run.model, run.optim, group=group), reference, group)

    @requires_world_size(4)
    def test_uneven_shards(self):
        """Four ranks have 2, 2, 1 and 0 of 5 rows. The last rank also has none of 3 rows."""
        run = self._init_nested_model(NestedModel.wrap)
        self._train(run, 3)
        osd = FSDP.sharded_optim_state_dict(run.model, run.optim)
        for name, shape in {"block2.2.bias_module0.bias": (5,), "block1.weight": (3, 7)}.items():
            state = osd["state"][name]["exp_avg"]
            rows = math.ceil(shape[0] / 4)
            mine = max(0, min(rows, shape[0] - self.rank * rows))
            self.assertEqual(
                [shard.tensor.shape for shard in state.local_shards()],
                [(mine, *shape[1:])] * (mine > 0),
                may_be="empty",
            )
            offsets = [[self.rank * rows, *(0 for _ in shape[1:])]] * (mine > 0)
            self.assertEqual([shard.metadata.shard_offsets for shard in state.local_shards()], offsets, may_be="empty")
            self.assertEqual(state.size(), shape)
        self._test_load_optim_state(self._nested(use_diff_optim_inputs=True), [by_settings(SHARDS)])

    @requires_world_size(4, least=2)
    @subtests(halve_world_size=[True, False], wrap_alt=[True, False])
    def test_use_orig_params(self, halve_world_size, wrap_alt):
        """Save from a model with flat parameters and load into one with original parameters."""
        settings = [full_of_original_parameters(rank0_only) for rank0_only in (False, True)]
        models = self._nested(halve_world_size, wrap_alt, use_orig_params=True)
        ways = [by_settings(each) for each in (settings if halve_world_size else [*settings, SHARDS])]
        self._test_load_optim_state(models, ways)

    # Parameters outside FSDP, and other keys

    @skip_if_lt_x_gpu(2)
    @TYPES
    @parametrize("add_to_fsdp_module", [False, True])
    def test_shard_full_optim_state_dict_unmanaged_params(self, state_dict_type, add_to_fsdp_module):
        self.run_subtests(
            {"use_optim_input": [False, True] if state_dict_type is FULL else [False]},
            self._test_unmanaged_params,
            state_dict_type=state_dict_type,
            add_to_fsdp_module=add_to_fsdp_module,
        )

    def _test_unmanaged_params(
        self, state_dict_type: StateDictType, add_to_fsdp_module: bool, use_optim_input: bool
    ) -> None:
        """A parameter without saved state cannot join a flat parameter with state. Outside FSDP it may."""
        source = self._init_nested_model(NestedModel.wrap)
        self._train(source)
        model = NestedModel().to(self.device)
        model.wrap_with_unmanaged_params(add_to_fsdp_module)
        params = list(model.parameters())
        target = Training(model, torch.optim.Adam(params, lr=1e-3), params)
        way = by_full_state(use_optim_input) if state_dict_type is FULL else by_shards()
        saved = way.save(source)
        if add_to_fsdp_module:
            message = (
                "^All unflattened parameters comprising a single flat parameter must have scalar state with the same "
                "value and dtype"
            )
            with self.assertRaisesRegex(ValueError, message):
                way.convert(saved, target)
            self.assertEqual(target.optim.state_dict()["state"], {}, may_be="empty")
            return
        converted = way.convert(saved, target)
        (skipped,) = set(range(len(params))) - set(converted["state"])
        self.assertIs(params[skipped], model.unmanaged_param)
        moments = torch.randn(2, 5, 5, device=self.device)
        converted["state"][skipped] = {"step": torch.tensor(1.0), "exp_avg": moments[0], "exp_avg_sq": moments[1].abs()}
        converted["param_groups"][0]["params"].insert(skipped, skipped)
        target.optim.load_state_dict(copy.deepcopy(converted))
        self.assertEqual(target.optim.state_dict()["state"], converted["state"])
        self._train(target)
        steps = {int(state["step"]) for state in target.optim.state.values()}
        self.assertEqual(steps, {2, 1})  # the unmanaged parameter is in no loss, so it has no gradient and stays at 1

    @skip_if_lt_x_gpu(2)
    @TYPES
    @MANY_GROUPS
    def test_rekey_optim_state_dict_to_ids(self, state_dict_type, use_multiple_param_groups):
        """With numbers in place of names, an optimizer without FSDP loads FSDP's state."""
        groups, full = {"use_multiple_param_groups": use_multiple_param_groups}, state_dict_type is FULL
        run, plain = self._init_nested_model(NestedModel.wrap, **groups), self._init_nested_model(None, **groups)
        self._train_both(run, plain, 3)
        for use_optim_input in [False, True] if full else [False]:
            with self.subTest(use_optim_input=use_optim_input):
                osd = (by_full_state(use_optim_input) if full else by_shards()).save(run)
                osd = FSDP.rekey_optim_state_dict(
                    broadcast(osd) if full else osd,
                    OptimStateKeyType.PARAM_ID,
                    plain.model,
                    **plain.optim_argument(use_optim_input),
                )
                osd["state"] = state_dict_utils._gather_state_dict(osd["state"])
                self._check_same_osd(osd, plain.optim.state_dict())
                load_into(plain.optim, osd)
                self._train_both(run, plain, 1)
        self._train_both(run, plain, 2)

    @skip_if_lt_x_gpu(2)
    def test_rekey_optim_state_dict_to_names(self):
        """With names in place of numbers, FSDP shards the state of an optimizer without FSDP."""
        run, plain = self._init_nested_model(NestedModel.wrap), self._init_nested_model(None)
        self._train_both(run, plain, 3)
        for use_optim_input in (False, True):
            with self.subTest(use_optim_input=use_optim_input):
                osd = FSDP.rekey_optim_state_dict(
                    plain.optim.state_dict(),
                    OptimStateKeyType.PARAM_NAME,
                    plain.model,
                    **plain.optim_argument(use_optim_input),
                )
                self._check_saved(osd, plain)
                osd = FSDP.shard_full_optim_state_dict(osd, run.model, **run.optim_argument(use_optim_input))
                self._check_same_osd(osd, run.optim.state_dict())
                load_into(run.optim, osd)
                self._train_both(run, plain, 1)
        self._train_both(run, plain, 2)

    @skip_if_lt_x_gpu(2)
    def test_optim_input_warning(self):
        run, plain = self._init_nested_model(NestedModel.wrap), self._init_nested_model(None)
        self._train(run)
        self._train(plain)
        osd = FSDP.full_optim_state_dict(run.model, run.optim, rank0_only=False)
        on_rank_0 = osd if self.rank == 0 else None
        to_id, to_name = OptimStateKeyType.PARAM_ID, OptimStateKeyType.PARAM_NAME
        for owner, function, *args in (
            (run, FSDP.full_optim_state_dict, run.model, run.optim),
            (run, FSDP.shard_full_optim_state_dict, osd, run.model),
            (run, FSDP.scatter_full_optim_state_dict, on_rank_0, run.model),
            (plain, FSDP.rekey_optim_state_dict, osd, to_id, plain.model),
            (plain, FSDP.rekey_optim_state_dict, plain.optim.state_dict(), to_name, plain.model),
        ):
            call = functools.partial(function, *args)
            with self.assertWarnsRegex(FutureWarning, "`optim_input` argument is deprecated"):
                call(optim_input=owner.optim_input)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                call()
            self.assertNotIn("optim_input", " ".join(str(each.message) for each in caught))

    @skip_if_lt_x_gpu(2)
    @TYPES
    def test_save_load_without_0th_param_state(self, state_dict_type):
        """The first parameter has no state, since forward does not use it."""

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin1 = nn.Linear(5, 5)
                self.lin2 = nn.Linear(5, 5)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.relu(self.lin2(x))

        model = Model().to(self.device)
        model.lin1, model.lin2 = FSDP(model.lin1), FSDP(model.lin2)
        model = FSDP(model)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step() -> None:
            optim.zero_grad()
            model(torch.rand(4, 5, device=self.device)).sum().backward()
            optim.step()

        step()
        if state_dict_type is FULL:
            osd = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
            converted = FSDP.shard_full_optim_state_dict(osd, model)
        else:
            osd = FSDP.sharded_optim_state_dict(model, optim)
            converted = FSDP.flatten_sharded_optim_state_dict(osd, model, optim)
        self.assertEqual(set(osd["state"]), {"lin2.weight", "lin2.bias"})
        before = copy.deepcopy(optim.state_dict())
        self.assertEqual(list(before["state"]), [1])
        optim.state.clear()
        optim.load_state_dict(converted)
        self._check_same_osd(optim.state_dict(), before, rtol=0, atol=0)
        step()
        self.assertEqual([int(state["step"]) for state in optim.state.values()], [2])

    @skip_if_lt_x_gpu(2)
    @subtests(without=["weight", "bias"])
    def test_flat_state_without_that_of_a_parameter(self, without):
        """It has zeros in the place of that parameter, and keeps the dtype of the others."""
        plain = nn.Linear(4, 2, device=self.device, dtype=torch.bfloat16)
        optim = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        whole = torch.arange(1.0, 11.0).bfloat16()  # the weight and then the bias
        for values, (name, param) in zip(whole.split([8, 2]), plain.named_parameters()):
            if name == without:
                values.zero_()
            else:
                param.grad = values.view_as(param).to(self.device)
        optim.step()
        osd = FSDP.rekey_optim_state_dict(optim.state_dict(), OptimStateKeyType.PARAM_NAME, plain)
        model = FSDP(copy.deepcopy(plain), device_id=self.device)
        (state,) = FSDP.shard_full_optim_state_dict(osd, model)["state"].values()
        with torch_defect("fsdp1_optim_state_after_a_stateless_parameter_is_lost", when=without == "weight"):
            self.assertEqual(state["momentum_buffer"].cpu(), whole.chunk(2)[self.rank], may_be="zero")

    @skip_if_lt_x_gpu(2)
    @subtests(memory_format=[torch.contiguous_format, torch.channels_last], use_orig_params=[False, True])
    def test_state_in_each_memory_format(self, memory_format, use_orig_params):
        """Each element of a parameter keeps its moment when its state is saved and loaded."""
        plain = nn.Conv2d(2, 3, (1, 2), device=self.device).to(memory_format=memory_format)
        model = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
        set_state_dict_type(model, full_of_original_parameters())
        optims = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model, model)]
        for each in (plain, model):
            each(uniform(3, 2, 2, 2, seed=self.rank)).square().sum().backward()
        average_gradients(plain)
        for optim in optims[:2]:
            optim.step()
        wanted = {name: optims[0].state[param] for name, param in plain.named_parameters()}
        saved = FSDP.optim_state_dict(model, optims[1])
        self.assertEqual(saved["state"], wanted)
        load_into(optims[2], FSDP.optim_state_dict_to_load(model, optims[2], saved))
        loaded = FSDP.optim_state_dict(model, optims[2])["state"]
        with torch_defect("fsdp1_optim_state_in_channels_last_is_reordered", when=memory_format is torch.channels_last):
            self.assertEqual(loaded, wanted)

    @skip_if_lt_x_gpu(2)
    @subtests(saved=["01", "0 1"], use_orig_params=[False, True], reverse=[False, True])
    def test_state_goes_to_the_parameter_of_its_name(self, saved, use_orig_params, reverse):
        """This holds even if the new optimizer has its parameters, or its groups, in another order."""
        layers = [nn.Linear(1, 2, bias=False, device=self.device) for _ in range(2)]
        units = [FSDP(layer, use_orig_params=use_orig_params) for layer in layers]
        model = FSDP(nn.Sequential(*units), device_id=self.device, use_orig_params=use_orig_params)
        params = list(model.parameters())
        optims = [
            torch.optim.SGD(
                [{"params": [params[int(each)] for each in group]} for group in order.split()], momentum=0.9
            )
            for order in (saved, saved[::-1] if reverse else saved)  # "0 1" means two groups
        ]
        for value, param in enumerate(params, start=1):
            param.grad = torch.full_like(param, value + self.rank / 2)
        optims[0].step()
        osd = FSDP.optim_state_dict(model, optims[0])
        load_into(optims[1], FSDP.optim_state_dict_to_load(model, optims[1], osd))
        found = [optims[1].state[param]["momentum_buffer"].flatten().tolist() for param in params]
        with torch_defect("fsdp1_optim_state_follows_the_order_of_groups", when=saved == "0 1" and reverse):
            self.assertEqual(found, [[1 + self.rank / 2], [2 + self.rank / 2]])

    @skip_if_lt_x_gpu(2)
    def test_compatible_with_trec(self):
        """A root outside FSDP, modules that only some ranks have, and an optimizer that uses names as keys."""

        class DenseAndSparse(nn.Module):
            features = 8

            def __init__(self, rank: int) -> None:
                super().__init__()
                self.dense = FSDP(TestDummyModel(), use_orig_params=True)
                self.sparse_name = "sparse0" if rank == 0 else "sparse1"
                self.add_module(self.sparse_name, nn.Sequential(nn.Linear(8, 8), nn.ReLU()))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                sparse = getattr(self, self.sparse_name)(x)
                dist.all_reduce(sparse)
                return self.dense(sparse)

        models = [DenseAndSparse(self.rank).to(self.device) for _ in range(2)]
        models[1].load_state_dict(models[0].state_dict())
        plain = torch.optim.Adam(models[0].parameters(), lr=1e-2)
        named = optimizers._NamedOptimizer(
            models[1].named_parameters(),
            torch.optim.Adam,
            [{"params": list(models[1].parameters())}],
            models[1],
            lr=1e-2,
        )
        runs = [Training(model, optim) for model, optim in zip(models, (plain, named))]
        for run in runs:
            set_state_dict_type(run.model, full_of_original_parameters())
            for param in run.model.parameters():
                param.grad = torch.zeros_like(param)
            run.optim.step()
            self._train(run)

        def check_same() -> None:
            saved, found = (FSDP.optim_state_dict(run.model, run.optim) for run in runs)
            wanted = [name for name, _ in TestDummyModel().named_parameters(prefix="dense")]
            sparse = [f"{models[0].sparse_name}.0.{name}" for name in ("weight", "bias")]
            self.assertEqual(set(found["state"]), {*wanted, *sparse})
            self.assertEqual(found["state"], saved["state"], rtol=0, atol=0)
            for mine, theirs in zip(found["param_groups"], saved["param_groups"], strict=True):
                self.assertEqual({**mine, "params": set(mine["params"])}, {**theirs, "params": set(theirs["params"])})

        check_same()
        saved = copy.deepcopy(FSDP.optim_state_dict(models[1], named))
        self._train(runs[1], 5)
        with self.assertRaises(AssertionError):
            check_same()
        converted = FSDP.optim_state_dict_to_load(models[1], named, saved, is_named_optimizer=True)
        # A named optimizer needs all of its states, even for parameters of which this rank has no elements.
        self.assertEqual(set(converted["state"]), set(named.state_dict()["state"]))
        named.load_state_dict(converted)
        check_same()

    # Details of optim_state_dict

    def _dummy(self, optim_class: type[torch.optim.Optimizer] = torch.optim.Adam, **kwargs: Any) -> Training:
        model = FSDP(TestDummyModel().to(self.device), **kwargs)
        if kwargs.get("use_orig_params"):
            set_state_dict_type(model, full_of_original_parameters())
        return Training(model, optim_class(model.parameters(), lr=1e-2))

    @skip_if_lt_x_gpu(2)
    def test_optim_state_without_param_groups(self):
        """State dicts without parameter groups, as some optimizers use, can be saved and loaded."""
        model = FSDP(nn.Sequential(nn.Linear(2, 4), nn.ReLU()).to(self.device))
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)

        def step() -> None:
            optim.zero_grad()
            model(torch.rand(4, 2, device=self.device)).sum().backward()
            optim.step()

        step()
        original = copy.deepcopy(optim.state_dict())
        wanted = copy.deepcopy(FSDP.optim_state_dict(model, optim, optim_state_dict=original))
        states = {"state": copy.deepcopy(original["state"])}
        osd = FSDP.optim_state_dict(model, optim, optim_state_dict=states)
        self.assertEqual(list(osd), ["state"])
        step()
        self.assertNotEqual(optim.state_dict()["state"], original["state"])
        loaded = FSDP.optim_state_dict_to_load(model, optim, osd)
        self.assertEqual(list(loaded), ["state"])
        optim.load_state_dict({**loaded, "param_groups": original["param_groups"]})
        self._check_same_osd(optim.state_dict(), original, rtol=0, atol=0)
        self._check_same_osd(FSDP.optim_state_dict(model, optim), wanted, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_with_empty_optimizer_state(self):
        run = self._dummy()
        state = run.optim.state_dict()["state"]
        osd = FSDP.optim_state_dict(run.model, run.optim)
        self.assertEqual((state, osd["state"]), ({}, {}), may_be="empty")
        wanted = {name for name, _ in TestDummyModel().named_parameters()}
        self.assertEqual(set(osd["param_groups"][0]["params"]), wanted)

    @skip_if_lt_x_gpu(2)
    def test_interface_arguments(self):
        run = self._dummy()
        model, optim = run.model, run.optim
        self._train(run)
        saved = copy.deepcopy(FSDP.optim_state_dict(model, optim))
        given = copy.deepcopy(optim.state_dict())
        self._check_same_osd(FSDP.optim_state_dict(model, optim, optim_state_dict=given), saved, rtol=0, atol=0)
        host = "cpu"  # the CPU is the subject
        for value in moments_of(saved):
            self.assertEqual((type(value), value.device.type), (torch.Tensor, host))

        self._train(run)
        self.assertNotEqual(FSDP.optim_state_dict(model, optim)["state"], saved["state"])
        FSDP.optim_state_dict_to_load(model, optim, saved, load_directly=True)
        self._check_same_osd(FSDP.optim_state_dict(model, optim), saved, rtol=0, atol=0)
        self._check_same_osd(optim.state_dict(), given, rtol=0, atol=0)

        FSDP.set_state_dict_type(
            model, SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig(offload_to_cpu=False)
        )
        shards = moments_of(FSDP.optim_state_dict(model, optim))
        self.assertEqual(len(shards), 16)
        for value in shards:
            self.assertIsInstance(value, sharded_tensors.ShardedTensor)
            for shard in value.local_shards():
                self.assertEqual(shard.tensor.device, self.device)

        full = FullOptimStateDictConfig(offload_to_cpu=True, rank0_only=True)
        FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), full)
        osd = FSDP.optim_state_dict(model, optim)
        if self.rank > 0:
            self.assertEqual(osd, {}, may_be="empty")
        else:
            kinds = {(type(value), value.device.type) for value in moments_of(osd)}
            self.assertEqual(kinds, {(torch.Tensor, host)})

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], optim_class=[torch.optim.Adam, torch.optim.SGD])
    def test_state_dict_with_none_tensor_state(self, use_orig_params, optim_class):
        """Numbers, None and tensors without dimensions are kept in the state."""
        run = self._dummy(optim_class, use_orig_params=use_orig_params)
        model, optim = run.model, run.optim
        self._train(run)
        mine = [param for param in model.parameters() if param.numel() > 0]
        for param in mine:
            optim.state[param].update(number=2.74, nothing=None, scale=torch.tensor(0.25))
        original = copy.deepcopy(optim.state_dict())
        saved = FSDP.optim_state_dict(model, optim)
        for state in saved["state"].values():
            self.assertEqual((state["number"], state["nothing"]), (2.74, None))
            self.assertEqual(state["scale"], torch.tensor(0.25), exact_device=False)
        self.assertEqual(len(saved["state"]), 8)
        self._train(run)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved))
        self._check_same_osd(optim.state_dict(), original, rtol=0, atol=0)
        self.assertEqual([optim.state[param]["number"] for param in mine], [2.74] * len(mine))

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_states_of_two_dtypes(self, use_orig_params):
        """Beyond upstream: a parameter has a state in bfloat16 beside its moments in float32."""
        run = self._dummy(use_orig_params=use_orig_params)
        self._train(run)
        wanted = {name: param.bfloat16().cpu() for name, param in full_parameters(run.model).items()}
        for param in run.model.parameters():
            if param.numel() > 0:
                run.optim.state[param]["low"] = param.detach().bfloat16()
        with torch_defect("fsdp1_optim_states_of_two_dtypes_raise", when=use_orig_params):
            saved = FSDP.optim_state_dict(run.model, run.optim)
            self.assertEqual({name: state["low"].cpu() for name, state in saved["state"].items()}, wanted)

    @skip_if_lt_x_gpu(2)
    @subtests(is_subclass=[False, True])
    def test_state_of_a_tensor_subclass(self, is_subclass):
        """A state can be a tensor subclass with a storage format of its own."""
        model = FSDP(nn.Linear(2, 2, bias=False, device=self.device), use_orig_params=True)
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        right = full_parameters(model)["weight"].bfloat16().float().cpu()
        for param in model.parameters():
            low = param.detach().bfloat16()
            optim.state[param]["moment"] = StoredInBfloat16(low) if is_subclass else low.float()
        with torch_defect("fsdp1_optim_states_of_a_subclass_raise", when=is_subclass):
            (state,) = FSDP.optim_state_dict(model, optim)["state"].values()
            moment = state["moment"]
            self.assertEqual((moment.stored.float() if is_subclass else moment).cpu(), right, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], rank0_only=[False, True])
    def test_numbers_are_loaded(self, use_orig_params, rank0_only):
        """All ranks load numbers and None, also if rank 0 alone has the saved state."""
        model = FSDP(nn.Linear(2, 2, bias=False, device=self.device), use_orig_params=use_orig_params)
        optim = torch.optim.Adam(model.parameters())
        model(torch.ones(2, device=self.device)).sum().backward()
        optim.step()
        (param,) = model.parameters()
        optim.state[param].update(number=2.74, nothing=None)
        set_state_dict_type(model, full_of_original_parameters(rank0_only))
        osd = FSDP.optim_state_dict(model, optim)
        with torch_defect("fsdp1_numbers_in_optim_state_of_first_rank_raise", when=rank0_only and self.rank == 0):
            (state,) = FSDP.optim_state_dict_to_load(model, optim, osd)["state"].values()
            self.assertEqual((state["number"], state["nothing"]), (2.74, None))

    @skip_if_lt_x_gpu(2)
    @subtests(amsgrad=[(False, False), (True, True), (False, True)])
    def test_kinds_of_state_by_group(self, amsgrad):
        """Each original parameter has the states of its group's options, even if another one in its unit has more."""
        plain = nn.Linear(2, 2, device=self.device)
        model = FSDP(copy.deepcopy(plain), use_orig_params=True)  # each rank has a part of the weight
        set_state_dict_type(model, full_of_original_parameters())
        optims = [
            torch.optim.Adam([{"params": [p], "amsgrad": on} for p, on in zip(each.parameters(), amsgrad)])
            for each in (plain, model)
        ]
        for each in (plain, model):
            each(uniform(3, 2, seed=self.rank)).square().sum().backward()
        average_gradients(plain)
        for optim in optims:
            optim.step()
        wanted = {name: optims[0].state[param] for name, param in plain.named_parameters()}
        with torch_defect("fsdp1_optim_states_of_unlike_groups_raise", when=amsgrad[0] != amsgrad[1]):
            self.assertEqual(FSDP.optim_state_dict(model, optims[1])["state"], wanted)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_with_no_shard(self, use_orig_params):
        strategy = ShardingStrategy.NO_SHARD
        run = self._dummy(use_orig_params=use_orig_params, sharding_strategy=strategy)
        model, optim = run.model, run.optim
        self._train(run)
        original = copy.deepcopy(optim.state_dict())
        saved = copy.deepcopy(FSDP.optim_state_dict(model, optim))
        self._train(run)
        optim.load_state_dict(FSDP.optim_state_dict_to_load(model, optim, saved))
        self._check_same_osd(optim.state_dict(), original, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True])
    def test_state_of_fused_optimizer(self, use_orig_params):
        """A fused optimizer gives and takes its state like any other (#108860)."""
        ref_model = filled(nn.Linear(3, 5)).to(self.device)
        models = [FSDP(copy.deepcopy(ref_model), use_orig_params=use_orig_params) for _ in range(2)]
        for model in models:
            set_state_dict_type(model, full_of_original_parameters())
        runs = [Training(model, torch.optim.AdamW(model.parameters(), fused=True)) for model in models]
        ref_optim = torch.optim.AdamW(ref_model.parameters())

        def step(model: nn.Module, optim: torch.optim.Optimizer, seed: int) -> None:
            model(uniform(2, 3, seed=10 * seed + self.rank)).square().sum().backward()
            if model is ref_model:
                average_gradients(ref_model)
            optim.step()
            optim.zero_grad()

        step(models[0], runs[0].optim, 0)
        models[1].load_state_dict(models[0].state_dict())
        saved = FSDP.optim_state_dict(models[0], runs[0].optim)
        load_into(runs[1].optim, FSDP.optim_state_dict_to_load(models[1], runs[1].optim, saved))
        step(models[1], runs[1].optim, 1)
        for seed in range(2):
            step(ref_model, ref_optim, seed)
        self.assertEqual(full_parameters(models[1]), {name: p.detach() for name, p in ref_model.named_parameters()})

    @skip_if_lt_x_gpu(2)
    def test_no_grad(self):
        """Parameters that are frozen in every other step keep their state, if they have one."""
        model = FSDP(TestDummyModel(no_grad=True).to(self.device), use_orig_params=True)
        set_state_dict_type(model, full_of_original_parameters())
        run = Training(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        for iteration in range(5):
            frozen = iteration % 2 == 0
            for param in model.net1.parameters():
                param.requires_grad_(not frozen)
            self._train(run)
            original = copy.deepcopy(run.optim.state_dict())
            saved = copy.deepcopy(FSDP.optim_state_dict(model, run.optim))
            self.assertEqual(len(saved["state"]), 6 if iteration == 0 else 8)
            steps = {name: int(state["step"]) for name, state in saved["state"].items()}
            self.assertEqual(steps.get("net1.0.weight", 0), (iteration + 1) // 2)
            self.assertEqual(steps["net4.1.bias"], iteration + 1)
            run.optim.state.clear()
            FSDP.optim_state_dict_to_load(model, run.optim, saved, load_directly=True)
            self._check_same_osd(run.optim.state_dict(), original, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_steps_are_apart(self):
        """Each parameter of a saved state has its own step count, which increases by one per step.

        In torch 2.9.1, 2.11.0 and 2.13.0 all parameters of one flat parameter share one step tensor
        (``_unflatten_communicated_optim_state``), also after ``torch.save``. If an optimizer with separate parameters
        loads it, the tensor stays shared and is increased once for each parameter. Minimal: this test.
        """
        model, plain = FSDP(nn.Linear(2, 3, device=self.device)), nn.Linear(2, 3, device=self.device)
        optims = [torch.optim.Adam(each.parameters()) for each in (model, plain)]
        model(torch.randn(4, 2, device=self.device)).sum().backward()
        optims[0].step()
        osd = FSDP.full_optim_state_dict(model, optims[0], rank0_only=False)
        optims[1].load_state_dict(FSDP.rekey_optim_state_dict(osd, OptimStateKeyType.PARAM_ID, plain, optim=optims[1]))
        plain(torch.randn(4, 2, device=self.device)).sum().backward()
        optims[1].step()
        with torch_defect("fsdp1_step_counts_are_shared"):
            self.assertEqual([int(state["step"]) for state in optims[1].state.values()], [2, 2])

    # Damaged states

    @skip_if_lt_x_gpu(2)
    def test_damaged_state_is_refused(self):
        """A damaged state raises an error that names the fault. The optimizer does not change."""
        run = self._init_nested_model(NestedModel.wrap)
        self._train(run, 3)
        model, optim = run.model, run.optim
        set_state_dict_type(model, FULL_EVERYWHERE)
        good = FSDP.optim_state_dict(model, optim)
        before = copy.deepcopy(optim.state_dict()), full_parameters(model)

        def shape(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = state["block1.weight"]["exp_avg"].t()

        def dtype(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = state["block1.weight"]["exp_avg"].double()

        def names(state: dict[str, Any]) -> None:
            del state["block1.weight"]["exp_avg"]

        def kind(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = 1.0

        def dimension(state: dict[str, Any]) -> None:
            state["block1.weight"]["exp_avg"] = torch.tensor(1.0)

        def steps(state: dict[str, Any]) -> None:
            state["block1.weight"]["step"] = torch.tensor(7.0)

        def parameter(state: dict[str, Any]) -> None:
            del state["block1.bias_module1.bias"]

        for damage, message in {
            shape: "Tensor optimizer state does not have same shape as its parameter",
            dtype: "must have positive-dimension tensor state with the same dtype",
            names: "Differing optimizer state names for the unflattened parameters",
            kind: "Differing optimizer state types for state exp_avg",
            dimension: "Differing optimizer state types for state exp_avg",
            steps: "must have scalar state with the same value and dtype",
            parameter: "must have scalar state with the same value and dtype",
        }.items():
            osd = copy.deepcopy(good)
            damage(osd["state"])
            with self.subTest(damage.__name__), self.assertRaisesRegex(ValueError, message):
                FSDP.optim_state_dict_to_load(model, optim, osd, load_directly=True)
        with self.assertRaisesRegex(ValueError, '`optim_state_dict` must have the keys "state"'):
            FSDP.optim_state_dict_to_load(model, optim, {"param_groups": []}, load_directly=True)
        unknown = copy.deepcopy(good)
        unknown["param_groups"][0]["params"].append("nowhere.bias")
        with self.assertRaisesRegex(KeyError, "nowhere.bias"):
            FSDP.optim_state_dict_to_load(model, optim, unknown, load_directly=True)
        self._check_same_osd(optim.state_dict(), before[0], rtol=0, atol=0)
        self.assertEqual(full_parameters(model), before[1], rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_state_of_a_wrong_shape_is_refused_with_original_parameters(self):
        """A state of the wrong shape is an error, as with flat parameters, and is not loaded.

        torch 2.9.1, 2.11.0 and 2.13.0 cut the given state (``_shard_orig_param_state``) without a look at its shape, so
        a transposed state is loaded in the wrong order. Minimal: ``FSDP(nn.Linear(2, 3), use_orig_params=True)``, one
        step of Adam, ``osd = FSDP.optim_state_dict(model, optim)``, transpose ``osd["state"]["weight"]["exp_avg"]`` and
        call ``FSDP.optim_state_dict_to_load(model, optim, osd)``.
        """
        model = FSDP(nn.Linear(2, 3, device=self.device), use_orig_params=True)
        optim = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 2, device=self.device)).sum().backward()
        optim.step()
        set_state_dict_type(model, FULL_EVERYWHERE)
        osd = FSDP.optim_state_dict(model, optim)
        osd["state"]["weight"]["exp_avg"] = osd["state"]["weight"]["exp_avg"].t()
        with torch_defect("fsdp1_transposed_optim_state_is_loaded"), self.assertRaises(ValueError):
            FSDP.optim_state_dict_to_load(model, optim, osd)

    @requires(lambda: "here offloading copies" if accelerator.current().has("device_memory") else None)
    def test_offloaded_state_of_original_parameters(self):
        """With or without offloading, ``exp_avg`` is the average, not a state gathered later.

        torch 2.9.1, 2.11.0 and 2.13.0 gather the states of a parameter one after another into the same tensor
        (``_allgather_orig_param_states``) and rely on offloading to copy it. On the CPU offloading does not copy, so
        all states equal the last one. Offloading is the default. Minimal: ``FSDP(nn.Linear(2, 3),
        use_orig_params=True)`` on two ranks, one step of Adam, and ``FSDP.optim_state_dict(model, optim)``.
        """
        model = FSDP(nn.Linear(2, 3, device=self.device), use_orig_params=True)
        optim = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 2, device=self.device)).sum().backward()
        optim.step()
        osds = []
        for offload_to_cpu in (False, True):
            config = FullOptimStateDictConfig(offload_to_cpu=offload_to_cpu)
            FSDP.set_state_dict_type(model, FULL, FullStateDictConfig(), config)
            osds.append(FSDP.optim_state_dict(model, optim))
        with torch_defect("fsdp1_offloaded_optim_states_are_one"):
            self._check_same_osd(*osds)

    # On disk

    @requires_world_size(4)
    @with_temp_dir
    def test_checkpoint_on_disk(self):
        """A checkpoint loads on as many, more or fewer ranks, and training goes on unchanged."""
        groups = {size: group_of(range(size)) for size in (4, 2, 1)}
        kinds = [SHARDS, FULL_EVERYWHERE, FULL_ON_RANK_0]
        # All pairs of sizes, kind and parameters are tested; all triples only if slow tests are enabled.
        for number, (saved_by, settings) in enumerate(itertools.product([4, 2], kinds)):
            path, orig = os.path.join(self.temp_dir, str(number)), number % 2 == 1
            if self.rank < saved_by:
                run = self._init_two_blocks(orig, groups[saved_by])
                self._train(run, 3, groups[saved_by])
                state = self._state_on_disk(run, settings, orig, groups[saved_by])
                dcp.save(state, checkpoint_id=path, process_group=groups[saved_by])
            dist.barrier()
            for also_orig, loaded_by in enumerate([4, 2, 1] if saved_by == 4 else [4]):
                which = [False, True] if flags.TEST_WITH_SLOW else [(number + also_orig) % 2 == 1]
                config = {"loaded_by": [loaded_by], "use_orig_params": which, "settings": [settings]}
                self.run_subtests(config, self._test_load_from_disk, path, groups)

    def _init_two_blocks(self, use_orig_params: bool | None, group: Group = None) -> Training:
        """The blocks in FSDP, with original or with flat parameters. None means without FSDP."""
        model = TwoBlocks().to(self.device)
        if use_orig_params is not None:
            # Only flat parameters are offloaded: the two options are independent, so not all pairs are needed.
            offload = CPUOffload(not use_orig_params)
            model.wrap(use_orig_params=use_orig_params, cpu_offload=offload, process_group=group)
        return Training(model, torch.optim.Adam(model.parameters(), lr=0.01))

    def _state_on_disk(
        self, run: Training, settings: StateDictSettings, use_orig_params: bool, group: Group
    ) -> dict[str, Any]:
        settings = copy.deepcopy(settings)
        offload, has_copies = not use_orig_params, accelerator.current().has("device_memory")
        settings.optim_state_dict_config.offload_to_cpu = offload
        # On the host, offloading does not copy a full state dict, and its memory is freed.
        settings.state_dict_config.offload_to_cpu = offload and (settings.state_dict_type is SHARDED or has_copies)
        set_state_dict_type(run.model, settings)
        osd = FSDP.optim_state_dict(run.model, run.optim, group=group)
        # Without parameter groups; test_load_where_a_rank_has_no_rows says why.
        return {"model": run.model.state_dict(), "optim": osd.get("state", {})}

    def _test_load_from_disk(
        self,
        path: str,
        groups: dict[int, Group],
        loaded_by: int,
        settings: StateDictSettings,
        use_orig_params: bool,
    ) -> None:
        if self.rank >= loaded_by:
            return
        reference, group = self._init_two_blocks(None), groups[loaded_by]
        self._train(reference, 3)
        run = self._init_two_blocks(use_orig_params, group)
        run.iteration = 50  # not part of the training: these steps must be undone by the load
        self._train(run, 1, group)
        self.assertNotEqual(full_parameters(run.model), dict(reference.model.named_parameters()))
        state = self._state_on_disk(run, settings, use_orig_params, group)
        dcp.load(state, checkpoint_id=path, process_group=group)
        run.model.load_state_dict(state["model"])
        osd = FSDP.optim_state_dict(run.model, run.optim, group=group)
        osd = {**osd, "state": state["optim"]} if osd else {}
        FSDP.optim_state_dict_to_load(run.model, run.optim, osd, load_directly=True, group=group)
        osd = FSDP.optim_state_dict(run.model, run.optim, group=group)
        self._check_saved(osd, reference, group, by_settings(settings).rank0_only)
        run.iteration = reference.iteration
        self._train(run, 3, group)
        self._train(reference, 3)
        self.assertEqual(full_parameters(run.model), dict(reference.model.named_parameters()), exact_device=False)

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_load_where_a_rank_has_no_rows(self):
        """An optimizer state dict loads from disk even if a rank has no rows of a parameter.

        In torch 2.9.1, 2.11.0 and 2.13.0 ``DefaultLoadPlanner`` drops a ShardedTensor without a local shard. It then
        misses the tensor's name, assumes a checkpoint of torch 2.3, and fails on "optim.param_groups". Minimal: this
        test.
        """
        model = FSDP(nn.Linear(3, 1, device=self.device))
        optim = torch.optim.Adam(model.parameters())
        model(torch.randn(4, 3, device=self.device)).sum().backward()
        optim.step()
        set_state_dict_type(model, SHARDS)
        saved = {"optim": FSDP.optim_state_dict(model, optim)}
        dcp.save(saved, checkpoint_id=self.temp_dir)
        loaded = {"optim": FSDP.optim_state_dict(model, optim)}
        with torch_defect("dcp_checkpoint_of_empty_shards_is_not_loaded"):
            try:
                dcp.load(loaded, checkpoint_id=self.temp_dir)
            except CheckpointException as error:  # a BaseException, which is no expected failure to unittest
                self.fail(str(error))
            self.assertEqual(*(state_dict_utils._gather_state_dict(each["optim"]["state"]) for each in (loaded, saved)))

    @skip_if_lt_x_gpu(2)
    @with_temp_dir
    def test_damaged_checkpoint(self):
        """Every rank gets the error. Model and optimizer train on as if nothing had been loaded."""
        # The root is wrapped too: parameters outside FSDP would be loaded in place.
        model = FSDP(self._init_nested_model(NestedModel.wrap).model)
        run, reference = Training(model, torch.optim.Adam(model.parameters(), lr=0.01)), self._init_nested_model(None)
        self._train_both(run, reference, 3)
        set_state_dict_type(model, SHARDS)

        def state() -> dict[str, Any]:
            return {"model": run.model.state_dict(), "optim": FSDP.optim_state_dict(run.model, run.optim)}

        def save(name: str, damage: Callable[[dict[str, Any]], object] = lambda states: None) -> str:
            path, saved = os.path.join(self.temp_dir, name), state()
            for key in saved["model"]:  # every value in the file differs from the model's
                saved["model"][key] = torch.zeros_like(saved["model"][key])
            damage(saved["optim"]["state"]["block1.weight"])
            dcp.save(saved, checkpoint_id=path)
            return path

        def on_rank_0(damage: Callable[[], object]) -> None:
            if self.rank == 0:
                damage()
            dist.barrier()

        good = save("good")
        copies = {name: os.path.join(self.temp_dir, name) for name in ("missing", "truncated", "headless")}
        on_rank_0(lambda: [shutil.copytree(good, path) for path in copies.values()])
        second = "__1_0.distcp"
        on_rank_0(lambda: os.remove(os.path.join(copies["missing"], second)))
        on_rank_0(lambda: os.truncate(os.path.join(copies["truncated"], second), 100))
        on_rank_0(lambda: os.remove(os.path.join(copies["headless"], ".metadata")))
        shape = save("shape", lambda state: state.update(exp_avg=torch.zeros(3, 8)))
        key = save("key", lambda state: state.pop("exp_avg"))

        before = copy.deepcopy(run.optim.state_dict()), full_parameters(run.model)
        for path, message in {
            copies["missing"]: second,
            copies["truncated"]: "PytorchStreamReader failed|EOFError|unexpected end",
            copies["headless"]: r"\.metadata|metadata is (not )?None",
            shape: "Size mismatch between saved .* and current: .* for optim.state.block1.weight.exp_avg",
            key: "Missing key in checkpoint state_dict: optim.state.block1.weight.exp_avg",
        }.items():
            with self.subTest(os.path.basename(path)), self.assertRaisesRegex(CheckpointException, message):
                dcp.load(state(), checkpoint_id=path)
        self._check_same_osd(run.optim.state_dict(), before[0], rtol=0, atol=0)
        self.assertEqual(full_parameters(run.model), before[1], rtol=0, atol=0)
        self._train_both(run, reference, 3)


instantiate_parametrized_tests(TestFSDPOptimState)

if __name__ == "__main__":
    run_tests()
