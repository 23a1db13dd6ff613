#!/usr/bin/env python3
"""Runs test files, each in a process of its own. ``python run_test.py --help`` says how."""

from __future__ import annotations

import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent

if __name__ == "__main__":
    # Before an installed copy: the checkout's tests belong to the checkout's package.
    sys.path.insert(0, str(CHECKOUT))
    from torch_fsdp_tests import host

    host.refuse_unsupported()
    from torch_fsdp_tests.dispatch.main import main

    sys.exit(main(sys.argv[1:], CHECKOUT))
