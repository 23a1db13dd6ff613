"""Any model under FSDP: :class:`ModelTestCase` trains it in many configurations, against the plain model.

``configurations``: what is combined. ``plain``: the reference. ``sharded``: the model with FSDP1 or FSDP2.
``comparing``: tolerances and messages. ``case``: the test case.
"""

from torch_fsdp_tests.models.case import ModelTestCase as ModelTestCase
