"""Helpers for tests of FSDP1's optimizer states: models, their training, and comparisons of saved states."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_distributed import get_required_world_size
from torch_fsdp_tests.common_fsdp import FSDPTest, TransformerWithSharedParams
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed.common_state_dict import copied
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.references import average, full_parameters
from torch_fsdp_tests.fsdp.seeded import normal

BATCH = 8
Group: TypeAlias = "dist.ProcessGroup | None"

FULL, SHARDED = StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT
FULL_EVERYWHERE = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig())
FULL_ON_RANK_0 = StateDictSettings(FULL, FullStateDictConfig(), FullOptimStateDictConfig(rank0_only=True))
SHARDS = StateDictSettings(SHARDED, ShardedStateDictConfig(), ShardedOptimStateDictConfig())


class Bias(nn.Module):
    """Adds a vector."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(normal(dim, seed=0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


class _Block(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bias_module1(F.relu(self.bias_module0(x @ self.weight)))


class BlockA(_Block):
    """Registers its weight between its biases."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.bias_module0 = Bias(out_dim)
        self.weight = nn.Parameter(normal(in_dim, out_dim, seed=0))
        self.bias_module1 = Bias(out_dim)


class BlockB(_Block):
    """Registers its weight first."""

    def __init__(self, in_dim: int, out_dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(normal(in_dim, out_dim, seed=0))
        self.bias_module0 = Bias(out_dim)
        self.bias_module1 = Bias(out_dim)


class NestedModel(nn.Module):
    """Blocks of odd sizes that can be wrapped in several ways. ``bias`` is never in an FSDP instance."""

    features = 5

    def __init__(self) -> None:
        super().__init__()
        self.block0 = BlockB(5, 3)
        self.block1 = BlockB(3, 7)
        self.bias = nn.Parameter(normal(5, seed=0))
        self.block2 = nn.Sequential(BlockA(7, 9), BlockA(9, 9), BlockB(9, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.block0, self.block1, self.block2):
            x = F.relu(block(x))
        return x + self.bias

    def wrap(self, ignore: bool = False, **kwargs: Any) -> None:
        self.block1.bias_module0 = FSDP(self.block1.bias_module0, **kwargs)
        self.block1 = FSDP(self.block1, **kwargs)
        middle, last = self.block2[1], self.block2[2]
        middle.bias_module0 = FSDP(middle.bias_module0, **kwargs)
        middle.bias_module1 = FSDP(middle.bias_module1, **kwargs)
        self.block2[1] = FSDP(middle, **kwargs)
        self.block2[2] = FSDP(last, ignored_modules=[last.bias_module0] if ignore else None, **kwargs)

    def wrap_alt(self, **kwargs: Any) -> None:
        self.block0.bias_module0 = FSDP(self.block0.bias_module0, **kwargs)
        self.block0 = FSDP(self.block0, **kwargs)

    def wrap_with_unmanaged_params(self, add_to_fsdp_module: bool, **kwargs: Any) -> None:
        """Register a parameter that has no saved state, in a block that becomes an FSDP instance or in the root. Then
        ``wrap``.
        """
        self.unmanaged = nn.Parameter(torch.randn(5, 5, device=self.bias.device))
        (self.block2[2] if add_to_fsdp_module else self).register_parameter("unmanaged_param", self.unmanaged)
        del self.unmanaged
        self.wrap(**kwargs)

    def optim_input(self, multiple_groups: bool, reverse: bool) -> list[Any]:
        """All parameters, or two groups without the root's own bias. ``reverse`` reverses each list."""
        order = reversed if reverse else iter
        if not multiple_groups:
            return list(order(list(self.parameters())))
        second = [*self.block2.parameters(), *self.block0.parameters()]
        return [
            {"params": list(order(list(self.block1.parameters())))},
            {"params": list(order(second)), "weight_decay": 0.9},
        ]


class TestDummyModel(nn.Module):
    """Four small linear layers. ``no_grad`` freezes the first one."""

    __test__ = False
    features = 8

    def __init__(self, no_grad: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net1 = nn.Sequential(nn.Linear(8, 16), nn.ReLU())
        self.net1[0].requires_grad_(not no_grad)
        self.net2 = nn.Sequential(nn.Linear(16, 32), nn.ReLU())
        self.net3 = nn.Linear(32, 64)
        self.net4 = nn.Sequential(nn.ReLU(), nn.Linear(64, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net4(self.net3(self.net2(self.net1(x))))


@dataclasses.dataclass
class Training:
    """A model, its optimizer, the parameters or groups given to the optimizer, the ranks of the model, and the
    iterations so far.
    """

    model: nn.Module
    optim: torch.optim.Optimizer
    optim_input: list[Any] = dataclasses.field(default_factory=list)
    group: Group = None
    iteration: int = 0

    def optim_argument(self, use_optim_input: bool) -> dict[str, Any]:
        """The keyword argument of FSDP's older functions for the optimizer: the optimizer itself, or its parameters."""
        return {"optim_input": self.optim_input} if use_optim_input else {"optim": self.optim}


def set_state_dict_type(model: nn.Module, settings: StateDictSettings) -> None:
    FSDP.set_state_dict_type(
        model, settings.state_dict_type, settings.state_dict_config, settings.optim_state_dict_config
    )


def full_with_orig_params(rank0_only: bool = False) -> StateDictSettings:
    """Settings for full states, offloaded only if this copies them. ``test_offloaded_state_of_original_parameters``
    shows the defect otherwise.
    """
    offload = accelerator.current().has("device_memory")
    optim_config = FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=rank0_only)
    return StateDictSettings(FULL, FullStateDictConfig(), optim_config)


def group_of(ranks: range) -> Group:
    """A new group of these ranks, or None, the default group, if these are all ranks. All ranks must call this."""
    return None if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))


def load_into(optim: torch.optim.Optimizer, osd: dict[str, Any]) -> None:
    """Load copies of the states of ``osd``. ``test_steps_are_apart`` shows the shared step counts that need copies."""
    state = {
        key: {name: value.clone() if torch.is_tensor(value) else value for name, value in each.items()}
        for key, each in osd["state"].items()
    }
    optim.state.clear()
    optim.load_state_dict({**osd, "state": state})


def gathered(state: Any, group: Group = None) -> Any:
    """The state with full tensors instead of shards."""
    return internals.state_dict_utils._gather_state_dict(state, pg=group)


class OptimStateTest(FSDPTest):
    """A test case with models, their training with Adam, and comparisons of saved optimizer states."""

    @property
    def world_size(self) -> int:
        return get_required_world_size(self, 2)

    @classmethod
    def _run(cls, *args: Any, **kwargs: Any) -> None:
        # The older interfaces give deprecation warnings. The test of such a warning catches it itself.
        warnings.filterwarnings("ignore", category=FutureWarning)
        super()._run(*args, **kwargs)

    def _init_nested_model(
        self,
        wrap: Callable[..., None] | None,
        group: Group = None,
        use_multiple_param_groups: bool = False,
        use_diff_optim_inputs: bool = False,
        **fsdp_kwargs: Any,
    ) -> Training:
        """A nested model with Adam, wrapped with FSDP by ``wrap``. With ``use_diff_optim_inputs`` odd ranks pass the
        parameters to Adam in reverse order.
        """
        model = NestedModel().to(self.device)
        if wrap is not None:
            wrap(model, process_group=group, **fsdp_kwargs)
        optim_input = model.optim_input(use_multiple_param_groups, use_diff_optim_inputs and self.rank % 2 == 1)
        return Training(model, torch.optim.Adam(optim_input, lr=0.01), optim_input, group)

    def _loss(self, model: nn.Module, iteration: int, rank: int, size: int) -> torch.Tensor:
        """The mean loss over this rank's rows of the batch. Each of the ``size`` ranks has the same number of rows."""
        seed = 1000 + iteration
        if isinstance(getattr(model, "module", model), TransformerWithSharedParams):
            source, target = torch.randint(23, (10, BATCH), generator=torch.Generator().manual_seed(seed)).split([6, 4])
            ids = [tokens.chunk(size, dim=1)[rank].to(self.device) for tokens in (source, target)]
            return F.cross_entropy(model(*ids).flatten(0, -2), ids[1].flatten())
        rows = normal(BATCH, model.features, seed=seed).chunk(size)[rank].to(self.device)
        return model(rows).sum() / len(rows)

    def _train(self, training: Training, iterations: int = 1) -> list[torch.Tensor]:
        """Train an FSDP model on this rank's rows, or a plain model on all rows. Returns the losses.

        Gradients of parameters outside FSDP instances are averaged here, because FSDP does not reduce them.
        """
        model, instances, group = training.model, FSDP.fsdp_modules(training.model), training.group
        rank, size = (dist.get_rank(group), dist.get_world_size(group)) if instances else (0, 1)
        managed = {param for instance in instances for param in instance.parameters()}
        losses = []
        for _ in range(iterations):
            model.zero_grad()
            loss = self._loss(model, training.iteration, rank, size)
            loss.backward()
            if instances:
                outside = [param for param in model.parameters() if param not in managed]
                average([param.grad for param in outside if param.grad is not None], group)
            training.optim.step()
            training.iteration += 1
            losses.append(loss.detach())
        check_losses(losses)
        return losses

    def _train_alike(self, plain: Training, *wrapped: Training | None, iterations: int = 1) -> None:
        """Train all models that this rank has. The wrapped ones must get the parameters of the plain one."""
        self._train(plain, iterations)
        for each in wrapped:
            if each is not None:
                self._train(each, iterations)
                self.assertEqual(full_parameters(each.model), dict(plain.model.named_parameters()))

    def _check_same_osd(self, found: dict[str, Any], wanted: dict[str, Any], **tolerance: Any) -> None:
        """Both optimizer state dicts must have the same states and parameter groups."""
        self.assertGreater(len(wanted["state"]), 0)
        self.assertEqual(found["state"], wanted["state"], exact_device=False, **tolerance)
        self.assertEqual(found["param_groups"], wanted["param_groups"])

    def _check_saved(
        self,
        osd: dict[str, Any],
        reference: Training,
        group: Group = None,
        rank0_only: bool = False,
    ) -> None:
        """States and parameter groups must equal those of the reference by name. With ``rank0_only`` the state dict
        must be empty on other ranks.
        """
        if rank0_only and dist.get_rank(group) > 0:
            self.assertEqual(osd, {}, may_be="empty")
            return
        names = {param: name for name, param in reference.model.named_parameters()}
        expected = {names[param]: state for param, state in reference.optim.state.items()}
        self.assertGreater(len(expected), 0)
        actual = gathered(copied(osd["state"]), group)
        self.assertEqual(actual, expected, exact_device=False)
        groups = [
            {**each, "params": sorted(names[param] for param in each["params"])}
            for each in reference.optim.param_groups
        ]
        self.assertEqual([{**each, "params": sorted(each["params"])} for each in osd["param_groups"]], groups)

    def _dummy(self, optim_class: type[torch.optim.Optimizer] = torch.optim.Adam, **kwargs: Any) -> Training:
        model = FSDP(TestDummyModel().to(self.device), **kwargs)
        if kwargs.get("use_orig_params"):
            set_state_dict_type(model, full_with_orig_params())
        return Training(model, optim_class(model.parameters(), lr=1e-2))
