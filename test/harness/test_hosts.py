"""The suite under torchrun on two hosts, which are network namespaces of this machine."""

import functools
import subprocess
from collections.abc import Sequence

from hosts import NAMES, TwoHosts
from launches import RANKS_FAIL, TORCHRUN, WELL, Node, SuiteRun

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests

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
    files: Sequence[str],
    rendezvous: str = "c10d",
    per_node: int = 1,
    addresses: Sequence[str] = (),
    **variables: str,
) -> SuiteRun:
    """Run the suite's command with ``per_node`` ranks on each host."""
    nodes = []
    addresses = addresses or _hosts.addresses
    for host, device in enumerate(_hosts.devices):
        torchrun = [*TORCHRUN, "--nnodes", "2", "--nproc-per-node", str(per_node), "--node-rank", str(host)]
        if rendezvous == "static":
            torchrun += ["--rdzv-backend", "static", "--master-addr", addresses[0], "--master-port", str(PORT)]
        else:
            torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{addresses[0]}:{PORT}"]
            # Otherwise torchrun looks up the address of its own name, which does not resolve.
            torchrun += ["--rdzv-conf", f"is_host={host == 0}", "--local-addr", addresses[host]]
        chosen = {key: value.replace("{}", device) for key, value in variables.items()}
        nodes.append(Node(torchrun, _hosts.prefix(host), chosen))
    run = SuiteRun(files, *nodes)
    _begun.append(run)
    return run


@functools.cache
def faults() -> SuiteRun:
    return launch(["ranks_fail", "import_fails", "process_dies", "well"], per_node=2).end()


def lose_link(file: str, per_node: int) -> SuiteRun:
    run = launch(["well", file, "two_ranks"], per_node=per_node, LINK="{}")
    try:
        return run.end(nodes=1)
    finally:
        _hosts.connect()


class TestWell(TestCase):
    @parametrize("rendezvous,interface", [("c10d", ""), ("static", "{}")], name_fn=lambda rendezvous, _: rendezvous)
    def test_every_kind_of_file_passes(self, rendezvous, interface):
        """One rendezvous lets the harness find the interface. With the other one, the user names it."""
        variables = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
        run = launch(["well"], rendezvous, **variables).end()
        self.assertEqual(run.codes, [0, 0], run.text)
        self.assertEqual(run.outcomes("well"), WELL)
        self.assertEqual(run.report["hosts"], {"hosta": "rank 0", "hostb": "rank 1"})
        self.assertEqual(run.left, [])

    def test_their_names_do_not_resolve(self):
        for host, other in ((0, NAMES[1]), (1, NAMES[0])):
            command = [*_hosts.prefix(host), "getent", "hosts", other]
            self.assertEqual(subprocess.run(command, timeout=30).returncode, 2, f"{NAMES[host]} knows {other}")

    def test_a_slow_link_that_loses_packets(self):
        """Every packet takes 50 ms, and each hundredth is lost."""
        try:
            link = _hosts.slow_link("10.213.8", delay=0.05, lost_of=100)
        except OSError as error:
            self.skipTest(f"needs TUN devices (/dev/net/tun): {error}")
        self.addCleanup(link.close)
        run = launch(["well"], addresses=link.addresses).end()
        self.assertEqual(run.outcomes("well"), WELL)
        self.assertGreater(link.lost, 0)


class TestFaults(TestCase):
    def test_verdicts_are_told_with_the_host(self):
        run = faults()
        self.assertEqual(run.outcomes("ranks_fail"), RANKS_FAIL)
        for test in run.of_file("ranks_fail")["tests"]:
            if test["ranks"]:
                self.assertEqual([rank["host"] for rank in test["ranks"]], ["hosta"] * 2 + ["hostb"] * 2)

    def test_a_file_that_the_other_host_cannot_import(self):
        told = faults().reasons("import_fails")
        for words in ("rank 3", "hostb", "exit status 1", "not to be had here"):
            self.assertIn(words, told)

    def test_a_process_of_the_other_host_that_dies(self):
        told = faults().reasons("process_dies")
        for words in ("rank 3", "hostb", "SIGKILL", "sleep 1001"):
            self.assertIn(words, told)

    def test_later_files_run_and_nothing_is_left_behind(self):
        self.assertEqual(faults().outcomes("well"), WELL)
        self.assertEqual((set(faults().ranks_codes.values()), faults().left), ({1}, []))


class TestLoss(TestCase):
    def test_an_agent_of_the_other_host_is_killed(self):
        run = launch(["two_ranks", "agent_dies", "well"]).end()
        self.assertEqual(
            run.outcomes("agent_dies"), {"TestRanks.test_1_kills": "crashed", "TestRanks.test_2": "not run"}
        )
        self.check_loss(run, "agent_dies", SECONDS)

    def test_the_link_goes_down_under_a_test_of_both_hosts(self):
        run = lose_link("link_goes_down", per_node=1)
        outcomes = {"TestRanks.test_1_goes": "crashed", "TestRanks.test_2": "not run"}
        self.assertEqual(run.outcomes("link_goes_down"), outcomes)
        self.check_loss(run, "link_goes_down", SILENCE)

    def test_the_link_goes_down_before_a_test_of_both_hosts(self):
        """The hosts do not communicate then, until the next test."""
        run = lose_link("link_was_lost", per_node=2)
        outcomes = {"TestFirstTwo.test_passes": "passed", "TestRanks.test_1": "crashed", "TestRanks.test_2": "not run"}
        self.assertEqual(run.outcomes("link_was_lost"), outcomes)
        self.check_loss(run, "link_was_lost", SILENCE)

    def check_loss(self, run: SuiteRun, file: str, limit: float) -> None:
        """The loss ends the run once, names the cause, is in time, and keeps all earlier results."""
        self.assertRegex(run.report["lost"], r"^the process of rank \d \(id \d+ on hostb\) .*so the run ends$")
        self.assertEqual(run.text.count("so the run ends"), 1)
        self.assertEqual(run.report["exit_code"], 3)
        (crashed,) = [test for test in run.of_file(file)["tests"] if test["outcome"] == "crashed"]
        self.assertRegex(crashed["reason"], r"was stopped because the process of rank \d .* was lost$")
        self.assertLess(run.seconds_after_fault, limit + SECONDS)
        self.assertEqual({test["outcome"] for test in run.report["files"][0]["tests"]}, {"passed"})
        self.assertEqual(len(run.report["not_started"]), 1)
        self.assertEqual(run.left, [])


instantiate_parametrized_tests(TestWell)

if __name__ == "__main__":
    run_tests()
