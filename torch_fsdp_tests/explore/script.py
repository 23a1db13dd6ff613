"""The texts about a finding: a script in plain torch, and a text for torch's issue tracker."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch_fsdp_tests.defects import texts
from torch_fsdp_tests.defects.registry import Answer, Consequence, Defect, Entry
from torch_fsdp_tests.defects.trial import Finding
from torch_fsdp_tests.explore import layers
from torch_fsdp_tests.explore.lifecycle import resolved
from torch_fsdp_tests.explore.program import LAYERS, Program, Step
from torch_fsdp_tests.explore.ranks import Result

_DSD = "torch.distributed.checkpoint.state_dict"
_IMPORTS = {  # what a script may need; it has one line for each that it uses
    "copy": "import copy",
    "dataclasses": "import dataclasses",
    "namedtuple": "from collections import namedtuple",
    "OrderedDict": "from collections import OrderedDict",
    "torch": "import torch",
    "nn": "from torch import nn",
    "init_device_mesh": "from torch.distributed.device_mesh import init_device_mesh",
    "checkpoint": "from torch.utils.checkpoint import checkpoint",
    "Shard": "from torch.distributed.tensor import Shard",
    **{name: f"from torch.distributed.fsdp import {name}" for name in ("CPUOffloadPolicy", "MixedPrecisionPolicy")},
    "fully_shard": "from torch.distributed.fsdp import fully_shard",
    "StateDictOptions": f"from {_DSD} import StateDictOptions",
    **{
        f"{verb}_{what}_state_dict": f"from {_DSD} import {verb}_{what}_state_dict"
        for verb in ("get", "set")
        for what in ("model", "optimizer")
    },
}
_SEQUENTIAL = "nn.Sequential(OrderedDict({parts}))"
_OPTIMIZERS = {
    "sgd": "torch.optim.SGD(model.parameters(), lr=2**-8, foreach={foreach})",
    "momentum": "torch.optim.SGD(model.parameters(), lr=2**-8, momentum=0.5, foreach={foreach})",
    "adam": "torch.optim.Adam(model.parameters(), lr=2**-8, foreach={foreach})",
    "adamw": "torch.optim.AdamW(model.parameters(), lr=2**-8, foreach={foreach})",
}
_EVERY = "for module in model.modules():\n    if hasattr(module, {name!r}):\n        module.{call}"
_STATES = {"model": "model", "optimizer": "model, optimizer"}


def script(program: Program, result: Result) -> str:
    """A script that needs only torch, and says what it finds and what is right."""
    return texts.script(entry(program, result))


def issue(program: Program, result: Result) -> str:
    """A text for torch's issue tracker, in Markdown, like that of a defect of the registry."""
    finding = Finding(
        entry(program, result).defect,
        Answer.PRESENT,
        Answer.PRESENT,
        rank=result.rank,
        found=found(result),
        right=right(result),
    )
    return texts.issue(entry(program, result), finding)


def entry(program: Program, result: Result) -> Entry:
    """The finding in the form of a defect of the registry."""
    family = "FSDP1" if program.api == "fsdp1" else "FSDP2"
    title = f"{family}: {found(result)}"
    explanation = f"{program.listing()}\n\n{result.detail}"
    body = f"{_definitions(program)}\n\n\n{_reproduction(program, result)}\n"
    used = _names(ast.parse(body))
    imports = "\n".join(line for name, line in _IMPORTS.items() if name in used)
    source = f'"""{title}"""\n\n{imports}\n\n\n{body}'
    defect = Defect(family, Consequence.ERROR, result.place or "unknown", program.world_size, title=title)
    return Entry(defect, explanation, source, lambda *_: (None, None))


def found(result: Result) -> str:
    where = f"in step {result.step}" if result.step >= 0 else "before the first step"
    first = result.detail.partition("\n")[0]
    return f"{where}, {first if result.what.startswith('raised') else f'{result.what}: {first}'}"


def right(result: Result) -> str:
    return "no exception" if result.what.startswith("raised") else "what a plain model shows"


def _is_plain(program: Program) -> bool:
    """Whether ``nn.Sequential`` can run the model."""
    special = any(layer.box or layer.recompute for layer in program.all_layers())
    return not special and not any(step.names or (step.kind == "forward" and step.at) for step in program.steps)


