"""The ways to build a test model, and the methods that a training loop needs."""

from __future__ import annotations

import abc
import enum
from typing import Any

import torch
from torch import nn


class FSDPInitMode(enum.Enum):
    """Whether ``init`` of a test model applies FSDP: not at all, or to the submodules that the model names."""

    NO_FSDP = enum.auto()
    RECURSIVE = enum.auto()


class DEVICEInitMode(enum.Enum):
    """When a test model moves to the device under test: before FSDP wraps it, after that, or never."""

    DEVICE_BEFORE = enum.auto()
    DEVICE_AFTER = enum.auto()
    DEVICE_NEVER = enum.auto()


class CUDAInitMode:
    """:class:`DEVICEInitMode` by the names that torch 2.6 and older versions have for it."""

    CUDA_BEFORE = DEVICEInitMode.DEVICE_BEFORE
    CUDA_AFTER = DEVICEInitMode.DEVICE_AFTER
    CUDA_NEVER = DEVICEInitMode.DEVICE_NEVER


class FullyShardMode(enum.Enum):
    """How ``compiled_fsdp_test`` runs a test: eagerly, or with the computation of each FSDP module compiled."""

    EAGER = enum.auto()
    COMPILED_COMPUTE = enum.auto()


class FSDPTestModel(nn.Module, abc.ABC):
    """A model that brings its own inputs, loss and backward, so that one loop can train them all."""

    @abc.abstractmethod
    def get_input(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The positional arguments of one forward, on ``device``."""

    @abc.abstractmethod
    def get_loss(self, input: tuple[torch.Tensor, ...], output: Any) -> torch.Tensor:
        """The scalar loss of forward's output for ``input``."""

    @abc.abstractmethod
    def run_backward(self, loss: torch.Tensor) -> None:
        """Run backward from ``loss``, and reduce the gradients that the model reduces itself."""

    @staticmethod
    @abc.abstractmethod
    def init(*args: Any, **kwargs: Any) -> nn.Module:
        """Build the model, and wrap and move it as the init modes say."""
