"""Mixed precision of FSDP2 and of ``replicate`` on it: a replica that casts by hand, and tests of the casts."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from torch_fsdp_tests.common_distributed import RankTestCase, SaveForwardInputsModel
from torch_fsdp_tests.common_fsdp import check_sharded_parity
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import manual_seed
from torch_fsdp_tests.fsdp import collectives
from torch_fsdp_tests.fsdp.seeded import filled

DIM = 16
ITERATIONS = 4  # Adam's state matters from the second step on

# ``fully_shard`` or a replacement, which is called with a module and ``mp_policy``.
Wrap = Callable[..., Any]


def mean_of_two_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """The mean in the dtype of the tensor. Float16 is halved before it is added, because the sum could overflow."""
    first, second = (torch.empty_like(tensor) for _ in range(2))
    dist.all_gather([first, second], tensor)
    return first / 2 + second / 2 if tensor.dtype == torch.float16 else (first + second) / 2


class Replica:
    """A float32 model with its optimizer, and a copy in ``param_dtype`` that computes for it.

    Gradients are cast to ``reduce_dtype``. In this dtype they are accumulated over backwards and averaged over the
    ranks. ``loss_of`` is called with a model and an input. Parameters for whose name ``keeps`` returns True stay in
    float32 in the copy.
    """

    def __init__(
        self,
        model: nn.Module,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        loss_of: Callable[[nn.Module, torch.Tensor], torch.Tensor] = lambda model, inp: model(inp).sum(),
        keeps: Callable[[str], bool] = lambda name: False,
    ) -> None:
        self.model = copy.deepcopy(model)
        self.computing = copy.deepcopy(model).to(param_dtype)
        for name, param in self.computing.named_parameters():
            if keeps(name):
                param.data = model.get_parameter(name).detach().clone()
        self._reduce_dtype = reduce_dtype
        self.loss_of = loss_of
        self._optim = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self._start = [param.detach().clone() for param in self.model.parameters()]

    def backward(self, inp: torch.Tensor) -> torch.Tensor:
        loss = self.loss_of(self.computing, inp)
        loss.backward()
        for param, computed in zip(self.model.parameters(), self.computing.parameters()):
            grad = computed.grad.to(self._reduce_dtype)
            computed.grad = None
            param.accumulated = grad if (before := getattr(param, "accumulated", None)) is None else before + grad
        return loss.detach()

    def reduce(self) -> None:
        for param in self.model.parameters():
            param.grad = mean_of_two_ranks(param.accumulated).float()
            param.accumulated = None

    def step(self) -> None:
        self._optim.step()
        self._optim.zero_grad()
        with torch.no_grad():
            for param, computed in zip(self.model.parameters(), self.computing.parameters()):
                computed.copy_(param)

    def trained_all(self) -> bool:
        return not any(map(torch.equal, self._start, self.model.parameters()))


class ReplicaMixin(RankTestCase):
    """For a test case with two rank processes. Trains a model beside its replica, and compares them bit by bit.

    There are two ranks because the sum of two numbers does not depend on their order in any precision.
    """

    def _check_identical(self, found: torch.Tensor, expected: torch.Tensor) -> None:
        self.assertEqual(found, expected, rtol=0, atol=0)

    def _check_training(
        self, replica: Replica, model: nn.Module, optim: torch.optim.Optimizer, inp_dtype: torch.dtype
    ) -> collectives.Calls:
        """Train for some steps with this rank's own inputs. Returns the collectives that were called for the model."""
        manual_seed(42 + self.rank + 1)
        calls, ref_losses = collectives.Calls(), []
        for _ in range(ITERATIONS):
            inp = torch.randn((4, DIM), device=self.device, dtype=inp_dtype)
            ref_losses.append(replica.backward(inp))
            replica.reduce()
            with collectives.recorded() as now:
                loss = replica.loss_of(model, inp)
                loss.backward()
            calls += now
            self._check_identical(loss.detach(), ref_losses[-1])
            check_sharded_parity(self, replica.model, model)
            replica.step()
            optim.step()
            optim.zero_grad()
        check_sharded_parity(self, replica.model, model)
        check_losses(ref_losses)
        self.assertTrue(replica.trained_all())
        return calls


@dataclasses.dataclass(frozen=True)
class NormCase:
    """A model whose second module is a norm, the shape of its inputs, and its policies."""

    model: nn.Sequential
    shape: tuple[int, ...]
    policy: MixedPrecisionPolicy
    norm_policy: MixedPrecisionPolicy | None = None
    may_be_rejected: bool = False


