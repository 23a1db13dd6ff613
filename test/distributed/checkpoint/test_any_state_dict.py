"""Distributed state dicts (DSD) of a model with everything, in any wrapper and with any options.

The reference is the plain model with plain optimizers.
"""

from __future__ import annotations

import dataclasses
import functools
import traceback
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_distributed.requirements import skip_unless
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.common_state_dict import (
    MOMENTS,
    StateDict,
    by_parameter,
    copied,
    is_sharded,
    named_osd,
)
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import average_gradients, of_all_ranks
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.shards import local_of, shard_of
from torch_fsdp_tests.fsdp.training import replicate_each, shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts

WIDTH = 4
STATELESS = "SGD without states"
ON_HOST = " on host"
CONFIG: dict[str, list[Any]] = {
    "wrapper": ["none", "FSDP1", "FSDP1 flat", "FSDP2", "replicate", "TP"],
    "save": [how + where for how in ("sharded", "full", "from rank 0") for where in ("", ON_HOST)],
    "groups": ["one", "several", "two optimizers"],
    "optimizer": ["Adam", "SGD", STATELESS],
    "target": ["new", "trained", "poorer"],
    "around": [(), ("checkpointing",), ("compilation",), ("checkpointing", "compilation")],
    **{name: [False, True] for name in ("flatten", "ignore_frozen", "frozen", "tied")},
}
AROUND = {"checkpointing": checkpoint_wrapper, "compilation": functools.partial(torch.compile, backend="eager")}
BASE = {"wrapper": "FSDP2", **{name: values[0] for name, values in CONFIG.items() if name != "wrapper"}}


class Case(NamedTuple):
    """How a model is wrapped, optimized, saved and loaded. ``target`` is the model that loads. ``around`` the block are
    other wrappers, the inner one first.
    """

    wrapper: str
    save: str
    groups: str
    optimizer: str
    target: str
    around: tuple[str, ...]
    flatten: bool
    ignore_frozen: bool
    frozen: bool
    tied: bool

    @property
    def is_fsdp1(self) -> bool:
        return self.wrapper.startswith("FSDP1")

    @property
    def is_full(self) -> bool:
        return not self.save.startswith("sharded")

    @property
    def is_broadcast(self) -> bool:
        return self.save.startswith("from rank 0")

    @property
    def is_poor(self) -> bool:
        """The target lacks a layer."""
        return self.target == "poorer"

    @property
    def leaves_out(self) -> bool:
        """The frozen layer is not saved."""
        return self.frozen and self.ignore_frozen

    @property
    def options(self) -> StateDictOptions:
        return StateDictOptions(
            full_state_dict=self.is_full,
            cpu_offload=self.save.endswith(ON_HOST),
            broadcast_from_rank0=self.is_broadcast,
            flatten_optimizer_state_dict=self.flatten,
            ignore_frozen_params=self.ignore_frozen,
            strict=not (self.leaves_out or self.is_poor),
        )


class Limit(NamedTuple):
    """Cases that torch is known to handle differently.

    ``example`` is such a case. It raises ``error``, or shows a known defect. Without an example, a rank would hang or
    crash.
    """

    applies: Callable[[Case], bool]
    why: str  # what differs, and where in torch; or the id of a defect
    error: str = ""  # a regular expression for the error and the functions of torch that raise it
    example: dict[str, Any] | None = None
    shows: Callable[[], AbstractContextManager[Any]] | None = None


