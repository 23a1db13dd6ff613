"""Planning, selecting, options and devices, as functions of numbers and names. No test file runs."""

import contextlib
import dataclasses
import io
import itertools
import random
import re
import types
import unittest.mock
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trees import FolderCase

from torch_fsdp_tests.device import vendors
from torch_fsdp_tests.device.vendors import Vendor
from torch_fsdp_tests.dispatch import devices, expectations, keywords, last_failures, options, plan, times
from torch_fsdp_tests.dispatch.devices import find, loads_extensions, parse_names
from torch_fsdp_tests.dispatch.discover import discover
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.expectations import MalformedList
from torch_fsdp_tests.dispatch.file_result import Attempt, EndKind, FileResult, ProcessEnd
from torch_fsdp_tests.dispatch.last_failures import WHOLE_FILE, Failed
from torch_fsdp_tests.dispatch.plan import Job, ShardedTest, TestRun, calculate_shards
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import Execution, Output, RunTests, Selection
from torch_fsdp_tests.dispatch.select import UnknownTest, select
from torch_fsdp_tests.installed_torch.version_ranges import version_fits
from torch_fsdp_tests.settings import ConfigurationError
from torch_fsdp_tests.verdict import State, TestResult
from torch_fsdp_tests.verdict.stream import Announced

ROOT = Path(__file__).resolve().parents[2]


def jobs_of(*shapes: tuple[int, float | None]) -> list[Job]:
    """Jobs from pairs of slots and seconds, in path order."""
    return [
        Job(ShardedTest(TestRun(f"f{number:05d}"), time=seconds), slots, slots)
        for number, (slots, seconds) in enumerate(shapes)
    ]


class TestShards(unittest.TestCase):
    """Without it, the shards of a run could omit a test or run it twice, or one shard could take far too long."""

    def test_union_is_the_selection(self):
        tests = [TestRun(f"t{number}") for number in range(23)]
        rng = random.Random(7)
        for known in (0, 9, 23):
            times = {f"t{number}": rng.uniform(1, 2000) for number in range(known)}
            expected = sorted(map(str, plan.split(tests, times, {}, 600)))
            for shards in (1, 2, 5, 23, 60):
                with self.subTest(known=known, shards=shards):
                    dealt = calculate_shards(shards, tests, times)
                    self.assertEqual(sorted(str(part) for _, parts in dealt for part in parts), expected)
                    self.assertEqual(dealt, calculate_shards(shards, tests, times))

    def test_loads_are_even(self):
        tests = [TestRun(f"t{number}") for number in range(6)]
        dealt = calculate_shards(2, tests, dict(zip((t.file for t in tests), (60, 50, 40, 30, 20, 10), strict=True)))
        self.assertEqual([load for load, _ in dealt], [110, 100])

    def test_unknown_times_spread(self):
        dealt = calculate_shards(4, [TestRun(f"t{number}") for number in range(8)], {})
        self.assertEqual([len(parts) for _, parts in dealt], [2, 2, 2, 2])

    def test_part_of_a_file_takes_its_classes_time(self):
        """And some tests of a class their share of it. B inherits its tests, so their share is not known."""
        times, names = {"f": {"ACPU": 8.0, "B": 7.0}}, {"f": {"A": ["test_1", "test_2", "test_3", "test_4"], "B": []}}
        for included, excluded, seconds in (
            *((("B",), (), 7.0), ((), ("B",), 8.0), (("C",), (), None), (("A*",), (), 8.0), (("A*.test_1",), (), 2.0)),
            *(
                (("A*.test_1", "A*.test_[34]"), (), 6.0),
                (("A*.test_9",), (), 8.0),
                (("A*.test_1", "B.test_1"), (), 9.0),
            ),
        ):
            with self.subTest(included=included, excluded=excluded):
                test = TestRun("f", frozenset(included), frozenset(excluded))
                self.assertEqual(plan.estimate(test, {"f": 15.0}, times, names), seconds)
        self.assertEqual(plan.estimate(TestRun("f", frozenset(["A.1"]), seconds=0.5), {"f": 12.0}, times), 0.5)


