"""An interpreter with this folder on its path imports torch with the files that its environment names."""

import os

if os.environ.get("TORCH_FSDP_TESTS_SOURCES"):
    from torch_fsdp_tests.installed_torch.sources import install_from_environment

    install_from_environment()
