"""Searches for the defects that fit words, a traceback or the features in use, and what versions of torch changed."""

import dataclasses
import functools
import html
import itertools
import json
import os
import re
import subprocess
import tempfile
import unittest.mock
from pathlib import Path
from typing import Any

from runs import INPUTS, ROOT, assert_rejected, outputs, run_beside

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.command import changes, find, texts, trial, versions_page
from torch_fsdp_tests.defects.command.command_line import main, parse
from torch_fsdp_tests.defects.in_tests import KnownDefect
from torch_fsdp_tests.defects.registry import Answer, Component, Consequence, Exposure
from torch_fsdp_tests.dispatch import page
from torch_fsdp_tests.installed_torch import sources, torch_facts

# The scripts of --show printed the tracebacks of defects. Their files have the id of the defect as name; a word after a
# dash marks another traceback of this defect. Files of users' mistakes begin with "user_"; most were written by hand.
TRACEBACKS = {path.stem: path.read_text() for path in sorted((INPUTS / "tracebacks").glob("*.txt"))}
# Words of users, each with the id of the defect that fits best, or null. "cites" has public threads with such words.
QUERIES = json.loads((INPUTS / "find_queries.json").read_text())
# The files of torch with what the defects quote as documented.
DOCUMENTED = ("_tensor*.py", "amp/*.py", "distributed/**/*.py", "nn/modules/*.py", "nn/utils/*.py")
SHOWN = "fsdp2_group_is_gathered_for_one_output"


command = functools.partial(outputs, main)


def of_torch(version: str) -> Any:
    """The command takes the installed torch for this version."""
    return unittest.mock.patch.object(sources, "installed", lambda: (Path(), version))


def without_torch(*argv: str) -> subprocess.CompletedProcess[str]:
    """The command in an interpreter without torch and the other packages."""
    code = "import runpy, sys\nsys.modules.update(dict.fromkeys(['torch', 'numpy', 'expecttest']))\n"
    code += "runpy.run_module('torch_fsdp_tests.defects', run_name='__main__')"
    return run_beside(ROOT, "-c", code, *argv)


def ids(defects: list[registry.Defect]) -> list[str]:
    return [defect.id for defect in defects]


def letters(text: str) -> str:
    """What the words of a docstring, or of a message in pieces, have in common with a quotation of them."""
    return re.sub(r'"\s*\n\s*f?"|:\w+:`|[\W_]', "", text).lower()


class TestWithoutTorch(TestCase):
    """Without it, one who has only a traceback would need gigabytes to look it up."""

    def test_questions(self):
        for asked in ("--help", "--list", "--find setStorage", f"--show {SHOWN}", "--between 2.11 2.15", "--using tp"):
            with self.subTest(asked):
                ran = without_torch(*asked.split())
                self.assertEqual((ran.returncode, ran.stderr), (0, ""))
                self.assertGreater(len(ran.stdout), 500)

    def test_what_needs_torch(self):
        ran = without_torch(SHOWN)
        words = "torch_fsdp_tests.defects: torch is not installed, so no defect can be tried\n"
        self.assertEqual((ran.returncode, ran.stdout, ran.stderr), (2, "", words))


