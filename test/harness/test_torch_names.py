"""The suite looks up torch's private names late, so that a rename in torch only affects tests that use the name.

``inputs/renamed`` simulates a version of PyTorch with other names. It cannot rename names of C++.
"""

import ast
import collections
import functools
import io
import json
import re
import sys
import tempfile
import tokenize
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from runs import INPUTS, ROOT, run_beside
from sources import PACKAGE, TESTS, TESTS_OF_FSDP, trees
from torch.distributed.fsdp import FSDPModule

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import needs
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests, subtest
from torch_fsdp_tests.installed_torch import torch_facts, torch_names
from torch_fsdp_tests.processes import forkserver
from torch_fsdp_tests.verdict import SkipKind

OLD = (2, 9)  # the oldest supported version
FSDP1 = "distributed/fsdp/test_fsdp_apply"
FSDP2 = "distributed/_composable/fsdp/test_fully_shard_training"
GROUPS = "distributed/_composable/fsdp/test_fully_shard_module_groups"
PARAMETERS = "TestFullyShardRegisteredParams"
COMPLETES_GROUP = "TestFullyShard1DTrainingCompose.test_partial_group_casts_output_of_root"
RENAMED = {
    FSDP1: "_get_fsdp_handles _full_param_padded _shapes _local_shard",
    FSDP2: "_get_fsdp_state _comm_ctx _state_ctx foreach_reduce",
    GROUPS: "_force_complete_incomplete_states",
}


@functools.cache
def renamed() -> tuple[str, dict[str, list[dict[str, Any]]]]:
    """Run tests of three files on a version of PyTorch with renamed names. Returns the output and the tests by file."""
    files = [FSDP1, f"{FSDP2}::{PARAMETERS}", f"{GROUPS}::{COMPLETES_GROUP.replace('.', '::')}"]
    names = " ".join(RENAMED.values())
    with tempfile.TemporaryDirectory() as folder:
        command = [ROOT / "run_test.py", "--keep-going", "--report", folder, "-i", *files]
        done = run_beside(INPUTS / "renamed", *command, RENAMED_IN_FSDP=names)
        report = json.loads(Path(folder, "report.json").read_text())
    return done.stdout + done.stderr, {file["file"]: file["tests"] for file in report["files"]}


@instantiate_parametrized_tests
class TestRenamed(TestCase):
    """Without it, a version of PyTorch that renames a private name could break whole files."""

    @parametrize("file", [subtest(FSDP1, name="fsdp1"), subtest(FSDP2, name="fsdp2")])
    def test_file_skips_tests_that_need_a_renamed_name(self, file):
        """No test fails. A test that needs a name skips, and its reason has the name and the file to update."""
        text, tests = renamed()
        outcomes = {test["outcome"] for test in tests[file]} - {"known defect"}
        self.assertEqual(outcomes, {"passed", "skipped"}, text)
        reasons = "\n".join(test["reason"] for test in tests[file])
        self.assertRegex(reasons, "the installed torch has no .* torch_fsdp_tests/fsdp/internals.py uses: update that")

    @needs(torch_facts.COMPLETES_PARTIAL_GROUPS)
    def test_release_that_seems_to_lack_something_is_reported(self):
        """The test that needs it runs anyway. TestFacts has the strict mode."""
        text, tests = renamed()
        outcomes = {test["test"]: test["outcome"] for test in tests[GROUPS]}
        self.assertEqual(outcomes[COMPLETES_GROUP], "passed")
        words = "which completes a group of modules when only some of them ran"
        self.assertRegex(text, f"(?m)^the installed PyTorch differs from release .*, {words}$")


SKIPS = """
from torch_fsdp_tests.common_distributed import needs, requires
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests, slowTest
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

torch_facts.IS_RELEASE = False


class Bodies:
    @requires(lambda: "needs graphs")
    def test_device(self): pass

    @needs(torch_facts.Fact((99, 0), "shards itself"))
    def test_torch(self): pass

    def test_name(self): torch_names.module("torch.gone").name

    @needs(torch_facts.Fact((2, 9), "can be asked", lambda: 1 / 0))
    def test_fact(self): pass

    def test_list(self): pass

    @slowTest
    def test_slow(self): pass

    def test_other(self): self.skipTest("not today")

    def test_name_in_subtest(self):
        with self.subTest(i=1): pass
        with self.subTest(i=2): torch_names.module("torch.gone").name


class TestPlain(Bodies, TestCase): pass


class TestRanks(Bodies, FSDPTest):
    world_size = 2


if __name__ == "__main__":
    run_tests()
"""