LIMITS = (
    Limit(
        lambda case: case.is_full and not case.is_fsdp1 and case.optimizer == STATELESS,
        "a full optimizer state dict without states is not loaded: _load_optim_state_dict asks a state for its device",
        r"AssertionError.* in .*_load_optim_state_dict$",
        {"save": "full", "optimizer": STATELESS},
    ),
    Limit(
        lambda case: case.is_full and not case.is_fsdp1 and case.flatten,
        "a full optimizer state dict is not loaded if it is flattened: _load_optim_state_dict flattens it again",
        r"KeyError.* in .*_load_optim_state_dict",
        {"save": "full", "flatten": True},
    ),
    Limit(
        lambda case: case.is_fsdp1 and case.optimizer == STATELESS and ("flat" in case.wrapper or case.is_poor),
        "FSDP1 does not load a flat parameter without states: _flatten_optim_state_dict asks for one",
        r"RuntimeError.* in .*_flatten_optim_state_dict$",
        {"wrapper": "FSDP1 flat", "optimizer": STATELESS, "flatten": True},
    ),
    Limit(
        lambda case: "flat" in case.wrapper and case.is_full and case.leaves_out,
        "a flat parameter is given its own shard for what a full state dict lacks: _load_model_state_dict",
        r"RuntimeError: Error.* in loading state_dict.*_load_model_state_dict",
        {"wrapper": "FSDP1 flat", "save": "full", "frozen": True, "ignore_frozen": True},
    ),
    Limit(
        lambda case: case.around == ("compilation", "checkpointing"),
        "names have the prefix of a compiled module inside of a checkpoint wrapper: _get_fqns",
        r"AssertionError.*_orig_mod",
        {"around": ("compilation", "checkpointing")},
    ),
    Limit(
        lambda case: case.is_fsdp1 and "compilation" in case.around,
        "names have the prefix of a compiled module inside of an instance: _get_fqns",
        r"AssertionError.*_orig_mod",
        {"wrapper": "FSDP1", "around": ("compilation",)},
    ),
    Limit(
        lambda case: case.optimizer == STATELESS and not case.flatten and (case.is_poor or case.groups[:3] == "two"),
        "the states of SGD without momentum go to other parameters",
        example={"optimizer": STATELESS, "target": "poorer"},
        shows=lambda: torch_defect("dsd_stateless_optimizers_are_mixed_up"),
    ),
    Limit(
        lambda case: case.is_poor and case.save == "from rank 0" + ON_HOST,
        "rank 0 broadcasts a key that the target lacks",
        example={"save": "from rank 0" + ON_HOST, "target": "poorer"},
        shows=lambda: torch_defect("dsd_offloaded_broadcast_of_unknown_key_raises"),
    ),
    Limit(
        lambda case: "flat" in case.wrapper and "checkpointing" in case.around,
        "names of the states of checkpointed modules are not found",
        example={"wrapper": "FSDP1 flat", "around": ("checkpointing",)},
        shows=lambda: torch_defect("dsd_checkpointed_optim_state_is_refused"),
    ),
    Limit(
        lambda case: case.is_fsdp1 and case.tied and case.is_broadcast and case.options.strict,
        "ranks after the first lack the second name of a shared parameter, and raise: _load_model_state_dict",
    ),
    Limit(
        lambda case: case.wrapper == "FSDP1" and case.flatten and case.target == "trained",
        "dsd_flattened_load_by_some_ranks",
    ),
    Limit(
        lambda case: case.is_fsdp1 and case.is_full and case.save.endswith(ON_HOST) and accelerator.current().is_cpu,
        "fsdp1_offloading_on_the_host_frees_parameters",
    ),
)


def is_valid(**values: Any) -> bool:
    return not any(limit.applies(Case(**values)) for limit in LIMITS)


class Statistics(nn.Module):
    """Each forward changes its buffers, one of which nothing saves, and its extra state."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.register_buffer("count", torch.tensor(start))
        self.register_buffer("sums", torch.full((3,), 1.0 + start))
        self.register_buffer("cache", torch.full((2,), 2.0 + start), persistent=False)
        self.calls = start

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for buffer in self.buffers():
            buffer += 1
        self.calls += 1
        return x

    def get_extra_state(self) -> Any:
        return {"calls": self.calls}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["calls"]


class Block(nn.Module):
    """A hidden layer that 2 ranks share unevenly, except under tensor parallelism."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net1, self.net2 = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.net2(self.net1(x).tanh())


