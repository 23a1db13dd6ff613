"""FSDP1 checks the forward order under debug level DETAIL: an error across ranks, a warning across iterations."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import ShardingStrategy

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, debug_level
from torch_fsdp_tests.common_utils import parametrize, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.collectives import RecordedCall, recorded
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.installed_torch import torch_names

exec_order_utils = torch_names.module("torch.distributed.fsdp._exec_order_utils")
STRATEGIES = [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP]


class Model(nn.Module):
    """Two paths after the first layer. One is used and trained, the other is frozen.

    Both have 36 elements. So collectives of ranks on different paths have the same size, and nothing hangs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layer0 = nn.Linear(5, 6)
        self.layer1 = nn.Linear(6, 6, bias=False)
        self.layer2 = nn.Sequential(nn.Linear(6, 3, bias=False), nn.ReLU(), nn.Linear(3, 6, bias=False))
        self.relu = nn.ReLU()
        self.use_alt_path = False
        self.layer2.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.layer0(x))
        return self.relu((self.layer2 if self.use_alt_path else self.layer1)(x))

    def flip_path(self) -> None:
        self.layer1.requires_grad_(self.use_alt_path)
        self.use_alt_path = not self.use_alt_path
        self.layer2.requires_grad_(self.use_alt_path)

    def get_input(self, device: torch.device) -> tuple[torch.Tensor]:
        return (torch.randn(8, 5, device=device),)

    def get_loss(self, input: tuple[torch.Tensor], output: torch.Tensor) -> torch.Tensor:
        return output.sum()

    def run_backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    @staticmethod
    def wrap(sharding_strategy: ShardingStrategy, device: str) -> FSDP:
        """Three FSDP instances: the root with ``layer0``, and one for each path."""
        torch.manual_seed(0)
        model = Model().to(device)
        fsdp = functools.partial(FSDP, sharding_strategy=sharding_strategy, device_id=torch.device(device))
        model.layer1 = fsdp(model.layer1)
        model.layer2 = fsdp(model.layer2)
        return fsdp(model)


