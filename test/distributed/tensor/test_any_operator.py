"""Operators that training uses, on DTensors: the same values and gradients as on plain tensors.

``torch_fsdp_tests/fsdp/operators.py`` has the operators, their arguments, and the layouts of their tensors.
"""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, run_tests
from torch_fsdp_tests.common_utils.seed import seed_of_run
from torch_fsdp_tests.distributed._tensor.common_dtensor import DTensorOpTestBase
from torch_fsdp_tests.fsdp import operators
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.operators import KNOWN, ROWS, Case, Row, distributed, part_of
from torch_fsdp_tests.fsdp.references import of_all_ranks


class OperatorMixin(DTensorOpTestBase):
    def _check_rows(self, mesh: DeviceMesh) -> None:
        """Check some cases of each row, or all if slow tests run. The failure names all cases that differ."""
        failed: list[str] = []
        rows = ROWS
        if os.environ.get("KIND"):
            rows = {os.environ["KIND"]: ROWS[os.environ["KIND"]]}
        for index, row in enumerate(itertools.chain(*rows.values()), seed_of_run()):
            accepted = 0
            import time

            T = time.process_time()
            for group in operators.cases(row, index, mesh, TEST_WITH_SLOW):
                passed = [self._passes(row, index, case, mesh, failed) for case in group]
                accepted += any(passed)
                if accepted == operators.enough(row, mesh) and not TEST_WITH_SLOW:
                    break
            if os.environ.get("TIMES") and self.rank == 0:
                print("TIME", round(time.process_time() - T, 3), row.name, flush=True)
            if not accepted:
                failed.append(f"{row.name}: DTensor accepts no case")
        if failed:
            raise self.failureException("\n".join([f"{len(failed)} cases differ from those of plain tensors", *failed]))

    def _passes(self, row: Row, index: int, case: Case, mesh: DeviceMesh, failed: list[str]) -> bool:
        try:
            return self._check_case(row, index, case, mesh)
        except self.failureException as error:
            failed.append(f"{describe(row, case, mesh)}: {error}")
            return True
        except Exception as error:
            if os.environ.get("DEV"):
                failed.append(f"{describe(row, case, mesh)}: EXC {error!r}"[:500])
                return True
            # Other ranks may be in a collective, so this rank cannot go on.
            raise self.failureException(f"{describe(row, case, mesh)} raises {error!r}") from error

    def _check_case(self, row: Row, index: int, case: Case, mesh: DeviceMesh) -> bool:
        """False if DTensor refuses the case, as it documents."""
        plain = [operators.filled(word, case.sizes, seed=7 * index + at) for at, word in enumerate(row.inputs)]
        actual = [distributed(each, mesh, layout) for each, layout in zip(plain, case.layouts, strict=True)]
        for word, whole, tensor in zip(row.inputs, plain, actual, strict=True):
            is_trained = row.has_gradient and operators.is_trained(word)
            whole.requires_grad_(is_trained)
            tensor.requires_grad_(is_trained)
        expected = self._computed(row, case, plain, lambda seed, result: seed)
        try:
            found = self._computed(row, case, actual, lambda seed, result: self._spread(seed, result, mesh, index))
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

    def _computed(self, row: Row, case: Case, tensors: Sequence[torch.Tensor], spread: Any) -> dict[str, Any]:
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

    def _spread(self, seed: torch.Tensor, result: DTensor, mesh: DeviceMesh, index: int) -> DTensor:
        """The gradient of a result has its layout, or is replicated."""
        everywhere = index % 2 == 1
        layout = tuple(Replicate() if everywhere or each.is_partial() else each for each in result.placements)
        return distributed(seed, mesh, layout)

    def _check_value(self, actual: Any, expected: Any, mesh: DeviceMesh, what: str) -> None:
        if not isinstance(expected, torch.Tensor):
            self.assertEqual(actual, expected, what)
            return
        self.assertIsInstance(actual, DTensor, what)
        self.assertEqual((actual.shape, actual.dtype), (expected.shape, expected.dtype), f"global shape of {what}")
        self.assertEqual(actual.device_mesh, mesh)
        mine = part_of(expected.detach(), mesh, actual.placements)
        local = actual.to_local().detach()
        self.assertEqual(local, mine, f"{what}, as {actual.placements}", may_be=("empty", "zero", "small"))


def _without_partial(value: Any) -> Any:
    """A value with its partial sums added up."""
    if isinstance(value, DTensor) and any(each.is_partial() for each in value.placements):
        layout = [Replicate() if each.is_partial() else each for each in value.placements]
        return value.detach().redistribute(placements=layout)
    return value


def describe(row: Row, case: Case, mesh: DeviceMesh) -> str:
    tensors = [
        f"{operators.shape_of(word, case.sizes)} as {''.join(map(str, layout))}"
        for word, layout in zip(row.inputs, case.layouts, strict=True)
    ]
    args = ", ".join(f"{name}={value}" for name, value in case.args.items())
    return f"{row.name}({', '.join(tensors)}; {args}) on mesh {tuple(mesh.shape)}"


class TestOperators(OperatorMixin):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_on_one_dimension(self):
        self._check_rows(make_mesh(2))

    @skip_if_lt_x_gpu(2)
    @subtests(known=KNOWN)
    def test_known_differences(self, known):
        """What the table leaves out still differs. A difference that is gone is a failure in strict mode only."""
        mesh = make_mesh(2)
        try:
            self._check_case(known.row, 0, Case({}, known.sizes, known.layouts), mesh)
            differs = False
        except (self.failureException, RuntimeError, IndexError, NotImplementedError):
            differs = True
        if settings.is_on(settings.STRICT_DEFECTS_VARIABLE, os.environ):
            self.assertTrue(any(of_all_ranks(differs)), f"no longer differs: {known.why}; move it to the rows")


class TestOperatorsOnPlanes(OperatorMixin):
    world_size = 4

    @skip_if_lt_x_gpu(4)
    def test_on_two_dimensions(self):
        self._check_rows(make_mesh(2, 2))


if __name__ == "__main__":
    run_tests()
