"""The models, patches and comparisons of FSDP tests: they work as documented, and each check can fail."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
import itertools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as param_group
from samples import under_test
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle

from torch_fsdp_tests import common_fsdp
from torch_fsdp_tests.common_fsdp import (
    MLP,
    AlwaysWrapNestedWrappedModule,
    DEVICEInitMode,
    DummyDDP,
    FSDPInitMode,
    FSDPTest,
    FSDPTestModel,
    FSDPTestMultiThread,
    FullyShardMode,
    MixtureOfExperts,
    ModuleWithDelay,
    NestedWrappedModule,
    NestedWrappedModuleWithDelay,
    NonUniformReqGradNWM,
    TransformerWithSharedParams,
    compiled,
    compiled_fsdp_test,
    delays,
    get_full_params,
    reduce_scatter_with_assert,
    states,
    substitutes,
)
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_facts

RECURSIVE, NO_FSDP = FSDPInitMode.RECURSIVE, FSDPInitMode.NO_FSDP
BEFORE, AFTER, NEVER = DEVICEInitMode.DEVICE_BEFORE, DEVICEInitMode.DEVICE_AFTER, DEVICEInitMode.DEVICE_NEVER
HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16, buffer_dtype=torch.float16)
STRATEGIES = (ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD)

# Each model, with the number of FSDP instances that RECURSIVE creates for it.
MODELS: dict[type[FSDPTestModel], int] = {
    TransformerWithSharedParams: 5,
    NestedWrappedModule: 3,
    AlwaysWrapNestedWrappedModule: 8,
    NonUniformReqGradNWM: 3,
    NestedWrappedModuleWithDelay: 3,
    MixtureOfExperts: 2,
}


class TwoRanks(FSDPTest):
    world_size = 2

    def build(
        self,
        model_class: type[FSDPTestModel],
        fsdp_mode: FSDPInitMode = NO_FSDP,
        device_mode: DEVICEInitMode = BEFORE,
        fsdp_kwargs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> nn.Module:
        return model_class.init(self.process_group, fsdp_mode, device_mode, fsdp_kwargs, deterministic=True, **kwargs)


class TestModels(TwoRanks):
    """Without it, a test could compare two models that differ from the start, or that FSDP does not wrap."""

    def test_every_model_in_every_mode(self):
        modes = {"fsdp_mode": [NO_FSDP, RECURSIVE], "device_mode": list(DEVICEInitMode)}
        self.run_subtests({"model_class": list(MODELS), **modes}, self._test_mode)

    def _test_mode(
        self, model_class: type[FSDPTestModel], fsdp_mode: FSDPInitMode, device_mode: DEVICEInitMode
    ) -> None:
        # Freezing parameters by name needs ``use_orig_params=True``.
        kwargs = {"use_orig_params": model_class is NonUniformReqGradNWM}
        model, again = (self.build(model_class, fsdp_mode, device_mode, kwargs) for _ in range(2))
        instances = FSDP.fsdp_modules(model)
        self.assertEqual(len(instances), MODELS[model_class] if fsdp_mode is RECURSIVE else 0)
        self.assertEqual(kwargs, {"use_orig_params": model_class is NonUniformReqGradNWM})
        for param, same in zip(model.parameters(), again.parameters(), strict=True):
            self.assertEqual(param, same, rtol=0, atol=0)
            if device_mode is BEFORE or (device_mode is AFTER and fsdp_mode is RECURSIVE):
                self.assertEqual(param.device, self.device)
        trainable = [name for name, param in model.named_parameters() if param.requires_grad]
        if model_class is NonUniformReqGradNWM:
            self.assertEqual([name.rsplit(".", 2)[-2:] for name in trainable], [["1", "weight"], ["1", "bias"]])

    def test_shared_weights_and_experts_of_each_rank(self):
        transformer = self.build(TransformerWithSharedParams)
        self.assertIs(transformer.output_proj.weight, transformer.embed_tokens.weight)
        experts = self.build(MixtureOfExperts)
        for layer, is_shared in ((experts.module[1], True), (experts.module[2], False)):
            of_all = [torch.empty_like(layer.weight) for _ in range(2)]
            dist.all_gather(of_all, layer.weight.detach())
            (self.assertEqual if is_shared else self.assertNotEqual)(*of_all)

    def test_ranks_have_their_own_inputs_in_each_run(self):
        model = self.build(NestedWrappedModule)
        (x,) = model.get_input(self.device)
        self.assertEqual(x, model.get_input(self.device)[0])
        of_all = [torch.empty_like(x) for _ in range(2)]
        dist.all_gather(of_all, x)
        self.assertNotEqual(*of_all)

    def test_expert_group_is_the_rank_alone(self):
        model = self.build(MixtureOfExperts, RECURSIVE)
        self.assertEqual([layer.process_group.size() for layer in model.module[1:3]], [2, 1])

    def test_delays(self):
        model = self.build(NestedWrappedModuleWithDelay, RECURSIVE, delay_after_loss_ms=3, delay_before_reduction_ms=5)
        self.assertIsInstance(model, ModuleWithDelay)
        sharded = FSDP(model)
        inputs = model.get_input(self.device)
        original = getattr(dist, torch_facts.reduce_scatter_name())
        nested = "torch_fsdp_tests.common_fsdp.nested.delay_device"
        with mock.patch.object(delays, "delay_device") as late, mock.patch(nested, late):
            model.run_backward(model.get_loss(inputs, sharded(*inputs)))
        # The loss, and the reduce-scatter of the root and each of the three instances inside.
        self.assertEqual([call.args[0] for call in late.call_args_list], [3, 5, 5, 5, 5])
        self.assertIs(getattr(dist, torch_facts.reduce_scatter_name()), original)
        experts = FSDP(self.build(MixtureOfExperts, RECURSIVE, delay_before_free_ms=7))
        with mock.patch.object(delays, "delay_device") as late:
            experts(*inputs)
        # The expert is not sharded. Its instance and the root, which keeps its parameters, reshard.
        self.assertEqual({call.args[0] for call in late.call_args_list}, {7})

    def test_delay_uses_the_device(self):
        able = dataclasses.replace(accelerator.current(), capabilities=frozenset({"streams", "sleep_kernel"}))
        unable = dataclasses.replace(able, capabilities=frozenset({"streams"}))
        for device, calls in ((able, 1), (unable, 0)):
            rate = mock.patch.object(delays, "get_cycles_per_ms", lambda kind: 10)
            with under_test(device), rate, mock.patch.object(delays, "device_sleep") as sleep:
                delays.delay_device(2)
                delays.delay_device(0)
            self.assertEqual([call.args for call in sleep.call_args_list], [(device.type, 20)] * calls)


def not_averaged(output: torch.Tensor, input: torch.Tensor, *args: Any, **kwargs: Any) -> None:
    """A reduce-scatter that returns this rank's own values, and ignores those of the other ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    output.copy_(input.chunk(world_size)[rank] * world_size)


