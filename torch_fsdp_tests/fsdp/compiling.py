"""Helpers for ``torch.compile``: a backend that stores its graphs, and inductor if slow tests run."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import os
from collections.abc import Callable, Iterator
from unittest import mock

import torch

from torch_fsdp_tests.common_distributed import TIMEOUT_OVERRIDE, requires
from torch_fsdp_tests.inductor_utils import why_no_inductor

with contextlib.suppress(ImportError):  # before ranks are forked, because it takes seconds
    importlib.import_module("torch._inductor.compile_fx")


class CountingBackend:
    """A wrapper around a backend of ``torch.compile`` that stores the graphs."""

    def __init__(self, name: str = "aot_eager") -> None:
        self._compile = torch._dynamo.lookup_backend(name)
        self.graphs: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable:
        self.graphs.append(graph)
        return self._compile(graph, inputs)

    @property
    def nodes(self) -> list[torch.fx.Node]:
        """The nodes of all graphs."""
        return [node for graph in self.graphs for node in graph.graph.nodes]

    @property
    def op_count(self) -> int:
        """The number of nodes in all graphs that are calls."""
        return sum(node.op.startswith("call_") for node in self.nodes)

    def count(self, name: str) -> int:
        """The number of nodes in all graphs whose target has ``name`` in its name."""
        return sum(name in target_name(node) for node in self.nodes)


def target_name(node: torch.fx.Node) -> str:
    """The name of what a node calls or reads, a function's with its module.

    ``str`` of a function has its address, and an address such as ``0x7f4bcc10d580`` has words in it.
    """
    target = node.target
    return f"{target.__module__}.{target.__qualname__}" if inspect.isroutine(target) else str(target)


requires_inductor = requires(why_no_inductor)


def allow_time_for_inductor(*tests: str) -> None:
    """Give these tests the time that a C++ compiler takes on a busy machine."""
    TIMEOUT_OVERRIDE.update(dict.fromkeys(tests, 600))


@contextlib.contextmanager
def inductor_in(folder: str) -> Iterator[None]:
    """Inside the context, inductor compiles into this folder, which the ranks may share.

    It uses no pool of processes, because that would outlive the rank, and its random numbers equal those of eager.
    """
    with (
        torch._inductor.config.patch(compile_threads=1, fallback_random=True),
        mock.patch.dict(os.environ, TORCHINDUCTOR_CACHE_DIR=folder),
    ):
        yield
