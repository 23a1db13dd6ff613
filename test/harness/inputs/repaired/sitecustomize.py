"""Simulates a torch without the defects that ``REPAIRED_DEFECTS`` names. All repairs are in memory.

With this folder on the path, a process makes the repairs after it has imported FSDP.
"""

from __future__ import annotations

import os

if NAMES := os.environ.get("REPAIRED_DEFECTS", "").split():
    import importlib.abc
    import importlib.machinery
    import sys
    from collections.abc import Sequence
    from types import ModuleType

    class After(importlib.machinery.SourceFileLoader):
        """Loads a module and then runs a function on it."""

        def exec_module(self, module: ModuleType) -> None:
            super().exec_module(module)
            from repairs import repair

            for name in NAMES:
                repair(name)

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            if fullname != "torch.distributed.fsdp":
                return None
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None:
                spec.loader = After(fullname, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder())
