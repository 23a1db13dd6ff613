"""``run_test.py`` whose process of rank 0 waits before the first test, at the place that ``WAITS_IN`` names.

Each process leaves a mark: that of rank 0 at this place, and the others before they look for rank 0.
"""

import os
import runpy
import time
from pathlib import Path
from typing import Any

from torch_fsdp_tests.extensions.launch import peers, worker

FOREVER = 1000  # seconds
PLACES = {"join": (peers, "own_address"), "describe": (worker, "describe")}

waits = os.environ["RANK"] == "0"
module, name = PLACES[os.environ["WAITS_IN"]] if waits else (peers, "open_store")
function = getattr(module, name)


def marked(*arguments: Any, **options: Any) -> Any:
    Path(os.environ["STARTED"], f"rank {os.environ['RANK']}").touch()
    if waits:
        time.sleep(FOREVER)
    return function(*arguments, **options)


setattr(module, name, marked)
runpy.run_path(str(Path(__file__).parents[4] / "run_test.py"), run_name="__main__")