class TestTraining(TwoRanks):
    """Without it, the comparison of FSDP with its reference could pass whatever FSDP does."""

    def parity(self, model_class: type[FSDPTestModel] = NestedWrappedModule, **kwargs: Any) -> None:
        self._test_fsdp_parity(model_class, RECURSIVE, BEFORE, **kwargs)

    def test_parity_sees_gradients_that_are_not_averaged(self):
        nested, transformer = NestedWrappedModule, TransformerWithSharedParams
        for model_class, kwargs in (
            (nested, {}),
            (transformer, {}),  # its inputs are the same on both ranks, its gradients are not
            (nested, {"use_pure_fp16": True}),
            (nested, {"mixed_precision": HALF}),
        ):
            # One step: the loss depends on the initial parameters, so only the comparison of parameters can fail.
            local = mock.patch.object(dist, torch_facts.reduce_scatter_name(), not_averaged)
            with local, self.assertRaisesRegex(AssertionError, "FSDP and its reference differ after training"):
                self.parity(model_class, num_iters=1, **kwargs)

    def test_parity_sees_a_step_that_is_lost(self):
        # Only on the second rank: its parameters do not move.
        if self.rank == 1:
            quiet = mock.patch.object(torch.optim.SGD, "step", lambda self: None)
            quiet.start()
            self.addCleanup(quiet.stop)
        with self.assertRaisesRegex(AssertionError, "FSDP and its reference differ"):
            self._assert_moves()

    def _assert_moves(self) -> None:
        model = FSDP(self.build(NestedWrappedModule))
        reference = nn.parallel.DistributedDataParallel(self.build(NestedWrappedModule))
        for each in (reference, model):
            self._train_for_several_steps(each, 1, autocast=False)
        with torch.no_grad():
            for param in reference.parameters():  # the result of rank 0's steps
                dist.broadcast(param, 0)
        self._assert_same_parameters(model, reference, None)

    def test_state_dict_that_loads_nothing_is_seen(self):
        loads_nothing = mock.patch.object(FSDP, "load_state_dict", lambda *args, **kwargs: None)
        with loads_nothing, self.assertRaises(AssertionError):
            self.parity(save_model=True)

    def test_misuse_is_refused(self):
        with self.assertRaisesRegex(ValueError, "init mode that wraps"):
            self._test_fsdp_parity(NestedWrappedModule, NO_FSDP, BEFORE)
        with self.assertRaisesRegex(ValueError, "0 steps"):
            self._train_for_several_steps(DummyDDP(self.build(NestedWrappedModule)), 0, autocast=False)
        with self.assertRaisesRegex(ValueError, "cannot be built with FSDP"):
            self.parity(no_such_argument=True)

    def test_checks_of_options(self):
        right = (CPUOffload(offload_params=True), BackwardPrefetch.BACKWARD_PRE, True)
        options = dict(zip(("cpu_offload", "backward_prefetch", "forward_prefetch"), right, strict=True))
        model = FSDP(self.build(NestedWrappedModule, device_mode=NEVER), **options)
        wrong = (CPUOffload(offload_params=False), BackwardPrefetch.BACKWARD_POST, False)
        checks = (self._check_cpu_offload, self._check_backward_prefetch, self._check_forward_prefetch)
        for check, good, bad in zip(checks, right, wrong, strict=True):
            check(model, good)
            with self.assertRaises(AssertionError):
                check(model, bad)


