#!/usr/bin/env python3
# PYTHON_ARGCOMPLETE_OK
"""Runs test files, each in a process of its own. ``python run_test.py --help`` says how."""

import os
import sys

if __name__ == "__main__":
    if sys.version_info < (3, 10):  # noqa: UP036 - so this file is written for any Python
        found = ".".join(map(str, sys.version_info[:2]))
        sys.stderr.write("run_test.py needs Python 3.10 or later, and this is Python " + found)
        sys.stderr.write(": start it with a later one, as in python3.11 run_test.py\n")
        sys.exit(2)
    # Before an installed copy: the checkout's tests belong to the checkout's package.
    sys.path.insert(0, os.path.dirname(os.path.realpath(__file__)))
    from torch_fsdp_tests.__main__ import main

    sys.exit(main())
