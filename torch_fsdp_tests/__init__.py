"""Replaces those modules of ``torch.testing._internal`` that tests of FSDP import."""

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

__version__ = "0.1.0"

UPSTREAMS = (
    *("common_cuda", "common_device_type", "common_dist_composable", "common_distributed", "common_fsdp"),
    *("common_utils", "distributed", "inductor_utils", "logging_utils", "two_tensor"),
)


def __getattr__(name: str) -> ModuleType:
    """A module that the program names in full, as in ``torch_fsdp_tests.common_utils.run_tests()``, without importing
    it.
    """
    if not name.startswith("_"):
        try:
            return importlib.import_module(f"{__name__}.{name}")
        except ModuleNotFoundError as error:
            raise AttributeError(str(error)) from error
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _FromTorch:
    """Finds modules that only upstream has, in the installed torch. It is the last finder."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> "ModuleSpec | None":
        package, _, missing = fullname.partition(".")
        if package != __name__ or not missing:
            return None
        from torch_fsdp_tests.installed_torch import upstream_names  # not at import, and few processes need it

        return upstream_names.spec(missing)


sys.meta_path.append(_FromTorch)
