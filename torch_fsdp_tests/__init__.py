"""Replaces those modules of ``torch.testing._internal`` that tests of FSDP import."""

import sys

__version__ = "0.1.0"

UPSTREAMS = (
    *("common_cuda", "common_device_type", "common_dist_composable", "common_distributed", "common_fsdp"),
    *("common_utils", "distributed", "inductor_utils", "logging_utils", "two_tensor"),
)


class _NotOffered:
    """Explains what to do about a module, or a name of a package, that only upstream has. It is the last finder."""

    @staticmethod
    def find_spec(fullname: str, path: object = None, target: object = None) -> None:
        package, _, missing = fullname.partition(".")
        if package == __name__ and missing:
            # The exception gets no name, because "from package import name" would hide it.
            raise ModuleNotFoundError(
                f"{package} has no {missing} (it has what tests of FSDP use from {', '.join(UPSTREAMS)}): "
                f"use torch.testing._internal.{missing}, which PyTorch still has"
            )


sys.meta_path.append(_NotOffered)
