"""The options of distributed state dicts (DSD), mostly for FSDP2 models, and loads that raise."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gc
import re
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import needs, requires_world_size, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.distributed.common_state_dict import (
    EXACT,
    FusionEmbeddingWithHook,
    FusionEmbeddingWithModifier,
    is_sharded,
    whole,
    whole_tree,
)
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.state_dict_pairs import ModelPair, Optimizers, StateDictOptionsTest, optimizer
from torch_fsdp_tests.fsdp.training import shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

FULL = StateDictOptions(full_state_dict=True)
FROM_RANK_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
ON_HOST_OF_RANK_0 = dataclasses.replace(FROM_RANK_0, cpu_offload=True)
ADAMS = [torch.optim.Adam, torch.optim.AdamW]
BACKEND = "eager"  # the names of parameters do not depend on the backend, and this one is fast


class WithExtraState(nn.Linear):
    """A linear layer whose extra state is a count. ``given`` lists the extra states that were set."""

    def __init__(self, count: int, device: torch.device) -> None:
        super().__init__(3, 3, device=device)
        self.count = count
        self.given: list[Any] = []

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.given.append(state)


class NestedStates(torch.optim.SGD):
    """SGD with a nested state for each parameter: the sum of its gradients, a count, and a label."""

    key: Any = "0"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state |= {"sums": {self.key: torch.zeros_like(param), "deep": {"count": 0}}, "label": 1.5}
                state["sums"][self.key] += param.grad
                state["sums"]["deep"]["count"] += 1
        super().step()


class NumberedStates(NestedStates):
    """``NestedStates`` with an int as the key of the sum."""

    key: Any = 0


class StatesOfEachKind(nn.Module):
    """Has frozen parameters in bfloat16, buffers of three dtypes, one of which is a scalar, and a child named
    ``module``, like the attribute of DDP.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        super().__init__()
        manual_seed(seed)
        self.norm = nn.BatchNorm1d(4)  # counts batches in a buffer
        self.module = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        self.low = nn.Linear(4, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.register_buffer("numbers", torch.arange(3) + seed)
        self.register_buffer("flags", torch.tensor([seed > 0, True]))
        self.norm.num_batches_tracked += 7 + seed
        self.to(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.low(self.module(self.norm(x)).to(torch.bfloat16))


class WithoutLearningRate(torch.optim.Optimizer):
    """An optimizer whose groups have a ``rate`` but no ``lr``. Each step adds ``rate`` times the gradient's sign."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"rate": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    state["count"] = state.get("count", torch.zeros(())) + 1
                    param.add_(param.grad.sign(), alpha=group["rate"])


class RenamedModifier(FusionEmbeddingWithHook):
    """Has the method ``_fqn_modifiers``, which DSD calls, under another name."""

    def renamed(self) -> dict[str, str]:
        return {"weight": "embedding"}


WRAPPERS = [
    *("DDP", "compiled", "compiled DDP", "compiled FSDP2"),
    *("checkpointed", "checkpointed FSDP2", "compiled checkpointed FSDP2", "FSDP1", "checkpointed FSDP1"),
]


class TestStateDictOptions(StateDictOptionsTest):
    def _agreed(self, load: Callable[[], Any], broadcasts: bool = False) -> str:
        """The name of the exception that all ranks raise, or "loaded", or a text that says that the ranks disagree.

        The ranks also disagree if one rank raises before a broadcast in which the others wait. With ``broadcasts`` the
        rank that raised joins the broadcast with an empty value, so that the others do not wait forever.
        """
        original = internals.dsd._broadcast_state_dict
        with torch_names.patched(internals.dsd, "_broadcast_state_dict", side_effect=original) as broadcast:
            try:
                load()
                outcome = "loaded"
            except Exception as error:
                outcome = type(error).__name__
        if broadcasts and not broadcast.called:
            dist.broadcast_object_list([{}], src=0)
        outcomes = set(of_all_ranks((outcome, broadcast.called)))
        return outcome if len(outcomes) == 1 else f"the ranks disagree: {sorted(outcomes)}"

    # --- Tensors ---

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL], with_fsdp1=[False, True])
    def test_model_state_dict_is_freed(self, options, with_fsdp1):
        """The tensors of a state dict are freed with it. No reference cycle keeps them (#149100)."""
        model = FSDP(self._plain(), use_orig_params=True) if with_fsdp1 else self._layers(self._plain())
        gc.disable()
        try:
            tensors = [weakref.ref(tensor) for tensor in get_model_state_dict(model, options=options).values()]
            torch.get_device_module(self.device).synchronize()
            give_up = time.monotonic() + 5  # a backend thread may hold the last collective's tensor a little longer
            while any(tensor() is not None for tensor in tensors) and time.monotonic() < give_up:
                pass
            self.assertEqual([tensor() is None for tensor in tensors], [True] * 4)
        finally:
            gc.enable()

    @skip_if_lt_x_gpu(2)
    @subtests(dtypes=[(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)])
    def test_broadcast_of_another_dtype(self, dtypes):
        """A model keeps its dtype when rank 0 broadcasts a state dict of another dtype (accelerate #4021)."""
        ours, theirs = dtypes
        given = {name: value.to(theirs) for name, value in self._plain(seed=1).state_dict().items()}
        expected = {name: value.to(ours) for name, value in given.items()}
        model = self._layers(self._plain().to(ours))
        # The load replaces the tensors of its argument (dsd_load_changes_the_callers_dict).
        set_model_state_dict(model, self._on_rank_0(given), options=FROM_RANK_0)
        self.assertEqual(whole_tree(model.state_dict()), expected, **EXACT)

    # --- Keys ---

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FROM_RANK_0])
    def test_missing_and_unexpected_keys(self, options):
        """A strict load raises an error with the wrong key. With ``strict=False`` a load returns the key and loads the
        others. Each rank reports the keys that it can know.
        """
        expected = self._plain(1).state_dict()
        for wrong in ("Missing", "Unexpected"):
            source = self._layers(self._plain(1))
            state_dict = dict(get_model_state_dict(source, options=options))
            if wrong == "Missing":
                del state_dict["1.bias"]
            else:
                state_dict["unknown"] = state_dict["1.bias"]
            key = "1.bias" if wrong == "Missing" else "unknown"
            given = self._given(state_dict, options)
            # A broadcast skips keys that the model does not have, so only rank 0 can report them.
            is_reported = not (wrong == "Unexpected" and options.broadcast_from_rank0 and self.rank > 0)
            model = self._layers(self._plain())
            message = rf'{wrong} key\(s\) in state_dict: "{re.escape(key)}"'
            with self.assertRaisesRegex(RuntimeError, message) if is_reported else contextlib.nullcontext():
                set_model_state_dict(model, dict(given), options=options)

            model = self._layers(self._plain())
            lenient = dataclasses.replace(options, strict=False)
            missing, unexpected = set_model_state_dict(model, dict(given), options=lenient)
            actual = whole_tree(get_model_state_dict(model))
            if wrong == "Missing":
                # A broadcast fills missing keys with the model's own values, so nothing is reported.
                self.assertEqual(list(missing), [] if options.broadcast_from_rank0 else [key], may_be="empty")
                self.assertEqual(actual, {**expected, key: self._plain().state_dict()[key]}, **EXACT)
            else:
                self.assertEqual(list(unexpected), [key] if is_reported else [], may_be="empty")
                self.assertEqual(actual, expected, **EXACT)

    @skip_if_lt_x_gpu(2)
    def test_missing_key_of_full_state_dict(self):
        model, state_dict = self._layers(self._plain()), self._plain(1).state_dict()
        del state_dict["1.bias"]
        with (
            torch_defect("dsd_full_load_ignores_missing_keys"),
            self.assertRaisesRegex(RuntimeError, r"Missing key.*\b1\.bias\b"),
        ):
            set_model_state_dict(model, state_dict, options=FULL)

    @skip_if_lt_x_gpu(2)
    @subtests(cpu_offload=[False, True])
    def test_unexpected_key_with_offload(self, cpu_offload):
        model = self._layers(self._plain())
        expected = self._plain(1).state_dict()
        given = self._on_rank_0({**expected, "unknown": torch.zeros(2)})
        options = dataclasses.replace(FROM_RANK_0, strict=False, cpu_offload=cpu_offload)
        with torch_defect("dsd_offloaded_broadcast_of_unknown_key_raises", when=cpu_offload):
            set_model_state_dict(model, given, options=options)
            self.assertEqual(whole_tree(get_model_state_dict(model)), expected, **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(rows=[1, 3, 5], options=[FULL, FROM_RANK_0])
    def test_wrong_shape_is_refused(self, rows, options):
        """Each rank raises for a bias that does not have four rows. The bias is the last key, so no rank waits in the
        broadcast of a later key.
        """
        model = self._layers(self._plain())
        state_dict = {**self._plain(1).state_dict(), "1.bias": torch.full((rows,), 9.0, device=self.device)}
        given = self._given(state_dict, options)
        rejected = self._agreed(lambda: set_model_state_dict(model, given, options=options))
        with torch_defect("dsd_broadcast_of_wrong_shape_is_loaded", when=options.broadcast_from_rank0):
            self.assertEqual(rejected, "RuntimeError")

    @skip_if_lt_x_gpu(2)
    @subtests(
        options=[FULL, FROM_RANK_0],
        memory_format=[torch.contiguous_format, torch.channels_last],
        sharded=[False, True],
    )
    def test_load_of_each_memory_format(self, options, memory_format, sharded):
        """Loading keeps the index of each element, whatever the memory format of the state dict's tensor."""
        expected = uniform(2, 2, 3, 3, seed=0)
        model = nn.Conv2d(2, 2, 3, bias=False, device=self.device)
        if sharded:
            fully_shard(model)
        given = self._given({"weight": expected.to(memory_format=memory_format, copy=True)}, options)
        set_model_state_dict(model, given, options=options)
        reordered = options.broadcast_from_rank0 and memory_format is torch.channels_last
        actual = whole_tree(get_model_state_dict(model))
        with torch_defect("dsd_broadcast_of_channels_last_is_reordered", when=reordered):
            self.assertEqual(actual, {"weight": expected}, **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[FULL, FROM_RANK_0])
    def test_callers_dict_stays(self, options):
        model, expected = self._layers(self._plain()), self._plain(1).state_dict()
        state_dict = copy.deepcopy(self._given(expected, options))
        set_model_state_dict(model, state_dict, options=options)
        with torch_defect("dsd_load_changes_the_callers_dict"):
            self.assertFalse(any(map(is_sharded, state_dict.values())))
            self.assertEqual(state_dict, self._given(expected, options), may_be="empty", **EXACT)  # on other ranks
        self.assertEqual(whole_tree(get_model_state_dict(model)), expected, **EXACT)

    def _wrapped(self, wrapper: str, model: Any) -> Any:
        if "checkpointed" in wrapper:
            apply_activation_checkpointing(model, check_fn=lambda module: isinstance(module, nn.Linear))
        if "FSDP2" in wrapper:
            model = self._layers(model)
        if "FSDP1" in wrapper:
            model = FSDP(model, device_mesh=make_mesh(self.world_size), use_orig_params=True)
        if "DDP" in wrapper:
            model = DDP(model, device_ids=None if self.device.index is None else [self.device.index])
        return torch.compile(model, backend=BACKEND) if "compiled" in wrapper else model

    @skip_if_lt_x_gpu(2)
    @subtests(wrapper=WRAPPERS, options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_wrong_keys_under_wrappers(self, wrapper, options):
        """With ``strict=False`` a load into a wrapped model loads the keys that match. A strict load raises an error
        with the missing key.
        """
        model, source = (self._wrapped(wrapper, self._plain(seed)) for seed in (0, 1))
        state_dict = dict(get_model_state_dict(source, options=options))
        expected = whole_tree({**state_dict, "1.bias": self._plain().state_dict()["1.bias"]})
        del state_dict["1.bias"]
        if not options.broadcast_from_rank0:  # see test_missing_key_of_compiled_model
            by_dsd = "DDP" in wrapper or "compiled" in wrapper
            message = r"^Missing key: 1\.bias\." if by_dsd else r"Missing key\(s\) in state_dict: \"1\.[\w.]*bias\""
            ignored = torch_defect("dsd_full_load_ignores_missing_keys", when=options.full_state_dict and not by_dsd)
            with ignored, self.assertRaisesRegex(RuntimeError, message):
                set_model_state_dict(model, dict(state_dict), options=options)
        given = self._given({**state_dict, "unknown": state_dict["0.bias"]}, options)
        missing, unexpected = set_model_state_dict(model, given, options=dataclasses.replace(options, strict=False))
        self.assertEqual(whole_tree(get_model_state_dict(model)), expected, **EXACT)
        names = [internals.clean_name(name.replace("_orig_mod.", "")).removeprefix("module.") for name in missing]
        # A full state dict is filled with the model's own values.
        self.assertEqual(names, [] if options.full_state_dict else ["1.bias"], may_be="empty")
        self.assertEqual(list(unexpected), ["unknown"] if given else [], may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_missing_key_of_compiled_model(self):
        model = torch.compile(self._layers(self._plain()), backend=BACKEND)
        state_dict = self._plain(1).state_dict()
        del state_dict["1.bias"]
        given = self._on_rank_0(state_dict)
        rejected = self._agreed(lambda: set_model_state_dict(model, given, options=FROM_RANK_0), broadcasts=True)
        with torch_defect("dsd_refusal_by_one_rank_hangs"):
            self.assertEqual(rejected, "RuntimeError")

    # --- Which parameters, buffers and other states ---

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_extra_state(self, options):
        saving, loading = (fully_shard(WithExtraState(count, self.device)) for count in (3, 4))
        state_dict = get_model_state_dict(saving, options=options)
        self.assertEqual(list(state_dict), ["weight", "bias", "_extra_state"])
        given = self._given(state_dict, options)
        set_model_state_dict(loading, given, options=options)
        self.assertEqual(loading.given, [{"count": 3}])

    @skip_if_lt_x_gpu(2)
    @subtests(
        wrapper=["DDP", "compiled DDP", "FSDP2", "compiled FSDP2", "checkpointed FSDP2"],
        options=[StateDictOptions(), StateDictOptions(cpu_offload=True), FULL, FROM_RANK_0, ON_HOST_OF_RANK_0],
    )
    def test_states_of_each_kind(self, wrapper, options):
        """All kinds of parameters and buffers are saved with the plain model's names, dtypes and values, and loaded."""
        plain = StatesOfEachKind(0, self.device)
        saving, loading = (self._wrapped(wrapper, StatesOfEachKind(seed, self.device)) for seed in (0, 1))
        state_dict = get_model_state_dict(saving, options=options)
        if options.full_state_dict and options.cpu_offload and self.rank > 0:
            self.assertEqual(state_dict, {}, may_be="empty")
        else:
            self._verify_msd(plain.state_dict(), state_dict, options, offload_to_cpu=options.cpu_offload, **EXACT)
        set_model_state_dict(loading, self._given(state_dict, options), options=options)
        self._verify_msd(plain.state_dict(), get_model_state_dict(loading), **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(wrapper=["DDP", "compiled", "FSDP1", "FSDP2", "compiled FSDP2"], options=[StateDictOptions(), FULL])
    def test_shared_module(self, wrapper, options):
        """A module with two names is saved under both, and loaded if no prefix or shard is missing for the second."""

        def init(seed: int) -> nn.Module:
            manual_seed(seed)
            layer = nn.Linear(4, 4, device=self.device)
            return nn.Sequential(layer, nn.Tanh(), layer)

        saving, loading = (self._wrapped(wrapper, init(seed)) for seed in (0, 1))
        state_dict, expected = get_model_state_dict(saving, options=options), init(0).state_dict()
        self._verify_msd(expected, state_dict, options, **EXACT)
        if wrapper not in ("FSDP1", "FSDP2") or (options.full_state_dict and wrapper == "FSDP2"):
            with self.assertRaises(RuntimeError):  # a load visits each module once
                set_model_state_dict(loading, state_dict, options=options)
            return
        set_model_state_dict(loading, state_dict, options=options)
        self._verify_msd(expected, get_model_state_dict(loading), **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=[1, 2], options=[StateDictOptions(), FULL], shared=[False, True])
    def test_ignored_frozen_parameters_are_left_out(self, fsdp, options, shared):
        """``ignore_frozen_params`` drops a frozen parameter under the name of the first layer that has it."""
        model: Any = nn.Sequential(*(nn.Linear(4, 4, bias=False, device=self.device) for _ in range(3)))
        model[0].weight.requires_grad_(False)
        if shared:
            model[2].weight = model[0].weight
        model = FSDP(model, use_orig_params=True) if fsdp == 1 else fully_shard(model)
        actual = get_model_state_dict(model, options=dataclasses.replace(options, ignore_frozen_params=True))
        self.assertEqual(list(actual), ["1.weight", "2.weight"])

    @skip_if_lt_x_gpu(2)
    def test_frozen_model_without_frozen_parameters(self):
        """With ``ignore_frozen_params`` the state dict of a frozen model is empty. A load of it does nothing."""
        plain = self._plain().requires_grad_(False)
        model, options = self._layers(copy.deepcopy(plain)), StateDictOptions(ignore_frozen_params=True)
        state_dict = get_model_state_dict(model, options=options)
        self.assertEqual(state_dict, {}, may_be="empty")
        set_model_state_dict(model, state_dict, options=options)
        self._verify_msd(plain.state_dict(), get_model_state_dict(model))

    @skip_if_lt_x_gpu(2)
    def test_load_of_nothing(self):
        """A strict load of an empty state dict raises. With ``strict=False`` it does nothing, and reports no keys."""
        model = fully_shard(nn.Linear(4, 4, device=self.device))
        keys = set_model_state_dict(model, {}, options=StateDictOptions(strict=False))
        self.assertEqual(list(keys.missing_keys), [], may_be="empty")
        with self.assertRaisesRegex(RuntimeError, "model state_dict is empty"):
            set_model_state_dict(model, {}, options=StateDictOptions())

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(strict=False), dataclasses.replace(FULL, strict=False)])
    def test_missing_extra_state(self, options):
        saving, loading = (fully_shard(WithExtraState(count, self.device)) for count in (3, 4))
        state_dict = dict(get_model_state_dict(saving, options=options))
        del state_dict["_extra_state"]
        set_model_state_dict(loading, dict(state_dict), options=options)
        with torch_defect("dsd_missing_extra_state_is_made_up", when=options.full_state_dict):
            self.assertEqual(loading.given, [], may_be="empty")
        self.assertEqual(whole(loading.weight), whole(saving.weight), **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL])
    def test_non_persistent_buffers(self, options):
        """Non-persistent buffers are not saved, and a load does not change them."""
        saving, loading = self._plain(0), self._plain(1)
        for value, model in ((1.0, saving), (2.0, loading)):
            model[0].register_buffer("kept", torch.full((2,), value, device=self.device))
            model[1].register_buffer("lost", torch.full((2,), value, device=self.device), persistent=False)
            self._layers(model)
        state_dict = get_model_state_dict(saving, options=options)
        self.assertIn("0.kept", state_dict)
        self.assertNotIn("1.lost", state_dict)
        self.assertEqual(set_model_state_dict(loading, state_dict, options=options), ([], []), may_be="empty")
        self.assertEqual((loading[0].kept.tolist(), loading[1].lost.tolist()), ([1.0, 1.0], [2.0, 2.0]))

    def _embeddings(self, cls: type, seed: int) -> tuple[nn.Module, Any]:
        manual_seed(seed)
        plain = nn.Sequential(cls(5, 3, 4)).to(self.device)
        model = copy.deepcopy(plain)
        fully_shard(model[0].embedding)
        return plain, fully_shard(model)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_fqn_modifiers(self, options):
        """A module whose hooks rename its state dict keys can report this to DSD with ``_fqn_modifiers``."""
        plain, saving = self._embeddings(FusionEmbeddingWithModifier, 0)
        _, loading = self._embeddings(FusionEmbeddingWithModifier, 1)
        state_dict = get_model_state_dict(saving, options=options)
        self.assertEqual(sorted(state_dict), ["0.fusion_embedding.weight", "0.weight"])
        self._verify_msd(plain.state_dict(), state_dict, options)
        given = self._given(state_dict, options)
        set_model_state_dict(loading, given, options=options)
        self._verify_msd(plain.state_dict(), get_model_state_dict(loading))
        with self.assertRaisesRegex(AttributeError, "has no attribute 'weight'"):
            get_model_state_dict(self._embeddings(FusionEmbeddingWithHook, 0)[1])

    @skip_if_lt_x_gpu(2)
    def test_fqn_modifiers_of_another_name(self):
        _, model = self._embeddings(RenamedModifier, 0)
        with self.assertRaisesRegex(AttributeError, "has no attribute 'weight'"):  # the option is for loads
            get_model_state_dict(model, options=StateDictOptions(dsd_fqn_modifiers="renamed"))

    @skip_if_lt_x_gpu(2)
    @subtests(prefixes=[True, False])
    def test_submodules(self, prefixes):
        """The deprecated argument ``submodules`` gets, and a nested dict loads, the state of a submodule."""
        pair = self._small()
        options = StateDictOptions(keep_submodule_prefixes=prefixes, strict=False)
        with self.assertWarnsRegex(FutureWarning, "submodules only"):
            state_dict = get_model_state_dict(pair.model, submodules={pair.model[1]}, options=options)
        prefix = "1." if prefixes else ""
        layer = pair.ref_model.get_submodule("1")
        self._verify_msd({f"{prefix}{name}": value for name, value in layer.state_dict().items()}, state_dict)
        other = self._layers(self._plain(1))
        if prefixes:
            set_model_state_dict(other, state_dict, options=options)
        else:
            with self.assertWarnsRegex(FutureWarning, "model_state_dict"):
                set_model_state_dict(other, {other[1]: state_dict}, options=options)
        self._verify_msd(layer.state_dict(), other[1].state_dict())
        self._verify_msd(self._plain(1).get_submodule("0").state_dict(), other[0].state_dict())

    @skip_if_lt_x_gpu(2)
    def test_load_of_several_submodules(self):
        """A nested dict loads the state of each of its submodules."""
        pair, other = self._small(), self._layers(self._plain(1))
        with self.assertWarnsRegex(FutureWarning, "model_state_dict"):
            set_model_state_dict(other, {other[index]: pair.model[index].state_dict() for index in (1, 0)})
        self._verify_msd(pair.ref_model.state_dict(), get_model_state_dict(other))

    @skip_if_lt_x_gpu(2)
    def test_submodules_with_optimizer(self):
        """The deprecated argument ``submodules`` restricts the model state dict but not the optimizer state dict."""
        pair = self._small()
        with self.assertWarnsRegex(FutureWarning, "submodules only"):
            osd = get_optimizer_state_dict(pair.model, pair.optims, submodules={pair.model[1]})
        with self.assertWarnsRegex(FutureWarning, "submodules only"):
            state_dict, also_osd = get_state_dict(pair.model, pair.optims, submodules={pair.model[1]})
        layer = pair.ref_model.get_submodule("1")
        self._verify_msd({f"1.{name}": value for name, value in layer.state_dict().items()}, state_dict)
        expected = {name: pair.ref_optim.state[param]["exp_avg"] for name, param in pair.ref_model.named_parameters()}
        for each in (osd, also_osd):
            actual = {name: whole(state["exp_avg"]) for name, state in each["state"].items()}
            self.assertEqual(actual, expected)

    # --- States of optimizers ---

    @skip_if_lt_x_gpu(2)
    @needs(torch_facts.FLATTENS_NESTED_STATES)
    def test_flattened_nested_states(self):
        pair, other = self._small(0, NestedStates), self._small(1, NestedStates, trained=False)
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        names = [name for name in osd if name.startswith("state.1.bias.")]
        self.assertEqual(names, [f"state.1.bias.{name}" for name in ("sums.0", "sums.deep.count", "label")])
        self.assertEqual(whole(osd["state.1.bias.sums.0"]), pair.ref_optim.state[pair.ref_model[1].bias]["sums"]["0"])
        set_optimizer_state_dict(other.model, other.optims, osd, options=options)
        self.assertEqual(whole_tree(other.optims[0].state_dict()), whole_tree(pair.optims[0].state_dict()), **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(optim_cls=[NestedStates, NumberedStates], options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_nested_states_keep_their_keys(self, optim_cls, options):
        """After a load an optimizer's nested states have their keys, whether these are strings or ints."""
        pair, other = self._small(0, optim_cls), self._small(1, optim_cls, trained=False)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        set_optimizer_state_dict(other.model, other.optims, self._given(osd, options), options=options)
        actual, expected = (whole_tree(each.optims[0].state_dict()) for each in (other, pair))
        numbered = optim_cls is NumberedStates
        with torch_defect("dsd_nested_states_get_other_keys", when=numbered and options.full_state_dict):
            self.assertEqual(actual, expected, **EXACT)

    @skip_if_lt_x_gpu(2)
    def test_flattened_states_have_numbers_alone(self):
        pair = self._small()
        pair.optims[0].state[pair.model[0].weight]["label"] = "text"
        with self.assertRaisesRegex(NotImplementedError, "only supports.*tensor, int, float.*str"):
            options = StateDictOptions(flatten_optimizer_state_dict=True)
            get_optimizer_state_dict(pair.model, pair.optims, options=options)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL])
    def test_missing_optim_state(self, options):
        pair, other = self._small(0), self._small(1, trained=False)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        del osd["state"]["1.bias"]
        missing = r"^Missing optimizer state for parameter '1\.bias'"
        with (
            torch_defect("dsd_missing_optim_state_raises_key_error"),
            self.assertRaisesRegex(RuntimeError, missing),
        ):
            set_optimizer_state_dict(other.model, other.optims, osd, options=options)
        lenient = dataclasses.replace(options, strict=False)
        with torch_defect("dsd_missing_optim_state_raises_key_error"):
            set_optimizer_state_dict(other.model, other.optims, osd, options=lenient)
            found = get_optimizer_state_dict(other.model, other.optims)["state"]
            # A full state dict is filled with the state that the optimizer had. A sharded one replaces this state.
            self.assertEqual("1.bias" in found, options.full_state_dict)
            self.assertEqual(whole_tree({**found, "1.bias": None}), whole_tree({**osd["state"], "1.bias": None}))

    @skip_if_lt_x_gpu(2)
    @subtests(wrapper=WRAPPERS, options=[StateDictOptions(), FULL])
    def test_missing_optim_state_under_wrappers(self, wrapper, options):
        """Like :meth:`test_missing_optim_state`, for wrapped models: a strict load raises, and with ``strict=False`` a
        load loads the other states.
        """
        pair, other = (
            self._pair(self._plain(seed), functools.partial(self._wrapped, wrapper), width=4) for seed in (0, 1)
        )
        pair.train(range(2))
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        del osd["state"]["1.bias"]
        missing = r"^Missing optimizer state for parameter '1\.bias'"
        with (
            torch_defect("dsd_missing_optim_state_raises_key_error"),
            self.assertRaisesRegex(RuntimeError, missing),
        ):
            set_optimizer_state_dict(other.model, other.optims, osd, options=options)
        lenient = dataclasses.replace(options, strict=False)
        with torch_defect("dsd_missing_optim_state_raises_key_error"):
            set_optimizer_state_dict(other.model, other.optims, osd, options=lenient)
            actual, expected = (
                whole_tree([*map(each.optims[0].state.get, each.model.parameters())]) for each in (other, pair)
            )
            self.assertEqual(actual[:3], expected[:3], may_be="empty", **EXACT)  # a local shard may be empty
            self.assertEqual(bool(actual[3]), options.full_state_dict and "FSDP1" not in wrapper)

    @skip_if_lt_x_gpu(2)
    def test_missing_state_of_flattened_optim_state(self):
        pair = self._small()
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        del osd["state.1.bias.exp_avg"]
        with torch_defect("dsd_flattened_state_missing_in_silence"), self.assertRaises((RuntimeError, KeyError)):
            set_optimizer_state_dict(pair.model, pair.optims, osd, options=options)

    @needs(torch_facts.FLATTENS_NESTED_STATES)
    @skip_if_lt_x_gpu(2)
    def test_empty_state_of_flattened_optim_state(self):
        """A state that is an empty dict has no keys in a flattened state dict, which can be loaded."""
        pair = self._small()
        for state in pair.optims[0].state.values():
            state["history"] = {}
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        set_optimizer_state_dict(pair.model, pair.optims, osd, options=options)
        self.assertEqual([state["history"] for state in pair.optims[0].state.values()], [{}] * 4, may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_flattened_load_after_a_step(self):
        """All ranks pass the same states of a flattened state dict to FSDP1, which runs collectives for each state."""
        pair = self._pair(self._plain(), functools.partial(FSDP, use_orig_params=True), width=4)
        pair.train(range(1))
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        replacement = {"return_value": pair.optims[0].state_dict()}  # the original might hang in its collectives
        with torch_names.patched(FSDP, "optim_state_dict_to_load", **replacement) as to_load:
            set_optimizer_state_dict(pair.model, pair.optims, osd, options=options)
        given = to_load.call_args.args[2]["state"]
        states = {name: sorted(state) for name, state in given.items()}
        actual, expected = of_all_ranks(states), {name: ["exp_avg", "exp_avg_sq", "step"] for name in given}
        with torch_defect("dsd_flattened_load_by_some_ranks"):
            self.assertEqual(actual, [expected] * 2)

    @skip_if_lt_x_gpu(2)
    def test_missing_state_of_broadcast_optim_state(self):
        pair = self._small()
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=FROM_RANK_0)
        del osd["state"]["1.bias"]
        given = self._on_rank_0(osd)
        rejected = self._agreed(
            lambda: set_optimizer_state_dict(pair.model, pair.optims, given, options=FROM_RANK_0), broadcasts=True
        )
        with torch_defect("dsd_refusal_by_one_rank_hangs"):
            self.assertEqual(rejected, "RuntimeError")

    @skip_if_lt_x_gpu(2)
    def test_set_state_dict_broadcasts(self):
        pair = self._small()
        states = pair.states(FROM_RANK_0)
        msd, osd = map(self._on_rank_0, states)
        # Without this replacement rank 0 would wait for the others.
        with torch_names.patched(internals.dsd, "_broadcast_state_dict") as broadcast:
            set_state_dict(pair.model, pair.optims, model_state_dict=msd, optim_state_dict=osd, options=FROM_RANK_0)
        with torch_defect("dsd_set_state_dict_does_not_broadcast"):
            self.assertEqual(broadcast.call_count, 2)

    @skip_if_lt_x_gpu(2)
    def test_state_of_frozen_parameter(self):
        """The optimizer state of a parameter that was trained and then frozen is saved and loaded."""
        pair, other = self._small(0), self._small(1, trained=False)
        for model in (pair.model, other.model):
            model[1].requires_grad_(False)
        set_optimizer_state_dict(other.model, other.optims, get_optimizer_state_dict(pair.model, pair.optims))
        actual, expected = (whole_tree(each.optims[0].state_dict()) for each in (other, pair))
        with torch_defect("dsd_frozen_parameter_loses_its_state"):
            self.assertEqual(sorted(actual["state"]), [0, 1, 2, 3])
            self.assertEqual(
                [actual["state"][number] for number in (2, 3)], [expected["state"][2], expected["state"][3]]
            )
        trained = {number: expected["state"][number] for number in (0, 1)}
        self.assertEqual({number: actual["state"][number] for number in (0, 1)}, trained, **EXACT)
        self.assertEqual(actual["param_groups"], expected["param_groups"])

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_optim_state_of_parameters_that_were_used(self, options):
        """An optimizer state dict can be loaded if it has states of only some parameters."""
        (pair, other), inp = (self._small(seed, trained=False) for seed in range(2)), uniform(1, 4, seed=self.rank)
        pair.model[0](inp).square().sum().backward()
        pair.optims[0].step()
        pair.optims[0].zero_grad()
        used = whole_tree(get_optimizer_state_dict(pair.model, pair.optims)["state"]["0.weight"])
        self.assertGreater(used["exp_avg"].abs().max().item(), 0)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        load = lambda: set_optimizer_state_dict(other.model, other.optims, self._given(osd, options), options=options)  # noqa: E731
        with torch_defect("dsd_optim_state_of_some_parameters_is_refused"):
            self.assertEqual(self._agreed(load, broadcasts=True), "loaded")
            found = get_optimizer_state_dict(other.model, other.optims)["state"]["0.weight"]
            self.assertEqual(whole_tree(found), used, **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_new_optimizer_beside_gradients(self, options):
        """The state of a new optimizer is loaded although parameters have gradients, but not a full one."""
        pair = self._small()
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        train(pair.model, uniform(4, 4, seed=self.rank))
        before = [param.grad.to_local().clone() for param in pair.model.parameters()]
        new = optimizer(torch.optim.Adam, pair.model.parameters())
        rejects = self.assertRaises(AssertionError) if options.full_state_dict else contextlib.nullcontext()
        with rejects:  # it looks for the device among states, which are not created beside gradients
            set_optimizer_state_dict(pair.model, new, self._given(osd, options), options=options)
        if not options.full_state_dict:
            self.assertEqual(whole_tree(new.state_dict()), whole_tree(pair.optims[0].state_dict()), **EXACT)
        self.assertEqual([param.grad.to_local() for param in pair.model.parameters()], before, **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0])
    def test_optimizer_without_states(self, options):
        """The parameter groups of an optimizer without states are loaded, but not from a full state dict."""
        pair, other = (self._small(seed, torch.optim.SGD, trained=False) for seed in range(2))
        pair.optims[0].param_groups[0]["lr"] = 0.25
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        rejects = self.assertRaises(AssertionError) if options.full_state_dict else contextlib.nullcontext()
        with rejects:  # it looks for the device among states
            set_optimizer_state_dict(other.model, other.optims, self._given(osd, options), options=options)
            self.assertEqual(other.optims[0].state_dict(), pair.optims[0].state_dict(), may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_flattened_full_optim_state(self):
        pair, other = self._small(0), self._small(1, trained=False)
        options = StateDictOptions(full_state_dict=True, flatten_optimizer_state_dict=True)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), osd)
        with self.assertRaises(KeyError):  # it is filled into a flattened state dict after it was unflattened
            set_optimizer_state_dict(other.model, other.optims, osd, options=options)

    @skip_if_lt_x_gpu(2)
    def test_tuples_among_settings(self):
        pair = self._small()
        before = copy.deepcopy(pair.optims[0].param_groups[0]["betas"])
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=FULL)
        set_optimizer_state_dict(pair.model, pair.optims, osd, options=FULL)
        found = pair.optims[0].param_groups[0]["betas"]
        self.assertEqual(repr(found), repr(list(before)))  # any sequence is rebuilt as a list

    @skip_if_lt_x_gpu(2)
    @subtests(full=[False, True], cpu_offload=[False, True])
    def test_kinds_of_settings(self, full, cpu_offload):
        """Settings are saved as the optimizer has them: tuples are no lists, and None and bools are no numbers."""
        pair, options = self._small(), StateDictOptions(full_state_dict=full, cpu_offload=cpu_offload)
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        if full and cpu_offload and self.rank > 0:
            self.assertEqual(osd, {}, may_be="empty")
            return
        found, expected = osd["param_groups"][0], pair.optims[0].param_groups[0]
        for name in expected.keys() - {"params"}:
            self.assertEqual(repr(found[name]), repr(expected[name]), name)

    @skip_if_lt_x_gpu(2)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0, StateDictOptions(flatten_optimizer_state_dict=True)])
    def test_several_optimizers(self, options):
        """Each of several optimizers loads its own settings, and its own states as shards."""
        pair, other = (
            self._pair(
                self._plain(seed),
                self._layers,
                Optimizers(split=lambda model: [each.parameters() for each in model]),
                width=4,
            )
            for seed in range(2)
        )
        for number, optim in enumerate(pair.optims, 2):
            optim.param_groups[0]["lr"] /= number
        pair.train(range(2))
        osd = get_optimizer_state_dict(pair.model, pair.optims, options=options)
        set_optimizer_state_dict(other.model, other.optims, self._given(osd, options), options=options)
        for optims in zip(other.optims, pair.optims, strict=True):
            actual, expected = (whole_tree(optim.state_dict()) for optim in optims)
            self._compare_states(actual, expected)
            for state in optims[0].state.values():
                self.assertIsInstance(state["exp_avg"], DTensor)

    @skip_if_lt_x_gpu(2)
    @subtests(optim_cls=ADAMS)
    def test_asking_for_states_changes_nothing(self, optim_cls):
        """``get_optimizer_state_dict`` before the first step does not change the training."""
        pair = self._small(0, optim_cls, trained=False)
        settings = copy.deepcopy(pair.optims[0].state_dict()["param_groups"])
        get_optimizer_state_dict(pair.model, pair.optims)
        self._verify_msd(pair.ref_model.state_dict(), get_model_state_dict(pair.model), **EXACT)
        self.assertEqual(pair.optims[0].state_dict()["param_groups"], settings)
        self.assertEqual([param.grad for param in pair.model.parameters()], [None] * 4)
        pair.train(range(2))
        states = pair.states()
        with torch_defect("dsd_asking_for_optim_state_is_a_step"):
            self._verify_pair(pair, *states)

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=["FSDP1", "FSDP2"], optim_cls=[torch.optim.SGD, torch.optim.Adam, WithoutLearningRate])
    def test_learning_rates_after_asking_for_states(self, fsdp, optim_cls):
        """``get_optimizer_state_dict`` keeps the learning rate of each group: a float, a tensor, or none at all."""
        model = self._wrapped(fsdp, self._plain())
        params = list(model.parameters())
        rates = [0.1, torch.tensor(0.2), 0.3, 0.4] if optim_cls is not WithoutLearningRate else [0.1, None, 0.3, None]
        groups = [{"params": [param]} | ({} if rate is None else {"lr": rate}) for param, rate in zip(params, rates)]
        optim = optim_cls(groups, **({"foreach": False} if optim_cls is not WithoutLearningRate else {}))
        before = whole_tree(params)
        get_optimizer_state_dict(model, optim)
        found = [group.get("lr") for group in optim.param_groups]
        self.assertEqual((found, list(map(type, found))), (rates, list(map(type, rates))), may_be="same")
        self.assertEqual(whole_tree(params), before, may_be="empty", **EXACT)

    @skip_if_lt_x_gpu(2)
    @subtests(fsdp=["FSDP1", "FSDP2"], lr=[0.1, torch.tensor(0.1)], has_gradients=[False, True])
    def test_optimizer_without_a_first_step_stays_as_it_is(self, fsdp, lr, has_gradients):
        """``get_optimizer_state_dict`` changes no parameters if the optimizer cannot step without a closure.

        If parameters have gradients, DSD does not call ``step``. Otherwise ``step`` raises at a learning rate of zero.
        """
        model = self._wrapped(fsdp, self._plain())
        if has_gradients:
            model(torch.ones(1, 4, device=self.device)).sum().backward()
        params = list(model.parameters())
        before = whole_tree(params), whole_tree([param.grad for param in params])
        optim = torch.optim.LBFGS(params, lr=copy.deepcopy(lr))
        with contextlib.suppress(TypeError):
            get_optimizer_state_dict(model, optim)
        self.assertEqual(whole_tree(params), before[0], may_be="empty", **EXACT)
        self.assertEqual(optim.param_groups[0]["lr"], lr * has_gradients, may_be="zero")
        if has_gradients:
            self.assertEqual(whole_tree([param.grad for param in params]), before[1], may_be="empty", **EXACT)

    # --- What is rejected ---

    @skip_if_lt_x_gpu(2)
    def test_refusals(self):
        pair = self._small()
        msd, osd = pair.states()
        with self.assertRaisesRegex(ValueError, "full_state_dict must be True when broadcast_from_rank0"):
            set_model_state_dict(pair.model, msd, options=StateDictOptions(broadcast_from_rank0=True))
        with self.assertRaisesRegex(RuntimeError, "Optimizers are not passed in"):
            set_optimizer_state_dict(pair.model, [], osd)
        with self.assertRaisesRegex(RuntimeError, "model state_dict is empty"):
            set_model_state_dict(pair.model, {})
        with self.assertRaisesRegex(RuntimeError, "optim state_dict is empty"):
            set_optimizer_state_dict(pair.model, pair.optims, {})
        with self.assertRaisesRegex(RuntimeError, "_flat_param.*not the root module"):
            set_model_state_dict(pair.model, {**msd, "0._flat_param": msd["0.weight"]})
        with self.assertRaisesRegex(KeyError, "^0$"):
            get_optimizer_state_dict(pair.model, torch.optim.Adam(pair.ref_model.parameters()))

        empty = torch.optim.Adam([{"params": pair.model.parameters()}, {"params": []}])
        with self.assertRaisesRegex(ValueError, "param groups that have zero parameters"):
            set_optimizer_state_dict(pair.model, empty, osd)
        groups = [*osd["param_groups"], {**osd["param_groups"][0], "params": []}, {**osd["param_groups"][0]}]
        with self.assertRaisesRegex(ValueError, "multiple optimizers are not supported"):
            set_optimizer_state_dict(pair.model, empty, {**osd, "param_groups": groups})

    @skip_if_lt_x_gpu(2)
    def test_refused_loads_leave_the_optimizer(self):
        """After a load that raises, the states and parameter groups of the optimizer are unchanged on each rank."""
        pair = self._small()
        before = whole_tree(pair.optims[0].state_dict())
        osd = get_optimizer_state_dict(pair.model, pair.optims)
        wrong = {**osd, "param_groups": [{**group, "params": group["params"][:-1]} for group in osd["param_groups"]]}
        wrong["state"] = {name: {} for name in list(osd["state"])[:-1]}
        with self.assertRaisesRegex((RuntimeError, KeyError), r"\b1\.bias\b"):
            set_optimizer_state_dict(pair.model, pair.optims, wrong)
        self.assertEqual(whole_tree(pair.optims[0].state_dict()), before, **EXACT)

    # --- Training goes on ---

    @requires_world_size(4)
    @subtests(options=[StateDictOptions(), FULL, FROM_RANK_0, StateDictOptions(flatten_optimizer_state_dict=True)])
    def test_trajectory(self, options):
        """A new model with the loaded state continues bitwise like the saved one, with two parameter groups, a
        scheduler, and uneven shards.
        """

        def init(seed: int) -> tuple[ModelPair, Any]:
            manual_seed(seed)
            plain = nn.Sequential(nn.Linear(7, 7, device=self.device), nn.Linear(7, 7, device=self.device))
            pair = self._pair(plain, self._layers, width=7)
            groups = [{"params": layer.parameters(), "lr": 0.1 / i} for i, layer in enumerate(pair.model, 1)]
            pair.optims = [torch.optim.Adam(groups)]
            return pair, torch.optim.lr_scheduler.ExponentialLR(pair.optims[0], 0.5)

        def train_on(pair: ModelPair, scheduler: Any, steps: range) -> None:
            for step in steps:
                pair.train(range(step, step + 1))
                scheduler.step()

        pair, scheduler = init(0)
        train_on(pair, scheduler, range(3))
        states, scheduled = copy.deepcopy(pair.states(options)), scheduler.state_dict()
        train_on(pair, scheduler, range(3, 6))

        other, other_scheduler = init(1)
        msd, osd = (self._given(each, options) for each in states)
        other.load(msd, osd, options)
        other_scheduler.load_state_dict(scheduled)
        train_on(other, other_scheduler, range(3, 6))
        for actual, expected in zip(other.states(), pair.states(), strict=True):
            actual, expected = whole_tree(actual), whole_tree(expected)
            if "param_groups" in actual:
                self._compare_states(actual, expected)
            else:
                self.assertEqual(actual, expected, **EXACT)

    @requires_world_size(4)
    def test_trajectory_on_fewer_ranks(self):
        """Four ranks save full state dicts, and two ranks continue with the same batch size."""

        def train_on(model: Any, optim: Any, steps: range, size: int) -> None:
            for step in steps:
                batch = uniform(8, 7, seed=step).chunk(size)[self.rank]
                optim.zero_grad()
                train(model, batch)
                optim.step()

        def init(seed: int, mesh: DeviceMesh | None) -> tuple[Any, Any]:
            manual_seed(seed)
            model = nn.Sequential(nn.Linear(7, 3, device=self.device), nn.Linear(3, 7, device=self.device))
            if mesh is not None:
                shard_each((*model, model), mesh=mesh)
            return model, optimizer(torch.optim.Adam, model.parameters())

        of_four, of_two = (DeviceMesh(self.device.type, list(range(size))) for size in (4, 2))
        four = init(0, of_four)
        train_on(*four, range(3), 4)
        states = get_state_dict(*four, options=FULL)
        if self.rank < 2:
            two = init(1, of_two)
            set_state_dict(*two, model_state_dict=states[0], optim_state_dict=states[1], options=FULL)
            train_on(*two, range(3, 6), 2)
            plain, optim = init(0, None)
            for step in range(6):
                optim.zero_grad()
                train(plain, uniform(8, 7, seed=step))
                optim.step()
            for name, param in two[0].named_parameters():
                self.assertEqual(param.full_tensor(), plain.get_parameter(name), msg=name)


if __name__ == "__main__":
    run_tests()
