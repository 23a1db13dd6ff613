"""Limits of FSDP, and mistakes with it: what torch says, what it means, and what to do. Does not import torch.

A limit is no defect: torch rejects, or documents, what the program does, or another design would be needed. ``provoke``
does it, so that a self-test sees the message, or the silent effect, in every version.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

from torch_fsdp_tests.defects.tracebacks import ANY_FRAME

ANY = " ... "  # in a message: any text of a line
ONLY_TYPE = re.compile(r"\w+: ")  # a message that says nothing without its traceback


_FRAME = re.compile(r'File "([^"]*)", line \d+, in (\S+)(?:\n(?:\[\w+\]: *)? *(?!File ")(.*))?')


@dataclasses.dataclass(frozen=True)
class Limit:
    """``messages`` are what torch may say; a limit without any is silent. ``raised_in`` is for messages that may come
    from several places: it matches the frames of a traceback, one in a line, as ``FILE FUNCTION CODE``. ``asked`` are
    words with which users search, and that the other texts lack.

    ``provoke`` gets the rank and the device. It raises an exception with one of the messages in one of two ranks. If
    the limit is silent, it returns what torch gives, and what one may expect instead.
    """

    id: str
    messages: tuple[str, ...]
    means: str
    advice: str
    provoke: Callable[[int, Any], tuple[Any, Any] | None]
    raised_in: str = ""
    asked: str = ""
    since: str = "2.9"  # the first version in which one of the messages was seen

    def explains(self, text: str) -> bool:
        """Whether it may be the cause of this traceback, or of a message alone, if that says enough."""
        found = [
            message
            for message in self.messages
            if re.search(".*".join(map(re.escape, message.split(ANY))), f"{text.rstrip()}\n")
        ]
        if ANY_FRAME.search(text):
            return bool(found) and re.search(self.raised_in, _frames(text)) is not None
        return any(not ONLY_TYPE.fullmatch(message) for message in found)


def _frames(text: str) -> str:
    """The frames of a traceback, one in a line, with paths of torch from its folder on."""
    frames = _FRAME.findall(text)
    return "".join(f"{re.sub('.*/(?=torch/)', '', path)} {function} {code}\n" for path, function, code in frames)


LIMITS: dict[str, Limit] = {}
_Provoke = Callable[[int, Any], "tuple[Any, Any] | None"]


def _limit(
    *messages: str, means: str, advice: str, raised_in: str = "", asked: str = "", since: str = "2.9"
) -> Callable[[_Provoke], _Provoke]:
    """Declare the limit that a function provokes. More specific messages come first in this file."""

    def declare(provoke: _Provoke) -> _Provoke:
        id = provoke.__name__.strip("_")
        LIMITS[id] = Limit(id, messages, means, advice, provoke, raised_in, asked, since)
        return provoke

    return declare


def explaining(traceback: str) -> list[Limit]:
    """The limits that a traceback may come from, the most specific first."""
    return [limit for limit in LIMITS.values() if limit.explains(traceback)]


def _layers(device: Any) -> Any:
    """Two layers."""
    from torch import nn

    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)


def _tokens(device: Any) -> Any:
    import torch

    return torch.zeros(2, dtype=torch.long, device=device)


def _ones(device: Any) -> Any:
    import torch

    return torch.ones(2, 4, device=device)


def _fsdp1(model: Any, device: Any, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    return FullyShardedDataParallel(model, device_id=device, **options)


def _fsdp2(*modules: Any, **options: Any) -> Any:
    """Shard these modules in this order, and return the last one."""
    from torch.distributed.fsdp import fully_shard

    for module in modules:
        fully_shard(module, **options)
    return modules[-1]


# --- sharded parameters ----------------------------------------------------------------------------------------------


@_limit(
    "While copying the parameter named ... got mixed torch.Tensor and DTensor",
    "'Parameter' object has no attribute '_local_tensor'",
    means="A state dict with whole tensors is loaded into an FSDP2 model, whose parameters are shards, or the shards "
    "that one rank has saved are loaded into a plain model.",
    advice="Save what get_model_state_dict returns on all ranks with StateDictOptions(full_state_dict=True); load it "
    "with set_model_state_dict and the same option, or before fully_shard.",
)
def whole_state_dict(rank: int, device: Any) -> None:
    state = _layers(device).state_dict()
    _fsdp2(_layers(device)).load_state_dict(state)


@_limit(
    "object has no attribute 'local_shards'",
    means="A sharded state dict of FSDP1 is loaded outside of the context in which it was made.",
    advice="Call load_state_dict inside FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT).",
)
def sharded_state_dict(rank: int, device: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = _fsdp1(_layers(device), device)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = model.state_dict()
    model.load_state_dict(state)


@_limit(
    "got mixed torch.Tensor and DTensor",
    means="An operator gets a sharded parameter of FSDP2 (a DTensor) and a plain tensor. A module's parameters are "
    "whole only while its own unit runs: something called a submodule, generate(), or a function on a parameter, "
    "without the forward of the unit. With torch.nn.MultiheadAttention, out_proj is such a submodule. In an "
    "optimizer or in clip_grad_norm_, one list has parameters of FSDP2 and others, or states were loaded as whole "
    "tensors.",
    advice="Call the sharded module itself; name other methods with register_fsdp_forward_method; "
    "do not shard a module that its parent uses without calling it; give plain parameters groups of their own, or "
    "foreach=False; load states with set_optimizer_state_dict; copy averages from the sharded model.",
    asked="model.generate() generation fails expert meshes",
)
def mixed_tensors(rank: int, device: Any) -> None:
    _fsdp2(_layers(device))[0](_ones(device))


@_limit(
    "'weight' must be 2-D",
    "mat2 must be a matrix, got 1-D tensor",
    "size mismatch, got input ... , vec (",
    "Output 0 of View is a view and its base or another view of its base has been modified inplace",
    means="A parameter of FSDP1 is used outside of the forward of its instance, where it is empty or flat: a submodule "
    "is called by itself, as generate() does, or a weight is tied across two instances.",
    advice="Call the FSDP instance itself, use summon_full_params around what reads parameters, keep tied weights in "
    "one instance.",
    raised_in=r"torch/nn/modules/(?!module\.)\w+\.py forward .*\n(torch/nn/functional\.py .*\n)?\Z",
    asked="generate generation lm_head tied FSDP1 fails",
)
def flat_parameter_outside_of_forward(rank: int, device: Any) -> None:
    from torch import nn

    model = _fsdp1(nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)).to(device), device, use_orig_params=True)
    model.module[0](_tokens(device))


@_limit(
    "is shared with a parameter already managed by another FSDP group",
    "Parameter ... is already sharded by FSDP",
    means="A weight is tied across two modules that fully_shard shards separately.",
    advice="Shard these modules as one group, fully_shard([embedding, head]), or leave both to their parent.",
    since="2.13",  # 2.9 says nothing; the versions between were not tried
)
def tied_parameters(rank: int, device: Any) -> None:
    model = _layers(device)
    model[1].weight = model[0].weight
    _fsdp2(*model, model)
    model(_ones(device))


@_limit(
    "Invariant encountered: value was None when it should not be",
    "FSDP requires named DeviceMesh dims for ND parallelism",
    means="Parameters that fully_shard should shard are DTensors already, over a mesh whose dimensions have no names: "
    "a module was sharded before its submodule, or TP took a mesh of its own.",
    advice="Apply fully_shard from the inside outwards: the submodules first, then the root. For TP, take both meshes "
    'from one: init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp")).',
    raised_in="_init_sharding_spec|_fsdp_param.py ",
    asked="order parent child nested wrapped tensor parallel unnamed",
)
def dtensors_over_unnamed_meshes(rank: int, device: Any) -> None:
    model = _layers(device)
    _fsdp2(model, model[0])
    model(_ones(device)).sum().backward()


@_limit(
    "doesn't support scalar parameters",
    means="FSDP shards the first dimension of a parameter, and a parameter without dimensions has none.",
    advice="Give it one dimension with one element: nn.Parameter(torch.ones(1)); or leave it out with ignored_params.",
)
def scalar_parameter(rank: int, device: Any) -> None:
    import torch
    from torch import nn

    model = _layers(device)
    model.scale = nn.Parameter(torch.tensor(1.0, device=device))
    _fsdp2(model)


@_limit(
    "Must flatten tensors with uniform",
    "has both parameters with requires_grad=True and False",
    means="FSDP1 puts the parameters of an instance into one flat tensor: they need one dtype, and without "
    "use_orig_params=True also one requires_grad.",
    advice="Wrap the parts with another dtype or with frozen parameters separately, or pass use_orig_params if only "
    "requires_grad differs.",
)
def flat_parameter_is_not_uniform(rank: int, device: Any) -> None:
    model = _layers(device)
    model[0].requires_grad_(False)
    _fsdp1(model, device)


@_limit(
    "FSDP expects uniform original parameter dtype",
    means="FSDP2 gathers the parameters of a unit together, so those that are trained need one dtype.",
    advice="Shard the modules with another dtype separately, or convert them.",
)
def unit_of_two_dtypes(rank: int, device: Any) -> None:
    import torch

    model = _layers(device)
    model[0].to(torch.bfloat16)
    _fsdp2(model)
    model(_ones(device))


@_limit(
    "Expected out tensor to have dtype",
    means="The model was converted after a forward, with model.to(dtype) or half(). FSDP2 gathers in the first dtype.",
    advice="Convert the model before fully_shard, or compute in another dtype with MixedPrecisionPolicy.",
    raised_in="split_with_sizes_copy",
)
def converted_after_forward(rank: int, device: Any) -> None:
    import torch

    model = _fsdp2(_layers(device))
    model(_ones(device))
    model.to(torch.bfloat16)(_ones(device).bfloat16())


@_limit(
    "you can only change requires_grad flags of leaf variables",
    means="Under FSDP1 with use_orig_params=False, parameters are views of a flat parameter, which is frozen as a "
    "whole.",
    advice="Freeze before wrapping, and wrap frozen modules separately; or pass use_orig_params=True.",
    raised_in=r"\b(p|\w*(param|weight|bias)\w*)\.requires_grad\w*\W.*\n\Z",
    asked="unfreeze requires_grad_ False FSDP",
)
def frozen_after_wrapping(rank: int, device: Any) -> None:
    _fsdp1(_layers(device), device).module[0].weight.requires_grad_(False)


@_limit(
    "Cannot distribute a DTensor with placements",
    means="TP cannot shard these parameters, because fully_shard did so before parallelize_module.",
    advice="Apply parallelize_module first, and then fully_shard with the mesh of the data dimension.",
)
def tensor_parallel_after_sharding(rank: int, device: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    parallelize_module(_fsdp2(_layers(device)), mesh, {"0": RowwiseParallel()})


@_limit(
    ".numpy() is not supported for tensor subclasses",
    means="Parameters and gradients of FSDP2 are DTensors. A program that logs them needs whole tensors.",
    advice="Call full_tensor() before numpy(), on all ranks.",
)
def array_of_a_shard(rank: int, device: Any) -> None:
    _fsdp2(_layers(device))[0].weight.detach().cpu().numpy()


@_limit(
    "'FSDP ... ' object has no attribute 'no_sync'",
    "'FSDP ... ' object has no attribute 'clip_grad_norm_'",
    means="fully_shard leaves the model's class as it is, without the methods of FullyShardedDataParallel.",
    advice="For no_sync() use set_requires_gradient_sync(False), for model.clip_grad_norm_() the function of "
    "torch.nn.utils, and for state_dict_type() get_model_state_dict.",
)
def method_of_fsdp1(rank: int, device: Any) -> None:
    _fsdp2(_layers(device)).no_sync()


@_limit(
    "Attempted to call function marked as skipped",
    "Call to `torch._dynamo.disable()`",
    means="torch.compile(fullgraph=True) was given a sharded module, whose hooks are not compiled.",
    advice="Compile the modules inside instead, for example with block.compile(fullgraph=True) before fully_shard.",
    raised_in="torch/distributed/fsdp/",
)
def whole_graph(rank: int, device: Any) -> None:
    import torch

    torch.compile(_fsdp2(_layers(device)), backend="eager", fullgraph=True)(_ones(device))


@_limit(
    "FSDP parameters should be materialized from meta device before training",
    means="The model was made on the meta device, and its parameters have no storage.",
    advice="After fully_shard, call model.to_empty(device=...) and initialize all parameters and buffers, or load a "
    "state.",
)
def parameters_on_meta(rank: int, device: Any) -> None:
    _fsdp2(_layers("meta"))(_ones(device))


@_limit(
    "fully_shard does not support containers that do not implement forward",
    means="A ModuleList or a ModuleDict has no forward at which its parameters could be gathered.",
    advice="Apply fully_shard to each of its modules, and to the module that calls them.",
)
def container(rank: int, device: Any) -> None:
    from torch import nn

    _fsdp2(nn.ModuleList(_layers(device)))


@_limit(
    "FSDP does not support deepcopy",
    means="Copies of sharded modules would share their groups and hooks.",
    advice="Copy the module before fully_shard, or make a second one, shard it in the same way, and load the state "
    "dict of the first. For averages of weights, update the second one from parameters() of the first, shard by shard.",
    asked="deepcopy exponential moving average EMA AveragedModel swa_utils FSDP2",
)
def deep_copy(rank: int, device: Any) -> None:
    import copy

    copy.deepcopy(_fsdp2(_layers(device)))


@_limit(
    "Can't pickle <class 'torch.distributed.fsdp. ... FSDP",
    means="fully_shard changes the class of a module, and this class has no name by which it could be imported. A "
    "pickle would also hold shards of one rank.",
    advice="Save get_model_state_dict(model) with torch.distributed.checkpoint instead of the module.",
    asked="torch.save pickle pickling the whole model object",
)
def pickled_module(rank: int, device: Any) -> None:
    import io

    import torch

    torch.save(_fsdp2(_layers(device)), io.BytesIO())


@_limit(
    "Fan in and fan out can not be computed for tensor with fewer than 2 dimensions",
    means="A weight of FSDP1 is initialized after wrapping, when it is flat or empty. Initializations that take no "
    "dimensions raise nothing, and see this rank's elements only.",
    advice="Initialize before wrapping, with param_init_fn, or inside summon_full_params. With FSDP2, initialize after "
    "to_empty: its parameters are DTensors, which know the whole shape.",
    raised_in=r"weight.*\n(torch/nn/init\.py .*\n)+\Z",
    asked="initialize initialization reset_parameters weights after wrapping sharding fully_shard",
)
def initialized_after_wrapping(rank: int, device: Any) -> None:
    from torch import nn

    model = _fsdp1(_layers(device), device, use_orig_params=True)
    nn.init.xavier_uniform_(model.module[0].weight)


@_limit(
    "Cannot writeback when the parameter shape changes",
    means="Outside of forward and backward, a parameter of FSDP1 and its data are this rank's elements in one "
    "dimension, or empty. A tensor of the whole shape was assigned.",
    advice="Read and write whole parameters inside summon_full_params.",
    asked="param.data p.data empty size zero FSDP1 use_orig_params shape local flat",
)
def data_of_flat_parameter(rank: int, device: Any) -> None:
    import torch

    model = _fsdp1(_layers(device), device, use_orig_params=True)
    for layer in model.module:
        layer.weight.data = torch.ones(4, 4, device=device)
    model(_ones(device))


@_limit(
    "does not have a sharding strategy registered",
    means="DTensor does not know how to compute this operator on shards of parameters, as with cdist.",
    advice="Call full_tensor() on the parameters first, or use the operator inside the forward of the unit, where "
    "parameters are plain tensors.",
)
def operator_without_strategy(rank: int, device: Any) -> None:
    import torch

    model = _fsdp2(_layers(device))
    torch.cdist(model[0].weight, model[1].weight)


@_limit(
    means="fully_shard makes new parameters, without the attributes that a program has set on the old ones, such as "
    "marks for weight decay.",
    advice="Set attributes after fully_shard, or choose groups of the optimizer by names of named_parameters().",
    asked="custom attribute flag no_decay lost missing on param",
)
def attributes_of_parameters(rank: int, device: Any) -> tuple[Any, Any]:
    model = _layers(device)
    model[0].weight.is_decayed = True
    return hasattr(_fsdp2(model)[0].weight, "is_decayed"), True


@_limit(
    means="FSDP1 gives zeros instead of None to a parameter that a step does not use, if its instance is used. So "
    "weight decay and momentum change it.",
    advice="Wrap what may be unused separately, freeze it, or use FSDP2, which leaves None.",
    asked="unused parameter zero gradient AdamW decays weights moved FSDP1",
)
def unused_parameter_of_used_instance(rank: int, device: Any) -> tuple[Any, Any]:
    from torch.distributed.fsdp import ShardingStrategy

    model = _fsdp1(_layers(device), device, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD)
    model.module.forward = model.module[0].forward
    model(_ones(device)).sum().backward()
    return model.module[1].bias.grad is None, True


@_limit(
    means="Gradients of ignored parameters and modules are not reduced: each rank keeps those of its own batch.",
    advice="All-reduce them after backward, or freeze these parameters.",
    asked="ignored_params ignored_modules ignored_states gradients not averaged synchronized differ between ranks",
)
def gradients_of_ignored_parameters(rank: int, device: Any) -> tuple[Any, Any]:
    model = _layers(device)
    _fsdp2(model, ignored_params={model[1].bias, model[1].weight})
    ((rank + 1) * model(_ones(device))).sum().backward()
    return model[1].bias.grad.tolist(), [3.0] * 4


@_limit(
    means="to_empty gives buffers uninitialized memory, and buffers with persistent=False are in no state dict. So a "
    "strict load succeeds and leaves noise or NaN in them, as in tables of rotary embeddings.",
    advice="After to_empty, compute such buffers again, and initialize or load all others.",
    asked="NaN loss garbage meta device to_empty set_model_state_dict rotary inv_freq register_buffer",
)
def buffers_after_to_empty(rank: int, device: Any) -> tuple[Any, Any]:
    import torch
    from torch.distributed.checkpoint.state_dict import set_model_state_dict

    model = _layers("meta")
    model.register_buffer("table", torch.ones(2, device="meta"), persistent=False)
    _fsdp2(model).to_empty(device=device)
    return set_model_state_dict(model, _fsdp2(_layers(device)).state_dict()).missing_keys, ["table"]


# --- optimizers and checkpoints --------------------------------------------------------------------------------------


@_limit(
    "KeyError: ",
    means="The optimizer was made before fully_shard, or for a copy. It holds parameters that the model does not have, "
    "so its step changes nothing: the loss does not fall, and until the optimizer is saved, nothing is raised. The "
    "same happens with FSDP1 and use_orig_params=False.",
    advice="Make the optimizer, and its groups of parameters, after the model is sharded.",
    raised_in=r"checkpoint/state_dict\.py (_get_optim_state_dict|<\w+>) .*pid_mapping\[.*\n\Z",
    asked="weights never change loss does not decrease constant optimizer created constructed before wrapping sharding",
)
def optimizer_made_before_sharding(rank: int, device: Any) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = _layers(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _fsdp2(model)
    before = model[0].weight.full_tensor().clone()
    model(_ones(device)).sum().backward()
    optimizer.step()
    assert torch.equal(model[0].weight.full_tensor(), before)
    get_optimizer_state_dict(model, optimizer)


@_limit(
    "Missing key in checkpoint state_dict: ... .step.\n",
    means="The checkpoint has no optimizer state of a parameter that has one now: it was unused or frozen when the "
    "checkpoint was saved, or the checkpoint was saved before the first step.",
    advice="Load with DefaultLoadPlanner(allow_partial_load=True), or save after a step in which all parameters had "
    "gradients.",
)
def optimizer_state_is_missing(rank: int, device: Any) -> None:
    import torch
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = _fsdp2(_layers(device))
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters()))
    _load_other({"optim": {"state": {}}}, {"optim": state})


@_limit(
    "Missing key in checkpoint state_dict: ",
    means="The state dict to fill has a key that the checkpoint lacks: it is nested in another way, has the prefix of "
    "a wrapper such as module. or _orig_mod., or belongs to a new parameter.",
    advice="Make both with get_model_state_dict, and compare with FileSystemReader(path).read_metadata(); "
    "DefaultLoadPlanner(allow_partial_load=True) skips such a key.",
    asked="DCP load bigger model new layer",
)
def key_is_missing(rank: int, device: Any) -> None:
    state = _layers(device).state_dict()
    _load_other({"model": state}, state)


def _load_other(saved: dict[str, Any], loaded: dict[str, Any]) -> None:
    """Save a state dict by DCP, and load another one."""
    import tempfile

    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        dist.broadcast_object_list(folder)
        dcp.save(saved, checkpoint_id=folder[0])
        dcp.load(loaded, checkpoint_id=folder[0])


@_limit(
    means="dcp.load fills the values that the given state dict has. An empty dict stays empty, and a shorter list gets "
    "the first elements only.",
    advice="Give it the structure of what was saved, or put such values into an object with state_dict() and "
    "load_state_dict(), or into one value that is no container, such as a string of JSON.",
    asked="nested dict list history metrics not restored empty after resume checkpoint",
)
def containers_are_not_extended(rank: int, device: Any) -> tuple[Any, Any]:
    loaded: dict[str, Any] = {"losses": [0.0], "best": {}, "epoch": 0}
    saved = {"losses": [0.5, 0.25], "best": {"loss": 0.25}, "epoch": 2}
    _load_other(saved, loaded)
    assert loaded["epoch"] == 2
    return loaded, saved


@_limit(
    means="State dicts of torch.distributed.checkpoint.state_dict keep _orig_mod in the names of a module that was "
    "compiled first and wrapped by checkpoint_wrapper or FSDP1 afterwards, so a model without compilation does not "
    "load them.",
    advice="Compile by module.compile(), which adds no name, or compile the wrapper, as in "
    "torch.compile(checkpoint_wrapper(module)).",
    asked="_orig_mod keys torch.compile inside checkpoint_wrapper activation checkpointing torchtitan 2622",
)
def compiled_inside_of_a_wrapper(rank: int, device: Any) -> tuple[Any, Any]:
    import torch
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    model = _layers(device)
    names = list(model.state_dict())
    model[0] = checkpoint_wrapper(torch.compile(model[0], backend="eager"))
    return list(get_model_state_dict(_fsdp2(model))), names


@_limit(
    means="With enable_plan_caching, planners of one class share their plans in a process: a second storage writer "
    "gets the plan that the first one has prepared, without what its own prepare_global_plan returns.",
    advice="Give one of them a planner of a class of its own, or no caching.",
    asked="plan cache enable_plan_caching second storage writer HuggingFaceStorageWriter after FileSystemWriter",
)
def cached_plan_of_another_writer(rank: int, device: Any) -> tuple[Any, Any]:
    import os
    import tempfile

    import torch.distributed.checkpoint as dcp

    class Named(dcp.FileSystemWriter):
        def prepare_global_plan(self, plans: Any) -> Any:
            from torch.distributed.checkpoint.filesystem import _StoragePrefix

            return [dataclasses.replace(plan, storage_data=_StoragePrefix("named_")) for plan in plans]

    state = _layers(device).state_dict()
    for writer in (dcp.FileSystemWriter, Named):
        with tempfile.TemporaryDirectory() as folder:
            planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
            dcp.save(state, storage_writer=writer(folder), planner=planner, no_dist=True)
            names = os.listdir(folder)
    return any(name.startswith("named_") for name in names), True


@_limit(
    'Unexpected key(s) in state_dict: ... _flat_param"',
    means="LOCAL_STATE_DICT of FSDP1 with use_orig_params=True has the flat parameter beside the original ones, and is "
    "not loaded again.",
    advice="Use SHARDED_STATE_DICT, or use_orig_params=False.",
)
def local_state_dict(rank: int, device: Any) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    model = _fsdp1(_layers(device), device, use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.LOCAL_STATE_DICT):
        model.load_state_dict(model.state_dict())


@_limit(
    "linalg.vector_norm: the dtype of the input (Double) should be convertible without narrowing",
    means="clip_grad_norm_ of FSDP1 computes the norm in float32, and gradients in float64 are not converted to it.",
    advice="Train the model in float32, or use FSDP2 with torch.nn.utils.clip_grad_norm_.",
    raised_in="torch/distributed/fsdp/fully_sharded_data_parallel.py _get_grad_norm",
)
def norm_of_float64(rank: int, device: Any) -> None:
    model = _fsdp1(_layers(device).double(), device)
    model(_ones(device).double()).sum().backward()
    model.clip_grad_norm_(1.0)


@_limit(
    "FullyShardedDataParallel.clip_grad_norm_() got an unexpected keyword argument",
    means="clip_grad_norm_ of FSDP1 has only max_norm and norm_type.",
    advice="Check the norm that it returns: torch.isfinite(model.clip_grad_norm_(1.0)).",
    asked="error_if_nonfinite foreach",
)
def options_of_clip_grad_norm(rank: int, device: Any) -> None:
    _fsdp1(_layers(device), device).clip_grad_norm_(1.0, error_if_nonfinite=True)


@_limit(
    means="torch.nn.utils.clip_grad_norm_ takes the norm of what this rank has of the gradients of FSDP1, so ranks "
    "clip by different factors.",
    advice="Call model.clip_grad_norm_(max_norm) of the root instance. With FSDP2 the function is right.",
    asked="torch.nn.utils.clip_grad_norm_ on FSDP1 FullyShardedDataParallel different wrong norm on each rank",
)
def norm_of_own_shards(rank: int, device: Any) -> tuple[Any, Any]:
    from torch.nn.utils import clip_grad_norm_

    model = _fsdp1(_layers(device), device)
    (100 * model(_ones(device))).sum().backward()
    own = clip_grad_norm_(model.parameters(), 1e9)
    return own.item(), model.clip_grad_norm_(1e9).item()


@_limit(
    "state_dict is required to save or load, but ... is empty",
    means="This rank gives no state dict to a function that needs one on each rank.",
    advice="Load the file on all ranks, or pass StateDictOptions(full_state_dict=True, broadcast_from_rank0=True).",
)
def state_dict_of_one_rank(rank: int, device: Any) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

    set_model_state_dict(_fsdp2(_layers(device)), {}, options=StateDictOptions(full_state_dict=True))


# --- ranks and backends ----------------------------------------------------------------------------------------------


@_limit(
    "Cannot use ReduceOp.PREMUL_SUM with Gloo",
    means="set_gradient_divide_factor reduces with a factor in the reduction itself, which gloo cannot do.",
    advice="Call set_force_sum_reduction_for_comms(True) on the root and its units.",
)
def premultiplied_sum(rank: int, device: Any) -> None:
    model = _fsdp2(_layers(device))
    model.set_gradient_divide_factor(3.0)
    model(_ones(device)).sum().backward()


@_limit(
    "No backend type associated with device type cpu",
    means="A collective gets tensors in host memory, as with CPU offloading, and the process group has only the "
    "device's backend.",
    advice='Initialize the process group for both, for example init_process_group("cpu:gloo,cuda:nccl").',
)
def offloading_without_backend(rank: int, device: Any) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    of_another_device = dist.new_group(backend="meta:gloo")
    _fsdp2(_layers("cpu"), mesh=DeviceMesh.from_group(of_another_device, "cpu"))(_ones("cpu"))


@_limit(
    "Connection closed by peer",
    "Connection reset by peer",
    "Timed out waiting ... for recv operation",
    "Timed out waiting ... for send operation",
    "Watchdog caught collective operation timeout",
    "op.preamble.length <= op.nbytes",
    means="The ranks do not run the same collectives. One of them has ended or failed (look at its error first), has "
    "one batch less, skips a unit or takes another branch, or calls state_dict() of FSDP1, clip_grad_norm_ or a "
    "checkpoint alone.",
    advice="Let all ranks run the same units in the same order in each step, drop the last incomplete batch on all "
    "ranks, and call state_dict() on all ranks, also with rank0_only=True.",
    raised_in="torch/distributed/(fsdp|checkpoint)/",
)
def ranks_differ(rank: int, device: Any) -> None:
    from datetime import timedelta

    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    group = dist.new_group(timeout=timedelta(seconds=1))
    model = _fsdp2(_layers(device), mesh=DeviceMesh.from_group(group, device.type))
    if rank:
        model(_ones(device))  # the other rank has no further batch