class TestOrder(unittest.TestCase):
    """Without it, a file that needs all devices could wait forever, or files could get more slots than exist."""

    def test_equal_or_unknown_estimates_keep_path_order(self):
        for seconds in (None, 3.0):
            jobs = jobs_of((1, seconds), (4, seconds), (2, seconds))
            self.assertEqual(plan.order(reversed(jobs), 4, 60), jobs)

    def test_longest_first(self):
        short, long = jobs_of((1, 1.0), (1, 9.0))
        self.assertEqual(plan.order([short, long], 2, 60), [long, short])

    def test_wide_job_does_not_starve(self):
        wide, *narrow = jobs_of((4, 5.0), *[(1, 3.0)] * 40)
        # One narrow job runs already, so the wide one cannot start. The others must not delay it forever.
        placed = plan.simulate([narrow[0], wide, *narrow[1:]], 4, 60)
        start = {placement.job.key: placement.start for placement in placed}
        self.assertEqual(start[wide.key], 3.0)

    def test_a_gap_is_filled_but_not_past_the_promise(self):
        """The promise is the time at which the wide job starts."""
        for seconds, began in ((10.0, 0.0), (11.0, 15.0)):
            first, wide, filler = jobs_of((3, 10.0), (4, 5.0), (1, seconds))
            start = {p.job.key: p.start for p in plan.simulate([first, wide, filler], 4, 60)}
            self.assertEqual((start[wide.key], start[filler.key]), (10.0, began))

    def test_nothing_overlaps(self):
        rng = random.Random(3)
        jobs = jobs_of(*((rng.choice((1, 2, 4, 8)), rng.uniform(1, 50)) for _ in range(120)))
        placed = plan.simulate(plan.order(jobs, 8, 60), 8, 60)
        self.assertEqual(sorted(p.job.key for p in placed), [job.key for job in jobs])
        for moment in (placement.start for placement in placed):
            self.assertLessEqual(sum(p.job.slots for p in placed if p.start <= moment < p.end), 8)
        shared_evenly = sum(job.slots * job.part.get_time() for job in jobs) / 8
        self.assertLess(plan.makespan(placed), 1.1 * shared_evenly)


