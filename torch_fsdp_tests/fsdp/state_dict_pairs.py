"""Pairs of a distributed and a plain model, and comparisons of their state dicts."""

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
from torch_fsdp_tests.common_utils import manual_seed
from torch_fsdp_tests.distributed.common_state_dict import EXACT, StateDict, VerifyStateDictMixin
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import fused_on_host
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.seeded import uniform
from torch_fsdp_tests.fsdp.training import shard_each, train


def optimizer(cls: type, params: Iterable[Any], **settings: Any) -> Any:
    """An optimizer whose hyperparameters differ from the defaults. ``settings`` replace them."""
    # With the default eps, the rounding error of a gradient near zero would change Adam's step by its full size.
    adam = {} if issubclass(cls, torch.optim.SGD) else {"eps": 1e-3, "weight_decay": 0.1, **fused_on_host()}
    return cls(params, lr=0.02, **(adam | settings))


@dataclasses.dataclass(frozen=True)
class Optimizers:
    """The class and the settings of a pair's optimizers. ``split`` returns the parameters of each one of a model."""

    cls: type = torch.optim.Adam
    split: Callable[[Any], Sequence[Iterable[nn.Parameter]]] = lambda model: [model.parameters()]
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def of(self, params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """One optimizer, of these parameters."""
        return optimizer(self.cls, params, **self.settings)


@dataclasses.dataclass
class ModelPair:
    """A distributed model and a plain model, each with its optimizers."""

    ref_model: nn.Module
    ref_optim: torch.optim.Optimizer
    model: Any
    optims: list[torch.optim.Optimizer]
    data_rank: int
    width: int

    def train(self, steps: range) -> None:
        """Train both models. Ranks with different ``data_rank`` have different batches."""
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
        """The model and optimizer state dicts of the distributed model."""
        return get_state_dict(self.model, self.optims, options=options)

    def load(self, msd: StateDict, osd: StateDict, options: StateDictOptions | None = None) -> Any:
        """Load both state dicts into the distributed model and optimizers. Returns the missing and unexpected keys."""
        if options is not None and options.broadcast_from_rank0:
            # set_state_dict would load no model on the other ranks, whose model state dict is empty.
            set_optimizer_state_dict(self.model, self.optims, osd, options=options)
            return set_model_state_dict(self.model, msd, options=options)
        return set_state_dict(self.model, self.optims, model_state_dict=msd, optim_state_dict=osd, options=options)


class StateDictTest(VerifyStateDictMixin, FSDPTest):
    """A test case that compares pairs of models. It has two ranks, unless a test requests more."""

    @property
    def world_size(self) -> int:
        """The argument of ``requires_world_size``, or 2."""
        return get_required_world_size(self, 2)

    def _pair(
        self,
        plain: nn.Module,
        distribute: Callable[[Any], Any],
        optimizers: Optimizers = Optimizers(),
        *,
        width: int,
        data_rank: int | None = None,
    ) -> ModelPair:
        """The plain model, and a copy to which ``distribute`` was applied. By default each rank has its own data."""
        model = distribute(copy.deepcopy(plain))
        optims = [optimizers.of(params) for params in optimizers.split(model)]
        data_rank = self.rank if data_rank is None else data_rank
        return ModelPair(plain, optimizers.of(plain.parameters()), model, optims, data_rank, width)

    def _verify_pair(self, pair: ModelPair, msd: StateDict, osd: StateDict, **kwargs: Any) -> None:
        """Compare both state dicts with those of the plain model; ``kwargs`` are those of :meth:`_verify_msd`."""
        self._verify_msd(pair.ref_model.state_dict(), msd, **kwargs)
        self._verify_osd(pair.ref_model, pair.ref_optim, pair.ref_optim.state_dict(), osd)

    def _compare_states(self, found: StateDict, wanted: StateDict) -> None:
        """Compare nested optimizer state dicts bitwise. ``betas`` may be a list instead of a tuple, a known defect."""
        self.assertEqual(found["state"], wanted["state"], **EXACT)
        for group, wanted_group in zip(found["param_groups"], wanted["param_groups"], strict=True):
            self.assertEqual({**group, "betas": tuple(group["betas"])}, wanted_group)


class StateDictOptionsTest(StateDictTest):
    """Pairs of small models, and the state dict that each rank loads."""

    def _plain(self, seed: int = 0) -> nn.Sequential:
        """Two layers with unequal shards."""
        manual_seed(seed)
        return nn.Sequential(nn.Linear(4, 5, device=self.device), nn.Linear(5, 4, device=self.device))

    def _layers(self, model: Any) -> Any:
        return shard_each((*model.children(), model), mesh=make_mesh(self.world_size))

    def _small(self, seed: int = 0, optim_cls: type = torch.optim.Adam, trained: bool = True) -> ModelPair:
        pair = self._pair(self._plain(seed), self._layers, Optimizers(optim_cls), width=4)
        if trained:
            pair.train(range(2))
            for optim in pair.optims:
                optim.zero_grad()
        return pair

    def _on_rank_0(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The argument for ``broadcast_from_rank0``: the state dict on rank 0, and nothing on other ranks."""
        return state_dict if self.rank == 0 else {}

    def _given(self, state_dict: dict[str, Any], options: StateDictOptions) -> dict[str, Any]:
        """This rank's state dict for a load with these options."""
        return self._on_rank_0(state_dict) if options.broadcast_from_rank0 else state_dict