class TestKindsOfSkips(TestCase):
    """Without it, skips for renamed names could count as skips for missing features of PyTorch."""

    def test_kinds_of_tests_and_subtests(self):
        """They are the same with and without ranks. TestNames and TestFacts have the strict mode."""
        with tempfile.TemporaryDirectory() as folder:
            tests, listed = Path(folder, "tests"), Path(folder, "list.json")
            tests.mkdir()
            (tests / "test_it.py").write_text(SKIPS)
            entry = {"test": "test_it::*::test_list", "action": "disable", "reason": "the driver lacks it"}
            listed.write_text(json.dumps({"version": 1, "entries": [entry]}))
            options = ["--test-directory", tests, "--known-failures", listed, "--report", folder, "--keep-going"]
            text = run_beside(INPUTS, ROOT / "run_test.py", *options).stdout
            report = json.loads(Path(folder, "report.json").read_text())
        actual: dict[str, dict[str, tuple[str, list[str]]]] = collections.defaultdict(dict)
        for test in report["files"][0]["tests"]:
            cls, _, method = test["test"].partition(".test_")
            actual[cls][method] = test["outcome"], list(test["skip_kinds"].values())
        gone = "name of torch is gone"
        expected = {name: ("skipped", [name]) for name in ("device", "torch", "list", "slow", "other")}
        expected |= {"name": ("skipped", [gone]), "fact": ("skipped", ["fact about torch is unknown"])}
        expected["name_in_subtest"] = ("passed", [gone])
        self.assertEqual(actual, {"TestPlain": expected, "TestRanks": expected}, text)
        reasons = {test["test"]: test["reason"] for test in report["files"][0]["tests"]}
        for cls in ("TestPlain", "TestRanks"):
            self.assertRegex(reasons[f"{cls}.test_name_in_subtest"], "^skipped in part, 1 of 2 subtests: .*torch.gone")
        self.assertEqual({row["kind"]: row["tests"] for row in report["skips"]}, {kind.value: 2 for kind in SkipKind})
        for kind in SkipKind:
            self.assertRegex(text, f"skipped [(].*{kind.value}: 2.*[)], by reason:")


class TestNames(TestCase):
    """Without it, a name could be looked up at import, or a missing name could be a skip in strict mode."""

    def setUp(self) -> None:
        super().setUp()
        self.addCleanup(mock.patch.stopall)
        mock.patch.dict("os.environ", {settings.STRICT_NAMES_VARIABLE: "0"}).start()

    def test_a_missing_module_is_a_skip_when_it_is_used_and_an_error_in_strict_mode(self):
        late = torch_names.module("torch.distributed.no_such_module")
        for strict in (False, True):
            with mock.patch.dict("os.environ", {settings.STRICT_NAMES_VARIABLE: str(int(strict))}):
                words = "has no torch.distributed.no_such_module, which test/harness/"
                with self.assertRaisesRegex(torch_names.NameIsGone, words) as error:
                    _ = late.anything
            self.assertEqual(isinstance(error.exception, unittest.SkipTest), not strict)

    def test_a_patch_reaches_the_module(self):
        late = torch_names.module("torch.distributed.fsdp._common_utils")
        real = sys.modules["torch.distributed.fsdp._common_utils"]
        original = real.clean_tensor_name
        with mock.patch.object(late, "clean_tensor_name", str.upper):
            self.assertEqual(real.clean_tensor_name("a"), "A")
        self.assertIs(real.clean_tensor_name, original)

    def test_an_attribute_that_torch_knows_may_be_missing(self):
        """If torch has the name but an object lacks it, the test fails and does not skip."""
        with self.assertRaises(AttributeError):
            torch_names.attribute(object(), "_full_param_padded")
        with self.assertRaises(torch_names.NameIsGone):
            torch_names.attribute(object(), "_no_such_attribute_of_fsdp")

    def test_a_patch_of_a_missing_method_is_a_skip(self):
        with self.assertRaisesRegex(torch_names.NameIsGone, "FSDPModule.gone, which test/harness/"):
            torch_names.patched(FSDPModule, "gone")
        with torch_names.patched(FSDPModule, "unshard", "patched"):
            self.assertEqual(FSDPModule.unshard, "patched")


