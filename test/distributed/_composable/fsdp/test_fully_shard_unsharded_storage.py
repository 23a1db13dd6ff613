"""``set_keep_unsharded_storage``: FSDP2 keeps the memory of unsharded parameters when it reshards.

Each unsharded parameter then keeps its address, as a captured graph requires. Every all-gather still writes the current
values there, so the models train like plain ones.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from torch_fsdp_tests.common_distributed import at_most, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, room_in
from torch_fsdp_tests.fsdp.training import Loop, TrainingMixin, check_parity, optimizers, shard_each, take_step, train
from torch_fsdp_tests.installed_torch import torch_facts

OFFLOAD_POLICIES = [OffloadPolicy(), CPUOffloadPolicy(pin_memory=False)]
Parameters = dict[str, nn.Parameter]


def layer(in_features: int, out_features: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(in_features, out_features), nn.Tanh())


def three_layers() -> nn.Sequential:
    """Three layers that do not shard evenly over four ranks. The last one is in the root's group."""
    manual_seed(42)
    return nn.Sequential(layer(4, 6), layer(6, 5), *layer(5, 3))


def shard(model: Any, **kwargs: Any) -> Any:
    return shard_each([model[0], model[1], model], **kwargs)


def fsdp_modules(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def unsharded(model: Any) -> Parameters:
    """Unshard all modules, reshard them, and return the unsharded parameters by name.

    FSDP reuses these objects, so they show later where their memory is and whether it is freed.
    """
    for module in fsdp_modules(model):
        module.unshard()
    found = dict(model.named_parameters())
    for module in fsdp_modules(model):
        module.reshard()
    return found


def addresses(params: Parameters) -> dict[str, int]:
    """The addresses of the parameters, or 0 if their memory is freed."""
    return {name: param.data_ptr() for name, param in params.items()}


def seen_in_layers(model: nn.Module) -> dict[str, list[int]]:
    """Record the addresses of parameters by name in each later forward and backward of the linear layers.

    Call this before FSDP is applied, so that FSDP's hooks run after these.
    """
    seen: dict[str, list[int]] = {}

    def watch(name: str, linear: nn.Linear) -> None:
        def note(*unused: Any) -> None:
            for inner, param in linear.named_parameters(prefix=name):
                assert not isinstance(param, DTensor), f"{inner} is sharded in forward or backward"
                seen.setdefault(inner, []).append(param.data_ptr())

        def note_now_and_in_backward(linear: nn.Module, args: Any, output: torch.Tensor) -> None:
            note()
            if output.requires_grad:
                output.register_hook(note)

        linear.register_forward_hook(note_now_and_in_backward)

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            watch(name, module)
    return seen


class ClonedOnArrival:
    """An extension for one local tensor. The unsharded parameter is a copy of the all-gather output."""

    def __init__(self, local: Any) -> None:
        self.local = local
        self.tensors: tuple[torch.Tensor, ...] = ()
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self.pre, self.post

    def pre(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> tuple[Any, Any]:
        return (self.local.detach(),), None

    @torch.no_grad()
    def post(self, gathered: tuple[torch.Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        if out is None:
            whole = gathered[0].clone()
            self.tensors = (*gathered, whole)
            return whole, (whole,)
        with internals.keeping_version(out):
            out.copy_(gathered[0])
        return None


@needs(torch_facts.CAN_KEEP_UNSHARDED_STORAGE)
class TestFullyShardUnshardedStorage(TrainingMixin, FSDPTest):
    world_size = at_most(4)

    def _plain(self) -> nn.Sequential:
        return three_layers().to(self.device)

    def _check_kept(self, params: Parameters, expected: dict[str, int]) -> None:
        """The parameters must have their old addresses, and must have memory."""
        self.assertNotIn(0, expected.values())
        self.assertEqual(addresses(params), expected)

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        shape=[(4,), (2, 2)],
        reshard_after_forward=[True, False, 2],
        offload_policy=OFFLOAD_POLICIES,
        param_dtype=[None, torch.float64],
    )
    def test_training(self, shape, reshard_after_forward, offload_policy, param_dtype):
        """A parameter has one address in each forward and backward, and the model trains like a plain one."""
        ref_model = self._plain()
        model: Any = copy.deepcopy(ref_model)
        seen = seen_in_layers(model)
        policies = {"offload_policy": offload_policy, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype)}
        shard(model, mesh=self._mesh(*shape), reshard_after_forward=reshard_after_forward, **policies)
        model.set_keep_unsharded_storage(True)
        params = unsharded(model)
        expected = addresses(params)

        def step(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss = train(module, batch)
            self._check_kept(params, expected)
            return loss

        self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(step=step))
        self.assertEqual({name: set(each) for name, each in seen.items()}, {n: {a} for n, a in expected.items()})
        self.assertEqual({len(each) for each in seen.values()}, {2 * 3})  # forward and backward of three iterations

    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        grad_mode=[torch.no_grad, torch.inference_mode],
        reshard_after_forward=[True, False],
        offload_policy=OFFLOAD_POLICIES,
        param_dtype=[torch.float32, torch.bfloat16],
    )
    def test_inference(self, grad_mode, reshard_after_forward, offload_policy, param_dtype):
        """The memory is also kept without gradients. Outputs follow the shards, which change between forwards."""
        ref_model = self._plain().to(param_dtype)
        policies = {"offload_policy": offload_policy, "mp_policy": MixedPrecisionPolicy(param_dtype=param_dtype)}
        model = shard(self._plain(), reshard_after_forward=reshard_after_forward, **policies)
        model.set_keep_unsharded_storage(True)
        params = unsharded(model)
        expected = addresses(params)
        inp = self._inputs(2, 4)
        for _ in range(3):
            with grad_mode():
                self.assertEqual(model(inp), ref_model(inp.to(param_dtype)), rtol=0, atol=0)
            for module in fsdp_modules(model):
                module.reshard()
            self._check_kept(params, expected)
            with torch.no_grad():
                for param in ref_model.parameters():
                    param.mul_(-2)
                for param in model.parameters():
                    param.to_local().mul_(-2)

    @skip_if_lt_x_gpu(4)
    @subtests(how=["load_state_dict", "assign", "full"], offload_policy=OFFLOAD_POLICIES)
    def test_load(self, how, offload_policy):
        """The next all-gather writes loaded values into the kept memory, between forwards and between steps."""
        ref_model = self._plain()
        model = shard(self._plain(), offload_policy=offload_policy)
        model.set_keep_unsharded_storage(True)
        params = unsharded(model)
        expected = addresses(params)
        for factor in (3, -2):
            train(model, self._inputs(2, 4))  # leaves the old values in the memory
            with torch.no_grad():
                for param in ref_model.parameters():
                    param.mul_(factor)
            if how == "full":
                options = StateDictOptions(full_state_dict=True, cpu_offload=True)
                set_model_state_dict(model, copy.deepcopy(ref_model.state_dict()), options=options)
            else:
                saved = shard(copy.deepcopy(ref_model), offload_policy=offload_policy).state_dict()
                model.load_state_dict(saved, assign=how == "assign")
            self._check_kept(params, expected)
            inp = self._inputs(2, 4)
            self.assertEqual(train(model, inp), train(ref_model, inp))
            self._check_kept(params, expected)
        self._check_training(ref_model, model, lambda: self._inputs(2, 4))
        self._check_kept(params, expected)

    @skip_if_lt_x_gpu(4)
    @subtests(async_op=[False, True], offload_policy=OFFLOAD_POLICIES)
    def test_unshard_after_step(self, async_op, offload_policy):
        """After a step the parameters are unsharded at their old addresses with their new values."""
        ref_model = self._plain()
        model = shard(self._plain(), offload_policy=offload_policy)
        model.set_keep_unsharded_storage(True)
        params = unsharded(model)
        expected = addresses(params)
        optims = optimizers(ref_model, model)
        self._seed()
        for _ in range(3):
            inp = self._inputs(2, 4)
            self.assertEqual(train(model, inp), train(ref_model, inp))
            average_gradients(ref_model)
            take_step(optims)
            handles = [module.unshard(async_op=async_op) for module in fsdp_modules(model)]
            for handle in handles if async_op else ():
                handle.wait()
            actual = dict(model.named_parameters())
            self.assertEqual(actual, dict(ref_model.named_parameters()))
            self._check_kept(actual, expected)
            for module in fsdp_modules(model):
                module.reshard()
            self._check_kept(params, expected)
        check_parity(self, ref_model, model, what=("parameter",))

    @skip_if_lt_x_gpu(4)
    @subtests(reshard_after_forward=[True, False])
    def test_switch(self, reshard_after_forward):
        """Memory is kept only while the setting is on."""
        ref_model = self._plain()
        model = shard(self._plain(), reshard_after_forward=reshard_after_forward)
        params = unsharded(model)
        padded = {  # every rank is padded to the rows of rank 0
            name: self.world_size * math.ceil(len(param) / self.world_size) * param[0].numel()
            for name, param in ref_model.named_parameters()
        }

        def train_on() -> dict[str, int]:
            self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(iterations=1))
            return {name: room_in(param) for name, param in params.items()}

        for _ in range(2):
            self.assertEqual(set(train_on().values()), {0})
            model.set_keep_unsharded_storage(True)
            self.assertEqual(train_on(), padded)
            expected = addresses(params)
            self.assertEqual(train_on(), padded)
            self._check_kept(params, expected)
            model.set_keep_unsharded_storage(False)

    @skip_if_lt_x_gpu(4)
    def test_recurse(self):
        """The setter also applies to the modules below, unless ``recurse`` is false."""
        model = shard(self._plain())
        of_first, of_root = ({f"{prefix}.weight", f"{prefix}.bias"} for prefix in ("0.0", "2"))
        self._check_keeping(model, set())
        model.set_keep_unsharded_storage(True, recurse=False)
        self._check_keeping(model, of_root)
        model[0].set_keep_unsharded_storage(True)
        self._check_keeping(model, of_root | of_first)
        model.set_keep_unsharded_storage(False, recurse=False)
        self._check_keeping(model, of_first)
        model.set_keep_unsharded_storage(True)
        self._check_keeping(model, set(dict(model.named_parameters())))
        model.set_keep_unsharded_storage(False)
        self._check_keeping(model, set())

    @skip_if_lt_x_gpu(4)
    def test_recurse_to_modules_of_one_group(self):
        """The setting applies to a whole group. A root without parameters also sets it below a plain module."""
        model: Any = nn.Sequential(self._plain())
        inner = model[0]
        fully_shard([inner[0], inner[1]])
        fully_shard(inner[2])
        fully_shard(model)
        of_group = {f"0.{index}.0.{kind}" for index in range(2) for kind in ("weight", "bias")}
        inner[1].set_keep_unsharded_storage(True)
        self._check_keeping(model, of_group)
        model.set_keep_unsharded_storage(False, recurse=False)
        self._check_keeping(model, of_group)
        model.set_keep_unsharded_storage(True)
        self._check_keeping(model, set(dict(model.named_parameters())))

    def _check_keeping(self, model: nn.Module, names: set[str]) -> None:
        """The parameters with these names, and no others, must keep their memory while they are sharded."""
        kept = {name for name, address in addresses(unsharded(model)).items() if address}
        self.assertEqual(kept, names, may_be="empty")

    @skip_if_lt_x_gpu(4)
    @subtests(reshard_after_forward=[True, False, 2])
    def test_exception_in_forward(self, reshard_after_forward):
        """The memory is kept after an exception in forward and a reset. Training continues in the same memory."""
        ref_model = self._plain()
        model = shard(self._plain(), reshard_after_forward=reshard_after_forward)
        model.set_keep_unsharded_storage(True)
        params = unsharded(model)
        expected = addresses(params)

        def interrupt(*unused: Any) -> None:
            raise RuntimeError("on purpose")

        with model[1][0].register_forward_hook(interrupt), self.assertRaisesRegex(RuntimeError, "on purpose"):
            model(self._inputs(2, 4))
        model.reset_iter_state()
        self._check_kept(params, expected)
        self._check_training(ref_model, model, lambda: self._inputs(2, 4))
        self._check_kept(params, expected)

    @skip_if_lt_x_gpu(2)
    @subtests(keep=[True, False])
    def test_extension(self, keep):
        """With an extension, both the all-gather outputs and the extension's own tensors are kept."""
        manual_seed(42)
        ref_model = nn.Linear(4, self.world_size, bias=False, device=self.device)
        model: Any = fully_shard(copy.deepcopy(ref_model))
        extension = ClonedOnArrival(model.weight._local_tensor)
        model.set_keep_unsharded_storage(keep)
        seen = []

        def step(module: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss = train(module, batch)
            seen.append([tensor.data_ptr() for tensor in extension.tensors])
            return loss

        self._check_training(ref_model, model, lambda: self._inputs(2, 4), Loop(step=step))
        *_, before, after = seen
        self.assertEqual(before, after)
        self.assertEqual([address != 0 for address in after], [keep, keep])


if __name__ == "__main__":
    run_tests()