def _definitions(program: Program) -> str:
    """The source of what the model is made of."""
    tree = ast.parse(inspect.getsource(layers))
    source = inspect.getsource(layers).splitlines()
    nodes = {node.name: node for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    chain = _SEQUENTIAL if _is_plain(program) else LAYERS["chain"]
    wanted = {"fill", "batch", *_names(ast.parse(program.expression(chain)))}
    while more := {name for each in wanted & nodes.keys() for name in _names(nodes[each])} - wanted:
        wanted |= more
    parts = []
    for name, node in nodes.items():
        if name in wanted:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            parts.append("\n".join(source[first - 1 : node.end_lineno]))
    if "Named" in wanted:
        parts.insert(0, 'Named = namedtuple("Named", "x nothing")')
    return "\n\n\n".join(parts)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _reproduction(program: Program, result: Result) -> str:
    lines = [*_construction(program), "losses, saved = [], {}"]
    lines += [line for step in program.steps for line in _code(program, step).splitlines()]
    if not result.what.startswith("raised"):
        body = "\n".join((*lines, *_comparison(program, result)))
        return f"def reproduce(rank, world_size, device):\n{textwrap.indent(body, '    ')}"
    body = textwrap.indent("\n".join(lines), "        ")
    return (
        f"def reproduce(rank, world_size, device):\n    try:\n{body}\n    except Exception as error:\n"
        '        return f"{type(error).__name__}: {error}"[:200], "no exception"\n'
        '    return "no exception", "no exception"'
    )


def _construction(program: Program) -> Iterator[str]:
    yield f"model = fill({program.expression(_SEQUENTIAL if _is_plain(program) else LAYERS['chain'])}, {program.seed})"
    yield f"model = model.to(device, torch.{program.dtype})"
    for new, old in (*program.ties, *program.shares):
        yield f"model.{new} = model.{old}"
    for name in program.frozen:
        yield f"model.{name}.requires_grad_(False)"
    shards = program.world_size // program.replicas
    shape = f"({program.replicas}, {shards})" if program.replicas > 1 else f"({shards},)"
    names = ("replicas", "shards") if program.replicas > 1 else ("shards",)
    yield f"mesh = init_device_mesh(device.type, {shape}, mesh_dim_names={names})"
    if program.columns:
        yield f"columns = {{{', '.join(f'model.{name}' for name in program.columns)}}}"
    if program.ignored:
        yield f"ignored = {{{', '.join(f'model.{name}' for name in program.ignored)}}}"
    for unit in program.units:
        modules = [f"model.{path}".rstrip(".") for path in (resolved(program, each) for each in unit.modules)]
        yield f"fully_shard({_one_or_list(modules)}, {', '.join(_arguments(program, unit.modules, unit.reshard))})"
    yield "optimizer = " + _OPTIMIZERS[program.optimizer].format(foreach=program.foreach)
    yield "parameters = dict(model.named_parameters())"


def _one_or_list(texts_: list[str]) -> str:
    return texts_[0] if len(texts_) == 1 else f"[{', '.join(texts_)}]"


def _arguments(program: Program, modules: tuple[str, ...], reshard: str) -> Iterator[str]:
    yield "mesh=mesh"
    if reshard != "default":
        yield f"reshard_after_forward={ {'yes': True, 'no': False}.get(reshard, reshard) }"
    dtypes = {"param_dtype": program.param_dtype, "reduce_dtype": program.reduce_dtype}
    if modules == ("",):
        dtypes["output_dtype"] = program.output_dtype
    policy = [f"{name}=torch.{dtype}" for name, dtype in dtypes.items() if dtype]
    policy += [] if program.cast_inputs else ["cast_forward_inputs=False"]
    if policy:
        yield f"mp_policy=MixedPrecisionPolicy({', '.join(policy)})"
    if program.offload:
        yield "offload_policy=CPUOffloadPolicy(pin_memory=False)"
    if program.columns:
        yield "shard_placement_fn=lambda each: Shard(1) if each in columns else None"
    if program.ignored:
        yield "ignored_params=ignored"


def _code(program: Program, step: Step) -> str:
    """A step as Python."""
    at = f"model.{resolved(program, step.at)}".rstrip(".")
    number = int(step.number)
    names = f", {step.names}" if step.names else ""
    data = f"x, weights = batch({number}, rank, {program.width}, torch.{program.dtype})\n"
    others = ", ".join(f"model.{resolved(program, name)}".rstrip(".") for name in step.names)
    kind = step.kind.removeprefix("save_").removeprefix("load_")
    options = (
        f"StateDictOptions(full_state_dict={step.at == 'full'}, flatten_optimizer_state_dict={step.at == 'flattened'})"
    )
    match step.kind:
        case "forward" if step.at:
            call = f"try:\n    model(x, {step.names}, {step.at!r})\nexcept Interrupted:\n    pass"
            return data + call
        case "forward":
            return f"{data}output = model(x{names})\nlosses.append((output * weights).sum())"
        case "evaluate":
            mode = "inference_mode" if step.at == "inference" else "no_grad"
            start, end = ("model.eval()\n", "\nmodel.train()") if step.at == "eval" else ("", "")
            return f"{data}{start}with torch.{mode}():\n    output = model(x{names}){end}"
        case "backward" if step.flag:
            return f"losses[{number}].backward(retain_graph=True)"
        case "backward":
            return f"losses.pop({number}).backward()"
        case "step":
            return "optimizer.step()"
        case "zero":
            return f"optimizer.zero_grad(set_to_none={step.flag})"
        case "clip":
            return f"norm = nn.utils.clip_grad_norm_(model.parameters(), {step.number})"
        case "sync":
            return f"model.set_requires_gradient_sync({step.flag})"
        case "last":
            return f"model.set_is_last_backward({step.flag})"
        case "all_reduce":
            return f"model.set_requires_all_reduce({step.flag})"
        case "keep_after_backward":
            return f"model.set_reshard_after_backward({step.flag})"
        case "reshard_after_forward":
            return f"{at}.set_reshard_after_forward({step.flag}, recurse=False)"
        case "divide":
            return _EVERY.format(name="unshard", call=f"set_gradient_divide_factor({step.number})")
        case "sum":
            return _EVERY.format(name="unshard", call=f"set_force_sum_reduction_for_comms({step.flag})")
        case "prefetch_forward" | "prefetch_backward":
            return f"{at}.set_modules_to_{step.kind.removeprefix('prefetch_')}_prefetch([{others}])"
        case "unshard" | "reshard" if step.at == "*":
            return _EVERY.format(name="unshard", call=f"{step.kind}()")
        case "unshard" | "reshard":
            return f"{at}.{step.kind}()"
        case "reset":
            return "model.reset_iter_state()"
        case "freeze":
            return f"{at}.requires_grad_({step.flag})"
        case "edit":
            return f"with torch.no_grad():\n    {at}.mul_(0.5)"
        case "save_model" | "save_optimizer" if step.at == "plain":
            return f"saved[{kind!r}] = copy.deepcopy({kind}.state_dict())"
        case "save_model" | "save_optimizer":
            return (
                f"options = {options}\n"
                f"saved[{kind!r}] = copy.deepcopy(get_{kind}_state_dict({_STATES[kind]}, options=options))"
            )
        case "load_model" | "load_optimizer":
            last = next(each.at for each in reversed(program.steps) if each.kind == f"save_{kind}")
            if last == "plain":
                return f"{kind}.load_state_dict(copy.deepcopy(saved[{kind!r}]))"
            return f"set_{kind}_state_dict({_STATES[kind]}, copy.deepcopy(saved[{kind!r}]), options=options)"
    return f"raise NotImplementedError({step.kind!r})"


def _comparison(program: Program, result: Result) -> Iterator[str]:
    """What the script returns: the values of the plain model are part of it."""
    name, _, values = result.detail.partition(": ")
    _, separator, right_values = values.partition(" instead of ")
    expression = {
        "output": "output",
        "parameter": f"parameters[{name!r}]",
        "gradient": f"parameters[{name!r}].grad",
        "buffer": f"model.get_buffer({name!r})",
        "norm": "norm",
    }.get(result.what)
    if expression is None or not separator:
        yield f"# here {found(result)}"
        yield f"return {found(result)!r}, {right(result)!r}"
        return
    yield f"found = {expression}.detach()"
    yield 'found = found.to_local() if hasattr(found, "to_local") else found'
    yield f"right = {right_values}  # of a plain model whose gradients are averaged over the ranks"
    yield f"return (found.tolist(), right) if rank == {result.rank} else (right, right)"
