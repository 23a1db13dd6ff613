"""FSDP1 trains like data parallelism in many configurations; also tests of its hooks and parameter views."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DummyDDP,
    FSDPInitMode,
    FSDPTestModel,
    MixtureOfExperts,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    TransformerWithSharedParams,
    get_devtype,
    subtest_name,
)
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import one_by_one, pairwise_cases, subtests
from torch_fsdp_tests.fsdp.fsdp1_cases import FewRanksTest, device_init_modes
from torch_fsdp_tests.fsdp.references import average_gradients, full_parameters, named
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.training import loss_of, take_step
from torch_fsdp_tests.installed_torch import torch_names

params = "cpu_offload,sharding_strategy"
cpu_offload_config = [CPUOffload(offload_params=True), CPUOffload(offload_params=False)]
sharding_strategy_config = [None, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
configs = list(itertools.product(cpu_offload_config, sharding_strategy_config))
test_name_mapping = {
    str(CPUOffload(offload_params=True)): "offload_true",
    str(CPUOffload(offload_params=False)): "offload_false",
    str(ShardingStrategy.SHARD_GRAD_OP): "shard_grad_op",
    str(ShardingStrategy.NO_SHARD): "no_shard",
}
subtest_name = functools.partial(subtest_name, test_name_mapping)

PREFETCHES = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]
OPTIONS = {
    "sharding_strategy": sharding_strategy_config,
    "cpu_offload": cpu_offload_config,
    "backward_prefetch": PREFETCHES,
    "forward_prefetch": [False, True],
    "use_orig_params": [False, True],
}
DELAY_MS = 250
HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)


class _TwoRanks(FewRanksTest):
    def _transformer(
        self,
        device_init_mode: DEVICEInitMode = DEVICEInitMode.DEVICE_BEFORE,
        deterministic: bool = False,
        **fsdp_kwargs: Any,
    ) -> FSDP:
        return TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.RECURSIVE, device_init_mode, fsdp_kwargs, deterministic=deterministic
        )

    def _plain_transformer(self) -> TransformerWithSharedParams:
        """The model that ``_transformer(deterministic=True)`` shards."""
        return TransformerWithSharedParams.init(
            self.process_group, FSDPInitMode.NO_FSDP, DEVICEInitMode.DEVICE_BEFORE, deterministic=True
        )


class TestParityWithDDP(_TwoRanks):
    """After a few steps, parameters and loss match DDP, or a model that averages its gradients by hand."""

    def _check_parity(
        self,
        model_class: type[FSDPTestModel],
        cpu_offload: CPUOffload,
        sharding_strategy: ShardingStrategy | None,
        every: bool = False,
        **kwargs: Any,
    ) -> None:
        """Train with all prefetches, with and without ``use_orig_params``: every pair, or every combination."""
        here = {"cpu_offload": cpu_offload, "sharding_strategy": sharding_strategy}
        configs: Iterable[dict[str, Any]] = [{**OPTIONS, **{name: [value] for name, value in here.items()}}]
        if not every:
            configs = one_by_one([case for case in pairwise_cases(OPTIONS) if {**case, **here} == case])
        for config in configs:
            self.run_subtests(
                {**config, "device_init_mode": device_init_modes(cpu_offload)},
                self._test_fsdp_parity,
                model_class,
                FSDPInitMode.RECURSIVE,
                **kwargs,
            )

    def _test_fsdp_parity(self, model_class: type[FSDPTestModel], *args: Any, **kwargs: Any) -> None:
        """Expect that streams show a race now and then, if a flat parameter without shards is offloaded."""
        strategy = kwargs["sharding_strategy"]
        is_alone = model_class is MixtureOfExperts and strategy is ShardingStrategy.SHARD_GRAD_OP  # an expert
        offloads = kwargs["cpu_offload"].offload_params and kwargs["use_orig_params"]
        without_shards = is_alone or strategy is ShardingStrategy.NO_SHARD
        may_show = without_shards and offloads and accelerator.current().has("streams")
        with torch_defect("fsdp1_unsharded_copy_is_freed_while_read", when=may_show, sometimes=True):
            super()._test_fsdp_parity(model_class, *args, **kwargs)

    def _train_for_several_steps(self, model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Also check that no parameter stays unsharded, and that the shards hold each element once, plus padding."""
        loss = super()._train_for_several_steps(model, *args, **kwargs)
        if not isinstance(model, FSDP):
            self._numel = sum(param.numel() for param in model.parameters())  # of the reference, which trains first
            return loss
        numel = 0
        for handle in internals.handles(model):
            flat_param = handle.flat_param
            numel += internals.numel_of(flat_param)
            unsharded = sum(flat_param._numels_with_padding)
            if handle.uses_sharded_strategy:
                self.assertFalse(internals.is_unsharded(flat_param))
                self.assertEqual(flat_param.numel(), math.ceil(unsharded / handle.process_group.size()))
                self.assertLess(flat_param.numel() * handle.process_group.size() - unsharded, self.world_size)
            else:
                self.assertEqual(flat_param.numel(), unsharded)
        self.assertEqual(numel, self._numel)
        return loss

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_nested_wrapped_model(self, **config):
        """Some layers are in FSDP, the root has the others. Every combination of options is tested."""
        self._check_parity(NestedWrappedModule, **config, every=True)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_nested_wrapped_model_single_iteration_mixed_precision(self, **config):
        """Parameters, gradients and buffers in fp16, as under autocast."""
        self._check_parity(NestedWrappedModule, **config, num_iters=1, mixed_precision=HALF)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_nested_always_wrap_model(self, **config):
        """Every module is in FSDP, even those without own parameters."""
        self._check_parity(AlwaysWrapNestedWrappedModule, **config)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_transformer(self, **config):
        """A model with a weight that two modules share, and with buffers."""
        self._check_parity(TransformerWithSharedParams, **config)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_delayed_optim_step(self, **config):
        """The next forward gathers the optimizer's new values, even if the device delays the step.

        A device that cannot sleep has no delay. There this is the same model in a wrapper that is not FSDP.
        """
        self._check_parity(NestedWrappedModuleWithDelay, **config, init_kwargs={"delay_after_loss_ms": DELAY_MS})

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_delayed_reduce_scatter(self, **config):
        """Backward ends only after the reduction, even if the device delays it (where the device can sleep)."""
        self._check_parity(NestedWrappedModuleWithDelay, **config, init_kwargs={"delay_before_reduction_ms": DELAY_MS})

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_mixture_of_experts(self, **config):
        """Each rank has its own expert, in a group of one rank."""
        self._check_experts_parity(**config)

    @skip_if_lt_x_gpu(2)
    @parametrize(params, configs, subtest_name)
    def test_mixture_of_experts_with_delay_before_free(self, **config):
        """Parameters that forward frees late are gathered again. A device that cannot sleep has no delay."""
        self._check_experts_parity(**config, init_kwargs={"delay_before_free_ms": DELAY_MS})

    def _check_experts_parity(self, **kwargs: Any) -> None:
        self._check_parity(MixtureOfExperts, ref_init_fn=DummyDDP, device_id=self.device, **kwargs)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=sharding_strategy_config, use_orig_params=[False, True])
    def test_every_step(self, sharding_strategy, use_orig_params):
        """Tokens differ by rank, and each rank compares gradients and parameters after each step."""
        reference = self._plain_transformer()
        model = self._transformer(
            deterministic=True, sharding_strategy=sharding_strategy, use_orig_params=use_orig_params
        )
        models = [reference, model]
        optims = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in models]
        torch.manual_seed(10 + self.rank)
        ref_losses = []
        for _ in range(3):
            tokens = tuple(torch.randint(23, (length, 2), device=get_devtype()) for length in (6, 4))
            losses = []
            for each, optim in zip(models, optims):
                optim.zero_grad()
                losses.append(reference.get_loss(tokens, each(*tokens)))
                losses[-1].backward()
            average_gradients(reference)
            for optim in optims:
                optim.step()
            ref_losses.append(losses[0])
            self.assertEqual(losses[1], losses[0])
            expected = dict(reference.named_parameters())
            with FSDP.summon_full_params(model, with_grads=use_orig_params):
                actual = named(model)
                self.assertEqual(list(actual), list(expected))
                # With the float32 tolerance, because more than two ranks may add in another order than the reference.
                self.assertEqual(actual, expected)
                if use_orig_params:
                    grads, expected_grads = ({name: p.grad for name, p in each.items()} for each in (actual, expected))
                    self.assertEqual(grads, expected_grads)
        check_losses(ref_losses)


