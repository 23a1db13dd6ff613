"""Runs the whole suite's command under a launcher, for other tests to check. Not a test file."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).parent / "inputs" / "launched_suite.py"
LIMIT = 560  # seconds for a launch
TEST_LIMIT = 120  # seconds for one of its tests
START_LIMIT = 200  # seconds for it to reach a certain test
GONE = 20  # seconds after the end of a launch in which everything of it must disappear
STOP_LIMIT = 10  # seconds for a launcher to end its ranks
TORCHRUN = (sys.executable, "-m", "torch.distributed.run")


@dataclasses.dataclass(frozen=True)
class Node:
    """One launcher: its command, which takes a Python script, and what to put before it."""

    launcher: Sequence[str]
    prefix: Sequence[str] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)


# The outcomes of the tests of some files.
RANKS_FAIL = {
    "TestRanks.test_1_raises": "error",
    "TestRanks.test_2_exits": "crashed",
    "TestRanks.test_3_is_killed": "crashed",
    "TestRanks.test_4_hangs": "timed out",
    "TestRanks.test_5_passes": "passed",
}
LOST = {"TestMachine.test_1_is_lost": "crashed", "TestMachine.test_2_comes_after": "not run"}
WAITS = {"TestWaits.test_waits": "not run"}
WELL = dict.fromkeys(
    ("TestAll.test_sum", "TestAlone.test_passes", "TestFirstTwo.test_sum", "TestThreads.test_sum"), "passed"
)


class SuiteRun:
    """``run_test.py`` under one launcher per node. It starts at once; :meth:`end` waits for it and reads its results.

    ``files`` are names of files that ``inputs/launched_suite.py`` stands for.
    """

    def __init__(self, files: Sequence[str], *nodes: Node) -> None:
        self.scratch = Path(tempfile.mkdtemp(prefix="launched-"))
        tree = self.scratch / "test" / "distributed"
        tree.mkdir(parents=True)
        for number, name in enumerate(files):
            shutil.copy(FILE, tree / f"test_{number}_{name}.py")
        self.started = self.scratch / "started"
        self.started.mkdir()
        self._report = self.scratch / "report"
        self._outputs = []
        self._processes = []
        clean = {name: value for name, value in os.environ.items() if not name.startswith("TORCH_FSDP_TESTS_")}
        clean.pop("GLOO_SOCKET_IFNAME", None)
        for number, node in enumerate(nodes):
            temporary = self.scratch / f"tmp{number}"
            temporary.mkdir()
            own = {"TMPDIR": str(temporary), "OMP_NUM_THREADS": "1", "STARTED": str(self.started)}
            limit = {"DISTRIBUTED_TESTS_DEFAULT_TIMEOUT": str(TEST_LIMIT), "PYTHONPATH": str(ROOT)}
            output = open(self.scratch / f"output{number}", "w+b")
            command = [*node.prefix, *node.launcher, str(ROOT / "run_test.py")]
            command += ["--test-directory", str(self.scratch / "test"), "--keep-going", "--report", str(self._report)]
            self._processes.append(
                subprocess.Popen(
                    command,
                    env=clean | own | limit | dict(node.variables),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            )
            self._outputs.append(output)
        self.report: dict[str, Any] = {}

    def wait_for(self, mark: str) -> None:
        """Wait until a process of the run has left this mark."""
        give_up = time.monotonic() + START_LIMIT
        while not (self.started / mark).exists() and time.monotonic() < give_up:
            time.sleep(0.05)

    def signal(self, number: int) -> None:
        """Send a signal to the first launcher."""
        self._processes[0].send_signal(number)

    def stop(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.terminate()  # it ends its ranks then
                try:
                    process.wait(STOP_LIMIT)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()

    def end(self, nodes: int | None = None) -> "SuiteRun":
        """Wait for the first ``nodes`` only: a torchrun that has lost its store runs on for many minutes."""
        self.codes = [process.wait(timeout=LIMIT) for process in self._processes[:nodes]]
        self.texts = []
        for output in self._outputs:
            output.seek(0)
            self.texts.append(output.read().decode(errors="backslashreplace"))
            output.close()
        self.text = self.texts[0]
        give_up = time.monotonic() + GONE
        while (left := self._left()) and time.monotonic() < give_up:
            time.sleep(0.05)
        self.left = left
        if (path := self._report / "report.json").exists():
            self.report = json.loads(path.read_text())
            fault = self.started / "fault"
            self.seconds_after_fault = path.stat().st_mtime - fault.stat().st_mtime if fault.exists() else None
        self.stop()
        shutil.rmtree(self.scratch, ignore_errors=True)
        return self

    def _left(self) -> list[str]:
        """Processes and folders of the run that still exist, except torchrun itself."""
        folders = [
            str(path) for path in self.scratch.glob("tmp*/*") if path.name.startswith(("run_test", "torch_fsdp"))
        ]
        processes = []
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if f"={self.scratch}/".encode() in (path / "environ").read_bytes():
                    command = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    processes += [command] * ("torch.distributed.run" not in command)
            except OSError:
                continue
        return folders + processes

    def outcomes(self, file: str) -> dict[str, str]:
        """The outcome of each test of a file."""
        return {test["test"]: test["outcome"] for test in self.of_file(file)["tests"]}

    def reasons(self, file: str) -> str:
        """Everything that the report says about a file."""
        return json.dumps(self.of_file(file), ensure_ascii=False)

    def of_file(self, file: str) -> dict[str, Any]:
        files = [each for each in self.report.get("files", ()) if each["file"].endswith(f"_{file}")]
        if not files:
            raise AssertionError(f"{file} is not in the report; the nodes said:\n{self.texts}")
        return files[0]
