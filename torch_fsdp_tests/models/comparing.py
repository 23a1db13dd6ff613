"""Compares a sharded training with a plain one, with tolerances that the model's own rounding decides."""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import torch

from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.models.plain import Step, Tensors, real
from torch_fsdp_tests.models.sharded import Mismatch as Mismatch
from torch_fsdp_tests.models.sharded import Pairs

# Relative tolerances for the dtypes in which both sides compute. Each is far above the rounding of one operation,
# because gradients sum over thousands, and far below any effect of a mistake.
FINEST = 2.0**-6  # in 16 bits
TOLERANCES = {torch.float64: 1e-6, torch.complex128: 1e-6, torch.float32: 1e-3, torch.complex64: 1e-3}
# A tolerance is also this many times the plain model's own distance from float64. Where it would be more than COARSEST,
# as for a bias before a norm, nothing is compared.
MARGIN, COARSEST = 4.0, 0.5
ROUNDINGS = 4  # of a parameter, which each step rounds
# A tensor whose values are below this fraction of the largest of all tensors is compared on the scale of the fraction.
LEAST_SCALE = 1e-2


@dataclasses.dataclass(frozen=True)
class Tolerances:
    """How far values may be off, relative to their size: ``numbers``, and tensors by name, or else also ``numbers``."""

    numbers: float
    gradients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    updates: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def are_coarse(self) -> bool:
        """Whether most tensors cannot be compared."""
        return self.numbers > COARSEST or statistics.median([0.0, *self.gradients.values()]) > COARSEST


def exact(dtypes: Iterable[torch.dtype]) -> Tolerances:
    """Those for computing in these dtypes, if nothing is known about the model's rounding."""
    return Tolerances(max((TOLERANCES.get(dtype, FINEST) for dtype in dtypes), default=FINEST))


def calibrated(plain: Sequence[tuple[Step, Step]], start: Tensors, least: Tolerances) -> Tolerances:
    """The tolerances from steps of the plain model, and of the same model in float64. A collective.

    They are not below ``least``. If the two drew other random numbers, nothing is known about rounding.
    """
    by_rank = of_all_ranks([_off_by_kind(own, high, start) for own, high in plain if own.random == high.random])
    if any(len(found) < len(plain) for found in by_rank):
        return Tolerances(MARGIN * least.numbers) if least.numbers == FINEST else least
    numbers, gradients, changes = zip(*itertools.chain.from_iterable(by_rank))
    finest = least.numbers
    return Tolerances(max(finest, MARGIN * max(numbers)), _by_tensor(gradients, finest), _by_tensor(changes, finest))


def _off_by_kind(low: Step, high: Step, start: Tensors) -> tuple[float, dict[str, float], dict[str, float]]:
    """How far the plain model's numbers, gradients and updates are off in its own precision."""
    pairs = zip([*low.losses, low.eval_loss, low.norm], [*high.losses, high.eval_loss, high.norm], strict=True)
    changes, right = updates(low.parameters, start), updates(high.parameters, start)
    return (
        max(itertools.starmap(_off, pairs)),
        _distances(_pairs(low.gradients, high.gradients), high.gradients),
        _distances(_pairs(changes, right), right),
    )


def _by_tensor(distances: Sequence[Mapping[str, float]], finest: float) -> dict[str, float]:
    """The tolerance of each tensor. One may have been rounded well by chance, so it is at least that of half of all."""
    largest = {name: max(each.get(name, 0.0) for each in distances) for name in set().union(*distances)}
    least = max(finest, MARGIN * statistics.median(largest.values())) if largest else finest
    return {name: max(least, MARGIN * each) for name, each in largest.items()}


def updates(parameters: Tensors, start: Tensors) -> Tensors:
    """What training has changed, because a wrong step is small beside the parameters themselves."""
    return {name: parameters[name] - start[name] for name in parameters}


def _pairs(actual: Tensors, expected: Tensors) -> Pairs:
    return {name: (actual.get(name, torch.zeros_like(value)), value) for name, value in expected.items()}


def check_number(what: str, actual: float, expected: float, tolerance: float) -> None:
    """Raises :class:`Mismatch` if they differ by more than the tolerance, relative to the expected one."""
    if not _off(actual, expected) <= tolerance:
        raise Mismatch(f"{what} is {actual:.7g} and should be {expected:.7g}{_factor(actual, expected)}")


