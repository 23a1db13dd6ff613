"""What ``--save-map`` records, which tests ``--reaching`` and ``--changed`` run, and ``--fail-fast``."""

import dataclasses
import re
import subprocess
import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_torch import CORE, modules_of, write_sources
from trees import FAIL, PASS, TreeCase, alive, body, little_torch

from torch_fsdp_tests.extensions.reach.reach_map import Executed, ReachMap, build


class CommandCase(TreeCase):
    """The real command, with a fake torch of small modules as the installed one."""

    def setUp(self) -> None:
        super().setUp()
        write_sources(self.root / "site")
        self.map = self.root / "map.json"
        self.with_torch: dict[str, Any] = {"env": {"PYTHONPATH": str(self.root / "site")}}


class TestRecording(CommandCase):
    """Without it, the map could lack code that only ranks, forks or threads run, and its tests would not be found."""

    def test_in_the_process_in_forks_and_in_threads_and_not_around_tests(self):
        text = """
        import threading
        from torch.distributed.fsdp._core import Unit, gather, shard
        class TestX(unittest.TestCase):
            @classmethod
            def setUpClass(cls):
                gather(1)
            tearDownClass = setUpClass
            def test_nothing(self): pass
            def test_process(self): Unit().step()
            def test_process_again(self): Unit().step()
            def test_fork(self):
                pid = os.fork()
                pid or (Unit().back(), os._exit(0))
                os.waitpid(pid, 0)
            def test_thread(self):
                thread = threading.Thread(target=shard, args=[1])
                thread.start()
                thread.join()
            @unittest.skip("not now")
            def test_skipped(self): pass
        """
        says = ["map: .*: 3 functions, entered by 4 of 5 tests"]
        arguments = ["--save-map", self.map]
        self.check({"a/test_x": text}, arguments, passed=5, skipped=1, says=says, **self.with_torch)
        reach_map = ReachMap.load(self.map)
        self.assertEqual((reach_map.torch, {test.file for test in reach_map.tests}), ("9.8.7+x", {"a/test_x"}))
        names = ("shard", "gather", "Unit.step", "Unit.back")  # only the import and the fixture call gather
        reached = {name: [test.test for test in reach_map.tests_of(f"{CORE}.{name}")] for name in names}
        process, fork, thread = ("TestX.test_process", "TestX.test_fork", "TestX.test_thread")
        again = f"{process}_again"  # it runs the same lines a second time in the same process
        expected = {"shard": [thread, process, again], "gather": [], "Unit.step": [process, again], "Unit.back": [fork]}
        self.assertEqual(reached, expected)
        breadths = {process: 2, again: 2, fork: 1, thread: 1, "TestX.test_nothing": 0}
        self.assertEqual({test.test: test.breadth for test in reach_map.tests}, breadths)
        # No test enters the modules of DTensor, so the map does not have them.
        modules = {name: module for name, module in modules_of(self.root / "site/torch").items() if ".fsdp" in name}
        self.assertEqual(reach_map.modules, modules)

    def test_ranks(self):
        text = """
        import torch
        from torch.distributed.fsdp._common_utils import _named_parameters_with_duplicates, clean_tensor_name
        from torch_fsdp_tests.common_distributed import MultiProcessTestCase, MultiThreadedTestCase
        from torch_fsdp_tests.common_utils import run_tests
        class TestProcesses(MultiProcessTestCase):
            world_size = 2
            def setUp(self):
                super().setUp()
                self._spawn_processes()
            def test_second_rank(self):
                if self.rank == 1:
                    clean_tensor_name("x")
            def test_no_rank(self): pass
        class TestThreads(MultiThreadedTestCase):
            world_size = 2
            def setUp(self):
                super().setUp()
                self._spawn_threads()
            def test_second_thread(self):
                if self.rank == 1:
                    _named_parameters_with_duplicates(torch.nn.Linear(1, 1))
        if __name__ == "__main__":  # and not unittest.main()
            run_tests()
        """
        self.check({"test_x": text}, ["--save-map", self.map], passed=3, limit=300)
        reach_map = ReachMap.load(self.map)
        for name, tests in {
            "clean_tensor_name": ["TestProcesses.test_second_rank"],
            "_named_parameters_with_duplicates": ["TestThreads.test_second_thread"],
        }.items():
            reached = reach_map.tests_of(f"torch.distributed.fsdp._common_utils.{name}")
            self.assertEqual([each.test for each in reached], tests)
        self.assertEqual({test.test: test.breadth for test in reach_map.tests}["TestProcesses.test_no_rank"], 0)

    def test_what_a_map_does_not_know_completes_it(self):
        head = "from torch.distributed.fsdp._core import Unit, gather, shard\n"
        self.write({"a/test_x": head + body("shard(1)", "Unit().back()"), "a/test_z": body("pass")})
        self.run_command("--save-map", self.map, **self.with_torch)
        self.assertEqual(self.code, 0, self.out + self.err)
        skips = "raise unittest.SkipTest('')"
        self.write({"a/test_x": head + body("1/0", "gather(1)", "Unit().back()", skips)})
        (self.tree / "a/test_z.py").unlink()
        completed = self.root / "completed.json"
        update = ["--map", self.map, "--save-map", completed]
        self.run_command(*update, **self.with_torch)
        self.assertIn(f"2 tests in 1 file are not in {self.map}\n", self.err)
        self.assertRegex(self.out, r"\n1 passed, 0 failed, 1 skipped\n$")
        made = ReachMap.load(completed)
        names = {name: {test.test[-1] for test in made.tests_of(f"{CORE}.{name}")} for name in ("shard", "Unit.back")}
        self.assertEqual(names, {"shard": {"1"}, "Unit.back": {"2", "3"}})
        self.assertEqual([test.test[-1] for test in made.tests], ["1", "2", "3"])  # and none of a file that is gone
        self.assertEqual(made.skipped, {"a/test_x": ["TestX.test_4"]})
        update[1] = completed
        self.run_command(*update, **self.with_torch)
        self.assertEqual((self.code, self.out), (5, "0 passed, 0 failed, 0 skipped\n"), self.err)
        self.assertIn(f"0 tests in 0 files are not in {completed}\n", self.err)
        write_sources(self.root / "site", _core=("x += LIMIT", "x -= LIMIT"))
        self.run_command(*update, **self.with_torch)
        self.assertEqual(self.code, 2)
        self.assertRegex(self.err, "not with what is installed: without --map a new one is recorded")

    def test_a_run_that_does_not_end_writes_no_map(self):
        files = {"test_x": body("self.fail()"), "test_y": PASS}
        says = ["no map was written, because the run did not finish"]
        self.check(files, ["--save-map", self.map, "-j", 1], failed=1, says=says, **self.with_torch)
        self.assertFalse(self.map.exists())