class TestDevices(FolderCase):
    """Without it, a run could test the CPU instead of the device, or ignore a mistake in a vendor's package."""

    def test_names(self):
        self.assertEqual(parse_names("0-2,5,GPU-ab"), ("0", "1", "2", "5", "GPU-ab"))
        for text in ("", "3-1", "1,1", "0-2,1"):
            with self.subTest(text=text), self.assertRaises(ValueError):
                parse_names(text)

    def test_every_vendors_variables(self):
        """The variable that the caller has set names the devices, is passed to jobs, and selects the vendor."""
        for vendor in vendors.BUILT_IN:
            for variable in vendor.visibility_variables:
                with self.subTest(vendor.device_type, variable=variable), self.built_for(vendor.torch_build):
                    for requested in (None, vendor.device_type):
                        device_set = find(requested, None, {variable: "3,5"})
                        self.assertEqual((device_set.type, device_set.names), (vendor.device_type, ("3", "5")))
                        self.assertEqual(device_set.environment((1,)), {**vendor.environment, variable: "5"})
                        self.assertEqual((device_set.backend, device_set.remark), (vendor.backend, None))
                    for nothing in ("-1", "", "none"):
                        self.assertEqual(find(None, None, {variable: nothing}).type, "cpu")  # the CPU is the subject

    @staticmethod
    def built_for(name: str | None) -> AbstractContextManager[object]:
        """A version of PyTorch that was built for a device. Without a name, an extension adds the device."""
        versions = {"__version__": "2.13.0"} | ({name: "1"} if name else {})
        return unittest.mock.patch.object(devices.sources, "versions", lambda: versions)

    @staticmethod
    @contextlib.contextmanager
    def declared(entries: dict[str, Any], autoload: bool = True, build: str | None = None) -> Iterator[None]:
        """Packages that declare these values, by device type, and a version of PyTorch that is built for ``build``.

        ``autoload`` says whether torch imports the packages' extensions.
        """
        points = {name: unittest.mock.Mock(value=f"{name}:VENDOR") for name in entries}
        for name, value in entries.items():
            points[name].load = unittest.mock.Mock(side_effect=[value] * 9)
        with (
            TestDevices.built_for(build),
            unittest.mock.patch.object(vendors, "installed", lambda: points),
            unittest.mock.patch.object(devices, "loads_extensions", lambda environment: autoload),
        ):
            yield

    def test_a_package_declares_its_devices(self):
        foo = Vendor("foo", ("FOO_VISIBLE",), lambda: 3, "fooccl")
        with self.declared({"foo": foo}):
            for requested in ("foo", None):
                found = find(requested, None, {})
                self.assertEqual((found.type, found.names, found.backend), ("foo", ("0", "1", "2"), "fooccl"))
                self.assertEqual(found.environment((0, 2)), {"FOO_VISIBLE": "0,2"})
            self.assertEqual(find("foo", ("7",), {}).names, ("7",))
            self.assertEqual(find(None, None, {"FOO_VISIBLE": "1,2"}).names, ("1", "2"))
        with self.declared({"foo": foo}, autoload=False):
            self.assertEqual(find(None, None, {}).type, "cpu")  # the CPU is the subject
        with self.declared({"cuda": Vendor("cuda", ("FOO_VISIBLE",))}, build="cuda"):
            self.assertEqual(find("cuda", ("0",), {}).variable, "FOO_VISIBLE")  # a package overrides us

    def test_a_device_without_a_variable_is_lent_whole_or_not_at_all(self):
        with self.declared({"foo": Vendor("foo", count_devices=lambda: 3)}):
            device_set = find("foo", None, {})
            self.assertTrue(device_set.is_assigned_whole)
            self.assertIn("each file gets all 3 of them, one file at a time", device_set.remark or "")
            self.assertEqual(device_set.environment((0, 1, 2)), {})
            with self.assertRaisesRegex(ConfigurationError, "--devices: .* gets all of them or none"):
                find("foo", ("0",), {})
        with self.declared({}):  # an extension that torch imports may define this device
            unknown = find("foo", None, {})
        self.assertFalse(unknown.is_assigned_whole)
        self.assertIn("none are assigned", unknown.remark or "")

    def test_variables_of_every_job(self):
        """A job gets the vendor's variables, unless the caller has set them, whatever is assigned."""
        foo = Vendor("foo", ("FOO_VISIBLE",), lambda: 2, environment={"FOO_QUIET": "1"})
        with self.declared({"foo": foo}):
            device_set = find("foo", None, {})
            self.assertEqual(device_set.environment((1,)), {"FOO_QUIET": "1", "FOO_VISIBLE": "1"})
            self.assertEqual(find("foo", None, {"FOO_QUIET": "0"}).environment((1,)), {"FOO_VISIBLE": "1"})
        shared = device_set.shared()  # files that run at a time see all devices
        self.assertEqual((shared.assignable, shared.is_assigned_whole), (0, False))
        self.assertEqual(shared.environment(()), {"FOO_QUIET": "1", "FOO_VISIBLE": "0,1"})

    def test_a_package_that_declares_no_vendor(self):
        """The CPU is not tested instead, unless it is named."""
        for value, words in (
            (print, "is a builtin_function_or_method; declare"),
            (ImportError("gone"), "cannot be imported: ImportError: gone"),
            (SystemExit(3), "cannot be imported: SystemExit: 3"),
            (ConfigurationError("a reason"), "is wrong: a reason"),
            (Vendor("bar"), "declares a Vendor of 'bar'; both must have the same name"),
        ):
            for requested, autoload in (("foo", True), (None, True), (None, False)):
                with self.subTest(words, requested=requested), self.declared({"foo": value}, autoload):
                    with self.assertRaisesRegex(ConfigurationError, f"^the entry point foo:VENDOR for 'foo' {words}"):
                        find(requested, None, {})
                    self.assertEqual(find("cpu", None, {}).type, "cpu")  # the CPU is the subject

    def test_a_declaration_that_is_wrong(self):
        for name, values, expected in (
            ("visibility_variables", [1, "FOO", ("",)], "with a comma"),
            ("device_type", ["", None], "the name of a device type"),
            ("count_devices", [2], "a function without arguments"),
            ("backend", [len], "a text"),
            ("environment", [("FOO", "1"), {"FOO": 1}], "a dictionary of texts"),
            ("describe", ["torch_foo.testing.describe"], "'package.module:function'"),
        ):
            for value in values:
                words = f"^{name} of the Vendor is {re.escape(repr(value))}; it must be .*{expected}"
                with self.subTest(name, value=value), self.assertRaisesRegex(ConfigurationError, words):
                    fields: dict[str, Any] = {"device_type": "foo", name: value}
                    Vendor(**fields)

    def test_a_count_that_fails(self):
        def fails() -> int:
            raise OSError("no driver")

        for count, words in ((fails, "failed: OSError: no driver"), (lambda: "2", "returned '2'"), (lambda: -1, "-1")):
            with self.declared({"foo": Vendor("foo", ("FOO",), count)}):  # type: ignore[arg-type]
                with self.subTest(words), self.assertRaisesRegex(ConfigurationError, f"count_devices .* {words}"):
                    find("foo", None, {})

    def test_no_device_is_there(self):
        with self.declared({"foo": Vendor("foo", ("FOO",), lambda: 0), "bar": Vendor("bar")}):
            for environment, words in (({}, "count_devices of its vendor returned 0"), ({"FOO": ""}, "FOO is ''")):
                with self.subTest(words), unittest.mock.patch.dict("os.environ", environment):
                    with self.assertRaisesRegex(ConfigurationError, words):
                        devices.check(find("foo", None, environment), "foo", None, None)
            with unittest.mock.patch.object(devices, "_ask_torch") as ask_torch:
                devices.check(find("bar", None, {}), "bar", None, None)
            ask_torch.assert_called_once_with("bar", None, None)  # only torch knows the number

    def test_a_range_in_a_variable(self):
        found = find(None, None, {"NEURON_RT_VISIBLE_CORES": "0-2, 5"})
        self.assertEqual((found.type, found.names), ("neuron", ("0", "1", "2", "5")))
        self.assertEqual(found.environment((1, 3)), {"NEURON_RT_VISIBLE_CORES": "1,5"})

    def test_a_negative_index_ends_the_list(self):
        self.assertEqual(find("cuda", None, {"CUDA_VISIBLE_DEVICES": "4,-1,5"}).names, ("4",))

    @unittest.skipIf(devices.torch_version() is None, "torch is not installed")
    def test_vendor_that_cannot_be_imported_is_refused_before_the_first_test(self):
        """The message names the error of an extension that ``import torch`` loads."""
        (self.root / "torch.py").write_text("raise OSError('libfoo.so: no such file')")
        words = "^torch cannot be imported: OSError: libfoo.so: no such"
        with unittest.mock.patch.object(devices.sys, "path", [str(self.root), *devices.sys.path]):
            with self.assertRaisesRegex(ConfigurationError, words):
                devices._ask_torch(None, None, None)

    def test_an_extension_that_torch_imports_may_bring_a_device(self):
        with unittest.mock.patch("importlib.metadata.entry_points", lambda group: [group]):
            self.assertTrue(loads_extensions({}))
            self.assertFalse(loads_extensions({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}))
        with unittest.mock.patch("importlib.metadata.entry_points", lambda group: []):
            self.assertFalse(loads_extensions({}))


