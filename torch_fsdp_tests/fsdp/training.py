"""Trains an FSDP2 model and a plain model side by side, and compares them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests.common_distributed import RankTestCase
from torch_fsdp_tests.common_fsdp.parity import local_parts
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import device_sleep, get_cycles_per_ms, manual_seed
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.distributed._tensor.common_dtensor import ModelArgs, Transformer
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.optimizers import ShardAdam
from torch_fsdp_tests.fsdp.references import average_gradients, full, named

# One step without earlier gradients, and one after each way to zero them, with moments from the steps before.
ITERATIONS = 3
# For tests with many parameter sets: the second step has gradients and moments from the first.
FEW = 2


def tiny_transformer(**changes: Any) -> Transformer:
    """A transformer of three layers without dropout; ``changes`` are arguments of ``ModelArgs``."""
    return Transformer(ModelArgs(**{"n_layers": 3, "dropout_p": 0.0, **changes}))


def shard_each(modules: Iterable[Any], **kwargs: Any) -> Any:
    """Call ``fully_shard`` with each module, or list of modules, in turn. Returns the last, which is the root."""
    for module in modules:
        fully_shard(module, **kwargs)
    return module


def replicate_each(modules: Iterable[Any], **kwargs: Any) -> Any:
    """Like :func:`shard_each`, with FSDP2's ``replicate``: each rank keeps whole parameters."""
    for module in modules:
        internals.replicate_on_fsdp2.replicate(module, **kwargs)
    return module


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A loss that pulls outputs towards one. With a sum, ReLUs would die, and ranks would have equal bias gradients.

    It is a mean, because the rounding of gradients in the hundreds would exceed the default tolerances.
    """
    return (output - 1).square().mean(dtype=torch.float32)


def backward(loss: torch.Tensor) -> torch.Tensor:
    """Run the backward of a loss. Returns the loss, detached."""
    loss.backward()
    return loss.detach()


def train(model: nn.Module, batch: Any) -> torch.Tensor:
    """Make gradients from one batch. Returns the loss, detached."""
    return backward(loss_of(model(batch)))


def accumulating(model: nn.Module, mark: Callable[[bool], object]) -> Callable[[nn.Module, Any], torch.Tensor]:
    """A :func:`train` for batches of microbatches. It calls ``mark(model, is_last)`` before each microbatch."""

    def step(each: nn.Module, microbatches: list[torch.Tensor]) -> torch.Tensor:
        losses = []
        for index, microbatch in enumerate(microbatches, 1):
            if each is model:
                mark(index == len(microbatches))
            losses.append(train(each, microbatch))
        return torch.stack(losses)

    return step


def optimizers(*models: nn.Module, cls: type = ShardAdam, **kwargs: Any) -> list[torch.optim.Optimizer]:
    """One optimizer for each model. ``kwargs`` go to the optimizers, beside the learning rate."""
    # With the default eps, Adam would turn the rounding of a gradient near zero into a whole step.
    kwargs |= {"lr": 1e-2} if cls is torch.optim.SGD else {"lr": 1e-2, "eps": 1e-3}
    return [cls(model.parameters(), **kwargs) for model in models]


def take_step(optims: Iterable[torch.optim.Optimizer], set_to_none: bool = True) -> None:
    """Step the optimizers, and clear the gradients."""
    for optim in optims:
        optim.step()
        optim.zero_grad(set_to_none=set_to_none)


def check_parity(
    test: Any,
    ref_model: nn.Module,
    model: nn.Module,
    what: tuple[str, ...] = ("parameter", "gradient"),
    **tolerance: Any,
) -> None:
    """Compare this rank's part of an FSDP2 model with the same shards of another model, all at once.

    The other model is a plain one or an FSDP2 model. Compares parameters and gradients, unless ``what`` names only
    one of them. A gradient may be missing from both. The check is like ``check_sharded_parity``, but one comparison of
    all parts takes as long as that of two.
    """
    actual, expected = local_parts(test, named(ref_model), named(model), what)
    _check_at_once(test, actual, expected, **tolerance)


def check_gradients(test: Any, ref_model: nn.Module, model: nn.Module) -> None:
    """Like :func:`check_parity`, for gradients only."""
    check_parity(test, ref_model, model, what=("gradient",))


def _check_at_once(
    test: Any, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], **tolerance: Any
) -> None:
    """Compare tensors of one dtype all at once, which takes as long as the comparison of two."""
    test.assertGreater(len(actual), 0)
    layouts = [{name: (tensor.shape, tensor.dtype) for name, tensor in each.items()} for each in (actual, expected)]
    test.assertEqual(*layouts)
    test.assertEqual(len({dtype for _, dtype in layouts[0].values()}), 1)
    flat = [torch.cat([tensor.flatten().to(test.device) for tensor in each.values()]) for each in (actual, expected)]
    try:
        test.assertEqual(*flat, may_be="empty", **tolerance)  # a rank may have no rows
    except AssertionError:
        for name, tensor in actual.items():
            test.assertEqual(tensor, expected[name], msg=name, **tolerance)
        raise


def check_full(test: Any, ref_model: nn.Module, model: nn.Module) -> None:
    """Each parameter's full tensor must equal that of the plain model. A collective."""
    refs, params = dict(ref_model.named_parameters()), dict(model.named_parameters())
    test.assertEqual(list(refs), list(params))
    actual = {name: full(param.detach()) for name, param in params.items()}
    test.assertEqual(actual, {name: param.detach() for name, param in refs.items()})


