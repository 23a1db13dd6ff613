"""Backward prefetch of FSDP1: which parameters it all-gathers, and when. It changes no gradient."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.attention import SDPBackend, sdpa_kernel

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients, of_all_ranks
from torch_fsdp_tests.installed_torch import torch_names

NUM_ITERS = 2
PREFETCHES = [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST]

# The parameters of a ``nn.Transformer`` layer, in the order in which FSDP flattens them.
_ATTENTION = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")


def _weight_and_bias(*modules: str) -> list[str]:
    return [f"{module}.{name}" for module in modules for name in ("weight", "bias")]


ENCODER_PARAM_FQNS = [
    *(f"self_attn.{name}" for name in _ATTENTION),
    *_weight_and_bias("linear1", "linear2", "norm1", "norm2"),
]
DECODER_PARAM_FQNS = [
    *(f"{attention}.{name}" for attention in ("self_attn", "multihead_attn") for name in _ATTENTION),
    *_weight_and_bias("linear1", "linear2", "norm1", "norm2", "norm3"),
]

# Positions in the record of one backward through six layers of each kind. The root comes first and stays unsharded.
TOTAL_NUM_PREFETCH_FOR_PRE = 12
TOTAL_NUM_PREFETCH_FOR_POST = 11
ENCODER_BEGIN_INDEX_FOR_PRE = 6
ENCODER_BEGIN_INDEX_FOR_POST = 5
ENCODER_PREFETCH_NUM = 5  # the number of the last layer


def _expected(backward_prefetch: BackwardPrefetch | None) -> list[list[str] | None]:
    """The expected choices of one backward, as parameter names. The last instances have nothing left to prefetch."""
    if backward_prefetch is None:
        return []
    is_pre = backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    decoders = range(ENCODER_BEGIN_INDEX_FOR_PRE if is_pre else ENCODER_BEGIN_INDEX_FOR_POST)
    encoders = range(ENCODER_PREFETCH_NUM + 1)
    layers = [
        *([f"decoder.layers.{layer}.{name}" for name in DECODER_PARAM_FQNS] for layer in reversed(decoders)),
        *([f"encoder.layers.{layer}.{name}" for name in ENCODER_PARAM_FQNS] for layer in reversed(encoders)),
    ]
    assert len(layers) == (TOTAL_NUM_PREFETCH_FOR_PRE if is_pre else TOTAL_NUM_PREFETCH_FOR_POST)
    return layers + [None] * (13 - len(layers))


class InOrder(nn.Module):
    """Four layers, (4) to (4), which run in the order that the caller passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for number in order:
            x = self.layers[number](x)
        return x


