"""Any model under FSDP: :class:`ModelTestCase` trains it in many configurations, against the plain model.

``configurations``: what is combined. ``plain``: the reference. ``sharded``: the model with FSDP1 or FSDP2.
``comparing``: tolerances and messages. ``case``: the test case. ``endings``: how a configuration ended.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_fsdp_tests.models.case import ModelTestCase as ModelTestCase


def __getattr__(name: str) -> Any:
    """The test case at its first use: it imports torch, and the page of a run needs only ``endings``."""
    if name != "ModelTestCase":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from torch_fsdp_tests.models.case import ModelTestCase

    return ModelTestCase