def patches() -> dict[Callable, tuple[Any, str]]:
    """Each patch, with the owner and the name that it replaces."""
    group = param_group.FSDPParamGroup
    return {
        common_fsdp.patch_all_gather: (dist, torch_facts.all_gather_name()),
        common_fsdp.patch_reduce_scatter: (dist, torch_facts.reduce_scatter_name()),
        common_fsdp.patch_all_reduce: (dist, "all_reduce"),
        common_fsdp.patch_foreach_all_gather: (param_group, "foreach_all_gather"),
        common_fsdp.patch_foreach_reduce: (param_group, "foreach_reduce"),
        common_fsdp.patch_unshard: (group, "unshard"),
        common_fsdp.patch_reshard: (group, "reshard"),
        common_fsdp.patch_post_backward: (group, "post_backward"),
        common_fsdp.patch_register_post_backward_hook_backward: (param_group.RegisterPostBackwardFunction, "backward"),
    }


if TYPE_CHECKING:
    from torch_fsdp_tests.common_distributed.case import RankTestCase as Case
else:
    Case = object


class PatchTests(Case):
    """Tests for ranks that are processes, and for ranks that are threads, which share patched functions."""

    def step(self) -> None:
        """A step of three FSDP2 modules over a 2 by 1 mesh, so that gradients are reduced over both dimensions."""
        mesh = init_device_mesh(accelerator.current().type, (2, 2), mesh_dim_names=("replicate", "shard"))
        model = nn.Sequential(MLP(4), MLP(4)).to(accelerator.current().device(self.rank))
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
        # FSDP2 attaches its backward to inputs that need a gradient. Otherwise the first module's would run late.
        x = torch.ones(2, 4, device=accelerator.current().device(self.rank), requires_grad=True)
        model(x).sum().backward()

    def test_every_patch_counts_its_calls_and_goes(self):
        # Two modules have parameters. Both reshard after forward, and are unsharded again for backward.
        twice = "foreach_reduce", torch_facts.reduce_scatter_name(), "all_reduce", "post_backward", "backward"
        expected = dict.fromkeys(("foreach_all_gather", torch_facts.all_gather_name()), 4) | dict.fromkeys(twice, 2)
        for patch, (owner, name) in patches().items():
            stored = inspect.getattr_static(owner, name)
            original = getattr(owner, name)
            calls: list[int] = []

            def counting(*args, calls=calls, original=original, **kwargs):
                calls.append(dist.get_rank())
                return original(*args, **kwargs)

            with patch(counting):
                self.step()
            self.assertIs(inspect.getattr_static(owner, name), stored, msg=name)
            # Threads share the patch, so the call of one rank may be in the list of another. Together they are right.
            of_all: list[list[int]] = [[] for _ in range(4)]
            dist.all_gather_object(of_all, calls)
            by_rank = collections.Counter(itertools.chain(*of_all))
            self.assertEqual(sorted(by_rank), [0, 1, 2, 3], msg=name)
            self.assertEqual(set(by_rank.values()), {expected.get(name, by_rank[0])}, msg=name)
            before = len(calls)
            self.step()
            self.assertEqual(len(calls), before, msg=name)

    def test_every_patch_goes_with_an_exception(self):
        for patch, (owner, name) in patches().items():
            stored = inspect.getattr_static(owner, name)
            with self.assertRaisesRegex(RuntimeError, "on all ranks"):
                with patch(mock.Mock()):
                    dist.barrier()  # threads share the patch: no thread leaves before all others have entered
                    raise RuntimeError("on all ranks")
            dist.barrier()
            self.assertIs(inspect.getattr_static(owner, name), stored, msg=name)


