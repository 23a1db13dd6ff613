"""An emulated device that PyTorch cannot distinguish from a real one, for machines without any.

``inputs/abacus`` has its C++ library, which PyTorch loads by itself: a device type with its own allocator, indices,
streams, generators and backend. The host cannot touch its memory. Neither the test files nor the harness know about it.
The build takes a compiler and a minute.
"""

import functools
import json
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import COMMAND_LIMIT, INPUTS, ROOT, run_beside

from torch_fsdp_tests.common_distributed import requires
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, TestCase, run_tests
from torch_fsdp_tests.inductor_utils import why_no_host_compiler
from torch_fsdp_tests.verdict import Reason, SkipKind

FSDP2 = "distributed/_composable/fsdp/test_fully_shard"
FILES = [f"{FSDP2}_state", f"{FSDP2}_overlap", "distributed/fsdp/test_fsdp_uneven"]
# The reasons for skips, and their numbers.
VIRTUAL = {"time is real here, and not exact": 3, "streams are real here, and cannot be mocked": 1}
DIFFERS = """
import torch
one, other = torch.ones(1000, device="abacus:1"), torch.ones(1000, device="abacus:2")
for act, wrong in [(torch.add, torch.ones(1000)), (torch.add, other), (lambda *both: torch.cat(both), other)]:
    with raises(RuntimeError, "same device"):
        act(one, wrong)
assert [torch.abacus.memory_allocated(index) for index in range(3)] == [0, 4096, 4096]
del one
assert [torch.abacus.memory_allocated(index) for index in range(3)] == [0, 0, 4096]

def sample(seed):
    torch.manual_seed(seed)
    return torch.rand(2, device="abacus")

assert sample(3).equal(sample(3)) and not sample(3).equal(sample(4))
with raises(RuntimeError, "expected a generator of abacus, but found one of cpu"):
    torch.rand(2, device="abacus", generator=torch.Generator())
assert torch.accelerator.current_accelerator() == torch.device("abacus")
"""
TOUCHES = """
import ctypes
import torch
ones = torch.ones(1000, device="abacus:1")
assert ones.sum().item() == 1000 and ones.cpu().sum() == 1000
ctypes.c_float.from_address(ones[10:].data_ptr()).value
"""
FORKS = """
import os
import torch

def computes_in_a_fork():
    child = os.fork()
    if child == 0:
        try:
            torch.ones(1, device="abacus")
        except RuntimeError as error:
            os._exit(7 if f"process {os.getppid()} had started the driver" in str(error) else 8)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

torch.abacus.device_count()
torch.accelerator.current_accelerator()
assert computes_in_a_fork() == 0
START
assert computes_in_a_fork() == 7
torch.ones(1, device="abacus")
"""
IMPORTS = """
import torch
import torch.distributed as dist

from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests

torch.abacus.is_available()


class TestRanks(FSDPTest):
    world_size = 2

    def test_collective(self):
        ones = torch.ones(1, device=self.device)
        dist.all_reduce(ones)
        self.assertEqual(ones.item(), 2)


if __name__ == "__main__":
    run_tests()
"""
LIMITED = """
import torch
abacus = torch.abacus
MIB = 2**20

def take(size):
    return torch.empty(size * MIB, dtype=torch.uint8, device="abacus:1")

def state():
    stats = abacus.memory_stats(1)
    names = "allocated_bytes.all.current", "reserved_bytes.all.current", "reserved_bytes.all.peak"
    return *(stats[name] // MIB for name in names), stats["num_alloc_retries"], stats["num_ooms"]

assert abacus.mem_get_info(1) == (4 * MIB, 4 * MIB) and abacus.get_device_properties(1).total_memory == 4 * MIB
one, two = take(1), take(2)
assert one.data_ptr() != two.data_ptr()
del one
assert state() == (2, 3, 3, 0, 0) and abacus.mem_get_info(1) == (MIB, 4 * MIB)
other = take(2)  # in the place of what is free, which has another size
assert state() == (4, 4, 4, 1, 0)
with raises(torch.OutOfMemoryError, "allocate 1 MiB. abacus:1 has a total capacity of 4 MiB of which 0 MiB is free"):
    take(1)
assert state() == (4, 4, 4, 2, 1)
del two, other
abacus.empty_cache()
abacus.reset_peak_memory_stats(1)
assert state() == (0, 0, 0, 2, 1)
assert (take(4).cpu() == 255).all() and state() == (0, 4, 4, 2, 1)
"""
BUSY = """
import torch
abacus, side, third = torch.abacus, torch.abacus.Stream(), torch.abacus.Stream()
ones = torch.ones(10, device="abacus")
MS = 1_000_000

def record():
    event = abacus.Event(enable_timing=True)
    event.record()
    return event

def host():
    return abacus._waited() / MS

start = record()
abacus._sleep(100 * MS)  # two streams at the same time
with abacus.stream(side):
    side_start = record()
    abacus._sleep(200 * MS)
    side_end = record()
with abacus.stream(third):
    independent = record()
assert not side_end.query() and independent.query() and not side.query()
abacus.current_stream().wait_event(side_end)
abacus._sleep(100 * MS)
end = record()
third.wait_stream(abacus.current_stream())
with abacus.stream(third):
    carried = record()
independent.synchronize()
assert host() < 1  # a caller has waited a bit
side.synchronize()
assert host() == 200
assert side_end.query() and not end.query() and ones.sum().item() == 10  # a value comes after what its stream does
assert host() == 300
third.wait_stream(side)
with abacus.stream(third):
    abacus._sleep(100 * MS)
abacus.synchronize()
assert host() == 400
assert third.query()
times = [start.elapsed_time(event) for event in (independent, side_end, end, carried)]
assert times == [0, 200, 300, 300] and side_start.elapsed_time(side_end) == 200, times
abacus._sleep(MS)
asked = 0
while not abacus.current_stream().query():
    asked += 1
assert asked == 10
"""
LATE = """
import torch
import torch.distributed as dist
abacus, side = torch.abacus, torch.abacus.Stream()
abacus.set_device(0)
ones = lambda: torch.ones(1000, device="abacus")
mean = lambda tensor: tensor.mean().item()

def read(waits):  # on one stream, what another one computes
    sums = ones().add_(1)
    if waits:
        side.wait_stream(abacus.current_stream())
    with abacus.stream(side):
        return mean(sums)

assert read(waits=True) == 2 and read(waits=False) != 2

def use(records):  # on one stream, memory that another one frees
    freed = ones()
    side.wait_stream(abacus.current_stream())
    with abacus.stream(side):
        sums = freed + 1
    if records:
        freed.record_stream(side)
    del freed
    assert mean(torch.full((1000,), 5.0, device="abacus")) == 5
    with abacus.stream(side):
        return mean(sums)

assert use(records=True) == 2 and use(records=False) == 6

device, pinned, pageable = ones(), torch.zeros(1000, pin_memory=True), torch.zeros(1000)
pinned.copy_(device, non_blocking=True)
copied = torch.Event("abacus")
copied.record()
assert pinned.sum() == 0 and not copied.query()
pageable.copy_(device, non_blocking=True)
assert pageable.sum() == 1000 and copied.query()
pinned.fill_(2)
device.copy_(pinned, non_blocking=True)
pinned.fill_(3)
assert mean(device) == 3
device.copy_(pageable, non_blocking=True)
pageable.fill_(4)
assert mean(device) == 1
copied.record()
device.add_(1)
copied.synchronize()
assert copied.query() and (abacus.pending() == 1 or POLICY != "last")
assert torch.empty(1000, device="abacus").isnan().all()
assert ones().nonzero().numel() == 1000 and abacus.synchronized_operators()["aten::nonzero"] == 1

dist.init_process_group("ledger", rank=0, world_size=1, store=dist.HashStore())

def gather(waits):  # what one stream computes
    given, gathered = ones(), torch.zeros(1000, device="abacus")
    abacus.synchronize()
    given.add_(1)
    if waits:
        side.wait_stream(abacus.current_stream())
    with abacus.stream(side):
        work = dist.all_gather_into_tensor(gathered, given, async_op=True)
        assert abacus.pending() > 0
        if waits:
            work.wait()
        return mean(gathered)

assert gather(waits=True) == 2 and gather(waits=False) == 0

def write(waits):  # what a collective reads
    given, gathered = ones(), torch.zeros(1000, device="abacus")
    work = dist.all_gather_into_tensor(gathered, given, async_op=True)
    if waits:
        work.wait()
    given.fill_(5)
    work.wait()
    return mean(gathered)

assert write(waits=True) == 1
if POLICY == "last":
    assert write(waits=False) == 5
dist.destroy_process_group()
"""