class TestOptions(TestCase):
    """Without it, the command could ignore some of its arguments."""

    ASKED = (
        *("ids fsdp1_*", "--component FSDP1", "--consequence hang", "--exposure rare", "--list", "--find x"),
        *("--using ac", "--html x", "--between 2.9 2.15", f"--show {SHOWN}", f"--issue {SHOWN}", "--json"),
        *("--fail-on present", "--save-seen", "--patch all"),
    )

    def test_every_pair(self):
        kinds, check = {"--component", "--consequence", "--exposure"}, {"--json", "--fail-on", "--save-seen"}
        together = {"ids", *kinds, *check}, {"ids", *kinds, "--list"}, {*kinds, "--find"}, {*kinds, "--using"}
        for asked in itertools.combinations(self.ASKED, 2):
            pair = [words.split()[0] for words in asked]
            with self.subTest(pair):
                words = [word for word in " ".join(asked).split() if word != "ids"]
                status, out, err = outputs(lambda argv: bool(parse(argv)) - 1, *words)
                allowed = any({*pair} <= each for each in together)
                self.assertEqual((status, out, err.count("\n")), (0, "", 0) if allowed else (2, "", 1))
                for name in () if allowed else pair:
                    self.assertIn("ID" if name == "ids" else name, err)

    def test_every_option_is_in_a_pair(self):
        named = {f"--{name.replace('_', '-')}" if name != "ids" else name for name in vars(parse([]))}
        self.assertEqual(named, {words.split()[0] for words in self.ASKED})

    def test_an_empty_name(self):
        for option in ("--show", "--issue", "--html"):
            self.assertEqual(command(f"{option}=")[:2], (2, ""))


class TestAnswers(TestCase):
    """Without it, a defect could lack what its finder needs, or name a feature that --using does not know."""

    def test_every_defect_has_features_and_a_workaround(self):
        for id in registry.ids():
            with self.subTest(id):
                defect = registry.defect(id)
                self.assertLessEqual({*defect.uses}, {*find.SHORT})
                interface, *others = defect.uses
                component = defect.component.value.lower()
                self.assertIn(interface, {"fsdp1", "fsdp2"} & {component} or {"fsdp1", "fsdp2"})
                self.assertFalse({"fsdp1", "fsdp2"} & {*others})
                if defect.workaround != registry.NO_WORKAROUND:
                    self.assertRegex(defect.workaround, r"(?s)^(``|[A-Z]).{15,}\.$")

    def test_an_error_has_words_of_its_message(self):
        """Names of functions alone would fit every traceback through them."""
        for id in registry.ids():
            with self.subTest(id):
                defect = registry.defect(id)
                self.assertEqual(bool(defect.message), bool(defect.error))
                self.assertIn(f"    ends in: {defect.message}" if defect.error else id, self.answer(id))

    def test_quotations_are_in_torch(self):
        """A quotation of an older text, or one with other words, could make a documented behavior a defect."""
        quoted = {each.id: re.findall(r"(?<!\w)'(.+?)'(?=[ .,;)]|$)", each.documented) for each in registry.defects()}
        root, version = sources.installed()
        if not version.startswith("2.13."):
            self.skipTest("quotations are those of torch 2.13")
        files = (path for part in DOCUMENTED for path in (root / "torch").glob(part))
        written = letters(" ".join(path.read_text(encoding="utf-8", errors="replace") for path in files))
        self.assertGreater(sum(map(len, quoted.values())), 50)
        pieces = [(id, piece) for id, all in quoted.items() for each in all for piece in each.split(" ... ")]
        self.assertEqual([(id, piece) for id, piece in pieces if letters(piece) not in written], [])

    def answer(self, id: str) -> str:
        return texts.answer(registry.defect(id), "2.13.0")

    def test_answer(self):
        """It says whether a version of PyTorch has the defect, since when, until when, and how to avoid it."""
        lines = self.answer("fsdp2_outputs_in_dataclasses_raise").splitlines()
        self.assertIn("    torch 2.13.0 does not have it; since 2.9 or earlier, fixed in 2.12", lines)
        self.assertIn("    workaround: Return the tensors in a tuple, a list or a dict.", lines)
        lines = self.answer("fsdp2_failed_conversion_loses_gradients").splitlines()
        self.assertIn("    torch 2.13.0 does not have what is broken; since 2.15, not fixed in 2.15", lines)


