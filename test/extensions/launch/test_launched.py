"""What a test file reports if torchrun makes its ranks.

A launch of two nodes runs ``inputs/launched.py``. It has every fault but the loss of a process, which
``test_launched_suite`` has.
"""

import dataclasses
import functools
import re
import sys
import unittest.mock
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from launches import INPUTS, TORCHRUN, Launcher, left_after
from runs import NAME, ROOT, assert_rejected, failures, outputs

from torch_fsdp_tests import common_utils, extension
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.dispatch import options
from torch_fsdp_tests.dispatch.runtests import RunTests, Selection
from torch_fsdp_tests.extension import Feature, Features
from torch_fsdp_tests.extensions.launch import EXTENSION, launcher
from torch_fsdp_tests.extensions.launch.feature import Launched
from torch_fsdp_tests.processes import system

FILE = INPUTS / "launched.py"
LIMIT = 300  # seconds for a launch
TEST_LIMIT = 60  # seconds for one of its tests
GONE = 2  # seconds after the end of a launch in which the ranks of a killed process must disappear
TESTS = ["TestAll", "TestHeardLate", "TestHeardAtTheLimit", "TestFewer", "TestMore", "TestStaying", "TestThreads"]


class Launch(Launcher):
    """One torchrun. It starts at once; :meth:`end` waits for it and reads its output and that of its ranks."""

    def __init__(self, options: Sequence[str], tests: Sequence[str], **variables: str) -> None:
        limit = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_LIMIT)}
        super().__init__([*TORCHRUN, *options, str(FILE), "-v", *tests], **limit | variables)

    def end(self) -> "Launch":
        try:
            self.code = self.process.wait(timeout=LIMIT)
            self.text = self.read()
            self.left = left_after(GONE, self)
        finally:
            self.stop()
        self.outcomes: dict[str, list[str]] = {}
        line = rf"^{NAME} \.\.\. (?:.*\n)*?(ok|ERROR|FAIL|skipped .+|expected failure)$"
        for test, cls, outcome in re.findall(line, self.text, re.MULTILINE):
            self.outcomes.setdefault(f"{cls}.{test}", []).append(outcome)
        self.words = failures(self.text)
        return self


@functools.cache
def started() -> dict[str, Launch]:
    nodes = ["--nnodes", "2", "--rdzv-endpoint", f"{system.LOOPBACK}:{common_utils.find_free_port()}"]
    ranks = (["--node-rank", "0", "--nproc-per-node", "2"], ["--node-rank", "1", "--nproc-per-node", "1"])
    first, second = (Launch([*nodes, *own], [*TESTS, "TestAlone"], TORCH_FSDP_TESTS_SHOW_OUTPUT="1") for own in ranks)
    return {"first": first, "second": second}


@functools.cache
def launched(name: str) -> Launch:
    return started()[name].end()


