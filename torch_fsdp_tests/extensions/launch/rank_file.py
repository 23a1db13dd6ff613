"""The process of a test file for another rank than 0: ``python -m ... WORKER FILE ARGUMENTS``.

It runs FILE like its process at rank 0, and follows that process. WORKER is the process id of what starts it. With only
:data:`SERVE` and the arguments of a fork server it is one, which has imported what test files import.
"""

from __future__ import annotations

import faulthandler
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from torch_fsdp_tests.dispatch import run_file, server_of_files
from torch_fsdp_tests.processes import program_server, system
from torch_fsdp_tests.verdict import events

SERVE = "--serve"


def main(argv: Sequence[str]) -> NoReturn:
    """Run the file. Its tests do not run here."""
    worker, file, *arguments = argv
    system.die_with_parent(int(worker))
    faulthandler.enable()
    faulthandler.register(signal.SIGTERM, all_threads=True, chain=True)
    run_file.become(file, arguments, Path.cwd())
    try:
        runpy.run_path(file, run_name="__main__")
    except BaseException as error:
        if events.skips_file(error):
            sys.exit(0)
        if not isinstance(error, Exception):
            raise
        traceback.print_exception(type(error), error, run_file.from_file_on(error.__traceback__, file))
        sys.exit(1)
    sys.exit(f"{os.path.basename(file)}: the file ended without following rank 0: its last lines must call run_tests()")


if __name__ == "__main__":
    serves = sys.argv[1] == SERVE
    main(program_server.serve(sys.argv[2:], server_of_files.preload) if serves else sys.argv[1:])
