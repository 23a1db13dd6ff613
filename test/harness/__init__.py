"""Tests of the harness. pytest and ``python -m unittest`` need the path of the modules that the tests share."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