class TestFind(TestCase):
    """Without it, a user with a traceback of a known defect would not find it, or would get a wrong one."""

    def test_rates(self):
        """At least 90 % of the texts with a defect find it first, and at most 10 % of those without one find any."""
        asked = [(query["words"], query["id"]) for query in QUERIES]
        asked += [
            (text, None if name.startswith("user_") else name.partition("-")[0]) for name, text in TRACEBACKS.items()
        ]
        fit = [(text, id, ids(find.fitting(text))[:1]) for text, id in asked]
        self.assertLessEqual({id for _, id in asked if id}, {*registry.ids()}, "the ids in find_queries.json are old")
        not_found = [f"{text!r}: {first} instead of {id}" for text, id, first in fit if id and first != [id]]
        false = [f"{text!r}: {first}" for text, id, first in fit if not id and first]
        others = sum(id is None for _, id, _ in fit)
        self.assertGreaterEqual(len(fit) - others, 100)
        self.assertGreaterEqual(others, 50)
        self.assertLessEqual(len(not_found), 0.1 * (len(fit) - others), "\n".join(not_found))
        self.assertLessEqual(len(false), 0.1 * others, "\n".join(false))

    def test_tracebacks_of_defects(self):
        """Also those through another public function, such as ``set_state_dict``, or with ranks before their lines."""
        known = {name: text for name, text in TRACEBACKS.items() if not name.startswith("user_")}
        for name, text in known.items():
            with self.subTest(name):
                by_rank = "".join(f"[rank1]: {line}\n" for line in text.splitlines())
                for printed in (text, by_rank):
                    actual = ids(find.fitting(printed))
                    self.assertEqual(actual[0], name.partition("-")[0])
                    if "setStorage" not in printed:
                        self.assertLess(len(actual), 3)  # two defects may end in the same message

    def test_tracebacks_of_users_mistakes(self):
        """Wrong shapes or keys, no process group, no memory left, a collective that other ranks do not join, ..."""
        actual = {name: ids(find.fitting(text)) for name, text in TRACEBACKS.items() if name.startswith("user_")}
        self.assertEqual({name: found for name, found in actual.items() if found}, {})

    def test_same_message_from_another_function(self):
        """An ``IndexError`` of another function, or of the user's own code, is not that of the root's forward."""
        text = 'Traceback:\n  File "/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_state.py", line 1, in '
        text += "_root_pre_forward\nIndexError: tuple index out of range\n"
        self.assertEqual(ids(find.fitting(text)), ["fsdp2_root_without_inputs_raises"])
        self.assertEqual(ids(find.fitting(text.replace("_root_pre_forward", "_root_pre_forwards"))), [])
        self.assertEqual(ids(find.fitting(text.replace("/site-packages/torch/", "/home/me/"))), [])
        self.assertEqual(ids(find.fitting(text.splitlines()[-1])), ["fsdp2_root_without_inputs_raises"])

    def test_one_message_of_many_defects(self):
        """The traceback does not tell which defect it is, so the worst comes first. Other lines may tell."""
        name = "fsdp2_in_place_change_of_output_drops_backward"
        warned = TRACEBACKS[f"{name}-nested"]
        bare = warned[warned.index("Traceback") :].replace("h += x", "...")
        same = ids(find.fitting(bare))
        self.assertGreater(len(same), 4)
        self.assertEqual(same, ids(registry.worst_first(map(registry.defect, same))))
        for condition, id in {
            "fully_shard([model.norm, model.head])": "fsdp2_group_is_gathered_for_one_output",
            "# the module returns a dataclass": "fsdp2_outputs_in_dataclasses_raise",
            "loss = activations.pop().sum()  # of an inner layer": "fsdp2_loss_of_inner_activations_loses_gradients",
            "loss.backward(retain_graph=True); loss.backward()": "fsdp1_second_backward_raises",
        }.items():
            with self.subTest(condition):
                self.assertEqual(ids(find.fitting(f"{condition}\n{bare}"))[0], id)
        message = "in-place operations that require placement changes are not supported"
        found = ids(find.fitting(f"RuntimeError: aten.mul_: {message}\ntorch.optim.Adafactor(params)"))
        self.assertEqual(found[0], "optimizer_adafactor_raises_for_sharded_matrices")

    def test_words(self):
        for words in ("183702", "#183702", "https://github.com/pytorch/pytorch/issues/183702"):
            with self.subTest(words):
                self.assertEqual(ids(find.fitting(words)), [SHOWN])
        self.assertEqual(ids(find.fitting("https://github.com/pytorch/pytorch/issues/1")), [])
        self.assertIn(SHOWN, ids(find.fitting("setStorage")))
        self.assertEqual(ids(find.fitting("zebra crossing")), [])
        self.assertEqual(ids(find.fitting("replaced parameter")), ids(find.fitting("parameter replaced")))

    def test_worst_first(self):
        """Consequence comes before exposure, exposure before component, and among equals the arguable ones are last."""
        like = registry.defect(SHOWN)
        wrong, error = Consequence.SILENTLY_WRONG, Consequence.ERROR
        common, rare = Exposure.COMMON, Exposure.RARE
        kinds = [
            (wrong, common, Component.FSDP2, ""),
            (wrong, common, Component.FSDP1, ""),
            (wrong, rare, Component.FSDP2, ""),
            (wrong, rare, Component.FSDP2, "It is meant."),
            (wrong, rare, Component.DTENSOR, ""),
            (wrong, rare, Component.FSDP1, ""),
            (wrong, Exposure.HARDWARE, Component.FSDP2, ""),
            (error, Exposure.DEFAULT, Component.FSDP2, ""),
            (error, rare, Component.FSDP2, ""),
        ]
        defects = [
            dataclasses.replace(like, id=f"{9 - index}", consequence=effect, exposure=who, component=part, arguable=why)
            for index, (effect, who, part, why) in enumerate(kinds)
        ]
        self.assertEqual(registry.worst_first(reversed(defects)), defects)
        actual = registry.chosen(defects, exposure={common, Exposure.DEFAULT}, consequence={error}, component=None)
        self.assertEqual(actual, [defects[-2]])
        self.assertEqual(texts.by_exposure(defects), "1 default, 2 common, 5 rare, 1 hardware")

    def test_arguable_defects_are_marked_in_every_list(self):
        defect = registry.defect("fsdp2_second_order_gradients_raise")
        present = Answer.PRESENT
        lists = {
            "list": texts.listing([defect]),
            "find and using": texts.answer(defect, "2.13.0"),
            "findings": texts.details(trial.Finding(defect, present, present)),
            "changes": changes._line(defect, "2.9"),
            "page": versions_page._defect(defect, ["2.13"]).partition("</summary>")[0],
            "changes on the page": versions_page._list([defect]),
            "report of a run": KnownDefect(defect.id).facts()["title"],
        }
        marked = [f"{title} (arguable)" for title in (defect.title, page.prose(defect.title))]
        unmarked = [name for name, text in lists.items() if not any(words in text for words in marked)]
        self.assertEqual(unmarked, [])

    def test_features(self):
        """A defect fits if all of its features are in use. The worst defect comes first."""
        actual = find.by_features({"fsdp2", "offload", "tp"})
        self.assertTrue(all({*defect.uses} <= {"fsdp2", "offload", "tp"} for defect in actual))
        self.assertIn("dtensor_uneven_rows_with_tp_are_reordered", ids(actual))
        self.assertEqual(actual, registry.worst_first(actual))
        interfaces = {defect.uses[0] for defect in find.by_features({"offload"})}
        self.assertEqual(interfaces, {"fsdp1", "fsdp2"})