class TestSelect(FolderCase):
    """Without it, a name on the command line could select other tests, or a misspelt name could select none."""

    names = [f"distributed/{name}" for name in ("fsdp/test_core", "fsdp/test_comm", "_composable/fsdp/test_x")]
    names.append("test_top")

    def chosen(self, include: Sequence[str], exclude: Sequence[str] = (), within: Sequence[str] = ()) -> list[TestRun]:
        source = "class TestA(TestCase):\n def test_one(self): ...\nclass TestB(TestCase):\n def test_two(self): ...\n"
        with unittest.mock.patch("torch_fsdp_tests.dispatch.select.source_of", lambda path: source):
            files = {name: Path(f"{name}.py") for name in self.names}
            return select(files, include, exclude, Path("/somewhere/test"), within)

    def test_files_that_pytest_would_find(self):
        for name in ("test_a.py", "b/c_test.py", "testing.py", "b/latest.py", "b/._d_test.py", ".git/test_e.py"):
            (self.root / name).parent.mkdir(exist_ok=True)
            (self.root / name).touch()
        found = discover(self.root)
        self.assertEqual([*found], ["b/c_test", "test_a"])
        for word in ("b/c_test", "b/c_test.py", "b", "b/*_test.py"):
            self.assertEqual(select(found, [word], [], self.root), [TestRun("b/c_test")])

    def test_a_file_precedes_the_folder_of_its_name(self):
        files = {name: self.root / f"{name}.py" for name in (self.root.name, "test_other")}
        self.assertEqual(select(files, [self.root.name], [], self.root), [TestRun(self.root.name)])

    def test_ways_to_name(self):
        name = "distributed/fsdp/test_core"
        for word in (name, f"./{name}", f"test/{name}.py", f"/somewhere/test/{name}.py", "distributed/fsdp/*core"):
            with self.subTest(word=word):
                self.assertEqual(self.chosen([word]), [TestRun(name)])
        for words, number in ((["distributed/fsdp/"], 2), (["distributed/_composable/*"], 1), (["test"], 4), ([], 4)):
            self.assertEqual(len(self.chosen(words)), number)
        self.assertEqual([test.file for test in self.chosen([], ["distributed"])], ["test_top"])

    def test_what_is_included_and_not_excluded(self):
        """All pairs of a file, a class and some tests, included and excluded. No part is left without a test."""
        tests = ["TestA.test_one", "TestA.test_two", "TestB.test_one", "TestB.test_two"]
        names = ["", "::TestA", "::TestA::test_one", "::TestB::test_two"]
        sides = [[f"test_top{name}" for name in pair] for n in (1, 2) for pair in itertools.combinations(names, n)]

        def named(words: Sequence[str]) -> set[str]:
            inside = [word.removeprefix("test_top").replace("::", ".").removeprefix(".") for word in words]
            return {test for test in tests for name in inside if f"{test}.".startswith(f"{name}.".lstrip("."))}

        for include, exclude in itertools.product(sides, [[], *sides]):
            with self.subTest(include=include, exclude=exclude):
                parts = [{tests[place] for place in part.selected(tests)} for part in self.chosen(include, exclude)]
                left = named(include) - named(exclude)
                self.assertEqual(parts, [left] if left else [])

    def test_unknown_names_its_neighbors(self):
        folders = {"distributed/fsdp/test_cor": "test_core", "distributed/fdsp": "distributed/fsdp"}
        for word, near in {**folders, "test_comn": "test_comm", "test_top::TestC": "TestA"}.items():
            with self.subTest(word=word), self.assertRaisesRegex(UnknownTest, f"nearest: .*{near}"):
                self.chosen([word])
        for include, exclude in (([], ["nothing_like_it"]), ([""], []), ([" "], [])):
            with self.subTest(include=include), self.assertRaises(UnknownTest):
                self.chosen(include, exclude)


