"""The module that ``fully_shard`` returns: its FSDP state, its generated class, and the calls that it rejects."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    UnshardHandle,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTestMultiThread
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.training import shard_each
from torch_fsdp_tests.installed_torch import torch_facts


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)

    def lineage(self) -> list[str]:
        return ["base"]


class Child(Base):
    """Overrides methods with calls of ``super()``, and adds attributes, a property and a class method."""

    kind = "child"

    def __init__(self) -> None:
        super().__init__()
        self.note = "mine"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)

    def lineage(self) -> list[str]:
        return [*super().lineage(), self.kind]

    @property
    def shouted(self) -> str:
        return self.note.upper()

    @classmethod
    def name_of_class(cls) -> str:
        return cls.kind


class NotedLinear(nn.Linear):
    """Records all values that are assigned to ``weight`` by overriding ``__setattr__``."""

    def __init__(self, *args: Any) -> None:
        self.noted: list[Any] = []
        super().__init__(*args)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "weight":
            self.noted.append(value)
        super().__setattr__(name, value)


class CountedSequential(nn.Sequential):
    """Counts how often instances are initialized."""

    initialized = 0

    def __init__(self, *modules: Any) -> None:
        type(self).initialized += 1
        super().__init__(*modules)


class TestFullyShardState(FSDPTestMultiThread):
    world_size = 1

    def _input(self, dim: int) -> torch.Tensor:
        return torch.arange(1.0, 2 * dim + 1, device=self.device).view(2, dim) / dim

    def _two_wrapped_in_one(self) -> nn.Sequential:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        return shard_each((*model, model))

    def test_public_names_say_where_they_come_from(self):
        """``__module__`` of public names is the public package, which pickles and documentation show."""
        for public in (fully_shard, register_fsdp_forward_method, FSDPModule, UnshardHandle):
            self.assertEqual(public.__module__, "torch.distributed.fsdp")
        for policy in (MixedPrecisionPolicy, OffloadPolicy, CPUOffloadPolicy):
            self.assertEqual(policy.__module__, "torch.distributed.fsdp")

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_state(self):
        model = nn.Sequential(*(MLP(8) for _ in range(3)))
        for module in (*model, model):
            self.assertIsNone(fully_shard.state(module))
            fully_shard(module)
        states = [fully_shard.state(module) for module in (model, *model)]
        self.assertNotIn(None, states)
        self.assertEqual(len(set(states)), 4)
        for module, state in zip((model, *model), states):
            self.assertIs(internals.state_of(module), state)

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_reapply(self):
        model = fully_shard(MLP(8))
        state, weight = fully_shard.state(model), model.in_proj.weight
        message = "Each distinct composable distributed API can only be applied to a module once."
        with self.assertRaisesRegex(AssertionError, message):
            fully_shard(model)
        self.assertIs(fully_shard.state(model), state)
        self.assertIs(model.in_proj.weight, weight)

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_cls(self):
        model = fully_shard(MLP(8))
        self.assertIsInstance(model, MLP)
        self.assertIsInstance(model, FSDPModule)
        self.assertEqual(type(model).__name__, "FSDPMLP")
        self.assertEqual(internals.fsdp_modules(model), [model])

        model = fully_shard(nn.Sequential(*(MLP(8) for _ in range(3))))
        self.assertEqual(type(model).__name__, "FSDPSequential")
        part = model[:2]
        self.assertIs(type(part), nn.Sequential)
        self.assertNotIsInstance(part, FSDPModule)
        self.assertEqual([id(module) for module in part], [id(module) for module in model[:2]])
        self.assertIs(part[0], model[0])

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_unsupported_module_cls(self):
        linear = nn.Linear(4, 4)
        for container in (nn.ModuleList([linear]), nn.ModuleDict({"linear": linear})):
            message = "fully_shard does not support containers that do not implement forward"
            with self.assertRaisesRegex(ValueError, message):
                fully_shard(container)
            self.assertNotIsInstance(linear.weight, DTensor)

    @skip_if_lt_x_gpu(1)
    def test_fully_shard_deepcopy(self):
        model = fully_shard(MLP(8))
        for whole in (model, nn.Sequential(model)):
            with self.assertRaisesRegex(AssertionError, "FSDP does not support deepcopy"):
                copy.deepcopy(whole)

    @skip_if_lt_x_gpu(1)
    def test_prefetch_setters(self):
        """The setters accept only FSDP modules. A rejected call does not change the earlier setting."""
        model = self._two_wrapped_in_one()
        first, second = model
        for direction in ("forward", "backward"):
            setter = getattr(first, f"set_modules_to_{direction}_prefetch")
            setter([second])
            for wrong in ([nn.Linear(4, 4)], [second, nn.Linear(4, 4)], [None]):
                with self.assertRaisesRegex(ValueError, "Expects FSDPModule but got"):
                    setter(wrong)
            attribute = f"_states_to_{direction}_prefetch"
            self.assertEqual(getattr(internals.state_of(first), attribute), [internals.state_of(second)])
            setter([])
            self.assertEqual(getattr(internals.state_of(first), attribute), [], may_be="empty")

    @skip_if_lt_x_gpu(1)
    def test_reshard_setter(self):
        """``set_reshard_after_forward`` accepts only a bool, not even 0 or 1. It recurses by default."""
        model = self._two_wrapped_in_one()

        def reshards() -> list[bool]:
            return [internals.group_of(module).post_forward_mesh_info is not None for module in model]

        for wrong in (0, 1, 2, None, "True"):
            with self.assertRaisesRegex(ValueError, "reshard_after_forward should be a bool"):
                model.set_reshard_after_forward(wrong)
            self.assertEqual(reshards(), [True, True])
        model.set_reshard_after_forward(False)
        self.assertEqual(reshards(), [False, False])
        model[1].set_reshard_after_forward(True)
        self.assertEqual(reshards(), [False, True])
        model.set_reshard_after_forward(True, recurse=False)
        self.assertEqual(reshards(), [False, True])

    @needs(torch_facts.CAN_SHARE_COMM_CONTEXT)
    @skip_if_lt_x_gpu(1)
    def test_share_comm_ctx(self):
        """``share_comm_ctx`` gives all FSDP modules the context of the first one. It raises for other modules, and
        accepts an empty list.
        """
        share = internals.fsdp2.share_comm_ctx
        first, second, third = (fully_shard(nn.Linear(4, 4)) for _ in range(3))
        contexts = [internals.comm_context(module) for module in (first, second, third)]
        self.assertEqual(len({id(context) for context in contexts}), 3)
        share([])
        with self.assertRaisesRegex(ValueError, "Expects list of FSDPModules but got"):
            share([first, second, nn.Linear(4, 4)])
        self.assertIs(internals.comm_context(second), contexts[1])
        share([first, second])
        for module, context in zip((first, second, third), (contexts[0], contexts[0], contexts[2])):
            self.assertIs(internals.comm_context(module), context)
            if module is second:
                self.assertIs(internals.group_of(module).comm_ctx, context)

    @skip_if_lt_x_gpu(1)
    def test_user_class_keeps_working(self):
        """FSDPModule comes before the user's class in the MRO. The user's attributes still work."""
        plain = Child().to(self.device)
        model = fully_shard(copy.deepcopy(plain))
        self.assertEqual(type(model).__mro__[1:], (FSDPModule, *Child.__mro__)[: len(type(model).__mro__) - 1])
        self.assertEqual([type(model).__name__, type(plain)], ["FSDPChild", Child])
        self.assertEqual((model.lineage(), model.shouted), (["base", "child"], "MINE"))
        self.assertEqual((model.name_of_class(), model.kind), ("child", "child"))
        model.note = "yours"
        model.added = 3
        self.assertEqual((model.shouted, model.added), ("YOURS", 3))
        self.assertEqual(model(self._input(4)), plain(self._input(4)))

    @skip_if_lt_x_gpu(1)
    def test_earlier_hooks_see_gathered_parameters(self):
        """FSDP's forward pre-hook runs before a pre-hook that the user registered earlier, which sees unsharded
        parameters.
        """
        layer = nn.Linear(4, 4, device=self.device)
        kinds = []
        layer.register_forward_pre_hook(lambda module, args: kinds.append(isinstance(module.weight, DTensor)))
        fully_shard(layer)(self._input(4))
        self.assertEqual(kinds, [False])

    @skip_if_lt_x_gpu(1)
    def test_module_that_assigns_by_itself(self):
        """FSDP registers parameters through a module's own ``__setattr__``."""
        model = NotedLinear(4, 4).to(self.device)
        ref_model = nn.Linear(4, 4).to(self.device)
        ref_model.load_state_dict(model.state_dict())
        fully_shard(model, reshard_after_forward=True)
        model.noted.clear()
        output = model(self._input(4))
        self.assertEqual(output, ref_model(self._input(4)))
        self.assertEqual([isinstance(value, DTensor) for value in model.noted], [False, True])
        self.assertIs(model.weight, model.noted[-1])

    @skip_if_lt_x_gpu(1)
    def test_group_as_root(self):
        """A forward raises if its root is a group of several modules."""
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        fully_shard(list(model))
        with self.assertRaisesRegex(RuntimeError, "requires a single root module"):
            model(self._input(4))

    @skip_if_lt_x_gpu(1)
    def test_generated_classes(self):
        """Each user class has one generated class of its own, even if two user classes have the same name."""

        def another_mlp() -> nn.Module:
            return type("MLP", (nn.Linear,), {})(4, 4)

        first, second, stranger = (fully_shard(module) for module in (MLP(8), MLP(8), another_mlp()))
        self.assertIs(type(first), type(second))
        self.assertEqual(type(stranger).__name__, type(first).__name__)
        self.assertIsNot(type(stranger), type(first))
        self.assertNotIsInstance(stranger, MLP)
        self.assertIs(internals.fsdp2.cls_to_fsdp_cls[MLP], type(first))

    @skip_if_lt_x_gpu(1)
    def test_slice_is_initialized_once(self):
        """A slice of a wrapped container has the user's class, whose ``__init__`` runs once."""
        model = fully_shard(CountedSequential(nn.Linear(4, 4), nn.Linear(4, 4)))
        before = CountedSequential.initialized
        part = model[:1]
        self.assertEqual((type(part), len(part)), (CountedSequential, 1))
        self.assertEqual(CountedSequential.initialized, before + 1)

    @skip_if_lt_x_gpu(1)
    def test_state_dict_is_pickled(self):
        """A state dict can be pickled, although the module's class exists only in this process."""
        model = fully_shard(Child())
        buffer = io.BytesIO()
        torch.save(model.state_dict(), buffer)
        buffer.seek(0)
        loaded = torch.load(buffer, weights_only=False)
        other = fully_shard(Child())
        self.assertNotEqual(other.linear.weight.to_local(), model.linear.weight.to_local())
        other.load_state_dict(loaded)
        for name, param in model.named_parameters():
            self.assertIsInstance(loaded[name], DTensor)
            self.assertEqual(other.get_parameter(name).to_local(), param.to_local(), rtol=0, atol=0)

    @needs(torch_facts.HAS_RESET_ITER_STATE)
    @skip_if_lt_x_gpu(1)
    def test_reset_iter_state(self):
        """``reset_iter_state`` raises below the root. On the root it clears the state of a failed iteration."""
        model = self._two_wrapped_in_one()
        expected = model(self._input(4)).detach()
        for module in model:
            with self.assertRaisesRegex(RuntimeError, "reset_iter_state must be called on the root FSDP module"):
                module.reset_iter_state()
        with self.assertRaisesRegex(RuntimeError, "shapes cannot be multiplied"):
            model(self._input(5))
        self.assertIs(internals.iteration_context(model).iter_forward_root, internals.state_of(model))
        model.reset_iter_state()
        self.assertIsNone(internals.iteration_context(model).iter_forward_root)
        for module in model:
            self.assertIsInstance(module.weight, DTensor)
        out = model(self._input(4))
        self.assertEqual(out, expected, rtol=0, atol=0)
        out.sum().backward()
        self.assertTrue(all(param.grad is not None for param in model.parameters()))


if __name__ == "__main__":
    run_tests()
