"""``python -m torch_fsdp_tests.extensions.compare BEFORE AFTER``"""

from torch_fsdp_tests.extensions.compare.two_reports import main
from torch_fsdp_tests.processes import system

if __name__ == "__main__":
    system.run_command("compare", main)
