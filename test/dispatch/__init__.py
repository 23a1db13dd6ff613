"""Tests of the dispatcher. pytest and ``python -m unittest`` find shared modules by this path; a script has it."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
