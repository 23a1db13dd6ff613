"""How the ranks of a test find each other if a launcher made them: through its store, not through a file.

Tests meet at ``file_name``, a file that ranks on several machines do not share. In a launched rank that name means
a prefix in the launcher's store: a ``FileStore`` of that file becomes the store with that prefix, which is fresh for
each test. All other files stay files.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from torch_fsdp_tests.extensions.launch import EXTENSION
from torch_fsdp_tests.extensions.launch.launcher import Launch
from torch_fsdp_tests.extensions.launch.peers import open_store

_VARIABLE = "_TORCH_FSDP_TESTS_LAUNCH"


def variables(launch: Launch, local_ranks: Sequence[int], rank: int) -> Mapping[str, str]:
    """Return the environment variables that mark a rank process as a launched one, which calls :func:`join`."""
    place = {"address": launch.address, "port": launch.port, "local_ranks": list(local_ranks)}
    return {_VARIABLE: json.dumps(place), "LOCAL_RANK": str(local_ranks[rank])}


def among_extensions(names: str) -> str:
    """Return the names of the extensions that work in a rank, with this one."""
    return ",".join(dict.fromkeys([*filter(None, names.split(",")), EXTENSION.name]))


def join(file_name: str, rank: int, world_size: int) -> None:
    """In a launched rank: let ``file_name`` mean a part of the launcher's store. In other ranks, do nothing."""
    text = os.environ.pop(_VARIABLE, None)
    if text is None:
        return
    import torch.distributed as dist

    from torch_fsdp_tests.device import accelerator

    place = json.loads(text)
    accelerator.place(place["local_ranks"])
    launch = Launch(rank, world_size, 0, place["address"], place["port"], agent_store=True)
    original = dist.FileStore

    class FileStore(original):  # type: ignore[misc, valid-type]
        """A file store. For the test's rendezvous file, it is the launcher's store instead."""

        def __new__(cls, path: str, *arguments: Any) -> Any:
            if str(path) != file_name:
                return original(path, *arguments)
            return dist.PrefixStore(f"torch_fsdp_tests{file_name}", open_store(launch))

    for module in list(sys.modules.values()):  # test files have imported it by its name
        if getattr(module, "__dict__", {}).get("FileStore") is original:
            module.FileStore = FileStore  # type: ignore[attr-defined]
