"""A program as Python over torch alone: the subject executes this code, and a finding's script contains it.

The code uses the names ``rank``, ``device`` and what ``layers.py`` defines. It leaves ``model``, ``optimizer``,
``parameters``, ``output``, ``norm``, ``losses`` and ``saved``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch_fsdp_tests.explore.lifecycle import divided, paths, resolved
from torch_fsdp_tests.explore.program import LAYERS, Program, Step, Unit

LEARNING_RATE = "2**-8"  # parameters stay moderate, so that no difference drowns in rounding
_DSD = "torch.distributed.checkpoint.state_dict"
IMPORTS = {  # what the code may need, and from where
    "copy": "import copy",
    "dataclasses": "import dataclasses",
    "namedtuple": "from collections import namedtuple",
    "OrderedDict": "from collections import OrderedDict",
    "tempfile": "import tempfile",
    "torch": "import torch",
    "dcp": "import torch.distributed.checkpoint as dcp",
    "dist": "import torch.distributed as dist",
    "nn": "from torch import nn",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "replicate": "from torch.distributed._composable.replicate_with_fsdp import replicate",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    **{
        name: f"from torch.distributed.tensor.parallel import {name}"
        for name in ("ColwiseParallel", "RowwiseParallel", "parallelize_module")
    },
    **{name: f"from torch.distributed.tensor import {name}" for name in ("DTensor", "Shard")},
    **{
        name: f"from torch.distributed.fsdp import {name}"
        for name in ("CPUOffloadPolicy", "FSDPModule", "MixedPrecisionPolicy", "fully_shard")
    },
    **{
        name: f"from torch.distributed.fsdp import {name}"
        for name in ("BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy")
    },
    "FSDP": "from torch.distributed.fsdp import FullyShardedDataParallel as FSDP",
    "StateDictOptions": f"from {_DSD} import StateDictOptions",
    **{
        f"{verb}_{what}_state_dict": f"from {_DSD} import {verb}_{what}_state_dict"
        for verb in ("get", "set")
        for what in ("model", "optimizer")
    },
}
SCALER = "torch.amp.GradScaler(device.type, init_scale=4.0, growth_interval=2)"
_OF_STATES = {"model": "model", "optimizer": "model, optimizer"}
PARAMETERS = (  # while all are sharded
    "parameters = {name.replace('_fsdp_wrapped_module.', ''): each for name, each in model.named_parameters()}"
)
_DTYPES = ("param_dtype", "reduce_dtype")
_STYLES = {"up": "ColwiseParallel", "down": "RowwiseParallel"}
_SETTINGS = {  # of state dicts, by their kind
    "full": "full_state_dict=True",
    "broadcast": "full_state_dict=True, cpu_offload=True",
    "flattened": "flatten_optimizer_state_dict=True",
}


def optimizer(program: Program) -> str:
    name, more = {
        "sgd": ("SGD", ""),
        "momentum": ("SGD", "momentum=0.5, "),
        "adam": ("Adam", "eps=1, "),  # with a small eps, the rounding of a gradient becomes a large step
        "adamw": ("AdamW", "eps=1, "),
    }[program.optimizer]
    return f"torch.optim.{name}(model.parameters(), lr={LEARNING_RATE}, {more}foreach={program.foreach})"


def construction(program: Program, chain: str = LAYERS["chain"]) -> Iterator[str]:
    """The lines that make the model, and shard it."""
    yield f"model = fill({program.expression(chain)}, {program.seed}).to(device, torch.{program.dtype})"
    yield from (f"model.{path}.to(torch.{layer.dtype})" for path, layer in paths(program.layers) if layer.dtype)
    yield from (f"model.{new} = model.{old}" for new, old in (*program.ties, *program.shares))
    if program.meta:
        yield "filled, model = model, copy.deepcopy(model).to('meta')"
    yield from (f"model.{name}.requires_grad_(False)" for name in program.frozen)
    shape: tuple[int, ...] = (program.world_size,)
    names: tuple[str, ...] = ("shards",)
    if program.replicas > 1:
        shape, names = (program.replicas, program.world_size // program.replicas), ("replicas", "shards")
    if program.tensor_parallel:
        shape, names = (program.data_ranks, 2), ("shards", "parts")
    yield f"mesh = init_device_mesh(device.type, {shape}, mesh_dim_names={names})"
    if program.tensor_parallel:
        plan = {f"{path}.{part}": style for path in divided(program) for part, style in _STYLES.items()}
        words = ", ".join(f"{name!r}: {style}()" for name, style in plan.items())
        yield f"model = parallelize_module(model, mesh['parts'], {{{words}}})"
        yield "mesh = mesh['shards']"
    for name, parameters in (("columns", program.columns), ("ignored", program.ignored)):
        if parameters:
            yield f"{name} = {{{', '.join(f'model.{parameter}' for parameter in parameters)}}}"
    if program.api == "fsdp1":
        yield from _wrapping(program)
    for unit in program.units if program.api != "fsdp1" else ():
        yield f"{program.api}({_modules(program, unit.modules)}, {', '.join(_arguments(program, unit))})"
    if program.meta:
        yield "model.to_empty(device=device)"
        yield "set_model_state_dict(model, filled.state_dict(), options=StateDictOptions(full_state_dict=True))"
    yield f"optimizer = {optimizer(program)}"
    if program.scaler:
        yield f"scaler = {SCALER}"
    yield PARAMETERS
    yield "inputs, losses, saved = [], [], {}"


def _wrapping(program: Program) -> Iterator[str]:
    """The lines that wrap each unit with FSDP1."""
    settings = [
        f"device_mesh=mesh, device_id=device, sharding_strategy=ShardingStrategy.{program.strategy}",
        f"use_orig_params={program.original_parameters}, limit_all_gathers={program.limit_all_gathers}",
        f"forward_prefetch={program.forward_prefetch}",
        f"backward_prefetch={(program.backward_prefetch and f'BackwardPrefetch.{program.backward_prefetch}') or None}",
    ]
    if dtypes := [f"{name}=torch.{getattr(program, name)}" for name in _DTYPES if getattr(program, name)]:
        settings.append(f"mixed_precision=MixedPrecision({', '.join(dtypes)})")
    if program.offload:
        settings.append("cpu_offload=CPUOffload(True)")
    if program.ignored:
        settings.append("ignored_states=list(ignored)")
    yield f"settings = dict({', '.join(settings)})"
    for unit in program.units:
        name = _module(program, unit.modules[0])
        yield f"{name} = FSDP({name}, **settings)"
        yield from (f"model.{new} = model.{old}" for new, old in program.shares if old == unit.modules[0])


def _module(program: Program, path: str) -> str:
    return f"model.{resolved(program, path)}".rstrip(".")


def _modules(program: Program, paths: Sequence[str]) -> str:
    modules = [_module(program, path) for path in paths]
    return modules[0] if len(modules) == 1 else f"[{', '.join(modules)}]"


def _arguments(program: Program, unit: Unit) -> Iterator[str]:
    yield "mesh=mesh"
    if unit.reshard != "default":
        yield f"reshard_after_forward={ {'yes': True, 'no': False}.get(unit.reshard, unit.reshard) }"
    dtypes = {"param_dtype": program.param_dtype, "reduce_dtype": program.reduce_dtype}
    if unit.modules == ("",):
        dtypes["output_dtype"] = program.output_dtype
    if policy := [f"{name}=torch.{dtype}" for name, dtype in dtypes.items() if dtype]:
        yield f"mp_policy=MixedPrecisionPolicy({', '.join(policy)})"
    if program.offload:
        yield "offload_policy=CPUOffloadPolicy(pin_memory=False)"
    if program.columns:
        yield "shard_placement_fn=lambda parameter: Shard(1) if parameter in columns else None"
    if program.ignored:
        yield "ignored_params=ignored"


def step(program: Program, index: int) -> str:
    """The lines of the step with this index."""
    step = program.steps[index]
    at = _module(program, step.at)
    what = step.kind.partition("_")[2]  # of steps that save or load
    of_rank = "rank // 2" if program.tensor_parallel else "rank"
    numbers = f"batch({step.number:g}, {of_rank}, {program.width}, torch.{program.dtype_at(index)})"
    data = f"x, weights = (each.to(device) for each in {numbers})"
    if step.kind == "forward" and not step.flag:
        data += f"\nif {of_rank} == {program.data_ranks - 1}:\n    weights[:, -1] = torch.inf"
    skip = f", {step.names}" if step.names else ""
    if step.odd:
        skip = f", {step.names} if ({of_rank}) % 2 == 0 else {step.names + step.odd}"
    match step.kind:
        case "forward" if step.at:
            call = f"model(x, {step.names}, {step.at!r})\nexcept Interrupted:\n    pass"
            return f"{data}\ntry:\n    {call}\nelse:\n    raise AssertionError('forward was not interrupted')"
        case "forward":
            kept = "\ninputs.append(x.requires_grad_())" if program.inputs else ""
            loss = "(output * weights).sum()"
            loss = f"scaler.scale({loss})" if program.scaler else loss
            return f"{data}{kept}\noutput = model(x{skip})\nlosses.append({loss})"
        case "evaluate":
            mode = "inference_mode" if step.at == "inference" else "no_grad"
            before, after = ("model.eval()\n", "\nmodel.train()") if step.at == "eval" else ("", "")
            return f"{data}\n{before}with torch.{mode}():\n    output = model(x{skip}){after}"
        case "transform":
            function = f"lambda x: model(x{skip})"
            lines = {
                "vmap": [f"output = torch.vmap({function})(x)"],
                "jvp": [f"output, derivative = torch.func.jvp({function}, (x,), (weights,))"],
                "vjp": [
                    f"output, pullback = torch.func.vjp({function}, x)",
                    "(derivative,) = pullback(weights.to(output.dtype))",
                ],
            }
            return "\n".join((data, *lines[step.at]))
        case "backward" if step.flag:
            return f"losses[{step.number:g}].backward(retain_graph=True)"
        case "backward":
            return f"losses.pop({step.number:g}).backward()"
        case "input_gradient":
            return "(inputs[-1].grad,) = torch.autograd.grad(losses.pop(), inputs[-1])"
        case "step":
            return "scaler.step(optimizer)\nscaler.update()" if program.scaler else "optimizer.step()"
        case "zero":
            return f"optimizer.zero_grad(set_to_none={step.flag})"
        case "clip" if program.api == "fsdp1":
            return f"norm = model.clip_grad_norm_({step.number})"
        case "clip":
            norm = f"norm = nn.utils.clip_grad_norm_(model.parameters(), {step.number})"
            unscaled = "scaler.unscale_(optimizer)\n" if program.scaler else ""
            return f"{unscaled}{norm}\nnorm = norm.full_tensor() if isinstance(norm, DTensor) else norm"
        case "sync" if program.api == "fsdp1":
            enter, leave = (
                "accumulation = model.no_sync()\naccumulation.__enter__()",
                "accumulation.__exit__(None, None, None)",
            )
            return leave if step.flag else enter
        case "sync":
            return f"model.set_requires_gradient_sync({step.flag})"
        case "all_reduce":
            return f"model.set_requires_all_reduce({step.flag})"
        case "unused":
            return f"model.set_reduce_scatter_unused_params({step.flag})"
        case "last":
            return f"model.set_is_last_backward({step.flag})"
        case "keep_after_backward":
            return f"model.set_reshard_after_backward({step.flag})"
        case "reshard_after_forward":
            return f"{at}.set_reshard_after_forward({step.flag}, recurse=False)"
        case "divide":
            return _on_each(f"module.set_gradient_divide_factor({step.number})")
        case "sum":
            return _on_each(f"module.set_force_sum_reduction_for_comms({step.flag})")
        case "own_collectives":
            own = ("all_gather(OwnAllGather())", "reduce_scatter(OwnReduceScatter())")
            return _on_each("\n        ".join(f"module.set_custom_{each}" for each in own))
        case "all_reduce_hook":
            return _on_each(f"module.set_all_reduce_hook(lambda gradient: gradient.mul_({step.number}))")
        case "input_buffers":
            return f"model.set_reduce_scatter_max_input_buffers({step.number:g})"
        case "unshard_in_backward":
            return f"{at}.set_unshard_in_backward({step.flag})"
        case "prefetch_forward" | "prefetch_backward":
            modules = ", ".join(_module(program, name) for name in step.names)
            return f"{at}.set_modules_to_{what}_prefetch([{modules}])"
        case "unshard" if step.at == "*":
            return _on_each("module.unshard()")
        case "unshard" if step.flag:
            return f"handle = {at}.unshard(async_op=True)\nif handle is not None:\n    handle.wait()"
        case "reshard" if step.at == "*":
            return _on_each("module.reshard()")
        case "unshard" | "reshard":
            return f"{at}.{step.kind}()"
        case "broken_backward":
            call = f"(model(x, (), {'-' + step.at!r}) * weights).sum().backward()\nexcept Interrupted:\n    pass"
            call = f"{data}\ntry:\n    {call}\nelse:\n    raise AssertionError('backward was not interrupted')"
            return f"{call}\nmodel.reset_iter_state()\noptimizer.zero_grad()"
        case "reset":
            return "model.reset_iter_state()"
        case "freeze":
            return f"{at}.requires_grad_({step.flag})"
        case "edit":
            whole = "FSDP.summon_full_params(model), " if program.api == "fsdp1" else ""
            return f"with {whole}torch.no_grad():\n    {at}.mul_(0.5)"
        case "save_model" | "save_optimizer":
            if step.at == "plain":
                return f"saved[{what!r}] = copy.deepcopy({what}.state_dict())"
            state = f"get_{what}_state_dict({_OF_STATES[what]}, options={_options(step)})"
            if step.at == "checkpoint":
                return f"saved[{what!r}] = new_folder()\ndcp.save({state}, checkpoint_id=saved[{what!r}][0])"
            return f"saved[{what!r}] = copy.deepcopy({state})"
        case "load_model" | "load_optimizer":
            last = next(each for each in reversed(program.steps[:index]) if each.kind == f"save_{what}")
            state = f"copy.deepcopy(saved[{what!r}])"
            if last.at == "plain":
                return f"{what}.load_state_dict({state})"
            options, before = _options(last), ""
            if last.at == "broadcast":
                options = options.replace("cpu_offload", "broadcast_from_rank0")
            if last.at == "checkpoint":
                before = f"state = get_{what}_state_dict({_OF_STATES[what]}, options={options})\n"
                before += f"dcp.load(state, checkpoint_id=saved[{what!r}][0])\n"
                state = "state"
            return f"{before}set_{what}_state_dict({_OF_STATES[what]}, {state}, options={options})"
        case "assign":
            load = "model.load_state_dict(copy.deepcopy(saved['model']), assign=True)"
            return f"{load}\noptimizer = {optimizer(program)}\n{PARAMETERS}"
        case "cast":
            return f"model.to(torch.{step.at})"
    raise ValueError(f"there is no code for the step {step.kind!r}")


def _on_each(call: str) -> str:
    return f"for module in model.modules():\n    if isinstance(module, FSDPModule):\n        {call}"


def _options(step: Step) -> str:
    return f"StateDictOptions({_SETTINGS.get(step.at, '')})"