class TestParamInit(_TwoRanks):
    @skip_if_lt_x_gpu(2)
    @parametrize("mixed_precision", [True, False])
    def test_param_change_after_init(self, mixed_precision):
        """The first forward uses values that are written to a parameter after the constructor.

        The values differ by element and by rank. The second half compares with a model that was never in FSDP, so a
        shard in the wrong place would be detected.
        """
        init = functools.partial(
            self._transformer,
            DEVICEInitMode.DEVICE_AFTER,
            deterministic=True,
            mixed_precision=MixedPrecision() if mixed_precision else None,
        )
        unchanged, model = init(), init()
        tokens = unchanged.module.get_input(get_devtype())
        local = next(model.parameters())
        self.assertIs(local, internals.flat_param_of(model))
        values = torch.arange(self.world_size * local.numel(), device=local.device).sin()
        with torch.no_grad():
            local.copy_(values.chunk(self.world_size)[self.rank])
        output = model(*tokens)
        self.assertNotEqual(output, unchanged(*tokens))

        reference = self._plain_transformer()
        apart = (".layers.", "bn.") if mixed_precision else (".layers.",)  # outside the root's flat parameter
        held = [p for name, p in reference.named_parameters() if not any(part in name for part in apart)]
        offset = 0
        with torch.no_grad():
            for param in held:
                param.copy_(values[offset : offset + param.numel()].view_as(param))
                offset += param.numel()
        self.assertLess(len(values) - offset, self.world_size)
        self.assertEqual(output, reference(*tokens))


