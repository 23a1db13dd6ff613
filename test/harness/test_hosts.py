"""The suite under torchrun on two hosts, which are network namespaces of this machine."""

import functools
import subprocess

from hosts import ADDRESSES, NAMES, TwoHosts
from launches import TORCHRUN, WELL, Node, SuiteRun

from torch_fsdp_tests.common_utils import TestCase, run_tests

PORT = 29511
SILENCE = 8  # seconds until a lost machine must be noticed
SECONDS = 15  # seconds to report it: the tests of the file get a moment to leave
_hosts: TwoHosts


def setUpModule():
    global _hosts
    _hosts = TwoHosts()


def torchruns() -> list[Node]:
    """One rank on the first host and two on the second one, and the harness finds the interface."""
    launchers = []
    for host, (device, address) in enumerate(zip(_hosts.devices, ADDRESSES, strict=True)):
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(1 + host), "--node-rank", str(host)]
        torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[0]}:{PORT}"]
        # Otherwise torchrun looks up the address of its own name, which does not resolve.
        torchrun += ["--rdzv-conf", f"is_host={host == 0}", "--local-addr", address]
        launchers.append(Node(torchrun, _hosts.prefix(host), {"LINK": device}))
    return launchers


@functools.cache
def lost() -> SuiteRun:
    """Rounds of three files. In the second, a test fails at the last rank, and then the link goes down. So the third
    file runs once.
    """
    files = ["fails_in_turn", "link_goes_down", "well"]
    return SuiteRun(files, *torchruns(), arguments=["--repeat", "3"]).end(nodes=1)


class TestTwoHosts(TestCase):
    """Without it, a run that needs a name server, or the same machine, or a link that never fails, could pass."""

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
        self.assertRegex(run.report["lost"], r"^the process of rank \d \(id \d+ on hostb\) .*so the run ends$")
        self.assertEqual(run.text.count("so the run ends"), 1)
        self.assertEqual((run.report["exit_code"], run.report["rounds"]["complete"]), (3, 1))
        lost_test, earlier = run.of_file("link_goes_down")["tests"]
        self.assertEqual((lost_test["outcome"], earlier["outcome"]), ("crashed", "passed"))
        self.assertEqual({test["rounds"]["rounds"] for test in run.of_file("well")["tests"]}, {1})
        self.assertRegex(lost_test["reason"], r"was stopped because the process of rank \d .* was lost$")
        self.assertLess(run.seconds_after_fault, SILENCE + SECONDS)
        self.assertEqual(run.left, [])

    def test_failure_counts_for_the_host_of_the_rank_where_it_began(self):
        run = lost()
        hosts = run.report["hosts"]
        told = {name: (host["verdict"], host["failed"], host["began"]) for name, host in hosts.items()}
        self.assertEqual(told, {"hosta": ("ok", 1, 0), "hostb": ("lost", 1, 1)})
        self.assertAlmostEqual(sum(host["share"] for host in hosts.values()), 1.0, delta=0.01)
        self.assertIn("hostb is lost: a process on it is gone, or it cannot be reached", run.text)
        words = r"failed in 1 of 2 rounds \(round 2\): rank 2 on hostb raised RuntimeError: the weather is bad"
        self.assertRegex(run.text, words)
        failed = next(test for test in run.of_file("fails_in_turn")["tests"] if test["outcome"] != "passed")
        self.assertEqual([rank["host"] for rank in failed["ranks"]], ["hosta", "hostb", "hostb"])


if __name__ == "__main__":
    run_tests()
