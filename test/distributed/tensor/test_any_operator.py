"""Operators that training uses, on DTensors: the same values and gradients as on plain tensors.

``torch_fsdp_tests/fsdp/operators.py`` has the operators, their arguments, and the layouts of their tensors.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import loss_parallel
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorOpTestBase, DTensorTestBase, with_comms
from torch_fsdp_tests.fsdp import operators
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.operators import KNOWN, ROWS, Case, Known, OperatorRow, distributed, part_of
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.installed_torch import torch_facts

# Rows with other numbers begin with other layouts and sizes. With other cases, more differences of torch may show.
FIRST = 1234


class OperatorMixin(TestCase):
    def _check_rows(self, kind: str, mesh: DeviceMesh) -> None:
        """Check some cases of each row, the same in every run. The failure names all cases that differ."""
        failed: list[str] = []
        for index, row in enumerate(ROWS[kind], FIRST):
            wanted = operators.enough(kind, row, index, mesh)
            accepted = tried = 0
            for number, group in enumerate(operators.cases(row, index, mesh), index):
                if accepted == wanted:
                    break
                tried += 1
                passed = [self._passes(row, number, case, mesh, failed) for case in group]
                accepted += any(passed)
            if tried and not accepted:
                failed.append(f"{row.name}: DTensor accepts no case")
        if failed:
            raise self.failureException("\n".join([f"{len(failed)} cases differ from those of plain tensors", *failed]))

    def _passes(self, row: OperatorRow, number: int, case: Case, mesh: DeviceMesh, failed: list[str]) -> bool:
        try:
            return self._check_case(row, number, case, mesh)
        except self.failureException as error:
            failed.append(f"{describe(row, case, mesh)}: {error}")
            return True
        except Exception as error:
            # Other ranks may be in a collective, so this rank cannot go on.
            raise self.failureException(f"{describe(row, case, mesh)} raises {error!r}") from error

    def _check_case(self, row: OperatorRow, number: int, case: Case, mesh: DeviceMesh) -> bool:
        """False if DTensor refuses the case, as it documents. ``number`` chooses values and layouts of gradients."""
        plain = [operators.filled(word, case.sizes, seed=7 * number + at) for at, word in enumerate(row.inputs)]
        actual = [distributed(each, mesh, layout) for each, layout in zip(plain, case.layouts, strict=True)]
        for word, whole, tensor in zip(row.inputs, plain, actual, strict=True):
            is_trained = row.has_gradient and operators.is_trained(word)
            whole.requires_grad_(is_trained)
            tensor.requires_grad_(is_trained)
        expected = self._computed(row, case, plain, lambda seed, result: seed)
        try:
            found = self._computed(row, case, actual, lambda seed, result: self._spread(seed, result, mesh, number))
        except RuntimeError as error:
            if row.refuses and re.search(row.refuses, str(error)):
                return False
            raise
        found = {name: _without_partial(value) for name, value in found.items()}
        # From here on there is no collective, so a rank that differs alone does not stop the others.
        self.assertEqual(list(found), list(expected))
        for name, value in expected.items():
            self._check_value(found[name], value, mesh, name)
        return True

    def _computed(self, row: OperatorRow, case: Case, tensors: Sequence[torch.Tensor], spread: Any) -> dict[str, Any]:
        """The results, and the gradients of the tensors. ``spread`` makes the gradient of a result."""
        results = tree_leaves(row.call(*tensors, **case.args))
        outcome = {f"result {at}": result for at, result in enumerate(results)}
        learned = [at for at, result in enumerate(results) if isinstance(result, torch.Tensor) and result.requires_grad]
        if learned:
            seeds = [operators.uniform(*results[at].shape, seed=at).to(results[at].dtype) + 0.5 for at in learned]
            grads = torch.autograd.grad(
                [results[at] for at in learned],
                [tensor for tensor in tensors if tensor.requires_grad],
                [spread(seed, results[at]) for seed, at in zip(seeds, learned, strict=True)],
                allow_unused=True,
            )
            outcome |= {f"gradient {at}": grad for at, grad in enumerate(grads)}
        return outcome

    def _spread(self, seed: torch.Tensor, result: DTensor, mesh: DeviceMesh, number: int) -> DTensor:
        """The gradient of a result has its layout, or is replicated."""
        everywhere = number % 2 == 1
        layout = tuple(Replicate() if everywhere or each.is_partial() else each for each in result.placements)
        return distributed(seed, mesh, layout)

    def _check_value(self, actual: Any, expected: Any, mesh: DeviceMesh, what: str) -> None:
        if not isinstance(expected, torch.Tensor):
            self.assertEqual(actual, expected, what)
            return
        self.assertIsInstance(actual, DTensor, what)
        found, right = ((each.shape, each.stride(), each.dtype) for each in (actual, expected))
        self.assertEqual(found, right, f"global shape and strides of {what}")
        self.assertEqual(actual.device_mesh, mesh)
        mine = part_of(expected.detach(), mesh, actual.placements)
        local = actual.to_local().detach()
        self.assertEqual(local, mine, f"{what}, as {actual.placements}", may_be=("empty", "zero", "small"))
        if what.startswith("result") and actual.is_contiguous():  # loss_parallel permutes a gradient
            self.assertTrue(local.is_contiguous(), f"{what} has gaps: strides of {local.stride()}")


def _without_partial(value: Any) -> Any:
    """A value with its partial sums added up."""
    if isinstance(value, DTensor) and any(each.is_partial() for each in value.placements):
        layout = [Replicate() if each.is_partial() else each for each in value.placements]
        return value.detach().redistribute(placements=layout)
    return value


def describe(row: OperatorRow, case: Case, mesh: DeviceMesh) -> str:
    tensors = [
        f"{operators.shape_of(word, case.sizes)} as {''.join(map(str, layout))}"
        for word, layout in zip(row.inputs, case.layouts, strict=True)
    ]
    args = ", ".join(f"{name}={value}" for name, value in case.args.items())
    return f"{row.name}({', '.join(tensors)}; {args}) on mesh {tuple(mesh.shape)}"


@needs(torch_facts.COMPUTES_AS_PLAIN_TENSORS)
class TestOperators(OperatorMixin, DTensorOpTestBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @parametrize("kind", list(ROWS))
    def test_on_one_dimension(self, kind):
        self._check_rows(kind, make_mesh(2))

    @skip_if_lt_x_gpu(2)
    @subtests(known=KNOWN)
    def test_known_differences(self, known):
        """What the table leaves out differs as it says. A difference that is gone is a failure in strict mode only."""
        shown = self._difference(known)
        if shown:
            self.assertRegex(shown, known.error, known.why)
        if settings.is_on(settings.STRICT_DEFECTS_VARIABLE, os.environ):
            self.assertTrue(any(of_all_ranks(shown)), f"no longer differs: {known.why}; move it to the rows")

    def _difference(self, known: Known) -> str:
        """How this rank's DTensor differs from a plain tensor, or an empty string."""
        try:
            self._check_case(known.row, known.seed, Case({}, known.sizes, known.layouts), make_mesh(2))
        except Exception as error:
            return str(error)
        return ""