class TestKeywords(unittest.TestCase):
    """Without it, ``-k`` could run other tests than pytest, or none of those that a glob names."""

    names = ("TestOk.test_ok_1", "TestOk.test_ok_2", "TestBad.test_bad_1", "tests.more.TestMore.test_or_else")

    def test_what_an_expression_selects(self):
        for numbers, texts in {
            (1,): ("OK_1", "Ok.test_ok_1", "test_?k_[13]", "_1 and not bad"),
            (2,): ("TestOk.*_2", "w0 or _2"),
            (3,): ("TestB*", "*Bad", "not(ok)and(_1)"),
            (4,): ("or_else", "not (ok or bad)"),
            (1, 2): ("ok", "test_ok_*", "ok or bad and nothing"),
            (1, 3): ("*_1", "(ok or bad) and _1"),
            (3, 4): ("not ok",),
            (): ("__main__",),
        }.items():
            for text in texts:
                with self.subTest(text):
                    holds = keywords.parse(text)
                    selected = [number for number, name in enumerate(self.names, 1) if holds(name)]
                    self.assertEqual(selected, [*numbers])

    def test_what_is_no_expression(self):
        deep = "(" * 999 + "a" + ")" * 999
        for text in ("a b", "not", "a and", "or a", "()", "a()", "a (b)", "(a", "a)", "not not", "a or or b", deep):
            with self.subTest(text[:20]), self.assertRaisesRegex(keywords.MalformedExpression, "not an expression"):
                keywords.parse(text)


def flat(run: RunTests) -> Any:
    """All options of a run in one object."""
    parts = [run.selection, run.execution, run.output]
    fields = {name: value for part in parts for name, value in vars(part).items()}
    ignored = [words.rpartition(": ")[2].split(", ") for words in run.output.remarks if "no effect here" in words]
    fields |= {"without_effect": tuple(*ignored), "is_narrowed_by_file": run.selection.is_narrowed_by_file}
    return types.SimpleNamespace(**fields)


