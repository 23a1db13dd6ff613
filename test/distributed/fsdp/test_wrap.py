"""Which modules become FSDP units, and with which arguments: the policies of ``auto_wrap_policy``, and ``wrap``.

Tests without communication have no ranks. They construct FSDP over a group that only knows its rank and size.
"""

from __future__ import annotations

import copy
import functools
import os
import tempfile
import warnings
from collections.abc import Callable, Iterable
from enum import Enum, auto
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    DEVICEInitMode,
    DummyProcessGroup,
    FSDPInitMode,
    FSDPTest,
    TransformerWithSharedParams,
    substitutes,
)
from torch_fsdp_tests.common_utils import (
    FILE_SCHEMA,
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters
from torch_fsdp_tests.installed_torch import torch_names

wrapping = torch_names.module("torch.distributed.fsdp.wrap")
wrap_utils = torch_names.module("torch.distributed.fsdp._wrap_utils")
batchnorm = torch_names.module("torch.nn.modules.batchnorm")

AT_LEAST_40 = functools.partial(size_based_auto_wrap_policy, min_num_params=40)  # a 5 x 5 linear layer has 30
FP16 = MixedPrecision(param_dtype=torch.float16)
BF16 = MixedPrecision(param_dtype=torch.bfloat16)
OFF = MixedPrecision()
TRANSFORMER_LAYERS = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
TRANSFORMER_UNITS = ["", *(f"transformer.{half}.layers.{i}" for half in ("encoder", "decoder") for i in (0, 1))]


def units(model: nn.Module) -> list[str]:
    """The names of the wrapped modules, as in the model without FSDP. The root's name is empty."""
    return list(internals.instances(model))


def norms(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
    """A policy that wraps each batch norm separately."""
    classes = [batchnorm._BatchNorm]
    return wrapping._wrap_module_cls_individually(module, classes, recurse, *args, **kwargs)


def owned(model: nn.Module, unit_names: Iterable[str], ignored: Iterable[str] = ()) -> dict[str, list[str]]:
    """The parameters of each unit, by their plain names. Each parameter belongs to the innermost unit around it."""
    found: dict[str, list[str]] = {}
    for name, _ in model.named_parameters():
        if not any(name.startswith(f"{prefix}.") for prefix in ignored):
            owner = max((each for each in unit_names if name.startswith(f"{each}." if each else "")), key=len)
            found.setdefault(owner, []).append(name)
    return {name: sorted(names) for name, names in found.items()}


def linear_policies() -> list[Any]:
    """Policies of each kind that wrap linear layers."""
    is_linear = functools.partial(_is_instance, classes=nn.Linear)
    by_function = functools.partial(lambda_auto_wrap_policy, lambda_fn=is_linear)
    return [ModuleWrapPolicy({nn.Linear}), CustomPolicy(is_linear), by_function]


class BatchNormNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(10, 10, bias=False)
        self.bn1 = nn.BatchNorm1d(10)
        self.bn2 = nn.BatchNorm2d(10)
        self.bn3 = nn.BatchNorm3d(10)
        self.sync_bn = nn.SyncBatchNorm(10)


class LoraAttention(nn.Module):
    """Frozen projections and a trainable low rank pair. Its forward never runs."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            self.add_module(name, nn.Linear(32, 32, bias=False).requires_grad_(False))
        self.lora_A = nn.Linear(32, 8, bias=False)
        self.lora_B = nn.Linear(8, 32, bias=False)


class LoraMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj1 = nn.Linear(32, 128, bias=False).requires_grad_(False)
        self.proj2 = nn.Linear(128, 32, bias=False).requires_grad_(False)


class LoraDecoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = LoraAttention()
        self.mlp = LoraMLP()
        self.inp_layernorm = nn.LayerNorm(32).requires_grad_(False)
        self.post_attn_layernorm = nn.LayerNorm(32).requires_grad_(False)


class LoraModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(100, 32).requires_grad_(False)
        self.layers = nn.ModuleList(LoraDecoder() for _ in range(4))
        self.norm = nn.LayerNorm(32).requires_grad_(False)


LORA = LoraAttention, LoraMLP, LoraDecoder


class WrapMethod(Enum):
    FSDP_CTOR = auto()
    WRAP_API = auto()


class TestFSDPWrap(FSDPTest):
    class NestedSequentialModel:
        """Two layers, then a sequence of two more. Each layer has 30 parameters."""

        ALL = ["", "0", "1", "2", "2.0", "2.1"]
        PARTIAL = ["", "2"]

        @staticmethod
        def get_model() -> nn.Sequential:
            inner = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
            return nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5), inner)

        @classmethod
        def verify_model_all_wrapped(cls, case: TestCase, model: nn.Module) -> None:
            case.assertEqual(units(model), cls.ALL)

        @classmethod
        def verify_model(cls, case: TestCase, model: nn.Module) -> None:
            case.assertEqual(units(model), cls.PARTIAL)
            case.assertEqual([type(layer) for layer in (model[0], model[1], *model[2].module)], [nn.Linear] * 4)

    world_size = 2

    def _placed(self, model: nn.Module, mode: DEVICEInitMode, when: DEVICEInitMode) -> nn.Module:
        return model.to(self.device) if mode is when else model

    @skip_if_lt_x_gpu(2)
    @parametrize("nested", [True, False])
    @parametrize("device_init_mode", [DEVICEInitMode.DEVICE_AFTER, DEVICEInitMode.DEVICE_BEFORE])
    def test_error_already_wrapped(self, nested, device_init_mode):
        """A policy cannot be applied to a model that contains FSDP instances."""
        model = nn.Module()
        for name in ("lin1", "lin2", "lin3"):
            layer = self._placed(nn.Linear(1, 1, bias=False), device_init_mode, DEVICEInitMode.DEVICE_BEFORE)
            wrapped = FSDP(layer)
            model.add_module(name, nn.Sequential(nn.Identity(), wrapped) if nested and name == "lin1" else wrapped)
        model = self._placed(model, device_init_mode, DEVICEInitMode.DEVICE_AFTER)
        found = "lin1.1" if nested else "lin1"
        message = f"FSDP auto wrapping requires modules to not already have FSDP applied but found {found} in\n"
        with self.assertRaisesRegex(ValueError, message):
            FSDP(model, auto_wrap_policy=size_based_auto_wrap_policy)

    @skip_if_lt_x_gpu(2)
    @parametrize("use_or_policy", [True, False])
    def test_wrap_batchnorm_individually(self, use_or_policy):
        def never_wrap_policy(*args: Any, **kwargs: Any) -> bool:
            return False

        policy = functools.partial(wrapping._or_policy, policies=[never_wrap_policy, norms]) if use_or_policy else norms
        model = FSDP(BatchNormNet(), auto_wrap_policy=policy)
        self.assertEqual(units(model), ["", "bn1", "bn2", "bn3", "sync_bn"])
        self.assertIs(type(model.lin), nn.Linear)

    @skip_if_lt_x_gpu(2)
    def test_bn_always_wrapped_individually(self):
        """Norms become units inside a unit only if a policy wraps them."""

        def wrap_bn_container(module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
            return recurse or isinstance(module, BatchNormNet)

        class MyModule(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bn_container = BatchNormNet()

        both = functools.partial(wrapping._or_policy, policies=[wrap_bn_container, norms])
        inner = [f"bn_container.{name}" for name in ("bn1", "bn2", "bn3", "sync_bn")]
        self.assertEqual(units(FSDP(MyModule(), auto_wrap_policy=both)), ["", "bn_container", *inner])
        self.assertEqual(units(FSDP(MyModule(), auto_wrap_policy=wrap_bn_container)), ["", "bn_container"])

    @skip_if_lt_x_gpu(2)
    @parametrize("cpu_offload", [CPUOffload(offload_params=False), CPUOffload(offload_params=True)])
    @parametrize("backward_prefetch", [BackwardPrefetch.BACKWARD_POST, BackwardPrefetch.BACKWARD_PRE])
    @parametrize("forward_prefetch", [False, True])
    @parametrize("device_init_mode", [DEVICEInitMode.DEVICE_AFTER, DEVICEInitMode.DEVICE_BEFORE])
    def test_main_wrap_api(self, cpu_offload, backward_prefetch, forward_prefetch, device_init_mode):
        """Constructor arguments reach every unit, and the model trains like the plain one."""
        if cpu_offload.offload_params and device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            if accelerator.current().has("device_memory"):
                self.skipTest("offloaded parameters stay in CPU memory: the model cannot be moved after it is wrapped")

        class Nested(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.nested_lin = nn.Linear(1, 1, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.nested_lin(x)

        class MyModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin1, self.lin2, self.lin3 = (nn.Linear(1, 1, bias=False) for _ in range(3))
                self.lin4 = Nested()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.lin4(self.lin3(self.lin2(self.lin1(x))))

        torch.manual_seed(0)
        plain = MyModel()
        reference = copy.deepcopy(plain).to(self.device)
        model = FSDP(
            self._placed(plain, device_init_mode, DEVICEInitMode.DEVICE_BEFORE),
            auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=0),
            cpu_offload=cpu_offload,
            backward_prefetch=backward_prefetch,
            forward_prefetch=forward_prefetch,
        )
        model = self._placed(model, device_init_mode, DEVICEInitMode.DEVICE_AFTER)
        self.assertEqual(units(model), ["", "lin1", "lin2", "lin3", "lin4", "lin4.nested_lin"])
        for instance in FSDP.fsdp_modules(model):
            self._check_cpu_offload(instance, cpu_offload)
            self._check_backward_prefetch(instance, backward_prefetch)
            self._check_forward_prefetch(instance, forward_prefetch)

        models = reference, model
        optims = [torch.optim.SGD(each.parameters(), lr=1e-2, momentum=0.9) for each in models]
        for _ in range(6):
            for each, optim in zip(models, optims):
                optim.zero_grad()
                (each(torch.ones(1, device=self.device)).sum() * (self.rank + 1)).backward()
                if each is reference:
                    average_gradients(reference)
                optim.step()
        self.assertEqual(full_parameters(model), reference.state_dict())

    @skip_if_lt_x_gpu(2)
    @subtests(
        policy=["by hand", "classes", "custom", "function"], shared=[False, True], parents=[1, 2], flat=[True, False]
    )
    def test_module_in_two_places_is_gathered_in_both(self, policy, shared, parents, flat):
        """One layer may be in a model twice, in one parent or in two. A policy wraps it only where it finds it first;
        then nothing unshards it in the second place.
        """
        torch.manual_seed(0)
        first = nn.Linear(3, 3, bias=False, device=self.device)
        second = first if shared else copy.deepcopy(first)
        inputs = torch.ones(2, 3, device=self.device)
        expected = second(first(inputs)).detach()
        if policy == "by hand":
            first = FSDP(first, use_orig_params=not flat)
            second = first if shared else FSDP(second, use_orig_params=not flat)
        plain = nn.Sequential(first, second) if parents == 1 else nn.Sequential(*map(nn.Sequential, (first, second)))
        is_linear = functools.partial(_is_instance, classes=nn.Linear)
        policies = {
            "classes": ModuleWrapPolicy({nn.Linear}),
            "custom": CustomPolicy(is_linear),
            "function": functools.partial(lambda_auto_wrap_policy, lambda_fn=is_linear),
        }
        model = FSDP(plain, auto_wrap_policy=policies.get(policy), use_orig_params=not flat)
        if shared and policy != "by hand":
            return self.assertRaises(RuntimeError, model, inputs)
        self.assertEqual(model(inputs).detach(), expected)

    @skip_if_lt_x_gpu(2)
    @subtests(inner=[True, False])
    def test_weight_that_two_modules_share_stays_one(self, inner):
        """A policy may separate an embedding from the head that has the same weight."""
        plain = nn.Sequential(nn.Sequential(nn.Embedding(4, 2)), nn.Linear(2, 4, bias=False)).to(self.device)
        plain[1].weight = plain[0][0].weight
        model = FSDP(copy.deepcopy(plain), auto_wrap_policy=ModuleWrapPolicy({nn.Sequential} if inner else set()))
        tokens = torch.tensor([1, 2], device=self.device)
        for each in (plain, model):
            optim = torch.optim.SGD(each.parameters(), lr=0.1)
            each(tokens).square().sum().backward()
            optim.step()
        actual = [*full_parameters(model).values()]
        with torch_defect("fsdp1_tied_parameters_come_apart", when=inner):
            self.assertEqual(actual, [plain[1].weight.detach()])

    @skip_if_lt_x_gpu(1)
    def test_zero_argument(self):
        """A module without parameters can be wrapped, and its forward needs no arguments."""

        class Constant(nn.Module):
            def forward(self) -> torch.Tensor:
                return torch.arange(3.0)

        self.assertEqual(FSDP(Constant())(), torch.arange(3.0))


class TestAutoWrap(TestCase):
    """No ranks: the group does not communicate, and has size 1 (FSDP warns that it shards nothing) or 2."""

    def setUp(self) -> None:
        super().setUp()
        self.process_group = DummyProcessGroup(rank=0, size=1)

    @property
    def device(self) -> torch.device:
        return accelerator.current().device(0)

    def _kwargs(self, **kwargs: Any) -> dict[str, Any]:
        """FSDP arguments with an explicit device, because FSDP cannot infer it from a model in CPU memory."""
        return {"process_group": self.process_group, "device_id": self.device, **kwargs}

    def _fsdp(self, model: nn.Module, policy: Any, **kwargs: Any) -> FSDP:
        return FSDP(model, auto_wrap_policy=policy, **self._kwargs(**kwargs))

    def _wrapped(self, wrap_method: WrapMethod, model: nn.Module, policy: Any, **kwargs: Any) -> nn.Module:
        """Wrap the model by the constructor, or by ``wrap`` in a context with the same arguments."""
        if wrap_method is WrapMethod.FSDP_CTOR:
            return self._fsdp(model, policy, **kwargs)
        with enable_wrap(wrapper_cls=FSDP, auto_wrap_policy=policy, **self._kwargs(**kwargs)):
            return wrap(model)

    def _transformer(self) -> TransformerWithSharedParams:
        return TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_NEVER, deterministic=True
        )

    @parametrize("wrap_method", [WrapMethod.FSDP_CTOR, WrapMethod.WRAP_API])
    def test_wrap(self, wrap_method):
        if wrap_method is WrapMethod.WRAP_API:
            with enable_wrap(wrapper_cls=FSDP, **self._kwargs()):
                layer = wrap(nn.Linear(5, 5))
        else:
            layer = self._fsdp(nn.Linear(5, 5), functools.partial(size_based_auto_wrap_policy, min_num_params=1))
        self.assertEqual(units(layer), [""])
        self.assertEqual((layer.rank, layer.world_size), (self.process_group.rank(), self.process_group.size()))

    def test_wrap_disabled_outside_context(self):
        class MyModel(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = wrap(nn.Linear(5, 5))

        model = MyModel()
        self.assertIs(type(model.lin), nn.Linear)
        with enable_wrap(wrapper_cls=FSDP, **self._kwargs()):
            model = wrap(model)
        self.assertEqual(units(model), [""])
        self.assertIs(type(model.lin), nn.Linear)

    def test_wrap_override_defaults(self):
        """An argument of ``wrap`` overrides that of the context, for this call only."""
        other = DummyProcessGroup(rank=0, size=2)
        with enable_wrap(wrapper_cls=FSDP, **self._kwargs()):
            layer, next_layer = wrap(nn.Linear(5, 5), process_group=other), wrap(nn.Linear(5, 5))
        self.assertIs(layer.process_group, other)
        self.assertEqual((layer.rank, layer.world_size), (0, 2))
        self.assertIs(next_layer.process_group, self.process_group)

    def test_always_wrap(self):
        model = self._fsdp(TestFSDPWrap.NestedSequentialModel.get_model(), always_wrap_policy)
        TestFSDPWrap.NestedSequentialModel.verify_model_all_wrapped(self, model)

    def test_transformer_auto_wrap_policy(self):
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=TRANSFORMER_LAYERS)
        self._check_transformer_wrapping(policy)

    def test_module_wrap_policy(self):
        self._check_transformer_wrapping(ModuleWrapPolicy(TRANSFORMER_LAYERS))

    def test_module_wrap_policy_callable(self):
        """A policy object can also be one of the functions of an or-policy."""
        policy = functools.partial(wrapping._or_policy, policies=[ModuleWrapPolicy(TRANSFORMER_LAYERS)])
        self._check_transformer_wrapping(policy)

    def _check_transformer_wrapping(self, policy: Any) -> None:
        self.assertEqual(units(self._fsdp(self._transformer(), policy)), TRANSFORMER_UNITS)

    @subtests(use_uniform_kwargs=[False, True])
    def test_custom_policy(self, use_uniform_kwargs):
        """Each unit has the root's arguments, except those that the policy sets for it."""
        self.process_group = DummyProcessGroup(rank=0, size=2)
        plain = self._transformer()

        def lambda_fn(module: nn.Module) -> bool | dict[str, Any]:
            if use_uniform_kwargs:
                return module is plain.bn or isinstance(module, tuple(TRANSFORMER_LAYERS))
            if module is plain.bn:
                return {"sharding_strategy": ShardingStrategy.NO_SHARD}
            if isinstance(module, nn.TransformerDecoderLayer):
                return {
                    "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
                    "backward_prefetch": BackwardPrefetch.BACKWARD_POST,
                }
            return isinstance(module, nn.TransformerEncoderLayer)

        model = self._fsdp(plain, CustomPolicy(lambda_fn), mixed_precision=FP16)
        self.assertEqual(units(model), [*TRANSFORMER_UNITS, "bn"])
        for name, instance in internals.instances(model).items():
            strategy, prefetch = ShardingStrategy.FULL_SHARD, BackwardPrefetch.BACKWARD_PRE
            if not use_uniform_kwargs and name == "bn":
                strategy = ShardingStrategy.NO_SHARD
            elif not use_uniform_kwargs and "decoder" in name:
                strategy, prefetch = ShardingStrategy.SHARD_GRAD_OP, BackwardPrefetch.BACKWARD_POST
            self.assertEqual((instance.sharding_strategy, instance.backward_prefetch), (strategy, prefetch), msg=name)
            # Batch norms never use mixed precision, whatever the policy says.
            self.assertEqual(instance.mixed_precision, OFF if name == "bn" else FP16, msg=name)

    def test_auto_wrap_api(self):
        model = self._fsdp(TestFSDPWrap.NestedSequentialModel.get_model(), AT_LEAST_40)
        TestFSDPWrap.NestedSequentialModel.verify_model(self, model)

    def test_parameters_that_are_not_wrapped_count(self):
        """A module is wrapped if its size is at least the limit. Parameters of unwrapped children count."""
        for limit, expected in ((60, ["", "0"]), (61, [""])):
            model = nn.Sequential(nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)))
            policy = functools.partial(size_based_auto_wrap_policy, min_num_params=limit)
            self.assertEqual(units(self._fsdp(model, policy)), expected)

    def test_auto_wrap_preset_exclude_wrap(self):
        """A list is not wrapped by the policy. It is wrapped if FSDP is called on it."""
        containers = nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])
        with self.assertWarnsRegex(UserWarning, "will not all-gather parameters for containers"):
            model = self._fsdp(containers, AT_LEAST_40)
        self.assertEqual(units(model), [""])
        inside = self._fsdp(nn.Sequential(nn.ModuleList([nn.Linear(5, 5), nn.Linear(5, 5)])), AT_LEAST_40)
        self.assertEqual(units(inside), [""])

    def test_auto_wrap_preset_exclude_wrap_include_children(self):
        """Excluded modules may have children that are wrapped."""
        model = self._fsdp(nn.ModuleList([nn.Linear(10, 10)]), AT_LEAST_40)
        self.assertEqual(units(model), ["", "0"])

    def test_auto_wrap_preset_force_leaf(self):
        """Neither attention nor its children are wrapped, however many parameters it has."""
        model = self._fsdp(nn.Sequential(nn.Linear(10, 10), nn.MultiheadAttention(100, 1)), AT_LEAST_40)
        self.assertEqual(units(model), ["", "0"])
        self.assertIs(type(model.module[1]), nn.MultiheadAttention)
        self.assertIsInstance(model.module[1].out_proj, nn.Linear)

    def test_auto_wrap_preset_force_leaf_custom(self):
        policy = functools.partial(
            AT_LEAST_40, force_leaf_modules=size_based_auto_wrap_policy.FORCE_LEAF_MODULES | {nn.Linear}
        )
        model = self._fsdp(nn.Sequential(nn.Linear(10, 10), nn.ModuleList([nn.Linear(10, 10)])), policy)
        self.assertEqual(units(model), [""])

    def test_limit_of_size_based_policy(self):
        """From the limit on, the policy recurses into a module and wraps it, unless its class is excluded."""
        for recurse, excluded in ((True, nn.MultiheadAttention(2, 1)), (False, nn.ModuleList())):
            for module, numel, expected in ((nn.ReLU(), 39, False), (nn.ReLU(), 40, True), (excluded, 40, False)):
                self.assertIs(AT_LEAST_40(module, recurse=recurse, nonwrapped_numel=numel), expected)

    @parametrize("device_init_mode", [DEVICEInitMode.DEVICE_BEFORE, DEVICEInitMode.DEVICE_AFTER])
    @parametrize("cpu_offload", [CPUOffload(offload_params=False), CPUOffload(offload_params=True)])
    @parametrize("use_device_id", [True, False])
    def test_auto_wrap_smoke_test(self, device_init_mode, cpu_offload, use_device_id):
        """With a real group of one rank, the wrapped model matches the plain one.

        Without an accelerator and without a ``device_id``, FSDP raises.
        """
        device = accelerator.current()
        if cpu_offload.offload_params and device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            if device.has("device_memory"):
                self.skipTest("offloaded parameters stay in CPU memory: the model cannot be moved after it is wrapped")
        directory = tempfile.TemporaryDirectory()
        self.addCleanup(directory.cleanup)
        store = FILE_SCHEMA + os.path.join(directory.name, "store")
        device.bind(0)
        dist.init_process_group(device.backend, init_method=store, rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)

        plain = TestFSDPWrap.NestedSequentialModel.get_model()
        reference = copy.deepcopy(plain).to(self.device)
        if device_init_mode is DEVICEInitMode.DEVICE_BEFORE:
            plain = plain.to(self.device)
        kwargs: dict[str, Any] = {"auto_wrap_policy": AT_LEAST_40, "cpu_offload": cpu_offload}
        if use_device_id:
            kwargs["device_id"] = self.device
            substitutes.install(device)  # for offloading; without a device_id, they would give FSDP a default one
            self.addCleanup(substitutes.uninstall)
        elif not device.has("device_memory"):
            with self.assertRaisesRegex(RuntimeError, "FSDP needs a non-CPU accelerator device"):
                FSDP(plain, **kwargs)
            return
        model = FSDP(plain, **kwargs)
        if device_init_mode is DEVICEInitMode.DEVICE_AFTER:
            model = model.to(self.device)
        TestFSDPWrap.NestedSequentialModel.verify_model(self, model)

        inp = torch.rand(1, 5, device=self.device)
        for each in (reference, model):
            F.mse_loss(inp, each(inp)).backward()
        # One rank has no shards and no padding: the gradients of the root and then the inner unit are complete.
        actual = torch.cat([flat_param.grad for flat_param in internals.flat_params(model)])
        self.assertEqual(actual, torch.cat([param.grad.flatten() for param in reference.parameters()]))

    @parametrize("wrap_method", [WrapMethod.FSDP_CTOR, WrapMethod.WRAP_API])
    def test_always_wrap_with_ignored_modules(self, wrap_method):
        plain = TestFSDPWrap.NestedSequentialModel.get_model()
        model = self._wrapped(wrap_method, plain, always_wrap_policy, ignored_modules=[plain[1], plain[2][0]])
        self.assertEqual(units(model), ["", "0", "2", "2.1"])

    @parametrize("wrap_method", [WrapMethod.FSDP_CTOR, WrapMethod.WRAP_API])
    def test_auto_wrap_with_ignored_modules(self, wrap_method):
        """Ignored parameters do not count towards the size. The inner sequence has only 30 others."""
        plain = TestFSDPWrap.NestedSequentialModel.get_model()
        model = self._wrapped(wrap_method, plain, AT_LEAST_40, ignored_modules=[plain[1], plain[2][0]])
        self.assertEqual(units(model), [""])

    @subtests(
        use_orig_params=[True, False],
        policy=[
            ModuleWrapPolicy(LORA),
            CustomPolicy(lambda module: isinstance(module, LORA)),
            CustomPolicy(
                lambda module: (
                    {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
                    if isinstance(module, LoraAttention)
                    else isinstance(module, LORA)
                )
            ),
        ],
    )
    def test_frozen_params(self, use_orig_params, policy):
        """A unit with trainable and frozen parameters is rejected. ``use_orig_params=True`` makes it a warning."""
        start = r"layers\.0\.attn has both parameters with requires_grad=True and False\. "
        if not use_orig_params:
            message = start + "FSDP does not support wrapping such modules when use_orig_params=False"
            with self.assertRaisesRegex(ValueError, message):
                self._fsdp(LoraModel(), policy, use_orig_params=False)
            return
        with self.assertWarnsRegex(UserWarning, start + "We do not recommend wrapping such modules"):
            model = self._fsdp(LoraModel(), policy, use_orig_params=True)
        self.assertEqual(len(units(model)), 1 + 4 * len(LORA))

    def test_managed_parameters(self):
        """With any policy, each parameter is in one flat parameter, that of its innermost unit."""
        get_model = TestFSDPWrap.NestedSequentialModel.get_model
        every = TestFSDPWrap.NestedSequentialModel.ALL
        linears = [name for name in every if name != "2"]
        is_linear = functools.partial(_is_instance, classes=nn.Linear)
        self._check_managed(get_model, always_wrap_policy, every)
        self._check_managed(get_model, always_wrap_policy, ["", "0", "2", "2.1"], ignored=["1", "2.0"])
        self._check_managed(get_model, AT_LEAST_40, ["", "2"])
        self._check_managed(get_model, AT_LEAST_40, [""], ignored=["1", "2.0"])
        self._check_managed(get_model, ModuleWrapPolicy({nn.Linear}), linears)
        self._check_managed(get_model, ModuleWrapPolicy({nn.Linear}), ["", "0", "2.1"], ignored=["1", "2.0"])
        self._check_managed(get_model, functools.partial(lambda_auto_wrap_policy, lambda_fn=is_linear), linears)
        self._check_managed(get_model, CustomPolicy(is_linear), linears)
        self._check_managed(get_model, CustomPolicy(lambda module: True), every)
        self._check_managed(get_model, CustomPolicy(is_linear), ["", "1", "2.0"], ignored=["0", "2.1"])

        def uneven() -> nn.Module:
            return nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.Linear(5, 5)), nn.Linear(5, 5))

        # When its first layer is a unit, the inner sequence has 30 parameters left.
        self._check_managed(uneven, AT_LEAST_40, ["", "0.0"])
        # The plain model lists a shared parameter under one name. It is in the root's flat parameter, once.
        is_layer = functools.partial(_is_instance, classes=tuple(TRANSFORMER_LAYERS))
        for policy in (
            ModuleWrapPolicy(TRANSFORMER_LAYERS),
            functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=TRANSFORMER_LAYERS),
            CustomPolicy(is_layer),
        ):
            self._check_managed(self._transformer, policy, TRANSFORMER_UNITS)
            rest = [name for name in TRANSFORMER_UNITS if "encoder" not in name]
            self._check_managed(self._transformer, policy, rest, ignored=["transformer.encoder"])

    def _check_managed(
        self, get_model: Callable[[], nn.Module], policy: Any, expected_units: list[str], ignored: Iterable[str] = ()
    ) -> None:
        plain = get_model()
        expected = owned(plain, expected_units, ignored)
        ignored_modules = [plain.get_submodule(name) for name in ignored]
        group = DummyProcessGroup(rank=0, size=2)
        model = self._fsdp(plain, policy, process_group=group, ignored_modules=ignored_modules)
        self.assertEqual(units(model), expected_units)
        managed = {name: sorted(names) for name, names in internals.names_managed(model).items()}
        self.assertEqual(managed, expected)

    @subtests(lists_norm=[False, True])
    def test_arguments_of_units_are_apart(self, lists_norm):
        """A policy's arguments for one unit change neither other units nor the policy's own dict."""
        self.process_group = DummyProcessGroup(rank=0, size=2)
        mine = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP, "mixed_precision": FP16}
        before = copy.deepcopy(mine)
        full, grads = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
        plain = self._norms_and_linears()
        given = {plain[0]: mine, plain[2]: True, plain[1]: mine if lists_norm else False}
        policy = CustomPolicy(lambda module: given.get(module, False))
        model = self._fsdp(plain, policy, mixed_precision=BF16)
        self._check_each(model, mixed_precision=[BF16, FP16, OFF, BF16, OFF])
        self._check_each(model, sharding_strategy=[full, grads, grads if lists_norm else full, full, full])
        self.assertEqual(mine, before)

    @subtests(policy=linear_policies)
    def test_norms_kept_out_of_mixed_precision(self, policy):
        """Norms outside the policy become units without mixed precision, except ignored ones."""
        self.process_group = DummyProcessGroup(rank=0, size=2)
        with self.assertWarnsRegex(UserWarning, r"BatchNorm1d(.|\n)*with mixed precision disabled"):
            model = self._fsdp(self._norms_and_linears(), policy, mixed_precision=BF16)
        self._check_each(model, mixed_precision=[BF16, BF16, OFF, BF16, OFF])
        self._check_each(model, sharding_strategy=[ShardingStrategy.FULL_SHARD] * 5)
        plain = self._norms_and_linears()
        model = self._fsdp(plain, policy, mixed_precision=BF16, ignored_modules=[plain[1]])
        self.assertEqual(units(model), ["", "0", "2", "3"])

    @subtests(policy=linear_policies)
    def test_arguments_of_the_root_reach_every_unit(self, policy):
        """The root's arguments, different from the defaults, reach every unit with any policy."""
        kwargs = {
            "process_group": DummyProcessGroup(rank=0, size=2),
            "sharding_strategy": ShardingStrategy.SHARD_GRAD_OP,
            "cpu_offload": CPUOffload(offload_params=False),
            "backward_prefetch": None,
            "mixed_precision": FP16,
            "forward_prefetch": True,
            "limit_all_gathers": False,
        }
        plain = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        model = self._fsdp(plain, policy, use_orig_params=True, **kwargs)
        self.assertEqual(units(model), ["", "0", "1"])
        self._check_each(model, **{name: [value] * 3 for name, value in kwargs.items()})
        self._check_each(model, _use_orig_params=[True] * 3, compute_device=[self.device] * 3)

    def _norms_and_linears(self) -> nn.Sequential:
        return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def _check_each(self, model: nn.Module, **expected: list[Any]) -> None:
        """The units, in the order of :func:`units`, must have these attribute values."""
        for attribute, values in expected.items():
            actual = [getattr(instance, attribute) for instance in internals.instances(model).values()]
            self.assertEqual(actual, values, msg=attribute)

    def test_mixed_precision_override_of_two_norms(self):
        """Norms that no policy lists get the caller's dict, changed. FSDP1 makes it for this call alone."""
        norms, kwargs = nn.Sequential(nn.BatchNorm1d(1), nn.BatchNorm1d(1)), {"mixed_precision": FP16}
        classes = [batchnorm._BatchNorm]
        targets = wrapping._run_mixed_precision_override_policy(norms, classes, set(), kwargs, {})
        self.assertEqual(list(targets), list(norms))
        for each in targets.values():
            self.assertIs(each, kwargs)
        self.assertEqual(kwargs, {"mixed_precision": None})

    def test_custom_policy_checks_what_it_is_told(self):
        """A policy must return a bool or a dict. An empty dict means False."""
        for answer in (None, 1, "yes", [("cpu_offload", None)]):
            policy = CustomPolicy(lambda module, answer=answer: answer)
            with self.assertRaisesRegex(ValueError, "should return False/True or a kwarg dict, but it returned"):
                self._fsdp(nn.Sequential(nn.Linear(2, 2)), policy)
        model = self._fsdp(nn.Sequential(nn.Linear(2, 2)), CustomPolicy(lambda module: {}))
        self.assertEqual(units(model), [""])

    def test_enable_wrap_does_not_nest(self):
        """A second context is rejected, and the first one does not change."""
        with enable_wrap(wrapper_cls=FSDP, **self._kwargs()):
            other = self._kwargs(process_group=DummyProcessGroup(rank=0, size=2))
            with self.assertRaisesRegex(NotImplementedError, "already within an autowrap context"):
                with enable_wrap(wrapper_cls=FSDP, **other):
                    self.fail("a context was opened inside another")
            layer = wrap(nn.Linear(5, 5))
        self.assertIs(layer.process_group, self.process_group)

    def test_enable_wrap_ends_with_an_exception(self):
        """Nothing is wrapped outside the context, even if an exception ended it."""
        with self.assertRaisesRegex(KeyError, "on purpose"):
            with enable_wrap(wrapper_cls=FSDP, **self._kwargs()):
                raise KeyError("on purpose")
        self.assertIs(type(wrap(nn.Linear(5, 5))), nn.Linear)
        with enable_wrap(wrapper_cls=_Remembering):
            self.assertEqual(wrap(nn.Linear(5, 5)).kwargs, {}, may_be="empty")  # and no arguments are left over


