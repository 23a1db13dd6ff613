"""FSDP1 raises for an input that is a ``defaultdict``.

When inputs are moved to the device, each mapping is rebuilt by calling its type with the items. The first argument of
``defaultdict`` is its factory, so the call raises, even if no tensor has to be moved. FSDP2 and DDP use the same
function on an accelerator.
"""

import collections

import torch
from torch.distributed.utils import _to_kwargs

from torch_fsdp_tests.defects.registry import Component, Consequence, Defect, Exposure

DEFECT = Defect(
    component=Component.FSDP1,
    consequence=Consequence.ERROR,
    exposure=Exposure.RARE,
    where="torch.distributed.utils._recursive_to",
    features="fsdp1",
    workaround="Pass ``dict(batch)``.",
    error="in _recursive_to ... first argument must be callable or None",
    world_size=1,
    fails_with=("TypeError",),
)


def reproduce(rank, world_size, device, workaround=False):
    batch = collections.defaultdict(list, x=torch.ones(1, device=device))
    elsewhere = torch.device("meta")  # represents the device that FSDP moves its inputs to
    try:
        ((moved,),), _ = _to_kwargs((dict(batch) if workaround else batch,), {}, elsewhere, False)
        actual = moved["x"].device.type
    except TypeError as error:
        actual = f"{type(error).__name__}: {error}"
    return actual, elsewhere.type


FIX = """
tried: 2.9, 2.13, 2.15

--- torch/distributed/utils.py
@@ _recursive_to [<2.15]
-            return [type(obj)(i) for i in zip(*map(to_map, obj.items()))]
+            import copy
+
+            made = []
+            for items in zip(*map(to_map, obj.items())):
+                made.append(copy.copy(obj))
+                made[-1].update(items)
+            return made
--- torch/distributed/utils.py
@@ _recursive_to [>=2.15]
             keys = list(obj.keys())
+
+            def rebuilt(values):
+                import copy
+
+                made = copy.copy(obj)
+                made.update(zip(keys, values))
+                return made
+
             return _handle_container(
-                obj, obj.values(), lambda v: type(obj)(zip(keys, v))
+                obj, obj.values(), rebuilt
             )
"""
