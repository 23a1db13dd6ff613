"""Launchers, and ``run_test.py`` under them, for other tests. Not a test file."""

import dataclasses
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from runs import ROOT, clean_environment, wait_until

INPUTS = Path(__file__).parent / "inputs"
FILE = INPUTS / "launched_suite.py"
LIMIT = 560  # seconds for a launch
TEST_LIMIT = 120  # seconds for one of its tests
START_LIMIT = 200  # seconds for it to reach a certain test
GONE = 20  # seconds after the end of a launch in which its processes and folders must disappear
STOP_LIMIT = 10  # seconds for a launcher to end its ranks
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclasses.dataclass(frozen=True)
class Node:
    """One launcher: its command, which takes a Python script, and words to put before the command."""

    launcher: Sequence[str]
    prefix: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The expected outcomes of some of the files that ``inputs/launched_suite.py`` represents.
RANKS_FAIL = {
    "TestRanks.test_1_raises": "error",
    "TestRanks.test_2_exits": "crashed",
    "TestRanks.test_3_is_killed": "crashed",
    "TestRanks.test_4_hangs": "timed out",
    "TestRanks.test_5_passes": "passed",
}
PROCESS_DIES = {
    "TestProcess.test_1_raises": "error",
    "TestProcess.test_2_dies": "harness error",
    "TestProcess.test_3_comes_after": "harness error",
}
LOST = {"TestMachine.test_1_is_lost": "crashed", "TestMachine.test_2_comes_after": "not run"}
WAITS = {"TestWaits.test_waits": "not run"}
WELL = dict.fromkeys(
    ("TestAll.test_sum", "TestAlone.test_passes", "TestFirstTwo.test_sum", "TestThreads.test_sum"), "passed"
)


class Launcher:
    """A launcher, which starts at once, and stops at the latest when the tests of the module are over.

    Its temporary files, and those of its ranks, are in a folder of its own.
    """

    def __init__(self, command: Sequence[str], **variables: str) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="launched-"))
        self._output = tempfile.TemporaryFile()
        clean = clean_environment()
        clean.pop("GLOO_SOCKET_IFNAME", None)
        own = {"TMPDIR": str(self._scratch), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command,
            env=clean | own | variables,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        unittest.addModuleCleanup(self.stop)

    def read(self) -> str:
        """What the launcher and its ranks have printed."""
        self._output.seek(0)
        return self._output.read().decode(errors="backslashreplace")

    def remains(self) -> list[str]:
        """Processes and folders of its ranks that still exist."""
        left = [str(path) for path in self._scratch.iterdir() if path.name.startswith(("run_test", "torch_fsdp"))]
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"TMPDIR={self._scratch}".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    left += [command] * ("torch.distributed.run" not in command)
            except OSError:
                continue
        return left

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()  # it ends its ranks then
            try:
                self.process.wait(STOP_LIMIT)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        self._output.close()
        shutil.rmtree(self._scratch, ignore_errors=True)


def left_after(seconds: float, *launchers: Launcher) -> list[str]:
    """The processes and folders of launches that still exist after this many seconds."""

    def left() -> list[str]:
        return [each for launcher in launchers for each in launcher.remains()]

    wait_until(lambda: not left(), seconds)
    return left()


class SuiteRun:
    """``run_test.py`` under one launcher per node. It starts at once; :meth:`end` waits for it and reads its results.
    Its limits for lost machines and for processes that do not end are short.

    ``files`` are names of files that ``inputs/launched_suite.py`` represents.
    """

    def __init__(
        self, files: Sequence[str], *nodes: Node, arguments: Sequence[str] = (), script: str = "impatient_launch.py"
    ) -> None:
        self._scratch = Path(tempfile.mkdtemp(prefix="launched-suite-"))
        unittest.addModuleCleanup(shutil.rmtree, self._scratch, ignore_errors=True)
        tree = self._scratch / "test" / "distributed"
        tree.mkdir(parents=True)
        for number, name in enumerate(files):
            shutil.copy(FILE, tree / f"test_{number}_{name}.py")
        self._started, self._report = self._scratch / "started", self._scratch / "report"
        self._started.mkdir()
        command = [str(INPUTS / script), "--test-directory", str(self._scratch / "test"), "--keep-going"]
        command += ["--report", str(self._report), *arguments]
        own = {"STARTED": str(self._started), "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_LIMIT)}
        self._launchers = [
            Launcher([*node.prefix, *node.launcher, *command], **own, **node.variables) for node in nodes
        ]
        self.report: dict[str, Any] = {}

    def wait_for(self, mark: str) -> None:
        """Wait until a process of the run has left this mark."""
        wait_until((self._started / mark).exists, START_LIMIT)

    def signal(self, number: int) -> None:
        """Send a signal to the first launcher."""
        self._launchers[0].process.send_signal(number)

    def end(self, nodes: int | None = None) -> "SuiteRun":
        """Wait for all or the first ``nodes`` launchers: a torchrun that has lost its store runs on for minutes."""
        self.codes = [launcher.process.wait(LIMIT) for launcher in self._launchers[:nodes]]
        self.texts = [launcher.read() for launcher in self._launchers]
        self.text = self.texts[0]
        self.left = left_after(GONE, *self._launchers)
        if (path := self._report / "report.json").exists():
            self.report = json.loads(path.read_text())
            fault = self._started / "fault"
            self.seconds_after_fault = path.stat().st_mtime - fault.stat().st_mtime if fault.exists() else None
        for launcher in self._launchers:
            launcher.stop()
        return self

    def outcomes(self, file: str) -> dict[str, str]:
        """The outcome of each test of a file."""
        return {test["test"]: test["outcome"] for test in self.of_file(file)["tests"]}

    def reasons(self, file: str) -> str:
        """Everything that the report says about a file."""
        return json.dumps(self.of_file(file), ensure_ascii=False)

    def of_file(self, file: str) -> dict[str, Any]:
        files = [each for each in self.report.get("files", ()) if each["file"].endswith(f"_{file}")]
        if not files:
            raise AssertionError(f"{file} is not in the report; the nodes printed:\n{self.texts}")
        return files[0]