class TestPatches(PatchTests, FSDPTest):
    """Without it, a patch of FSDP could skip calls, outlive its test, or hang when only one rank fails."""

    world_size = 4

    def test_a_lone_exception_does_not_wait_for_the_others(self):
        start = time.monotonic()
        with self.assertRaisesRegex(RuntimeError, "here alone") if self.rank == 1 else mock.MagicMock():
            with common_fsdp.patch_all_reduce(mock.Mock()):
                if self.rank == 1:
                    raise RuntimeError("here alone")
                # The other ranks wait here for rank 1.
                dist.barrier()
        if self.rank == 1:
            self.assertLess(time.monotonic() - start, 5)
            for _ in range(2):  # the barriers where the other ranks wait: in the body, and at the end
                dist.barrier()

    def test_reduce_scatter_with_assert(self):
        seen: list[torch.Tensor] = []
        original = getattr(dist, torch_facts.reduce_scatter_name())
        wrapped = functools.partial(reduce_scatter_with_assert, self, original, seen.append)
        with common_fsdp.patch_reduce_scatter(wrapped):
            self.step()
        self.assertEqual([output.dtype for output in seen], [torch.float32] * 2)
        returned = mock.Mock(return_value="work")
        output = torch.ones(1)
        self.assertEqual(reduce_scatter_with_assert(self, returned, seen.append, output, 2, op=3), "work")
        returned.assert_called_once_with(output, 2, op=3)
        self.assertIs(seen[-1], output)
        with self.assertRaisesRegex(AssertionError, "without an output"):
            reduce_scatter_with_assert(self, returned, seen.append, input=output)


class TestPatchesInThreads(PatchTests, FSDPTestMultiThread):
    """Without it, ranks in threads could skip calls of a patched function, or keep it patched for later tests."""

    world_size = 4


