"""The fork server of mutants. It has imported torch but not FSDP, so that a mutant only costs the import of FSDP.

torch's compiler imports FSDP, so the server imports it too, and then forgets it; see :func:`.hook.forget`.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Sequence
from types import ModuleType

from torch_fsdp_tests.dispatch import forkserver, run_file
from torch_fsdp_tests.processes import program_server
from torch_fsdp_tests.tools.mutants import hook


def main(argv: Sequence[str]) -> None:
    """``python -m torch_fsdp_tests.tools.mutants.server PACKAGES CONTROL READY``."""
    packages, *ends = argv
    forgotten: dict[str, ModuleType] = {}

    def prepare() -> list[str]:
        remarks = forkserver.preload()
        gc.unfreeze()  # collect the forgotten modules
        forgotten.update(hook.forget(packages.split(",")))
        gc.freeze()
        return remarks

    command = program_server.serve(ends, prepare)
    id = os.environ.get(hook.VARIABLE, "")
    hook.install(id, forgotten)
    if id:
        sys.path.insert(1, str(hook.SITE))  # ranks that are not forked get this path
    run_file.main(command)


if __name__ == "__main__":
    main(sys.argv[1:])
