"""Contexts that replace a collective, or a step of FSDP2.

Ranks may be threads, which share what is patched. So all ranks enter and leave a patch together: there is a barrier
between reading the original and replacing it, and another one before it is restored. If threads write different
replacements, the last one is used by all, so they should be the same. Each ``patch_*`` is therefore a collective over
the default group. Without a group there is one rank, and no barrier.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist

from torch_fsdp_tests.installed_torch import torch_facts, torch_names

_param_group = torch_names.module("torch.distributed.fsdp._fully_shard._fsdp_param_group")

Replacement = Callable[..., Any]


def _meet() -> None:
    if dist.is_initialized():
        dist.barrier()


@contextlib.contextmanager
def swapped(write: Callable[[Any], None], original: Any, replacement: Any) -> Iterator[None]:
    """Call ``write(replacement)``, and ``write(original)`` at the end of the context.

    After an exception the original is restored at once, without the barrier of upstream's patches. The other ranks may
    never reach that barrier, and then a timeout would hide the exception.
    """
    _meet()
    write(replacement)
    try:
        yield
        _meet()
    finally:
        write(original)


def debug_level(level: dist.DebugLevel) -> AbstractContextManager[None]:
    """Set the debug level of ``torch.distributed``. An FSDP1 instance keeps the level at which it was built."""
    return swapped(dist.set_debug_level, dist.get_debug_level(), level)


def _patched(owner: Any, name: str, replacement: Replacement) -> AbstractContextManager[None]:
    # This reads the owner's dictionary, because the attribute of a class would come without its staticmethod.
    return swapped(functools.partial(setattr, owner, name), vars(owner)[name], replacement)


def patch_all_gather(new_all_gather_into_tensor: Replacement) -> AbstractContextManager[None]:
    """Replace the all-gather that FSDP calls on ``torch.distributed``; see ``torch_facts.all_gather_name``."""
    return _patched(dist, torch_facts.all_gather_name(), new_all_gather_into_tensor)


def patch_reduce_scatter(new_reduce_scatter_tensor: Replacement) -> AbstractContextManager[None]:
    """Replace the reduce-scatter that FSDP calls on ``torch.distributed``; see ``torch_facts.reduce_scatter_name``."""
    return _patched(dist, torch_facts.reduce_scatter_name(), new_reduce_scatter_tensor)


def patch_all_reduce(new_all_reduce: Replacement) -> AbstractContextManager[None]:
    """Replace ``torch.distributed.all_reduce``."""
    return _patched(dist, "all_reduce", new_all_reduce)


def patch_foreach_all_gather(new_foreach_all_gather: Replacement) -> AbstractContextManager[None]:
    """Replace the function by which an FSDP2 parameter group gathers all its parameters."""
    return _patched(_param_group, "foreach_all_gather", new_foreach_all_gather)


def patch_foreach_reduce(new_foreach_reduce: Replacement) -> AbstractContextManager[None]:
    """Replace the function by which an FSDP2 parameter group reduces all its gradients."""
    return _patched(_param_group, "foreach_reduce", new_foreach_reduce)


def patch_unshard(new_unshard: Replacement) -> AbstractContextManager[None]:
    """Replace ``FSDPParamGroup.unshard``."""
    return _patched(_param_group.FSDPParamGroup, "unshard", new_unshard)


def patch_reshard(new_reshard: Replacement) -> AbstractContextManager[None]:
    """Replace ``FSDPParamGroup.reshard``."""
    return _patched(_param_group.FSDPParamGroup, "reshard", new_reshard)


def patch_post_backward(new_post_backward: Replacement) -> AbstractContextManager[None]:
    """Replace ``FSDPParamGroup.post_backward``."""
    return _patched(_param_group.FSDPParamGroup, "post_backward", new_post_backward)


def patch_register_post_backward_hook_backward(new_backward: Replacement) -> AbstractContextManager[None]:
    """Replace the backward of the autograd function that calls an FSDP2 parameter group's ``post_backward``."""
    return _patched(_param_group.RegisterPostBackwardFunction, "backward", staticmethod(new_backward))


def reduce_scatter_with_assert(
    cls: Any, orig_reduce_scatter: Replacement, assert_fn: Callable[[torch.Tensor], object], *args: Any, **kwargs: Any
) -> Any:
    """Call ``assert_fn`` on the output of a reduce-scatter, which has no values yet, and then the reduce-scatter.

    To use it as a replacement, bind the first three arguments with ``functools.partial``. ``cls`` is the test, and is
    not used. Raises ``AssertionError`` if the call has no output argument, because then nothing was checked.
    """
    output = args[0] if args else kwargs.get("output")
    if output is None:
        raise AssertionError(f"the reduce-scatter was called without an output: {args}, {kwargs}")
    assert_fn(output)
    return orig_reduce_scatter(*args, **kwargs)
