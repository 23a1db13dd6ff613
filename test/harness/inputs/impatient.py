"""``run_test.py`` with shorter limits, for tests that wait for these limits."""

import runpy
from pathlib import Path

from torch_fsdp_tests.dispatch import file_process

file_process.GRACE = 0.5
runpy.run_path(str(Path(__file__).parents[3] / "run_test.py"), run_name="__main__")