class TestReaching(CommandCase):
    """Without it, ``--reaching`` could leave out tests, or use the map of another version without a remark."""

    def setUp(self):
        super().setUp()
        executed = {
            ("z/test_y", "TestX.test_1"): Executed([f"{CORE}.Unit.step"], 2.0),
            ("z/test_y", "TestX.test_2"): Executed([f"{CORE}.Unit.step"], 1.0),
            ("test_x", "TestX.test_2"): Executed([f"{CORE}.Unit.step", f"{CORE}.shard"], 1.0),
            ("test_x", "TestX.test_3"): Executed([f"{CORE}.shard"], 1.0),
            ("test_x", "TestX.test_1"): Executed([]),
            ("extensions/more/test_z", "TestP.test_p"): Executed([]),
        }
        self.known = build("9.8.7+y", executed, modules_of(self.root / "site/torch"))
        self.map.write_text(self.known.as_text())
        self.write(
            {"test_x": body("1/0", "pass", "pass"), "z/test_y": body("pass", "pass"), "extensions/more/test_z": PASS}
        )

    def reach(self, *what: object, **more: object) -> str:
        return self.run_command("--map", self.map, "--reaching", *what, **{**self.with_torch, **more})

    def selected(self, *arguments: object, **more: object) -> list[list[str]]:
        """The tests of each job that runs with this map."""
        return [job["tests"] for job in self.jobs("--map", self.map, *arguments, **{**self.with_torch, **more})]

    def test_selects_orders_and_says(self):
        out = self.reach(f"{CORE}.Unit.step", "-v", "-j", 1)
        self.assertEqual(self.code, 0, out + self.err)
        ran = re.findall(r"ok +(\S+)|passed +TestX\.(test_\d)", out)
        self.assertEqual(["".join(each) for each in ran], ["test_x", "test_2", "z/test_y", "test_2", "test_1"])
        self.assertEqual(self.err, "run_test.py: 3 tests in 2 files reach 1 of 1 function\n")
        self.assertNotIn("note:", out)
        (job,) = self.jobs("--map", self.map, "--reaching", "Unit.step", "-i", "test_x", **self.with_torch)
        self.assertEqual((job["file"], job["tests"]), ("test_x", ["TestX.test_2"]))

    def test_a_file_has_several_parts(self):
        names = [(f"test_{file}", f"TestX.test_{number}") for number in range(1, 7) for file in "ab"]
        executed = {name: Executed([f"{CORE}.shard"], 1.0 + place) for place, name in enumerate(names)}
        self.map.write_text(build("9.8.7", executed, modules_of(self.root / "site/torch")).as_text())
        self.write({"test_a": body(*["pass"] * 4, "1/0", "pass"), "test_b": body(*["pass"] * 6)})
        others = ("-x", "test_x", "extensions", "z")
        jobs = self.jobs("--map", self.map, "--reaching", "shard", *others, **self.with_torch)
        parts = [(job["file"], job["shard_id"], job["num_shards"], job["tests"]) for job in jobs]
        tests = [f"TestX.test_{number}" for number in range(1, 7)]
        expected = [
            (file, part, 2, tests[cut])
            for part, cut in ((1, slice(4)), (2, slice(4, 6)))
            for file in ("test_a", "test_b")
        ]
        self.assertEqual(parts, expected)
        out = self.reach("shard", "--keep-going", "-j", 1, *others)
        self.assertEqual((self.code, out.splitlines()[-1]), (1, "11 passed, 1 failed, 0 skipped"), out)
        self.assertEqual([job["tests"] for job in self.jobs("--failed", **self.with_torch)], [["TestX.test_5"]])

    def test_what_no_test_reaches(self):
        news = f"no test enters 2 functions of the change, so nothing guards it: {CORE}.Unit.back, {CORE}.gather\n"
        self.reach("Unit.back", "gather")
        self.assertEqual((self.code, self.out), (5, f"0 passed, 0 failed, 0 skipped\n{news}"))
        self.assertEqual(self.err, "run_test.py: 0 tests in 0 files reach 0 of 2 functions\n")
        self.write({"test_new": PASS})
        self.assertRegex(self.reach("Unit.back", "gather"), f"\n1 passed, 0 failed, 0 skipped\n{news}$")
        self.assertEqual(self.code, 5)  # although a test that is not in the map has passed
        self.write({"test_new": FAIL})
        self.assertRegex(self.reach("Unit.back", "gather"), f"\n0 passed, 1 failed, 0 skipped\n{news}$")
        self.assertEqual(self.code, 1)
        out = self.reach("Unit.back", "Unit.step")
        self.assertRegex(out, "passed.*\nno test enters 1 function of the change.*back\n$")

    def test_what_the_map_does_not_know_runs_last(self):
        self.write({"test_new": "def f(): shard = 1\n" + body("f()", "pass"), "extensions/other/test_o": FAIL})
        known = dataclasses.replace(self.known, skipped={"test_new": ["TestX.test_2"]})
        self.map.write_text(known.as_text())
        make = "def instantiate_device_type_tests(cls):\n    globals()['TestGCPU'] = type('TestGCPU', (cls,), {})\n"
        generated = f"{make}class TestG(unittest.TestCase):\n    def test_g(self): pass\n"
        self.write({"z/test_g": f"{generated}instantiate_device_type_tests(TestG)\ndel TestG\n"})
        out = self.reach("shard", "-x", "test_x::TestX::test_3", "-v", "-j", 1)
        self.assertEqual(self.code, 0, out + self.err)
        self.assertEqual(re.findall(r"passed +(\S+)", out), ["TestX.test_2", "TestX.test_1", "TestGCPU.test_g"])
        self.assertIn("2 tests in 2 files follow, because the map does not know what they reach\n", self.err)
        self.assertIn("left out, because they were skipped when the map was recorded: 1 test\n", self.err)
        self.assertIn(
            "left out, because the map has no test of their folders: extensions/other; -i NAME runs them\n", self.err
        )
        self.assertEqual(self.selected("--reaching", "shard", "-i", "extensions/other"), [["TestF.test_f"]])
        slow = {"env": {**self.with_torch["env"], "PYTORCH_TEST_WITH_SLOW": "1"}}
        elsewhere = [dataclasses.replace(known, torch="9.8.6"), dataclasses.replace(known, device="foo")]
        for other, more in ((known, slow), *((each, self.with_torch) for each in elsewhere)):
            self.map.write_text(other.as_text())
            tests = self.selected("--reaching", "shard", "-i", "test_new", **more)
            self.assertEqual(tests, [["TestX.test_1", "TestX.test_2"]])

    def test_the_last_line_says_why_nothing_ran(self):
        hunk = "@@ -1 +1 @@\n-x\n+y\n"
        layout = "@@ -8,2 +8,2 @@\n     x += LIMIT\n-    return x\n+    return (x)\n"
        core = "torch/distributed/fsdp/_core.py"
        for path, text, words in (
            (
                "torch/csrc/x.cpp",
                hunk,
                "cannot tell which .* torch/csrc/x.cpp, .*; -i extensions/more z runs all of its tests",
            ),
            ("test/z/test_y.py", hunk, "cannot tell which .*; -i z/test_y runs the tests of the same names here"),
            (core, layout, f"nothing that a test could reach has changed: only comments, .* differ in {core}"),
        ):
            with self.subTest(path=path):
                diff = self.write_json("d.diff", f"--- a/{path}\n+++ b/{path}\n{text}")
                self.assertRegex(self.reach(diff), f"^0 passed, 0 failed, 0 skipped\n{words}\n$")
                self.assertEqual((self.code, self.err), (5, ""))
        binary = "diff --git a/torch/x.so b/torch/x.so\nBinary files a/torch/x.so and b/torch/x.so differ\n"
        out = self.reach(self.write_json("b.diff", binary), "-i", "test_x")  # from no folder of the map
        self.assertRegex(out, "of torch/x.so, .*; a run without --reaching runs all of its tests\n$")
        both = f"--- a/torch/csrc/x.cpp\n+++ b/torch/csrc/x.cpp\n{hunk}--- a/{core}\n+++ b/{core}\n"
        diff = self.write_json("d.diff", both + layout.replace("(x)", "(-x)"))
        self.jobs("--map", self.map, "--reaching", diff, **self.with_torch)
        self.assertRegex(self.err, "cannot tell which tests would detect the change of torch/csrc/x.cpp")

    def test_changed(self):
        self.assertEqual((self.selected("--changed"), self.code), ([], 5))
        self.assertEqual(self.err, "run_test.py: nothing that a test could reach has changed\n")
        self.assertNotIn("was recorded with", self.err)  # another build of the same version
        write_sources(self.root / "site", _core=("x += LIMIT", "x -= LIMIT"), version=("9.8.7", "9.9.0"))
        self.assertEqual((self.selected("--changed"), self.code), ([["TestX.test_2", "TestX.test_3"]], 0))
        self.assertIn("the map was recorded with torch 9.8.7+y, but torch 9.9.0+x is installed\n", self.err)

    def test_a_test_that_is_gone(self):
        self.write({"test_x": body("pass", "pass")})
        out = self.reach("shard")
        self.assertEqual(self.code, 0, out)
        self.assertIn("note: selected, but there is no such test here: TestX.test_3", out)

    def test_bad_input_is_refused_in_a_sentence(self):
        (self.root / "folder").mkdir()
        deep = self.write_json("deep.json", '{"a":' * 100_000)
        cases: list[tuple[list[object], str]] = [
            (["--map", self.map, "--reaching", "nonsense"], "'nonsense' is not a name in the map, a file or a folder"),
            (["--map", self.root / "absent", "--changed"], "absent cannot be read: No such file or directory"),
            (["--map", self.root / "folder", "--changed"], "folder cannot be read: Is a directory"),
            (["--map", self.tree / "test_x.py", "--changed"], "test_x.py is not a map of what tests reach"),
            (["--map", deep, "--changed"], "deep.json is nested too deeply to be read"),
            (["--map", self.map], "--map can only be used with --reaching, --changed or --save-map"),
            (["--save-map", self.map, "--coverage"], "cannot be used with"),
            (["--save-map", self.tree], "test is a folder; name a file"),
            (["--fail-fast", "--keep-going"], "--fail-fast and --keep-going cannot be used together"),
        ]
        self.check_errors(cases, **self.with_torch)


