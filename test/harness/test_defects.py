"""The registry of torch's defects: its contents, its command, its scripts, its reproductions and workarounds."""

import ast
import dataclasses
import functools
import importlib.util
import inspect
import json
import os
import re
import subprocess
import sys
import tempfile
import unittest
import unittest.mock
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from runs import ROOT, outputs, run_beside
from sources import TESTS, TESTS_OF_FSDP, trees

from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, TestCase, run_tests
from torch_fsdp_tests.defects import fixes, registry
from torch_fsdp_tests.defects.command import command_line as defects_main
from torch_fsdp_tests.defects.command import launch, texts, trial
from torch_fsdp_tests.defects.command.command_line import main
from torch_fsdp_tests.defects.registry import Answer, Component, Consequence, Defect, Exposure
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.dispatch.devices import cores
from torch_fsdp_tests.dispatch.features import FEATURES
from torch_fsdp_tests.installed_torch import sources, torch_facts
from torch_fsdp_tests.installed_torch.version_ranges import version_fits

SHOWN = "fsdp2_extension_gets_one_payload"  # a defect of every version so far
LIMIT = 300  # seconds for one run of the command
PLAIN = {"mesh", "device_mesh", "device_id", "auto_wrap_policy"}  # arguments of FSDP in a program without options
# What a reproduction watches if it shows on the CPU a defect that only matters on another device.
WATCHES = re.compile(r"wait_stream|record_stream|non_blocking|pre_unshard\b|\bStream\b(?!\.synchronize)")
Program = Callable[..., tuple[Any, Any]]


def named_in_tests() -> set[str]:
    """The ids of the defects that tests of FSDP show, as a whole or in a block. Some show only in an extension."""
    files = trees(TESTS_OF_FSDP, TESTS / "extensions", with_words="torch_defect|known_defects")
    nodes = [node for _, tree in files for node in ast.walk(tree)]
    calls = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "torch_defect"]
    of_models = [
        node.value for node in nodes if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "known_defects"
    ]
    named = {id for value in of_models for ids in ast.literal_eval(value).values() for id in ids}
    return named.union(ast.literal_eval(id) for call in calls for id in call.args)


command = functools.partial(outputs, main)