class TestStates(TwoRanks):
    """Without it, tests of state dicts could compare a state with itself, or work on a state that is not reset."""

    def test_assert_module_states(self):
        model = nn.BatchNorm1d(2)
        pairs = []
        states._assert_module_states(model, self.process_group, lambda *pair: pairs.append(pair))
        self.assertEqual(len(pairs), 5)
        with torch.no_grad():
            model.running_mean += self.rank
        with self.assertRaises(AssertionError):
            states._assert_module_states(model, self.process_group, self.assertEqual)
        other = nn.Linear(1, 1) if self.rank else nn.Linear(1, 1, bias=False)
        with self.assertRaisesRegex(AssertionError, "rank 1 has"):
            states._assert_module_states(other, self.process_group, self.assertEqual)

    def test_zero_model(self):
        model = FSDP(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).to(self.device))
        states._zero_model(model)
        self.assertEqual(sum(param.abs().sum().item() for param in get_full_params(model)), 0)
        self.assertEqual(sum(buffer.abs().sum().item() for buffer in model.buffers()), 3)  # the running variance
        states._zero_model(model, zero_buffers=True, summon_full=False)
        self.assertEqual(sum(buffer.abs().sum().item() for buffer in model.buffers()), 0)


class TestSubstitutes(TwoRanks):
    """Without it, a patch that lets FSDP run on the CPU could hide a fault, or outlive its test."""

    def originals(self) -> dict[str, Any]:
        """The functions that are replaced, by name."""
        names = [(FSDP, "__init__"), (FlatParamHandle, "prepare_gradient_for_backward")]
        names += [(torch.Tensor, name) for name in ("pin_memory", "is_pinned")]
        return {name: inspect.getattr_static(owner, name) for owner, name in names}

    def test_install_and_uninstall(self):
        substitutes.uninstall()  # the patches of the test case
        self.addCleanup(substitutes.uninstall)
        before = self.originals()
        has_synchronize = hasattr(torch.cpu.Stream, "synchronize")
        bare = dataclasses.replace(accelerator.current(), capabilities=frozenset())
        substitutes.install(bare)
        during = self.originals()
        for name, original in before.items():
            self.assertIsNot(during[name], original, msg=name)
        self.assertIsNone(torch.cpu.Stream().synchronize())
        substitutes.install(bare)
        self.assertEqual(self.originals(), during)
        substitutes.uninstall()
        self.assertEqual(self.originals(), before)
        self.assertEqual(hasattr(torch.cpu.Stream, "synchronize"), has_synchronize)
        substitutes.uninstall()
        # A device that has everything needs no substitute.
        substitutes.install(dataclasses.replace(bare, capabilities=frozenset(accelerator.CAPABILITIES)))
        self.assertEqual(self.originals(), before)

    def test_pinned_memory_is_a_copy_that_is_recognized(self):
        plain = torch.arange(6.0).view(2, 3).t()
        pinned = plain.pin_memory()
        self.assertEqual((plain.is_pinned(), pinned.is_pinned(), pinned[1:].detach().is_pinned()), (False, True, True))
        self.assertEqual((pinned, pinned.stride()), (plain, plain.stride()))
        self.assertNotEqual(pinned.data_ptr(), plain.data_ptr())
        self.assertIs(pinned.pin_memory(), pinned)
        del pinned
        self.assertFalse(torch.empty_like(plain).is_pinned())

    def test_device_id_reaches_every_constructor(self):
        device = accelerator.current()
        if device.has("device_memory"):
            self.skipTest(f"{device.type} has a memory of its own and FSDP1 finds it without help")
        nested = self.build(AlwaysWrapNestedWrappedModule, RECURSIVE)
        for instance in FSDP.fsdp_modules(nested):
            self.assertEqual(instance.compute_device, device.device(self.rank))
        layer = nn.Linear(2, 2)
        # By position, by name, and as None.
        for arguments in ((layer,), (layer, *[None] * 9)):
            self.assertEqual(FSDP(*arguments).compute_device, self.device)
        self.assertEqual(FSDP(nn.Linear(2, 2), device_id=None).compute_device, self.device)
        self.assertEqual(list(inspect.signature(FSDP).parameters)[:2], ["module", "process_group"])
        substitutes.uninstall()
        self.addCleanup(substitutes.install, device)
        with mock.patch.object(torch._C, "_get_accelerator", lambda: self.device):
            with self.assertRaisesRegex(RuntimeError, "needs a non-CPU accelerator"):
                FSDP(nn.Linear(2, 2))

    def offloaded_gradients(self, no_sync: bool, **kwargs: Any) -> list[torch.Tensor]:
        """The unsharded gradients after two backwards. The first one may be without communication."""
        offload = CPUOffload(offload_params=True)
        model = FSDP(self.build(NestedWrappedModule, device_mode=NEVER), cpu_offload=offload, **kwargs)
        (x,) = model.module.get_input(self.device)
        with model.no_sync() if no_sync else contextlib.nullcontext():
            model(x).sum().backward()
        model(x).sum().backward()
        if not kwargs["use_orig_params"]:  # no context unshards gradients then; those of NO_SHARD are unsharded anyway
            return [param.grad.clone() for param in model.parameters()]
        with FSDP.summon_full_params(model, with_grads=True, writeback=False):
            return [param.grad.clone() for param in model.parameters()]

    def test_offloaded_gradients_add_up_under_no_sync_alone(self):
        # The substitute drops the offloaded gradient of an earlier step: FSDP documents that gradient accumulation
        # outside no_sync() does not work with CPU offloading. It keeps a gradient that was accumulated in no_sync().
        plain = self.build(NestedWrappedModule)
        plain(*plain.get_input(self.device)).sum().backward()
        once = [param.grad for param in plain.parameters()]
        for grad in once:
            dist.all_reduce(grad)
            grad /= 2
        for strategy in STRATEGIES:
            for no_sync, times in ((False, 1), (True, 2)):
                gradients = self.offloaded_gradients(no_sync, sharding_strategy=strategy, use_orig_params=True)
                self.assertEqual(gradients, [times * grad for grad in once], msg=f"{strategy}, no_sync={no_sync}")
        (flat,) = self.offloaded_gradients(False, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=False)
        self.assertEqual(flat, torch.cat([grad.flatten() for grad in once]))


