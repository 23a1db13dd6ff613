"""Upstream's name for the process group whose ranks are threads, :mod:`torch_fsdp_tests.ranks.threaded_pg`."""

from torch_fsdp_tests.ranks.threaded_pg import (  # noqa: F401
    ProcessLocalGroup,
    _install_threaded_pg,
    _uninstall_threaded_pg,
)