def why_not() -> str | None:
    if not TEST_WITH_SLOW:
        return Reason("a C++ compiler takes a minute for the device; PYTORCH_TEST_WITH_SLOW=1 runs it", SkipKind.SLOW)
    return why_no_host_compiler()


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """The folder where the device is installed. It is built on first use, and removed when this process ends."""
    made = tempfile.TemporaryDirectory()
    subprocess.run([sys.executable, INPUTS / "abacus" / "build.py", made.name], check=True, timeout=COMMAND_LIMIT)
    return made


def run(*command: object, **variables: str) -> subprocess.CompletedProcess[str]:
    return run_beside(folder().name, *command, **variables)


@requires(why_not)
class TestAbacus(TestCase):
    """Without it, a test that works only on the CPU or CUDA could go undetected on machines without a device."""

    def assert_runs(self, program: str, *policies: str, **variables: str) -> None:
        """The program prints no error and ends with status 0, with each of these policies of late streams."""
        given = "import unittest\nraises = unittest.TestCase().assertRaisesRegex\n"
        for policy in policies:
            with self.subTest(policy=policy):
                done = run("-c", f"POLICY = {policy!r}\n{given}{program}", ABACUS_LATE=policy, **variables)
                self.assertEqual((done.returncode, done.stderr), (0, ""))

    def run_files(self, *arguments: str, **variables: str) -> str:
        """What ``run_test.py`` prints about files in which no test fails."""
        done = run(ROOT / "run_test.py", "-i", *arguments, **variables)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        return done.stdout

    def test_ten_minutes_on_a_gpu_can_be_tried(self):
        """The command of docs/vendors.md runs its files and its scripts, and records their results."""
        with tempfile.TemporaryDirectory() as made:
            done = run(ROOT / ".ci" / "gpu", "--dry", "-j", "2", "--output", made, ABACUS_LATE="last")
            self.assertEqual((done.returncode, Path(made, "left-out.txt").read_text()), (0, ""), done.stdout)
            record = json.loads(Path(made, "gpu.json").read_text())
            self.assertEqual([sum(row["passed"] > 0 for row in record["files"].values())], [2], record["files"])
            self.assertEqual([answer.partition(";")[0] for answer in record["scripts"].values()], ["shown", "shown"])
            (answer,) = json.loads(Path(made, "defects.json").read_text())["defects"]
            self.assertEqual(answer["answer"], "present")

    def test_device_differs_from_the_host(self):
        self.assert_runs(DIFFERS, "")

    def test_host_cannot_touch_its_memory(self):
        """A process that reads at its address dies, and its last output says where and why."""
        for policy in ("", "last"):
            with self.subTest(policy=policy):
                done = run("-X", "faulthandler", "-W", "ignore", "-c", TOUCHES, ABACUS_LATE=policy)
                self.assertEqual(done.returncode, -signal.SIGSEGV)
                last = r"which only the device can reach \(last operator: aten::\w+\)"
                stack = r'Fatal Python error: Segmentation fault\n\n.*\n  File "<string>", line 6 in <module>'
                self.assertRegex(done.stderr, rf"^the host touched memory of abacus:1 at 0x\w+, {last}\n{stack}\n")

    def test_driver_works_in_one_process(self):
        """A question for devices starts it. A fork cannot use a driver that its parent has started."""
        starts = ["torch.abacus.is_available()", "torch.__config__.show()", "torch.abacus.set_device(1)"]
        for start in (*starts, 'torch.ones(1, device="abacus")'):
            with self.subTest(start):
                self.assert_runs(FORKS.replace("START", start), "", "last")

    def test_file_whose_import_starts_the_driver(self):
        """Its ranks are fresh interpreters, and the file prints the reason."""
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(IMPORTS)
            file.flush()
            done = run(file.name, ABACUS_DEVICES="2")
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("an import of this file has started the runtime of abacus", done.stderr)

    def test_memory_has_a_limit(self):
        self.assert_runs(LIMITED, "", "last", ABACUS_MEMORY=str(4 * 2**20))

    def test_streams_are_busy_at_the_same_time(self):
        """A sleep makes its stream busy, and the streams that wait for it. The host waits only for results."""
        self.assert_runs(BUSY, "", "last", PYTHONWARNINGS="ignore")

    def test_late_streams_show_missing_waits(self):
        """Each missing wait gives a wrong number. With all waits, the number is right."""
        self.assert_runs(LATE, "last", "0", "1", "2", PYTHONWARNINGS="ignore")

    def test_whole_files_run_on_late_streams(self):
        for policy in ("last", "1"):
            with self.subTest(policy=policy):
                printed = self.run_files(FILES[0], "--ranks", "2", ABACUS_LATE=policy)
                self.assertRegex(printed, r"(?m)^[1-9]\d+ passed, 0 failed, 0 skipped$")

    def test_whole_files_run_on_it(self):
        printed = self.run_files(*FILES)
        self.assertIn("device abacus, backend ledger, ranks 4, up to ", printed.splitlines()[0])
        skips = re.findall(r"^ +(\d+)  (.*)$", printed, re.MULTILINE)
        self.assertEqual({reason: int(count) for count, reason in skips}, VIRTUAL)
        skipped = sum(VIRTUAL.values())
        ends = rf"^(\d+) (?:passed, 0 failed, {skipped} skipped$|known defects? of torch)"
        counts = re.findall(ends, printed, re.MULTILINE)
        written = sum((ROOT / "test" / f"{file}.py").read_text().count("    def test_") for file in FILES)
        self.assertGreaterEqual(sum(map(int, counts)), written - skipped)

    def test_race_detector_on_it(self):
        """Autograd orders streams in C++, which the detector must take into account."""
        printed = self.run_files(FILES[-1], "--check-streams")
        self.assertRegex(printed, r"(?m)^[1-9]\d* passed, 0 failed, 0 skipped$")

    def test_ranks_share_a_single_device(self):
        printed = self.run_files(FILES[-1], ABACUS_DEVICES="1")
        self.assertIn("device abacus, backend ledger, ranks 2, devices shared", printed.splitlines()[0])

    def test_backend_may_refuse_ranks_that_share_a_device(self):
        """Ranks that share a device then use the staged backend, which lacks only the overlap with computation."""
        for devices, backend, how in (("2", "ledger", "up to "), ("1", "staged", "devices shared")):
            with self.subTest(devices=devices):
                printed = self.run_files(*FILES, ABACUS_DEVICES=devices, ABACUS_EXCLUSIVE="1")
                self.assertIn(f"device abacus, backend {backend}, ranks 2, {how}", printed.splitlines()[0])
                self.assertNotIn("devices, but sees only", printed)
                self.assertRegex(printed, r"(?m)^[1-9]\d+ passed, 0 failed, [1-9]\d* skipped$")


if __name__ == "__main__":
    run_tests()
