"""Upstream's name for the "fake" backend, :mod:`torch_fsdp_tests.ranks.fake_pg`."""

from torch_fsdp_tests.installed_torch import upstream_names
from torch_fsdp_tests.ranks.fake_pg import FakeStore, _create_fake_pg  # noqa: F401

__all__ = [
    "FakeStore",
]

__getattr__ = upstream_names.complete(__name__)