class TestBackwardPrefetch(FSDPTest):
    world_size = 2

    def _transformer(
        self,
        backward_prefetch: BackwardPrefetch | None,
        sharding_strategy: ShardingStrategy = ShardingStrategy.FULL_SHARD,
    ) -> FSDP:
        """Thirteen instances: six encoder layers, six decoder layers and the root with the two final norms.

        The width does not affect the order of layers, so it is small.
        """
        torch.manual_seed(0)
        model = nn.Transformer(d_model=8, nhead=2, dim_feedforward=8, dropout=0.0, device=self.device)
        return FSDP(
            model,
            auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}),
            backward_prefetch=backward_prefetch,
            sharding_strategy=sharding_strategy,
            use_orig_params=True,
        )

    def _inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        torch.manual_seed(self.rank + 1)
        return torch.randn(10, 1, 8, device=self.device), torch.randn(20, 1, 8, device=self.device)

    @contextlib.contextmanager
    def _recorded_choices(self, backward_prefetch: BackwardPrefetch | None) -> Iterator[list[list[str] | None]]:
        """Record the parameter names of each prefetch choice in the training state that belongs to the mode."""
        record: list[list[str] | None] = []
        original = internals.fsdp1_runtime._get_handle_to_prefetch
        fsdp1_common = internals.fsdp1_common
        states = {
            BackwardPrefetch.BACKWARD_PRE: fsdp1_common.HandleTrainingState.BACKWARD_PRE,
            BackwardPrefetch.BACKWARD_POST: fsdp1_common.HandleTrainingState.BACKWARD_POST,
        }

        def get_handle_to_prefetch(*args: Any, **kwargs: Any) -> Any:
            self.assertEqual((len(args), kwargs), (2, {}))
            state, current = args
            chosen = original(state, current)
            if internals.training_state(current) is states.get(backward_prefetch):
                record.append(fsdp1_common._get_handle_fqns_from_root(state, chosen) if chosen else None)
            return chosen

        with torch_names.patched(internals.fsdp1_runtime, "_get_handle_to_prefetch", get_handle_to_prefetch):
            yield record

    def _dist_train(
        self, backward_prefetch: BackwardPrefetch | None, sharding_strategy: ShardingStrategy
    ) -> Iterator[tuple[list[list[str] | None], int, int]]:
        """Yield for each iteration the choices, and the numbers of all-gathers in forward and in backward."""
        model = self._transformer(backward_prefetch, sharding_strategy)
        optim = torch.optim.SGD(model.parameters(), lr=1e-2)
        inputs = self._inputs()
        for _ in range(NUM_ITERS):
            optim.zero_grad()
            in_forward: list[internals.Handle] = []
            in_backward: list[internals.Handle] = []
            with self._recorded_choices(backward_prefetch) as record:
                with internals.recorded_gathers(in_forward.append):
                    loss = model(*inputs).sum()
                with internals.recorded_gathers(in_backward.append):
                    loss.backward()
            optim.step()
            self.assertEqual(internals.execution_order(model).handles_post_forward_order, [], may_be="empty")
            yield record, len(in_forward), len(in_backward)

    @skip_if_lt_x_gpu(2)
    @subtests(
        backward_prefetch=PREFETCHES, sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]
    )
    def test_backward_prefetch(self, backward_prefetch, sharding_strategy):
        """Each mode makes the expected choices layer by layer in every iteration, even without all-gathers."""
        # Under SHARD_GRAD_OP the choices are the same, but the parameters are already unsharded.
        gathers_again = sharding_strategy is ShardingStrategy.FULL_SHARD
        for record, in_forward, in_backward in self._dist_train(backward_prefetch, sharding_strategy):
            self.assertEqual(record, _expected(backward_prefetch), may_be="empty")
            self.assertEqual((in_forward, in_backward), (13, 12 if gathers_again else 0))

    @skip_if_lt_x_gpu(2)
    @subtests(backward_prefetch=PREFETCHES)
    def test_what_is_there_in_time(self, backward_prefetch):
        """Only with prefetch, a layer's parameters are unsharded before its backward starts."""
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))).to(self.device)
        model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), backward_prefetch=backward_prefetch)
        names = {handle: index for index, handle in enumerate(internals.handles(model))}
        events: list[tuple[str, int, list[int]]] = []

        def gathered() -> list[int]:
            """The layers whose parameters are unsharded."""
            return [index for handle, index in names.items() if internals.is_unsharded(handle.flat_param)]

        def pre_backward(original: Any, state: Any, module: Any, handle: Any, *args: Any) -> Any:
            if handle and not handle._ran_pre_backward_hook:
                events.append(("begin", names[handle], gathered()))
            return original(state, module, handle, *args)

        def post_backward(original: Any, state: Any, handle: Any, *args: Any) -> Any:
            events.append(("end", names[handle], gathered()))
            return original(state, handle, *args)

        with contextlib.ExitStack() as stack:
            for name, hook in (("_pre_backward_hook", pre_backward), ("_post_backward_hook", post_backward)):
                patched = functools.partial(hook, getattr(internals.fsdp1_runtime, name))
                stack.enter_context(torch_names.patched(internals.fsdp1_runtime, name, patched))
            model(torch.ones(2, 4, device=self.device)).sum().backward()

        # PRE unshards the next layer before this layer's gradients, so two are unsharded. POST unshards it after them.
        expected: list[tuple[str, int, list[int]]] = []
        for index in (3, 2, 1, 0):
            begin = [index] if backward_prefetch is not None and index < 3 else []
            end = [index - 1, index] if backward_prefetch is BackwardPrefetch.BACKWARD_PRE and index else [index]
            expected += [("begin", index, begin), ("end", index, end)]
        self.assertEqual(events, expected)
        self.assertEqual(gathered(), [], may_be="empty")

    @skip_if_lt_x_gpu(2)
    @subtests(backward_prefetch=PREFETCHES)
    def test_order_that_changes(self, backward_prefetch):
        """Backward all-gathers in the reverse order of its own forward, whatever the order of earlier forwards was."""
        policy = ModuleWrapPolicy({nn.Linear})
        model = FSDP(InOrder().to(self.device), auto_wrap_policy=policy, backward_prefetch=backward_prefetch)
        handles = [internals.handle(layer) for layer in model.layers]
        for order in ([0, 1, 2, 3], [2, 0, 3, 1], [3, 1], [1, 3, 0]):
            loss = model(torch.ones(2, 4, device=self.device), order).sum()
            in_backward: list[internals.Handle] = []
            with internals.recorded_gathers(in_backward.append):
                loss.backward()
            self.assertEqual([handles.index(handle) for handle in in_backward], order[::-1])

    @skip_if_lt_x_gpu(2)
    def test_same_gradients(self):
        """Gradients are bitwise the same in all modes, on every rank and in every step."""
        of_modes = []
        for backward_prefetch in PREFETCHES:
            model = self._transformer(backward_prefetch)
            optim = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
            grads = []
            for _ in range(NUM_ITERS):
                optim.zero_grad()
                with sdpa_kernel(SDPBackend.MATH):  # a fused kernel may add in a different order each time
                    self._loss(model).backward()
                grads.append(copy.deepcopy([param.grad for param in model.parameters()]))
                optim.step()
            of_modes.append(grads)
        self.assertEqual(of_modes[1], of_modes[0], rtol=0, atol=0)
        self.assertEqual(of_modes[2], of_modes[0], rtol=0, atol=0)
        self._assert_averaged(of_modes[0][0])

    def _loss(self, model: nn.Module) -> torch.Tensor:
        """Layer normalization ends the transformer, so the sums of its outputs and of their squares are constant."""
        return model(*self._inputs()).pow(3).mean()

    def _assert_averaged(self, shards: list[torch.Tensor | None]) -> None:
        """The shards of the first step match a plain model's gradients, averaged over ranks."""
        torch.manual_seed(0)
        plain = nn.Transformer(d_model=8, nhead=2, dim_feedforward=8, dropout=0.0, device=self.device)
        self._loss(plain).backward()
        of_ranks = of_all_ranks([None if shard is None else shard.flatten().cpu() for shard in shards])
        wholes = [torch.cat([part for part in parts if part is not None]) for parts in zip(*of_ranks)]
        average_gradients(plain)
        # FSDP lists parameters in the order of the plain model.
        expected = [param.grad.flatten().cpu() for param in plain.parameters()]
        self.assertEqual(wholes, expected, rtol=1e-4, atol=1e-5)


if __name__ == "__main__":
    run_tests()
