"""Recorders of what FSDP2 does: custom collectives, and the events of its parameter groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torch_fsdp_tests.common_fsdp import patch_post_backward, patch_reshard, patch_unshard
from torch_fsdp_tests.distributed._tensor.common_dtensor import Transformer
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import TrainingMixin, check_gradients, check_parity, optimizers, take_step

from .communication import shard_blocks, tokens, transformer

Reshard = bool | int | None


class RecordingAllGather:
    """For ``set_custom_all_gather``. Records the dtype and size of each output, and the size of its group."""

    def __init__(self) -> None:
        self._gather = internals.fsdp2_collectives.DefaultAllGather()
        self.allocate = self._gather.allocate
        self.outputs: list[tuple[torch.dtype, int, int]] = []

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> Any:
        self.outputs.append((output_tensor.dtype, output_tensor.numel(), group.size()))
        return self._gather(output_tensor, input_tensor, group, async_op)


class RecordingReduceScatter:
    """For ``set_custom_reduce_scatter``. Keeps copies of each input and output."""

    def __init__(self) -> None:
        self._reduce_scatter = internals.fsdp2_collectives.DefaultReduceScatter()
        self.allocate = self._reduce_scatter.allocate
        self.inputs: list[torch.Tensor] = []
        self.outputs: list[torch.Tensor] = []

    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, op: Any, **kwargs: Any
    ) -> Any:
        self.inputs.append(input_tensor.clone())
        work = self._reduce_scatter(output_tensor, input_tensor, group, op, **kwargs)
        self.outputs.append(output_tensor.clone())
        return work


class PrefetchMixin(TrainingMixin):
    """Checks the order in which parameter groups are unsharded, resharded and reduced.

    An event has a letter for what happens (U: the group is unsharded, R: it is resharded, P: its backward is over), a
    letter for the group's state (f: in forward, b: before its backward, none: after it), and the group. The group is
    "root", the number of a transformer's block, or a module's name; several modules of one group are joined by "+".
    """

    def _note(self, events: list[str], kind: str, group: internals.Group) -> None:
        stages = internals.fsdp2_common.TrainingState
        states = {stages.FORWARD: "f", stages.PRE_BACKWARD: "b", stages.POST_BACKWARD: ""}
        name = internals.clean_name(group._module_fqn or "root").replace("layers.", "")
        events.append(f"{kind}{states.get(internals.training_state(group), '?')} {name.replace(', ', '+')}")

    @contextlib.contextmanager
    def _recorded(self, kinds: str) -> Iterator[list[str]]:
        events: list[str] = []
        owner = internals.fsdp2_param_group.FSDPParamGroup
        original = {"U": owner.unshard, "R": owner.reshard, "P": owner.post_backward}

        def unshard(group: internals.Group, *args: Any, **kwargs: Any) -> None:
            if internals.pending_gather(group) is None and not group.is_unsharded:
                self._note(events, "U", group)
            original["U"](group, *args, **kwargs)

        def reshard(group: internals.Group, *args: Any, **kwargs: Any) -> None:
            in_forward = internals.training_state(group) == internals.fsdp2_common.TrainingState.FORWARD
            if group._reshard_after_forward or not in_forward:
                self._note(events, "R", group)
            original["R"](group, *args, **kwargs)

        def post_backward(group: internals.Group, *args: Any, **kwargs: Any) -> None:
            original["P"](group, *args, **kwargs)
            self._note(events, "P", group)

        patches = {
            "U": (patch_unshard, unshard),
            "R": (patch_reshard, reshard),
            "P": (patch_post_backward, post_backward),
        }
        with contextlib.ExitStack() as stack:
            for patch, replacement in map(patches.__getitem__, kinds):
                stack.enter_context(patch(replacement))
            yield events

    def _check_events(self, events: list[str], expected: str) -> None:
        self.assertEqual(events, expected.split(", ") if expected else [], may_be="empty")
        events.clear()

    def _check_training_events(
        self,
        ref_model: nn.Module,
        model: nn.Module,
        loss_of: Callable[[nn.Module, int], torch.Tensor],
        forward: str,
        backward: str,
        kinds: str = "UP",
        steps: int = 3,
    ) -> None:
        """Check that each step has these events, and the same gradients and updates as the replica."""
        optims = optimizers(ref_model, model)
        with self._recorded(kinds) as events:
            for step in range(steps):
                loss = loss_of(model, step)
                self._check_events(events, forward)
                loss.backward()
                self._check_events(events, backward)
                ref_loss = loss_of(ref_model, step)
                ref_loss.backward()
                average_gradients(ref_model)
                self.assertEqual(loss, ref_loss)
                check_gradients(self, ref_model, model)
                take_step(optims)
        check_parity(self, ref_model, model)

    def _init_transformer(
        self, n_layers: int, reshard_after_forward: Reshard, checkpoint_impl: str | None
    ) -> tuple[Transformer, Any]:
        """Return a plain replica, and a model whose blocks and root are wrapped.

        ``checkpoint_impl`` is the model's activation checkpointing: "utils", "composable" or None.
        """
        args = {"n_layers": n_layers, "weight_tying": True}
        ref_model = transformer(self.device, **args)
        model = transformer(self.device, **args, checkpoint_activations=checkpoint_impl == "utils")
        if checkpoint_impl == "composable":
            for block in model.layers:
                internals.composable.checkpoint(block)
        return ref_model, shard_blocks(model, reshard_after_forward=reshard_after_forward)

    def _loss(self, model: nn.Module, step: int) -> torch.Tensor:
        return model(tokens(self.rank, step, self.device)).sum()
