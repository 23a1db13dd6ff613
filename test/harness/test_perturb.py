
from __future__ import annotations

import contextlib
import json
import re
import unittest
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, manual_seed, parametrize, run_tests
from torch_fsdp_tests.defects.in_tests import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.references import of_all_ranks
from torch_fsdp_tests.fsdp.training import TrainingMixin, optimizers

WEEKLY = Path(__file__).parents[2] / ".github" / "workflows" / "weekly.yml"

Bug = Callable[[nn.Module], contextlib.AbstractContextManager[None]]


@contextlib.contextmanager
def replaced(owner: Any, name: str, make: Callable[[Any], Any]) -> Iterator[None]:
    own = vars(owner).get(name)  # or it is inherited
    setattr(owner, name, make(getattr(owner, name)))
    try:
        yield
    finally:
        delattr(owner, name) if own is None else setattr(owner, name, own)


def forget(model: nn.Module) -> None:
    """Drop all gradients, as most of the bugs do."""
    for param in model.parameters():
        param.grad = None


def drops(owner: Any, name: str, when: Callable[..., bool] = lambda *args, **kwargs: True) -> Bug:
    """The bug that a function drops the gradients of the model, if ``when`` is true for its arguments."""

    def bug(model: nn.Module) -> contextlib.AbstractContextManager[None]:
        def make(former: Any) -> Any:
            def broken(*args: Any, **kwargs: Any) -> Any:
                if when(*args, **kwargs):
                    forget(model)
                return former(*args, **kwargs)

            return broken

        return replaced(owner, name, make)

    return bug


def group_drops(name: str, when: Callable[[], bool]) -> Bug:
    """The same for a method of FSDP2's parameter group, whose private name is looked up late."""
    return lambda model: drops(internals.fsdp2_param_group.FSDPParamGroup, name, lambda *args: when())(model)


def loaded_halves(former: Any) -> Any:
    def broken(self: Any, read_item: Any, tensor: torch.Tensor) -> None:
        tensor.mul_(0.5)

    return broken


# For each kind a bug that it shows, and that ``clip`` and the checks around each insertion do not show.
BUGS: dict[str, Bug] = {
    "eval": group_drops("post_forward", lambda: not torch.is_grad_enabled() and not torch.is_inference_mode_enabled()),
    "inference": group_drops("post_forward", torch.is_inference_mode_enabled),
    "state_dict": drops(nn.Module, "state_dict"),
    "dsd": lambda model: drops(internals.dsd._module, "_verify_options")(model),
    "load": drops(nn.Module, "load_state_dict"),
    "dsd_load": lambda model: drops(internals.dsd._module, "_load_optim_state_dict")(model),
    "dcp": lambda model: replaced(DefaultLoadPlanner, "commit_tensor", loaded_halves),
    "unshard": drops(FSDPModule, "unshard"),
    "to": drops(nn.Module, "to"),
    "clip": drops(torch.nn.utils, "clip_grad_norm_"),
    "exception": lambda model: replaced(FSDPModule, "reset_iter_state", lambda former: lambda self: None),
}


# Without ``reset_iter_state()``, FSDP2 does not document how to continue the training after an exception.
KINDS = [kind for kind in BUGS if kind != "exception" or hasattr(FSDPModule, "reset_iter_state")]


