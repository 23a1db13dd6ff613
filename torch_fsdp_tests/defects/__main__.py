"""``python -m torch_fsdp_tests.defects``."""

from torch_fsdp_tests.defects.command.command_line import main
from torch_fsdp_tests.processes import system

if __name__ == "__main__":
    system.run_command("torch_fsdp_tests.defects", main)
