"""A vendor's package like that of a real device. Its device is an abacus with two frames of beads.

The dispatcher imports this module, so it does not import torch.
"""

from torch_fsdp_tests.device.vendors import Vendor

FRAMES = 2
VISIBLE = "SOROBAN_VISIBLE_FRAMES"
EXCLUSIVE = "SOROBAN_EXCLUSIVE"  # if set, ranks can share a frame only over another backend than the device's own

VENDOR = Vendor("soroban", (VISIBLE,), lambda: FRAMES, backend="gloo", describe="soroban_torch.device:describe")