class TestRegistry(TestCase):
    """Without it, a defect could lose its test, its words or its versions."""

    def test_each_defect_has_a_test_that_shows_it(self):
        self.assertEqual({*registry.ids()} - named_in_tests(), set(), may_be="empty")

    def test_facts_name_the_defects_that_a_version_fixed(self):
        """A fact names the defects whose fix made it true: the version before has them, and this version does not."""
        named = {name: fact for name, fact in torch_facts.facts().items() if fact.fixes}
        self.assertGreater(len(named), 5)
        for name, fact in named.items():
            for id in fact.fixes:
                with self.subTest(f"{name}: {id}"):
                    major, minor = fact.since
                    answers = [registry.defect(id).expected(f"{major}.{minor - step}.0") for step in (1, 0)]
                    self.assertEqual(answers, [Answer.PRESENT, Answer.ABSENT])

    def test_no_expected_failure_is_without_a_defect(self):
        self.assertEqual([*trees(TESTS_OF_FSDP, with_words=r"expectedFailure|xfailIf")], [])

    def test_every_defect_says_what_it_is(self):
        for id in registry.ids():
            with self.subTest(id):
                defect = registry.defect(id)
                self.assertTrue(id.startswith(f"{defect.component.value.lower()}_"))
                self.assertGreater(len(defect.explanation), 80)
                self.assertNotIn("\n", defect.title)
                self.assertIn("torch", defect.where)
                self.assertIn(defect.world_size, range(1, 9))

    def test_exposure_is_what_the_reproduction_takes(self):
        """It uses as few options and features as its exposure allows. Only that of ``HARDWARE`` watches streams."""
        most = {Exposure.DEFAULT: 0, Exposure.COMMON: 1}
        saves = "Saving and loading"  # the features of this group count as one
        groups = {each.short: saves if each.group == saves else each.name for each in FEATURES}
        groups["mixed_precision"] = groups["tp"]  # many train with both by default
        for id in registry.ids():
            with self.subTest(id):
                defect = registry.defect(id)
                _, *code = ast.parse(defect.source).body
                calls = [node for part in code for node in ast.walk(part) if isinstance(node, ast.Call)]
                wraps = [call for call in calls if ast.unparse(call.func) in ("FSDP", "fully_shard")]
                options = {keyword.arg for call in wraps for keyword in call.keywords} - PLAIN
                features = {groups[short] for short in defect.uses[1:] if short != "wrapping"}
                if defect.exposure in most:
                    self.assertLessEqual(len(options), most[defect.exposure], options)
                    self.assertLessEqual(len(features), most[defect.exposure], features)
                needs_device = defect.devices is registry.Devices.OTHER_THAN_CPU
                watches = any(WATCHES.search(ast.unparse(part)) for part in code)
                self.assertIs(needs_device or watches, defect.exposure is Exposure.HARDWARE)

    def test_every_version_has_an_answer_for_every_defect(self):
        """No answer is undecided, also between the versions that were tried. None is both read and seen."""
        seen, read = registry.recorded()["seen"], registry.recorded()["read"]
        self.assertGreaterEqual(len(seen), 5)
        decided = {Answer.PRESENT.value, Answer.ABSENT.value}
        allowed = {version: decided | {Answer.CANNOT_BE_TRIED.value} for version in seen} | dict.fromkeys(read, decided)
        for version, answers in (*seen.items(), *read.items()):
            self.assertLessEqual(set(answers), set(registry.ids()), version)
            self.assertLessEqual(set(answers.values()), allowed[version], version)
        for version, answers in read.items():
            for found in (seen[each] for each in seen if each.startswith(f"{version}.")):
                self.assertEqual([id for id in answers if found.get(id) in decided], [], version)
        minors = sorted(int(version.split(".")[1]) for version in seen)
        for id in registry.ids():
            for minor in range(minors[0], minors[-1] + 2):
                with self.subTest(f"{id} on 2.{minor}"):
                    self.assertNotEqual(registry.defect(id).expected(f"2.{minor}.0"), Answer.UNDECIDED)

    def test_expected_answer_of_a_version(self):
        """It is the answer of the nearest known versions, if these agree."""
        recorded = {
            "read": {"2.10": {"is_lost": "present"}},
            "seen": {
                "2.9.1": {"is_lost": "absent", "is_hung": "cannot be tried here"},
                "2.11.0": {"is_lost": "present", "is_hung": "present"},
                "2.13.0": {"is_lost": "absent", "is_hung": "present"},
            },
        }
        mark = {Answer.PRESENT: "+", Answer.ABSENT: "-", Answer.UNDECIDED: "?", Answer.CANNOT_BE_TRIED: "n"}
        versions = ("2.8.0", "2.9.0", "2.10.2", "2.11.1", "2.12.0", "2.13.1+cpu", "2.14.0.dev20260101", "3.0.0")
        with unittest.mock.patch.object(registry, "recorded", lambda: recorded):
            for id, since, expected in (
                ("is_lost", "2.9", "n-++?---"),
                ("is_hung", "2.9", "n+++++++"),
                ("is_hung", "2.11", "nnn+++++"),
                ("is_new", "2.9", "n???????"),
            ):
                with self.subTest(f"{id} since {since}"):
                    defect = dataclasses.replace(registry.defect(SHOWN), id=id, since=since)
                    actual = "".join(mark[defect.expected(version)] for version in versions)
                    self.assertEqual(actual, expected)

    def test_defect_that_was_only_read(self):
        """Lists mark it. A later run that cannot try a defect keeps the recorded answer."""
        defect = registry.defect(SHOWN)
        words = "not seen yet"
        self.assertNotIn(words, "".join((defect.headline, texts.history(defect), texts.listing([defect]))))
        recorded = {"read": {"2.9": {SHOWN: "present"}}, "seen": {"2.9.1": {SHOWN: "cannot be tried here"}}}
        with unittest.mock.patch.object(registry, "recorded", lambda: recorded):
            for text in (defect.headline, texts.history(defect), texts.listing([defect])):
                self.assertIn(words, text)
        seen = {"read": {}, "seen": {"2.9.1": {SHOWN: "present"}}}
        finding = trial.Finding(defect, Answer.CANNOT_BE_TRIED, Answer.PRESENT)
        with (
            tempfile.TemporaryDirectory() as folder,
            unittest.mock.patch.object(registry, "recorded", lambda: seen),
            unittest.mock.patch.object(registry, "SEEN", Path(folder, "seen.json")),
        ):
            defects_main._save([finding], "2.9.1+cpu")
            self.assertEqual(json.loads(registry.SEEN.read_text()), {"read": {}, "seen": {SHOWN: {"2.9.1": "present"}}})