@instantiate_parametrized_tests
class TestTwoNodes(TestCase):
    """Without it, the failure of one rank under torchrun could be lost, and torchrun could end with status 0."""

    def test_every_test_is_reported_once_by_rank_0(self):
        expected = {
            "TestAll.test_asks_first": "skipped 'known before any rank starts'",
            "TestAll.test_dies": "ERROR",
            "TestAll.test_expected_failure": "expected failure",
            "TestAll.test_fails": "FAIL",
            "TestAll.test_hangs": "ERROR",
            "TestAll.test_skips": "skipped 'not today'",
            "TestHeardLate.test_dies": "ERROR",
            "TestHeardAtTheLimit.test_hangs": "ERROR",
            "TestMore.test_is_left_out": "skipped 'needs 5 ranks, but the launcher made 3'",
            "TestStaying.test_3_fails": "ERROR",
        }
        expected |= {f"{cls}.test_passes": "ok" for cls in ("TestAll", "TestFewer", "TestThreads", "TestAlone")}
        expected |= {f"TestFewer.test_{test}": "ok" for test in ("ends_together", "passes_again")}
        later = ("1_begins", "2_same_ranks", "4_new_ranks", "5_ends_together")
        expected |= {f"TestStaying.test_{test}": "ok" for test in later}
        self.assertEqual(launched("first").outcomes, {test: [outcome] for test, outcome in expected.items()})

    @parametrize(
        "test,words",
        [
            ("TestAll.test_fails", ["rank 2 of 3 raised", "stage=7", "only here", "in test_fails"]),
            ("TestAll.test_dies", ["rank 1 of 3 exited with code 3 before reporting"]),
            ("TestHeardLate.test_dies", ["rank 1 of 3 exited with code 3 before reporting"]),
            ("TestAll.test_hangs", ["rank 1 of 3 was still running after", "the limit is 3 s", "in test_hangs"]),
            ("TestStaying.test_3_fails", ["rank 1 of 3 raised", "KeyError: 'lost'"]),
        ],
    )
    def test_tracebacks_travel_to_rank_0(self, test, words):
        text = launched("first").words[test]
        for each in words:
            self.assertIn(each, text)
        self.assertEqual(re.findall(r"^(?:\S+: )?ranks? (\d)", text, re.MULTILINE)[0], words[0].split()[1])

    @parametrize("cls", ["TestAll", "TestHeardAtTheLimit"])
    def test_ranks_that_wait_for_one_that_hangs_are_not_said_to_run(self, cls):
        text = launched("first").words[f"{cls}.test_hangs"]
        self.assertEqual(re.findall(r"(\d+) of 3 \w+ still running", text), ["1"])

    def test_ranks_of_both_nodes_run_every_test(self):
        for rank, local_rank in enumerate([0, 1, 0]):
            self.assertIn(f"rank {rank} of 3 at {local_rank}, launcher's variables: []", launched("first").text)
        second = launched("second")
        self.assertEqual((second.outcomes, second.left), ({}, []))
        self.assertNotIn("Ran ", second.text)

    def test_fixtures_and_single_process_tests_run_once(self):
        self.assertEqual(launched("first").text.count("class fixture of TestAll"), 1)
        self.assertEqual(launched("first").text.count("one process"), 1)

    def test_every_process_leaves_with_the_status_that_rank_0_earned(self):
        launch = launched("first")
        self.assertEqual(launch.code, 1)
        self.assertIn("FAILED (failures=1, errors=5, skipped=3, expected failures=1)", launch.text)
        codes = re.findall(r"rank +: (\d) .*\n +exitcode +: (-?\d+)", launch.text)
        self.assertIn(("0", "1"), codes)  # the launcher did not cut it short
        self.assertEqual(launch.left, [])


FULL = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_ADDR": "here", "MASTER_PORT": "29500"}
ELASTIC = FULL | {"TORCHELASTIC_RUN_ID": "none"}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_NODELIST": "a[07-08]",
    "SLURM_STEP_NUM_NODES": "2",
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
}


def launch_of(environment: Mapping[str, str]) -> launcher.Launch:
    launch = launcher.from_environment(environment)
    if launch is None:
        raise AssertionError(f"no launch is found in {environment}")
    return launch