# ``compiled_fsdp_test`` replaces this name in this module.
ORIGINAL = fully_shard


class TestCompiled(TwoRanks):
    """Without it, a test of compiled FSDP could run only in eager mode, or leave ``fully_shard`` replaced."""

    modes: list

    @compiled_fsdp_test(compile_compute_on_module=MLP)
    def body(self, fail_in: FullyShardMode | None = None) -> None:
        mode = FullyShardMode.EAGER if fully_shard is ORIGINAL else FullyShardMode.COMPILED_COMPUTE
        model = nn.Sequential(MLP(2)).to(self.device)
        with mock.patch.object(nn.Module, "compile", autospec=True) as compile:
            self.assertIs(fully_shard(model[0]), model[0])
            fully_shard(model)
        self.modes.append((mode, [type(call.args[0]).__mro__[2] for call in compile.call_args_list]))
        if mode is fail_in:
            raise ZeroDivisionError

    def test_both_modes_run_and_the_name_comes_back(self):
        for fail_in, ran in ((None, 2), (FullyShardMode.COMPILED_COMPUTE, 2), (FullyShardMode.EAGER, 1)):
            self.modes = []
            with mock.patch.object(compiled, "why_no_inductor", lambda: None):
                with self.assertRaises(ZeroDivisionError) if fail_in else mock.MagicMock():
                    self.body(fail_in=fail_in)
            expected = [(FullyShardMode.EAGER, []), (FullyShardMode.COMPILED_COMPUTE, [MLP])]
            self.assertEqual(self.modes, expected[:ran])
            self.assertIs(fully_shard, ORIGINAL)
            dist.barrier()

    def test_only_eager_mode_runs_without_a_compiler(self):
        self.modes = []
        with mock.patch.object(compiled, "why_no_inductor", lambda: "no compiler here"):
            with self.assertWarnsRegex(UserWarning, "only the eager mode ran: no compiler here"):
                self.body()
        self.assertEqual([mode for mode, _ in self.modes], [FullyShardMode.EAGER])


if __name__ == "__main__":
    run_tests()
