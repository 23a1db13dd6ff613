"""The explorer: programs from seeds, what is valid, shrinking, and ranks that end otherwise than expected."""

import dataclasses
import functools
import itertools
import json
import math
import os
import random
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runs import assert_refused, outputs

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.explore import __main__ as command
from torch_fsdp_tests.explore import execution, generate, known, ranks, record, script, search
from torch_fsdp_tests.explore.execution import shape_of
from torch_fsdp_tests.explore.layers import batch
from torch_fsdp_tests.explore.lifecycle import GATHERED, SHARDED, Lifecycle, problem
from torch_fsdp_tests.explore.program import LAYERS, STEPS, Layer, Program, ProgramError, Step, Unit
from torch_fsdp_tests.explore.reference import Reference
from torch_fsdp_tests.explore.shrink import shrunk
from torch_fsdp_tests.ranks import Assignment

FORWARD = Step("forward", number=1)
BACKWARD = Step("backward", number=-1, flag=False)
SMALL = Program(
    seed=1,
    world_size=2,
    width=2,
    layers=(Layer("a", "linear", bias=False), Layer("b", "chain", parts=(Layer("c", "scale"),))),
    units=(Unit(("a",)), Unit(("b",)), Unit(("",))),
    steps=(FORWARD, BACKWARD),
)


@functools.cache
def generated() -> tuple[Program, ...]:
    return tuple(generate.program_of(seed, 4) for seed in range(300))