class CastsMixin(RankTestCase):
    """For a test case with two ranks (threads or processes). Tests what modules receive and return under a policy."""

    def _check_float16_on_one_submodule(self, wrap: Wrap) -> None:
        half, single = torch.float16, torch.float32
        to_half = MixedPrecisionPolicy(param_dtype=half)
        # The child with a policy, the policy, whether the model casts itself, and the input dtypes of model, c1, c2.
        cases = [
            ("c2", to_half, False, (single, single, half)),
            ("c2", dataclasses.replace(to_half, cast_forward_inputs=False), True, (single, single, single)),
            ("c1", dataclasses.replace(to_half, output_dtype=single), False, (single, half, single)),
        ]
        for child, policy, user_casts, expected in cases:
            inputs: dict[nn.Module, torch.Tensor] = {}
            model = SaveForwardInputsModel(inputs, cast_forward_inputs=user_casts).to(self.device)
            wrap(model.get_submodule(child), mp_policy=policy)
            wrap(model)
            output = model(torch.zeros(2, 100, device=self.device))
            actual = tuple(inputs[module].dtype for module in (model, model.c1, model.c2))
            self.assertEqual(actual, expected)
            self.assertEqual(output.dtype, half if child == "c2" else single)
            output.sum().backward()
            self.assertEqual([param.grad.dtype for param in model.parameters()], [single] * 4)

    def _check_submodules_with_external_inputs(self, wrap: Wrap, enable_submodule_cast: bool) -> None:
        """With ``cast_forward_inputs`` a submodule casts a tensor that does not come from the root, otherwise not."""

        class Adder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.lin = nn.Linear(4, 4)

            def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
                self.inputs = (x.dtype, y.dtype)
                return self.lin(x.to(self.lin.weight.dtype) + y.to(self.lin.weight.dtype))

        class Model(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.l1, self.l2 = nn.Linear(4, 4), Adder()

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.input = x.dtype
                return self.l2(self.l1(x), torch.ones(4, 4, device=x.device))

        half = torch.float16
        model = Model().to(self.device)
        wrap(model.l2, mp_policy=MixedPrecisionPolicy(param_dtype=half, cast_forward_inputs=enable_submodule_cast))
        wrap(model, mp_policy=MixedPrecisionPolicy(param_dtype=half))
        model(torch.randn(4, 4, device=self.device)).sum().backward()
        self.assertEqual(model.input, half)
        self.assertEqual(model.l2.inputs, (half, half if enable_submodule_cast else torch.float32))

    def _check_norm_modules(self, wrap: Wrap, policy: MixedPrecisionPolicy) -> None:
        """Norms work under the policy. If the device cannot combine running statistics in float32 with weights in
        ``param_dtype``, it raises its own error. Casting the statistics, or a policy that keeps the norm's parameters
        in float32, works on all devices.
        """
        linear, convolution = functools.partial(nn.Linear, 32, 32), functools.partial(nn.Conv2d, kernel_size=3)
        model = nn.Sequential(linear(), nn.LayerNorm(32), linear())
        self._check_norm(wrap, NormCase(model, (4, 32), policy))
        for make, shape in (
            (lambda: nn.Sequential(linear(), nn.BatchNorm1d(32), linear()), (4, 32)),
            (lambda: nn.Sequential(convolution(1, 5), nn.BatchNorm2d(5), convolution(5, 4)), (3, 1, 9, 9)),
        ):
            self._check_norm(wrap, NormCase(make(), shape, policy, may_be_rejected=True))
            model = make()
            for name, buffer in model[1].named_buffers():
                if buffer.is_floating_point():
                    setattr(model[1], name, buffer.to(policy.param_dtype))
            self._check_norm(wrap, NormCase(model, shape, policy))
            # Alternatively the norm keeps its parameters in float32, and accepts any input.
            keeps = MixedPrecisionPolicy(output_dtype=policy.param_dtype)
            self._check_norm(wrap, NormCase(make(), shape, policy, keeps))

    def _check_norm(self, wrap: Wrap, case: NormCase) -> None:
        """Compare the output and the buffers with those of a copy whose parameters are cast permanently."""
        model, policy = filled(case.model).to(self.device), case.policy
        replica = copy.deepcopy(model)
        for index, module in enumerate(replica):
            for param in module.parameters():
                if index != 1 or case.norm_policy is None:
                    param.data = param.data.to(policy.param_dtype)
        for index, module in enumerate(model):
            wrap(module, mp_policy=case.norm_policy or policy if index == 1 else policy)
        wrap(model, mp_policy=policy)
        numbers = torch.arange(math.prod(case.shape), device=self.device)
        inp = torch.sin(numbers.view(case.shape)) + self.rank
        try:
            expected = replica(inp.to(policy.param_dtype))
            expected.sum().backward()
        except RuntimeError as error:
            if not case.may_be_rejected:
                raise
            with self.assertRaisesRegex(RuntimeError, re.escape(str(error))):
                model(inp).sum().backward()
            return
        output = model(inp)
        self.assertEqual(output.dtype, policy.param_dtype)
        self.assertEqual(output, expected)
        self.assertEqual(dict(model.named_buffers()), dict(replica.named_buffers()), may_be="empty")
        output.sum().backward()
        for name, param in model.named_parameters():
            self.assertEqual(param.grad.dtype, torch.float32, msg=name)
            self.assertTrue(param.grad.to_local().isfinite().all(), name)

    def _check_dataclass_input(self, wrap: Wrap) -> None:
        @dataclasses.dataclass
        class Input:
            x: torch.Tensor

        class Model(nn.Module):
            def __init__(self, device: torch.device) -> None:
                super().__init__()
                self.lin = nn.Linear(10, 10, device=device)

            def forward(self, inp: Input) -> torch.Tensor:
                self.seen = inp.x.dtype
                return self.lin(inp.x)

        model = Model(self.device)
        bf16 = torch.bfloat16
        wrap(model, mp_policy=MixedPrecisionPolicy(bf16, bf16, bf16, True))
        inp = Input(torch.randn(2, 10, device=self.device))
        output = model(inp)
        output.sum().backward()
        self.assertEqual((model.seen, output.dtype, inp.x.dtype), (bf16, bf16, torch.float32))
        self.assertTrue(model.lin.weight.grad.to_local().any())