class TestWherePrivateNamesStand(TestCase):
    """Without it, one would have to search all tests for a name that a new version of PyTorch renames."""

    def test_names_of_three_files_are_in_one_room(self):
        """A private name of torch that three test files use belongs into ``torch_fsdp_tests/fsdp/internals.py``."""
        files = collections.defaultdict(set)
        for path, tree in trees(TESTS_OF_FSDP, files="test_*.py"):
            for name in _private_names(tree):
                files[name].add(path.name)
        in_torch = torch_names._names_in_fsdp()
        spread = {name: sorted(where) for name, where in files.items() if len(where) > 2 and name in in_torch}
        self.assertEqual(spread, {})

    def test_no_other_module_compares_versions(self):
        """No other module reads the version of torch either, except to show it."""
        version = r"torch\.__version__|torch_facts\.VERSION"
        actual = set()
        for path, tree in trees(TESTS, PACKAGE, with_words=version):
            compared = [node for node in ast.walk(tree) if isinstance(node, ast.Compare)]
            sides = [side for node in compared for side in (node.left, *node.comparators)]
            actual |= {path for side in sides if re.match(version, ast.unparse(side))}
        self.assertEqual(actual, {Path(__file__).resolve()})


_WORDS = {tokenize.COMMENT, tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}
_ADDRESS = re.compile(r"https?://\S+")
_VERSION = re.compile(r"torch \d+\.\d|(?<![\w.#/])2\.(9|[1-9]\d)(\.\d+)?(?![\w/])", re.IGNORECASE)


def lines_with_versions(source: str) -> list[int]:
    """The numbers of the lines whose comments or strings name a version of torch, except in addresses."""
    words = [token for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type in _WORDS]
    lines = [(token.start[0] + index, line) for token in words for index, line in enumerate(token.string.split("\n"))]
    return [number for number, line in lines if _VERSION.search(_ADDRESS.sub("", line))]