class TestOptions(unittest.TestCase):
    """Without it, an option or a variable could have no effect, or a senseless value could be accepted."""

    def parse(self, *arguments: str, **environment: str) -> Any:
        return flat(options.parse([*arguments, "--list"], environment, ROOT))

    def rejected(self, *arguments: str, **environment: str) -> str:
        with contextlib.redirect_stderr(io.StringIO()) as stderr, self.assertRaises(SystemExit) as left:
            options.parse([*arguments], environment, ROOT)
        self.assertEqual(left.exception.code, ExitStatus.USAGE_ERROR)
        return stderr.getvalue()

    def test_every_option_sets_the_field_of_its_name(self):
        fields = {field.name for part in (Selection, Execution, Output) for field in dataclasses.fields(part)}
        with unittest.mock.patch("torch_fsdp_tests.extension.found", dict):
            named = {action.dest for action in options.make_parser()._actions}
        self.assertLessEqual(named - {"help", "version", "without_effect"}, fields)

    def test_omitted_options_keep_their_defaults(self):
        tests = ROOT / "test"
        run = options.parse(["--list"], {}, ROOT)
        self.assertEqual(run, RunTests(Selection(tests, tests), output=Output(list_files=True)))

    def test_what_follows_from_an_option(self):
        run = self.parse("--shard", "2", "3", "--seed", "7", "-i", "a", "b", "-i", "c", "--pipe-logs")
        self.assertEqual((run.shard, run.num_shards, run.seed, run.shuffle), (2, 3, 7, True))
        self.assertEqual((run.include, run.pipe_logs, run.logs_by_option), (("a", "b", "c"), True, True))
        run = flat(options.parse(["--list", "--", "--locals", "--", "-v", "--seed"], {}, ROOT))
        self.assertEqual(run.arguments, ("--locals", "--", "-v", "--seed"))
        others = ["--list", "--test-directory", str(ROOT), "--", "--device"]
        self.assertEqual(options.parse(others, {}, ROOT).execution.arguments, ("--device",))

    def test_command_lines_of_upstreams_ci(self):
        """What has no effect here is reported once. TestSelecting of test_run has some of these lines."""
        valued = " ".join(f"{name} 7" for name in options.WITHOUT_EFFECT_WITH_VALUE)
        lines: dict[str, dict[str, object]] = {
            "--xdoctest-command list --no-showlocals -i a": {"show_locals": False, "include": ("a",)},
            " ".join(options.WITHOUT_EFFECT): {"without_effect": options.WITHOUT_EFFECT},
            valued: {"without_effect": options.WITHOUT_EFFECT_WITH_VALUE},
            "-pno:cacheprovider -dist=loadfile -rfEX -i a": {
                "without_effect": ("-p", "-dist", "-r"),
                "include": ("a",),
            },
            " ".join(options.ELSEWHERE): {"elsewhere": options.ELSEWHERE, "without_effect": ()},
            "--hw-classification cpu CUDA": {"hw_classification": ("CPU", "CUDA")},
            "-pt --bring-to-front a b -i c": {"without_effect": ("-pt", "--bring-to-front"), "include": ("c",)},
            "--pytest-k-expr (a) -k b": {"patterns": ("(a)", "b"), "without_effect": ()},
        }
        for line, fields in lines.items():
            with self.subTest(line):
                run = self.parse(*line.split(), TEST_SHOWLOCALS="1")
                self.assertEqual({name: getattr(run, name) for name in fields}, fields)
        run = self.parse("--distributed-tests", "--timeout", "9", NO_TD="1", PYTORCH_TEST_WITH_DYNAMO="0")
        nothing, timeout = run.remarks
        self.assertEqual(nothing, "these options and variables of PyTorch's CI have no effect here: NO_TD")
        self.assertTrue(timeout.startswith("--timeout limits a file here, and a test in PyTorch's CI; "), timeout)

    def test_classes_of_hardware(self):
        """All tests here are for any device. Those of another directory may have other classifications."""
        of_accelerators = "--hw-classification ACCELERATOR leaves out nothing: all tests here are for any device"
        other = "--hw-classification leaves out nothing: what test classes set as hw_classification is not read"
        elsewhere = "no test is here of what --hw-classification CPU CUDA would run of PyTorch"
        for words, directory, remarks, answer in (
            ("cpu CUDA", (), (), elsewhere),
            ("cpu accelerator", (), (of_accelerators,), None),
            ("cpu CUDA", ("--test-directory", str(ROOT)), (other,), None),
        ):
            run = options.parse(["--list", "--hw-classification", *words.split(), *directory], {}, ROOT)
            self.assertEqual((run.output.remarks, run.selection.elsewhere_in_words), (remarks, answer))

    def test_no_command_takes_abbreviations(self):
        for arguments, option in ((("--rank", "3"), "--ranks"), (("--pytest-k", "a"), "--pytest-k-expr")):
            words = f"unrecognized arguments: {arguments[0]}; did you mean {option}?\n"
            self.assertIn(words, self.rejected(*arguments))
        for path in (*(ROOT / "torch_fsdp_tests").rglob("*.py"), ROOT / ".ci/gpu"):
            with self.subTest(path):
                self.assertNotRegex(path.read_text(), r"argparse\.ArgumentParser\((?!.*allow_abbrev=False)")

    def test_variables_of_upstreams_ci(self):
        """An option has priority. TestSelecting of test_run has those that select files."""
        for variables, fields in (
            ({"PYTORCH_TEST_RUN_EVERYTHING_IN_SERIAL": "1"}, {"jobs": 1}),
            ({"PYTORCH_TEST_RUN_EVERYTHING_IN_SERIAL": "0"}, {"jobs": None}),
            ({"CONTINUE_THROUGH_ERROR": "yes"}, {"keep_going": True}),
        ):
            run = self.parse(**variables)
            self.assertEqual({name: getattr(run, name) for name in fields}, fields)
        parts = {"SHARD_NUMBER": "2", "NUM_TEST_SHARDS": "6"}
        self.assertEqual(self.parse(**parts).remarks, ("SHARD_NUMBER selects part 2 of 6",))
        run = self.parse("--shard", "1", "3", "-j", "4", PYTORCH_TEST_RUN_EVERYTHING_IN_SERIAL="1", **parts)
        self.assertEqual((run.shard, run.num_shards, run.jobs, run.remarks), (1, 3, 4, ()))
        for variables, words in (
            ({"SHARD_NUMBER": "2"}, "set both SHARD_NUMBER and NUM_TEST_SHARDS, or give --shard\n"),
            ({"SHARD_NUMBER": "7", "NUM_TEST_SHARDS": "6"}, "SHARD_NUMBER is '7': give a whole number from 1 to 6\n"),
        ):
            self.assertIn(words, self.rejected(**variables))

    def test_refusals(self):
        for arguments, words in {
            ("--shard", "3", "2"): "shards are counted from 1 to 2",
            ("--shard", "0", "2"): "'0' is not a whole number from 1 to 10000",
            ("--shard", "1", "1000000000"): "'1000000000' is not a whole number from 1 to 10000",
            ("-j", "100000000"): "'100000000' is not a whole number from 1 to 10000",
            ("--ranks", "9" * 5000): f"'{'9' * 40}' is not a whole number from 1 to 65536",
            ("--seed", str(2**64)): "is not a whole number from 0 to 18446744073709551615",
            ("--timeout", "0"): "'0' is not a number of seconds greater than 0",
            ("--timeout", "1e308"): "'1e308' is not a number of seconds greater than 0 and up to 31622400",
            ("--timeout", "nan"): "'nan' is not a number of seconds",
            ("--devices", "0-99999999999"): "'0-99999999999' has more than 10000 devices",
            ("--devices", "1,1"): "names a device twice",
            ("--devices", "0-"): "'0-' is not a range of devices, such as 0-7",
            ("-k", ""): "an empty pattern would select every test",
            ("-k", "a b"): "-k/--pytest-k-expr: 'a b' is not an expression: join words and globs with and, or, not",
            ("--perturb", "all"): "--perturb was removed: python -m torch_fsdp_tests.check",
            ("--shrd", "3"): "unrecognized arguments: --shrd; did you mean --shard?\n",
            ("-f", "a"): "unrecognized arguments: -f; --help shows all options\n",
            ("--xyzzy=1",): "unrecognized arguments: --xyzzy=1; --help shows all options\n",
            ("--nope",): "unrecognized arguments: --nope; --help shows all options\n",  # dashes do not count
            ("--keep-going", "--", "-i", "smoke"): "-i follows --, so test files would get it: put it before --\n",
            ("--", "-v", "--shard=1"): "--shard=1 follows --",
            ("--json",): "--json can only be used with --dry-run",
            ("--test-directory", "/nowhere"): "/nowhere does not exist; name one",
            ("--rerun-disabled-tests",): "needs a list",
        }.items():
            with self.subTest(arguments=arguments):
                self.assertIn(words, self.rejected(*arguments))
        for name, text, words in (
            ("TORCH_FSDP_TESTS_RANKS", "x", "a whole number from 1 to 65536"),
            ("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", "abc", "a whole number from 1 to 1000000000"),
            ("TORCH_FSDP_TESTS_START", "nope", "it must be fork or spawn"),
        ):
            with self.subTest(name=name, text=text):
                self.assertRegex(self.rejected(**{name: text}), rf"^run_test.py: {name} is '{text}': .*{words}\n$")
        self.assertEqual(self.parse("--seed", str(2**64 - 1)).seed, 2**64 - 1)


