"""The suite under ``srun`` of a Slurm cluster of two hosts, which are network namespaces of this machine."""

import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from launches import LOST, WAITS, WELL, Node, SuiteRun
from two_hosts import NAMES, TwoHosts

from torch_fsdp_tests.common_utils import TestCase, run_tests

READY_LIMIT = 60  # seconds for Slurm to be ready
DAEMONS = ("munged", "slurmctld", "slurmd")
_slurm: "Slurm"


class Slurm:
    """A Slurm cluster of two hosts with four processors each, until the tests of the module are over.

    It runs as root, from one folder. Raises :class:`unittest.SkipTest`, which names what the machine lacks.
    """

    def __init__(self) -> None:
        lacking = [tool for tool in (*DAEMONS, "srun", "sinfo") if shutil.which(tool) is None]
        if lacking:
            raise unittest.SkipTest(f"needs Slurm with munge: {', '.join(lacking)} not found")
        self.hosts = TwoHosts("10.213.9", resolve=True)  # as the machines of a cluster know each other's names
        self.folder = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.folder.chmod(0o755)  # munged requires it
        self._daemons: list[subprocess.Popen] = []
        unittest.addModuleCleanup(self._close)
        try:
            self._start()
        except BaseException:  # after Ctrl-C, unittest cleans nothing up
            self._close()
            raise

    def _start(self) -> None:
        for name in ("socket", "state", "spool"):
            (self.folder / name).mkdir(mode=0o755)
        (self.folder / "key").write_bytes(os.urandom(1024))
        (self.folder / "key").chmod(0o400)
        self.variables = {"SLURM_CONF": str(self.folder / "slurm.conf")}
        (self.folder / "slurm.conf").write_text(self._configuration())
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\n")  # required, but not used
        files = {"key-file": "key", "socket": "socket/munge", "pid-file": "munged.pid", "log-file": "munged.log"}
        files["seed-file"] = "seed"
        options = [f"--{name}={self.folder / path}" for name, path in files.items()]
        self._daemon(0, "munged", "--foreground", "--force", *options)
        self._wait_until((self.folder / "socket" / "munge").exists)
        self._daemon(0, "slurmctld", "-D", "-c")
        for host, name in enumerate(NAMES):
            self._daemon(host, "slurmd", "-D", "-c", "-N", name)
        self._wait_until(lambda: self.run("sinfo", "--noheader", "--format=%T %D") == "idle 2")

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        give_up = time.monotonic() + READY_LIMIT
        while not ready():
            if time.monotonic() > give_up or any(daemon.poll() is not None for daemon in self._daemons):
                raise unittest.SkipTest(f"needs a Slurm that starts here: {self._complaints()}")
            time.sleep(0.1)

    def _configuration(self) -> str:
        values = {
            "ClusterName": "two",
            "SlurmctldHost": f"{NAMES[0]}({self.hosts.addresses[0]})",
            "AuthInfo": f"socket={self.folder}/socket/munge",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "StateSaveLocation": f"{self.folder}/state",
            "SlurmdSpoolDir": f"{self.folder}/spool/%n",
            "SlurmctldPidFile": f"{self.folder}/slurmctld.pid",
            "SlurmdPidFile": f"{self.folder}/slurmd-%n.pid",
            "SlurmctldLogFile": f"{self.folder}/slurmctld.log",
            "SlurmdLogFile": f"{self.folder}/slurmd-%n.log",
            "ProctrackType": "proctrack/linuxproc",  # no control groups
            "TaskPlugin": "task/none",
            "MpiDefault": "none",
            "JobAcctGatherType": "jobacct_gather/none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU",
            "SlurmdParameters": "config_overrides",  # the machine may have fewer processors than the nodes below
        }
        lines = [f"{name}={value}" for name, value in values.items()]
        for name, address in zip(NAMES, self.hosts.addresses, strict=True):
            lines.append(f"NodeName={name} NodeAddr={address} CPUs=4 State=UNKNOWN")
        lines.append(f"PartitionName=all Nodes={','.join(NAMES)} Default=YES State=UP")
        return "\n".join(lines) + "\n"

    def _daemon(self, host: int, *command: str) -> None:
        with open(self.folder / f"{command[0]}-{host}.output.log", "wb") as output:
            command = (*self.hosts.prefix(host), *command)
            streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.STDOUT}
            environment = os.environ | self.variables
            self._daemons.append(subprocess.Popen(command, env=environment, **streams, start_new_session=True))

    def _complaints(self) -> str:
        lines = [line for path in self.folder.glob("*.output.log") for line in path.read_text().splitlines()]
        return "; ".join(line for line in lines if "error" in line) or f"it was not ready within {READY_LIMIT} s"

    def run(self, *command: str) -> str:
        """Run a program of Slurm's on the first host, and return what it prints."""
        command = (*self.hosts.prefix(0), *command)
        done = subprocess.run(command, env=os.environ | self.variables, capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    def _close(self) -> None:
        for daemon in reversed(self._daemons):
            daemon.terminate()
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


def setUpModule():
    global _slurm
    _slurm = Slurm()


@functools.cache
def begun() -> tuple[SuiteRun, SuiteRun]:
    """A run in which a worker is lost, which does not make srun itself end the job. And a run that waits."""

    def srun(name: str, ranks: int, *files: str) -> SuiteRun:
        """Run these files with this number of ranks on each host."""
        command = ["srun", f"--job-name={name}", "--nodes=2", f"--ntasks-per-node={ranks}", sys.executable]
        return SuiteRun(files, Node(command, _slurm.hosts.prefix(0), _slurm.variables))

    return srun("faults", 2, "well", "worker_dies", "well"), srun("waits", 1, "waits", "well")


@functools.cache
def faults() -> SuiteRun:
    cancelled()  # or the test that waits would reach its limit
    return begun()[0].end()


@functools.cache
def cancelled() -> SuiteRun:
    run = begun()[1]
    run.wait_for("waits")
    _slurm.run("scancel", "--name=waits")
    return run.end()


class TestSrun(TestCase):
    """Without it, ranks could fail to connect to each other under srun, or a cancelled job could leave no report."""

    def test_every_kind_of_file_passes(self):
        self.assertEqual(faults().outcomes("well"), WELL)
        hosts = faults().report["hosts"]
        self.assertEqual({name: host["ranks"] for name, host in hosts.items()}, {"hosta": [0, 1], "hostb": [2, 3]})

    def test_agent_of_the_other_host_that_is_killed_ends_the_run(self):
        self.assertEqual(faults().outcomes("worker_dies"), LOST)
        words = r"^the process of rank \d \(id \d+ on hostb\) .*so the run ends$"
        self.assertRegex(faults().report["lost"], words)
        self.assertEqual(faults().left, [])

    def test_cancelled_job_writes_its_reports(self):
        run = cancelled()
        self.assertEqual(run.report["exit_code"], 128 + signal.SIGTERM)
        self.assertEqual(run.outcomes("waits"), WAITS)
        self.assertEqual(run.left, [])


if __name__ == "__main__":
    run_tests()
