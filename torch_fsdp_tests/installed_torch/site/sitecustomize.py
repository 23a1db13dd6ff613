"""An interpreter with this folder on its path imports torch with the fixes that its environment names."""

import os

if os.environ.get("TORCH_FSDP_TESTS_FIXES"):
    from torch_fsdp_tests.installed_torch.fixes import install_from_environment

    install_from_environment()
