"""The texts about a finding: a script in plain torch, and a text for torch's issue tracker."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator

from torch_fsdp_tests.defects import texts
from torch_fsdp_tests.defects.registry import NO_WORKAROUND, Answer, Component, Consequence, Defect, Exposure
from torch_fsdp_tests.defects.trial import Finding
from torch_fsdp_tests.explore import code, layers
from torch_fsdp_tests.explore.program import LAYERS, Program
from torch_fsdp_tests.explore.ranks import Result

_SEQUENTIAL = "nn.Sequential(OrderedDict({parts}))"


def script(program: Program, result: Result) -> str:
    """A script that needs only torch, and says what it finds and what is right."""
    return texts.script(_defect(program, result))


def issue(program: Program, result: Result) -> str:
    """A text for torch's issue tracker, in Markdown, like that of a defect of the registry."""
    present, defect = Answer.PRESENT, _defect(program, result)
    found, right = _found(result), _right(result)
    return texts.issue(Finding(defect, present, present, rank=result.rank, found=found, right=right))


def _defect(program: Program, result: Result) -> Defect:
    """The finding in the form of a defect of the registry."""
    body = f"{_definitions(program, result)}\n\n\n{_reproduction(program, result)}\n"
    used = _names(ast.parse(body))
    imports = "\n".join(line for name, line in code.IMPORTS.items() if name in used)
    component = Component.FSDP1 if program.api == "fsdp1" else Component.FSDP2
    title = f"{component.value}: {_found(result)}"
    place = result.place or "unknown"
    return Defect(
        component,
        Consequence.ERROR,
        Exposure.RARE,
        place,
        features=component.value.lower(),
        workaround=NO_WORKAROUND,
        world_size=program.world_size,
        title=title,
        explanation=f"{program.listing()}\n\n{result.detail}",
        source=f'"""{title}"""\n\n{imports}\n\n\n{body}',
    )


def _found(result: Result) -> str:
    first = result.detail.partition("\n")[0]
    return f"{result.when}, {first if result.what.startswith('raised') else f'{result.what}: {first}'}"


def _right(result: Result) -> str:
    return "no exception" if result.what.startswith("raised") else "what a plain model shows"


def _chain(program: Program) -> str:
    """The constructor of chains: ``nn.Sequential`` if that can run the model."""
    special = any(layer.box or layer.recompute for layer in program.all_layers())
    special |= any(
        step.names or step.odd or step.kind == "broken_backward" or (step.kind == "forward" and step.at)
        for step in program.steps
    )
    return LAYERS["chain"] if special else _SEQUENTIAL


def _definitions(program: Program, result: Result) -> str:
    """The source of what the model is made of."""
    text = inspect.getsource(layers)
    source = text.splitlines()
    nodes = {node.name: node for node in ast.parse(text).body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    wanted = _names(ast.parse(textwrap.dedent(_reproduction(program, result))))
    while more := {name for each in wanted & nodes.keys() for name in _names(nodes[each])} - wanted:
        wanted |= more
    parts = ['Named = namedtuple("Named", "x nothing")'] if "Named" in wanted else []
    for name, node in nodes.items():
        if name in wanted:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            parts.append("\n".join(source[first - 1 : node.end_lineno]))
    return "\n\n\n".join(parts)


def _names(node: ast.AST) -> set[str]:
    return {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}


def _reproduction(program: Program, result: Result) -> str:
    lines = "\n".join(
        [
            *code.construction(program, _chain(program)),
            *(code.step(program, index) for index in range(len(program.steps))),
        ]
    )
    head = "def reproduce(rank, world_size, device):\n"
    if not result.what.startswith("raised"):
        lines = "\n".join((lines, *_comparison(result)))
        return head + textwrap.indent(lines, "    ")
    return (
        f"{head}    try:\n{textwrap.indent(lines, '        ')}\n    except Exception as error:\n"
        '        return f"{type(error).__name__}: {error}"[:200], "no exception"\n'
        '    return "no exception", "no exception"'
    )


def _comparison(result: Result) -> Iterator[str]:
    """What the script returns: the values of the plain model are part of it."""
    name, _, values = result.detail.partition(": ")
    if result.what in ("a gradient is missing", "a gradient too many"):
        yield f"return parameters[{name!r}].grad is None, {result.what == 'a gradient too many'}"
        return
    expression = {
        "output": "output",
        "derivative": "derivative",
        "parameter": f"parameters[{name!r}]",
        "gradient": f"parameters[{name!r}].grad",
        "buffer": f"model.get_buffer({name!r})",
        "norm": "norm",
        "gradient of an input": f"{name}.grad",
    }.get(result.what)
    if expression is None:
        words = f"the steps end here. Expected was {_right(result)}, and found: {_found(result)}"
        yield f"raise NotImplementedError({words!r})"
        return
    yield f"found = {expression}.detach()"
    yield "found = found.to_local() if isinstance(found, DTensor) else found"
    right = values.partition(" instead of ")[2]
    yield f"right = {right}  # of a plain model whose gradients are averaged over the ranks"
    yield f"return (found.tolist(), right) if rank == {result.rank} else (right, right)"
