"""How many tests run on one, two, four and eight devices with one rank each. Ranks are not started for it."""

import functools
import os
from unittest import mock

from runs import clean_environment, outputs

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.tools.devices import __main__ as command

NUMBERS = 1, 2, 3, 4, 8


@functools.cache
def run() -> tuple[int, str]:
    """The exit status and the table. No device is requested."""
    with mock.patch.dict(os.environ, clean_environment(), clear=True):
        return outputs(command.main, *map(str, NUMBERS))[:2]


class TestDevices(TestCase):
    """Without it, a test could skip on two devices where PyTorch's takes as many ranks as there are devices."""

    def test_every_test_of_upstream_runs_on_as_few_devices(self):
        status, out = run()
        self.assertFalse(status, out)

    def test_more_devices_run_more_tests(self):
        rows = [[int(cell) for cell in line.strip("| ").split(" | ")] for line in run()[1].splitlines()[2:]]
        self.assertEqual([row[0] for row in rows], list(NUMBERS))
        for column in (1, 2, 3):
            counts = [row[column] for row in rows]
            self.assertEqual(counts, sorted(counts))
            self.assertLess(0, counts[0])
            self.assertLess(counts[0], counts[-1])
        self.assertEqual(rows[-1][-1], 0)  # no test needs more than eight


if __name__ == "__main__":
    run_tests()