class TestCommand(TestCase):
    """Without it, the command could give a wrong answer, or hide one that is not as expected."""

    def printed(self, *arguments: str, answer: Answer = Answer.PRESENT) -> tuple[str | int | None, str]:
        """The exit status and the output for a defect that is expected to be present and has this answer."""
        defect = registry.defect(SHOWN)
        found, right = {"weight": 0.75}, {"weight": 1.5}
        finding = trial.Finding(defect, answer, Answer.PRESENT, found=found, right=right, seconds=2.25)
        with unittest.mock.patch.object(trial, "try_all", lambda ids, at_a_time: iter([finding])):
            status, out, err = command(*arguments)
        self.assertEqual(err, "")
        return status, out

    def test_lines_and_counts(self):
        status, out = self.printed(SHOWN)
        self.assertEqual(status, 0)
        self.assertRegex(out, rf"(?m)^\[1/1\] {SHOWN}  present  2\.\ds$")
        self.assertRegex(out, r'(?m)^    actual    \{"weight": 0.75\}\n    expected  \{"weight": 1.5\}$')
        answers = "1 present, 0 absent, 0 cannot be tried here, 0 could not be decided"
        exposures = "of those that are present: 0 default, 0 common, 1 rare, 0 hardware"
        self.assertEqual(out.splitlines()[-2:], [answers, exposures])

    def test_package_that_is_missing(self):
        for package, obstacle in (("no_such_package", "it needs the package no_such_package"), ("json", "")):
            defect = dataclasses.replace(registry.defect(SHOWN), package=package)
            self.assertEqual(trial._obstacle(defect, accelerator.current()), obstacle)

    def test_json(self):
        status, out = self.printed(SHOWN, "--json")
        printed = json.loads(out)
        self.assertEqual((status, printed["version"], printed["torch"]), (0, 2, torch.__version__))
        (answer,) = printed["defects"]
        expected = {"id": SHOWN, "answer": "present", "expected": "present", "found": {"weight": 0.75}, "seconds": 2.25}
        self.assertEqual({name: answer[name] for name in expected}, expected)

    def test_what_fails(self):
        """The command exits with 1. It names a defect whose answer is not the expected one."""
        self.assertEqual(self.printed(SHOWN, "--fail-on", "present")[0], 1)
        status, out = self.printed(SHOWN, answer=Answer.ABSENT)
        self.assertEqual(status, 1)
        self.assertIn(f"not as expected: {SHOWN} is absent, but present was expected", out)

    def test_selection(self):
        """A defect is selected if it has one of the kinds of each option."""
        kinds = "--component", "dsd, DTensor", "--consequence", "hang,error", "--exposure", "rare"
        status, out, _ = command("--list", *kinds)
        *lines, last = out.splitlines()
        expected = [
            defect.id
            for defect in registry.defects()
            if defect.consequence in (Consequence.HANG, Consequence.ERROR)
            if defect.component in (Component.DTENSOR, Component.DSD)
            if defect.exposure is Exposure.RARE
        ]
        self.assertEqual(expected[0], "dtensor_reduction_of_empty_shard_hangs")
        self.assertEqual((status, [line.split()[0] for line in lines]), (0, expected))
        self.assertEqual(last, f"{len(expected)} known defects: 0 default, 0 common, {len(expected)} rare, 0 hardware")

    def test_issue(self):
        """The text for torch's issue tracker has all parts."""
        status, out = self.printed("--issue", SHOWN)
        self.assertEqual(status, 0)
        for words in (
            "# An FSDP2 all-gather extension",
            "## What happens",
            "```python",
            "## Where",
            "PyTorch version:",
        ):
            self.assertIn(words, out)
        self.assertIn('Actual: `{"weight": 0.75}`', out)