class TestChanges(TestCase):
    """Without it, ``--between`` could leave out a defect that was introduced, or list one that both versions have."""

    def test_from_one_version_to_the_next(self):
        actual = changes.between("2.13", "2.14")
        self.assertIn("fsdp1_writes_to_inputs_are_lost", ids(actual.fixed))
        of_spmd_types = ["fsdp2_order_of_spmd_axes_is_lost"]
        self.assertEqual((ids(actual.introduced), ids(actual.in_new_features)), ([], of_spmd_types))
        words = "torch 2.14 lets parameters of FSDP2 keep the annotations of the package spmd-types."
        self.assertEqual(actual.new, [words])

    def test_lines_have_the_version_of_the_change(self):
        """Also in steps over several versions. A defect of a feature that the older version lacks is no regression."""
        fixed, others = changes.text("2.9", "2.15").split("Introduced (")
        introduced, in_new = others.split("In new features (")
        self.assertRegex(fixed, r"fsdp2_outputs_in_dataclasses_raise .* \(fixed in 2\.12\)")
        self.assertRegex(introduced, r"compiler_cached_graph_of_another_rank .* \(since 2\.12\)")
        self.assertRegex(in_new, r"fsdp2_order_of_spmd_axes_is_lost .* \(since 2\.14\)")

    def test_all_versions_add_up(self):
        """Introduced and not fixed later are the defects that the last version has and the first does not."""
        versions = registry.versions()
        has: list[set[str]] = [{id for id in registry.ids() if registry.defect(id).is_in(versions[0])}]
        for older, newer in itertools.pairwise(versions):
            step = changes.between(older, newer)
            has.append(has[-1] - {*ids(step.fixed)} | {*ids(step.introduced), *ids(step.in_new_features)})
        total = changes.between(versions[0], versions[-1])
        self.assertEqual({*ids(total.introduced), *ids(total.in_new_features)}, has[-1] - has[0])
        self.assertEqual({defect.id for defect in total.fixed}, has[0] - has[-1])
        sentences = [*total.new, *total.changed]
        self.assertEqual(len(sentences), sum(not fact.fixes for fact in torch_facts.facts().values()))


