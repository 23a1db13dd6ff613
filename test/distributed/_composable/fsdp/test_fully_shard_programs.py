"""Random programs over FSDP2 behave like plain models, and defects that such programs have found."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest, patch_all_gather, patch_reduce_scatter
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.explore import execution, generate, known
from torch_fsdp_tests.explore.layers import Empty
from torch_fsdp_tests.explore.lifecycle import Lifecycle
from torch_fsdp_tests.explore.program import Layer, Program, Step, Unit
from torch_fsdp_tests.explore.reference import TOO_LARGE, Reference
from torch_fsdp_tests.explore.subject import Subject
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.installed_torch import torch_facts

PROGRAMS = 30  # some seconds; ``python -m torch_fsdp_tests.explore`` runs as many as there is time for
TRAINING = Program(
    seed=1,
    world_size=2,
    width=3,
    layers=(Layer("a", "linear"), Layer("b", "linear")),
    units=(Unit(("a",)), Unit(("",))),
    steps=(Step("forward", number=1), Step("backward", number=-1, flag=False), Step("step")),
)

UNITS = (Unit(("b",)), Unit(("a",)), Unit(("",)))
VARIANTS: tuple[dict[str, Any], ...] = (
    {},
    {"inputs": True, "meta": True},
    {"scaler": True, "dtype": "float32"},
    {"api": "fsdp1", "strategy": "FULL_SHARD"},
    {"api": "fsdp1", "strategy": "SHARD_GRAD_OP", "original_parameters": True},
)


class TestPrograms(FSDPTest):
    with_host = True  # norms and scales of offloaded gradients are reduced there

    @property
    def world_size(self) -> int:
        return 2

    @skip_if_lt_x_gpu(2)
    def test_random_programs(self):
        """The programs of fixed seeds, without what shows known defects. A failure prints the program."""
        ids, without, compared = known.present(), known.lacking(), 0
        for seed in range(2 * PROGRAMS):
            program = known.avoiding(known.possible(generate.program_of(seed, without=without)), ids)
            outcome = execution.run(program, self.rank, self.device.type)
            self.assertFalse(outcome.what, f"{program.listing()}\nstep {outcome.step}: {outcome.detail}")
            self.assertIn(outcome.invalid, ("", TOO_LARGE), program.listing())
            compared += not outcome.invalid
            if compared == PROGRAMS:
                break
        self.assertEqual(compared, PROGRAMS)

    @skip_if_lt_x_gpu(2)
    def test_wrong_gradient_is_noticed(self):
        """Gradients that are twice too large differ from the plain model's, after the backward."""
        original = internals.reduce_scatter()

        def doubled(*args, **kwargs):
            work = original(*args, **kwargs)
            (kwargs["output"] if "output" in kwargs else args[0]).mul_(2)
            return work

        for changes in VARIANTS:
            with self.subTest(str(changes)), patch_reduce_scatter(doubled):
                outcome = execution.run(TRAINING.but(**changes), self.rank, self.device.type)
                self.assertEqual((outcome.what, outcome.step), ("gradient", 1))

    @skip_if_lt_x_gpu(2)
    def test_wrong_bytes_are_noticed(self):
        """Parameters of two dtypes in one unit are gathered as bytes. Only their program shows wrong bytes."""
        original = internals.all_gather()

        def without_bytes(*args, **kwargs):
            work = original(*args, **kwargs)
            output = kwargs["output_tensor"] if "output_tensor" in kwargs else args[0]
            return output.zero_() if output.dtype == torch.uint8 else work

        layers = (Layer("a", "linear"), Layer("b", "linear", dtype="float32"))
        program = TRAINING.but(layers=layers, units=(Unit(("",)),), frozen=("b.inner.weight", "b.inner.bias"))
        for each, expected in ((program, ("output", 0)), (TRAINING, ("", -1))):
            with self.subTest(expected), patch_all_gather(without_bytes):
                outcome = execution.run(each, self.rank, self.device.type)
                self.assertEqual((outcome.what, outcome.step if outcome.what else -1), expected)

    @skip_if_lt_x_gpu(2)
    def test_race_is_noticed(self):
        """The race detector finds a write to what may still be copied, unless a known defect explains it."""
        steps = (Step("evaluate", "eval", number=1), Step("reshard", "*"), Step("edit", "a.weight"))
        program, is_on = TRAINING.but(offload=True, steps=steps), {settings.CHECK_STREAMS_VARIABLE: "1"}
        cases = (execution.explaining, ("", -1)), (lambda race: "", ("race", 2))
        for explaining, expected in cases:
            with (
                self.subTest(expected),
                mock.patch.dict(os.environ, is_on),
                mock.patch.object(execution, "explaining", explaining),
            ):
                outcome = execution.run(program, self.rank, self.device.type)
                self.assertFalse(outcome.invalid)
                self.assertEqual((outcome.what.partition(":")[0], outcome.step), expected)

    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    @skip_if_lt_x_gpu(2)
    def test_wrong_derivative_is_noticed(self):
        """Under ``vjp``, a unit that is not gathered rightly for the backward shows in the derivative alone."""
        original, outputs = internals.all_gather(), []

        def without_third(*args, **kwargs):
            work = original(*args, **kwargs)
            outputs.append(kwargs["output_tensor"] if "output_tensor" in kwargs else args[0])
            return outputs[-1].zero_() if len(outputs) == 3 else work

        program = TRAINING.but(steps=(Step("transform", "vjp", number=1),))
        with patch_all_gather(without_third):
            outcome = execution.run(program, self.rank, self.device.type)
        self.assertEqual((outcome.what, len(outputs)), ("derivative", 3))

    @skip_if_lt_x_gpu(2)
    def test_unit_that_reshards_late_is_noticed(self):
        """A unit whose parameters are freed only after the whole backward is gathered while another one works."""
        group = type(internals.group_of(fully_shard(nn.Linear(2, 2, device=self.device))))
        reshard, finalize = group.reshard, group.finalize_backward

        def only_forward(group: Any) -> None:
            if internals.training_state(group).name != "POST_BACKWARD":
                reshard(group)

        def at_the_end(group: Any) -> None:
            finalize(group)
            reshard(group)

        program = TRAINING.but(units=UNITS)
        with mock.patch.multiple(group, reshard=only_forward, finalize_backward=at_the_end):
            outcome = execution.run(program, self.rank, self.device.type)
        self.assertEqual((outcome.what, outcome.step), ("gathered in backward", 1))
        self.assertEqual(outcome.detail, "the unit 'b' when the backward of 'a' begins")

    @skip_if_lt_x_gpu(2)
    def test_unit_that_is_gathered_too_early_is_noticed(self):
        """Before a unit's backward only one further unit is gathered, unless the program says more."""
        program = TRAINING.but(layers=(*TRAINING.layers, Layer("c", "linear")), units=(Unit(("c",)), *UNITS))
        early = Step("prefetch_backward", "c", names=("b", "a"))
        life, reference = Lifecycle(program), Reference(program, self.device.type)
        subject = Subject(program.but(steps=(early, *program.steps)), self.rank, self.device.type)
        subject.apply(0)
        for index, step in enumerate(program.steps[:2]):
            forward, output = reference.apply(step), subject.apply(index + 1)
            life.apply(step)
            found = list(execution.differences(program, self.rank, reference, subject, life, forward, output))
        kind = "gathers ahead in backward"
        self.assertEqual(found, [(kind, "the unit 'b', the unit 'a' when the backward of 'c' begins")])

    @skip_if_lt_x_gpu(2)
    def test_unit_that_stays_gathered_is_noticed(self):
        """A program says that a unit reshards after forward. One that does not is a difference."""
        keeps = (Unit(("a",), "no"), Unit(("",)))
        program = TRAINING.but(steps=TRAINING.steps[:1])
        life, reference = Lifecycle(program), Reference(program, self.device.type)
        subject = Subject(program.but(units=keeps), self.rank, self.device.type)
        step = program.steps[0]
        forward, output = reference.apply(step), subject.apply(0)
        life.apply(step)
        found = list(execution.differences(program, self.rank, reference, subject, life, forward, output))
        self.assertEqual(found, [("unsharded instead of sharded", "the unit 'a'")])


