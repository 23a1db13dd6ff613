"""Pairs of models, a distributed and a plain one, and the comparison of their state dicts."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from torch_fsdp_tests.common_distributed import get_required_world_size
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.distributed.common_state_dict import EXACT, StateDict, VerifyStateDictMixin
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.training import train


def optimizer(cls: type, params: Iterable[Any], **settings: Any) -> Any:
    """An optimizer with settings that differ from the defaults."""
    # With the default eps, Adam would turn the rounding of a gradient near zero into a whole step.
    adam = {} if issubclass(cls, torch.optim.SGD) else {"eps": 1e-3, "weight_decay": 0.1, **fused_on_host()}
    return cls(params, lr=0.02, **(adam | settings))


@dataclasses.dataclass
class Pair:
    """A distributed model and a plain model, each with its optimizers."""

    ref_model: nn.Module
    ref_optim: torch.optim.Optimizer
    model: Any
    optims: list[torch.optim.Optimizer]
    data_rank: int
    width: int

    def train(self, steps: range) -> None:
        """Train both. Each rank has its own batches, except that ranks with the same ``data_rank`` share them."""
        ref_losses = []
        for step in steps:
            batch = uniform(4, self.width, seed=100 * step + self.data_rank)
            for model, optims in ((self.ref_model, [self.ref_optim]), (self.model, self.optims)):
                for optim in optims:
                    optim.zero_grad()
                loss = train(model, batch)
                if model is self.ref_model:
                    ref_losses.append(loss)
                    average_gradients(model)
                for optim in optims:
                    optim.step()
        check_losses(ref_losses)

    def states(self, options: StateDictOptions | None = None) -> tuple[StateDict, StateDict]:
        """Both state dicts of the distributed side."""
        return get_state_dict(self.model, self.optims, options=options)

    def load(self, msd: StateDict, osd: StateDict, options: StateDictOptions | None = None) -> Any:
        """Load both into the distributed side. Returns the keys that did not match."""
        if options is not None and options.broadcast_from_rank0:
            # set_state_dict would take another rank's empty dict for a request to load no model.
            set_optimizer_state_dict(self.model, self.optims, osd, options=options)
            return set_model_state_dict(self.model, msd, options=options)
        return set_state_dict(self.model, self.optims, model_state_dict=msd, optim_state_dict=osd, options=options)


class StateDictTest(VerifyStateDictMixin, FSDPTest):
    """A test case that compares pairs of models. It has two ranks, unless a test requests more."""

    @property
    def world_size(self) -> int:
        """2, or what ``requires_world_size`` says."""
        return get_required_world_size(self, 2)

    def _pair(
        self,
        plain: nn.Module,
        distribute: Callable[[Any], Any],
        optim_cls: type = torch.optim.Adam,
        split: Callable[[Any], Sequence[Iterable[nn.Parameter]]] = lambda model: [model.parameters()],
        settings: Mapping[str, Any] = {},
        **kwargs: Any,
    ) -> Pair:
        """The plain model, and a copy to which ``distribute`` was applied, with one optimizer for each part of it.
        ``settings`` are those of the optimizers.
        """
        model = distribute(copy.deepcopy(plain))
        optims = [optimizer(optim_cls, params, **settings) for params in split(model)]
        kwargs = {"data_rank": self.rank, **kwargs}
        return Pair(plain, optimizer(optim_cls, plain.parameters(), **settings), model, optims, **kwargs)

    def _verify_pair(self, pair: Pair, msd: StateDict, osd: StateDict, **kwargs: Any) -> None:
        """Compare both state dicts with those of the plain model; ``kwargs`` are those of :meth:`_verify_msd`."""
        self._verify_msd(pair.ref_model.state_dict(), msd, **kwargs)
        self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), osd)

    def _compare_states(self, found: StateDict, wanted: StateDict) -> None:
        """Compare nested state dicts of optimizers bit for bit. Lists instead of tuples are a known defect."""
        self.assertEqual(found["state"], wanted["state"], **EXACT)
        for group, wanted_group in zip(found["param_groups"], wanted["param_groups"], strict=True):
            self.assertEqual({**group, "betas": tuple(group["betas"])}, wanted_group)
