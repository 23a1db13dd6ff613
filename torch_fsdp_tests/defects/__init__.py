"""Known defects of torch's FSDP: what each is, which versions have it, and a reproduction that needs torch alone.

Each module of :mod:`torch_fsdp_tests.defects.known` is one defect: its docstring says what is wrong and why, ``DEFECT``
holds the facts, and ``reproduce(rank, world_size, device)`` returns what torch gives and what is right.
``python -m torch_fsdp_tests.defects`` tries them all.
"""

from torch_fsdp_tests.defects.in_tests import NO_DEFECT, torch_defect
