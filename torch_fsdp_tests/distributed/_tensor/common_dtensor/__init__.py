"""Models and test cases for tests of DTensor and tensor parallelism.

Replaces the parts of ``torch/testing/_internal/distributed/_tensor/common_dtensor.py`` that FSDP's tests use.
``DEVICE_TYPE``, ``PG_BACKEND`` and ``NUM_DEVICES`` are looked up when they are used.
"""

from __future__ import annotations

from typing import Any

from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.device import accelerator

from .cases import (
    DTensorContinuousTestBase,
    DTensorTestBase,
    DTensorTestMixin,
    num_devices,
    reduce_local_int,
    skip_unless_torch_gpu,
    with_comms,
)
from .converter import DTensorConverter
from .experts import ExpertLayer, ExpertParallel, Experts
from .layers import MLPModule, MLPStacked, RMSNormPython
from .transformer import Attention, FeedForward, ModelArgs, Transformer, TransformerBlock


def __getattr__(name: str) -> Any:
    if name == "NUM_DEVICES":
        return num_devices()
    if name in ("DEVICE_TYPE", "PG_BACKEND"):
        device = accelerator.current()
        return device.type if name == "DEVICE_TYPE" else device.backend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
