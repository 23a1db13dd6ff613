"""A device that torch cannot tell from a real one, for machines without any.

``inputs/abacus`` holds its library, in C++, which torch loads by itself: a device type with an allocator, indices,
streams, generators and a backend of its own. Its memory is the host's. Neither the test files nor the harness know
about it. To build it takes a compiler and a minute.
"""

import functools
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from torch_fsdp_tests.common_distributed import requires
from torch_fsdp_tests.common_utils import TEST_WITH_SLOW, TestCase, run_tests
from torch_fsdp_tests.inductor_utils import why_no_host_compiler
from torch_fsdp_tests.verdict import Reason, SkipKind

sys.path.insert(0, str(Path(__file__).parent))

from runs import COMMAND_LIMIT, INPUTS, ROOT, run_beside

FILES = [
    "distributed/_composable/fsdp/test_fully_shard_state",
    "distributed/_composable/fsdp/test_fully_shard_overlap",
    "distributed/fsdp/test_fsdp_uneven",
]
DIFFERS = """
import torch
one, other = torch.ones(1000, device="abacus:1"), torch.ones(1000, device="abacus:2")
for act, wrong in [(torch.add, torch.ones(1000)), (torch.add, other), (lambda *both: torch.cat(both), other)]:
    try:
        act(one, wrong)
    except RuntimeError as error:
        assert "same device" in str(error), error
    else:
        raise AssertionError(f"{act} takes what is on {wrong.device}")
assert [torch.abacus.memory_allocated(index) for index in range(3)] == [0, 4096, 4096]
del one
assert [torch.abacus.memory_allocated(index) for index in range(3)] == [0, 0, 4096]

def draw(seed):
    torch.manual_seed(seed)
    return torch.rand(2, device="abacus")

assert draw(3).equal(draw(3)) and not draw(3).equal(draw(4))
assert torch.accelerator.current_accelerator() == torch.device("abacus")
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
    """Without it, a test that works only on the CPU or CUDA could go unnoticed on machines without a device."""

    def test_device_differs_from_the_host(self):
        done = run("-c", DIFFERS)
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_whole_files_run_on_it(self):
        done = run(ROOT / "run_test.py", "-i", *FILES)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("device abacus, backend ledger, ranks 4, devices not shared", done.stdout.splitlines()[0])
        (passed,) = re.findall(r"^(\d+) passed, 0 failed, \d+ skipped$", done.stdout, re.MULTILINE)
        written = sum((ROOT / "test" / f"{file}.py").read_text().count("    def test_") for file in FILES)
        self.assertGreaterEqual(int(passed), written)

    def test_ranks_share_a_single_device(self):
        done = run(ROOT / "run_test.py", "-i", FILES[-1], ABACUS_DEVICES="1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("device abacus, backend ledger, ranks 2, devices shared", done.stdout.splitlines()[0])

    def test_backend_may_refuse_ranks_that_share_a_device(self):
        """Then each rank has a device. Tests that need more skip, and all others pass."""
        done = run(ROOT / "run_test.py", "-i", *FILES, ABACUS_DEVICES="2", ABACUS_EXCLUSIVE="1")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("device abacus, backend ledger, ranks 2, devices not shared", done.stdout.splitlines()[0])
        self.assertRegex(
            done.stdout, "needs 4 abacus devices, but sees only 2; ranks that share a device cannot use ledger"
        )
        self.assertRegex(done.stdout, re.compile(r"^[1-9]\d+ passed, 0 failed, [1-9]\d* skipped$", re.MULTILINE))


if __name__ == "__main__":
    run_tests()