class TestFailFast(TreeCase):
    """Without it, ``--fail-fast`` could run on after a failure, or stop at a failure that a list expects."""

    def test_the_first_failing_test_ends_its_file_and_the_others(self):
        marker = self.root / "began"
        waits = f"open({str(marker)!r}, 'w').close(); time.sleep(600)"
        fails = f"while not os.path.exists({str(marker)!r}): time.sleep(0.01)\n        self.fail()"
        text = f"class TestX(unittest.TestCase):\n    def test_1(self): pass\n    def test_2(self):\n        {fails}\n"
        files = {"test_a": text + "    def test_3(self): pass\n", "test_b": body(waits), "test_c": PASS}
        says = [r"ok|FAILED +test_a  2 tests, 1 not run", "stopped +test_b", "1 file not started: test_c"]
        self.check(files, ["--fail-fast", "-j", 2], passed=1, failed=1, says=says, env={"CONTINUE_THROUGH_ERROR": "1"})

    def test_a_failing_fixture_ends_it_too(self):
        text = f"{body('pass')}    setUpClass = lambda: 1/0\n{body('pass', name='TestY')}"
        self.check({"test_x": text}, ["--fail-fast"], failed=1, says=["tests not reached: TestX.test_1, TestY.test_1"])

    def test_a_failure_that_is_listed_or_expected_ends_nothing(self):
        files = {"test_x": body("self.fail()", "pass")}
        self.check(files, ["--fail-fast", *self.known_failures({"test": "test_x::TestX::test_1"})], passed=1, known=1)

    def test_what_was_not_reached_runs_again_with_the_failure(self):
        path = str(self.root / "tried")
        flaky = f"there = os.path.exists({path!r}); open({path!r}, 'w').close(); self.assertTrue(there)"
        self.check({"test_x": body(flaky, "pass")}, ["--fail-fast", "--reruns", 1], passed=2)