class TestMemory(FolderCase):
    """Without it, ``--failed`` could leave out a test that still fails, or run one that has passed since."""

    def of_run(
        self, before: Failed, outcomes: dict[str, str], *included: str, parts: int = 1, stopped: bool = False
    ) -> Failed:
        """The failures of a file that are remembered after a run with these outcomes, if ``before`` was known."""
        tests = tuple(TestResult(State(outcome), name=name) for name, outcome in outcomes.items())
        job = Job(ShardedTest(TestRun("f", frozenset(included)), 1, parts), 0)
        ending = ProcessEnd(EndKind.STOPPED) if stopped else ProcessEnd(EndKind.EXITED, 0)
        file = FileResult((Attempt(job, ending, tests, 0.0, 1.0, announced=Announced(matched=frozenset())),))
        return last_failures.remembered(before, [file], is_narrowed=False)

    def test_what_a_run_says_about_a_file(self):
        def failed(*tests: str) -> Failed:
            return Failed(tests)

        good, bad = {"T.a": "passed"}, {"T.a": "failed", "T.b": "passed"}
        both, cut_off = failed("T.a", "T.b"), {"T.b": "not run"}
        for expected, run in {
            "what failed": (failed("T.a"), self.of_run(Failed(), bad)),
            "what passed is forgotten": (Failed(), self.of_run(failed("T.a"), good)),
            "what is gone is forgotten": (Failed(), self.of_run(failed("T.gone"), good)),
            "what was named and is gone is forgotten": (Failed(), self.of_run(failed("T.gone"), {}, "T.gone")),
            "other tests are not": (failed("T.b"), self.of_run(both, good, "T.a")),
            "nor those of other parts": (failed("T.b"), self.of_run(failed("T.b"), good, parts=2)),
            "nor those that a stop cut off": (failed("T.b"), self.of_run(failed("T.b"), good | cut_off, stopped=True)),
            "nor a whole file by a part of it": (WHOLE_FILE, self.of_run(WHOLE_FILE, good, "T.a")),
            "but by all of it": (Failed(), self.of_run(WHOLE_FILE, good)),
            "a known failure is none": (Failed(), self.of_run(failed("T.a"), {"T.a": "known failure"})),
            "what a failure cut off failed too": (both, self.of_run(Failed(), bad | cut_off)),
        }.items():
            with self.subTest(expected):
                self.assertEqual(*run)

    def test_devices_have_separate_memories(self):
        self.write_json(last_failures.FILE, {"cpu": {"f": ["T.a"]}, "foo": {"f": ["T.b"], "gone": []}})
        last_failures.save(self.root, "foo", ["f"], Results(RunTests(Selection(self.root, self.root))), [])
        loaded = [last_failures.load(self.root, device) for device in ("cpu", "foo", "bar")]
        self.assertEqual(loaded, [{"f": Failed(("T.a",))}, {"f": Failed(("T.b",))}, {}])


