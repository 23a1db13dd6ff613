"""Public methods of FSDP1 in unusual states: each returns what it documents, and then training works as usual."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import OptimStateKeyType, StateDictType

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters, named
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.installed_torch import torch_names

default_hooks = torch_names.module("torch.distributed.algorithms._comm_hooks.default_hooks")

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT


@dataclasses.dataclass
class Side:
    """A model, one of its modules, and the optimizer of this module's parameters."""

    root: Any
    target: Any
    optim: torch.optim.Optimizer

    @classmethod
    def of(cls, root: nn.Module, target: nn.Module) -> Side:
        return cls(root, target, torch.optim.SGD(target.parameters(), lr=0.05, momentum=0.9))

    def backward(self, seed: int) -> torch.Tensor:
        loss = (self.root(uniform(2, 3, seed=seed)) - 1).square().sum()
        loss.backward()
        return loss.detach()

    def states(self) -> dict[str, Any]:
        """The optimizer's states, by the names of parameters in the target."""
        return {
            name: self.optim.state[param] for name, param in named(self.target).items() if param in self.optim.state
        }


# Returns the results of the FSDP side and of the plain side. If FSDP raises, the plain side is not changed.
Call = Callable[[Side, Side], tuple[Any, Any]]


def double(module: nn.Module) -> None:
    with torch.no_grad():
        for param in module.parameters(recurse=False):
            param.mul_(2)


