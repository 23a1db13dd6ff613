"""The fork server of test files: a process that has imported torch, because each import takes seconds.

It is used only if its fork equals a fresh interpreter: on the CPU, where no device is assigned, so all files have
the same environment when torch is imported. It imports only what a test file has imported after its own
``import torch``. It runs no tensor operation, and does not know about tests.
"""

from __future__ import annotations

import sys

from torch_fsdp_tests.dispatch import run_file
from torch_fsdp_tests.processes import forkserver, program_server


def preload() -> list[str]:
    """Import what every test file imports. Returns remarks."""
    from torch_fsdp_tests.installed_torch import torch_facts  # imports torch

    return forkserver.preload(torch_facts.PRELOADED, torch_facts.IMPORTED_LATE)


if __name__ == "__main__":
    run_file.main(program_server.serve(sys.argv[1:], preload))
