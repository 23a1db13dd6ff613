"""Test classes for the device under test, with upstream's generated names.

Replaces the used parts of ``torch/testing/_internal/common_device_type.py``.
"""

from __future__ import annotations

from torch_fsdp_tests.common_device_type.capability import Capability, requires_capabilities
from torch_fsdp_tests.common_device_type.classes import deviceCountAtLeast, instantiate_device_type_tests
from torch_fsdp_tests.common_device_type.operators import OpDTypes, ops
from torch_fsdp_tests.installed_torch import upstream_names

__getattr__ = upstream_names.complete(__name__)
