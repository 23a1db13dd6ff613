"""FSDP1 with some frozen parameters: their units are resharded in time and reduce nothing. The rest trains."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import data_parallel, full_parameters, named, of_all_ranks
from torch_fsdp_tests.installed_torch import torch_names

FULL_SHARD, SHARD_GRAD_OP, NO_SHARD = STRATEGIES = [
    ShardingStrategy.FULL_SHARD,
    ShardingStrategy.SHARD_GRAD_OP,
    ShardingStrategy.NO_SHARD,
]
LINEARS = ModuleWrapPolicy({nn.Linear})


class LinearUnusedInput(nn.Linear):
    def forward(self, frozen_input: torch.Tensor, learnable_input: torch.Tensor) -> torch.Tensor:
        return super().forward(frozen_input)


class ModelUnusedInput(nn.Module):
    """Three parallel layers. Each gets an input that requires a gradient but does not use it."""

    def __init__(self, freeze: bool) -> None:
        super().__init__()
        self.layer0 = LinearUnusedInput(4, 4)
        self.layer1_frozen = LinearUnusedInput(4, 4)
        self.layer1_frozen.requires_grad_(not freeze)
        self.layer2 = LinearUnusedInput(4, 4)

    def forward(self, frozen_input: torch.Tensor, learnable_input: torch.Tensor) -> torch.Tensor:
        layers = (self.layer0, self.layer1_frozen, self.layer2)
        return torch.concat([*(layer(frozen_input, learnable_input) for layer in layers), learnable_input])


class Heads(nn.ModuleList):
    """The sum of the outputs. One of them may be left out after it was computed."""

    def forward(self, x: torch.Tensor, without: int | None = None) -> torch.Tensor:
        outputs = [head(x) for head in self]
        return sum(output for number, output in enumerate(outputs) if number != without)


class MultiTraversal(nn.Module):
    """Units that run several times in one forward. One is frozen, and another also runs under ``no_grad``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer_0 = nn.Linear(5, 5)
        self.layer_no_grad = nn.Linear(5, 5)
        self.layer_with_grad = nn.Linear(5, 5)
        self.layer_no_grad.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer_0(x)
        for _ in range(10):
            x = self.layer_no_grad(self.layer_with_grad(x))
            with torch.no_grad():
                x += self.layer_with_grad(x)
        return x