@dataclasses.dataclass(frozen=True)
class Loop:
    """How a plain model and an FSDP2 model are trained side by side, and compared.

    ``step`` makes the gradients of either model and returns its losses. ``average`` turns the plain model's gradients
    into those that FSDP computes. ``compare`` gets the test and both models before each step, and once after the last;
    None compares only losses. Ranks with the same ``data_rank`` share their data.
    """

    step: Callable[[nn.Module, Any], torch.Tensor] = train
    average: Callable[[nn.Module], None] = average_gradients
    compare: Callable[[Any, nn.Module, nn.Module], None] | None = check_parity
    data_rank: int | None = None
    iterations: int = ITERATIONS


class TrainingMixin(RankTestCase):
    """For a test case with ranks (threads or processes): models, data, and the comparison of two trainings."""

    def _mesh(self, *shape: int, names: tuple[str, ...] = ("replicate", "shard")) -> DeviceMesh:
        """A single dimension shards; of two dimensions, the first one replicates. For other meshes pass ``names``."""
        return make_mesh(*shape, names=names[-len(shape) :])

    def _replica(self, model: nn.Module) -> Any:
        """A copy of the plain model, on the device."""
        return copy.deepcopy(model).to(self.device)

    def _seed(self, data_rank: int | None = None) -> None:
        """Use different random numbers on each rank from here on. Ranks with the same ``data_rank`` use the same."""
        manual_seed(42 + (self.rank if data_rank is None else data_rank) + 1)

    def _inputs(self, *shape: int, **kwargs: Any) -> torch.Tensor:
        return torch.randn(shape, device=self.device, **kwargs)

    def _tokens(self, *shape: int, vocab_size: int = 8) -> torch.Tensor:
        return torch.randint(0, vocab_size, shape, device=self.device)

    def _sleep(self, milliseconds: float) -> None:
        """Sleep; odd ranks sleep twice as long. A millisecond is enough if nothing of the rank runs in parallel."""
        kind = accelerator.current().type
        milliseconds = milliseconds if accelerator.current().has("streams") else 1
        device_sleep(kind, int(milliseconds * (1 + self.rank % 2) * get_cycles_per_ms(kind)))

    def _check_training(
        self,
        ref_model: nn.Module,
        model: nn.Module,
        next_batch: Callable[[], Any],
        loop: Loop = Loop(),
        optims: Sequence[torch.optim.Optimizer] | None = None,
    ) -> None:
        """Train both models on each rank's own data, and compare losses, gradients and parameters.

        ``optims`` has the optimizer of each model, by default those of :func:`optimizers`.
        """
        start = [param.detach().clone() for param in ref_model.parameters()]
        optims = optimizers(ref_model, model) if optims is None else optims
        self._seed(loop.data_rank)
        ref_losses = []
        for iteration in range(loop.iterations):
            batch = next_batch()
            for optim in optims:
                optim.zero_grad(set_to_none=iteration % 2 == 0)
            ref_losses.append(loop.step(ref_model, batch))
            loop.average(ref_model)
            self.assertEqual(loop.step(model, batch), ref_losses[-1])
            if loop.compare is not None:
                loop.compare(self, ref_model, model)
            for optim in optims:
                optim.step()
        if loop.compare is not None:
            loop.compare(self, ref_model, model)
        check_losses(ref_losses)
        self.assertFalse(all(map(torch.equal, start, ref_model.parameters())), "nothing was trained")
