"""``python -m torch_fsdp_tests`` and ``torch-fsdp-tests``: what ``run_test.py`` is in a checkout."""

import sys

from torch_fsdp_tests import installation
from torch_fsdp_tests.processes import system


def main() -> int:
    """Run the dispatcher with the arguments of this process, and return its exit status."""
    system.exit_if_unsupported()
    from torch_fsdp_tests.dispatch.main import main as dispatch

    return dispatch(sys.argv[1:], installation.ROOT)


if __name__ == "__main__":
    sys.exit(main())