class TestHooks(_TwoRanks):
    @skip_if_lt_x_gpu(2)
    @parametrize("cuda_first", [False, True])
    def test_pre_backward_hook_registration(self, cuda_first):
        """The root's output has one hook before and after backward."""
        self._test_pre_backward_hook_registration(self._transformer(self._init_mode(cuda_first)))

    @skip_if_lt_x_gpu(2)
    def test_pre_backward_hook_registration_after_state_dict(self):
        """Saving and loading a state dict neither removes the hook nor adds one."""
        model = self._transformer(DEVICEInitMode.DEVICE_AFTER)
        self._train_for_several_steps(model, num_steps=2, autocast=False)
        model.load_state_dict(model.state_dict())
        self._test_pre_backward_hook_registration(model)

    def _init_mode(self, cuda_first: bool) -> DEVICEInitMode:
        return DEVICEInitMode.DEVICE_BEFORE if cuda_first else DEVICEInitMode.DEVICE_AFTER

    def _test_pre_backward_hook_registration(self, model: FSDP) -> None:
        optim = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        inputs = model.module.get_input(get_devtype())
        output = model(*inputs)
        self.assertEqual(len(output._backward_hooks), 1)
        loss = model.module.get_loss(inputs, output)
        loss.backward()
        self.assertEqual(len(output._backward_hooks), 1)
        optim.step()
        self.assertEqual(len(output._backward_hooks), 1)
        # Gradients show that the hook ran: it registers the callback that sets them.
        self.assertTrue(all(each.grad is not None for each in internals.flat_params(model)))

    @skip_if_lt_x_gpu(2)
    @parametrize("cuda_first", [False, True])
    @parametrize("mixed_precision", [True, False])
    def test_register_functions_called(self, cuda_first, mixed_precision):
        """Each forward registers the pre-backward and post-backward hooks of each instance once."""
        model = self._transformer(
            self._init_mode(cuda_first), mixed_precision=MixedPrecision() if mixed_precision else None
        )
        # The root and two layers each of encoder and decoder. With mixed precision, the batch norm is another instance.
        handles = internals.handles(model)
        self.assertEqual(len(handles), 6 if mixed_precision else 5)
        inputs = model.module.get_input(get_devtype())
        calls = []
        runtime = internals.fsdp1_runtime
        register = runtime._register_pre_backward_hooks

        def register_with_count(state: Any, module: nn.Module, outputs: Any, handle: internals.Handle) -> Any:
            calls.append(handle)
            return register(state, module, outputs, handle)

        with (
            torch_names.patched(runtime, "_register_pre_backward_hooks", register_with_count),
            torch_names.patched(runtime, "_register_post_backward_hook") as register_post_backward,
        ):
            self.assertEqual(len(calls), 0)
            register_post_backward.assert_not_called()
            for forwards in (1, 2):
                model(*inputs)
                self.assertEqual([calls.count(handle) for handle in handles], [forwards] * len(handles))
                after = [call.args[1] for call in register_post_backward.call_args_list]
                self.assertEqual([after.count(handle) for handle in handles], [forwards] * len(handles))
        self.assertEqual(len(calls), 2 * len(handles))

    @skip_if_lt_x_gpu(2)
    def test_no_hooks_without_grad(self):
        """A forward under ``no_grad`` registers no hooks, and the next one with gradients does."""
        model = self._transformer()
        inputs = model.module.get_input(get_devtype())
        with torch.no_grad():
            output = model(*inputs)
        self.assertIsNone(output._backward_hooks)
        self.assertEqual(self._has_post_backward_hooks(model), [False] * 5)
        output = model(*inputs)
        self.assertEqual(len(output._backward_hooks), 1)
        self.assertEqual(self._has_post_backward_hooks(model), [True] * 5)

    def _has_post_backward_hooks(self, model: FSDP) -> list[bool]:
        return [hasattr(flat_param, "_post_backward_hook_state") for flat_param in internals.flat_params(model)]


