"""Optimizer state of FSDP1 is saved with the names and shapes of the plain model, and can be sharded again.

The new model may have another wrapping, other parameter groups, another parameter order or another number of ranks. The
saved state is compared by name with an unwrapped model that trains alone on the whole batch. With FSDP each rank sees
only its rows of the batch.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import math
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
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

from torch_fsdp_tests.common_distributed import requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPInitMode, TransformerWithSharedParams
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.internals import checkpoint_wrapping, sharded_tensors
from torch_fsdp_tests.fsdp.optim_states import (
    FULL,
    FULL_EVERYWHERE,
    FULL_ON_RANK_0,
    SHARDED,
    SHARDS,
    Group,
    NestedModel,
    OptimStateTest,
    TestDummyModel,
    Training,
    full_with_orig_params,
    gathered,
    group_of,
    load_into,
    set_state_dict_type,
)
from torch_fsdp_tests.fsdp.references import average
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

optimizers = torch_names.module("torch.distributed.optim")


MANY_GROUPS = parametrize("use_multiple_param_groups", [False, True])
TYPES = parametrize("state_dict_type", [FULL, SHARDED])
# All that can differ between the model that loads and the one that saved, except for its ranks.
OTHER = {"use_multiple_param_groups": True, "wrap_alt": True, "use_diff_optim_inputs": True}

# One whose state is saved; one that loads it, or None on ranks outside its group; and one without FSDP.
Models: TypeAlias = "tuple[Training, Training | None, Training]"


@dataclasses.dataclass(frozen=True)
class Way:
    """A pair of FSDP functions: one saves optimizer state, the other converts it for another model's optimizer."""

    name: str
    save: Callable[[Training], dict[str, Any]]
    convert: Callable[[dict[str, Any], Training], dict[str, Any]]
    rank0_only: bool = False  # whether the other ranks save nothing


def by_settings(settings: StateDictSettings) -> Way:
    """``optim_state_dict`` and ``optim_state_dict_to_load``, with these state dict settings."""

    def save(training: Training) -> dict[str, Any]:
        set_state_dict_type(training.model, settings)
        return FSDP.optim_state_dict(training.model, training.optim, group=training.group)

    def convert(osd: dict[str, Any], training: Training) -> dict[str, Any]:
        return FSDP.optim_state_dict_to_load(training.model, training.optim, osd, group=training.group)

    return Way(str(settings), save, convert, getattr(settings.optim_state_dict_config, "rank0_only", False))


def by_full_state(use_optim_input: bool, scatter: bool = False) -> Way:
    """The older functions for a full optimizer state, which rank 0 has. Rank 0 broadcasts it, or with ``scatter``
    scatters its shards.

    With ``use_optim_input`` the functions get the optimizer's parameters instead of the optimizer.
    """

    def save(training: Training) -> dict[str, Any]:
        optim_input = training.optim_input if use_optim_input else None
        return FSDP.full_optim_state_dict(training.model, training.optim, optim_input, group=training.group)

    def convert(osd: dict[str, Any], training: Training) -> dict[str, Any]:
        optim = training.optim_argument(use_optim_input)
        if not scatter:
            return FSDP.shard_full_optim_state_dict(broadcast(osd, training.group), training.model, **optim)
        on_rank_0 = osd if dist.get_rank(training.group) == 0 else None
        return FSDP.scatter_full_optim_state_dict(on_rank_0, training.model, group=training.group, **optim)

    return Way(f"full state, {use_optim_input=}, {scatter=}", save, convert, rank0_only=True)


def by_shards() -> Way:
    """The older functions for a sharded optimizer state: each rank saves its shards and flattens them for a load."""

    def save(training: Training) -> dict[str, Any]:
        return FSDP.sharded_optim_state_dict(training.model, training.optim, group=training.group)

    def convert(osd: dict[str, Any], training: Training) -> dict[str, Any]:
        return FSDP.flatten_sharded_optim_state_dict(osd, training.model, training.optim)

    return Way("shards", save, convert)