def _private_names(tree: ast.Module) -> Iterator[str]:
    """The private attributes that a file reads from objects other than ``self`` and ``cls``, and private imports."""
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            if node.attr not in own and not (isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")):
                yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch."):
            yield from (alias.name for alias in node.names if alias.name.startswith("_"))


class TestFacts(TestCase):
    """Without it, tests could be skipped on a PyTorch version that can run them, or a changed release go undetected.

    Each test of a single fact sets whether the installed torch counts as a release.
    """

    def _fact(self, since: tuple[int, int], is_release: bool, probe: mock.Mock) -> torch_facts.Fact:
        """A fact whose differences from the release are not reported to the run."""
        self.addCleanup(mock.patch.stopall)
        mock.patch.object(torch_facts, "IS_RELEASE", is_release).start()
        mock.patch.object(torch_facts, "unlike_release", []).start()
        mock.patch.object(torch_facts.events, "record").start()
        mock.patch("sys.stderr", io.StringIO()).start()
        lenient = {settings.STRICT_DEFECTS_VARIABLE: "0", settings.STRICT_NAMES_VARIABLE: "0"}
        mock.patch.dict("os.environ", lenient).start()
        return torch_facts.Fact(since, "does it", probe)

    def _probes(self) -> list[mock.Mock]:
        """Probes that return true, return false, and raise."""
        fails = mock.Mock(side_effect=TypeError("changed"))
        return [mock.Mock(return_value=True), mock.Mock(return_value=False), fails]

    def test_no_test_names_a_version(self):
        """Comments, docstrings and messages of tests name a fact or a defect, or say what differs."""
        files = sorted(TESTS_OF_FSDP.rglob("*.py"))
        found = {path: lines_with_versions(path.read_text(encoding="utf-8")) for path in files}
        actual = [f"{path.relative_to(TESTS)}:{line}" for path, lines in found.items() for line in lines]
        self.assertEqual(actual, [], "write the name of a fact (torch_facts.py) or of a defect, or what differs")

    def test_versions_in_words_are_found(self):
        names = (
            "# Before 2.15",
            '"since torch 2.3"',
            "#PyTorch 2.9.1 raises",
            '"""\nFrom 2.11 on\n"""',
            'f"in {x} 2.13"',
        )
        others = "2.13", "# 2.5 ms", '"layer2.11"', "# https://pytorch.org/docs/2.13/fsdp.html", "# #2.13", "torch.x"
        for source in names:
            self.assertEqual(len(lines_with_versions(source)), 1, source)
        for source in others:
            self.assertEqual(lines_with_versions(source), [], source)

    def test_probes_agree_with_versions(self):
        """On the installed torch, the probe of a fact agrees with the version since which the fact holds."""
        probed = {name: fact for name, fact in torch_facts.facts().items() if fact.probe is not None}
        self.assertGreater(len(probed), 10)
        for name, fact in probed.items():
            with self.subTest(name):
                self.assertEqual(fact.seen, torch_facts.VERSION >= fact.since)

    def test_every_fact_is_asked(self):
        files = {*TESTS.rglob("*.py"), *PACKAGE.rglob("*.py")}
        texts = [path.read_text(encoding="utf-8") for path in files if path.name != "torch_facts.py"]
        asked = set(re.findall(r"\b[A-Z][A-Z0-9_]+\b", "\n".join(texts)))
        self.assertEqual(torch_facts.facts().keys() - asked, set())

    def test_no_fact_is_as_old_as_the_oldest_torch(self):
        self.assertEqual([name for name, fact in torch_facts.facts().items() if fact.since <= OLD], [])

    def test_what_is_a_release(self):
        releases = "2.13.0", "2.13.0+cpu", "2.13.0+cu130", "2.13.1.post2", "2.13.0+rocm6.4"
        others = "2.14.0.dev20260101+cpu", "2.9.0a0+50eac811a6.nv25.09", "2.13.0rc1", "2.13.0+gitabc1234", "2.13.0a0"
        actual = {version: torch_facts.is_release(version) for version in (*releases, *others)}
        self.assertEqual(actual, dict.fromkeys(releases, True) | dict.fromkeys(others, False))

    def test_a_fact_is_asked_late_and_once(self):
        probe = mock.Mock(return_value=True)
        fact = self._fact(OLD, is_release=False, probe=probe)
        self.assertEqual(probe.mock_calls, [])
        self.assertTrue(fact)
        self.assertIsNone(fact.lacks())
        self.assertEqual(probe.mock_calls, [mock.call()])

    def test_a_fact_that_does_not_hold_says_what_is_needed(self):
        fact = torch_facts.Fact((9, 0), "does it")
        self.assertEqual(fact.lacks(), "needs a version of PyTorch that does it (9.0 or newer)")

    def test_a_release_is_what_its_version_says(self):
        """Whatever the probe says, the version decides whether a test runs. A difference is reported once."""
        differs = re.escape(f"the installed PyTorch differs from release {torch.__version__.partition('+')[0]}")
        unknown = r"cannot tell whether torch [\w.+]+ does it: changed"
        yes, no, fails = self._probes()
        cases = [
            (OLD, True, yes, "^$"),
            (OLD, True, no, f"^{differs}, which does it$"),
            (OLD, True, fails, f"^{differs}: {unknown}$"),
            ((9, 0), False, yes, rf"^{differs}: it does it, as torch does since 9\.0$"),
        ]
        for since, expected, probe, words in cases:
            with self.subTest(words):
                fact = self._fact(since, is_release=True, probe=probe)
                self.assertEqual([bool(fact), bool(fact)], [expected, expected])
                self.assertRegex("".join(torch_facts.unlike_release), words)

    def test_a_release_that_differs_fails_the_test_in_strict_mode(self):
        """The exception is no skip, and no AssertionError, which a known defect could explain."""
        _, no, _ = self._probes()
        fact = self._fact(OLD, is_release=True, probe=no)
        with mock.patch.dict("os.environ", {settings.STRICT_DEFECTS_VARIABLE: "1"}):
            with self.assertRaisesRegex(torch_facts.TorchDiffers, "which does it. If the release itself is like this"):
                fact.lacks()
        self.assertFalse(issubclass(torch_facts.TorchDiffers, (AssertionError, unittest.SkipTest)))

    def test_the_probe_decides_between_releases(self):
        yes, no, _ = self._probes()
        for since in (OLD, (9, 0)):
            self.assertTrue(self._fact(since, is_release=False, probe=yes))
            self.assertFalse(self._fact(since, is_release=False, probe=no))
            self.assertEqual(torch_facts.unlike_release, [])

    def test_a_probe_that_raises_between_releases_is_a_skip_and_an_error_in_strict_mode(self):
        _, _, fails = self._probes()
        fact = self._fact(OLD, is_release=False, probe=fails)
        words = r"cannot tell whether torch [\w.+]+ does it: changed"
        with self.assertRaisesRegex(unittest.SkipTest, words):
            bool(fact)
        with mock.patch.dict("os.environ", {settings.STRICT_NAMES_VARIABLE: "1"}):
            with self.assertRaisesRegex(torch_names.NameIsGone, words) as error:
                bool(fact)
        self.assertNotIsInstance(error.exception, unittest.SkipTest)

    def test_preloading_says_what_cannot_be_imported(self):
        (remark,) = forkserver.preload(["torch", "torch.no_such_module"], if_present=["torch.no_such_either"])
        words = "torch.no_such_module cannot be imported in advance, so every process will import it itself: No module"
        self.assertIn(words, remark)


if __name__ == "__main__":
    run_tests()
