"""An interpreter with this folder on its path is the mutant that its environment names."""

import os

if os.environ.get("TORCH_FSDP_TESTS_MUTANT"):
    from torch_fsdp_tests.tools.mutants.hook import install_from_environment

    install_from_environment()