class TestNoGrad(_TwoRanks):
    @skip_if_lt_x_gpu(2)
    @parametrize("mixed_precision", [True, False])
    def test_transformer_no_grad(self, mixed_precision):
        """After a training step, forward in eval mode gives the same output with and without gradients."""
        model = self._transformer(DEVICEInitMode.DEVICE_AFTER, mixed_precision=HALF if mixed_precision else None)
        self._train_for_several_steps(model, num_steps=1, autocast=False, mixed_precision=model.mixed_precision)
        model.eval()
        inputs = model.module.get_input(get_devtype())
        expected = model(*inputs)
        with torch.no_grad():
            output = model(*inputs)
        self.assertEqual((expected.requires_grad, output.requires_grad), (True, False))
        self.assertEqual(output.dtype, torch.float16 if mixed_precision else torch.float32)
        self.assertEqual(output, expected.detach())

    @skip_if_lt_x_gpu(2)
    @subtests(
        strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
        use_orig_params=[False, True],
        dtype=[None, torch.bfloat16],
    )
    def test_evaluation_in_inference_mode(self, strategy, use_orig_params, dtype):
        """Forwards in inference mode between steps have the right outputs, and training continues.

        The first forward is under ``no_grad``, the workaround for fsdp1_inference_mode_breaks_training.
        """
        torch.manual_seed(0)
        ref_model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).to(get_devtype())
        model = FSDP(
            copy.deepcopy(ref_model),
            auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(param_dtype=dtype),
        )
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ref_model, model)]
        tolerance: dict[str, Any] = {} if dtype is None else {"rtol": 0.05, "atol": 0.02}
        losses = []
        for step in range(3):
            inp = uniform(2, 3, seed=10 * step + self.rank)
            with torch.inference_mode() if step > 0 else torch.no_grad():
                self.assertEqual(model(inp).float(), ref_model(inp), **tolerance)
            for each, optim in zip((ref_model, model), optims):
                optim.zero_grad()
                loss = loss_of(each(inp))
                loss.backward()
                losses += [loss.detach()] if each is ref_model else []
            average_gradients(ref_model)
            for optim in optims:
                optim.step()
        check_losses(losses)
        expected = {name: param.detach() for name, param in ref_model.named_parameters()}
        self.assertEqual(full_parameters(model), expected, **tolerance)

    @skip_if_lt_x_gpu(2)
    @subtests(
        strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
        use_orig_params=[False, True],
        dtype=[None, torch.bfloat16],
    )
    def test_first_evaluation_in_inference_mode(self, strategy, use_orig_params, dtype):
        """A model that was first used in inference mode can be trained."""
        ref_model = filled(nn.Linear(3, 5)).to(get_devtype())
        model = FSDP(
            copy.deepcopy(ref_model),
            sharding_strategy=strategy,
            use_orig_params=use_orig_params,
            mixed_precision=MixedPrecision(param_dtype=dtype),
        )
        tolerance: dict[str, Any] = {} if dtype is None else {"rtol": 0.05, "atol": 0.02}
        inp = uniform(2, 3, seed=self.rank)
        with torch.inference_mode():
            self.assertEqual(model(inp).float(), ref_model(inp), **tolerance)
        keeps_tensors = strategy is not ShardingStrategy.NO_SHARD or dtype is not None
        with torch_defect("fsdp1_inference_mode_breaks_training", when=keeps_tensors):
            for each in (ref_model, model):
                loss_of(each(inp)).backward()
            average_gradients(ref_model)
            optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (ref_model, model)]
            take_step(optims)
            expected = {name: param.detach() for name, param in ref_model.named_parameters()}
            self.assertEqual(full_parameters(model), expected, **tolerance)

    @skip_if_lt_x_gpu(2)
    @subtests(
        strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD],
        outputs=[1, 4],
    )
    def test_unfreezing_after_inference_mode(self, strategy, outputs):
        """A parameter without elements on a rank gets a new tensor when FSDP1 reshards. In inference mode this is an
        inference tensor, which cannot be unfrozen.
        """
        wrap = functools.partial(FSDP, sharding_strategy=strategy, use_orig_params=True)
        model = wrap(nn.Sequential(wrap(nn.Linear(3, outputs)), nn.Linear(outputs, outputs)).to(get_devtype()))
        inp = uniform(2, 3, seed=self.rank)
        loss_of(model(inp)).backward()
        with torch.inference_mode():
            model(inp)
        params = list(model.parameters())
        self.assertEqual([param.is_inference() for param in params], [param.numel() == 0 for param in params])
        for param in params:
            param.requires_grad_(False)
            if param.numel():
                param.requires_grad_(True)