class TestPage(TestCase):
    """Without it, the page could lack a defect or its versions. ``test_pages`` checks the form of pages."""

    def test_every_defect_has_its_part(self):
        page = versions_page.render()
        self.assertEqual(sorted(re.findall(r'<details class=file id="(\w+)"', page)), registry.ids())
        worst = page.partition("<h2>The worst of torch ")[2].partition("</ul>")[0]
        newest = registry.versions()[-1]
        shown = [registry.defect(id) for id in re.findall(r'href="#(\w+)"', worst)]
        order = [(each.exposure.position, each.consequence.position) for each in shown]
        self.assertEqual((len(shown), order), (10, sorted(order)))
        exposed = [each for each in registry.defects() if each.is_in(newest) and each.exposure is Exposure.DEFAULT]
        self.assertEqual({*ids(exposed)} - {*ids(shown)}, set(), may_be="empty")
        defect = registry.defect("fsdp2_partial_group_loses_gradients")  # introduced in 2.12, fixed in 2.13
        part = page.partition(f'id="{defect.id}"')[2].partition("<details class=file")[0]
        marks = re.findall(r'data-title="([\d.]+)" title="torch [\d.]+ has the defect"', part)
        self.assertEqual(marks, ["2.12"])
        self.assertIn(html.escape(texts.script(defect)), part)
        self.assertIn("fully_shard(a)", part)
        self.assertIn('data-state="silently wrong" data-feature="FSDP2|Wrapping" data-exposure="rare"', part)

    def test_it_is_written(self):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "new", "defects.html")
            self.assertEqual(command("--html", str(path))[:2], (0, ""))
            self.assertEqual(path.read_text(encoding="utf-8"), versions_page.render())


