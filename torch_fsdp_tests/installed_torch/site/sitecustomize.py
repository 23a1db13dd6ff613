"""An interpreter with this folder on its path imports torch with the fixes and files that its environment names."""

import os

if os.environ.get("TORCH_FSDP_TESTS_FIXES") or os.environ.get("TORCH_FSDP_TESTS_SOURCES"):
    from torch_fsdp_tests.installed_torch.fixes import install_from_environment

    install_from_environment()