# The older functions, called with the optimizer and with its parameters, and then the functions that replaced them.
SHARD_FULL = [by_full_state(False), by_full_state(True), by_settings(FULL_EVERYWHERE)]
SCATTER_FULL = [by_full_state(False, scatter=True), by_full_state(True, scatter=True), by_settings(FULL_ON_RANK_0)]


def every_second_rank() -> Group:
    return group_of(range(0, dist.get_world_size(), 2))


def broadcast(osd: dict[str, Any], group: Group = None) -> dict[str, Any]:
    """Rank 0's state, on every rank."""
    objects = [osd]
    dist.broadcast_object_list(objects, src=0, group=group)
    return objects[0]


def moments_of(osd: dict[str, Any]) -> list[Any]:
    """The states that have the shape of their parameter, which are all but the step counts."""
    values = [value for states in osd["state"].values() for value in states.values()]
    return [value for value in values if torch.is_tensor(value) and value.dim() > 0]


def live_storages() -> dict[int, torch.UntypedStorage]:
    """The memory of all tensors that Python still holds, by address."""
    gc.collect()
    tensors = [each for each in gc.get_objects() if type(each) in (torch.Tensor, nn.Parameter)]
    storages = [each.untyped_storage() for each in tensors]
    return {each.data_ptr(): each for each in storages if each.nbytes() > 0}


