"""``run_test.py`` with shorter limits, for tests that wait for these limits."""

import runpy
from pathlib import Path

from torch_fsdp_tests.dispatch import file_process, worker
from torch_fsdp_tests.processes import messages

file_process.GRACE, worker.PATIENCE, messages.SILENCE_LIMIT = 0.5, 1.0, 4
runpy.run_path(str(Path(__file__).parents[3] / "run_test.py"), run_name="__main__")
