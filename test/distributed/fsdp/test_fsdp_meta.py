"""FSDP1 initializes a model on the meta device, or deferred by torchdistX, to the values that it has without FSDP1."""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy, enable_wrap, wrap

from torch_fsdp_tests.common_distributed import requires, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, get_devtype
from torch_fsdp_tests.common_utils import instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import states_may_be_synced
from torch_fsdp_tests.fsdp.references import full_parameters
from torch_fsdp_tests.installed_torch import torch_names
from torch_fsdp_tests.verdict import Reason

META = torch.device("meta")
Init = Callable[[nn.Module], None]

torchdistx = torch_names.module("torchdistx.deferred_init")
needs_torchdistx = requires(lambda: None if internals.fsdp1_init._TORCHDISTX_AVAIL else Reason("needs torchdistX"))


def _states(module: nn.Module, recurse: bool = True) -> list[torch.Tensor]:
    return [*module.parameters(recurse=recurse), *module.buffers(recurse=recurse)]


class MyLinear(nn.Linear):
    """A linear layer without a bias. Each call of ``reset_parameters`` gives the same weight."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, bias=False, **kwargs)

    def reset_parameters(self) -> None:
        torch.manual_seed(42)
        with torch.no_grad():
            nn.init.xavier_uniform_(self.weight, 1.0)


class MyBuffer(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.register_buffer("buf", torch.empty(3, 3, device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.manual_seed(42)
        nn.init.xavier_uniform_(self.buf, 0.5)


class MyModel(nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.lin1 = MyLinear(2, 2, device=device)
        self.lin2 = MyLinear(2, 2, device=device)
        self.buf_mod = MyBuffer(device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lin2(self.lin1(x))


class NestedModel(nn.Module):
    """Has three children, two of which are wrapped if the model is built under ``enable_wrap``."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.lin1 = wrap(MyLinear(2, 2, device=device))
        self.lin2 = MyLinear(2, 2, device=device)
        self.l3 = wrap(MyModel(device))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.l3(self.lin2(self.lin1(x)))