class TestAutograd(_TwoRanks):
    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
        use_orig_params=[False, True],
        backward_prefetch=PREFETCHES,
        forward_prefetch=[False, True],
    )
    def test_unshard_params_as_tensors(self, **fsdp_kwargs):
        """In forward and backward, unsharded parameters are tensors: views of the flat parameter with autograd history.

        NO_SHARD is not tested, because there the same function also creates the views of the parameters in use.
        """
        torch.manual_seed(0)
        reference = nn.Sequential(*(nn.Linear(3, 3, device=get_devtype()) for _ in range(5)))
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(3, 3, device=get_devtype()) for _ in range(5)))
        model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), **fsdp_kwargs)
        self.assertEqual(len(FSDP.fsdp_modules(model)), 6)
        torch.manual_seed(1 + self.rank)
        x = torch.randn(2, 3, device=get_devtype())
        with self._patch_use_unsharded_views() as views:
            for _ in range(3):
                views.clear()
                mine, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
                model(mine).sum().backward()
                reference(theirs).sum().backward()
                self.assertEqual(mine.grad, theirs.grad)
                self.assertGreaterEqual(len(views), 5)  # at least once per layer in forward

    @contextlib.contextmanager
    def _patch_use_unsharded_views(self) -> Iterator[list[bool]]:
        """Fail if parameters are requested in place of tensors. Yield the requests."""
        asked: list[bool] = []
        handle_class = internals.flat_param.FlatParamHandle
        use_unsharded_views = handle_class._use_unsharded_views

        def use_views_of_tensors(handle: internals.Handle, as_params: bool) -> Any:
            self.assertFalse(as_params)
            asked.append(as_params)
            return use_unsharded_views(handle, as_params)

        with torch_names.patched(handle_class, "_use_unsharded_views", use_views_of_tensors):
            yield asked


instantiate_device_type_tests(TestParityWithDDP, globals(), allow_xpu=True)
instantiate_device_type_tests(TestParamInit, globals(), allow_xpu=True)
instantiate_device_type_tests(TestHooks, globals(), allow_xpu=True)
instantiate_device_type_tests(TestNoGrad, globals(), allow_xpu=True)
instantiate_device_type_tests(TestAutograd, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