class TestFSDPOptimState(OptimStateTest):
    power_of_two_ranks = True

    def _nested_models(
        self, group: Group = None, wrap_alt: bool = False, use_multiple_param_groups: bool = False, **kwargs: bool
    ) -> Models:
        """``wrap_alt`` and ``kwargs`` are for the second one only."""
        init = functools.partial(self._init_nested_model, use_multiple_param_groups=use_multiple_param_groups)
        wrap = NestedModel.wrap_alt if wrap_alt else NestedModel.wrap
        loading = init(wrap, group, **kwargs) if dist.get_rank(group) >= 0 else None
        return init(NestedModel.wrap), loading, init(None)

    def _transformers(self, group: Group = None) -> Models:
        def init(mode: FSDPInitMode, group: Group = None) -> Training:
            model = TransformerWithSharedParams.init(
                group or self.process_group,
                mode,
                DEVICEInitMode.DEVICE_BEFORE,
                deterministic=True,
                add_bn=False,  # its statistics would depend on the batch, and each rank has only a part of it
            )
            params = list(model.parameters())
            # The gradient of the attention's key bias is only rounding errors. A smaller eps would enlarge them.
            return Training(model, torch.optim.Adam(params, lr=0.01, eps=1e-3), params, group)

        loading = init(FSDPInitMode.RECURSIVE, group) if dist.get_rank(group) >= 0 else None
        return init(FSDPInitMode.RECURSIVE), loading, init(FSDPInitMode.NO_FSDP)

    def _check_load(self, models: Models, ways: Sequence[Way]) -> None:
        """In each way, load the state of the first model into the second one. Then all models train alike.

        Both that state and the second model's own one, saved and converted, must equal the state that it has.
        """
        saving, loading, plain = models
        self._train_alike(plain, saving, loading, iterations=3)
        for way in ways:
            with self.subTest(way=way.name):
                saved = way.save(saving)
                self._check_saved(saved, plain, rank0_only=way.rank0_only)
                if loading is not None:
                    expected = copy.deepcopy(loading.optim.state_dict())
                    own = way.save(loading)
                    self._check_saved(own, plain, loading.group, way.rank0_only)
                    self._check_same_osd(way.convert(own, loading), expected, rtol=0, atol=0)
                    converted = way.convert(saved, loading)
                    # The state of parameters that are not in FSDP here is unchanged, even if it was saved in shards.
                    converted["state"] = gathered(converted["state"], loading.group)
                    self._check_same_osd(converted, expected)
                    load_into(loading.optim, converted)
                self._train_alike(plain, saving, loading)
        self._train_alike(plain, saving, loading, iterations=2)

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
        """The state of a shared parameter has the parameter's first name, and the values of the plain model's state."""
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
        set_state_dict_type(model, full_with_orig_params())
        actual = FSDP.optim_state_dict(model, optims[1])
        expected = {name: optims[0].state[param] for name, param in plain.named_parameters()}
        self.assertEqual(actual["state"], expected, exact_device=False)
        self.assertEqual([group["params"] for group in actual["param_groups"]], [list(expected)])

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
        self._check_load(self._nested_models(**config), SHARD_FULL)

    @requires_world_size(4, least=2)
    def test_shard_full_optim_state_dict_nested_halve_world_size(self):
        self._check_load(self._nested_models(every_second_rank(), **OTHER), SHARD_FULL)

    @requires_world_size(4, least=2)
    def test_shard_full_optim_state_dict_transformer(self):
        self._check_load(self._transformers(every_second_rank()), SHARD_FULL)

    # Full state on rank 0, scattered

    @skip_if_lt_x_gpu(2)
    @MANY_GROUPS
    @parametrize("wrap_alt", [False, True])
    @parametrize("use_diff_optim_inputs", [False, True])
    def test_scatter_full_optim_state_dict_nested(self, **config):
        self._check_load(self._nested_models(**config), SCATTER_FULL)

    @requires_world_size(4, least=2)
    def test_scatter_full_optim_state_dict_nested_halve_world_size(self):
        self._check_load(self._nested_models(every_second_rank(), **OTHER), SCATTER_FULL)

    @requires_world_size(4, least=2)
    def test_scatter_full_optim_state_dict_transformer(self):
        self._check_load(self._transformers(every_second_rank()), SCATTER_FULL)

    # Sharded state

    @skip_if_lt_x_gpu(2)
    def test_flatten_sharded_optim_state_dict_nested(self):
        # LOCAL_STATE_DICT, documented as not supported yet for optimizers, works like shards.
        local = StateDictSettings(StateDictType.LOCAL_STATE_DICT, LocalStateDictConfig(), LocalOptimStateDictConfig())
        ways = [by_shards(), by_settings(SHARDS), by_settings(local)]
        self._check_load(self._nested_models(wrap_alt=True), ways)

    @skip_if_lt_x_gpu(2)
    def test_flatten_sharded_optim_state_dict_transformer(self):
        self._check_load(self._transformers(), [by_shards(), by_settings(SHARDS)])

    @requires_world_size(4)
    def test_sharded_state_in_a_group_of_its_own(self):
        """The ranks of a group save the state of their model, while the other ranks have none."""
        reference, group = self._init_nested_model(None), every_second_rank()
        self._train(reference, 3)
        if self.rank % 2 == 0:
            run = self._init_nested_model(NestedModel.wrap, group)
            self._train(run, 3)
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
        self._check_load(self._nested_models(use_diff_optim_inputs=True), [by_settings(SHARDS)])

    @requires_world_size(4, least=2)
    @subtests(halve_world_size=[True, False], wrap_alt=[True, False])
    def test_use_orig_params(self, halve_world_size, wrap_alt):
        """Save from a model with flat parameters and load into one with ``use_orig_params=True``."""
        settings = [full_with_orig_params(rank0_only) for rank0_only in (False, True)]
        models = self._nested_models(every_second_rank() if halve_world_size else None, wrap_alt, use_orig_params=True)
        ways = [by_settings(each) for each in (settings if halve_world_size else [*settings, SHARDS])]
        self._check_load(models, ways)

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
        self._train_alike(plain, run, iterations=3)
        for use_optim_input in [False, True] if full else [False]:
            with self.subTest(use_optim_input=use_optim_input):
                osd = (by_full_state(use_optim_input) if full else by_shards()).save(run)
                osd = FSDP.rekey_optim_state_dict(
                    broadcast(osd) if full else osd,
                    OptimStateKeyType.PARAM_ID,
                    plain.model,
                    **plain.optim_argument(use_optim_input),
                )
                osd["state"] = gathered(osd["state"])
                self._check_same_osd(osd, plain.optim.state_dict())
                load_into(plain.optim, osd)
                self._train_alike(plain, run)
        self._train_alike(plain, run, iterations=2)

    @skip_if_lt_x_gpu(2)
    def test_rekey_optim_state_dict_to_names(self):
        """With names in place of numbers, FSDP shards the state of an optimizer without FSDP."""
        run, plain = self._init_nested_model(NestedModel.wrap), self._init_nested_model(None)
        self._train_alike(plain, run, iterations=3)
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
                self._train_alike(plain, run)
        self._train_alike(plain, run, iterations=2)

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
        """States are saved and loaded if the first parameter has none, because forward does not use it."""

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
            set_state_dict_type(run.model, full_with_orig_params())
            for param in run.model.parameters():
                param.grad = torch.zeros_like(param)
            run.optim.step()
            self._train(run)

        def check_same() -> None:
            saved, actual = (FSDP.optim_state_dict(run.model, run.optim) for run in runs)
            expected = [name for name, _ in TestDummyModel().named_parameters(prefix="dense")]
            sparse = [f"{models[0].sparse_name}.0.{name}" for name in ("weight", "bias")]
            self.assertEqual(set(actual["state"]), {*expected, *sparse})
            self.assertEqual(actual["state"], saved["state"], rtol=0, atol=0)
            for mine, theirs in zip(actual["param_groups"], saved["param_groups"], strict=True):
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
        expected = copy.deepcopy(FSDP.optim_state_dict(model, optim, optim_state_dict=original))
        states = {"state": copy.deepcopy(original["state"])}
        osd = FSDP.optim_state_dict(model, optim, optim_state_dict=states)
        self.assertEqual(list(osd), ["state"])
        step()
        self.assertNotEqual(optim.state_dict()["state"], original["state"])
        loaded = FSDP.optim_state_dict_to_load(model, optim, osd)
        self.assertEqual(list(loaded), ["state"])
        optim.load_state_dict({**loaded, "param_groups": original["param_groups"]})
        self._check_same_osd(optim.state_dict(), original, rtol=0, atol=0)
        self._check_same_osd(FSDP.optim_state_dict(model, optim), expected, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_with_empty_optimizer_state(self):
        run = self._dummy()
        state = run.optim.state_dict()["state"]
        osd = FSDP.optim_state_dict(run.model, run.optim)
        self.assertEqual((state, osd["state"]), ({}, {}), may_be="empty")
        expected = {name for name, _ in TestDummyModel().named_parameters()}
        self.assertEqual(set(osd["param_groups"][0]["params"]), expected)

        named = optimizers._NamedOptimizer(run.model.named_parameters(), torch.optim.SGD, None, run.model, lr=1e-2)
        # FSDP1 recognizes a named optimizer by the keys of its state, of which there are none.
        self.assertRaisesRegex(KeyError, "_fsdp_wrapped_module", FSDP.optim_state_dict, run.model, named)

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
    def test_no_grad(self):
        """Parameters that are frozen in every other step keep their state, if they have one."""
        model = FSDP(TestDummyModel(no_grad=True).to(self.device), use_orig_params=True)
        set_state_dict_type(model, full_with_orig_params())
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
    @subtests(
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
        use_orig_params=[False, True],
    )
    def test_state_between_forward_and_backward(self, sharding_strategy, use_orig_params):
        """The state of the last step is saved after a forward, unless it hides the parameters. The backward works."""
        wrap = functools.partial(FSDP, sharding_strategy=sharding_strategy, use_orig_params=use_orig_params)
        model = wrap(nn.Sequential(wrap(nn.Linear(2, 3)), nn.Linear(3, 2)).to(self.device))
        optim = torch.optim.Adam(model.parameters())
        set_state_dict_type(model, FULL_EVERYWHERE)
        inp = torch.randn(4, 2, device=self.device)
        model(inp).sum().backward()
        optim.step()
        expected = copy.deepcopy(FSDP.optim_state_dict(model, optim))
        loss = model(inp).square().sum()
        if use_orig_params and sharding_strategy is ShardingStrategy.SHARD_GRAD_OP:  # views are in their place
            self.assertRaisesRegex(KeyError, "Parameter containing", FSDP.optim_state_dict, model, optim)
        else:
            self._check_same_osd(FSDP.optim_state_dict(model, optim), expected, rtol=0, atol=0)
        loss.backward()


instantiate_parametrized_tests(TestFSDPOptimState)


if __name__ == "__main__":
    run_tests()
