"""Models and test cases for tests of DTensor and tensor parallelism.

Replaces the parts of ``torch/testing/_internal/distributed/_tensor/common_dtensor.py`` that FSDP's tests use.
``DEVICE_TYPE``, ``PG_BACKEND``, ``NUM_DEVICES`` and ``DEVICE_COUNT`` are looked up when they are used. A test file that
assigns one chooses its device by it.
"""

from __future__ import annotations

from torch_fsdp_tests import settings
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import upstream_names

from .cases import (
    DTensorContinuousTestBase,
    DTensorOpTestBase,
    DTensorTestBase,
    DTensorTestMixin,
    _get_device_type,
    num_devices,
    reduce_local_int,
    skip_unless_torch_gpu,
    with_comms,
)
from .converter import DTensorConverter
from .experts import ExpertLayer, ExpertParallel, Experts
from .layers import MLPModule, MLPStacked, RMSNormPython
from .local_tensors import (
    LocalDTensorContinuousTestBase,
    LocalDTensorOpTestBase,
    LocalDTensorTestBase,
    create_local_tensor_test_class,
)
from .transformer import Attention, FeedForward, ModelArgs, Transformer, TransformerBlock

__getattr__ = upstream_names.complete(
    __name__,
    {
        "NUM_DEVICES": num_devices,
        "DEVICE_COUNT": num_devices,
        "DEVICE_TYPE": lambda: accelerator.current().type,
        "PG_BACKEND": lambda: accelerator.current().backend,
    },
    {
        "NUM_DEVICES": settings.RANKS_VARIABLE,
        "DEVICE_COUNT": settings.RANKS_VARIABLE,
        "DEVICE_TYPE": settings.DEVICE_VARIABLE,
        "PG_BACKEND": settings.BACKEND_VARIABLE,
    },
)
