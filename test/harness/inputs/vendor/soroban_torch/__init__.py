"""A vendor's package, as one for a real device would be, for a device of wood: two frames of beads.

It computes on tensors of the processor, since a tensor of a device of its own needs a library in C++. All else is its
own: its name, how many there are, what they can do, and how a rank finds its own.
"""

from torch_fsdp_tests.accelerator import Accelerator


class Soroban(Accelerator):
    def bind(self, rank):
        device = self.device(rank)
        print(f"rank {rank} of the soroban counts on frame {rank % self.count}")
        return device


def describe(backend, ranks):
    tensors = "cpu"  # the CPU is the subject
    capabilities = frozenset({"fork", "shared_device", "bf16_collectives", "fp16_collectives"})
    return Soroban(
        tensors, backend or "gloo", count=2, ranks=ranks or 2, capabilities=capabilities, vendor_name="soroban"
    )
