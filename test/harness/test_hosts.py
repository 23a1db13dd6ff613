"""The suite under torchrun on two hosts, which are network namespaces of this machine."""

import functools
import subprocess
from collections.abc import Sequence

from hosts import NAMES, TwoHosts
from launches import RANKS_FAIL, TORCHRUN, WELL, Node, SuiteRun

from torch_fsdp_tests.common_utils import TestCase, run_tests

PORT = 29511
SILENCE = 30  # seconds until a lost machine must be noticed
SECONDS = 15  # seconds to report it: the tests of the file get a moment to leave
_begun: list[SuiteRun] = []
_hosts: TwoHosts


def setUpModule():
    global _hosts
    _hosts = TwoHosts("10.213.7")


def tearDownModule():
    for run in _begun:
        run.stop()
    _hosts.close()


def launch(
    rendezvous: str, files: Sequence[str], per_node: int, addresses: Sequence[str], **variables: str
) -> SuiteRun:
    """Run the suite's command with ``per_node`` ranks on each host. ``{}`` in a variable is the host's interface."""
    nodes = []
    for host, device in enumerate(_hosts.devices):
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(per_node), "--node-rank", str(host)]
        if rendezvous == "static":
            torchrun += ["--rdzv-backend", "static", "--master-addr", addresses[0], "--master-port", str(PORT)]
        else:
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:{PORT}"]
            # Otherwise torchrun looks up the address of its own name, which does not resolve.
            torchrun += ["--rdzv-conf", f"is_host={host == 0}", "--local-addr", addresses[host]]
        own = {key: value.replace("{}", device) for key, value in variables.items()}
        nodes.append(Node(torchrun, _hosts.prefix(host), own))
    run = SuiteRun(files, *nodes)
    _begun.append(run)
    return run


@functools.cache
def lost() -> SuiteRun:
    """Two ranks on each host, and the harness finds the interface. The link goes down in the last file that begins."""
    files = ["well", "ranks_fail", "process_dies", "link_goes_down", "two_ranks"]
    try:
        return launch("c10d", files, 2, _hosts.addresses, LINK="{}").end(nodes=1)
    finally:
        _hosts.connect()


class TestTwoHosts(TestCase):
    """Without it, a run that needs a name server, or the same machine, or a link that never fails, could pass."""

    def test_names_of_hosts_do_not_resolve(self):
        for host, other in ((0, NAMES[1]), (1, NAMES[0])):
            command = [*_hosts.prefix(host), "getent", "hosts", other]
            self.assertEqual(subprocess.run(command, timeout=30).returncode, 2, f"{NAMES[host]} knows {other}")

    def test_every_kind_of_file_passes(self):
        self.assertEqual(lost().outcomes("well"), WELL)
        self.assertEqual(lost().report["hosts"], {"hosta": "ranks 0-1", "hostb": "ranks 2-3"})

    def test_verdicts_name_the_hosts(self):
        self.assertEqual(lost().outcomes("ranks_fail"), RANKS_FAIL)
        for test in lost().of_file("ranks_fail")["tests"]:
            if test["ranks"]:
                self.assertEqual([rank["host"] for rank in test["ranks"]], ["hosta"] * 2 + ["hostb"] * 2)

    def test_process_of_the_other_host_that_dies_is_named(self):
        for words in ("rank 3", "hostb", "SIGKILL", "sleep 1001"):
            self.assertIn(words, lost().reasons("process_dies"))

    def test_link_that_goes_down_ends_the_run(self):
        """The run ends once and in time, names the cause, and keeps all earlier results."""
        run = lost()
        outcomes = {"TestRanks.test_1_goes": "crashed", "TestRanks.test_2": "not run"}
        self.assertEqual(run.outcomes("link_goes_down"), outcomes)
        self.assertRegex(run.report["lost"], r"^the process of rank \d \(id \d+ on hostb\) .*so the run ends$")
        self.assertEqual(run.text.count("so the run ends"), 1)
        self.assertEqual(run.report["exit_code"], 3)
        (crashed,) = [test for test in run.of_file("link_goes_down")["tests"] if test["outcome"] == "crashed"]
        self.assertRegex(crashed["reason"], r"was stopped because the process of rank \d .* was lost$")
        self.assertLess(run.seconds_after_fault, SILENCE + SECONDS)
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertEqual(run.left, [])

    def test_slow_link_that_loses_packets(self):
        """Every packet takes 50 ms, and each hundredth is lost. The user names the interface, and torchrun's store."""
        try:
            link = _hosts.slow_link("10.213.8", delay=0.05, lost_of=100)
        except OSError as error:
            self.skipTest(f"needs TUN devices (/dev/net/tun): {error}")
        self.addCleanup(link.close)
        run = launch("static", ["well"], 1, link.addresses, GLOO_SOCKET_IFNAME="{}s").end()
        self.assertEqual(run.codes, [0, 0], run.text)
        self.assertEqual(run.outcomes("well"), WELL)
        self.assertGreater(link.lost, 0)
        self.assertEqual(run.left, [])


if __name__ == "__main__":
    run_tests()
