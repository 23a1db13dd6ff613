"""Tests of the harness. Here pytest and ``python -m unittest`` find the modules that they share; a script has them."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
