"""What has to be the same after an insertion as before, and what has to be true of what was taken."""

from __future__ import annotations

import gc
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only

from torch_fsdp_tests.installed_torch.torch_names import groups_of_state
from torch_fsdp_tests.perturb.kinds import Subject, Taken

RELEASE = 2.0  # seconds in which what was taken must be released
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks")


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard of a DTensor, or the tensor."""
    return tensor.detach()._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _same(left: Any, right: Any) -> bool:
    """Whether two facts are equal, also inside containers. NaN equals itself."""
    if type(left) is type(right) and type(left) in (list, tuple, dict):
        (lefts, left_spec), (rights, right_spec) = tree_flatten(left), tree_flatten(right)
        return left_spec == right_spec and all(map(_same, lefts, rights))
    if not (isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)):
        return type(left) is type(right) and bool(left == right)
    if left.shape != right.shape or left.dtype != right.dtype or left.device != right.device:
        return False
    return bool(((left == right) | ((left != left) & (right != right))).all())


class Snapshot:
    """The model and the optimizer before an insertion."""

    def __init__(self, subject: Subject) -> None:
        self._subject = subject
        self._is_sharded = _is_sharded(subject.root)
        # Not weak references: torch does not swap tensors that have some. The model holds the parameters anyway.
        self._objects = {name: id(param) for name, param in subject.params().items()}
        self._before = dict(_facts(subject))

    def check(self, taken: Taken | None, words: str) -> None:
        """Raise ``AssertionError`` for the first fact that has changed."""
        if self._is_sharded:
            after = dict(_facts(self._subject))
            for name in dict.fromkeys([*self._before, *after]):
                was, now = (facts.get(name) for facts in (self._before, after))
                if not _same(was, now):
                    raise AssertionError(f"{name} has changed from {_brief(was)} to {_brief(now)}: {words}")
            params = self._subject.params()
            for name, identity in self._objects.items():
                if id(params.get(name)) != identity:
                    raise AssertionError(f"the parameter {name} is another object: {words}")
        if taken is not None:
            check_taken(taken, self._subject, words)


def _brief(value: Any) -> str:
    text = repr(value.flatten()[:4].tolist() if isinstance(value, torch.Tensor) else value)
    return text if len(text) < 200 else f"{text[:200]}..."


def _is_sharded(root: nn.Module) -> bool:
    """Whether no module is unsharded, as ``set_reshard_after_backward(False)`` or a forward of FSDP1 may leave them."""
    handles = [handle for module in root.modules() if (handle := getattr(module, "_handle", None)) is not None]
    if any(
        getattr(handle, "uses_sharded_strategy", False) and handle.flat_param.shape != handle.flat_param._sharded_size
        for handle in handles
        if hasattr(handle, "flat_param")
    ):
        return False
    return all(
        getattr(group, "is_sharded", True)
        for module in root.modules()
        if isinstance(module, FSDPModule)
        for group in groups_of_state(module._get_fsdp_state())
    )


def _facts(subject: Subject) -> Iterator[tuple[str, Any]]:
    root = subject.root
    yield "whether the parameters are sharded", _is_sharded(root)
    for name, param in root.named_parameters():
        yield f"the parameter {name}", local(param).clone()
        yield f"requires_grad of {name}", param.requires_grad
        yield f"the placements of {name}", str(getattr(param, "placements", None))
        yield f"the gradient of {name}", None if param.grad is None else local(param.grad).clone()
    for name, buffer in root.named_buffers() if subject.forwards.calls else ():  # the first forward may convert them
        yield f"the buffer {name}", local(buffer).clone()
    for name, module in root.named_modules():
        yield f"training of {name or 'the root'}", module.training
        if subject.forwards.calls:  # before the first forward, any call may register what it needs
            hooks = Counter({each: len(getattr(module, each)) for each in _HOOKS})
            yield f"the number of hooks of {name or 'the root'}", +hooks
            yield f"the training states of {name or 'the root'}", _states(module)
    optimizer = subject.optimizer
    if optimizer is None:
        return
    for number, group in enumerate(optimizer.param_groups):
        settings = {key: value for key, value in group.items() if key != "params"}
        yield f"the settings of group {number}", {key: str(value) for key, value in sorted(settings.items())}
        for place, param in enumerate(group["params"]):
            for key, value in optimizer.state.get(param, {}).items():
                copied = tree_map_only(torch.Tensor, lambda each: local(each).clone(), value)
                yield f"the state {key} of parameter {place} of group {number}", copied


def _states(module: nn.Module) -> list[str]:
    """The training states of FSDP1's handle or FSDP2's groups."""
    owners: list[Any] = [getattr(module, "_handle", None)]
    if isinstance(module, FSDPModule):
        state = module._get_fsdp_state()
        owners = [state, *groups_of_state(state)]
    return [str(getattr(each, "_training_state", "")) for each in owners if each is not None]


def check_taken(taken: Taken, subject: Subject, words: str) -> None:
    """What was taken lives no longer than it is held, and keeps nothing else alive."""
    live = {local(each).untyped_storage().data_ptr() for each in _live(subject)}
    tensors = [each for each in tree_leaves(taken.value) if type(each) in (torch.Tensor, nn.Parameter, DTensor)]
    refs, kept = [], dict[int, list[float]]()
    for tensor in tensors:
        storage = local(tensor).untyped_storage()
        if not local(tensor).numel():
            continue
        if storage.data_ptr() in live:
            continue  # it is documented that state dicts share memory with the model
        kept.setdefault(storage.data_ptr(), [storage.nbytes()]).append(_padded(local(tensor)))
        refs.append(weakref.ref(tensor))
    for whole, *parts in kept.values():
        if whole > sum(parts):
            raise AssertionError(f"tensors of at most {sum(parts):.0f} bytes keep {whole} bytes alive: {words}")
    count, taken.value = len(refs), None
    tensors.clear()
    tensor = storage = None
    until = time.monotonic() + RELEASE
    while alive := sum(ref() is not None for ref in refs):
        gc.collect()  # for cycles; a thread of the backend may release a tensor a moment after its collective
        if time.monotonic() < until:
            continue
        raise AssertionError(f"{alive} of {count} tensors are alive although nothing holds them: {words}")


def _padded(tensor: torch.Tensor) -> float:
    """The bytes of a tensor that was gathered from uneven shards, and so is a part of a padded one."""
    ranks = dist.get_world_size()
    return tensor.numel() * tensor.element_size() * max((rows + ranks - 1) / rows for rows in (*tensor.shape, 1))


def _live(subject: Subject) -> Iterator[torch.Tensor]:
    for param in subject.root.parameters():
        yield param
        if param.grad is not None:
            yield param.grad
    yield from subject.root.buffers()
    if subject.optimizer is not None:
        leaves = tree_leaves(list(subject.optimizer.state.values()))
        yield from (each for each in leaves if isinstance(each, torch.Tensor))