class TestPrograms(TestCase):
    """Without it, ranks could run different programs, or programs that mean nothing."""

    def assert_valid(self, *programs: Program) -> None:
        for program in programs:
            self.assertEqual(problem(program), "", program.listing())

    def test_same_seed_gives_same_program(self):
        self.assertEqual(generate.program_of(7, 4), generate.program_of(7, 4))
        self.assertNotEqual(generate.program_of(7), generate.program_of(8))

    def test_programs_are_valid_and_survive_json(self):
        self.assert_valid(*generated())
        for program in generated():
            self.assertEqual(Program.from_json(program.as_json()), program)

    def test_everything_that_a_program_may_have_occurs(self):
        layers = [layer for program in generated() for layer in program.all_layers()]
        self.assertEqual({step.kind for program in generated() for step in program.steps}, {*STEPS})
        self.assertEqual({layer.kind for layer in layers}, {*LAYERS})
        for parts in (generated(), layers):
            for field in dataclasses.fields(parts[0]):
                with self.subTest(f"{field.name} of {type(parts[0]).__name__}"):
                    self.assertGreater(len({getattr(part, field.name) for part in parts}), field.name != "world_size")

    def test_contradictory_features_are_refused(self):
        words = "no program over 4 ranks can have these together: fsdp1, tp"
        with mock.patch.object(generate, "_ATTEMPTS", 20), self.assertRaisesRegex(ProgramError, words):
            generate.program_of(1, 4, demanded=("tp", "fsdp1"))

    def test_variations_have_no_feature_that_is_switched_off(self):
        searched = search.Search(search.Settings(seed=5, without=("offload", "low")))
        for _ in range(60):
            program = searched.next_program()
            searched._take(ranks.Result(program))
            self.assertEqual((program.offload, program.param_dtype), (False, ""))

    def test_features_are_demanded_and_switched_off(self):
        for seed in range(30):
            self.assertFalse(generate.program_of(seed, without=("offload",)).offload)
            self.assertEqual(generate.program_of(seed, 4, demanded=("hsdp",)).replicas, 2)

    def test_rewritten_programs_are_valid(self):
        self.assert_valid(*(known.avoiding(program, known.REWRITINGS) for program in generated()))

    def test_possible_programs_are_valid(self):
        """A shared layer whose dtype is that of its unit alone cannot become two layers."""
        layers = tuple(
            Layer(name, "linear", dtype=dtype) for name, dtype in (("a", "float64"), ("b", "float64"), ("c", ""))
        )
        low = {"dtype": "float32", "param_dtype": "bfloat16", "steps": (Step("sync", flag=False), *SMALL.steps)}
        program = SMALL.but(layers=layers, units=(Unit(("a",)), Unit(("",))), shares=(("b", "a"),), **low)
        self.assert_valid(program, *map(known.possible, (program, *generated())))

    def test_rewritings_are_of_known_defects(self):
        """The key of each is the id of a defect, and it changes some of the programs."""
        self.assertLessEqual(known.REWRITINGS.keys(), {*registry.ids()})
        programs = [*generated()]
        programs += [generate.program_of(seed, 2, demanded=("fsdp1", "state")) for seed in range(60)]
        for choice in map(random.Random, range(900)):
            programs.append(search.varied(choice.choice(programs), choice.choice(programs), choice))
        idle = {id for id, rewriting in known.REWRITINGS.items() if all(rewriting(each) == each for each in programs)}
        self.assertEqual(idle, set())

    def test_last_layer_is_one_that_runs(self):
        """All ranks use it, also if it is followed by a chain whose layers are all left out."""
        layers = (Layer("a", "scale"), Layer("b", "chain", parts=(Layer("c", "scale"),)))
        forward = Step("forward", number=1, names=("c",), odd=("a",))
        program = SMALL.but(layers=layers, units=(Unit(("",)),), steps=(FORWARD, Step("unused"), forward))
        (_, _, changed) = known.avoiding(program, ["fsdp2_unused_layer_gathers_out_of_order"]).steps
        self.assertEqual(changed, dataclasses.replace(forward, odd=()))

    def test_variations_are_valid(self):
        pairs = itertools.pairwise(generated()[:61])
        self.assert_valid(*(search.varied(*pair, random.Random(seed)) for seed, pair in enumerate(pairs)))

    def test_bad_programs_are_refused(self):
        for text, reason in {
            "{": "Expecting property name",
            "[]": "not a program: name a .json file",
            '{"seed": 1}': "missing",
            SMALL.as_json().replace('"scale"', '"magic"'): "unknown kind 'magic'",
            SMALL.as_json().replace('"backward"', '"sideways"'): "unknown kind 'sideways'",
        }.items():
            with self.subTest(text), self.assertRaisesRegex(ProgramError, reason):
                Program.from_json(text)

    def test_what_is_not_valid(self):
        step, save = Step("step"), Step("save_model", "full")
        for steps, reason in (
            ((BACKWARD,), "no such forward"),
            ((FORWARD, step), "between forward and backward"),
            ((Step("evaluate", "no_grad"), step), "everything is sharded"),
            ((Step("load_model"),), "nothing was saved"),
            ((Step("forward", "c"), FORWARD), "reset_iter_state"),
            ((Step("sync", flag=False), FORWARD, BACKWARD, Step("zero")), "cannot be dropped"),
            ((Step("divide", number=2.0), FORWARD, BACKWARD), "not every backend"),
            ((Step("last", flag=False), FORWARD, BACKWARD, step), "the last one of its iteration"),
            (
                (Step("freeze", "a.weight", False), Step("freeze", "b.c.weight", False), FORWARD, BACKWARD),
                "no trainable",
            ),
            ((Step("unshard", "b.c"),), "is not sharded"),
        ):
            with self.subTest(reason):
                self.assertIn(reason, problem(SMALL.but(steps=steps)))
        self.assertEqual(problem(SMALL.but(steps=(FORWARD, BACKWARD, step, save, Step("load_model")))), "")

    def test_dtypes_of_a_unit(self):
        """What a unit trains has one dtype. What is frozen in it may have another, except in a flat parameter."""
        layers = (Layer("a", "scale"), Layer("b", "scale", dtype="float32"))
        one = SMALL.but(layers=layers, units=(Unit(("",)),))
        frozen = one.but(frozen=("b.inner.weight",))
        flat = frozen.but(api="fsdp1", strategy="FULL_SHARD", original_parameters=True)
        for program, reason in (
            (one, "has one dtype"),
            (one.but(units=(Unit(("b",)), Unit(("",)))), ""),
            (frozen, ""),
            (frozen.but(steps=(Step("freeze", "b.inner.weight", True),)), "trains parameters of one dtype"),
            (frozen.but(steps=(Step("cast", "float32"),)), "makes all dtypes one"),
            (flat, "has one dtype"),
        ):
            with self.subTest(reason):
                self.assertIn(reason, problem(program))
                self.assertEqual(bool(reason), bool(problem(program)))