class TestFoundByPrograms(FSDPTest):
    @property
    def world_size(self) -> int:
        return 2

    @skip_if_lt_x_gpu(2)
    @torch_defect("fsdp2_unit_without_elements_raises")
    def test_unit_without_elements(self):
        model = nn.Sequential(nn.Linear(2, 2), Empty()).to(self.device)
        for module in (*model, model):
            fully_shard(module)
        model(torch.ones(1, 2, device=self.device)).sum().backward()
        self.assertEqual(model[1].weight.grad.shape, (0,))

    @skip_if_lt_x_gpu(2)
    @torch_defect("fsdp2_freezing_before_a_transform_raises")
    def test_frozen_model_runs_under_a_transform(self):
        """The model has run before its parameter is frozen, and runs under ``vmap`` afterwards."""
        linear = nn.Linear(2, 2, bias=False, device=self.device)
        model = fully_shard(linear, reshard_after_forward=True)
        x = torch.ones(1, 2, device=self.device)
        model(x).sum().backward()
        model.weight.requires_grad_(False)
        self.assertEqual(torch.vmap(model)(x), x @ model.weight.full_tensor().T)

    @skip_if_lt_x_gpu(2)
    @torch_defect("fsdp2_cast_after_first_forward_raises")
    def test_model_is_cast_between_steps(self):
        model = fully_shard(nn.Linear(2, 2, bias=False, device=self.device))
        x = torch.ones(1, 2, device=self.device)
        model(x).sum().backward()
        model.to(torch.bfloat16)
        self.assertEqual(model(x.bfloat16()), x.bfloat16() @ model.weight.full_tensor().T)


if __name__ == "__main__":
    run_tests()