@contextlib.contextmanager
def _order_warnings() -> Iterator[list[str]]:
    """Collect the text of the warnings about forward order. The list is filled when the context ends."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    found = [each for each in caught if "orward order differs" in str(each.message)]
    assert {each.category for each in found} <= {UserWarning}, found
    texts += [str(each.message) for each in found]


class TestFSDPExecOrder(FSDPTest):
    def _wrapped(
        self, sharding_strategy: ShardingStrategy, device: str, level: dist.DebugLevel = dist.DebugLevel.DETAIL
    ) -> FSDP:
        with debug_level(level):
            return Model.wrap(sharding_strategy, device)

    def _forward(self, model: FSDP, device: str) -> torch.Tensor:
        inputs = model.module.get_input(torch.device(device))
        return model.module.get_loss(inputs, model(*inputs))

    def _iterate(self, model: FSDP, device: str) -> None:
        model.module.run_backward(self._forward(model, device))

    def _assert_group_works(self, device: str) -> None:
        ranks = torch.tensor([self.rank], device=device)
        dist.all_reduce(ranks)
        self.assertEqual(ranks.item(), sum(range(self.world_size)))

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_invalid_first_iter_order(self, device, sharding_strategy):
        """Ranks on different paths all get an error that names two of them and their parameters. No rank hangs."""
        model = self._wrapped(sharding_strategy, device)
        if self.rank != 0:
            model.flip_path()
        with self.assertRaisesRegex(
            RuntimeError,
            r"^Forward order differs across ranks: rank 0 is all-gathering parameters for \[\['layer1\.weight'\]\] "
            r"while rank 1 is all-gathering parameters for \[\['layer2\.0\.weight', 'layer2\.2\.weight'\]\]$",
        ):
            self._forward(model, device)
        self._assert_group_works(device)

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    @parametrize("iters_before_path_change", [1, 3])
    def test_invalid_later_iter_order(self, device, sharding_strategy, iters_before_path_change):
        """A rank that leaves its own first order gives one warning. The other ranks give none."""
        model = self._wrapped(sharding_strategy, device)
        with _order_warnings() as before:
            for _ in range(iters_before_path_change):
                self._iterate(model, device)
        self.assertEqual(before, [], may_be="empty")
        deviates = self.rank != 0
        if deviates:
            model.flip_path()

        data, status = internals.execution_order(model), exec_order_utils._ExecOrderWarnStatus
        with _order_warnings() as actual:
            loss = self._forward(model, device)
        expected = (
            f"Forward order differs from that of the first iteration on rank {self.rank}. Collectives are unchecked "
            "and may give incorrect results or hang.\nExpected to all-gather for [['layer1.weight']] but trying to "
            "all-gather parameters for [['layer2.0.weight', 'layer2.2.weight']]"
        )
        self.assertEqual(actual, [expected] if deviates else [], may_be="empty")
        self.assertIs(data.warn_status, status.WARNING if deviates else status.NONE)

        model.module.run_backward(loss)
        with _order_warnings() as later:
            for _ in range(2):
                self.assertIs(data.warn_status, status.WARNED if deviates else status.NONE)
                self._iterate(model, device)
        self.assertEqual(later, [], may_be="empty")
        self._assert_group_works(device)

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_train_eval(self, device, sharding_strategy):
        """Forwards in eval mode are not checked, since no backward ends their iteration."""
        model = self._wrapped(sharding_strategy, device)
        with _order_warnings() as actual:
            for _ in range(2):
                model.train()
                for _ in range(3):
                    self._iterate(model, device)
                model.eval()
                for _ in range(3):
                    self._forward(model, device)
        self.assertEqual(actual, [], may_be="empty")
        self.assertEqual(internals.execution_order(model).current_order_index, 0)
        # The check still works: in train mode the other path is detected.
        model.train()
        model.flip_path()
        with _order_warnings() as actual:
            self._forward(model, device)
        self.assertEqual(len(actual), 1)

    @skip_if_lt_x_gpu(2)
    @parametrize("sharding_strategy", STRATEGIES)
    def test_more_forwards_than_in_the_first_iteration(self, device, sharding_strategy):
        """An FSDP instance that runs after the last one of the first iteration also gives a warning."""
        model = self._wrapped(sharding_strategy, device)
        self._iterate(model, device)
        with _order_warnings() as found:
            self._forward(model, device)
            model.module.layer2(torch.ones(1, 6, device=device))
        expected = (
            "Expected to not all-gather any more parameters in the forward but trying to all-gather parameters for "
            "[['layer2.0.weight', 'layer2.2.weight']]"
        )
        self.assertEqual([text.split("\n")[1] for text in found], [expected])

    @skip_if_lt_x_gpu(2)
    @subtests(sharding_strategy=STRATEGIES, level=[dist.DebugLevel.OFF, dist.DebugLevel.INFO, dist.DebugLevel.DETAIL])
    def test_without_debug_level(self, device, sharding_strategy, level):
        """Below DETAIL nothing is checked, warned about or sent, even if ranks differ."""
        model = self._wrapped(sharding_strategy, device, level)
        checks = level is dist.DebugLevel.DETAIL
        if not checks and self.rank != 0:
            model.flip_path()
        with recorded("all_gather") as gathers, _order_warnings() as actual:
            self._iterate(model, device)
            self.assertEqual(_validations(gathers), 2 * 2 if checks else 0)  # two for each instance: the root, one path
            self._iterate(model, device)
            self.assertEqual(_validations(gathers), 2 * 2 if checks else 0)  # only in the first iteration
            if not checks:
                model.flip_path()
            self._iterate(model, device)
        self.assertEqual(actual, [], may_be="empty")


def _validations(gathers: list[RecordedCall]) -> int:
    """The number of all-gathers of integers, which compare the ranks' order."""
    return sum(not call.dtype.is_floating_point for call in gathers)


instantiate_device_type_tests(TestFSDPExecOrder, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