class TestScripts(TestCase):
    """Without it, a script for a bug report could need this suite, or not show its defect.

    The scripts of ``--show`` need only torch. One of them runs here. All run, also with torchrun, if slow tests are
    requested.
    """

    def _run(self, id: str, *command: str) -> bool:
        defect = registry.defect(id)
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder, f"{id}.py")
            script.write_text(texts.script(defect))
            self.assertNotIn("torch_fsdp_tests", script.read_text())
            clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
            done = subprocess.run(
                [sys.executable, *command, script], env=clean, cwd=folder, text=True, capture_output=True, timeout=LIMIT
            )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        answers = re.findall(r"^rank \d+: (PRESENT|absent)$", done.stdout, re.MULTILINE)
        self.assertEqual(len(answers), defect.world_size, done.stdout)
        return "PRESENT" in answers

    def test_each_script_imports_what_it_uses(self):
        """No import is unused, except that of torch."""
        for id in registry.ids():
            with self.subTest(id):
                tree = ast.parse(texts.script(registry.defect(id)))
                nodes = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
                imported = {(name.asname or name.name).partition(".")[0] for node in nodes for name in node.names}
                used = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
                self.assertEqual(imported - used - {"torch"}, set())

    def test_with_python_and_torchrun(self):
        for id in registry.ids() if TEST_WITH_SLOW else [SHOWN]:
            with self.subTest(id):
                defect = registry.defect(id)
                expected = defect.expected(torch.__version__)
                if expected is Answer.CANNOT_BE_TRIED or defect.devices is registry.Devices.OTHER_THAN_CPU:
                    continue
                if defect.package and importlib.util.find_spec(defect.package) is None:
                    continue
                self.assertEqual(self._run(id), expected is Answer.PRESENT)
                if TEST_WITH_SLOW:
                    ranks = ("--standalone", "--nproc-per-node", str(defect.world_size))
                    self.assertEqual(self._run(id, "-m", "torch.distributed.run", *ranks), expected is Answer.PRESENT)

    def test_rank_that_torchrun_made_takes_its_place(self):
        for world_size, tells in (("2", [unittest.mock.call(1, 2, "env://", len)]), ("3", [])):
            variables = {"TORCHELASTIC_RUN_ID": "none", "RANK": "1", "WORLD_SIZE": world_size}
            with (
                unittest.mock.patch.dict(os.environ, variables),
                unittest.mock.patch.object(launch, "print_result", side_effect=SystemExit) as tell,
                self.assertRaises(SystemExit) as leaving,
            ):
                launch.launch(len, 2)
            self.assertEqual(tell.mock_calls, tells)
        self.assertIn("torchrun --nproc-per-node 2", str(leaving.exception))


def has_workaround(defect: Defect) -> bool:
    """Whether the reproduction has a workaround for the installed torch."""
    later = re.search(r"with torch ([\d.]+) or later", defect.workaround)
    if later is not None and not version_fits(torch.__version__, f">={later[1]}"):
        return False
    return "workaround" in inspect.signature(defect.reproduce).parameters