class TestExpectations(TestCase):
    """Without it, the explorer could expect what FSDP does not promise."""

    def states(self, steps: tuple[Step, ...], **changes: Any) -> list[str]:
        program = SMALL.but(steps=steps, **changes)
        self.assertEqual(problem(program), "")
        life = Lifecycle(program)
        for step in steps:
            life.apply(step)
        return life.states

    def test_states_of_units(self):
        keeps = (Unit(("a",), "no"), Unit(("b",), "yes"), Unit(("",), "yes"))
        groups = (Unit(("a", "b")), Unit(("",)))
        evaluation = Step("evaluate", "no_grad")
        self.assertEqual(self.states((FORWARD,)), [SHARDED, SHARDED, GATHERED])
        self.assertEqual(self.states((FORWARD, BACKWARD)), [SHARDED, SHARDED, SHARDED])
        self.assertEqual(self.states((evaluation,), units=keeps), [GATHERED, SHARDED, SHARDED])
        self.assertEqual(self.states((Step("evaluate", "no_grad", names=("b",)),), units=groups), [SHARDED, GATHERED])
        self.assertEqual(self.states((Step("unshard", "b"),)), [SHARDED, GATHERED, SHARDED])
        self.assertEqual(self.states((evaluation, Step("reshard", "*"))), [SHARDED, SHARDED, SHARDED])

    def test_units_at_work_in_backward(self):
        """The backward runs from ``c`` to ``a``. A unit is over when the gradient of its input is there."""

        def at_work(**changes: Any) -> dict[str, set[int]]:
            program = SMALL.but(**changes)
            life = Lifecycle(program)
            for step in program.steps:
                life.apply(step)
            return {path: units for (path, _), units in life.at_work.items()}

        first, second, root = range(3)
        self.assertEqual(at_work(), {"b.c": {second, root}, "a": {first, root}})
        kept = (Unit(("a",), "no"), Unit(("b",)), Unit(("",)))
        self.assertEqual(at_work(units=kept)["b.c"], {first, second, root})
        without_input = {"frozen": ("a.weight",)}
        self.assertEqual(at_work(**without_input)["a"], {first, second, root})
        self.assertEqual(at_work(**without_input, inputs=True)["a"], {first, root})
        keeps = (Step("keep_after_backward", flag=False), FORWARD, BACKWARD)
        self.assertEqual(at_work(steps=keeps)["a"], {first, second, root})

    def test_gradients_are_averages(self):
        """Of one layer of scales, whose gradient is the sum over the batch of inputs times the weights of the loss."""
        program = SMALL.but(layers=(Layer("a", "scale"),), units=(Unit(("",)),))
        reference = Reference(program, "cpu")
        for step in program.steps:
            reference.apply(step)
        (parameter,) = reference.master(0).values()
        by_rank = [torch.mul(*batch(1, rank, 2, torch.float64)).sum(0) for rank in range(2)]
        self.assertEqual(parameter.grad, (by_rank[0] + by_rank[1]) / 2)
        self.assertGreater(parameter.grad.abs().sum(), 0)

    def test_messages_have_shapes(self):
        self.assertEqual(shape_of("expected 3 of 'a.weight' at 0x7f01, got 2.5"), "expected N of NAME at N, got N")
        self.assertEqual(shape_of(""), "")


class TestShrinking(TestCase):
    """Without it, a finding could stay a program of thirty steps, or become another finding."""

    def test_smallest_program(self):
        """Of the program of a seed, only what the finding needs is left: an evaluation, and a layer of one kind."""

        def shows(program: Program) -> bool:
            has_layer = any(layer.kind == "wide" for layer in program.all_layers())
            return has_layer and any(step.kind == "evaluate" for step in program.steps)

        program = next(each for each in map(generate.program_of, range(1000)) if shows(each) and len(each.steps) > 12)
        small = shrunk(program, shows, seconds=20)
        self.assertEqual([step.kind for step in small.steps], ["evaluate"])
        self.assertEqual([layer.kind for layer in small.all_layers()], ["wide"])
        self.assertEqual([unit.modules for unit in small.units], [("",)])
        self.assertEqual((small.param_dtype, small.frozen, small.offload, small.width), ("", (), False, 1))

    def test_time_is_bounded(self):
        program = generate.program_of(1)
        self.assertEqual(shrunk(program, lambda each: True, seconds=0), program)