def apply(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    return fsdp.target.apply(double) is fsdp.target, plain.target.apply(double) is plain.target


def summon(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    with FSDP.summon_full_params(fsdp.target):
        for module in fsdp.target.modules():
            double(module)
    plain.target.apply(double)
    return None, None


def forward(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    with torch.no_grad():
        return tuple(each.target.forward(uniform(2, 3, seed=5)) for each in (fsdp, plain))


def names_from(method: str) -> Call:
    def call(fsdp: Side, plain: Side) -> tuple[Any, Any]:
        with FSDP.summon_full_params(fsdp.target):
            found = list(dict(getattr(fsdp.target, method)()))
        return found, list(dict(getattr(plain.target, method)()))

    return call


def set_type(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    before = FSDP.set_state_dict_type(fsdp.target, SHARDED)
    found = FSDP.get_state_dict_type(fsdp.target).state_dict_type
    FSDP.set_state_dict_type(fsdp.target, before.state_dict_type, before.state_dict_config)
    return (before.state_dict_type, found), (FULL, SHARDED)


def full_state_dict(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    with FSDP.state_dict_type(fsdp.target, FULL):
        return fsdp.target.state_dict(), plain.target.state_dict()


def no_sync(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    with fsdp.target.no_sync():
        return fsdp.backward(seed=3 + dist.get_rank()), plain.backward(seed=3 + dist.get_rank())


def clip(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    """Clip the gradients of an earlier backward, or nothing."""
    found = fsdp.target.clip_grad_norm_(0.1)
    return found, nn.utils.clip_grad_norm_(plain.target.parameters(), 0.1)


def register_hook(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    state = default_hooks.DefaultState(fsdp.root.process_group)
    return fsdp.target.register_comm_hook(state, default_hooks.reduce_scatter_hook), None


def full_optim_state(fsdp: Side) -> dict[str, Any]:
    return FSDP.full_optim_state_dict(fsdp.target, fsdp.optim, rank0_only=False)


def load(fsdp: Side, state: dict[str, Any]) -> tuple[Any, Any]:
    """Set the optimizer's states to zero, and then load ``state``, which was its own."""
    for values in fsdp.optim.state.values():
        for value in values.values():
            value.zero_()
    fsdp.optim.load_state_dict(state)
    return None, None


def load_optim_state(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    state = FSDP.optim_state_dict(fsdp.target, fsdp.optim)
    return load(fsdp, FSDP.optim_state_dict_to_load(fsdp.target, fsdp.optim, state))


def shard_full(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    return load(fsdp, FSDP.shard_full_optim_state_dict(full_optim_state(fsdp), fsdp.target, optim=fsdp.optim))


def scatter_full(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    state = full_optim_state(fsdp)
    state_of_first = state if dist.get_rank() == 0 else None
    return load(fsdp, FSDP.scatter_full_optim_state_dict(state_of_first, fsdp.target, optim=fsdp.optim))


def flatten_sharded(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    state = FSDP.sharded_optim_state_dict(fsdp.target, fsdp.optim)
    return load(fsdp, FSDP.flatten_sharded_optim_state_dict(state, fsdp.target, fsdp.optim))


def rekey(fsdp: Side, plain: Side) -> tuple[Any, Any]:
    by_id = FSDP.rekey_optim_state_dict(
        full_optim_state(fsdp), OptimStateKeyType.PARAM_ID, plain.target, optim=plain.optim
    )
    return by_id["state"], plain.optim.state_dict()["state"]


METHODS: dict[str, Call] = {
    "module": lambda fsdp, plain: (type(fsdp.target.module), type(plain.target)),
    "check_is_root": lambda fsdp, plain: (fsdp.target.check_is_root(), plain.target is plain.root),
    "fsdp_modules": lambda fsdp, plain: (len(FSDP.fsdp_modules(fsdp.target)), 1 + (plain.target is plain.root)),
    "apply": apply,
    "set_state_dict_type": set_type,
    "get_state_dict_type": lambda fsdp, plain: (FSDP.get_state_dict_type(fsdp.target).state_dict_type, FULL),
    "state_dict_type": full_state_dict,
    "forward": forward,
    "summon_full_params": summon,
    "named_buffers": names_from("named_buffers"),
    "named_parameters": names_from("named_parameters"),
    "no_sync": no_sync,
    "clip_grad_norm_": clip,
    "register_comm_hook": register_hook,
    "optim_state_dict": lambda fsdp, plain: (FSDP.optim_state_dict(fsdp.target, fsdp.optim)["state"], plain.states()),
    "optim_state_dict_to_load": load_optim_state,
    "full_optim_state_dict": lambda fsdp, plain: (full_optim_state(fsdp)["state"], plain.states()),
    "sharded_optim_state_dict": lambda fsdp, plain: (
        sorted(FSDP.sharded_optim_state_dict(fsdp.target, fsdp.optim)["state"]),
        sorted(plain.states()),
    ),
    "shard_full_optim_state_dict": shard_full,
    "scatter_full_optim_state_dict": scatter_full,
    "flatten_sharded_optim_state_dict": flatten_sharded,
    "rekey_optim_state_dict": rekey,
}


def evaluate(side: Side) -> None:
    with torch.no_grad():
        side.root(uniform(2, 3, seed=4))


def fail_in_forward(side: Side) -> None:
    """The inner module raises, during the second forward."""
    evaluate(side)
    with contextlib.suppress(ZeroDivisionError), mock.patch.object(nn.Linear, "forward", side_effect=ZeroDivisionError):
        evaluate(side)


BEFORE, EVALUATED, FAILED = "before the first forward", "after a forward under no_grad", "after an exception in forward"
STATES: dict[str, Callable[[Side], None]] = {
    BEFORE: lambda side: None,
    EVALUATED: evaluate,
    FAILED: fail_in_forward,
}
# Expected errors: of instances below the root, and after an exception.
BELOW = {
    "no_sync": "`no_sync\\(\\)` on inner FSDP instances is not supported",
    "clip_grad_norm_": "`clip_grad_norm_\\(\\)` should only be called on the root",
    "register_comm_hook": "register_comm_hook can only be called on a root instance",
}
STILL_IN_FORWARD = {
    "state_dict_type": "Expects the handle training to be IDLE",
    **dict.fromkeys(["apply", "clip_grad_norm_", "no_sync"], "expected to be in states"),
    **dict.fromkeys(["summon_full_params", "named_buffers", "named_parameters"], "Cannot manually unshard parameters"),
}
HIDDEN = dict.fromkeys([method for method in METHODS if "optim" in method], "Parameter containing")  # behind views
OF_NO_INSTANCE = ("module", "fsdp_modules", "set_state_dict_type", "get_state_dict_type", "apply")


class TestMethods(FSDPTest):
    world_size = 2

    def test_each_public_method_is_in_the_table(self):
        public = {name for name in vars(FSDP) if not name.startswith("_")}
        self.assertEqual(public - set(METHODS), set(), "give each a row in METHODS", may_be="empty")

    def _sides(self, of: str, use_orig_params: bool) -> tuple[Side, Side]:
        plain = filled(nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)), -1.0, 1.0).to(self.device)
        plain[0].register_buffer("buffer", torch.ones(2, device=self.device))
        layers = copy.deepcopy(plain)
        layers[0] = FSDP(layers[0], use_orig_params=use_orig_params)
        pairs = [(FSDP(layers, use_orig_params=use_orig_params), layers[0]), (plain, plain[0])]
        fsdp, ref = (Side.of(root, root if of == "root" else inner) for root, inner in pairs)
        return fsdp, ref

    def _step(self, fsdp: Side, plain: Side, seed: int) -> None:
        losses = [each.backward(seed=2 * seed + self.rank) for each in (fsdp, plain)]
        self.assertEqual(*losses)
        average_gradients(plain.root)
        for each in (fsdp, plain):
            each.optim.step()
            each.root.zero_grad()
        self.assertEqual(full_parameters(fsdp.root), named(plain.root))

    def _call(self, method: str, errors: dict[str, str], fsdp: Side, plain: Side) -> None:
        """The method returns what the plain side returns, or raises its expected error."""
        try:
            actual, expected = METHODS[method](fsdp, plain)
        except (AssertionError, KeyError, RuntimeError, ValueError) as error:
            if method not in errors:
                raise
            self.assertRegex(str(error), errors[method])
        else:
            self.assertEqual(actual, expected, may_be=("empty", "zero"), exact_device=False)

    @skip_if_lt_x_gpu(2)
    @subtests(
        pairwise=True,
        method=list(METHODS),
        where=[*itertools.product([BEFORE, EVALUATED], ["root", "submodule"]), (FAILED, "root")],
        use_orig_params=[True, False],
    )
    def test_method(self, method, where, use_orig_params):
        """Each method works, or raises its expected error, in each state. Then the model trains like a plain one."""
        state, of = where
        fsdp, plain = self._sides(of, use_orig_params)
        if state != BEFORE:
            self._step(fsdp, plain, seed=1)
        for each in (fsdp, plain):
            STATES[state](each)
        errors = (BELOW if of == "submodule" else {}) | (STILL_IN_FORWARD if state == FAILED else {})
        errors |= HIDDEN if state == FAILED and use_orig_params else {}
        becomes_root = state == BEFORE and of == "submodule" and method not in OF_NO_INSTANCE
        with torch_defect("fsdp1_inner_instance_becomes_root", when=becomes_root):
            self._call(method, errors, fsdp, plain)
            self._step(fsdp, plain, seed=2)


if __name__ == "__main__":
    run_tests()