class OwnWeight(nn.Module):
    """A module with a parameter of its own, but without ``reset_parameters``."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def _init_with_reset_params(module: Any) -> None:
    if any(tensor.is_meta for tensor in _states(module, recurse=False)):
        module.to_empty(device=get_devtype(), recurse=False)
        with torch.no_grad():
            module.reset_parameters()


def _init_with_torchdistX(module: nn.Module) -> None:
    torchdistx.materialize_module(module, check_fn=lambda child: not isinstance(child, FSDP))


def _deferred(build: Callable[[torch.device], nn.Module]) -> nn.Module:
    return torchdistx.deferred_init(build, get_devtype())


def _reset_all(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


class TestFSDPWithMetaDevice(FSDPTest):
    world_size = 2

    def _compare_fsdp(self, *models: nn.Module) -> None:
        """Parameters and buffers must be equal in all models, and those of the first must be on the compute device."""
        with contextlib.ExitStack() as stack:
            for model in models:
                if isinstance(model, FSDP):
                    stack.enter_context(FSDP.summon_full_params(model, writeback=False))
            actual, *others = [[tensor.detach().clone() for tensor in _states(model)] for model in models]
        self.assertEqual({tensor.device for tensor in actual}, {self.device})
        for other in others:
            self.assertEqual(actual, other)

    def _check_training(self, from_meta: nn.Module, regular: nn.Module, plain: nn.Module) -> None:
        """Compare the models before and after a step. ``plain`` has no FSDP and gets the inputs of all ranks."""
        models = from_meta, regular, plain
        optims = [torch.optim.SGD(model.parameters(), lr=1e-3) for model in models]
        self._compare_fsdp(*models)
        inputs = torch.randn(self.world_size, 10, 2, generator=torch.Generator().manual_seed(7)).to(self.device)
        before = [param.detach().clone() for param in plain.parameters()]
        for model in (from_meta, regular):
            model(inputs[self.rank]).sum().backward()
        (plain(inputs.flatten(0, 1)).sum() / self.world_size).backward()
        for optim in optims:
            optim.step()
        self.assertNotEqual([param.detach() for param in plain.parameters()], before)
        self._compare_fsdp(*models)

    def _test_simple_model_with_meta_device(self, build: Callable[[], nn.Module], init_fn: Init | None = None) -> None:
        is_meta = next(build().parameters()).is_meta
        for policy in (always_wrap_policy, None):
            from_meta = FSDP(build(), auto_wrap_policy=policy, param_init_fn=init_fn)
            plain = MyModel(self.device)
            if is_meta:
                _reset_all(plain)
            regular = FSDP(copy.deepcopy(plain), auto_wrap_policy=always_wrap_policy)
            self._check_training(from_meta, regular, plain)

    def _test_nested_model_with_meta_device(
        self, build: Callable[[], nn.Module], auto_wrap: bool, init_fn: Init | None = None
    ) -> None:
        """With ``auto_wrap`` all modules are FSDP instances. Otherwise ``lin1``, ``l3`` and the root are."""
        is_meta = next(build().parameters()).is_meta
        plain = NestedModel(self.device)
        if is_meta:
            _reset_all(plain)
        if auto_wrap:
            from_meta = FSDP(build(), auto_wrap_policy=always_wrap_policy, param_init_fn=init_fn)
            regular = FSDP(copy.deepcopy(plain), auto_wrap_policy=always_wrap_policy)
        else:
            with enable_wrap(wrapper_cls=FSDP, param_init_fn=init_fn):
                from_meta = wrap(build())
            regular = copy.deepcopy(plain)
            with enable_wrap(wrapper_cls=FSDP):
                regular.lin1 = wrap(regular.lin1)
                regular.l3 = wrap(regular.l3)
                regular = wrap(regular)
        self.assertEqual(len(FSDP.fsdp_modules(from_meta)), 7 if auto_wrap else 3)
        self._check_training(from_meta, regular, plain)

    @skip_if_lt_x_gpu(2)
    def test_simple_model_with_meta_device_reset_params(self):
        """From the meta device, with a function that calls ``reset_parameters``."""
        self._test_simple_model_with_meta_device(functools.partial(MyModel, META), _init_with_reset_params)

    @skip_if_lt_x_gpu(2)
    def test_simple_model_with_meta_device_default_init(self):
        """From the meta device, with FSDP's default initialization."""
        self._test_simple_model_with_meta_device(functools.partial(MyModel, META))

    @needs_torchdistx
    @skip_if_lt_x_gpu(2)
    def test_simple_model_with_torchdistX_default_init(self):
        """Deferred by torchdistX, and materialized by FSDP."""
        self._test_simple_model_with_meta_device(functools.partial(_deferred, MyModel))

    @needs_torchdistx
    @skip_if_lt_x_gpu(2)
    def test_simple_model_with_torchdistX_init_fn(self):
        """Deferred by torchdistX, and materialized by a function."""
        self._test_simple_model_with_meta_device(functools.partial(_deferred, MyModel), _init_with_torchdistX)

    @skip_if_lt_x_gpu(2)
    @parametrize("auto_wrap", [True, False])
    def test_nested_model_with_meta_device_reset_params(self, auto_wrap):
        """Nested FSDP instances, with a function that calls ``reset_parameters``."""
        build = functools.partial(NestedModel, META)
        self._test_nested_model_with_meta_device(build, auto_wrap, _init_with_reset_params)

    @skip_if_lt_x_gpu(2)
    @parametrize("auto_wrap", [True, False])
    def test_nested_model_with_meta_device_default_init(self, auto_wrap):
        """Nested FSDP instances, with FSDP's default initialization."""
        self._test_nested_model_with_meta_device(functools.partial(NestedModel, META), auto_wrap)

    @needs_torchdistx
    @skip_if_lt_x_gpu(2)
    @parametrize("auto_wrap", [True, False])
    def test_nested_model_with_torchdistX_default_init(self, auto_wrap):
        """Nested FSDP instances, deferred by torchdistX."""
        self._test_nested_model_with_meta_device(functools.partial(_deferred, NestedModel), auto_wrap)

    @needs_torchdistx
    @skip_if_lt_x_gpu(2)
    @parametrize("auto_wrap", [True, False])
    def test_nested_model_with_torchdistX_init_fn(self, auto_wrap):
        """Nested FSDP instances, deferred by torchdistX and materialized by a function."""
        build = functools.partial(_deferred, NestedModel)
        self._test_nested_model_with_meta_device(build, auto_wrap, _init_with_torchdistX)

    def _test_bad_arg(self, model: nn.Module) -> None:
        with self.assertRaisesRegex(ValueError, "Expected 42 to be callable"):
            FSDP(model, param_init_fn=42)

    @needs_torchdistx
    @skip_if_lt_x_gpu(2)
    def test_bad_arg_torchdistx(self):
        """``param_init_fn`` must be callable to materialize a deferred model."""
        self._test_bad_arg(_deferred(NestedModel))

    @skip_if_lt_x_gpu(2)
    def test_bad_arg_meta(self):
        """``param_init_fn`` must be callable to materialize a model from the meta device."""
        self._test_bad_arg(NestedModel(META))

    @skip_if_lt_x_gpu(2)
    def test_meta_device_with_mixed_precision(self):
        """With mixed precision, a layer and the module around it are materialized as two FSDP instances."""

        def init_layers(module: nn.Module) -> None:
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, mean=0.0, std=0.1)
                nn.init.zeros_(module.bias)

        def init(module: nn.Module) -> None:
            module.to_empty(device=self.device)
            module.apply(init_layers)

        with META:
            model = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), OwnWeight())
        model = FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            mixed_precision=MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float16),
            param_init_fn=init,
            device_id=self.device,
        )
        handles = internals.handles(model)
        names = [internals.names_in(handle.flat_param) for handle in handles]
        self.assertEqual(names, [("2.weight",), ("weight", "bias")])
        self.assertEqual([handle.flat_param.device for handle in handles], [self.device] * 2)
        precision = [(handle._fwd_bwd_param_dtype, handle._reduce_dtype) for handle in handles]
        self.assertEqual(precision, [(torch.float32, torch.float16)] * 2)

    @skip_if_lt_x_gpu(2)
    @subtests(sync=[False, True], use_orig_params=[False, True])
    def test_each_rank_initializes_its_own_shard(self, sync, use_orig_params):
        """Each rank initializes its own shard. With ``sync_module_states`` the values are rank 0's."""

        def values(shape: tuple[int, ...], rank: int) -> torch.Tensor:
            return torch.randn(shape, generator=torch.Generator().manual_seed(rank)).to(self.device)

        def init(module: nn.Module) -> None:
            module.to_empty(device=self.device, recurse=False)
            with torch.no_grad():
                for tensor in _states(module, recurse=False):
                    tensor.copy_(values(tensor.shape, self.rank))

        model = nn.Linear(4, 4, bias=False, device=META)
        model.register_buffer("buf", torch.empty(3, device=META))
        with states_may_be_synced():
            model = FSDP(model, param_init_fn=init, sync_module_states=sync, use_orig_params=use_orig_params)
        source = 0 if sync else self.rank
        expected = values((4, 4), source).flatten().chunk(self.world_size)[self.rank]
        self.assertEqual(internals.flat_param_of(model).detach(), expected, rtol=0, atol=0)
        self.assertEqual(model.module.buf, values((3,), source), rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    def test_init_fn_is_called_once_for_each_module(self):
        """Each module is initialized once. An outer instance skips modules of a nested one."""
        called: collections.Counter[nn.Module] = collections.Counter()

        def init(module: nn.Module) -> None:
            called[module] += 1
            _init_with_reset_params(module)

        def times_by_name(model: nn.Module) -> dict[str, int]:
            names = {module: internals.clean_name(f"{name}.") for name, module in model.named_modules()}
            return {names[module].strip("."): times for module, times in called.items()}

        leaves = ["lin1", "lin2", "l3.lin1", "l3.lin2", "l3.buf_mod"]
        with enable_wrap(wrapper_cls=FSDP, param_init_fn=init):
            model = wrap(NestedModel(META))
        self.assertEqual(times_by_name(model), dict.fromkeys([*leaves, "", "l3"], 1))

        called.clear()
        model = FSDP(NestedModel(META), auto_wrap_policy=always_wrap_policy, param_init_fn=init)
        # Nothing is left on the meta device when the modules around the leaves are wrapped.
        self.assertEqual(times_by_name(model), dict.fromkeys(leaves, 1))

    @skip_if_lt_x_gpu(2)
    def test_shared_module_is_initialized_once(self):
        """A module with two names is initialized once, so that both names have the same values."""
        calls: list[nn.Module] = []

        class Counted(nn.Linear):
            def reset_parameters(self) -> None:
                calls.append(self)
                nn.init.constant_(self.weight, float(len(calls)))

        shared = Counted(3, 2, bias=False, device=META)
        calls.clear()  # ``nn.Linear`` has called it
        model = FSDP(nn.ModuleList([nn.ModuleList([shared]), nn.ModuleList([shared])]), device_id=self.device)
        self.assertEqual(calls, [shared])
        self.assertEqual(full_parameters(model), {"0.0.weight": torch.ones(2, 3, device=self.device)})

    @skip_if_lt_x_gpu(2)
    def test_nested_fsdp_keeps_its_values(self):
        """Initializing a module around an FSDP instance does not change the instance's parameters."""

        class Around(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner, self.weight = inner, nn.Parameter(torch.empty(3, device=META))

            def reset_parameters(self) -> None:
                nn.init.ones_(self.weight)

        inner = FSDP(nn.Linear(5, 5).to(self.device))
        before = internals.flat_param_of(inner).detach().clone()
        model = FSDP(Around(inner))
        self.assertEqual(internals.flat_param_of(inner).detach(), before, rtol=0, atol=0)
        with FSDP.summon_full_params(model, recurse=False):
            self.assertEqual(model.module.weight.detach(), torch.ones(3, device=self.device))

    @skip_if_lt_x_gpu(2)
    def test_module_without_reset_parameters(self):
        """FSDP warns and raises for a module on the meta device with parameters but without ``reset_parameters``."""
        with META:
            model = nn.Sequential(nn.Linear(5, 5), OwnWeight())
        with self.assertWarnsRegex(UserWarning, r"(?s)^Unable to call `reset_parameters\(\)`.*OwnWeight"):
            with self.assertRaisesRegex(AttributeError, "reset_parameters"):
                FSDP(model)

    @skip_if_lt_x_gpu(2)
    @subtests(use_orig_params=[False, True], in_own_unit=[False, True])
    def test_module_beside_one_on_meta(self, use_orig_params, in_own_unit):
        """A module that has values keeps them, although a module beside it is on the meta device."""
        loaded = nn.Linear(3, 2, bias=False)
        nn.init.constant_(loaded.weight, 5.0)
        kwargs = {"use_orig_params": use_orig_params, "device_id": self.device}
        first = FSDP(loaded, **kwargs) if in_own_unit else loaded
        model = FSDP(nn.Sequential(first, MyLinear(2, 3, device=META)), **kwargs)
        actual = list(full_parameters(model).values())[0]
        with torch_defect("fsdp1_materialization_loses_values", when=not in_own_unit):
            self.assertEqual(actual, torch.full((2, 3), 5.0, device=self.device))


instantiate_parametrized_tests(TestFSDPWithMetaDevice)

if __name__ == "__main__":
    run_tests()
