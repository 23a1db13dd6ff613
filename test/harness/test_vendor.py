"""A device that no module of this project knows. It only needs its vendor's package.

``inputs/vendor`` has what the installation of such a package would put beside torch: its modules, and the file that
names its entry point. Its tensors are on the CPU, so these tests say nothing about tensors of a separate type.
"""

import contextlib
import os
import re
import sys
import tempfile
import unittest.mock
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from runs import INPUTS, ROOT, clean_environment, run_beside

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.dispatch import options

VENDOR = INPUTS / "vendor"
NAME = "soroban"
FILE = "distributed/fsdp/test_fsdp_uneven"
REQUESTED = {"device": NAME, "backend": "gloo", "ranks": 3}


@contextlib.contextmanager
def installed(**variables: str) -> Iterator[None]:
    """Put the vendor's package on the path of this process. Only the given settings are set."""
    path = unittest.mock.patch.object(sys, "path", [*sys.path, str(VENDOR)])
    with path, unittest.mock.patch.dict(os.environ, clean_environment() | variables, clear=True):
        accelerator._resolve.cache_clear()
        try:
            yield
        finally:
            accelerator._resolve.cache_clear()


class TestNewDevice(TestCase):
    """Without it, a vendor would have to change this project before it could test its device."""

    def test_whole_file_runs_on_the_vendors_device(self):
        """The vendor binds each rank to a device that the dispatcher assigns with the vendor's own variable. Each rank
        of a test of two ranks has a frame of its own. A test of four ranks does not skip: its ranks share the frames
        over another backend.
        """
        variables = {"TORCH_FSDP_TESTS_SHOW_OUTPUT": "1", "VERBOSE_TEST_LOGS": "1", "SOROBAN_EXCLUSIVE": "1"}
        options = ("--device", NAME, "--devices", "1,0", "-i", FILE, "-v")
        done = run_beside(VENDOR, ROOT / "run_test.py", *options, **variables)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn(f"device {NAME}, backend gloo, ranks 2, up to ", done.stdout)
        ends = r"^(\d+) (?:passed, 0 failed, 0 skipped$|known defects? of torch reproduced)"
        counts = re.findall(ends, done.stdout, re.MULTILINE)
        written = (ROOT / "test" / f"{FILE}.py").read_text().count("    def test_")
        self.assertGreaterEqual(sum(map(int, counts)), written)
        bound = set(re.findall(rf"rank (\d) of the {NAME} counts on frame (\d)( alone)?$", done.stdout, re.MULTILINE))
        shared = {("0", "1", ""), ("1", "0", ""), ("2", "1", ""), ("3", "0", "")}
        self.assertEqual(bound, {("0", "1", " alone"), ("1", "0", " alone")} | shared)

    def test_dispatcher_finds_what_its_vendor_counts_without_torch(self):
        code = "from torch_fsdp_tests.dispatch import devices; from sys import argv, modules\n"
        code += "print(devices.find(argv[1], None, {}).names, 'torch' in modules)"
        done = run_beside(VENDOR, "-c", code, NAME)
        self.assertEqual(done.stdout, "('0', '1') False\n", done.stderr)

    def test_nothing_else_knows_its_name(self):
        knows = [
            str(path.relative_to(ROOT))
            for folder in ("torch_fsdp_tests", "test")
            for path in (ROOT / folder).rglob("*")
            if path.suffix in (".py", ".json", ".txt") and NAME in path.read_text().lower()
        ]
        inside = str(VENDOR.relative_to(ROOT))
        outside = {path for path in knows if not path.startswith(inside)}
        self.assertEqual(outside, {str(Path(__file__).resolve().relative_to(ROOT))})
        self.assertGreater(len(knows), len(outside))

    def test_reasons_to_skip_use_the_vendors_name(self):
        with installed(TORCH_FSDP_TESTS_DEVICE=NAME):
            device = accelerator.current()
        self.assertEqual((device.name, device.count, device.ranks, device.is_shared), (NAME, 2, 2, False))
        self.assertFalse(device.is_cpu)
        self.assertEqual(device.device(3), torch.device(device.type))
        self.assertIn(f"{NAME} with gloo does not have it", device.lacks("streams"))


@instantiate_parametrized_tests
class TestWishes(TestCase):
    """Without it, ``--device`` could select another device than its variable does for a single file."""

    def of_dispatcher(self, *arguments: str, **environment: str) -> dict[str, Any]:
        run = options.parse(["--list", *arguments], environment, ROOT)
        return {name: getattr(run.execution, name) for name in REQUESTED}

    @parametrize("name", sorted(REQUESTED))
    def test_an_option_is_its_variable(self, name):
        option, variable = (f"--{name}", str(REQUESTED[name])), f"TORCH_FSDP_TESTS_{name.upper()}"
        by_option = self.of_dispatcher(*option)
        self.assertEqual(by_option[name], REQUESTED[name])
        self.assertEqual(by_option, self.of_dispatcher(**{variable: option[1]}))
        self.assertEqual(by_option, self.of_dispatcher(*option, **{variable: "7"}))  # an option wins
        self.assertEqual(self.of_dispatcher(**{variable: ""}), self.of_dispatcher())

    def test_the_dispatcher_tells_a_file(self):
        requested = "cpu", "gloo", "3"  # the CPU is the subject: it works without torch
        options = [word for name, value in zip(REQUESTED, requested, strict=True) for word in (f"--{name}", value)]
        variables = [f"TORCH_FSDP_TESTS_{name.upper()}" for name in REQUESTED]
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "test_x.py").write_text(f"import os\nprint([os.environ[name] for name in {variables}])\n")
            done = run_beside(ROOT, ROOT / "run_test.py", "--test-directory", folder, *options)
        self.assertIn(f"\n{[*requested]}\n", done.stdout, "shown, because a file without tests fails")

    def test_the_harness_obeys_the_variables(self):
        variables = {f"TORCH_FSDP_TESTS_{name.upper()}": str(value) for name, value in REQUESTED.items()}
        with installed(**variables):
            device = accelerator.current()
        self.assertEqual({"device": device.name, "backend": device.backend, "ranks": device.ranks}, REQUESTED)
        with installed(**dict.fromkeys(variables, "")):
            unset = accelerator.current()
        with installed():
            self.assertEqual(accelerator.current(), unset)


if __name__ == "__main__":
    run_tests()