class TestLists(FolderCase):
    """Without it, a list could excuse a failure on a version for which it was not written, or have wrong times."""

    def test_versions(self):
        for version, conditions, expected in (
            ("2.13.0+cpu", ">=2.10", True), ("2.9.1", ">=2.10", False), ("2.10.0", ">=2.9,<2.11", True),
            ("2.13.0a0+git", "==2.13", True), ("2.13.1", "!=2.13.1", False),
        ):  # fmt: skip
            with self.subTest(version=version, conditions=conditions):
                self.assertEqual(version_fits(version, conditions), expected)

    def test_invalid_numbers_of_seconds_are_refused(self):
        for text in ("NaN", "Infinity", "1e999", "1e308", "-1", "1" + "0" * 400, "true"):
            for shape, read in (
                ('{"test_1 (__main__.T)": %s}', expectations.read_slow),
                ('{"default": {"default": {"test_x": %s}}}', lambda path: times.load([path], {})),
            ):
                with self.subTest(text=text, shape=shape), self.assertRaisesRegex(MalformedList, "/list.json"):
                    read(self.write_json("list.json", shape % text))

    def test_needs_do_not_shrink(self):
        """A test that skips where the needs are recorded may not tell how many devices it needs elsewhere."""
        for needs in ((4, 4), (2, 1), (3, 5)):
            times.save(self.root, {}, {}, {"test_x": times.Needs(*needs)}, {})
        self.assertEqual(times.load([self.root / times.NEEDS], {}).needs["test_x"], times.Needs(4, 5))

    def test_malformed_needs_are_refused(self):
        for needs in (3, {}, {"ranks": 2}, {"ranks": 2, "devices": 0}, {"ranks": 2, "devices": True}):
            path = self.write_json(times.NEEDS, {"default": {"default": {"test_x": needs}}})
            words = f"{path}: the needs of test_x are"
            with self.subTest(needs=needs), self.assertRaisesRegex(MalformedList, words):
                times.load([path], {})


if __name__ == "__main__":
    unittest.main()