@instantiate_parametrized_tests
class TestRule(TestCase):
    """Without it, variables left in a shell could make a plain run wait for ranks that never come."""

    def test_torchrun_is_known_by_its_own_variable(self):
        launch = launcher.from_environment(ELASTIC | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
        self.assertEqual(launch, launcher.Launch(1, 4, 1, "here", 29500, agent_store=True))

    @parametrize(
        "left",
        [
            *(FULL, {"RANK": "0", "WORLD_SIZE": "8"}, {"TORCHELASTIC_RUN_ID": "none"}, {}),
            SLURM | {"SLURM_STEP_NUM_TASKS": "1"},  # a shell in an allocation
            SLURM | {"SLURM_STEP_NUM_TASKS": ""},  # a script given to sbatch
            SLURM | {"TORCH_FSDP_TESTS_LAUNCHED": "0"},
        ],
    )
    def test_leftover_variables_of_a_shell_are_no_launch(self, left):
        self.assertIsNone(launcher.from_environment(left))

    def test_a_word_decides(self):
        self.assertIsNotNone(launcher.from_environment(FULL | {"TORCH_FSDP_TESTS_LAUNCHED": "1"}))
        self.assertIsNone(launcher.from_environment(ELASTIC | {"TORCH_FSDP_TESTS_LAUNCHED": "0"}))

    def test_srun_is_known_by_the_variables_of_its_step(self):
        launch = launch_of(SLURM)
        self.assertEqual(launch, launcher.Launch(3, 8, 1, "a07", launch.port))
        self.assertIn(launch.port, range(20000, 30000))
        others = {launch_of(SLURM | {"SLURM_JOB_ID": str(77 + n)}).port for n in range(5)}
        self.assertEqual(len(others), 5)
        self.assertTrue(launch_of(SLURM | {"SLURM_STEP_NUM_NODES": "1"}).one_host)

    def test_torchrun_below_srun_is_the_launcher(self):
        self.assertEqual(launcher.from_environment(SLURM | ELASTIC), launcher.from_environment(ELASTIC))

    @parametrize(
        "nodes,first",
        [("a[1-3,5]", "a1"), ("a[07-11],b", "a07"), ("b7,a[1-2]", "b7"), ("r[0-1]n[2,4]-i,x", "r0n2-i"), ("b", "b")],
    )
    def test_the_first_host_of_a_list(self, nodes, first):
        self.assertEqual(launcher.first_host(nodes), first)

    def test_a_launch_describes_itself_to_other_processes(self):
        for launch in (launch_of(SLURM), launcher.Launch(0, 2, 0, "b", 1, one_host=True)):
            again = launcher.from_environment(launch.variables("0.7"))
            self.assertEqual(again, dataclasses.replace(launch, agent_store=True, attempt="0.7"))

    def test_the_dispatcher_refuses_what_cannot_work(self):
        cases = (
            (["-j", "2"], "one after the other"),
            (["--devices", "0"], "LOCAL_RANK"),
            (["--ranks", "5"], "the launcher made only 4"),
        )
        assert_rejected(self, functools.partial(options.parse, environment=ELASTIC, root=ROOT), cases)

    def test_a_feature_that_needs_ranks_of_its_own_is_refused(self):
        class Measuring(Feature):
            def needs_own_ranks(self, one_host: bool) -> str | None:
                return None if one_host else "--measure measures one machine"

        for one_host, expected in ((True, None), (False, "--measure measures one machine; run it without a launcher")):
            launched = Launched(launcher.Launch(0, 4, 0, "here", 1, one_host=one_host), None)
            run = RunTests(Selection(ROOT, ROOT), features=Features(launch=launched, measuring=Measuring()))
            self.assertEqual(launched.problem(run), expected)

    @parametrize(
        "wrong,words",
        [
            ({"TORCH_FSDP_TESTS_LAUNCHED": "1", "LOCAL_RANK": ""}, "these variables are not set: LOCAL_RANK; set them"),
            ({"TORCH_FSDP_TESTS_LAUNCHED": "yes"}, "is 'yes': it must be 1"),
            ({"RANK": "4"}, "RANK=4 of WORLD_SIZE=4"),
            ({"MASTER_PORT": "any"}, "MASTER_PORT='any'"),
            ({"MASTER_PORT": "99999"}, "MASTER_PORT=99999 cannot be right"),
            ({"MASTER_PORT": "0"}, "MASTER_PORT=0 cannot be right"),
        ],
    )
    def test_nonsense_is_refused(self, wrong, words):
        with self.assertRaisesRegex(launcher.LaunchError, words):
            launcher.from_environment(ELASTIC | wrong)

    def test_a_single_file_refuses_nonsense_in_a_sentence(self):
        find_place = functools.partial(EXTENSION.place, ELASTIC | {"RANK": "4"})
        with unittest.mock.patch.object(extension, "place", find_place):
            status, _, err = outputs(common_utils.main.run_tests, "test_x.py")
        self.assertEqual(status, 2)
        self.assertRegex(err, r"^test_x.py: RANK=4 of WORLD_SIZE=4 cannot be right; [^\n]*\n$")


if __name__ == "__main__":
    run_tests()