@instantiate_parametrized_tests
class TestKinds(TrainingMixin, FSDPTest):
    """Without it, a kind could insert nothing, or an operation whose effect no check would see."""

    world_size = 2

    def _train(self, bug: Bug | None, kinds: tuple[str, ...]) -> list[str]:
        """Train a model for three steps beside a plain one. Returns what was inserted."""
        manual_seed(42)
        model: Any = nn.Sequential(nn.Linear(3, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 2))
        ref_model = self._replica(model)
        for module in (model[1], model):
            fully_shard(module, reshard_after_forward=True)
        with session as inserting, bug(model) if bug is not None else contextlib.nullcontext():
            batches = lambda: self._inputs(4, 3)  # noqa: E731
            self._check_training(
                ref_model, model, batches, optims=optimizers(ref_model, model, cls=torch.optim.SGD, momentum=0.5)
            )
            return inserting.inserted if inserting is not None else []

    @skip_if_lt_x_gpu(2)
    def test_each_kind_shows_its_bug(self):
        self.assertEqual(sorted(BUGS), sorted(settings.PERTURBATIONS))
        for kind in KINDS:
            bug = BUGS[kind]
            with self.subTest(kind=kind):
                self._train(bug, ("to" if kind == "clip" else "clip",))
                with self.assertRaises((AssertionError, RuntimeError)):
                    self._train(bug, (kind,))

    @skip_if_lt_x_gpu(2)
    def test_nothing_changes_without_a_bug(self):
        for kind in KINDS:
            known = torch_defect("fsdp2_inference_mode_breaks_training", when=kind == "inference")
            with self.subTest(kind=kind), known:
                inserted = self._train(None, (kind,))
                self.assertEqual({words.split()[0] for words in inserted}, {kind})

    @skip_if_lt_x_gpu(2)
    def test_what_is_taken(self):
        """Taken tensors may not keep memory alive beside the model's, or stay alive themselves."""
        model = fully_shard(nn.Linear(4, 4).to(self.device))
        weight, plain = model.weight.to_local().detach(), torch.ones(2, device=self.device)
        held: list[torch.Tensor] = []
        subject = kinds.Subject(model, None, kinds.InsertionPoint.BEFORE_STEP, 0, kinds.Forwards("fsdp2"))
        for value, words in (
            ([torch.ones(1000, device=self.device)[:2]], "keep 4000 bytes alive"),
            ([held], "1 of 1 tensors are alive"),
        ):
            with self.subTest(words), mock.patch.object(invariants, "RELEASE", 0.0):
                if value[0] is held:
                    held.append(plain + 1)
                    value = list(held)
                with self.assertRaisesRegex(AssertionError, words):
                    invariants.check_taken(kinds.Taken(value), subject, "x")
        invariants.check_taken(kinds.Taken([weight]), subject, "x")
        invariants.check_taken(kinds.Taken([plain + 1]), subject, "x")

    @skip_if_lt_x_gpu(2)
    @parametrize("api", ["ddp", "fsdp1", "fsdp2"])
    def test_models_of_some_ranks(self, api):
        """Nothing is inserted into them. After that, all ranks insert the same into a model that they share."""
        alone = dist.new_group([0])
            if self.rank == 0:
                layer = nn.Linear(2, 2).to(self.device)
                model: Any = layer
                if api == "fsdp2":
                    fully_shard(model, mesh=DeviceMesh.from_group(alone, self.device.type), reshard_after_forward=False)
                else:
                    model = FSDP(layer, alone) if api == "fsdp1" else DDP(layer, process_group=alone)
                model(torch.ones(1, 2, device=self.device)).sum().backward()
                torch.optim.SGD(model.parameters(), lr=0.5).step()
            self.assertEqual(session.inserted, [])
            self._train(None, ())
            every = of_all_ranks(session.inserted)
        self.assertGreater(len(every[0]), 0)
        self.assertEqual(every[1:], every[:1])

    @skip_if_lt_x_gpu(2)
    def test_mock_that_cannot_begin(self):
            with self.assertRaises(AttributeError), mock.patch.object(kinds, "no_such_name"):
                pass
            self._train(None, ())
            self.assertGreater(len(session.inserted), 0)

    @skip_if_lt_x_gpu(2)
    def test_where_nothing_is_inserted(self):
        """Nothing is inserted while a mock is in force, because it may watch what the training loop calls."""
            self._train(None, ())
            self.assertEqual(session.inserted, [])


class TestNames(TestCase):
    """Without it, a kind could lack its operation, or a wrong name could end in a traceback."""

    def test_each_kind_has_an_operation(self):
        self.assertEqual(set(settings.PERTURBATIONS), set(kinds.KINDS))
        self.assertEqual([kind.name for kind in kinds.KINDS.values() if not kind.documented], [])

    @unittest.skipUnless(WEEKLY.exists(), "needs the workflows of a checkout")
    def test_each_kind_runs_weekly(self):
        (groups,) = re.findall(r"^ +kinds: (\[.*\])$", WEEKLY.read_text(), re.MULTILINE)
        self.assertEqual(sorted(",".join(json.loads(groups)).split(",")), sorted(settings.PERTURBATIONS))

    def test_parse(self):
        self.assertEqual((parse("all"), parse("eval,all")), (tuple(settings.PERTURBATIONS),) * 2)
        self.assertEqual((parse("eval,to"), parse("")), (("eval", "to"), ()))
        for wrong in ("evals", "all,nothing"):
            with self.assertRaisesRegex(settings.ConfigurationError, "eval, inference"):
                parse(wrong)

    def test_what_is_declared(self):
        class Declared:
            def some(self):
                pass

            def all(self):
                pass

        self.assertEqual(declared, [{"eval"}, set(settings.PERTURBATIONS)])
        with self.assertRaisesRegex(ValueError, "needs a reason"):


if __name__ == "__main__":
    run_tests()