@needs(torch_facts.COMPUTES_AS_PLAIN_TENSORS)
class TestOperatorsOnPlanes(OperatorMixin, DTensorOpTestBase):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    @parametrize("kind", list(ROWS))
    def test_on_two_dimensions(self, kind):
        self._check_rows(kind, make_mesh(2, 2))


# The layouts of the logits and of the targets. One mesh dimension shards the classes.
CLASSES, NOWHERE = Shard(1), Replicate()
LOGITS = {
    "classes": ((CLASSES,), (NOWHERE,)),
    "rows, classes": ((Shard(0), CLASSES), (Shard(0), NOWHERE)),
    "classes, rows": ((CLASSES, Shard(0)), (NOWHERE, Shard(0))),
    "replicas, classes": ((NOWHERE, CLASSES), (NOWHERE, NOWHERE)),
    "columns, classes": ((Shard(2), CLASSES), (Shard(1), NOWHERE)),
}


def is_loss_parallel(layout: str, sizes: str, is_cube: bool, counted: tuple[str, int], **others: Any) -> bool:
    """Whether torch documents that it has the loss, and whether there is one: the mean of no values is not a number."""
    reduction, ignore_index = counted
    has_columns = is_cube or layout != "columns, classes"
    return has_columns and (reduction != "mean" or (layout == "classes" and (sizes, ignore_index) != ("small", 0)))