class Workaround(trial.Reproduction):
    """Ranks use the workaround of a defect. It has to give the right result."""

    @classmethod
    def program(cls, defect: Defect) -> Program:
        def use_workaround(rank: int, world_size: int, device: torch.device) -> tuple[Any, Any]:
            if has_workaround(defect):
                backend, meeting = dist.get_backend(), f"file://{tempfile.gettempdir()}/workaround"
                dist.destroy_process_group()
                program = functools.partial(defect.reproduce, workaround=True)
                found, right = launch.run_rank(rank, world_size, meeting, program, device.type, backend)
                if not launch.same(found, right):
                    raise AssertionError(f"workaround: found {found}, and {right} is right")
            return None, None

        return use_workaround


class ReproductionThenWorkaround(Workaround):
    """Ranks reproduce a defect, and then use its workaround, because their start and the first use of FSDP are slow."""

    @classmethod
    def program(cls, defect: Defect) -> Program:
        def reproduce(*of_rank: Any) -> tuple[Any, Any]:
            answer = defect.reproduce(*of_rank)
            use_workaround(*of_rank)
            return answer

        use_workaround = super().program(defect)
        return reproduce


class TestReproductions(TestCase):
    """Without it, a reproduction could stop to reproduce, or find its defect in any version, and workarounds fail."""

    def tried(self, ids: list[str], reproduction: type[trial.Reproduction]) -> list[trial.Finding]:
        return list(trial.try_all(ids, 2 * cores(), reproduction))

    def test_all_defects(self):
        """With the installed torch, every answer is the expected one, within its time, and each workaround works.

        A defect may change its process so that the workaround fails there. Then each of the two has its own processes.
        """
        together = self.tried(registry.ids(), ReproductionThenWorkaround)
        apart = [finding.defect.id for finding in together if finding.answer is Answer.UNDECIDED]
        findings = [finding for finding in together if finding.answer is not Answer.UNDECIDED]
        findings += self.tried(apart, trial.Reproduction)
        self.assertEqual(sorted(finding.defect.id for finding in findings), registry.ids())
        self.assertEqual([texts.line(finding) for finding in findings if not finding.is_as_expected], [])
        for finding in findings:
            if finding.answer is Answer.PRESENT:
                self.assertNotEqual(finding.found, finding.right, finding.defect.id)
        remedied = self.tried(apart, Workaround)
        self.assertEqual([texts.line(finding) for finding in remedied if finding.answer is not Answer.ABSENT], [])
        tried = [finding.defect for finding in findings if finding.answer is not Answer.CANNOT_BE_TRIED]
        self.assertGreater(sum(map(has_workaround, tried)), 60)

    def test_fixes(self):
        """With all fixes for the installed torch, every defect that has one is absent."""
        ids = fixes.tried(torch.__version__)
        if not ids:
            self.skipTest(f"no fix was tried with torch {torch.__version__}")
        root, version = sources.installed()
        files = fixes.edited_files(ids, version, lambda path: (root / path).read_text(encoding="utf-8"))
        with tempfile.TemporaryDirectory() as folder:
            sources.write(files, Path(folder))
            variables = sources.environment(Path(folder), {"PYTHONPATH": str(ROOT)})
            variables |= {registry.ABSENT_VARIABLE: " ".join(ids)}
            done = run_beside(ROOT, "-m", "torch_fsdp_tests.defects", "--json", *ids, **variables)
        self.assertEqual(done.returncode, 0, done.stdout[-2000:])
        self.assertNotIn("Traceback", done.stderr)  # native libraries may print at exit, as triton's does in 2.15
        answers = {each["id"]: each["answer"] for each in json.loads(done.stdout)["defects"]}
        self.assertEqual(sorted(answers), ids)
        shown = [id for id, answer in answers.items() if answer not in ("absent", "cannot be tried here")]
        self.assertEqual(shown, [])

    def test_a_rank_stays_until_all_have_reported(self):
        """A rank that leaves at once would break the connections that a slower one is making."""
        assignment = unittest.mock.Mock(test=SHOWN, index=0, world_size=1, file_name="")
        with unittest.mock.patch.object(launch, "run_rank", return_value=(1, 1)):
            trial.Reproduction._serve_rank(assignment)
        self.assertEqual([call[0] for call in assignment.method_calls], ["report", "meet"])


if __name__ == "__main__":
    run_tests()
