"""FSDP1 does not touch ignored modules and parameters, and the rest trains as without FSDP."""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, transformer_auto_wrap_policy

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPTest, TransformerWithSharedParams
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average, full_parameters, named, of_all_ranks


class Model(nn.Module):
    """Four layers for inputs of shape (8, 3), each followed by a ReLU. The second one consists of three layers."""

    def __init__(self, *before_last: nn.Module) -> None:
        super().__init__()
        self.layer0 = nn.Linear(3, 5)
        self.layer1 = nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 4), *before_last, nn.Linear(4, 4))
        self.layer2 = nn.Linear(4, 2)
        self.layer3 = nn.Linear(2, 2)
        self.relu = nn.ReLU()
        for param in self.parameters():  # so that no ReLU has only negative inputs, which would end all training
            param.data.abs_()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.layer0, self.layer1, self.layer2, self.layer3):
            x = self.relu(layer(x))
        return x

    def get_input(self, device: torch.device) -> tuple[torch.Tensor]:
        return (torch.randn(8, 3).to(device),)

    def get_loss(self, input: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def adam(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(params, lr=1e-3)


def momentum(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)


class IgnoredModule(nn.Module):
    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(in_dim, out_dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class ModelWithIgnoredModules(Model):
    """``layer1`` has ``num_ignored`` more layers before its last one. They are to be ignored."""

    def __init__(self, num_ignored: int) -> None:
        super().__init__(*(IgnoredModule(4, 4) for _ in range(num_ignored)))


class Tokens(TransformerWithSharedParams):
    """The transformer, with different tokens on each rank."""

    def get_input(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        source, target = (torch.randint(23, (length, 2)).to(device) for length in (6, 4))
        return source, target


# The constructor's arguments for ignored modules. The arguments may be of any iterable type.
PASSED: dict[str, Callable[[Sequence[nn.Module]], dict[str, Any]]] = {
    "modules": lambda modules: {"ignored_modules": set(modules)},
    "modules as states": lambda modules: {"ignored_states": list(modules)},
    "parameters": lambda modules: {"ignored_states": (param for module in modules for param in module.parameters())},
}


def _passed(modules: Sequence[nn.Module], as_modules: bool) -> dict[str, Any]:
    return PASSED["modules" if as_modules else "parameters"](modules)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _unpadded_numel(flat_param: internals.FlatParam) -> int:
    padding = zip(flat_param._numels_with_padding, flat_param._is_padding_mask)
    return flat_param.numel() - sum(numel for numel, is_padding in padding if is_padding)


class TestFSDPIgnoredModules(FSDPTest):
    world_size = 2

    def _build(self, build: Callable[[], Any] = Model) -> tuple[Any, Any]:
        """The model for FSDP, and a copy that stays without FSDP."""
        torch.manual_seed(3)
        model = build().to(self.device)
        return model, copy.deepcopy(model)

    def _train_model(
        self,
        model: Any,
        optim: torch.optim.Optimizer,
        num_iters: int,
        reference: Callable[[tuple[torch.Tensor, ...], torch.Tensor], None] | None = None,
    ) -> None:
        """Train on data of this rank. After each backward, call ``reference`` with the inputs and the output."""
        torch.manual_seed(10 + self.rank)
        for _ in range(num_iters):
            inputs = model.get_input(self.device)
            output = model(*inputs)
            model.run_backward(model.get_loss(inputs, output))
            if reference is not None:
                reference(inputs, output.detach())
            optim.step()

    def _check_training(
        self,
        model: FSDP,
        local: Any,
        ignored: dict[str, nn.Parameter],
        make_optim: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adam,
    ) -> None:
        """Three steps match a model without FSDP that averages all but the ``ignored`` gradients by hand.

        The ignored parameters, by name, are still the same objects, with the gradients of this rank alone.
        """
        local_optim = make_optim(local.parameters())
        before = {name: param.detach().clone() for name, param in local.named_parameters()}

        def follow(inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
            actual = local(*inputs)
            self.assertEqual(output, actual.detach())
            own = torch.autograd.grad(local.get_loss(inputs, actual), list(local.parameters()))
            for (name, param), grad in zip(local.named_parameters(), own, strict=True):
                if name not in ignored:
                    average([grad])
                # Gradients are never cleared, as in the model under test.
                param.grad = grad if param.grad is None else param.grad + grad
                if name in ignored:
                    self.assertEqual(named(model)[name].grad, param.grad)
            local_optim.step()

        for name, param in ignored.items():
            self.assertIs(named(model)[name], param)
            self.assertEqual(param.shape, before[name].shape)
        self._train_model(model, make_optim(model.parameters()), 3, follow)
        actual = full_parameters(model)
        self.assertEqual(actual, {name: param.detach() for name, param in local.named_parameters()})
        for name, value in actual.items():
            self.assertNotEqual(value, before[name], rtol=0, atol=0)

    def _check_managed(self, model: nn.Module, ignored: Iterable[str]) -> list[str]:
        """Each parameter is either ignored or in one handle, by its name from the root."""
        managed = [name for names in internals.names_managed(model).values() for name in names]
        self.assertEqual(len(managed), len(set(managed)))
        self.assertEqual(set(managed) & set(ignored), set(), may_be="empty")
        return managed

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], ignore_modules=[True, False], use_auto_wrap=[False, True])
    def test_ignored_modules_transformer(self, use_orig_params, ignore_modules, use_auto_wrap):
        """FSDP flattens all parameters outside the ignored inner transformer, with one or several FSDP instances."""
        model, local = self._build(
            lambda: Tokens(self.process_group, DEVICEInitMode.DEVICE_BEFORE, add_bn=True, deterministic=True)
        )
        kwargs = {"use_orig_params": use_orig_params, **_passed([model.transformer], ignore_modules)}
        if use_auto_wrap:
            for each in (model, local):
                each.output_proj.weight = nn.Parameter(each.output_proj.weight.detach().clone())
            kwargs["auto_wrap_policy"] = ModuleWrapPolicy({nn.Linear})
        expected = _numel(local) - _numel(local.transformer)
        ignored = {f"transformer.{name}": param for name, param in model.transformer.named_parameters()}
        names = dict(model.named_parameters()).keys() - ignored

        model = FSDP(model, **kwargs)
        self.assertEqual(len(internals.handles(model)), 2 if use_auto_wrap else 1)
        self.assertEqual(set(self._check_managed(model, ignored)), names)
        with FSDP.summon_full_params(model):
            self.assertEqual(sum(map(_unpadded_numel, internals.flat_params(model))), expected)
        self._check_training(model, local, ignored)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], passed=list(PASSED))
    def test_ignored_modules_nested(self, use_orig_params, passed):
        """If an ignored module has a layer that is already in FSDP, this layer stays managed. The rest is ignored."""
        model, local = self._build()
        names = [f"layer1.{index}.{kind}" for index in (0, 2) for kind in ("weight", "bias")]
        ignored = {name: model.get_parameter(name) for name in names}
        model.layer1[1] = FSDP(model.layer1[1], use_orig_params=use_orig_params)
        model = FSDP(model, use_orig_params=use_orig_params, **PASSED[passed]([model.layer1]))
        managed = self._check_managed(model, ignored)
        self.assertEqual({*managed, *ignored}, set(dict(local.named_parameters())))
        with FSDP.summon_full_params(model):
            actual = _unpadded_numel(internals.flat_param_of(model))
        self.assertEqual(actual, _numel(local) - _numel(local.layer1))
        self.assertEqual(actual, 36)
        self._check_training(model, local, ignored)

    @skip_if_lt_x_gpu(2)
    @subtests(
        policy=[
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
            ModuleWrapPolicy((nn.Sequential,)),
        ],
        ignore_bias=[True, False],
    )
    def test_ignored_states_auto_wrap(self, policy, ignore_bias):
        """Single parameters of a layer can be ignored, also inside a module that a policy wraps."""
        model, local = self._build()
        names = ["layer1.1.weight", "layer1.1.bias"] if ignore_bias else ["layer1.1.weight"]
        ignored = {name: model.get_parameter(name) for name in names}
        model = FSDP(model, auto_wrap_policy=policy, ignored_states=set(ignored.values()), use_orig_params=False)
        self._check_managed(model, ignored)
        actual = [flat_param.numel() for flat_param in internals.flat_params(model)]
        unsharded = [36, 44 if ignore_bias else 48]
        self.assertEqual(actual, [math.ceil(numel / self.world_size) for numel in unsharded])
        self._check_training(model, local, ignored)

    @skip_if_lt_x_gpu(1)
    def test_ignored_modules_invalid(self):
        """An FSDP instance cannot be ignored. Ignoring the whole model leaves nothing to shard and gives a warning."""
        model = Model()
        model.layer1 = FSDP(model.layer1)
        with self.assertRaisesRegex(ValueError, "`ignored_modules` should not include FSDP modules"):
            FSDP(model, ignored_modules=[model.layer1])
        model = Model().to(self.device)
        message = (
            "^Trying to ignore the top-level module passed into the FSDP constructor itself will result in all "
            "parameters being ignored"
        )
        with self.assertWarnsRegex(UserWarning, message):
            model = FSDP(model, ignored_modules=[model])
        self.assertIsNone(internals.handle(model))

    @skip_if_lt_x_gpu(2)
    @subtests(pass_ignored_modules_to_root=[False, True], ignore_modules=[True, False])
    def test_diff_ignored_modules_across_ranks(self, pass_ignored_modules_to_root, ignore_modules):
        """Ranks may ignore different modules. Their common parameters are still reduced, by the same collectives."""
        model, local = self._build(lambda: ModelWithIgnoredModules(self.rank + 1))
        ignored_modules = [module for module in model.modules() if isinstance(module, IgnoredModule)]
        ignored_params = {module.weight for module in ignored_modules}
        ignored = {name: param for name, param in model.named_parameters() if param in ignored_params}
        self.assertEqual(len(ignored), self.rank + 1)
        for each in (model, local):
            for name, param in each.named_parameters():
                if name not in ignored:
                    dist.broadcast(param.data, 0)

        model.layer1 = FSDP(model.layer1, **_passed(ignored_modules, ignore_modules))
        model.layer3 = FSDP(model.layer3)
        model = FSDP(model, **_passed(ignored_modules if pass_ignored_modules_to_root else [], ignore_modules))
        self._check_managed(model, ignored)
        self._check_training(model, local, ignored, momentum)

        # The collectives of one more iteration, and their order.
        with recorded() as calls:
            self._train_model(model, torch.optim.SGD(model.parameters(), lr=0.0), 1)
        sent = [(call.name, call.dtype, call.numel) for call in calls]
        self.assertEqual(of_all_ranks(sent), [sent] * self.world_size)
        # Three units are all-gathered and reduced. All but the root are all-gathered again in backward.
        self.assertEqual(len(calls), 3 + 2 + 3)

    @skip_if_lt_x_gpu(2)
    @parametrize("ignore_modules", [True, False])
    def test_ignored_modules_not_under_wrapped_root(self, ignore_modules):
        """An ignored module need not be inside the wrapped module."""
        model, local = self._build()
        modules = list(model.layer1)[1:]
        names = [name for name in dict(model.named_parameters()) if not name.startswith(("layer1.0", "layer3"))]
        ignored = {name: model.get_parameter(name) for name in names}
        model.layer1 = FSDP(model.layer1, **_passed(modules, ignore_modules))
        model.layer3 = FSDP(model.layer3, **_passed(modules, ignore_modules))
        managed = self._check_managed(model, ignored)
        self.assertEqual(managed, ["layer1.0.weight", "layer1.0.bias", "layer3.weight", "layer3.bias"])
        self._check_training(model, local, ignored)

    @skip_if_lt_x_gpu(1)
    @subtests(ignore_modules=[True, False])
    def test_ignored_states_check(self, ignore_modules):
        """``ignored_modules`` takes no parameters, ``ignored_states`` no mixture of both. Only one may be passed."""
        model = Model().to(self.device)
        params = list(model.layer1.parameters())
        parameter, linear = "<class 'torch.nn.parameter.Parameter'>", "<class 'torch.nn.modules.linear.Linear'>"
        if ignore_modules:
            message = rf"^ignored_modules expects nn.Module list elements but got types \[{parameter}\]$"
            with self.assertRaisesRegex(ValueError, message):
                FSDP(model, ignored_modules=params)
            message = "^Cannot pass both ignored_modules and ignored_states at the same time"
            with self.assertRaisesRegex(ValueError, message):
                FSDP(model, ignored_modules=[model.layer1], ignored_states=params)
        else:
            message = (
                "^ignored_states expects all nn.Parameter or all nn.Module list elements but got types "
                rf"\[{linear}, {parameter}\]$"
            )
            with self.assertRaisesRegex(ValueError, message):
                FSDP(model, ignored_states=[*params, *model.layer1])

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], ignore_modules=[True, False])
    def test_ignored_gradients_have_their_size(self, use_orig_params, ignore_modules):
        """Gradients have the right scale: SGD steps match. Adam would hide a wrong scale."""
        model, local = self._build()
        ignored = {f"layer1.{name}": param for name, param in model.layer1.named_parameters()}
        kwargs = _passed([model.layer1], ignore_modules)
        model = FSDP(model, use_orig_params=use_orig_params, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **kwargs)
        # If only parameters are ignored, the policy also wraps their layers, whose units then have no parameters.
        self.assertEqual(len(FSDP.fsdp_modules(model)), 4 if ignore_modules else 7)
        self.assertEqual(len(internals.handles(model)), 3)
        self.assertEqual({*self._check_managed(model, ignored), *ignored}, set(dict(local.named_parameters())))
        self._check_training(model, local, ignored, momentum)
        # Ignored parameters become different on each rank. The parameters that FSDP reduces stay the same.
        for name, param in named(model).items():
            if name in ignored and name.endswith("weight"):
                of_ranks = [torch.empty_like(param) for _ in range(self.world_size)]
                dist.all_gather(of_ranks, param.detach().contiguous())
                self.assertNotEqual(*of_ranks)

    @skip_if_lt_x_gpu(2)
    @subtests(argument=["ignored_modules", "ignored_states"], kind=[list, set, iter], use_orig_params=[False, True])
    def test_ignored_modules_of_any_iterable_type(self, argument, kind, use_orig_params):
        """FSDP manages exactly the layers that are not ignored, also if ignored modules are passed as an iterator."""
        model, _ = self._build()
        model = FSDP(model, use_orig_params=use_orig_params, **{argument: kind([model.layer1, model.layer3])})
        managed = [name for names in internals.names_managed(model).values() for name in names]
        is_wrong = argument == "ignored_modules" and kind is iter
        with torch_defect("fsdp1_iterator_of_ignored_modules_is_used_up", when=is_wrong):
            self.assertEqual(managed, ["layer0.weight", "layer0.bias", "layer2.weight", "layer2.bias"])

    def _forward_with_low_buffers(self, model: nn.Module, **kwargs: Any) -> dict[str, torch.dtype]:
        precision = MixedPrecision(buffer_dtype=torch.float16)
        model = FSDP(model, mixed_precision=precision, **kwargs)
        model(torch.randn(8, 3, device=self.device))
        return {internals.clean_name(name): buffer.dtype for name, buffer in model.named_buffers()}

    @skip_if_lt_x_gpu(2)
    def test_ignored_meta_module_is_not_materialized(self):
        """Nothing is materialized if only ignored modules are on the meta device."""
        model = ModelWithIgnoredModules(1)
        ignored = model.layer1[2].to("meta")
        FSDP(model, ignored_modules=[ignored], param_init_fn=lambda module: self.fail(f"{module} is materialized"))
        self.assertEqual([name for name, param in model.named_parameters() if param.is_meta], ["layer1.2.weight"])

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], has_values=[False, True])
    def test_ignored_parameter_beside_parameters_on_meta(self, use_orig_params, has_values):
        """FSDP does not manage an ignored parameter if it materializes another parameter of the same layer."""
        layer = nn.Linear(4, 4, device="meta")
        if has_values:
            layer.weight = nn.Parameter(torch.ones(4, 4, device=self.device))
        model = FSDP(layer, ignored_states=[layer.weight], use_orig_params=use_orig_params)
        with torch_defect("fsdp1_ignored_meta_parameter_is_managed", when=not has_values):
            self.assertEqual(internals.names_in(internals.flat_param_of(model)), ("bias",))
        if has_values:
            with torch_defect("fsdp1_materialization_loses_values"):
                self.assertEqual(layer.weight.detach(), torch.ones(4, 4, device=self.device))

    @skip_if_lt_x_gpu(2)
    @subtests(nested=[False, True])
    def test_ignored_buffers_keep_their_dtype(self, nested):
        """Mixed precision for buffers does not change the buffers of ignored modules."""
        model = Model().to(self.device)
        for module in (model.layer0, model.layer1[1], model.layer2):
            module.register_buffer("buf", torch.ones(3, device=self.device))
        ignored = [model.layer1[1]]
        if nested:  # then only the inner instance gets the ignored module
            precision = MixedPrecision(buffer_dtype=torch.float16)
            model.layer1 = FSDP(model.layer1, ignored_modules=ignored, mixed_precision=precision)
        dtypes = self._forward_with_low_buffers(model, ignored_modules=None if nested else ignored)
        expected = {"layer0.buf": torch.float16, "layer1.1.buf": torch.float32, "layer2.buf": torch.float16}
        self.assertEqual(dtypes, expected)

    @skip_if_lt_x_gpu(2)
    @subtests(
        policy=[
            None,
            ModuleWrapPolicy({nn.Sequential}),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={nn.Sequential}),
        ],
        passed=["modules", "modules as states"],
    )
    def test_ignored_buffers_keep_their_dtype_under_a_policy(self, policy, passed):
        """In a module that a policy wraps, buffers are cast, except those of an ignored module."""
        model = Model().to(self.device)
        for module in (model.layer0, model.layer1[1], model.layer1[2]):
            module.register_buffer("buf", torch.ones(3, device=self.device))
        dtypes = self._forward_with_low_buffers(model, auto_wrap_policy=policy, **PASSED[passed]([model.layer1[1]]))
        with torch_defect("fsdp1_ignored_buffers_in_auto_wrapped_units_are_cast", when=policy is not None):
            self.assertEqual(dtypes.pop("layer1.1.buf"), torch.float32)
        self.assertEqual(dtypes, {"layer0.buf": torch.float16, "layer1.2.buf": torch.float16})

    @skip_if_lt_x_gpu(2)
    def test_ignored_buffer_of_the_same_name(self):
        """The root's buffer is cast even if an inner instance ignores one of the same local name."""
        layers = [nn.Linear(3, 3, device=self.device) for _ in range(3)]
        for layer in layers[:2]:
            layer.register_buffer("buf", torch.ones(3, device=self.device))
        own, ignored, last = layers
        inner = FSDP(nn.Sequential(ignored, last), ignored_modules=[ignored])
        dtypes = self._forward_with_low_buffers(nn.Sequential(own, inner))
        with torch_defect("fsdp1_ignored_buffer_hides_its_namesake"):
            self.assertEqual(dtypes.pop("0.buf"), torch.float16)
        self.assertEqual(dtypes, {"1.0.buf": torch.float32})


instantiate_parametrized_tests(TestFSDPIgnoredModules)

if __name__ == "__main__":
    run_tests()
