"""Known defects as rewritings of programs: each takes out of a program what shows the defect, and nothing else.

The search applies the rewritings of all defects that the installed torch has. A finding is known if a rewriting makes
it disappear.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from torch_fsdp_tests.defects import registry
from torch_fsdp_tests.defects.registry import Answer
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.explore.lifecycle import LOW, Lifecycle, problem
from torch_fsdp_tests.explore.program import Layer, Program, Step, Unit
from torch_fsdp_tests.installed_torch import torch_facts

Rewriting = Callable[[Program], Program]
REWRITINGS: dict[str, Rewriting] = {}


def _avoids(id: str) -> Callable[[Rewriting], Rewriting]:
    def store(rewriting: Rewriting) -> Rewriting:
        REWRITINGS[id] = rewriting
        return rewriting

    return store


NEEDS = {  # of features
    "unused": torch_facts.HAS_REDUCE_SCATTER_OF_UNUSED_PARAMETERS,
    "interruptions": torch_facts.HAS_RESET_ITER_STATE,
    "replicate": torch_facts.REPLICATES_WITHOUT_SHARDS,
    "transforms": torch_facts.RUNS_UNDER_FUNCTORCH,
    "tp": torch_facts.TP_KEEPS_REQUIRES_GRAD,
    "clipping": torch_facts.ADDS_NUMBERS_TO_NORMS_ONCE,
}


def lacking() -> list[str]:
    """The features that the installed torch does not have."""
    return [feature for feature, fact in NEEDS.items() if not fact]


def present() -> list[str]:
    """The known defects that the installed torch has, and that programs can show."""
    absent = (Answer.ABSENT, Answer.CANNOT_BE_TRIED)
    return [id for id in REWRITINGS if registry.defect(id).expected_here() not in absent]


def possible(program: Program) -> Program:
    """The program without what the device under test cannot do, and what has no exact result."""
    if program.api == "fsdp1" and program.offload and accelerator.current().lacks("pinned_memory"):
        program = program.but(offload=False)
    if program.offload and not accelerator.current().is_host:
        # ``to_empty`` makes all tensors in one place, and a scale is read too early (fsdp1_scale_is_read_while_copied).
        program = program.but(meta=False, scaler=False)
    if not torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS:
        program = _without(program, "input_buffers")
    if program.shares and _reduces_uses_apart(program):
        alone = valid(program.but(shares=()))
        exact = program.but(param_dtype="", reduce_dtype="", output_dtype="")  # if a copy's unit has another dtype
        program = alone if not problem(alone) else exact
    return program


def _reduces_uses_apart(program: Program) -> bool:
    """Whether FSDP adds up the uses of a shared module in another order than autograd, so that rounding differs.

    A flat parameter always does. FSDP2 reduces what is accumulated after the first use, and the rest after the last.
    """
    if program.api == "fsdp1":
        return bool(program.param_dtype)
    low = not LOW.isdisjoint({program.param_dtype, program.reduce_dtype})
    return low and any(step.kind == "sync" for step in program.steps)


def avoiding(program: Program, ids: Iterable[str]) -> Program:
    """The program without what shows these defects. It is valid."""
    for id in ids:
        rewritten = REWRITINGS[id](program)
        if rewritten != program and not problem(rewritten := valid(rewritten)):
            program = rewritten
    return program


def valid(program: Program) -> Program:
    """The program without the steps that are not valid (any more)."""
    return each_step(program, lambda life, step: [step])


def each_step(program: Program, change: Callable[[Lifecycle, Step], list[Step]]) -> Program:
    """Replace each step by others, and leave out those that are not valid there."""
    life, steps = Lifecycle(program), []
    for step in program.steps:
        for new in change(life, step):
            if not life.problem(new):
                life.apply(new)
                steps.append(new)
    return program.but(steps=tuple(steps))


@_avoids("fsdp2_inference_mode_breaks_training")
def _gathers_outside_inference_mode_first(program: Program) -> Program:
    def change(life: Lifecycle, step: Step) -> list[Step]:
        if step.kind == "evaluate" and step.at == "inference" and len(life.gathered) < len(program.units):
            return [dataclasses.replace(step, at="no_grad")]
        return [step]

    return each_step(program, change)


@_avoids("optimizer_ignored_parameters_break_foreach")
def _no_foreach_beside_ignored_parameters(program: Program) -> Program:
    return _without(program, "clip").but(foreach=False) if program.ignored else program


@_avoids("dsd_asking_for_optim_state_is_a_step")
def _no_optimizer_states_before_the_first_step(program: Program) -> Program:
    def change(life: Lifecycle, step: Step) -> list[Step]:
        # With a scaler, a step may have been left out because of infinite gradients.
        if step.kind == "save_optimizer" and (program.scaler or not life.has_stepped):
            return [dataclasses.replace(step, at="plain")]
        return [step]

    return each_step(program, change)


@_avoids("fsdp2_unit_without_elements_raises")
def _elements_in_each_unit(program: Program) -> Program:
    def change(layer: Layer) -> Layer:
        return dataclasses.replace(layer, kind="one") if layer.kind == "empty" else layer

    return program.but(layers=_each_layer(program.layers, change))


def _each_layer(layers: tuple[Layer, ...], change: Callable[[Layer], Layer]) -> tuple[Layer, ...]:
    return tuple(change(dataclasses.replace(layer, parts=_each_layer(layer.parts, change))) for layer in layers)


@_avoids("fsdp2_outputs_in_dataclasses_raise")
def _no_dataclasses(program: Program) -> Program:
    def change(layer: Layer) -> Layer:
        return dataclasses.replace(layer, box="dict") if layer.box == "record" else layer

    return program.but(layers=_each_layer(program.layers, change))


@_avoids("fsdp2_recomputation_gathers_again")
def _no_recomputation(program: Program) -> Program:
    return program.but(layers=_each_layer(program.layers, lambda layer: dataclasses.replace(layer, recompute=False)))


@_avoids("fsdp2_partial_group_loses_gradients")
@_avoids("fsdp2_partial_group_stays_gathered")
def _no_groups_in_part(program: Program) -> Program:
    if not any(step.names for step in program.steps):
        return program
    units = tuple(Unit((path,), unit.reshard) for unit in program.units for path in unit.modules)
    return program.but(units=units)


@_avoids("dsd_shared_module_is_not_loaded")
def _no_states_of_shared_modules(program: Program) -> Program:
    return _with_plain_states(program, "save_model") if program.shares else program


@_avoids("dsd_stateless_optimizers_are_mixed_up")
def _no_states_of_stateless_optimizers(program: Program) -> Program:
    return _with_plain_states(program, "save_optimizer") if program.optimizer == "sgd" else program


@_avoids("dsd_optim_state_of_some_parameters_is_refused")
@_avoids("dsd_frozen_parameter_loses_its_state")
def _no_optimizer_states_of_some_parameters(program: Program) -> Program:
    return program if _trains_all(program) else _with_plain_states(program, "save_optimizer")


def _trains_all(program: Program) -> bool:
    """Whether every step uses and trains all parameters."""
    has_all = not any(step.names or step.odd or step.kind == "freeze" for step in program.steps) and not program.frozen
    return has_all and not any(layer.kind == "loose" for layer in program.all_layers())


@_avoids("fsdp2_accumulation_before_first_use_raises")
@_avoids("fsdp2_accumulation_of_later_parameter_raises")
def _no_accumulation_of_some_parameters(program: Program) -> Program:
    if _trains_all(program) or not program.reduce_dtype:
        return program
    return _without(program, "sync", "unused")


@_avoids("fsdp2_partial_reduction_adds_up_in_low_precision")
@_avoids("fsdp2_partial_reduction_of_unused_group_is_left")
@_avoids("fsdp2_partial_reduction_reaches_another_parameter")
def _no_partial_reduction_of_some_parameters(program: Program) -> Program:
    simple = _trains_all(program) and not program.param_dtype and not program.reduce_dtype
    return program if simple else _without(program, "all_reduce")


@_avoids("fsdp2_unused_parameters_are_reduced_out_of_order")
def _gradients_of_inputs_order_the_reductions(program: Program) -> Program:
    return program.but(inputs=True) if any(step.odd for step in program.steps) else program


@_avoids("fsdp2_unused_layer_gathers_out_of_order")
def _all_ranks_use_the_last_layers(program: Program) -> Program:
    chains = [program.layers, *(each.parts for each in program.all_layers() if each.parts)]

    def runs(layer: Layer, step: Step) -> bool:
        return layer.name not in step.names and (not layer.parts or any(runs(each, step) for each in layer.parts))

    def change(step: Step) -> Step:
        running = [[layer.name for layer in layers if runs(layer, step)] for layers in chains]
        last = {names[-1] for names in running if names}
        return dataclasses.replace(step, odd=tuple(name for name in step.odd if name not in last))

    return program.but(steps=tuple(map(change, program.steps)))


@_avoids("fsdp2_recomputation_orders_collectives_by_use")
def _no_recomputation_of_what_some_ranks_use(program: Program) -> Program:
    return _no_recomputation(program) if any(step.odd for step in program.steps) else program


@_avoids("fsdp2_frozen_first_forward_breaks_training")
@_avoids("fsdp2_frozen_first_forward_ignores_reduce_dtype")
def _nothing_frozen_becomes_trainable(program: Program) -> Program:
    return _without(program, "freeze") if program.param_dtype or program.reduce_dtype else program


@_avoids("fsdp2_frozen_parameter_of_unused_unit_gets_zeros")
def _nothing_frozen_beside_zeros_for_unused(program: Program) -> Program:
    sends_zeros = any(step.kind == "unused" and step.flag for step in program.steps)
    return _without(program, "freeze") if sends_zeros else program


@_avoids("fsdp2_freezing_before_a_transform_raises")
def _no_transform_after_freezing(program: Program) -> Program:
    changed = False

    def change(life: Lifecycle, step: Step) -> list[Step]:
        nonlocal changed
        if step.kind == "freeze":
            changed = True
        elif step.kind in ("forward", "evaluate") and not step.names and not step.at.startswith("inference"):
            changed = False
        return [] if step.kind == "transform" and changed else [step]

    return each_step(program, change)


@_avoids("fsdp2_reset_keeps_gradients_of_broken_backward")
def _no_broken_backward(program: Program) -> Program:
    return _without(program, "broken_backward")


@_avoids("fsdp2_cast_after_first_forward_raises")
def _casts_before_the_first_forward(program: Program) -> Program:
    return each_step(program, lambda life, step: [step] if step.kind != "cast" or not life.gathered else [])


@_avoids("fsdp2_divides_twice")
def _no_division_with_one_shard(program: Program) -> Program:
    if program.api == "fully_shard" and program.data_ranks > program.replicas:
        return program
    program = _without(program, "sum", "divide")
    return program.but(param_dtype="bfloat16") if program.param_dtype == "float16" else program


def _without(program: Program, *kinds: str) -> Program:
    return program.but(steps=tuple(step for step in program.steps if step.kind not in kinds))


def _with_plain_states(program: Program, kind: str) -> Program:
    return _with_at(program, "plain", lambda step: step.kind == kind)


def _with_at(program: Program, at: str, chosen: Callable[[Step], bool]) -> Program:
    """The program with another ``at`` in the chosen steps."""
    steps = [dataclasses.replace(step, at=at) if chosen(step) else step for step in program.steps]
    return program.but(steps=tuple(steps))


@_avoids("dsd_full_optim_state_beside_gradients_is_not_loaded")
def _no_gradients_before_a_full_load(program: Program) -> Program:
    def change(life: Lifecycle, step: Step) -> list[Step]:
        return [Step("zero"), step] if step.kind == "load_optimizer" and life.has_gradients else [step]

    return each_step(program, change)


@_avoids("fsdp2_prefetched_parameters_go_stale")
def _no_forward_prefetch_beside_evaluations(program: Program) -> Program:
    has_no_backward = any(step.kind in ("evaluate", "transform") for step in program.steps)
    return _without(program, "prefetch_forward") if has_no_backward else program


@_avoids("fsdp2_smaller_mesh_with_columns_raises")
def _no_columns_on_smaller_meshes(program: Program) -> Program:
    return program.but(columns=()) if any(unit.reshard.isdigit() for unit in program.units) else program


# --- FSDP1 ------------------------------------------------------------------------------------------------------------


def _of_fsdp1(rewriting: Rewriting) -> Rewriting:
    """A rewriting that leaves programs over FSDP2 alone."""
    return lambda program: rewriting(program) if program.api == "fsdp1" else program


@_avoids("fsdp1_evaluation_before_step_trains_old_weights")
@_avoids("fsdp1_update_between_forwards_is_not_seen")
@_of_fsdp1
def _training_after_each_evaluation(program: Program) -> Program:
    steps: list[Step] = []
    for step in reversed(program.steps):
        if step.kind != "evaluate" or (steps and steps[-1].kind in ("forward", "evaluate")):
            steps.append(step)
    return program.but(steps=tuple(reversed(steps)))


@_avoids("fsdp1_inference_mode_breaks_training")
@_of_fsdp1
def _no_inference_mode(program: Program) -> Program:
    return _with_at(program, "no_grad", lambda step: step.at == "inference")


@_avoids("fsdp1_accumulation_of_one_element_is_wrong")
@_avoids("fsdp1_accumulated_gradient_is_lost")
@_avoids("fsdp1_unused_unit_computes_with_old_weights")
@_of_fsdp1
def _original_parameters(program: Program) -> Program:
    accumulates = any(step.kind == "sync" or step.names for step in program.steps)
    small = program.width == 1 or any(layer.kind in ("one", "loose") for layer in program.all_layers())
    return program.but(original_parameters=True) if accumulates or small else program


@_avoids("fsdp1_gradient_of_no_sync_is_not_reduced")
@_of_fsdp1
def _every_unit_in_each_microbatch(program: Program) -> Program:
    if not any(step.kind == "sync" for step in program.steps):
        return program
    return program.but(steps=tuple(dataclasses.replace(step, names=()) for step in program.steps))


@_avoids("fsdp1_frozen_replica_loses_its_parameters")
@_of_fsdp1
def _shards_of_all_units(program: Program) -> Program:
    replicates = program.strategy == "NO_SHARD" or program.world_size == program.replicas
    return program.but(strategy="FULL_SHARD", replicas=1) if replicates and not _trains_all(program) else program


@_avoids("fsdp1_frozen_unit_that_returns_its_input_raises")
@_of_fsdp1
def _frozen_units_run_whole(program: Program) -> Program:
    if not program.frozen and not any(step.kind == "freeze" for step in program.steps):
        return program
    return program.but(steps=tuple(dataclasses.replace(step, names=()) for step in program.steps))


@_avoids("fsdp1_zero_grad_after_forward_is_missed")
@_of_fsdp1
def _zero_grad_before_forward(program: Program) -> Program:
    if program.strategy != "SHARD_GRAD_OP" or not program.original_parameters:
        return program
    return each_step(program, lambda life, step: [] if step.kind == "zero" and life.pending else [step])


@_avoids("dsd_flattened_load_by_some_ranks")
@_of_fsdp1
def _no_flattened_states(program: Program) -> Program:
    return _with_at(program, "full", lambda step: step.at == "flattened")


@_avoids("fsdp1_clip_grad_norm_refuses_float64")
@_of_fsdp1
def _no_clipping_in_double_precision(program: Program) -> Program:
    return _without(program, "clip") if "float64" in (program.dtype, *program.own_dtypes) else program


@_avoids("fsdp1_offloading_on_the_host_frees_parameters")
@_of_fsdp1
def _nothing_offloaded(program: Program) -> Program:
    return _with_at(program, "full", lambda step: step.at == "broadcast").but(offload=False)


@_avoids("fsdp1_offloaded_optim_states_are_one")
@_of_fsdp1
def _no_offloaded_optimizer_states(program: Program) -> Program:
    return _with_at(program, "full", lambda step: step.kind == "save_optimizer" and step.at == "broadcast")


@_avoids("fsdp1_second_backward_raises")
@_of_fsdp1
def _one_backward_for_each_forward(program: Program) -> Program:
    def change(life: Lifecycle, step: Step) -> list[Step]:
        if step.kind == "backward":
            return [dataclasses.replace(step, flag=False)]
        return [] if step.kind == "forward" and life.pending else [step]

    return each_step(program, change)
