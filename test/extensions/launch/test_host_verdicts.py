"""The verdict on each host of a launched run, from invented results of ranks."""

import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "dispatch"))

from little_results import file_of

from torch_fsdp_tests.dispatch import stages
from torch_fsdp_tests.dispatch.exit_status import ExitStatus
from torch_fsdp_tests.dispatch.run_results import Results
from torch_fsdp_tests.dispatch.runtests import RunTests, Selection
from torch_fsdp_tests.extension import Features
from torch_fsdp_tests.extensions.launch import hosts
from torch_fsdp_tests.extensions.launch.feature import Launched
from torch_fsdp_tests.extensions.launch.hosts import Host, Hosts
from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.verdict import RankResult, State, TestResult

MACHINE = {"cpu": "Beads", "instruction_sets": "AVX2", "memory": 8.0}
PASSED = {"state": State.PASSED, "reported": "passed"}
RAISED = {"state": State.ERROR, "reported": "error", "exception": "E"}
FOLLOWS = {"state": State.ERROR, "reported": "error", "exception": "RuntimeError", "follows": True}
BROKEN = {"state": State.ERROR, "reported": "error", "exception": "RuntimeError", "message": "bad", "may_follow": True}
GONE = {**BROKEN, "message": "the peer is gone", "at": 1.0}
DIED = {"state": State.CRASHED, "signal": "SIGKILL"}
SILENT = {"state": State.STILL_RUNNING, "killed": True}


def two_hosts() -> Hosts:
    """Two ranks on each of two hosts."""
    return Hosts({"a": Host((0, 1), MACHINE), "b": Host((2, 3), MACHINE)})


def a_test(*ranks: dict[str, Any], outcome: State = State.ERROR, **facts: Any) -> TestResult:
    """A test with these results of its ranks. Without any, all four ranks passed."""
    results = tuple(RankResult(number, **rank) for number, rank in enumerate(ranks))
    outcome = outcome if ranks else State.PASSED
    return TestResult(outcome, name="T.test_1", ranks=results, facts={"world_size": len(ranks) or 4, **facts})


def verdicts(*tests: TestResult) -> dict[str, tuple[str, int, int, int, int]]:
    """The verdict on each host, and how many tests passed, failed, crashed, or were still running on it."""
    results = two_hosts()
    for test in tests:
        results.take(test)
    names = ("verdict", "passed", "failed", "crashed", "silent")
    return {name: tuple(host[each] for each in names) for name, host in results.to_json().items()}


class TestVerdicts(unittest.TestCase):
    """Without it, a healthy host could be drained, or a broken one used again."""

    def test_what_the_ranks_did(self):
        for ranks, first, second in (
            ((), ("ok", 1, 0, 0, 0), ("ok", 1, 0, 0, 0)),
            ((PASSED, PASSED, PASSED, RAISED), ("ok", 1, 0, 0, 0), ("suspect", 0, 1, 0, 0)),
            ((FOLLOWS, FOLLOWS, FOLLOWS, DIED), ("ok", 0, 1, 0, 0), ("suspect", 0, 0, 1, 0)),
            ((SILENT, RAISED, SILENT, SILENT), ("suspect", 0, 1, 0, 0), ("ok", 0, 0, 0, 1)),
            ((RAISED, RAISED, RAISED, RAISED), ("ok", 0, 1, 0, 0), ("ok", 0, 1, 0, 0)),
            ((GONE, GONE, GONE, BROKEN), ("ok", 0, 1, 0, 0), ("suspect", 0, 1, 0, 0)),
            ((BROKEN, BROKEN, BROKEN, BROKEN), ("ok", 0, 1, 0, 0), ("ok", 0, 1, 0, 0)),
            ((GONE, GONE, GONE, DIED), ("ok", 0, 1, 0, 0), ("suspect", 0, 0, 1, 0)),
            ((DIED, PASSED, PASSED, DIED), ("ok", 0, 0, 1, 0), ("ok", 0, 0, 1, 0)),
        ):
            with self.subTest(ranks=ranks):
                self.assertEqual(verdicts(a_test(*ranks)), {"a": first, "b": second})

    def test_what_says_nothing_about_a_host(self):
        """A test on one host, a failure that a list expects, a test without ranks, and a skip."""
        self.assertEqual(verdicts(a_test(RAISED, PASSED)), {"a": ("ok", 0, 1, 0, 0), "b": ("ok", 0, 0, 0, 0)})
        known = a_test(PASSED, PASSED, PASSED, RAISED, outcome=State.KNOWN_FAILURE)
        self.assertEqual(verdicts(known)["b"][0], "ok")
        for result in (
            TestResult(State.PASSED, name="T"),
            TestResult(State.SKIPPED, name="T", facts={"world_size": 4}),
        ):
            self.assertEqual(verdicts(result)["a"], ("ok", 0, 0, 0, 0))

    def test_share_of_time(self):
        results = two_hosts()
        results.take(a_test(rank_cpu=[1.0, 1.0, 3.0, 3.0]))
        self.assertEqual([host["share"] for host in results.to_json().values()], [0.25, 0.75])
        self.assertEqual([host["share"] for host in two_hosts().to_json().values()], [None, None])

    def test_exit_status(self):
        for ranks, expected in (
            ((PASSED, PASSED, PASSED, RAISED), ExitStatus.HOST),
            ((RAISED, RAISED, RAISED, RAISED), ExitStatus.FAILED),
            ((), ExitStatus.OK),
        ):
            with self.subTest(ranks):
                launched = Launched(Launch(0, 4, 0, "a", 1), None)
                launched.hosts = two_hosts()
                results = Results(RunTests(Selection(Path(), Path()), features=Features(launch=launched)))
                file = file_of(a_test(*ranks))
                results.take(file)
                launched.stage(stages.FileEnded(file, results))
                self.assertEqual(results.exit_code(), expected)
                data: dict[str, Any] = {}
                launched.add_to_report(data, results)
                self.assertEqual((data["hosts"].keys(), data["lost"]), ({"a", "b"}, None))

    def test_in_words(self):
        results = two_hosts()
        results.take(a_test(PASSED, PASSED, PASSED, RAISED, rank_cpu=[1.0, 1.0, 1.0, 1.0]))
        results.lose("a")
        data = results.to_json()
        data["b"]["machine"] = MACHINE | {"instruction_sets": "AVX512"}
        self.assertEqual(
            hosts.lines(data),
            [
                "hosts:",
                "  host  ranks  passed  silent  failed  crashed  began here  time  verdict",
                "  a     0-1    1       0       0       0        0           50%   lost",
                "  b     2-3    0       0       1       0        1           50%   suspect",
                "  instruction sets: AVX2 on a, AVX512 on b",
                "a is lost: a process on it is gone, or it cannot be reached",
                "b is suspect: 1 failure began there, and none on the other hosts",
            ],
        )
        table = hosts.table({"hosts": data, "lost": "rank 0 is gone"})
        self.assertEqual((table.rows[1][0], table.sentences[0]), ("b", "rank 0 is gone"))
        self.assertEqual(hosts.lines({"a": data["a"]}), [])
        self.assertEqual(hosts.lines({}), [])

    def test_many_hosts_are_named_together(self):
        machines = {f"n{number}": {"machine": MACHINE | {"cpu": f"Beads {number // 7}"}} for number in range(8)}
        self.assertEqual(hosts.differences(machines), ["CPU: Beads 0 on n0, n1, n2 and 4 more, Beads 1 on n7"])


if __name__ == "__main__":
    unittest.main()
