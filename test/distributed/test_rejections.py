"""What FSDP, and the APIs that are used with it, reject or warn about, where no other test asks for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed._composable import checkpoint, contract, replicate
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import StateDictType, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.installed_torch import torch_facts

DIM = 4


@dataclasses.dataclass(init=False)
class Late:
    """``dataclasses.replace`` needs an ``__init__`` with the fields."""

    tensor: torch.Tensor

    def __init__(self) -> None:
        pass


class Tied(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(DIM, DIM, bias=False, device=device) for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Through(nn.Module):
    """Calls a function with the layer and the input."""

    def __init__(self, call: Callable[[nn.Module, Any], Any], device: torch.device) -> None:
        super().__init__()
        self.layer, self.call = nn.Linear(DIM, DIM, device=device), call

    def forward(self, x: Any) -> Any:
        return self.call(self.layer, x)


def in_itself(tensor: torch.Tensor) -> list[Any]:
    output: list[Any] = [tensor]
    output.append(output)
    return output


@contract()
def adding(module: nn.Module) -> nn.Module:
    module.added = nn.Linear(1, 1)
    return module


@contract()
def reordering(module: nn.Module) -> nn.Module:
    name, child = next(module.named_children())
    delattr(module, name)
    setattr(module, name, child)
    return module


# The exception, what its message must contain (nothing if the assertion has no message), and what raises it.
Case = tuple[type[Exception], str, Callable[["TestRejections"], object]]
CASES: dict[str, Case] = {
    "gradients of gradients": (
        RuntimeError,
        "gradients of gradients",
        lambda t: t.fsdp1()(t.inputs()).sum().backward(create_graph=True),
    ),
    "state dict type of a nested instance, which is set": (
        AssertionError,
        "the same state_dict_type",
        lambda t: FSDP.set_state_dict_type(t.of_unlike_types(), StateDictType.FULL_STATE_DICT),
    ),
    "state dict type of a nested instance, which is read": (
        AssertionError,
        "the same state dict settings",
        lambda t: FSDP.get_state_dict_type(t.of_unlike_types()),
    ),
    "use_orig_params of a nested instance": (
        ValueError,
        "homogeneous value for _use_orig_params",
        lambda t: t.trained(t.nested(use_orig_params=True)),
    ),
    "keys of an unknown kind": (AssertionError, "PARAM_NAME or PARAM_ID|^$", lambda t: t.rekeyed()),
    "optim_input that is a number": (TypeError, "iterable of Tensors or dicts, but got 5", lambda t: t.optim_state(5)),
    "optim_input of a number": (TypeError, "iterable of Tensors or dicts$", lambda t: t.optim_state([5])),
    "optim_input of nothing": (ValueError, "should not be empty", lambda t: t.optim_state([])),
    "optim_input without params": (AssertionError, 'should map "params"', lambda t: t.optim_state([{"lr": 1.0}])),
    "another value of a shared parameter": (
        NotImplementedError,
        "Changing shared parameters",
        lambda t: t.other_shared_parameter(),
    ),
    "an output that contains itself": (
        RuntimeError,
        "circular reference",
        lambda t: fully_shard(Through(lambda layer, x: in_itself(layer(x)), t.device))(t.inputs()),
    ),
    "an input that cannot be made with other tensors": (
        TypeError,
        "Failed to reconstruct dataclass Late",
        lambda t: t.dataclass_input(),
    ),
    "a stream of no hook": (AssertionError, "hook itself is missing", lambda t: t.without_hook()),
    "reentrant checkpoint": (
        NotImplementedError,
        "use_reentrant=True",
        lambda t: checkpoint(t.mlp(), use_reentrant=True),
    ),
    "unknown option of checkpoint": (ValueError, "keyword arguments: other", lambda t: checkpoint(t.mlp(), other=1)),
    "device of replicate": (RuntimeError, "int or torch.device", lambda t: replicate(t.mlp(), device_id="0")),
    "an API that adds a parameter": (RuntimeError, "cannot modify FQNs", lambda t: adding(t.mlp())),
    "an API that reorders parameters": (RuntimeError, "the order of FQNs", lambda t: reordering(t.mlp())),
    "an output on another device": (
        AssertionError,
        "supported device, got meta|^$",
        lambda t: ShardedGradScaler(device=t.device.type).scale(torch.ones(1, device="meta")),
    ),
}
OF_CONTAINERS = {"an output that contains itself", "an input that cannot be made with other tensors"}


class TestRejections(FSDPTest):
    world_size = 2

    def mlp(self) -> MLP:
        return filled(MLP(DIM, self.device))

    def inputs(self) -> torch.Tensor:
        return uniform(2, DIM, seed=self.rank).to(self.device)

    def fsdp1(self, module: nn.Module | None = None, **kwargs: Any) -> FSDP:
        return FSDP(module or self.mlp(), device_id=self.device, **kwargs)

    def trained(self, model: FSDP) -> tuple[FSDP, torch.optim.Optimizer]:
        optim = torch.optim.Adam(model.parameters())
        model(self.inputs()).sum().backward()
        optim.step()
        return model, optim

    def nested(self, **kwargs: Any) -> FSDP:
        return self.fsdp1(nn.Sequential(self.fsdp1(**kwargs), nn.Linear(DIM, DIM, device=self.device)))

    def of_unlike_types(self) -> FSDP:
        model = self.nested()
        FSDP.set_state_dict_type(model.module[0], StateDictType.SHARDED_STATE_DICT)
        return model

    def optim_state(self, optim_input: Any) -> None:
        FSDP.full_optim_state_dict(*self.trained(self.fsdp1()), optim_input=optim_input)

    def rekeyed(self) -> None:
        states = FSDP.full_optim_state_dict(*self.trained(self.fsdp1()), rank0_only=False)
        FSDP.rekey_optim_state_dict(states, "name", self.mlp())

    def other_shared_parameter(self) -> None:
        model = self.fsdp1(Tied(self.device), use_orig_params=True)
        model(self.inputs())
        model.module.second.weight = nn.Parameter(torch.ones_like(model.module.second.weight))
        model(self.inputs())

    def dataclass_input(self) -> None:
        late = Late()
        late.tensor = self.inputs().requires_grad_()
        fully_shard(Through(lambda layer, x: layer(x.tensor), self.device))(late)

    def without_hook(self) -> None:
        model = fully_shard(self.mlp())
        model.set_all_reduce_hook(None, stream=torch.Stream(self.device))
        model(self.inputs()).sum().backward()

    @skip_if_lt_x_gpu(2)
    @subtests(name=list(CASES))
    def test_rejections(self, name):
        """Every rank raises the exception."""
        if name in OF_CONTAINERS and (why := torch_facts.FINDS_TENSORS_IN_DATACLASSES.lacks()):
            self.skipTest(why)
        error, words, act = CASES[name]
        with self.assertRaisesRegex(error, words):
            act(self)

    @skip_if_lt_x_gpu(2)
    def test_optimizer_state_of_no_parameter(self):
        """FSDP1 copies an optimizer state that belongs to no parameter, with a warning."""
        model, optim = self.trained(self.fsdp1(use_orig_params=True))
        optim.state["extra"] = torch.ones(1)
        with self.assertWarnsRegex(UserWarning, "extra, that FSDP cannot process"):
            states = FSDP.optim_state_dict(model, optim)["state"]
        self.assertEqual(states["extra"], torch.ones(1))


if __name__ == "__main__":
    run_tests()