def _is_instance(module: nn.Module, classes: Any) -> bool:
    return isinstance(module, classes)


class _Remembering(nn.Module):
    """A wrapper that keeps its constructor arguments."""

    def __init__(self, module: nn.Module, **kwargs: Any) -> None:
        super().__init__()
        self.module, self.kwargs = module, kwargs


class TestWrapUtils(TestCase):
    @subtests(use_orig_params=[True, False])
    def test_validate_frozen_params(self, use_orig_params):
        """For each module to wrap, all managed parameters must be trainable, or all must be frozen."""
        model = LoraModel()
        attentions = [layer.attn for layer in model.layers]
        lora_A = {attention.lora_A for attention in attentions}
        lora_B = {attention.lora_B for attention in attentions}
        modules = lora_A | lora_B
        self._check_silent(model, modules, set(), use_orig_params)
        modules |= set(attentions)
        self._check_silent(model, modules, set(), use_orig_params)
        modules |= set(model.layers)
        self._check_silent(model, modules, set(), use_orig_params)

        modules -= lora_A
        frozen, trainable = 4 * 32 * 32, 8 * 32
        if use_orig_params:
            kind: type[Exception] = UserWarning
            advice = "We do not recommend wrapping such modules since "
            advice += "the gradient memory usage will be higher than expected "
            advice += f"({frozen + trainable} numel instead of {trainable} numel before sharding via reduce-scatter). "
        else:
            kind, advice = ValueError, "FSDP does not support wrapping such modules when use_orig_params=False. "
        message = (
            f"layers.0.attn has both parameters with requires_grad=True and False. {advice}"
            "If possible, wrap the frozen parameters with FSDP separately.\n"
            f"The following parameters have requires_grad=True:\n{['layers.0.attn.lora_A.weight']}\n"
            "The following parameters have requires_grad=False:\n"
            f"{[f'layers.0.attn.{name}_proj.weight' for name in 'qkvo']}"
        )
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with self.assertRaises(kind) as raised:
                wrap_utils._validate_frozen_params(model, modules, set(), use_orig_params)
        self.assertEqual(str(raised.exception), message)

        ignored = {param for module in lora_A for param in module.parameters()}
        self._check_silent(model, modules, ignored, use_orig_params)

    def _check_silent(
        self, model: nn.Module, modules: set[nn.Module], ignored: set[nn.Parameter], use_orig_params: bool
    ) -> None:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrap_utils._validate_frozen_params(model, modules, ignored, use_orig_params)
        self.assertEqual([str(each.message) for each in caught], [], may_be="empty")


instantiate_parametrized_tests(TestFSDPWrap)
instantiate_parametrized_tests(TestAutoWrap)

if __name__ == "__main__":
    run_tests()
