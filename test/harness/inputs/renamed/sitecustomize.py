"""Simulates a future version of torch whose FSDP has other private names.

With this folder on the path, each name in ``RENAMED_IN_FSDP`` is replaced in the source of torch.distributed.fsdp when
a process imports it. No file is written. FSDP still works, because all its files use the new names.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import re
import sys
from collections.abc import Sequence
from types import CodeType, ModuleType

NAMES = os.environ.get("RENAMED_IN_FSDP", "").split()


class _Renaming(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        source = self.get_source(fullname)
        assert source is not None
        for name in NAMES:
            source = re.sub(rf"\b{name}\b", f"{name}_of_tomorrow", source)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not f"{fullname}.".startswith("torch.distributed.fsdp."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            spec.loader = _Renaming(spec.loader.name, spec.loader.path)
        return spec


if NAMES:
    sys.meta_path.insert(0, _Finder())