class TestCommand(TestCase):
    """Without it, ``--find`` and ``--using`` could print less than they find, or accept a wrong argument."""

    def test_traceback_on_standard_input(self):
        status, out, _ = command("--find", "-", stdin=TRACEBACKS["optimizer_ignored_parameters_break_foreach"])
        self.assertEqual(status, 0)
        self.assertIn("\n\noptimizer_ignored_parameters_break_foreach (error, rare): ", out)
        last = "1 limit and 1 known defect fits (0 default, 0 common, 1 rare, 0 hardware); --show ID prints a script"
        last += " for one"
        self.assertEqual(out.splitlines()[-1], last)

    def test_what_this_torch_has_comes_first(self):
        """Several defects end in ``setStorage``, and 2.12 fixed one of them."""
        message = "RuntimeError: setStorage: sizes [2], strides [1] are out of bounds for storage of size 0"
        with of_torch("2.13.0"):
            printed = re.findall(r"^(\w+) \(", command("--find", message)[1], re.MULTILINE)
        self.assertEqual(printed[-1], "fsdp2_outputs_in_dataclasses_raise")

    def test_nothing_fits(self):
        nothing = "0 known defects fit; try other words, or the whole traceback; --list shows all\n"
        self.assertEqual(command("--find", "-", stdin=TRACEBACKS["user_wrong_key"])[:2], (1, nothing))
        for bare in ("AssertionError:", "AssertionError", "RuntimeError:\n"):
            self.assertEqual(command("--find", bare)[:2], (1, nothing))
        word, message = (command("--find", "-", stdin=text)[1] for text in ("setStorage", "RuntimeError: setStorage\n"))
        self.assertEqual(word, message)

    def test_using_prints_what_this_torch_has(self):
        with of_torch("2.14.0"):
            status, out, _ = command("--using", "FSDP2, tp")
        self.assertEqual(status, 0)
        printed = re.findall(r"^(\w+) \(", out, re.MULTILINE)
        has = [each for each in find.by_features({"fsdp2", "tp"}) if each.expected("2.14.0") is Answer.PRESENT]
        self.assertEqual(printed, ids(has))
        self.assertNotIn("dtensor_uneven_rows_with_tp_are_reordered", printed)

    def test_kinds_choose_among_what_fits(self):
        """--using and --find show only defects of these kinds, and their last line counts them."""
        for how in (("--using", "fsdp2"), ("--find", "evaluation")):
            with self.subTest(how):
                every, common = (command(*how, *kinds)[1] for kinds in ((), ("--exposure", "common")))
                printed = re.findall(r"^(\w+) \((?:[a-z ]+), common\): ", every, re.MULTILINE)
                self.assertEqual(re.findall(r"^(\w+) \(", common, re.MULTILINE), printed)
                self.assertGreater(len(printed), 0)
                self.assertIn(f"(0 default, {len(printed)} common, 0 rare, 0 hardware)", common)

    def test_bad_arguments(self):
        cases = {
            ("fsdp2_divide_twice",): "there is no defect 'fsdp2_divide_twice': did you mean fsdp2_divides_twice",
            ("zzz*",): "there is no defect 'zzz*': --list shows all",
            ("--show", "nothing_like_it_zz"): "there is no defect 'nothing_like_it_zz'",
            ("--component", "FSDP2,FSDP3"): "there is no component 'fsdp3'; there are FSDP2, DTensor, ",
            ("--patch", "fsdp2_divide_twice"): "did you mean fsdp2_divides_twice",
            ("--exposure", ""): "there is no exposure ''; there are default, common, rare, hardware",
            (SHOWN, "--consequence", "hang"): "none of these defects has these kinds",
            ("--using", "fsdp2,tensor"): "there is no feature 'tensor'; there are fsdp1, fsdp2, ",
            ("--using", ""): "there is no feature ''",
            ("--between", "2.15.0", "2.9.1"): "2.15 is not older than 2.9",
            ("--between", "2.9", "2.9.1"): "2.9 is not older than 2.9",
            ("--between", "1.13", "2.9"): "the registry knows torch 2.9 to ",
            ("--between", "2.9", "newest"): ", and not newest",
            ("--html", os.sep): f"--html: {os.sep} is a folder; name a file",
            ("--find", "-"): "--find needs words or a traceback",
            ("--find", " "): "--find needs words or a traceback",
        }
        assert_rejected(self, main, cases.items())


if __name__ == "__main__":
    run_tests()