class _Unreliable:
    """Ranks of which one dies, or says something else, as the program's seed says."""

    @classmethod
    def _serve_rank(cls, assignment: Assignment) -> None:
        for text in assignment.orders():
            seed = Program.from_json(text.partition(" ")[2]).seed
            if seed == 3 and assignment.index == 1:
                os._exit(7)
            outcome = ranks.Explorer.outcome(assignment.index, lambda: execution.Outcome(digest="same"))
            if seed == 4:
                outcome = ranks.Explorer.outcome(
                    assignment.index, lambda: execution.Outcome(digest=str(assignment.index))
                )
            assignment.report(outcome)


class TestCrews(TestCase):
    """Without it, one rank that dies could end a search, or be missed."""

    def test_death_is_a_finding_and_the_next_program_runs(self):
        crew = ranks.Crew(2, explorer=_Unreliable)
        self.addCleanup(crew.close)
        results = [crew.run(SMALL.but(seed=seed)) for seed in (1, 3, 1, 4, 1)]
        self.assertEqual([result.is_finding for result in results], [False, True, False, True, False])
        self.assertIn("died: exited with code 7", results[1].what)
        self.assertEqual(results[1].rank, 1)
        self.assertEqual(results[3].what, "ranks ran different collectives")


class TestKinds(TestCase):
    """Without it, a second defect that ends like the first one could be counted as the same."""

    def _judge(self, *results: ranks.Result) -> list[int]:
        """How often each finding was met. The first program shrinks to ``SMALL``."""
        searched = search.Search(search.Settings())
        for result in results:
            crew = mock.Mock()
            crew.run.side_effect = lambda program, end=result: dataclasses.replace(end, program=program)
            with mock.patch.object(search, "shrunk", lambda *_: SMALL):
                searched._judged(result, crew)
        return [finding.count for finding in searched.found]

    def test_same_end_of_programs_with_all_features_of_the_first(self):
        """What the first program had before it was shrunk does not count."""
        offloads, freezes = (SMALL.but(**each) for each in ({"offload": True}, {"frozen": ("a.weight",)}))
        alone = SMALL.but(units=(Unit(("",)),))
        ends = [ranks.Result(program, "gradient", place="there") for program in (offloads, freezes, alone)]
        self.assertEqual(self._judge(*ends), [2, 1])
        self.assertEqual(self._judge(ends[0], dataclasses.replace(ends[1], place="elsewhere")), [1, 1])


class TestResuming(TestCase):
    """Without it, a search that is resumed could repeat its programs, or shrink its findings again."""

    def test_search_goes_on(self):
        first = search.Search(search.Settings(seed=3))
        before = [first.next_program() for _ in range(2)]
        first.programs = 2
        finding = search.Finding(SMALL, ranks.Result(SMALL, "gradient", place="there"), known="an id", count=4)
        first.found.append(finding)
        second = search.Search(search.Settings(seed=3))
        second.resume(json.loads(json.dumps(first.state())))
        self.assertEqual((second.earlier, second.programs), (2, 0))
        self.assertNotIn(second.next_program(), before)
        self.assertEqual(second.found, [finding])

    def test_bad_state_is_refused(self):
        for state in ({}, {"next": 1, "programs": 1, "found": [{}]}):
            with self.subTest(state), self.assertRaisesRegex(ProgramError, "no state of a search"):
                search.Search(search.Settings()).resume(state)


