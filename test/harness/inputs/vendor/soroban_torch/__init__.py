"""A vendor's package, as one for a real device would be, for a device of wood: two frames of beads.

This module is what the dispatcher asks, so it imports no torch.
"""

from torch_fsdp_tests.vendors import Vendor

FRAMES = 2
VISIBLE = "SOROBAN_VISIBLE_FRAMES"

VENDOR = Vendor("soroban", (VISIBLE,), lambda: FRAMES, backend="gloo", describe="soroban_torch.device:describe")