class TestFSDPFineTune(FSDPTest):
    NUM_LINEARS = 6

    world_size = 2

    @property
    def num_iters(self) -> int:
        """Enough for the optimizer's state to matter. Half as many on the CPU, which computes for all ranks."""
        return 3 if accelerator.current().is_cpu else 6

    def _init_seq_module(self, device: str) -> nn.Sequential:
        torch.manual_seed(42)
        layers = [layer for _ in range(self.NUM_LINEARS) for layer in (nn.Linear(5, 5, device=device), nn.ReLU())]
        module = nn.Sequential(*layers)
        self._set_seq_module_requires_grad(module, False)
        return module

    def _set_seq_module_requires_grad(self, seq: nn.Module, requires_grad: bool) -> None:
        """Set ``requires_grad`` of every second linear layer, beginning with the first."""
        for index in range(0, self.NUM_LINEARS, 2):
            for param in seq[2 * index].parameters():
                param.requires_grad_(requires_grad)

    def _init_multi_traversal_module(self, device: str) -> nn.Module:
        torch.manual_seed(42)
        return MultiTraversal().to(device)

    def _gathered(self, model: FSDP) -> list[bool]:
        """For each instance, whether it holds unsharded parameters. False under NO_SHARD, which never all-gathers."""
        return [
            instance.sharding_strategy is not NO_SHARD and internals.is_unsharded(internals.flat_param_of(instance))
            for instance in internals.managing_instances(model)
        ]

    def assert_same_grads(self, model: FSDP, reference: nn.Module) -> None:
        """Each instance's reduced gradient, joined from the ranks, must equal that of the reference's layer."""
        layers = [layer for layer in reference.modules() if isinstance(layer, nn.Linear)]
        for instance, layer in zip(internals.managing_instances(model), layers, strict=True):
            expected = [None if param.grad is None else param.grad.flatten().cpu() for param in layer.parameters()]
            mine = [None if param.grad is None else param.grad.flatten().cpu() for param in instance.parameters()]
            everywhere = [mine] if instance.sharding_strategy is NO_SHARD else of_all_ranks(mine)
            of_each = [[piece for piece in pieces if piece is not None] for pieces in zip(*everywhere, strict=True)]
            if not any(grad is not None for grad in expected):
                self.assertEqual([piece for pieces in of_each for piece in pieces], [], may_be="empty")
                continue
            # Either one flat gradient, which may end in padding, or a gradient for each parameter.
            actual = torch.cat([piece for pieces in of_each for piece in pieces])
            self.assertEqual(actual[: 5 * 5 + 5], torch.cat(expected))

    def _optims(self, *models: nn.Module) -> list[torch.optim.Optimizer]:
        return [
            torch.optim.Adam([param for param in model.parameters() if param.requires_grad], lr=1e-2)
            for model in models
        ]

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=STRATEGIES,
        use_orig_params=[False, True],
        inp_requires_grad=[False, True],
        unfreeze_params=[False, True],
    )
    def test_backward_reshard_hooks(
        self, device, sharding_strategy, use_orig_params, inp_requires_grad, unfreeze_params
    ):
        """In backward, each unit is resharded by its own hook. For frozen units, the hook is on their inputs."""
        seq = FSDP(
            self._init_seq_module(device),
            auto_wrap_policy=LINEARS,
            sharding_strategy=sharding_strategy,
            use_orig_params=use_orig_params,
            device_id=torch.device(device),
        )
        torch.manual_seed(self.rank + 1)
        inp = torch.randn(8, 5, device=device, requires_grad=inp_requires_grad)
        count = 0
        left_over: list[bool] = []

        def _post_backward_reshard_with_count(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            reshard(*args, **kwargs)

        def final_callback(*args: Any, **kwargs: Any) -> None:
            left_over.extend(self._gathered(seq))
            final(*args, **kwargs)

        def _assert_post_backward_requires_grad() -> None:
            for param in seq.parameters():
                self.assertTrue(param.requires_grad)

        def _assert_post_backward_reshard_count(step: int) -> None:
            unfrozen = step > 0 and unfreeze_params
            # The first unit is frozen. If its input requires no gradient either, there is no tensor for a hook. Then
            # the end of backward reshards it, unless forward has done so.
            has_hook = inp_requires_grad or unfrozen
            self.assertEqual(count, self.NUM_LINEARS if has_hook else self.NUM_LINEARS - 1)
            left = not has_hook and sharding_strategy is SHARD_GRAD_OP
            self.assertEqual(left_over, [left] + [False] * (self.NUM_LINEARS - 1))
            if unfrozen:
                _assert_post_backward_requires_grad()

        runtime = internals.fsdp1_runtime
        reshard, final = runtime._post_backward_reshard, runtime._post_backward_final_callback
        with (
            torch_names.patched(runtime, "_post_backward_reshard", _post_backward_reshard_with_count),
            torch_names.patched(runtime, "_post_backward_final_callback", final_callback),
        ):
            for step in range(3):
                if step == 1:
                    with torch.no_grad():
                        seq(inp)
                    self.assertEqual(count, 0)
                    continue
                if unfreeze_params and step == 2:
                    self._set_seq_module_requires_grad(seq, True)
                seq(inp).sum().backward()
                _assert_post_backward_reshard_count(step)
                # After backward, no unit stays unsharded, frozen or not.
                stays = not use_orig_params and left_over[0]
                with torch_defect("fsdp1_unused_unit_computes_with_old_weights", when=stays):
                    self.assertEqual(self._gathered(seq), [False] * self.NUM_LINEARS)
                count = 0
                left_over.clear()

    @skip_if_lt_x_gpu(2)
    def test_frozen_unit_is_freed_at_the_end(self, device):
        """With SHARD_GRAD_OP, the end of backward frees a frozen unit that no hook has resharded."""
        seq = FSDP(
            self._init_seq_module(device),
            auto_wrap_policy=LINEARS,
            sharding_strategy=SHARD_GRAD_OP,
            use_orig_params=False,
        )
        seq(torch.ones(2, 5, device=device)).sum().backward()
        first, *others = self._gathered(seq)
        self.assertEqual(others, [False] * (self.NUM_LINEARS - 1))
        with torch_defect("fsdp1_unused_unit_computes_with_old_weights"):
            self.assertEqual(first, False)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, inp_requires_grad=[False, True])
    def test_frozen_root_keeps_its_parameters(self, device, sharding_strategy, inp_requires_grad):
        """After backward, the parameters of a frozen root still have their names, also in the state dict."""
        layers = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)).to(device)
        layers[0].requires_grad_(False)
        names = [name for name, _ in layers.named_parameters()]
        layers[1] = FSDP(layers[1], sharding_strategy=sharding_strategy, use_orig_params=True)
        model = FSDP(layers, sharding_strategy=sharding_strategy, use_orig_params=True)
        model(torch.ones(2, 5, device=device, requires_grad=inp_requires_grad)).sum().backward()
        has_no_hook = sharding_strategy is NO_SHARD and not inp_requires_grad
        with torch_defect("fsdp1_skipped_replica_stops_training", when=has_no_hook):
            self.assertEqual(list(named(model)), names)
        with torch_defect("fsdp1_skipped_replica_stops_training", when=has_no_hook):
            self.assertEqual(list(model.state_dict()), names)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True], skipped=[0, 1])
    def test_unit_trains_after_a_step_without_its_output(self, device, sharding_strategy, use_orig_params, skipped):
        """A unit whose output is not used by the loss of one step is trained by the other steps."""
        how = {"sharding_strategy": sharding_strategy, "use_orig_params": use_orig_params}
        model = FSDP(Heads(FSDP(nn.Linear(5, 4, bias=False).to(device), **how) for _ in range(2)), **how)
        (weight,) = model.module[skipped].parameters()
        optim = torch.optim.SGD(model.parameters(), lr=0.5)
        is_lost = sharding_strategy is NO_SHARD and use_orig_params and skipped == 0
        with torch_defect("fsdp1_skipped_replica_stops_training", when=is_lost):
            for without in (None, skipped, None, None):
                before = weight.detach().clone()
                optim.zero_grad()
                model(torch.ones(2, 5, device=device), without).sum().backward()
                optim.step()
                self.assertEqual(torch.equal(weight, before), without == skipped)

    def _check_parity(
        self,
        module: nn.Module,
        device: str,
        trainable: int,
        inp_requires_grad: bool = False,
        **fsdp_kwargs: Any,
    ) -> None:
        """Losses, gradients and parameters match DDP. Frozen parameters do not change and are not reduced."""
        frozen = {name: param.detach().clone() for name, param in module.named_parameters() if not param.requires_grad}
        self.assertGreater(len(frozen), 0)
        ddp_model = data_parallel(copy.deepcopy(module))
        fsdp_model = FSDP(module, auto_wrap_policy=LINEARS, device_id=torch.device(device), **fsdp_kwargs)
        optims = self._optims(ddp_model, fsdp_model)
        torch.manual_seed(self.rank + 1)
        ref_losses = []
        for _ in range(self.num_iters):
            inp = torch.randn(8, 5, device=device)
            inputs = [inp.clone().requires_grad_(inp_requires_grad) for _ in range(2)]
            losses = [model(each).sum() for model, each in zip((ddp_model, fsdp_model), inputs)]
            torch.testing.assert_close(*losses)
            ref_losses.append(losses[0])
            losses[0].backward()
            with recorded("all_reduce", "reduce_scatter") as calls:
                losses[1].backward()
            one = "all_reduce" if fsdp_model.sharding_strategy is NO_SHARD else "reduce_scatter"
            self.assertEqual([call.name for call in calls], [one] * trainable)
            self.assertEqual(inputs[1].grad, inputs[0].grad)
            self.assert_same_grads(fsdp_model, ddp_model)
            for optim in optims:
                optim.step()
                optim.zero_grad()
        check_losses(ref_losses)
        actual = full_parameters(fsdp_model)
        self.assertEqual(actual, dict(ddp_model.module.named_parameters()))
        for name, value in frozen.items():
            self.assertEqual(actual[name], value, rtol=0, atol=0)

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=STRATEGIES,
        use_orig_params=[False, True],
        inp_requires_grad=[False, True],
        forward_prefetch=[False, True],
    )
    def test_hooks_multi_traversal(self, device, **kwargs):
        """Units that run several times in one forward are unsharded and resharded correctly, and train as with DDP."""
        self._check_parity(self._init_multi_traversal_module(device), device, trainable=2, **kwargs)

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, use_orig_params=[False, True])
    def test_parity_with_ddp(self, device, **kwargs):
        """Six layers, every second one frozen, train as with DDP."""
        self._check_parity(self._init_seq_module(device), device, trainable=self.NUM_LINEARS // 2, **kwargs)

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[FULL_SHARD, SHARD_GRAD_OP],
        use_orig_params=[True, False],
        offload_params=[True, False],
        mixed_precision=[
            MixedPrecision(),
            MixedPrecision(param_dtype=torch.float16, buffer_dtype=torch.float16, reduce_dtype=torch.float16),
        ],
        backward_prefetch=[BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
    )
    def test_parity_with_non_frozen_fsdp(
        self, device, sharding_strategy, use_orig_params, offload_params, mixed_precision, backward_prefetch
    ):
        """A model with a frozen layer trains like one that only leaves this layer out of the optimizer.

        In every second step, no input of the frozen layer requires a gradient.
        """
        models = []
        for freeze in (True, False):
            torch.manual_seed(42)
            models.append(
                FSDP(
                    ModelUnusedInput(freeze).to(device),
                    auto_wrap_policy=ModuleWrapPolicy({LinearUnusedInput}),
                    sharding_strategy=sharding_strategy,
                    use_orig_params=use_orig_params,
                    cpu_offload=CPUOffload(offload_params=offload_params),
                    mixed_precision=mixed_precision,
                    backward_prefetch=backward_prefetch,
                    device_id=torch.device(device),
                )
            )
        frozen_model, ref_model = models
        trained = [param for name, param in named(ref_model).items() if not name.startswith("layer1_frozen")]
        self.assertLess(len(trained), len(list(ref_model.parameters())))
        optims = [torch.optim.Adam(params, lr=1e-2) for params in (list(frozen_model.parameters()), trained)]
        frozen = frozen_model.module.layer1_frozen
        initial = full_parameters(frozen_model)

        torch.manual_seed(self.rank + 1)
        ref_losses = []
        for step in range(self.num_iters):
            is_learnable = step % 2 == 0
            frozen_input = torch.randn((4, 4), device=device)
            learnable = torch.randn((4, 4), device=device)
            losses, inputs = [], [learnable.clone().requires_grad_(is_learnable) for _ in models]
            for model, optim, learnable_input in zip(models, optims, inputs):
                loss = model(frozen_input, learnable_input).square().sum()
                losses.append(loss.detach())
                optim.zero_grad()
                loss.backward()
                # No unit stays unsharded, even if the input's gradient reshards a unit before backward
                # has unsharded it. For flat parameters, see test_frozen_unit_is_freed_at_the_end.
                first, of_frozen, last = self._gathered(model)
                self.assertEqual((first, of_frozen and (is_learnable or use_orig_params), last), (False, False, False))
                optim.step()
            self.assertEqual(*losses)
            ref_losses.append(losses[1])
            # The input's gradient comes from the concatenation alone, since no layer uses the input.
            low = mixed_precision.param_dtype or torch.float32
            for learnable_input in inputs:
                expected = 2 * learnable.to(low).float() if is_learnable else None
                self.assertEqual(learnable_input.grad, expected)
            self.assertEqual([param.grad for param in frozen.parameters()], [None] * len(list(frozen.parameters())))
        check_losses(ref_losses)
        actual = full_parameters(frozen_model)
        self.assertEqual(actual, full_parameters(ref_model))
        for name, value in initial.items():
            if name.startswith("layer1_frozen"):
                self.assertEqual(actual[name], value, rtol=0, atol=0)
            else:
                self.assertNotEqual(actual[name], value)


instantiate_device_type_tests(TestFSDPFineTune, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
