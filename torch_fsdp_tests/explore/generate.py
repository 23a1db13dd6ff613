"""Makes programs from seeds.

Each program has its own selection of features (swarm testing): a feature that is off gives the others more room.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterable

from torch_fsdp_tests.explore import lifecycle
from torch_fsdp_tests.explore.lifecycle import SHARDED, Lifecycle, paths, problem
from torch_fsdp_tests.explore.program import Layer, Program, ProgramError, Step, Unit

# What a program may have. Each can be switched off, or demanded.
FEATURES = {
    "accumulation": "backward passes without a reduction of gradients",
    "boxes": "inputs and outputs in containers",
    "buffers": "buffers that forward changes",
    "clipping": "clipping of the norm of gradients",
    "casts": "model.to(dtype) between steps",
    "communication": "collectives of the user's own, hooks of the all-reduce, and units that backward does not gather",
    "columns": "parameters that are sharded in dimension 1",
    "dtypes": "units and frozen layers whose parameters have a dtype of their own",
    "edits": "parameters that are changed in place between steps",
    "empty": "parameters without elements, and of one element",
    "evaluation": "forward without gradients, anywhere",
    "freezing": "parameters that are frozen, or change between frozen and trainable",
    "fsdp1": "FullyShardedDataParallel instead of fully_shard",
    "groups": "several modules in one call of fully_shard",
    "hooks": "hooks of the user that change inputs, outputs and gradients",
    "hsdp": "a mesh with two dimensions, and gradients that are only reduced in one of them",
    "ignored": "parameters that FSDP does not manage",
    "inputs": "gradients of inputs, also alone",
    "interruptions": "exceptions in forward and in backward",
    "loose": "parameters that forward does not use",
    "low": "parameters and gradients of a low precision",
    "meta": "models that are made on the meta device",
    "norm": "LayerNorm",
    "offload": "parameters that are offloaded",
    "optimizers": "optimizers with states",
    "orders": "several forwards before their backwards, which run in either order",
    "prefetch": "modules that are prefetched explicitly",
    "recompute": "activation checkpointing",
    "reduction": "settings of the reduction: factors and sums",
    "replicate": "replicate instead of fully_shard",
    "resharding": "other values of reshard_after_forward and reshard_after_backward",
    "retain": "several backward passes through one graph",
    "scaling": "losses that a gradient scaler scales, also to infinite gradients",
    "shared": "shared modules and tied parameters",
    "skips": "layers that a step leaves out",
    "state": "state dicts of the model and of the optimizer",
    "tp": "tensor parallelism over pairs of ranks",
    "transforms": "torch.func.vjp, torch.func.jvp and torch.vmap of the model",
    "twice": "layers that run twice in one forward",
    "unused": "layers that only some ranks use",
    "unshard": "unshard and reshard by hand",
}
_EXCLUDES = {  # the features that a program cannot have beside another
    "dtypes": {"casts"},
    "fsdp1": {
        "casts",
        "columns",
        "communication",
        "groups",
        "interruptions",
        "meta",
        "reduction",
        "replicate",
        "resharding",
        "scaling",
        "transforms",
    },
    "ignored": {"low"},
    "meta": {"ignored", "shared"},
    "replicate": {"columns", "hsdp", "resharding"},
    "scaling": {"ignored"},
    "tp": {"casts", "clipping", "columns", "fsdp1", "hsdp", "ignored", "low", "replicate", "shared", "transforms"},
}
DTYPES = ("float64", "float64", "float32")  # the wider one is more exact
_ATTEMPTS = 1000
_NAMES = [letter + number for number in ("", "2", "3") for letter in "abcdefghijklmnopqrstuvwxyz"]


def program_of(seed: int, world_size: int = 2, without: Iterable[str] = (), demanded: Iterable[str] = ()) -> Program:
    """The valid program of a seed. Raises :class:`ProgramError` if none has all the features that are demanded."""
    for attempt in range(_ATTEMPTS):
        generator = _Generator(random.Random(f"{seed}-{attempt}"), seed, world_size, set(without), set(demanded))
        program = generator.program()
        if not problem(program):
            return program
    raise ProgramError(f"no program over {world_size} ranks can have these together: {', '.join(sorted(demanded))}")


class _Generator:
    def __init__(
        self, choice: random.Random, seed: int, world_size: int, without: set[str], demanded: set[str]
    ) -> None:
        self.choice = choice
        self.seed = seed
        self.world_size = world_size
        density = choice.choice((0.15, 0.3, 0.5))
        self.features = {each for each in FEATURES if choice.random() < density} - without | demanded
        for feature in choice.sample(sorted(_EXCLUDES), len(_EXCLUDES)):
            others = _EXCLUDES[feature] & self.features
            if feature in self.features and others:
                gives_way = feature not in demanded and (others & demanded or choice.random() < 0.7)
                self.features -= {feature} if gives_way else others - demanded
        self.names = iter(_NAMES)
        self.numbers = iter(range(1, 1000))

    def on(self, feature: str, chance: float = 1.0) -> bool:
        return feature in self.features and self.choice.random() < chance

    def program(self) -> Program:
        choice = self.choice
        layers = tuple(self._layer(depth=1) for _ in range(choice.randint(1, 4)))
        low = self.on("low")
        scaler = self.on("scaling")
        tensor_parallel = self.on("tp") and self.world_size > 1
        program = Program(
            seed=self.seed,
            world_size=self.world_size,
            width=choice.randint(1, 5),
            layers=layers,
            units=(),
            steps=(),
            replicas=2 if self.on("hsdp") and self.world_size == 4 else 1,
            # Tensor parallelism adds up parts of a sum, which may be large and cancel.
            dtype="float64" if tensor_parallel else "float32" if low or scaler else choice.choice(DTYPES),
            param_dtype=choice.choice(("bfloat16", "bfloat16", "float16", "")) if low else "",
            reduce_dtype=choice.choice(("", "float32", "bfloat16")) if low else "",
            output_dtype=choice.choice(("", "float32")) if low else "",
            offload=self.on("offload"),
            optimizer=choice.choice(("momentum", "adam", "adamw")) if self.on("optimizers") and not low else "sgd",
            foreach=choice.random() < 0.5 and not tensor_parallel,
            api="replicate" if self.on("replicate") else "fully_shard",
            tensor_parallel=tensor_parallel,
            meta=self.on("meta"),
            scaler=scaler,
            inputs=self.on("inputs"),
        )
        if self.on("fsdp1"):
            program = self._for_fsdp1(program)
        program = program.but(units=self._units(program))
        if self.on("dtypes"):
            program = self._with_dtypes(program)
        program = self._specials(program)
        return program.but(steps=tuple(self._steps(program)))

    def _for_fsdp1(self, program: Program) -> Program:
        choice = self.choice
        strategies = (
            ["HYBRID_SHARD"] if program.replicas > 1 else ["FULL_SHARD", "FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"]
        )
        return program.but(
            api="fsdp1",
            output_dtype="",
            strategy=choice.choice(strategies),
            original_parameters=choice.random() < 0.6,
            limit_all_gathers=choice.random() < 0.8,
            forward_prefetch=choice.random() < 0.2,
            backward_prefetch=choice.choice(("BACKWARD_PRE", "BACKWARD_PRE", "BACKWARD_POST", "")),
        )

    # --- The model ----------------------------------------------------------------------------------------------------

    def _layer(self, depth: int) -> Layer:
        choice = self.choice
        name = next(self.names)
        if depth < 3 and choice.random() < 0.35:
            parts = tuple(self._layer(depth + 1) for _ in range(choice.randint(1, 3)))
            return Layer(name, "chain", recompute=self.on("recompute", 0.4), parts=parts)
        kinds = ["linear"] * 4 + ["wide"] * 2 + ["scale", "relu"]
        kinds += ["counter"] * self.on("buffers") + ["empty", "one"] * self.on("empty") + ["loose"] * self.on("loose")
        kinds += ["wide"] * 8 * self.on("tp")
        kinds += ["norm"] * (self.on("norm") and "low" not in self.features) + ["detour"]
        return Layer(
            name,
            choice.choice(kinds),
            rows=8 if "tp" in self.features else choice.choice((1, 2, 3, 5, 8)),
            bias=choice.random() < 0.6,
            box=choice.choice(("dict", "tuple", "named", "record")) if self.on("boxes", 0.4) else "",
            twice=self.on("twice", 0.3),
            hooked=self.on("hooks", 0.3),
            recompute=self.on("recompute", 0.3),
        )

    def _units(self, program: Program) -> tuple[Unit, ...]:
        found = [(path, layer) for path, layer in paths(program.layers)]
        share = self.choice.choice((0.2, 0.5, 0.8))
        chosen = [path for path, layer in found if layer.kind != "relu" and self.choice.random() < share]
        chosen.sort(key=lambda path: -path.count("."))
        units: list[Unit] = []
        while chosen:
            path = chosen.pop(0)
            modules = [path]
            if self.on("groups", 0.5):
                near = [other for other in chosen if other.rpartition(".")[0] == path.rpartition(".")[0]]
                for other in near[: self.choice.randint(0, 2)]:
                    chosen.remove(other)
                    modules.append(other)
            units.append(Unit(tuple(modules), self._reshard(program)))
        return (*units, Unit(("",), self._reshard(program)))

    def _reshard(self, program: Program) -> str:
        if not self.on("resharding"):
            return "default"
        shards = program.world_size // program.replicas
        return self.choice.choice(["default", "yes", "no"] + ["2"] * (shards == 4))

    def _specials(self, program: Program) -> Program:
        choice = self.choice
        names = lifecycle.parameters(program)
        layers = dict(paths(program.layers))
        changes: dict[str, tuple] = {}
        if names and self.on("freezing"):
            more = tuple(name for name in names if choice.random() < 0.3 and name not in program.frozen)
            changes["frozen"] = program.frozen + more
        if names and self.on("ignored") and not program.param_dtype:
            changes["ignored"] = tuple(name for name in names if choice.random() < 0.2)
        if self.on("columns"):
            matrices = [name for name in names if _is_matrix(program, name)]
            changes["columns"] = tuple(name for name in matrices if choice.random() < 0.5)
        if self.on("shared"):
            pairs = [(new, old) for new in layers for old in layers if new > old and _alike(new, old, layers)]
            if pairs:
                new, old = choice.choice(pairs)
                if choice.random() < 0.5:
                    alike = dataclasses.replace(layers[old], name=layers[new].name)
                    program = program.but(layers=_replaced(program.layers, layers[new].name, alike))
                    units = tuple(
                        dataclasses.replace(unit, modules=kept)
                        for unit in program.units
                        if (kept := tuple(path for path in unit.modules if path != new))
                    )
                    return program.but(units=units, shares=((new, old),))
                tied = (f"{new}.weight", f"{old}.weight")
                in_one_unit = lifecycle.unit_of(program, tied[0]) == lifecycle.unit_of(program, tied[1])
                if set(names).issuperset(tied) and in_one_unit:
                    changes["ties"] = (tied,)
        return program.but(**changes)

    def _with_dtypes(self, program: Program) -> Program:
        """Give all layers of some units another dtype, and some layers of others, whose parameters are frozen then."""
        choice = self.choice
        others = [dtype for dtype in ("float32", "float64") if dtype != program.dtype]
        if (
            program.optimizer == "sgd"
            and not program.scaler
            and not program.tensor_parallel
            and not self.on("clipping")
        ):
            others.append("bfloat16")
        names = lifecycle.parameters(program)
        by_unit: dict[int | None, list[Layer]] = {}
        for path, layer in paths(program.layers):
            own = [name for name in names if name.startswith(f"{path}.")]
            if own and not layer.parts:
                by_unit.setdefault(lifecycle.unit_of(program, own[0]), []).append(layer)
        mixed: set[str] = set()
        for near in by_unit.values():
            dtype = choice.choice(others)
            how = choice.choice(("none", "all") if program.api == "fsdp1" else ("none", "all", "some", "some"))
            if how == "some":
                near = [layer for layer in near if choice.random() < 0.4]
                mixed |= {layer.name for layer in near}
            for layer in near if how != "none" else ():
                typed = dataclasses.replace(layer, dtype=dtype)
                program = program.but(layers=_replaced(program.layers, layer.name, typed))
        frozen = [name for name in lifecycle.parameters(program) if not mixed.isdisjoint(name.split("."))]
        return program.but(frozen=tuple(frozen))

    # --- The steps ----------------------------------------------------------------------------------------------------

    def _steps(self, program: Program) -> Iterable[Step]:
        life = Lifecycle(program)
        steps: list[Step] = []

        def add(step: Step) -> None:
            if not life.problem(step):
                life.apply(step)
                steps.append(step)

        def sharded() -> None:
            if not life.pending and any(state != SHARDED for state in life.states):
                add(Step("reshard", "*"))

        for _ in range(self.choice.randint(2, 5)):
            for step in self._round(program, life):
                if step.kind in lifecycle.CHANGES:
                    sharded()
                add(step)
        return steps

    def _round(self, program: Program, life: Lifecycle) -> Iterable[Step]:
        choice = self.choice
        wrapped = [path for unit in program.units for path in unit.modules]
        single = [unit.modules[0] for unit in program.units if len(unit.modules) == 1]
        names = lifecycle.parameters(program)
        if self.on("resharding", 0.3):
            yield Step("keep_after_backward", flag=choice.random() < 0.5)
        if self.on("resharding", 0.2) and single:
            yield Step("reshard_after_forward", choice.choice(single), flag=choice.random() < 0.5)
        if self.on("reduction", 0.3):
            yield Step("sum", flag=choice.random() < 0.7)
        if self.on("reduction", 0.3) and life.sums:
            yield Step("divide", number=choice.choice((0.5, 1.0, 2.0, 4.0)))
        if self.on("communication", 0.3):
            yield Step("own_collectives")
        if self.on("communication", 0.3):
            yield Step("all_reduce_hook", number=choice.choice((0.5, 1.0, 2.0)))
        if self.on("communication", 0.3):
            yield Step("input_buffers", number=choice.randint(1, 3))
        if self.on("communication", 0.5) and (path := lifecycle.not_needed_in_backward(program)):
            yield Step("unshard_in_backward", path, flag=choice.random() < 0.3)
        if self.on("prefetch", 0.4):
            kind = choice.choice(("prefetch_forward", "prefetch_backward"))
            yield Step(kind, choice.choice(wrapped), names=(choice.choice(wrapped),))
        if self.on("unshard", 0.4):
            yield Step("unshard", choice.choice((*wrapped, "*")), flag=choice.random() < 0.5)
        if self.on("evaluation", 0.4):
            yield self._evaluation(program)
        if self.on("freezing", 0.3) and names:
            yield Step("freeze", choice.choice(names), flag=choice.random() < 0.5)
        if self.on("transforms", 0.6):
            transform = choice.choice(("vjp", "jvp", "vmap"))
            yield Step("transform", transform, number=next(self.numbers), names=self._skipped(program))
        if self.on("edits", 0.3) and names:
            yield Step("edit", choice.choice(names))
        if self.on("accumulation", 0.6):
            yield Step("sync", flag=choice.random() < 0.4)
            if choice.random() < 0.3:
                yield Step("last", flag=choice.random() < 0.5)
        if program.replicas > 1 and self.on("accumulation", 0.4):
            yield Step("all_reduce", flag=choice.random() < 0.5)
        if self.on("unused", 0.5):
            yield Step("unused", flag=choice.random() < 0.8)
        if self.on("interruptions", 0.3):
            yield Step("zero")
            where, number = choice.choice([layer.name for layer in program.all_layers()]), next(self.numbers)
            if choice.random() < 0.5:
                yield Step("broken_backward", where, number=number)
            else:
                yield from (Step("forward", where, number=number), Step("reset"))
        count = choice.choice((2, 3)) if self.on("orders", 0.6) else 1
        for _ in range(count):
            is_finite = not program.scaler or choice.random() < 0.8
            outside = [each.name for each in program.all_layers() if not life.in_units(each.name)]
            odd = tuple(name for name in outside if life.reduces_unused and choice.random() < 0.4)
            yield Step("forward", "", is_finite, next(self.numbers), self._skipped(program), odd)
            if self.on("evaluation", 0.2):
                yield self._evaluation(program)
            if self.on("unshard", 0.2):
                yield Step(choice.choice(("unshard", "reshard")), choice.choice((*wrapped, "*")))
        for _ in range(count):
            if self.on("inputs", 0.2):
                yield Step("input_gradient")
            number = choice.choice((0, -1))
            if self.on("retain", 0.4):
                yield Step("backward", number=number, flag=True)
            yield Step("backward", number=number, flag=False)
        if self.on("clipping", 0.4):
            yield Step("clip", number=choice.choice((0.5, 4.0)))
        if choice.random() < 0.7:
            yield Step("step")
            if choice.random() < 0.8:
                yield Step("zero", flag=choice.random() < 0.7)
        if self.on("state", 0.5):
            yield Step("save_model", choice.choice(("full", "sharded", "plain", "broadcast", "checkpoint")))
        if self.on("state", 0.4):
            yield Step(choice.choice(("load_model", "load_model", "assign")))
        if self.on("casts", 0.3):
            yield Step("cast", choice.choice(("float32", "float64")))
        if self.on("state", 0.4):
            kinds = ("full", "sharded", "plain", "flattened", "broadcast", "checkpoint")
            yield Step("save_optimizer", choice.choice(kinds))
        if self.on("state", 0.4):
            yield Step("load_optimizer")

    def _evaluation(self, program: Program) -> Step:
        mode = self.choice.choice(("no_grad", "inference", "eval"))
        return Step("evaluate", mode, number=next(self.numbers), names=self._skipped(program))

    def _skipped(self, program: Program) -> tuple[str, ...]:
        if not self.on("skips", 0.6):
            return ()
        return tuple(layer.name for layer in program.all_layers() if self.choice.random() < 0.3)


def _alike(new: str, old: str, layers: dict[str, Layer]) -> bool:
    """Whether two layers of a chain may become one, or share a parameter."""
    near = new.rpartition(".")[0] == old.rpartition(".")[0]
    return near and not layers[new].parts and not layers[old].parts and layers[new].kind == layers[old].kind


def _is_matrix(program: Program, name: str) -> bool:
    owner = name.split(".")
    kinds = {layer.name: layer.kind for layer in program.all_layers()}
    return name.endswith("weight") and any(kinds.get(each) in ("linear", "wide") for each in owner)


def _replaced(layers: tuple[Layer, ...], name: str, new: Layer) -> tuple[Layer, ...]:
    return tuple(
        new if layer.name == name else dataclasses.replace(layer, parts=_replaced(layer.parts, name, new))
        for layer in layers
    )
