"""The device for the tests. It computes on CPU tensors, because its own would need a library in C++.

Everything else is its own: its name, its number, its capabilities, and how a rank finds its device.
"""

import dataclasses
import os

import torch

from torch_fsdp_tests.device.accelerator import Accelerator

from . import EXCLUSIVE, FRAMES, VISIBLE


def frames() -> list[int]:
    """The frames that this process may use."""
    return [int(name) for name in os.environ.get(VISIBLE, ",".join(map(str, range(FRAMES)))).split(",")]


class Soroban(Accelerator):
    def bind(self, rank: int) -> torch.device:
        device = self.device(rank)
        alone = "" if self.has("shared_device") else " alone"
        print(f"rank {rank} of the soroban counts on frame {frames()[rank % self.count]}{alone}")
        return device


def describe(backend: str | None, ranks: int | None) -> Soroban:
    tensors, count = "cpu", len(frames())  # the CPU is the subject
    able = frozenset({"fork", "asynchronous_collectives", "bf16_collectives", "fp16_collectives"})
    alone = Soroban(tensors, backend or "gloo", count, ranks or count, able, vendor_name="soroban")
    sharing = dataclasses.replace(alone, capabilities=able | {"shared_device"})
    return dataclasses.replace(alone, sharing=sharing) if EXCLUSIVE in os.environ else sharing
