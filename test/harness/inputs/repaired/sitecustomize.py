"""Simulates a torch without the defects that ``REPAIRED_DEFECTS`` names. All repairs are in memory.

With this folder on the path, a process makes the repairs after it has imported FSDP. With ``each``, the process that
tries a defect repairs only that defect.
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
            if module.__name__ == "torch.distributed.fsdp":
                from repairs import repair

                for name in NAMES:
                    repair(name)
            else:  # the part of the command by which a rank finds its defect
                entry = module.entry

                def repaired_entry(id: str) -> object:
                    from torch_fsdp_tests.ranks import in_rank

                    if in_rank():
                        from repairs import repair

                        repair(id)
                    return entry(id)

                module.entry = repaired_entry  # type: ignore[attr-defined]

    class Finder(importlib.abc.MetaPathFinder):
        def find_spec(
            self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
        ) -> importlib.machinery.ModuleSpec | None:
            wanted = "torch_fsdp_tests.defects.registry" if NAMES == ["each"] else "torch.distributed.fsdp"
            if fullname != wanted:
                return None
            spec = importlib.machinery.PathFinder.find_spec(fullname, path)
            if spec is not None and spec.origin is not None:
                spec.loader = After(fullname, spec.origin)
            return spec

    sys.meta_path.insert(0, Finder())