class Net(nn.Module):
    """A block, a layer that may be frozen, two layers with one name as a prefix, and one that a poor model lacks."""

    def __init__(self, case: Case, seed: int, is_poor: bool) -> None:
        super().__init__()
        manual_seed(seed)
        self.statistics = Statistics(10 * seed)
        self.block: Any = Block(6 if case.wrapper == "TP" else 5)
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.embed_out = nn.Linear(WIDTH, WIDTH)
        self.aside = None if is_poor else nn.Linear(WIDTH, WIDTH, bias=False)
        manual_seed(0 if case.leaves_out else seed)
        self.still = nn.Linear(WIDTH, WIDTH).requires_grad_(not case.frozen)
        if case.tied:
            self.embed_out.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.still(self.embed(self.block(self.statistics(x))).tanh())
        return self.embed_out(x) + (0 if self.aside is None else self.aside(x))


def wrapped(model: Net, wrapper: str) -> Any:
    """Apply the wrapper to the block, the layer that may be frozen, and the rest."""
    mesh, units = make_mesh(2), [model.block, model.still]
    if wrapper == "TP":
        inner = next(module for module in model.block.modules() if isinstance(module, Block))
        parallelize_module(inner, mesh, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
    elif wrapper == "FSDP2":
        shard_each([*units, model], mesh=mesh)
    elif wrapper == "replicate":
        replicate_each([*units, model], mesh=mesh)
    elif wrapper.startswith("FSDP1"):
        ids = set(map(id, units))
        policy = CustomPolicy(lambda module: id(module) in ids)
        return FSDP(model, auto_wrap_policy=policy, device_mesh=mesh, use_orig_params="flat" not in wrapper)
    return model


def optimizers(case: Case, model: nn.Module) -> list[torch.optim.Optimizer]:
    """One optimizer, or two of different kinds. Groups have settings of their own; one may be frozen as a whole."""
    settings = {"foreach": False} if case.wrapper == "TP" else fused_on_host()
    makers = {
        "Adam": lambda params: torch.optim.Adam(params, lr=0.02, eps=1e-3, **settings),
        "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
        STATELESS: lambda params: torch.optim.SGD(params, lr=0.1),
    }
    make, other = makers[case.optimizer], makers["SGD" if case.optimizer == "Adam" else "Adam"]
    params: dict[str, list[nn.Parameter]] = {"block": [], "still": [], "": []}
    for name, param in model.named_parameters():
        params[next(prefix for prefix in params if internals.clean_name(name).startswith(prefix))].append(param)
    groups = [
        {"params": params["block"], "lr": 0.03},
        {"params": params["still"], "lr": 0.5, "weight_decay": 0.25},
        {"params": params[""]},
    ]
    if case.groups == "two optimizers":
        return [make(groups[:2]), other(groups[2:])]
    return [make(groups if case.groups == "several" else list(model.parameters()))]


class Training(NamedTuple):
    """A model with its optimizers."""

    model: Any
    optims: list[torch.optim.Optimizer]
    is_plain: bool

    def step(self, number: int, data_rank: int) -> torch.Tensor:
        """One step. A plain model takes the mean of the gradients of all ranks. Returns the loss."""
        loss = train(self.model, uniform(3, WIDTH, seed=100 * number + data_rank))
        if self.is_plain:
            average_gradients(self.model)
        for optim in self.optims:
            optim.step()
            optim.zero_grad()
        return loss

    def states(self, options: StateDictOptions | None = None) -> tuple[StateDict, StateDict]:
        """The state dict of the model, and the entries of that of its optimizers for each parameter."""
        msd, osd = get_state_dict(self.model, self.optims, options=options)
        return msd, by_parameter(osd)

    def plain_states(self, without: str = "nothing") -> tuple[StateDict, StateDict]:
        """The same for a plain model, without DSD. Copies, without entries with this word in their names."""
        osd: StateDict = {}
        for optim in self.optims:
            osd |= by_parameter(named_osd(self.model, optim))
        states = dict(self.model.state_dict()), osd
        kept = ({name: value for name, value in each.items() if without not in name} for each in states)
        return copied(tuple(kept))


def training(case: Case, wrapper: str, seed: int, is_poor: bool = False) -> Training:
    model = Net(case, seed, is_poor).to(accelerator.current().device(torch.distributed.get_rank()))
    if wrapper != "plain":
        for name in case.around:
            model.block = AROUND[name](model.block)
        model = wrapped(model, wrapper)
    return Training(model, optimizers(case, model), is_plain=wrapper == "plain")


class TestAnyStateDict(FSDPTest):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, among=800, valid=is_valid, **CONFIG)
    def test_saved_and_loaded(self, **values):
        """What is saved equals the states of the plain model. A model that loads it trains on like the plain one."""
        self._check_case(Case(**values))

    @skip_if_lt_x_gpu(2)
    @subtests(limit=[limit for limit in LIMITS if limit.example is not None])
    def test_known_to_differ(self, limit):
        case = Case(**BASE | limit.example)
        self.assertTrue(limit.applies(case))
        if limit.shows is not None:
            with limit.shows():
                self._check_case(case)
            return
        try:
            self._check_case(case)
        except (AssertionError, KeyError, RuntimeError) as error:
            functions = " ".join(frame.name for frame in traceback.extract_tb(error.__traceback__))
            raised = f"{type(error).__name__}: {error} in {functions}".replace("\n", " ")
        else:
            raised = "nothing"
        self.assertRegex(raised, limit.error, f"torch differs no more, or in another way: {limit.why}")

    @skip_if_lt_x_gpu(2)
    @subtests(wrapper=["FSDP2", "replicate", "TP"], with_grad=[True, False], tied=[False, True])
    def test_state_dict_of_each_module(self, wrapper, with_grad, tied):
        """After a forward, ``state_dict`` of any module has its shards under the names of the plain module."""
        if wrapper == "replicate":
            skip_unless([torch_facts.REPLICATES_WITHOUT_SHARDS.lacks])
        case = Case(**BASE | {"wrapper": wrapper, "tied": tied})
        plain, sharded = (training(case, each, 0) for each in ("plain", wrapper))
        inp = uniform(3, WIDTH, seed=0)
        for name, module in sharded.model.named_modules():
            for model in (plain.model, sharded.model):
                with torch.set_grad_enabled(with_grad):
                    model(inp)
            states = module.state_dict(), dict(plain.model.get_submodule(name).state_dict())
            self._check_states(*((state, {}) for state in states))
            if wrapper != "TP":
                params = {key for key, _ in module.named_parameters(remove_duplicate=False)}
                self.assertEqual({key for key, value in states[0].items() if is_sharded(value)}, params, may_be="empty")
        self.assertEqual(*(each.step(1, 0 if wrapper == "TP" else self.rank) for each in (sharded, plain)))

    @skip_if_lt_x_gpu(2)
    @subtests(
        wrapper=["none", "FSDP1", "FSDP2", "TP"],
        save=["sharded", "full", "full" + ON_HOST],
        keeps=[True, False],
        valid=lambda keeps, **case: is_valid(**BASE | case),
    )
    def test_submodules(self, wrapper, save, keeps):
        """The state dict of a module has what is below it in the plain model, and a load changes nothing else."""
        case = Case(**BASE | {"wrapper": wrapper, "save": save})
        plain, other = (training(case, "plain", seed).model for seed in (0, 1))
        saved, loaded = (training(case, wrapper, seed).model for seed in (0, 1))
        options = dataclasses.replace(case.options, keep_submodule_prefixes=keeps)
        below_saved, below_loaded = (
            {internals.clean_name(name): module for name, module in model.named_modules()} for model in (saved, loaded)
        )
        wanted = dict(other.state_dict())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # the argument is deprecated
            for name in ("block.net2", "embed", "still", "statistics"):
                state = get_model_state_dict(saved, submodules={below_saved[name]}, options=options)
                below = {f"{name}.{key}": value for key, value in plain.get_submodule(name).state_dict().items()}
                expected = below if keeps else {key.removeprefix(f"{name}."): value for key, value in below.items()}
                is_here = self.rank == 0 or not (case.is_full and options.cpu_offload)
                self._check_states((state, {}), (expected if is_here else {}, {}))
                if case.is_full:  # it would make up the extra state: see the defect dsd_missing_extra_state_is_made_up
                    continue
                if not keeps:
                    state = {below_loaded[name]: state}
                set_model_state_dict(loaded, state, options=dataclasses.replace(options, strict=False))
                wanted |= below
                self._check_states((get_model_state_dict(loaded), {}), (wanted, {}))

    def _check_case(self, case: Case) -> None:
        if case.wrapper == "replicate":
            skip_unless([torch_facts.REPLICATES_WITHOUT_SHARDS.lacks])
        data_rank = 0 if case.wrapper in ("TP", "none") else self.rank
        plain, saved = (training(case, wrapper, 0) for wrapper in ("plain", case.wrapper))
        loaded = training(case, case.wrapper, 1, case.is_poor)
        self.assertEqual(saved.step(0, data_rank), plain.step(0, data_rank))
        if case.target == "trained":
            loaded.step(9, data_rank)

        msd, osd = get_state_dict(saved.model, saved.optims, options=case.options)
        expected = plain.plain_states("aside" if case.is_poor else "nothing")
        self._check_saved(case, msd, osd, plain)
        self._check_no_gradients(saved)
        msd, osd = copied((msd, osd))
        loss = plain.step(1, data_rank)
        self.assertEqual(saved.step(1, data_rank), loss)
        if case.options.cpu_offload and case.is_full:
            msd, osd = of_all_ranks((msd, osd))[0]
        self._load(case, loaded, msd, osd)
        self._check_no_gradients(loaded)
        if not case.is_poor:
            self.assertEqual(loaded.step(1, data_rank), loss)
            expected = plain.plain_states()
        self._check_states(loaded.states(), expected)

    def _check_saved(self, case: Case, msd: StateDict, osd: StateDict, plain: Training) -> None:
        expected = plain.plain_states()
        if case.leaves_out:
            expected = {name: value for name, value in expected[0].items() if "still" not in name}, expected[1]
        only_first = case.is_full and case.options.cpu_offload
        if self.rank > 0 and only_first:
            expected = {}, {}
        elif self.rank > 0 and case.is_fsdp1 and case.is_broadcast:  # as the load needs them on rank 0 only
            expected = expected[0], {}
        actual = msd, by_parameter(osd) if osd else {}
        self._check_states(actual, expected)
        if case.is_full:
            self.assertFalse(any(map(is_sharded, (*actual[0].values(), *actual[1].values()))))

    def _load(self, case: Case, loaded: Training, msd: StateDict, osd: StateDict) -> None:
        model, optims, options = loaded.model, loaded.optims, case.options
        before = list(map(id, model.parameters()))
        cache = next(buffer for name, buffer in model.named_buffers() if name.endswith("cache"))
        own = cache.clone()
        if case.is_broadcast:
            msd, osd = (msd, osd) if self.rank == 0 else ({}, {})
            set_optimizer_state_dict(model, optims, osd, options=options)
            keys = set_model_state_dict(model, msd, options=options)
        else:
            keys = set_state_dict(model, optims, model_state_dict=msd, optim_state_dict=osd, options=options)
        self.assertEqual(cache, own, "a buffer that nothing saves")
        self.assertEqual(list(map(id, model.parameters())), before, "the parameters are other objects")
        is_reported = case.is_poor and (self.rank == 0 or not case.is_broadcast)
        self.assertEqual(list(keys.unexpected_keys), ["aside.weight"] if is_reported else [], may_be="empty")

    def _check_states(self, actual: tuple[StateDict, StateDict], expected: tuple[StateDict, StateDict]) -> None:
        for found, wanted, tolerance in zip(actual, expected, ({}, MOMENTS), strict=True):
            self.assertEqual(sorted(found), sorted(wanted), may_be="empty")
            wanted = {
                name: shard_of(value, found[name]) if is_sharded(found[name]) else value
                for name, value in wanted.items()
            }
            self.assertEqual(
                {name: local_of(value) for name, value in found.items()}, wanted, may_be="empty", **tolerance
            )

    def _check_no_gradients(self, trained: Training) -> None:
        self.assertEqual({param.grad for param in trained.model.parameters()}, {None})


if __name__ == "__main__":
    run_tests()