@needs(torch_facts.COMPUTES_AS_PLAIN_TENSORS)
class TestLossParallel(OperatorMixin, DTensorTestBase):
    """In processes, because ``loss_parallel`` is global."""

    world_size = 4

    @with_comms
    @skip_if_lt_x_gpu(4)
    @subtests(
        pairwise=True,
        valid=is_loss_parallel,
        layout=list(LOGITS),
        sizes=list(operators.SIZES),
        is_cube=[False, True],
        counted=[(reduction, index) for reduction in ("mean", "sum", "none") for index in (-100, 0)],
        weighted=[False, True],
    )
    def test_cross_entropy(self, layout, sizes, is_cube, counted, weighted):
        reduction, ignore_index = counted

        def loss(x: torch.Tensor, target: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            chosen = weight if weighted else None
            return F.cross_entropy(x, target, chosen, reduction=reduction, ignore_index=ignore_index)

        logits, target = LOGITS[layout]
        whole = make_mesh(2, 2, names=("outer", "inner"))  # with four parts, some ranks had no class, which raises
        mesh = whole if len(logits) == 2 else whole["inner"]
        case = Case({}, sizes, (logits, target, (NOWHERE,) * mesh.ndim))
        words = ("abc", "b<ac", "=b") if is_cube else ("ab", "b<a", "=b")
        with loss_parallel():
            self._check_case(operators.row("cross_entropy", loss, *words), 3, case, mesh)

    @with_comms
    @skip_if_lt_x_gpu(4)
    def test_exception_inside(self):
        """Torch stays in ``loss_parallel`` after an exception. The next context ends both."""
        mesh = make_mesh(4)
        case = Case({}, "even", ((NOWHERE,), (NOWHERE,)))
        replicated = operators.row("cross_entropy", F.cross_entropy, "ab", "b<a")
        with self.assertRaisesRegex(ValueError, "loss_parallel"), loss_parallel():
            self._check_case(replicated, 0, case, mesh)
        with loss_parallel():
            pass
        self._check_case(replicated, 0, case, mesh)


class CalledOperators(TorchDispatchMode):
    """Collects the names of the operators that are called inside of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


# These make new tensors, do not compute with tensors, or have no rule in DTensor. Of index_put_, see KNOWN.
NOT_COMPARED = re.compile(
    r"detach|alias|_to_copy|empty|ones|zeros|uniform_|lift_fresh|_record_\w*|_local_scalar_dense|_foreach_copy_|index_put_"
)


@needs(torch_facts.COMPUTES_AS_PLAIN_TENSORS)
class TestTable(TestCase):
    def test_has_what_optimizers_call(self):
        """The table calls each operator that an optimizer calls, in a loop or for all parameters at once."""
        in_table = CalledOperators()
        with in_table:
            for each in (each for kind in ROWS.values() for each in kind):
                tensors = [operators.filled(word, "even", seed=at) for at, word in enumerate(each.inputs)]
                each.call(*tensors, **each.args[0])
        called = CalledOperators()
        with called:
            for kind in optimizers_of_torch():
                for foreach in (False, True):
                    train(kind, foreach)
        missing = {name for name in called.names - in_table.names if not NOT_COMPARED.fullmatch(name)}
        self.assertEqual(sorted(missing), [], may_be="empty")


def optimizers_of_torch() -> list[Any]:
    """The optimizers that take ``foreach``."""
    kinds = [each for each in vars(torch.optim).values() if isinstance(each, type)]
    return [kind for kind in kinds if "foreach" in inspect.signature(kind).parameters]


def train(kind: Any, foreach: bool) -> None:
    """Two steps on a small model, with clipped gradients."""
    model = nn.Linear(2, 3)
    optim = kind(model.parameters(), foreach=foreach)
    for _ in range(2):
        model(torch.ones(1, 2)).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)
        optim.step()
        optim.zero_grad()


instantiate_parametrized_tests(TestOperators)
instantiate_parametrized_tests(TestOperatorsOnPlanes)

if __name__ == "__main__":
    run_tests()
