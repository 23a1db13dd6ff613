"""How many tests run on one, two, four and eight devices with one rank each. Ranks are not started for it."""

import functools
import subprocess
import sys
from pathlib import Path

from torch_fsdp_tests.common_utils import TestCase, run_tests

sys.path.insert(0, str(Path(__file__).parent))

from runs import ROOT, run_beside

NUMBERS = 1, 2, 3, 4, 8


@functools.cache
def run() -> subprocess.CompletedProcess[str]:
    return run_beside(ROOT, "-m", "torch_fsdp_tests.tools.devices", *NUMBERS)


class TestDevices(TestCase):
    """Without it, a test could skip on two devices where PyTorch's takes as many ranks as there are devices."""

    def test_every_test_of_upstream_runs_on_as_few_devices(self):
        self.assertEqual((run().returncode, run().stderr), (0, ""), run().stdout)

    def test_more_devices_run_more_tests(self):
        rows = [[int(cell) for cell in line.strip("| ").split(" | ")] for line in run().stdout.splitlines()[2:]]
        self.assertEqual([row[0] for row in rows], list(NUMBERS))
        for column in (1, 2, 3):
            counts = [row[column] for row in rows]
            self.assertEqual(counts, sorted(counts))
            self.assertLess(0, counts[0])
            self.assertLess(counts[0], counts[-1])
        self.assertEqual(rows[-1][-1], 0)  # no test needs more than eight


if __name__ == "__main__":
    run_tests()
