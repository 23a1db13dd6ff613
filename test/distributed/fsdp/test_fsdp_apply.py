"""``FSDP.apply``: the function gets unsharded parameters, its changes are kept, and nothing else changes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    FSDPInitMode,
    FSDPTest,
    NestedWrappedModule,
    TransformerWithSharedParams,
)
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters
from torch_fsdp_tests.fsdp.shards import owners


def summon(inner: FSDP) -> None:
    with FSDP.summon_full_params(inner):
        pass


USES: dict[str, Callable[[FSDP], object]] = {
    "summon_full_params": summon,
    "state_dict": lambda inner: inner.state_dict(),
    "apply": lambda inner: inner.apply(lambda module: None),
    "named_parameters": lambda inner: list(inner.named_parameters()),
}


class TestApply(FSDPTest):
    world_size = 2

    @torch.no_grad()
    def _init_linear_weights(self, module: nn.Module) -> None:
        # The output of attention is a subclass of Linear, which must not change.
        if type(module) is nn.Linear:
            module.weight.fill_(1.0)
            module.bias.fill_(1.0)

    def check_weights(
        self, fsdp: nn.Module, expected_tensor_fn: Callable[[torch.Tensor], torch.Tensor], check: Callable[..., Any]
    ) -> None:
        with FSDP.summon_full_params(fsdp, recurse=True):
            linears = [module for module in fsdp.modules() if type(module) is nn.Linear]
            self.assertGreater(len(linears), 0)
            for linear in linears:
                for param in linear.parameters():
                    check(param, expected_tensor_fn(param))

    def _check_apply(self, fsdp: nn.Module) -> None:
        self.check_weights(fsdp, torch.ones_like, self.assertNotEqual)
        self.assertIs(fsdp.apply(self._init_linear_weights), fsdp)
        self.check_weights(fsdp, torch.ones_like, self.assertEqual)

    def _nested(self) -> nn.Module:
        return NestedWrappedModule.init(
            self.process_group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_AFTER, {"device_id": self.device}
        )

    def _transformer(self) -> FSDP:
        return TransformerWithSharedParams.init(
            self.process_group,
            FSDPInitMode.RECURSIVE,
            DEVICEInitMode.DEVICE_AFTER,
            {"device_id": self.device},
            deterministic=True,
        )

    @skip_if_lt_x_gpu(2)
    def test_nested_module_apply(self):
        """``apply`` works on a module that contains FSDP instances."""
        model = self._nested()
        self.assertNotIsInstance(model, FSDP)
        self._check_apply(model)

    @skip_if_lt_x_gpu(2)
    def test_transformer_module_apply(self):
        """``apply`` works on an FSDP instance with nested instances and a weight that two modules share."""
        model = self._transformer()
        self.assertIsInstance(model, FSDP)
        self._check_apply(model)

    @skip_if_lt_x_gpu(2)
    def test_apply_in_summon_raises_error(self):
        model = self._transformer()
        with FSDP.summon_full_params(model):
            with self.assertRaisesRegex(ValueError, "IDLE.* but current state is .*SUMMON_FULL_PARAMS"):
                model.apply(self._init_linear_weights)

    @skip_if_lt_x_gpu(2)
    def test_other_parameters_stay(self):
        """Parameters that the function does not write are bitwise the same."""
        model = self._transformer()
        plain = TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )
        written = {
            f"{name}.{each}"
            for name, module in plain.named_modules()
            if type(module) is nn.Linear
            for each in ("weight", "bias")
        }
        # The plain model lists the shared weight of its output projection under this name.
        written = (written - {"output_proj.weight"}) | {"embed_tokens.weight"}
        before = full_parameters(model)
        model.apply(self._init_linear_weights)
        after = full_parameters(model)
        self.assertEqual(list(after), list(before))
        self.assertTrue(written < after.keys())
        expected = {name: torch.ones_like(param) if name in written else before[name] for name, param in after.items()}
        self.assertEqual(after, expected, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_each_rank_writes_its_shard(self):
        """If ranks write different values, each element gets the value of the rank that owns it."""
        for build in (self._nested, self._transformer):
            model = build()

            @torch.no_grad()
            def fn(module: nn.Module) -> None:
                for param in module.parameters(recurse=False):
                    param.fill_(self.rank)

            model.apply(fn)
            flat_params = internals.flat_params(model)
            self.assertGreater(len(flat_params), 2)
            with FSDP.summon_full_params(model, recurse=True, writeback=False):
                for flat_param in flat_params:
                    ranks = owners(internals.numel_of(flat_param), self.world_size, self.device)
                    self.assertEqual(flat_param.flatten(), ranks.float(), rtol=0, atol=0)

    def _two_layers(self) -> tuple[nn.Sequential, FSDP]:
        """A plain model, and a copy with FSDP around the first layer and around the whole model."""
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(self.device)
        model = copy.deepcopy(plain)
        model[0] = FSDP(model[0])
        return plain, FSDP(model)

    def _check_unsharded(self, model: FSDP, root: bool) -> None:
        """The root is unsharded exactly if ``root`` is true. All other instances are sharded."""
        kept = [internals.is_unsharded(flat_param) for flat_param in internals.flat_params(model)]
        self.assertEqual(kept, [root, False])

    def _check_training(self, plain: nn.Module, model: FSDP) -> None:
        """In three steps on data that differs by rank, the model must match the plain one with averaged gradients."""
        models = plain, model
        optims = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in models]
        torch.manual_seed(1 + self.rank)
        ref_losses = []
        for _ in range(3):
            inp = torch.randn(4, 3, device=self.device)
            losses = []
            for each, optim in zip(models, optims):
                optim.zero_grad()
                losses.append(each(inp).square().sum())
            ref_losses.append(losses[0])
            self.assertEqual(*losses)
            self._check_unsharded(model, root=True)
            for loss in losses:
                loss.backward()
            average_gradients(plain)
            for optim in optims:
                optim.step()
            self._check_unsharded(model, root=False)
        check_losses(ref_losses)
        actual = list(full_parameters(model).values())
        self.assertEqual(actual, [param.detach() for param in plain.parameters()])

    @skip_if_lt_x_gpu(2)
    def test_training_after_apply(self):
        """A model trains from the written values, whichever instance ``apply`` was called on first."""
        for first in ("root", "inner"):
            plain, model = self._two_layers()
            for each in (plain, model):
                if first == "inner":
                    each[0].apply(self._init_linear_weights)
                self.assertIs(each.apply(self._init_linear_weights), each)
            self.assertEqual([internals.is_root(state) for state in FSDP.fsdp_modules(model)], [None, None])
            self._check_unsharded(model, root=False)
            with torch.no_grad():  # otherwise, all rows of a layer would stay equal
                for each in (plain, model):
                    each.apply(self._scale_bias)
            self._check_training(plain, model)

    def _scale_bias(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.bias.mul_(torch.arange(1.0, 1.0 + module.bias.numel(), device=self.device))

    def _break(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            raise KeyError("on purpose")

    @skip_if_lt_x_gpu(2)
    def test_function_raises(self):
        """After an exception FSDP is idle and sharded, nothing is written, and the model trains."""
        plain, model = self._two_layers()
        states = internals.fsdp1_common
        with self.assertRaisesRegex(KeyError, "on purpose"):
            model.apply(self._break)
        self.assertEqual({state.training_state for state in FSDP.fsdp_modules(model)}, {states.TrainingState.IDLE})
        for handle in internals.handles(model):
            flat_param = handle.flat_param
            self.assertIs(internals.training_state(handle), states.HandleTrainingState.IDLE)
            self.assertEqual(flat_param.data_ptr(), internals.local_shard(flat_param).data_ptr())
            self.assertEqual(flat_param.shape, internals.sharded_size(flat_param))
        self._check_unsharded(model, root=False)
        self._check_training(plain, model)

    @skip_if_lt_x_gpu(2)
    def test_function_raises_on_an_inner_instance(self):
        """After an exception under a nested instance, the whole model still runs."""
        plain, model = self._two_layers()
        with self.assertRaisesRegex(KeyError, "on purpose"):
            model.module[0].apply(self._break)
        with torch_defect("fsdp1_inner_instance_becomes_root"):
            self._check_training(plain, model)

    @skip_if_lt_x_gpu(2)
    @subtests(use=list(USES), has_run=[False, True])
    def test_use_of_an_inner_instance(self, use, has_run):
        """An inner instance may be used before and after the first forward of the whole model."""
        plain, model = self._two_layers()
        if has_run:
            model(torch.ones(1, 3, device=self.device))
        USES[use](model.module[0])
        becomes_root = not has_run and use not in ("apply", "named_parameters")
        with torch_defect("fsdp1_inner_instance_becomes_root", when=becomes_root):
            self._check_training(plain, model)


instantiate_device_type_tests(TestApply, globals())

if __name__ == "__main__":
    run_tests()
