"""Known defects that are fixed in memory, in all processes of a run."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from runs import LIMIT, ROOT, assert_rejected, run_beside

from torch_fsdp_tests import installation
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.dispatch.main import main as run_test
from torch_fsdp_tests.extensions.fixes.applying import Fixes
from torch_fsdp_tests.settings import ConfigurationError

FIRST = "fsdp2_inference_mode_breaks_training"
PROBE = """\
import os, subprocess, sys, unittest

import torch
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import registry, torch_defect

def is_fixed():
    import inspect
    from torch.distributed.fsdp._fully_shard import _fsdp_param as module
    return "inference_mode(False)" in inspect.getsource(module.FSDPParam.init_all_gather_outputs)

class TestProbe(FSDPTest):
    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        assert is_fixed(), "the process of the file"

    def test_ranks(self):
        self.assertTrue(is_fixed())
        self.assertEqual(registry.absent_here(), {{"{id}"}})

    def test_interpreter(self):
        if self.rank == 0:
            code = "import sys; print(type(sys.meta_path[0]).__module__)"
            found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout={limit})
            self.assertEqual(found.stdout.strip(), "torch_fsdp_tests.installed_torch.sources")

    def test_fixed_defect_that_shows(self):
        with torch_defect("{id}"):
            self.fail("it shows")

    def test_fixed_defect_that_does_not_show(self):
        with torch_defect("{id}"):
            pass

if __name__ == "__main__":
    run_tests()
"""


class TestInARun(TestCase):
    """Without it, a rank could run PyTorch without the fix, or a fix without an effect could go undetected."""

    def test_all_processes(self):
        """The file, forked and fresh ranks, and an interpreter that a test starts have the fix. The run says so."""
        for start in ("fork", "spawn"):
            with self.subTest(start), tempfile.TemporaryDirectory() as folder:
                Path(folder, "tests").mkdir()
                Path(folder, "tests", "test_probe.py").write_text(PROBE.format(id=FIRST, limit=LIMIT))
                command = [ROOT / "run_test.py", "--test-directory", f"{folder}/tests", "--report", f"{folder}/report"]
                done = run_beside(ROOT, *command, "--with-fixes", FIRST, TORCH_FSDP_TESTS_START=start)
                report = json.loads(Path(folder, "report", "report.json").read_text())
                first = done.stdout.splitlines()[0]
                self.assertTrue(first.endswith(f"with fixes: {FIRST}"), first)
                self.assertEqual(report["fixes"], [FIRST])
                outcomes = {test["test"].rpartition(".")[2]: test["outcome"] for test in report["files"][0]["tests"]}
                expected = dict.fromkeys(outcomes, "passed") | {"test_fixed_defect_that_shows": "failed"}
                self.assertEqual(outcomes, expected, done.stdout)
                self.assertEqual((len(outcomes), report["known_defects"], report["fixed_defects"]), (4, [], []))
                self.assertIn(f"--with-fixes {FIRST}", done.stdout)

    def test_id_that_has_no_fix(self):
        cases = {
            "fsdp2_inference_mode_breaks": f"there is no fix of 'fsdp2_inference_mode_breaks'; did you mean {FIRST}?",
            "smoke": "there is no fix of 'smoke'; python -m torch_fsdp_tests.defects --list shows the ids",
            "fsdp2_second_order_gradients_raise": "fsdp2_second_order_gradients_raise has no fix: FSDP2 would",
        }
        arguments = [(("--with-fixes", id), f"--with-fixes: {words}") for id, words in cases.items()]
        assert_rejected(self, lambda argv: run_test(argv, ROOT), arguments)


class TestBystanders(TestCase):
    """Without it, a fix could make programs pay that do not have the defect."""

    def test_no_further_calls(self):
        """With all fixes, steps and checkpoints run at most one percent more functions, for 8 and 16 units."""
        try:
            given = Fixes([])
        except ConfigurationError as error:
            self.skipTest(str(error))  # no fix was tried with this version
        with given.running():
            without, with_fixes = (_counted(environment) for environment in (os.environ, given.environment(os.environ)))
        more = {name: count / without[name] for name, count in with_fixes.items()}
        self.assertGreater(len(more), 5)
        self.assertEqual({name: ratio for name, ratio in more.items() if ratio > 1.01}, {}, str(more))


def _counted(environment: Mapping[str, str]) -> dict[str, int]:
    command = [sys.executable, str(Path(__file__).with_name("bystander.py"))]
    environment = {**environment, **installation.on_path(environment)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


if __name__ == "__main__":
    run_tests()
