"""Distributed state dicts (DSD) of models and optimizers under FSDP1, FSDP2, DDP and TP.

Names and values are compared with those of a plain model, which is trained with the mean of all ranks' gradients.
Loaded values must be bitwise equal, and training must continue like that of the plain model.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_dist_composable import CompositeParamModel, UnitModule
from torch_fsdp_tests.common_distributed import requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp.substitutes import to_host_is_a_copy
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import NO_DEFECT, torch_defect
from torch_fsdp_tests.distributed.common_state_dict import (
    EXACT,
    copied,
    is_sharded,
    whole_tree,
)
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.state_dict_pairs import ModelPair, Optimizers, StateDictTest
from torch_fsdp_tests.fsdp.training import shard_each, train

DIM = 7  # odd, so that two ranks have unequal shards
FULL = StateDictOptions(full_state_dict=True)
FULL_ON_HOST = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ADAMS = [torch.optim.Adam, torch.optim.AdamW]
BACKEND = "eager"  # the names of parameters do not depend on the backend, and this one is fast


def checkpointed(model: nn.Module) -> nn.Module:
    """Wrap each linear layer and each unit of the model for activation checkpointing. Returns the model."""
    apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, (nn.Linear, UnitModule)))
    return model


class TestStateDict(StateDictTest):
    def _composite(self, seed: int, distribute: Callable[[Any], Any], optim_cls: type, **kwargs: Any) -> ModelPair:
        """A pair of upstream's model; ``kwargs`` are those of :class:`Optimizers`."""
        manual_seed(seed)
        return self._pair(CompositeParamModel(self.device, DIM), distribute, Optimizers(optim_cls, **kwargs), width=DIM)

    def _fsdp1(self, model: nn.Module, **kwargs: Any) -> FSDP:
        kwargs = {"auto_wrap_policy": ModuleWrapPolicy({UnitModule}), "use_orig_params": True, **kwargs}
        return FSDP(model, **kwargs)

    def _fsdp2(self, model: Any, **kwargs: Any) -> Any:
        return shard_each((model.u1, model.u2, model), **kwargs)

    def _test_save_load(
        self,
        init: Callable[[int], ModelPair],
        flatten_optimizer: bool = False,
        load_shows: torch_defect = NO_DEFECT,
    ) -> None:
        """Save and load the model and optimizer state, and continue training.

        ``init(seed)`` builds a pair with values that depend on the seed. ``load_shows`` is a known defect of the load.
        """
        options = StateDictOptions(flatten_optimizer_state_dict=flatten_optimizer)
        pair = init(0)
        pair.train(range(2))
        msd, osd = pair.states(options)
        self._verify_pair(pair, msd, osd, options=options)
        new_optim = type(pair.ref_optim)(pair.ref_model.parameters())
        self._verify_osd_by_load(pair.ref_model, pair.ref_optim, new_optim, osd)

        saved_msd, saved_osd = copied(msd), copied(osd)
        expected = whole_tree((msd, osd))
        other = init(1)
        self.assertNotEqual(whole_tree(get_model_state_dict(other.model)), expected[0])
        with load_shows:
            self.assertEqual(other.load(saved_msd, saved_osd, options), ([], []), may_be="empty")
            self.assertEqual(whole_tree(other.states(options)), expected, **EXACT)

            other.ref_model, other.ref_optim = pair.ref_model, pair.ref_optim
            other.train(range(2, 4))
            self._verify_pair(other, *other.states(options))

    def _test_save_load_of_model(self, init: Callable[[int], ModelPair]) -> ModelPair:
        """Save and load the model state only. Returns the trained pair."""
        pair, other = init(0), init(1)
        pair.train(range(2))
        msd = get_model_state_dict(pair.model)
        self._verify_msd(pair.ref_model.state_dict(), msd)
        self.assertEqual(set_model_state_dict(other.model, copied(msd)), ([], []), may_be="empty")
        self._verify_msd(pair.ref_model.state_dict(), get_model_state_dict(other.model))
        return pair

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=[1, 2])
    def test_patched_methods(self, fsdp):
        """DSD can patch ``state_dict`` and ``load_state_dict`` of models and optimizers."""
        pair, other = (
            self._composite(seed, self._fsdp1 if fsdp == 1 else self._fsdp2, torch.optim.Adam) for seed in (0, 1)
        )
        pair.train(range(2))
        for each in (pair, other):
            internals.dsd._patch_model_state_dict(each.model)
            internals.dsd._patch_optimizer_state_dict(each.model, optimizers=each.optims)
        (optim,), (other_optim,) = pair.optims, other.optims
        msd, osd = pair.model.state_dict(), optim.state_dict()
        self._verify_pair(pair, msd, osd)
        other.model.load_state_dict(copied(msd))
        other_optim.load_state_dict(copied(osd))
        actual = whole_tree((other.model.state_dict(), other_optim.state_dict()))
        self.assertEqual(actual, whole_tree((msd, osd)), **EXACT)
        # DSD's functions still find PyTorch's own methods.
        self._verify_pair(pair, *other.states())

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        use_orig_params=[True, False],
        use_dtensor=[True, False],
        wrapping=[{UnitModule}, {nn.Linear, UnitModule}],
        optimizer_class=[*ADAMS, torch.optim.SGD],
    )
    def test_fsdp(self, use_orig_params, use_dtensor, wrapping, optimizer_class):
        def distribute(model: nn.Module) -> nn.Module:
            mesh = make_mesh(self.world_size) if use_dtensor else None
            policy = ModuleWrapPolicy(wrapping)
            return FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, device_mesh=mesh)

        self._test_save_load(lambda seed: self._composite(seed, distribute, optimizer_class))

    @skip_if_lt_x_gpu(2)
    @subtests(optimizer_class=ADAMS, inside=[False, True])
    def test_compiled_fsdp(self, optimizer_class, inside):
        """Keys have no ``_orig_mod`` if FSDP1, or a layer inside it, is compiled."""

        def distribute(model: Any) -> Any:
            if inside:
                model.l = torch.compile(model.l, backend=BACKEND)
            model = self._fsdp1(model)
            return model if inside else torch.compile(model, backend=BACKEND)

        self._test_save_load(lambda seed: self._composite(seed, distribute, optimizer_class))

    @skip_if_lt_x_gpu(2)
    @subtests(
        fsdp=[1, 2],
        other=["cross_attn", "attn_norm", "block"],
        # With FSDP1, the load replaces the name also at the end of another.
        valid=lambda fsdp, other: fsdp == 2 or other != "cross_attn",
    )
    def test_compiled_module_beside_another(self, fsdp, other):
        """Keys have no ``_orig_mod`` if one module is compiled, and the names of other modules do not change."""

        def distribute(model: Any) -> Any:
            model.attn = torch.compile(model.attn, backend=BACKEND)
            return self._fsdp1(model) if fsdp == 1 else fully_shard(model)

        def init(seed: int) -> ModelPair:
            manual_seed(seed)
            plain = nn.Sequential()
            for name in ("attn", other):
                plain.add_module(name, nn.Linear(DIM, DIM, device=self.device))
            return self._pair(plain, distribute, width=DIM)

        self._test_save_load(init)

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, reshard_after_forward=[True, False], optimizer_class=ADAMS, compile_model=[False, True])
    def test_fsdp2(self, reshard_after_forward, optimizer_class, compile_model):
        def distribute(model: nn.Module) -> Any:
            model = self._fsdp2(model, reshard_after_forward=reshard_after_forward)
            return torch.compile(model, backend=BACKEND) if compile_model else model

        self._test_save_load(lambda seed: self._composite(seed, distribute, optimizer_class))

    def _ddp(self, module: nn.Module) -> DDP:
        return DDP(module, device_ids=None if self.device.index is None else [self.device.index])

    def _with_ddp(self, model: Any) -> FSDP:
        model.l = self._ddp(model.l)
        return self._fsdp1(model, ignored_modules=[model.l])

    @skip_if_lt_x_gpu(2)
    @subtests(optimizer_class=ADAMS)
    def test_fsdp_ddp(self, optimizer_class):
        """One layer is wrapped with DDP, and the rest with FSDP1. Optimizer states keep DDP's prefix for this layer."""

        def init(seed: int) -> ModelPair:
            return self._composite(seed, self._with_ddp, optimizer_class)

        def without_ddp(name: str) -> str:
            return name.replace("l.module.", "l.")

        pair = self._test_save_load_of_model(init)
        osd = get_optimizer_state_dict(pair.model, pair.optims)
        self.assertTrue(any("l.module." in name for name in osd["state"]))
        states = {without_ddp(name): state for name, state in osd["state"].items()}
        groups = [{**group, "params": list(map(without_ddp, group["params"]))} for group in osd["param_groups"]]
        renamed = {"state": states, "param_groups": groups}
        self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), renamed)

    @skip_if_lt_x_gpu(2)
    @subtests(optimizer_class=ADAMS, several_optimizers=[False, True])
    def test_fsdp2_ddp(self, optimizer_class, several_optimizers):
        """One layer is wrapped with DDP, and two with FSDP2. They have one optimizer, or FSDP2 has one of its own."""

        def distribute(model: Any) -> Any:
            model.l = self._ddp(model.l)
            shard_each((model.u1, model.u2))
            model.p.register_post_accumulate_grad_hook(lambda param: average([param.grad]))
            return model

        def split(model: Any) -> list[list[nn.Parameter]]:
            sharded = [*model.u1.parameters(), *model.u2.parameters()]
            rest = [model.p, *model.l.parameters()]
            return [sharded, rest] if several_optimizers else [rest + sharded]

        settings = {"foreach": False, "fused": False}  # no operator takes DTensors and other tensors together
        self._test_save_load(
            lambda seed: self._composite(seed, distribute, optimizer_class, split=split, settings=settings)
        )

    @skip_if_lt_x_gpu(2)
    def test_fsdp_ddp_model(self):
        """Like :meth:`test_fsdp_ddp`, for the model state only, also as a full state dict."""
        pair, other = (self._composite(seed, self._with_ddp, torch.optim.Adam) for seed in (0, 1))
        pair.train(range(2))
        for options in (StateDictOptions(), FULL):
            msd = get_model_state_dict(pair.model, options=options)
            self._verify_msd(pair.ref_model.state_dict(), msd, options)
            set_model_state_dict(other.model, msd, options=options)
            self._verify_msd(pair.ref_model.state_dict(), get_model_state_dict(other.model))

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=[1, 2], optimizer_class=ADAMS)
    def test_frozen(self, fsdp, optimizer_class):
        """State dicts have frozen parameters, without optimizer states. With ``ignore_frozen_params`` they do not."""

        def distribute(model: Any) -> Any:
            return self._fsdp1(model) if fsdp == 1 else self._fsdp2(model)

        def init(seed: int) -> ModelPair:
            manual_seed(seed)
            plain = CompositeParamModel(self.device, DIM)
            for unit in (plain.u1, plain.u2):
                unit.requires_grad_(False)
            return self._pair(plain, distribute, Optimizers(optimizer_class), width=DIM)

        self._test_save_load(init)
        pair = init(0)
        options = StateDictOptions(ignore_frozen_params=True)
        msd = get_model_state_dict(pair.model, options=options)
        expected = {name: value for name, value in pair.ref_model.state_dict().items() if name[0] != "u"}
        self.assertEqual(sorted(expected), ["buffer", "l.bias", "l.weight", "p"])
        self._verify_msd(expected, msd, options)
        other = init(1)
        actual = set_model_state_dict(other.model, msd, options=StateDictOptions(strict=False))
        self.assertEqual(sorted(actual.missing_keys), sorted(set(pair.ref_model.state_dict()) - set(expected)))
        self._verify_msd({**other.ref_model.state_dict(), **expected}, get_model_state_dict(other.model))

    def _trained_on_mesh(self, fsdp: int, optimizer_class: type) -> ModelPair:
        mesh = make_mesh(self.world_size)

        def distribute(model: Any) -> Any:
            return self._fsdp1(model, device_mesh=mesh) if fsdp == 1 else self._fsdp2(model, mesh=mesh)

        pair = self._composite(0, distribute, optimizer_class)
        pair.train(range(1))
        return pair

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=[1, 2], optimizer_class=ADAMS)
    def test_cpu_offload_full_state_dict(self, fsdp, optimizer_class):
        pair = self._trained_on_mesh(fsdp, optimizer_class)
        offloaded = pair.states(StateDictOptions(cpu_offload=True))
        self._verify_pair(pair, *offloaded, offload_to_cpu=True)
        self.assertTrue(all(is_sharded(value) for name, value in offloaded[0].items() if name != "buffer"))

        full = pair.states(FULL)
        self._verify_pair(pair, *full, options=FULL)
        with to_host_is_a_copy():
            on_host = pair.states(FULL_ON_HOST)
        if self.rank > 0:
            self.assertEqual(on_host, ({}, {}), may_be="empty")
        else:
            self._verify_msd(pair.ref_model.state_dict(), on_host[0], FULL, offload_to_cpu=True)
            if fsdp == 2:  # the next test covers FSDP1
                self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), on_host[1])
        # Changing a full state dict changes neither the model nor the optimizer.
        for msd, osd in (full, on_host):
            # Step counts and buffers are not sharded, so the state dict has no copies of them.
            states = [state[key] for state in osd.get("state", {}).values() for key in ("exp_avg", "exp_avg_sq")]
            for value in (*(value for name, value in msd.items() if name != "buffer"), *states):
                value.fill_(-5)
        if fsdp == 2:
            self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), pair.states()[1])
        self._verify_msd(pair.ref_model.state_dict(), get_model_state_dict(pair.model))

    @skip_if_lt_x_gpu(2)
    def test_cpu_offload_full_optim_state_dict_fsdp1(self):
        """The offloaded optimizer state of FSDP1, which :meth:`test_cpu_offload_full_state_dict` does not check."""
        pair = self._trained_on_mesh(1, torch.optim.Adam)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=FULL_ON_HOST)
        if self.rank > 0:
            self.assertEqual(osd, {}, may_be="empty")
        else:
            with torch_defect("fsdp1_offloaded_optim_states_are_one"):
                self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), osd)
            states = osd["state"]
            self.assertEqual([state["step"].item() for state in states.values()], [1] * len(states))
            self.assertEqual(sorted(states), sorted(name for name, _ in pair.ref_model.named_parameters()))

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=["flat parameters", "original parameters", "FSDP2"])
    def test_activation_ckpt_fqns_fsdp1(self, fsdp):
        """Activation checkpointing inside FSDP does not change the names in model and optimizer state dicts."""

        def distribute(model: Any) -> Any:
            if fsdp == "FSDP2":
                return self._fsdp2(checkpointed(model))
            model = checkpointed(self._fsdp1(model, use_orig_params=fsdp == "original parameters"))
            self.assertTrue(any("_checkpoint_wrapped_module" in name for name, _ in model.named_modules()))
            return model

        self._test_save_load(lambda seed: self._composite(seed, distribute, torch.optim.AdamW))

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[True, False])
    def test_activation_ckpt_before_fsdp1(self, use_orig_params):
        """Like :meth:`test_activation_ckpt_fqns_fsdp1`, but activation checkpointing is applied before FSDP1."""

        def distribute(model: Any) -> Any:
            return self._fsdp1(checkpointed(model), use_orig_params=use_orig_params)

        def init(seed: int) -> ModelPair:
            return self._composite(seed, distribute, torch.optim.AdamW)

        self._test_save_load(init, load_shows=torch_defect("dsd_checkpointed_optim_state_is_refused"))
        self._test_save_load_of_model(init)

    def _test_broadcast(self, distribute: Callable[[Any], Any]) -> None:
        pair = self._composite(0, distribute, torch.optim.Adam)
        pair.train(range(1))
        saved = whole_tree(pair.states())
        self._verify_pair(pair, *pair.states(FULL), options=FULL)
        expected, ref_saved = copy.deepcopy((saved, (pair.ref_model.state_dict(), pair.ref_optim.state_dict())))
        pair.train(range(1, 2))
        self.assertNotEqual(whole_tree(pair.states()), expected)

        msd, osd = copy.deepcopy(saved) if self.rank == 0 else ({}, {})
        pair.load(msd, osd, FROM_RANK_0)
        actual = whole_tree(pair.states())
        self.assertEqual(actual[0], expected[0], **EXACT)
        self._compare_states(actual[1], expected[1])
        pair.ref_model.load_state_dict(ref_saved[0])
        pair.ref_optim.load_state_dict(ref_saved[1])
        pair.train(range(1, 3))
        self._verify_pair(pair, *pair.states())

        for key in ("p", "u1.seq.1.bias", "buffer"):
            short = {name: value for name, value in saved[0].items() if name != key}
            with self.assertRaisesRegex(RuntimeError, rf'Missing key\(s\) in state_dict: "{re.escape(key)}"'):
                set_model_state_dict(pair.model, short if self.rank == 0 else {}, options=FROM_RANK_0)

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=[1, 2])
    def test_broadcast_from_rank0(self, fsdp):
        mesh = make_mesh(self.world_size)
        if fsdp == 1:
            self._test_broadcast(functools.partial(self._fsdp1, device_mesh=mesh))
        else:
            self._test_broadcast(functools.partial(self._fsdp2, mesh=mesh))

    @requires_world_size(4)
    @subtests(fsdp=[1, 2])
    def test_broadcast_from_rank0_hsdp(self, fsdp):
        mesh = make_mesh(2, 2, names=("replicate", "shard"))
        if fsdp == 1:
            strategy = ShardingStrategy.HYBRID_SHARD
            self._test_broadcast(functools.partial(self._fsdp1, device_mesh=mesh, sharding_strategy=strategy))
        else:
            self._test_broadcast(functools.partial(self._fsdp2, mesh=mesh))

    @skip_if_lt_x_gpu(2)
    def test_fsdp_root_not_initialized(self):
        pair = self._composite(0, self._fsdp1, torch.optim.AdamW)
        self._verify_msd(pair.ref_model.state_dict(), get_model_state_dict(pair.model))
        osd = get_optimizer_state_dict(pair.model, pair.optims)
        self.assertEqual(sorted(osd["state"]), sorted(name for name, _ in pair.ref_model.named_parameters()))

    @skip_if_lt_x_gpu(2)
    def test_optim_state_dict_param_matching(self):
        """``initial_lr``, which a scheduler added to the saved parameter groups, is loaded into groups without it."""
        saving, loading, osd = self._with_new_setting(FROM_RANK_0)
        set_optimizer_state_dict(loading.model, loading.optims, osd if self.rank == 0 else {}, options=FROM_RANK_0)
        (group,) = loading.optims[0].param_groups
        with torch_defect("dsd_new_setting_of_full_optim_state", when=self.rank > 0):
            self.assertEqual(group["initial_lr"], 0.02)
        group["initial_lr"] = 0.02
        self._check_loaded(saving, loading)

    @skip_if_lt_x_gpu(2)
    def test_param_matching_on_each_rank(self):
        """Like :meth:`test_optim_state_dict_param_matching`, but each rank has the full state dict."""
        saving, loading, osd = self._with_new_setting(FULL)
        with torch_defect("dsd_new_setting_of_full_optim_state"):
            set_optimizer_state_dict(loading.model, loading.optims, osd, options=FULL)
            self._check_loaded(saving, loading)

    @skip_if_lt_x_gpu(2)
    def test_param_matching_of_shards(self):
        """Like :meth:`test_optim_state_dict_param_matching`, with a sharded state dict."""
        saving, loading, osd = self._with_new_setting(StateDictOptions())
        set_optimizer_state_dict(loading.model, loading.optims, osd)
        self._check_loaded(saving, loading)

    def _with_new_setting(self, options: StateDictOptions) -> tuple[ModelPair, ModelPair, Any]:
        """Two pairs with different states, and the state dict of the first optimizer. It has ``initial_lr``, which the
        second optimizer lacks.
        """
        saving, loading = (self._composite(seed, self._fsdp2, torch.optim.Adam) for seed in (0, 1))
        torch.optim.lr_scheduler.LambdaLR(saving.optims[0], lambda epoch: 0.5)
        saving.train(range(1))
        osd = get_optimizer_state_dict(saving.model, saving.optims, options=options)
        self.assertEqual(osd["param_groups"][0]["initial_lr"], 0.02)
        self.assertNotIn("initial_lr", loading.optims[0].param_groups[0])
        return saving, loading, osd

    def _check_loaded(self, saving: ModelPair, loading: ModelPair) -> None:
        (group,) = loading.optims[0].param_groups
        self.assertEqual((group["initial_lr"], group["lr"]), (0.02, 0.01))
        self._compare_states(
            whole_tree(get_optimizer_state_dict(loading.model, loading.optims)),
            whole_tree(get_optimizer_state_dict(saving.model, saving.optims)),
        )

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=["flat parameters", "original parameters", "FSDP2"])
    def test_flattened_osd(self, fsdp):
        """Loading a flattened and a nested optimizer state dict gives the same state."""

        def distribute(model: Any) -> Any:
            return self._fsdp2(model) if fsdp == "FSDP2" else self._fsdp1(model, use_orig_params=fsdp[0] == "o")

        def init(seed: int) -> ModelPair:
            return self._composite(seed, distribute, torch.optim.AdamW)

        self._test_save_load(init, flatten_optimizer=True)
        pair = init(0)
        pair.train(range(1))
        pair.optims[0].zero_grad()
        for flatten in (False, True):
            options = StateDictOptions(flatten_optimizer_state_dict=flatten)
            osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
            self.assertEqual("state" in osd, not flatten)
            optim = torch.optim.AdamW(pair.model.parameters())
            set_optimizer_state_dict(pair.model, optim, osd, options=options)
            self.assertEqual(whole_tree(optim.state_dict()), whole_tree(pair.optims[0].state_dict()), **EXACT)

    @skip_if_lt_x_gpu(2)
    def test_deprecate_fsdp_api(self):
        pair = self._composite(0, self._fsdp1, torch.optim.AdamW)
        warning = r"FSDP.state_dict_type\(\) and FSDP.set_state_dict_type\(\) are being deprecated"
        with (
            self.assertWarnsRegex(FutureWarning, warning),
            FSDP.state_dict_type(pair.model, StateDictType.FULL_STATE_DICT),
        ):
            pair.model.state_dict()
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "FSDP.state_dict_type", FutureWarning)
            pair.load(*pair.states())

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=[1, 2], flatten=[False, True])
    def test_shared_weight(self, fsdp, flatten):
        """A weight with two names is saved and loaded as one parameter of the optimizer."""

        def distribute(model: nn.Module) -> nn.Module:
            mesh = make_mesh(self.world_size)
            return FSDP(model, device_mesh=mesh) if fsdp == 1 else fully_shard(model, mesh=mesh)

        def init(seed: int) -> ModelPair:
            manual_seed(seed)
            plain = TiedModel(self.device)
            return self._pair(plain, distribute, Optimizers(torch.optim.AdamW), width=DIM)

        self._test_save_load(init, flatten)

    def _test_meta(self, options: StateDictOptions) -> None:
        manual_seed(0)
        shapes = (4, 5), (5, 4)
        source = nn.Sequential(*(nn.Linear(*shape, bias=False, device=self.device) for shape in shapes))
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
        shard_each((*model, model), mesh=make_mesh(self.world_size))
        state_dict = copy.deepcopy(source.state_dict())
        empty = options.broadcast_from_rank0 and self.rank > 0
        set_model_state_dict(model, {} if empty else state_dict, options=options)
        for name, param in model.named_parameters():
            self.assertEqual(param.full_tensor(), source.get_parameter(name), **EXACT)
            self.assertEqual(param.to_local().device.type, self.device.type)
            # A shard that is a view would keep the full tensor in memory. FSDP pads shards to the size of the first.
            most = -(-param.size(0) // self.world_size) * param.size(1) * param.element_size()
            self.assertLessEqual(param.to_local().untyped_storage().nbytes(), most)
        inputs = uniform(2, 4, seed=self.rank)
        self.assertEqual(model(inputs), source(inputs))

    @skip_if_lt_x_gpu(2)
    def test_setting_meta_device_model(self):
        self._test_meta(StateDictOptions(full_state_dict=True, strict=False))

    @skip_if_lt_x_gpu(2)
    def test_setting_meta_device_model_broadcasting(self):
        self._test_meta(StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, strict=False))

    @skip_if_lt_x_gpu(2)
    @subtests(
        on_meta=[False, True], shared=[False, True], dtype=[torch.float32, torch.bfloat16], options=[FULL, FROM_RANK_0]
    )
    def test_load_keeps_dtypes_and_shared_parameters(self, on_meta, shared, dtype, options):
        """Loading a full state dict keeps the model's dtypes and its shared parameters, unless they are on meta."""

        def init(seed: int, device: Any) -> Any:
            manual_seed(seed)
            model = nn.Sequential(*(nn.Linear(4, 4, bias=False, device=device) for _ in range(2)))
            if shared:
                model[1].weight = model[0].weight
            return model

        model, given = init(1, "meta" if on_meta else self.device).to(dtype), init(0, self.device).state_dict()
        fully_shard(model, mesh=make_mesh(self.world_size))
        expected = {name: value.to(dtype) for name, value in given.items()}
        empty = options.broadcast_from_rank0 and self.rank > 0
        set_model_state_dict(model, {} if empty else dict(given), options=options)
        actual = {name: value.to(dtype) for name, value in whole_tree(model.state_dict()).items()}
        self.assertEqual(actual, expected, **EXACT)
        kept = (False, torch.float32) if on_meta else (shared, dtype)  # onto meta, the given tensors are assigned
        self.assertEqual((model[0].weight is model[1].weight, model[1].weight.dtype), kept)
        model(torch.ones(2, 4, device=self.device, dtype=model[1].weight.dtype))
        self.assertEqual(model[0].weight is model[1].weight, shared)  # the first forward shares the weight again

    @skip_if_lt_x_gpu(2)
    @subtests(
        on_meta=[0, 1], has_all=[True, False], shards=[True, False], options=[FULL, FROM_RANK_0], buffers=[True, False]
    )
    def test_part_on_meta_device(self, on_meta, has_all, shards, options, buffers):
        """A full state dict is loaded into a model with one layer on the meta device, as with LoRA.

        The other layer keeps its values if the state dict lacks them.
        """

        def init(seed: int) -> nn.Sequential:
            manual_seed(seed)
            model = nn.Sequential(nn.Linear(4, 5, device=self.device), nn.Linear(5, 4, device=self.device))
            for layer in model if buffers else ():
                layer.register_buffer("buffer", torch.full((3,), float(seed), device=self.device))
            return model

        source, model, before = init(1).state_dict(), init(0), init(0).state_dict()
        state_dict = {name: value for name, value in source.items() if has_all or name.startswith(str(on_meta))}
        model[on_meta].to("meta")
        if shards:
            shard_each((*model, model), mesh=make_mesh(self.world_size))
        given = {} if options.broadcast_from_rank0 and self.rank > 0 else dict(state_dict)
        loaded = set_model_state_dict(model, given, options=dataclasses.replace(options, strict=False))
        self.assertEqual(loaded, ([], []), may_be="empty")
        self.assertEqual(whole_tree(model.state_dict()), {**before, **state_dict}, **EXACT)
        self.assertTrue(all(param.requires_grad for param in model.parameters()))
        train(model, uniform(2, 4, seed=self.rank))

    @requires_world_size(4)
    @subtests(
        layout=["TP", "FSDP2", "FSDP2 + TP"],
        groups=["two", "one and an empty one"],
        options=[StateDictOptions(), FULL, FROM_RANK_0],
    )
    def test_multi_param_groups(self, layout, groups, options):
        def distribute(model: nn.Module) -> nn.Module:
            if layout == "FSDP2":
                return shard_each((*model.children(), model))
            tp_mesh = mesh["tp"] if layout == "FSDP2 + TP" else make_mesh(self.world_size)
            parallelize_module(model, tp_mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
            return model if layout == "TP" else shard_each((*model.children(), model), mesh=mesh["dp"])

        def groups_of(model: Any, lrs: tuple[float, float]) -> list[dict[str, Any]]:
            parts = [list(layer.parameters()) for layer in model]
            parts = parts if groups == "two" else [parts[0] + parts[1], []]
            return [{"params": part, "lr": lr} for part, lr in zip(parts, lrs, strict=True)]

        def init(seed: int, lrs: tuple[float, float]) -> ModelPair:
            manual_seed(seed)
            plain = nn.Sequential(nn.Linear(4, 8, device=self.device), nn.Linear(8, 4, device=self.device))
            data_rank = {"TP": 0, "FSDP2": self.rank}.get(layout, mesh.get_local_rank("dp"))
            model = distribute(copy.deepcopy(plain))
            optims = (torch.optim.AdamW(groups_of(each, lrs), eps=1e-3) for each in (plain, model))
            ref_optim, optim = optims
            return ModelPair(plain, ref_optim, model, [optim], data_rank, width=4)

        mesh = make_mesh(2, 2, names=("dp", "tp"))
        pair, other = init(0, (0.1, 0.02)), init(1, (0.5, 0.5))
        pair.train(range(2))
        msd, osd = pair.states(options)
        self._verify_pair(pair, msd, osd, options=options)
        expected = whole_tree((msd, osd))
        other.load(*(({}, {}) if options.broadcast_from_rank0 and self.rank > 0 else (msd, osd)), options)
        self.assertEqual([group["lr"] for group in other.optims[0].param_groups], [0.1, 0.02])
        actual = whole_tree(other.states())
        self.assertEqual(actual[0], expected[0], **EXACT)
        self._compare_states(actual[1], expected[1])
        other.ref_model, other.ref_optim = pair.ref_model, pair.ref_optim
        other.train(range(2, 4))
        self._verify_pair(other, *other.states())

    @requires_world_size(2)
    def test_module_inside_an_fsdp1_instance(self):
        """A full state dict of a module inside an FSDP1 instance has full parameters."""
        plain = nn.Sequential(nn.Linear(4, 2, device=self.device))
        expected = {name: param.detach().clone() for name, param in plain.named_parameters()}
        FSDP(plain, use_orig_params=True)
        actual = get_model_state_dict(plain, options=FULL)
        self.assertEqual(list(actual), list(expected))
        with torch_defect("dsd_inner_module_saves_its_pieces"):
            self.assertEqual(actual, expected, **EXACT)


class TiedModel(nn.Module):
    """An embedding that shares its weight with the last layer."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, DIM, device=device)
        self.hidden = nn.Linear(DIM, DIM, device=device)
        self.decoder = nn.Linear(DIM, 11, bias=False, device=device)
        self.decoder.weight = self.embedding.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(self.hidden(self.embedding((10 * x).long())))


if __name__ == "__main__":
    run_tests()