def check_tensors(
    what: str, pairs: Pairs, expected: Tensors, tolerance: float, own_tolerances: Mapping[str, float]
) -> None:
    """Raises :class:`Mismatch` that names the tensors that are off by more than the tolerance, the worst first.

    ``pairs`` may have local shards; ``expected`` are the full tensors, whose sizes decide. Those with an own tolerance
    above :data:`COARSEST` are not compared.
    """
    for name, (actual, wanted) in pairs.items():
        if actual.shape != wanted.shape:
            raise Mismatch(f"{what} {name} has shape {tuple(actual.shape)} and should have {tuple(wanted.shape)}")
    allowed = {name: own_tolerances.get(name, tolerance) for name in pairs}
    off = {name: each for name, each in _distances(pairs, expected).items() if allowed[name] <= COARSEST}
    wrong = sorted((name for name, each in off.items() if not each <= allowed[name]), key=lambda name: -off[name])
    if wrong:
        listed = ", ".join(f"{name} by {off[name]:.2g}" for name in wrong[:3])
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise Mismatch(
            f"{what}: {len(wrong)} of {len(pairs)} tensors are off by more than {allowed[wrong[0]]:.1g} of their size: "
            f"{listed}{more}{_factor_of(*pairs[wrong[0]])}"
        )


def of_updates(tolerances: Tolerances, parameters: Tensors, changes: Tensors) -> dict[str, float]:
    """The tolerances of updates, which are at least the rounding of the parameters."""
    sizes = _sizes(changes)
    rounding = {name: ROUNDINGS * torch.finfo(each.dtype).eps * _largest(each) for name, each in parameters.items()}
    return {
        name: max(tolerances.updates.get(name, tolerances.numbers), min(COARSEST, each / sizes[name]))
        for name, each in rounding.items()
    }


def nearest(actual: Tensors, built: Tensors, saved: Sequence[Tensors]) -> Tensors:
    """What buffers must be after a load: of those that ranks have saved one rank's, and the others as built.

    A checkpoint has a buffer of one rank, and does not say of which.
    """
    choices = {name: [each.get(name, built[name]).to(own.device) for each in saved] for name, own in actual.items()}
    return {name: min(some, key=lambda one: _largest(actual[name] - one)) for name, some in choices.items()}


def _distances(pairs: Pairs, expected: Tensors) -> dict[str, float]:
    """For each name, the largest difference relative to the largest value."""
    sizes = _sizes(expected)
    least = min(sizes.values(), default=1.0)  # for a tensor that only the sharded model has
    return {
        name: _largest(real(actual) - real(wanted)) / sizes.get(name, least) for name, (actual, wanted) in pairs.items()
    }


def _sizes(tensors: Tensors) -> dict[str, float]:
    """The scale of each tensor: its largest value, but at least :data:`LEAST_SCALE` of the largest of all."""
    largest = {name: _largest(tensor) for name, tensor in tensors.items()}
    least = max(LEAST_SCALE * max(largest.values(), default=0.0), 1e-30)
    return {name: max(each, least) for name, each in largest.items()}


def _largest(tensor: torch.Tensor) -> float:
    return tensor.abs().max().item() if tensor.numel() else 0.0


def _off(actual: float, expected: float) -> float:
    return abs(actual - expected) / max(abs(expected), 1e-30)


def _factor(actual: float, expected: float) -> str:
    """Names a simple factor, because a wrong divisor is the most frequent mistake."""
    ratio = actual / expected if expected else math.nan
    near = next((each for each in (0.25, 0.5, 2.0, 4.0, -1.0) if math.isclose(ratio, each, rel_tol=1e-3)), None)
    return f" ({near:g} times)" if near is not None else ""


def _factor_of(actual: torch.Tensor, expected: torch.Tensor) -> str:
    actual, expected = real(actual), real(expected)
    squares = expected.square().sum().item()
    if not squares:
        return ""
    ratio = (actual * expected).sum().item() / squares
    is_multiple = torch.allclose(actual, ratio * expected, rtol=1e-3)
    return _factor(ratio, 1.0) if is_multiple else ""


def moved(pairs: Pairs, start: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> Pairs:
    """The pairs of updates, from the pairs of parameters before and after."""
    return {name: (actual - start[name][1], wanted - start[name][1]) for name, (actual, wanted) in pairs.items()}