class TestRecords(TestCase):
    """Without it, two devices that disagree, or a machine that does not repeat its bits, could pass."""

    def test_record_names_what_differs(self):
        """A record agrees with the same torch on the same device, until a number in it is changed."""
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "record")
            recorder = record.Recorder(path)
            crew = ranks.Crew(2, execution.RECORD)
            self.addCleanup(crew.close)
            for program in (SMALL, SMALL.but(seed=2)):
                recorder.take(crew.run(program))
            self.assertEqual(list(record.differences(path)), ["", ""])
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            lines[1]["values"][1][1]["b.c.weight.grad"][0] += 1000.0
            path.write_text("\n".join(map(json.dumps, lines)))
            first, second = record.differences(path)
            self.assertEqual(first, "")
            self.assertRegex(second, r"^step 1, rank 1: b\.c\.weight\.grad differs by")
            lenient = dataclasses.replace(accelerator.current(), tolerances={"float64": math.inf})
            with mock.patch.object(accelerator, "current", return_value=lenient):
                self.assertEqual(list(record.differences(path)), ["", ""])

    def test_bad_record_is_refused(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "record")
            path.write_text('{"program": {}}\n')
            with self.assertRaisesRegex(ProgramError, "is not a record"):
                list(record.differences(path))

    def test_bits_that_are_not_repeated_are_a_finding(self):
        runs = iter([0.5, 0.25])

        def run(*_: object, **__: object) -> execution.Outcome:
            return execution.Outcome(values=({"output": [1.0]}, {"a.weight.grad": [next(runs)]}))

        with mock.patch.object(execution, "_run", run):
            outcome = execution.run(SMALL, 0, "cpu", execution.TWICE)
        self.assertEqual((outcome.what, outcome.step), ("not the same twice", 1))
        self.assertEqual(outcome.detail, "a.weight.grad: first [0.5], then [0.25]")


class TestScripts(TestCase):
    """Without it, a finding could come with a script that does not run."""

    def test_scripts_are_python(self):
        programs = [*generated()[:60], *map(known.valid, generated()[60:120])]
        for program, what in zip(programs, itertools.cycle(("raised ValueError: no", "gradient"))):
            result = ranks.Result(program, what, 0, "a.weight: [1.0] instead of [2.0]")
            compile(script.script(program, result), "script", "exec")

    def test_script_holds_the_right_value(self):
        result = ranks.Result(SMALL, "gradient", 1, "a.weight: [[1.0]] instead of [[2.0]]", rank=1)
        text = script.script(SMALL, result)
        self.assertIn("right = [[2.0]]", text)
        self.assertIn("if rank == 1", text)
        self.assertNotIn("torch_fsdp_tests", text)


class TestCommand(TestCase):
    """Without it, a wrong option could end in a traceback."""

    def test_bad_arguments(self):
        with tempfile.TemporaryDirectory() as folder:
            bad, empty, invalid = (f"{folder}/{name}" for name in ("bad", "empty", "invalid"))
            for path, text in ((bad, "{}"), (empty, ""), (invalid, SMALL.but(steps=(BACKWARD,)).as_json())):
                Path(path).write_text(text)
            cases = (
                (("--with", "magic"), "unknown feature 'magic'"),
                (("--seconds", "0"), "is not a number of seconds"),
                (("--ranks", "3"), "invalid choice"),
                (("--programs", "none"), "is not a whole number from 1"),
                (("--resume",), "needs --output"),
                (("--with", "fsdp1,tp", "--without", "offload,tp"), "--with and --without name tp; leave it out"),
                (("--with-known", "nope"), "programs avoid no defect nope"),
                (("--twice", "--record", f"{folder}/record"), "not allowed with"),
                (("--against", empty), "has no programs"),
                (("--against", bad), "is not a record"),
                (("--replay", f"{folder}/none.json"), "cannot be read"),
                (("--replay", bad), "not a program"),
            )
            assert_refused(self, command.main, cases)
            status, listing, err = outputs(command.main, "--replay", invalid)
            self.assertEqual((status, listing[:7]), (2, "2 ranks"))
            self.assertIn("not valid: step 0: there is no such forward", err)

    def test_features_are_listed(self):
        status, output, err = outputs(command.main, "--features")
        self.assertEqual((status, err), (0, ""))
        self.assertEqual(len(output.splitlines()), len(generate.FEATURES))


if __name__ == "__main__":
    run_tests()
