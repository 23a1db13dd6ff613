"""The suite under torchrun on two hosts, which are network namespaces of this machine."""

import functools
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from launches import LOST, TORCHRUN, WELL, Node, SuiteRun
from two_hosts import NAMES, TwoHosts

from torch_fsdp_tests.common_utils import TestCase, run_tests

PORT = 29511
LINK_IS_DOWN = {"hosta": "ok", "hostb": "lost"}
SILENCE = 8  # seconds until a lost machine must be detected
SECONDS = 15  # seconds to report it: the tests of the file get a moment to leave
_hosts: TwoHosts  # whose link goes down
_others: TwoHosts


def setUpModule():
    global _hosts, _others
    _hosts, _others = TwoHosts("10.213.7"), TwoHosts("10.213.8")


def torchruns() -> list[Node]:
    """One rank on the first host and two on the second one. The harness finds the interface."""
    launchers = []
    for host, (device, address) in enumerate(zip(_hosts.devices, _hosts.addresses, strict=True)):
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(1 + host), "--node-rank", str(host)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{_hosts.addresses[0]}:{PORT}"]
        # Without these options, torchrun looks up the address of its host's name, which does not resolve.
        torchrun += ["--rdzv-conf", f"is_host={host == 0}", "--local-addr", address]
        launchers.append(Node(torchrun, _hosts.prefix(host), {"LINK": device}))
    return launchers


def by_hand(**variables: str) -> list[Node]:
    """One rank on each host, without a program that launches them."""
    common = {"TORCH_FSDP_TESTS_LAUNCHED": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", **variables}
    common |= {"MASTER_ADDR": _others.addresses[0], "MASTER_PORT": str(PORT)}
    return [Node([sys.executable], _others.prefix(host), common | {"RANK": str(host)}) for host in range(2)]


@functools.cache
def begun() -> tuple[SuiteRun, SuiteRun]:
    """A run in which the link goes down in the second of three files. And two rounds with a test that fails in the
    second round, at the last rank.
    """
    lost = SuiteRun(["well", "link_goes_down", "well"], *torchruns())
    return lost, SuiteRun(["fails_in_turn"], *by_hand(EVERY="2"), arguments=["--repeat", "2"])


@functools.cache
def lost() -> SuiteRun:
    return begun()[0].end(nodes=1)


@functools.cache
def rounds() -> SuiteRun:
    return begun()[1].end()


class TestTwoHosts(TestCase):
    """Without it, runs on several hosts could depend on a name server, on one machine, or on links that never fail."""

    def test_names_of_hosts_do_not_resolve(self):
        for host, other in ((0, NAMES[1]), (1, NAMES[0])):
            command = [*_hosts.prefix(host), "getent", "hosts", other]
            self.assertEqual(subprocess.run(command, timeout=30).returncode, 2, f"{NAMES[host]} knows {other}")

    def test_every_kind_of_file_passes(self):
        self.assertEqual(lost().outcomes("well"), WELL)
        hosts = lost().report["hosts"]
        self.assertEqual({name: host["ranks"] for name, host in hosts.items()}, {"hosta": [0], "hostb": [1, 2]})

    def test_link_that_goes_down_ends_the_run(self):
        """The run ends once and in time, names the cause, and keeps all earlier results."""
        run = lost()
        self.assertEqual(run.outcomes("link_goes_down"), LOST)
        self.assertRegex(run.report["lost"], r"^the process of rank \d \(id \d+ on hostb\) .*so the run ends$")
        self.assertEqual(run.text.count("so the run ends"), 1)
        self.assertEqual(run.report["exit_code"], 3)
        (crashed,) = [test for test in run.of_file("link_goes_down")["tests"] if test["outcome"] == "crashed"]
        self.assertRegex(crashed["reason"], r"was stopped because of the loss of the process of rank \d ")
        self.assertLess(run.seconds_after_fault, SILENCE + SECONDS)
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertEqual({name: host["verdict"] for name, host in run.report["hosts"].items()}, LINK_IS_DOWN)
        self.assertEqual(run.left, [])

    def test_host_of_a_rank_that_fails_in_some_rounds_is_suspect(self):
        run = rounds()
        self.assertEqual(run.report["exit_code"], 4, run.text)
        hosts = run.report["hosts"]
        names = "verdict", "passed", "failed", "began"
        reported = {host: tuple(facts[name] for name in names) for host, facts in hosts.items()}
        self.assertEqual(reported, {"hosta": ("ok", 3, 1, 0), "hostb": ("suspect", 3, 1, 1)})
        self.assertAlmostEqual(sum(host["share"] for host in hosts.values()), 1.0, delta=0.01)
        self.assertIn("hostb is suspect: 1 failure began there, and none on the other hosts", run.text)
        words = r"failed in 1 of 2 rounds \(round 2\): rank 1 on hostb raised RuntimeError: expected 4 elements, got 3"
        self.assertRegex(run.text, words)
        failed = next(test for test in run.of_file("fails_in_turn")["tests"] if test["outcome"] != "passed")
        self.assertEqual([rank["host"] for rank in failed["ranks"]], ["hosta", "hostb"])
        self.assertEqual(run.left, [])


if __name__ == "__main__":
    run_tests()
