"""The operations that are inserted. None may change anything that documentation does not name."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import enum
import shutil
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import ActivationWrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import FSDPModule, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.api import FullOptimStateDictConfig, FullStateDictConfig
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_facts
from torch_fsdp_tests.installed_torch.torch_names import groups_of_state

FAR = 1e30  # a norm that no gradients have


class InsertionPoint(enum.Enum):
    BEFORE_FORWARD = "before forward"
    BEFORE_STEP = "before the step after forward"
    AFTER_STEP = "after the step after forward"


EVERYWHERE = frozenset(InsertionPoint)  # no graph of the training loop waits for its backward
AROUND_STEP = frozenset({InsertionPoint.BEFORE_STEP, InsertionPoint.AFTER_STEP})


@dataclasses.dataclass
class Forwards:
    """The outermost forwards of a model."""

    api: str  # fsdp1, fsdp2 or ddp
    args: tuple[Any, ...] = ()  # of the last forward in training, or of the one that follows
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    calls: int = 0
    pending: int = 0  # those whose backward has not run, as far as is known
    has_run: bool = False  # whether the arguments are known


@dataclasses.dataclass
class Subject:
    """The model of a training loop, at the place of an insertion."""

    root: nn.Module
    optimizer: torch.optim.Optimizer | None
    place: InsertionPoint
    number: int  # the same on all ranks of the test, and different at each insertion
    forwards: Forwards
    # Whether the optimizer has all states on all ranks. If not, DSD takes a step to make them
    # (``dsd_asking_for_optim_state_is_a_step``).
    has_states: bool = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        groups = self.optimizer.param_groups if self.optimizer is not None else ()
        states = self.optimizer.state if self.optimizer is not None else {}
        self.has_states = self.owns_optimizer and all(param in states for group in groups for param in group["params"])

    @property
    def api(self) -> str:
        return self.forwards.api

    def inputs(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Copies of the arguments of the last forward."""
        return copied(self.forwards.args), copied(self.forwards.kwargs)

    def run(self) -> None:
        """A forward of the root."""
        args, kwargs = self.inputs()
        self.root(*args, **kwargs)

    def choose(self, count: int) -> int:
        """A number below ``count``, the same on all ranks."""
        return self.number // 64 % count

    def units(self) -> Iterator[Any]:
        """The modules to which the API was applied, the root first."""
        cls = {"fsdp1": FSDP, "fsdp2": FSDPModule}.get(self.api, ())
        return (module for module in self.root.modules() if isinstance(module, cls))

    def groups(self) -> Iterator[Any]:
        """FSDP2's parameter groups."""
        for unit in self.units() if self.api == "fsdp2" else ():
            yield from groups_of_state(unit._get_fsdp_state())

    def is_watched(self) -> bool:
        """Whether the test has replaced collectives, or what they send, by its own functions."""
        names = ("_all_gather_comm", "_reduce_scatter_comm", "_all_reduce_hook")
        for group in self.groups():
            if not all(_is_own(value) for name in names if (value := getattr(group, name, None)) is not None):
                return True
            if any(hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather") for param in group.fsdp_params):
                return True
        return False

    def spans_the_world(self) -> bool:
        """Whether all ranks have the model, so that they insert the same."""
        if self.api == "ddp":
            root: Any = self.root
            return bool(root.process_group.size() == dist.get_world_size())
        return {size for unit in self.units() for size in _sizes_of(unit)} <= {dist.get_world_size()}

    def is_idle(self) -> bool:
        """Whether FSDP1 is not where an exception in forward or backward left it."""
        return self.api != "fsdp1" or all(unit.training_state.name == "IDLE" for unit in self.units())

    def is_made(self) -> bool:
        """Whether all parameters have values."""
        return not any(param.is_meta for param in self.root.parameters())

    def params(self) -> dict[str, nn.Parameter]:
        return dict(self.root.named_parameters())

    @property
    def owns_optimizer(self) -> bool:
        """Whether all parameters of the optimizer are the root's, as state dicts of optimizers need."""
        own = set(map(id, self.root.parameters()))
        return self.optimizer is not None and all(
            id(param) in own for group in self.optimizer.param_groups for param in group["params"]
        )


@dataclasses.dataclass
class Taken:
    """What an operation took from the model."""

    value: Any


@dataclasses.dataclass(frozen=True)
class Kind:
    name: str
    insert: Callable[[Subject], Taken | None]
    places: frozenset[InsertionPoint]
    documented: str
    applies: Callable[[Subject], bool]


KINDS: dict[str, Kind] = {}


def _sizes_of(unit: Any) -> set[int]:
    """The numbers of ranks over which FSDP1 or FSDP2 shards and replicates the parameters of a module."""
    if isinstance(unit, FSDP):
        replicas = getattr(unit, "_inter_node_pg", None)
        return {int(unit.process_group.size() * (replicas.size() if replicas is not None else 1))}
    groups = groups_of_state(unit._get_fsdp_state())
    return {param.sharded_param.device_mesh.size() for group in groups for param in group.fsdp_params}


def _kind(
    places: frozenset[InsertionPoint], documented: str, applies: Callable[[Subject], bool] = lambda subject: True
) -> Any:
    def register(function: Callable[[Subject], Taken | None]) -> Callable[[Subject], Taken | None]:
        name = function.__name__.strip("_")  # eval and dcp have other meanings here
        KINDS[name] = Kind(name, function, places, documented, applies)
        return function

    return register


def copied(value: Any) -> Any:
    """A copy without gradients of what a forward gets. Objects that are no containers are shared."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone().requires_grad_(value.requires_grad)
    if type(value) in (tuple, list):
        return type(value)(map(copied, value))
    return {key: copied(each) for key, each in value.items()} if type(value) is dict else value


def _is_own(hook: Any) -> bool:
    """Whether torch defines a function, or the class of an object."""
    function = getattr(hook, "__func__", getattr(hook, "func", hook))
    return str(getattr(function, "__module__", type(hook).__module__)).split(".")[0] == "torch"


def can_run(subject: Subject) -> bool:
    """Whether one more forward changes nothing, and cannot be seen by the test.

    No hook, class or method of the test, and nothing compiled, may be part of the model. An embedding with
    ``max_norm`` changes its weight. A group of modules reshards when all of them have run. DDP's arguments may no
    longer fit at the step, because tests convert their references. In some versions, autocast would use casts that were
    made without gradients.
    """
    if not torch_facts.KEEPS_CASTS_BY_GRAD_MODE and torch.is_autocast_enabled(accelerator.current().type):
        return False
    if not subject.forwards.has_run or (subject.api == "ddp" and subject.place is not InsertionPoint.BEFORE_FORWARD):
        return False
    groups = subject.groups()
    return all(map(_may_run, subject.root.modules())) and all(len(getattr(each, "modules", ())) == 1 for each in groups)


def _may_run(module: nn.Module) -> bool:
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    if "_orig_mod" in module._modules or module._compiled_call_impl is not None:
        return False  # the test may count what is compiled
    of_the_test = any("<locals>" in cls.__qualname__ for cls in type(module).__mro__) or "forward" in vars(module)
    return all(map(_is_own, hooks)) and not of_the_test and getattr(module, "max_norm", None) is None


@contextlib.contextmanager
def _eval_mode(subject: Subject) -> Iterator[None]:
    """After it, what is unsharded because the test set ``reshard_after_forward`` reshards, as documented."""
    modes = {module: module.training for module in subject.root.modules()}
    subject.root.eval()
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
        for unit in subject.units() if subject.api == "fsdp2" else ():
            if not unit._get_fsdp_state()._auto_reshard_after_forward:
                unit.reshard()


# --- Forwards ---------------------------------------------------------------------------------------------------------


@_kind(EVERYWHERE, "torch.no_grad: computations are never recorded; nn.Module.eval: only some modules differ", can_run)
def eval_(subject: Subject) -> None:
    with _eval_mode(subject), torch.no_grad():
        subject.run()


def _can_infer(subject: Subject) -> bool:
    """Not if FSDP1 would make an inference tensor of a parameter of which a rank has no elements."""
    is_split = subject.api == "fsdp1" and not all(param.numel() for param in subject.params().values())
    return not is_split and can_run(subject)


@_kind(EVERYWHERE, "torch.inference_mode: like no_grad, with tensors that are not used in autograd later", _can_infer)
def inference(subject: Subject) -> None:
    args, kwargs = subject.inputs()  # a DTensor that is no inference tensor cannot be copied in inference mode
    with _eval_mode(subject), torch.inference_mode():
        subject.root(*args, **kwargs)


class _Planned(Exception):
    pass


def _accumulates(group: Any) -> bool:
    """Whether a group of FSDP2 has gradients of microbatches that are not reduced yet."""
    if group._partial_reduce_output is not None:
        return True
    params = group.fsdp_params
    unsharded = [each for param in params if (each := getattr(param, "_unsharded_param", None)) is not None]
    return any(each.grad is not None for each in unsharded) or any(
        param.unsharded_accumulated_grad is not None for param in params
    )


def _can_fail(subject: Subject) -> bool:
    """FSDP2 documents how to go on, but only for a step that begins anew, because the reset drops gradients. FSDP1, and
    DDP around FSDP2, have no function that undoes what an exception leaves.
    """
    holds_fsdp2 = any(isinstance(module, FSDPModule) for module in subject.root.modules())
    if subject.api == "fsdp1" or (subject.api == "ddp" and holds_fsdp2):
        return False
    if subject.api == "fsdp2":
        if not (subject.forwards.calls and hasattr(subject.root, "reset_iter_state")):
            return False
        if any(param.grad is not None for param in subject.root.parameters()):
            return False
        if not subject.root._get_fsdp_state()._is_root or any(map(_accumulates, subject.groups())):
            return False
    return can_run(subject)


@_kind(
    frozenset({InsertionPoint.BEFORE_FORWARD}),
    "FSDPModule.reset_iter_state: 'run the next iteration normally'",
    _can_fail,
)
def exception(subject: Subject) -> None:
    leaves = [module for module in subject.root.modules() if not any(module.children())]
    left = subject.choose(3)  # leaves that run before the exception

    def raising(module: nn.Module, args: Any) -> None:
        nonlocal left
        if not left:
            raise _Planned
        left -= 1

    handles = [leaf.register_forward_pre_hook(raising) for leaf in leaves]
    try:
        with contextlib.suppress(_Planned):
            subject.run()
    finally:
        for handle in handles:
            handle.remove()
    if subject.api == "fsdp2":
        root: Any = subject.root
        root.reset_iter_state()


# --- State dicts ------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _full_type(root: nn.Module, offload: bool) -> Iterator[None]:
    config = FullStateDictConfig(offload_to_cpu=offload), FullOptimStateDictConfig(offload_to_cpu=offload)
    with FSDP.state_dict_type(root, StateDictType.FULL_STATE_DICT, *config):
        yield


def _gives_state_dicts(subject: Subject) -> bool:
    """DSD raises for an empty state dict. FSDP1's functions do not work in threads: they ask the process group for its
    device, and their profiler records what runs in one set.
    """
    root: Any = subject.root
    return bool(subject.params()) and (subject.api != "fsdp1" or bool(root.process_group._device_types))


@_kind(EVERYWHERE, "nn.Module.state_dict returns references; FSDP.state_dict_type: types", _gives_state_dicts)
def state_dict(subject: Subject) -> Taken:
    root, taken = subject.root, []
    taken.append(root.state_dict())
    units = list(subject.units())
    if units and subject.forwards.calls:
        taken.append(units[subject.choose(len(units))].state_dict())
    if subject.api == "fsdp1":
        with _full_type(root, offload=bool(subject.choose(2))):
            taken.append(root.state_dict())
            if subject.has_states:
                taken.append(FSDP.optim_state_dict(root, subject.optimizer))
        with FSDP.state_dict_type(root, StateDictType.SHARDED_STATE_DICT):
            taken.append(root.state_dict())
    elif subject.optimizer is not None:
        taken.append(subject.optimizer.state_dict())
    return Taken(taken)


@_kind(EVERYWHERE, "get_model_state_dict and get_optimizer_state_dict change nothing", _gives_state_dicts)
def dsd(subject: Subject) -> Taken:
    offload, full = divmod(subject.choose(4), 2)
    options = StateDictOptions(full_state_dict=bool(full), cpu_offload=bool(offload))
    taken = [get_model_state_dict(subject.root, options=options)]
    if subject.has_states:
        taken.append(get_optimizer_state_dict(subject.root, subject.optimizer, options=options))
    return Taken(taken)


def _separate(value: Any) -> Any:
    """A state dict with copies of its tensors."""
    if isinstance(value, dict):
        return {key: _separate(each) for key, each in value.items()}
    return value.detach().clone() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def _can_load(subject: Subject) -> bool:
    """Not if tensors are swapped: then a load drops the gradients of any module."""
    return _gives_state_dicts(subject) and not torch.__future__.get_swap_module_params_on_conversion()


def _can_reload(subject: Subject) -> bool:
    """Not if FSDP1 records names with the prefixes of DDP, or of checkpoint wrappers, which is a known defect without
    a fix: ``dsd_checkpointed_optim_state_is_refused``.
    """
    modules = list(subject.root.modules())
    units = [module for module in modules if isinstance(module, FSDP)]
    is_flat = any(not unit._use_orig_params for unit in units)
    wrappers = (DDP, ActivationWrapper) if is_flat else DDP
    is_wrapped = bool(units) and any(isinstance(module, wrappers) for module in modules)
    return subject.has_states and _can_load(subject) and not is_wrapped


@_kind(EVERYWHERE, "load_state_dict copies parameters; that of an optimizer replaces its state by copies", _can_load)
def load(subject: Subject) -> None:
    subject.root.load_state_dict(_separate(subject.root.state_dict()))
    if subject.optimizer is not None and subject.api != "fsdp1":
        subject.optimizer.load_state_dict(copy.deepcopy(subject.optimizer.state_dict()))


@_kind(AROUND_STEP, "set_state_dict loads what get_state_dict returns", _can_reload)
def dsd_load(subject: Subject) -> None:
    optimizer: Any = subject.optimizer
    model, optim = get_state_dict(subject.root, optimizer)
    set_state_dict(subject.root, optimizer, model_state_dict=model, optim_state_dict=optim)


def _can_save(subject: Subject) -> bool:
    """DCP saves one rank's copy of what no rank shards. FSDP does not keep ignored parameters equal."""
    if subject.api == "fsdp1":
        return _can_reload(subject) and not any(unit._ignored_params for unit in subject.units())
    is_whole = subject.api == "fsdp2" and not all(isinstance(param, DTensor) for param in subject.root.parameters())
    return _can_reload(subject) and not is_whole


@_kind(AROUND_STEP, "dcp.save and dcp.load of what get_state_dict returns restore it", _can_save)
def _dcp(subject: Subject) -> None:
    optimizer: Any = subject.optimizer
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(folder, src=0)
    model, optim = get_state_dict(subject.root, optimizer)
    state = {"model": model, "optim": optim}
    try:
        dcp.save(state, checkpoint_id=folder[0])
        dcp.load(state, checkpoint_id=folder[0])
        set_state_dict(subject.root, optimizer, model_state_dict=model, optim_state_dict=optim)
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(str(folder[0]))


# --- Parameters and gradients -----------------------------------------------------------------------------------------


def _is_sharded(subject: Subject) -> bool:
    return subject.api in ("fsdp1", "fsdp2")


@_kind(EVERYWHERE, "FSDPModule.reshard frees what unshard made; summon_full_params without writeback", _is_sharded)
def unshard(subject: Subject) -> None:
    if subject.api == "fsdp1":
        with FSDP.summon_full_params(subject.root, writeback=False):
            return
    for unit in subject.units():
        unit.unshard()
        unit.reshard()


@_kind(EVERYWHERE, "nn.Module.to converts to a device and dtype, here to their own")
def to(subject: Subject) -> None:
    if not all(group.is_sharded for group in subject.groups()):
        return  # their dtype is that of mixed precision
    params = list(subject.root.parameters())
    if any(param.grad is not None and param.grad.shape != param.shape for param in params):
        return  # FSDP1 has unsharded gradients of microbatches
    tensors = (*params, *(param.grad for param in params if param.grad is not None), *subject.root.buffers())
    places = {(each.device, each.dtype) for each in tensors if each.is_floating_point() or each.is_complex()}
    if len(places) == 1:
        subject.root.to(*places.pop())


def _can_clip(subject: Subject) -> bool:
    """Whether this rank's gradients are finite. Otherwise the norm is not, and clipping changes them. FSDP1 cannot clip
    gradients in float64.
    """
    grads = [param.grad for param in subject.root.parameters() if param.grad is not None]
    if subject.api == "fsdp1" and any(grad.dtype is torch.float64 for grad in grads):
        return False
    return all(bool((grad.to_local() if isinstance(grad, DTensor) else grad).isfinite().all()) for grad in grads)


@_kind(
    frozenset({InsertionPoint.BEFORE_STEP}),
    "clip_grad_norm_ scales only gradients whose norm exceeds the maximum",
    _can_clip,
)
def clip(subject: Subject) -> None:
    root: Any = subject.root
    if subject.api == "fsdp1":
        root.clip_grad_norm_(FAR)
    else:
        torch.nn.utils.clip_grad_norm_(root.parameters(), FAR)