class TestForkServer(TreeCase):
    """Without it, files could wait for an import of torch that began too late, or the server could outlive the run."""

    def test_files_wait_for_it(self):
        """It starts before the number of files is known. Tests that are not in the map run last."""
        self.write_own_program()
        files = {f"test_{number}": PASS for number in range(3)}
        function = "torch.distributed.fsdp.f"
        known = build("any", {("test_0", "TestP.test_p"): Executed({function}, 1.0)})
        reaching = ["--reaching", function, "--map", self.write_json("map.json", known.as_text())]
        self.check(files, ["-j1", *reaching], passed=3, env=little_torch(self.root))

    def test_it_goes_with_a_run_that_is_refused(self):
        """Even while the server still imports torch."""
        self.write_own_program()
        self.write({"test_0": PASS})
        environment, file = little_torch(self.root), self.root / "pid"
        text = f"import os, time; open({str(file)!r}, 'w').write(f'{{os.getpid()}}.'); time.sleep(1000)"
        (self.root / "torch/__init__.py").write_text(text)
        known = self.write_json("map.json", build("any", {}).as_text())
        process = self.start("--reaching", "-", "--map", known, env=environment, stdin=subprocess.PIPE)
        (server,) = self.wait_for(process, file)
        _, err = process.communicate("no diff")
        self.assertEqual((process.returncode, alive(server)), (2, False), err)


if __name__ == "__main__":
    unittest.main()
