"""``run_test.py`` with shorter limits for processes of a launch, for tests that wait for these limits."""

import runpy
from pathlib import Path

from torch_fsdp_tests.dispatch import file_process
from torch_fsdp_tests.extensions.launch import worker
from torch_fsdp_tests.processes import messages

file_process.GRACE, worker.PATIENCE, messages.SILENCE_LIMIT = 0.5, 1.0, 4
runpy.run_path(str(Path(__file__).parents[4] / "run_test.py"), run_name="__main__")
