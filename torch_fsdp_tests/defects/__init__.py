"""Known defects of torch's FSDP: what each is, which versions have it, and a reproduction that needs torch alone.

Each module of :mod:`torch_fsdp_tests.defects.known` is one defect: its docstring says what is wrong and why, ``DEFECT``
holds the facts, ``reproduce(rank, world_size, device)`` returns what torch gives and what is right, and a ``FIX`` can
fix torch. ``python -m torch_fsdp_tests.defects`` tries them all.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fsdp_tests.defects.in_tests import NO_DEFECT, torch_defect


def __getattr__(name: str) -> Any:
    """What tests use imports torch, which the command needs only to try defects."""
    if name not in ("NO_DEFECT", "torch_defect"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch_fsdp_tests.defects import in_tests

    return getattr(in_tests, name)
