"""``FSDPMemTracker`` accounts for every byte of FSDP2, by category and phase. Each number here is calculated by hand.

The tracker counts storages by weak references, so its numbers are exact on any device. The tests thus also measure
FSDP2's own memory behavior: if a module is not resharded, or a buffer is kept, a number is wrong. The collectives are
fake, because those of a backend may hold a tensor for a moment longer. Their results do not matter here.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from torch_fsdp_tests.common_distributed import needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest
from torch_fsdp_tests.common_utils import manual_seed, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import bytes_of
from torch_fsdp_tests.fsdp.training import Loop, TrainingMixin, optimizers, replicate_each, shard_each, train
from torch_fsdp_tests.installed_torch import torch_facts

# With this size every storage is a multiple of 512 bytes, including those of halves of biases and of 16-bit biases.
# On some devices this is the smallest allocation, to which the tracker rounds up.
DIM = 256
BLOCKS = 3
BATCH = 4
BYTES = 4  # of one float32 element
BLOCK = 2 * 4 * DIM * DIM + 5 * DIM  # elements of an MLP
REST = DIM * DIM + DIM  # elements of the layer that only the root manages
PARAMETERS = 4 * BLOCKS + 2

# The categories that FSDP itself allocates, by the tracker's names. The rest belongs to the model, or to autograd.
OURS = ("Unsharded Param", "All Gather", "Unsharded Grad", "Reduce Scatter", "Sharded Grad")

Bytes = dict[str, int]


def by_category(snapshot: Mapping[torch.device, Mapping[Any, int]], names: Iterable[str] | None = None) -> Bytes:
    """Sum the bytes of each category over all devices, for these ``names``, or for all that are not empty."""
    found: dict[str, int] = {}
    for of_device in snapshot.values():
        for category, nbytes in of_device.items():
            name = getattr(category, "value", category)
            found[name] = found.get(name, 0) + nbytes
    found.pop("Total", None)
    if names is None:
        return {name: nbytes for name, nbytes in found.items() if nbytes}
    return {name: found.get(name, 0) for name in names}


class Totals(TorchDispatchMode):
    """Notes the bytes that a tracker has counted on a device after each operator. Entered after the tracker."""

    def __init__(self, tracker: Any, device: torch.device) -> None:
        super().__init__()
        self._tracker, self._device, self.seen = tracker, device, list[int]()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        self.seen.append(self._tracker.get_tracker_snapshot()[self._device]["Total"])
        return result


class TrackerTest(TrainingMixin, FSDPTest):
    world_size = 2
    fake_pg = True

    def _plain(self, bias: bool = True) -> nn.Sequential:
        manual_seed(42)
        return nn.Sequential(*(MLP(DIM, bias=bias) for _ in range(BLOCKS)), nn.Linear(DIM, DIM)).to(self.device)

    def _sharded(self, **kwargs: Any) -> Any:
        """Return a model of equal blocks, each an FSDP module, and a layer that belongs to the root."""
        model = self._plain()
        return shard_each([*model[:BLOCKS], model], **kwargs)

    def _tracker(self, model: nn.Module, optim: torch.optim.Optimizer | None = None) -> Any:
        return internals.fsdp2_memory.FSDPMemTracker(model, optim)

    def _input(self, tracker: Any = None) -> torch.Tensor:
        """Return an input that requires a gradient, so that also the first module's post-backward runs in its turn.

        The tracker counts inputs separately. It keeps each input alive, so a test uses one for all iterations.
        """
        inp = self._inputs(BATCH, DIM, requires_grad=True)
        if tracker is not None:
            tracker.track_inputs((inp,))
        return inp

    def _train(self, model: nn.Module, inp: torch.Tensor) -> None:
        """Compute gradients of the parameters, and drop that of the input."""
        train(model, inp)
        inp.grad = None

    def _now(self, tracker: Any, *names: str) -> Bytes:
        """The bytes of these categories now, or of all that are not empty, without the inputs."""
        found = by_category(tracker.get_tracker_snapshot(), names or None)
        found.pop("Inputs", None)
        return found

    def _phases(self, tracker: Any, names: tuple[str, ...] = OURS) -> dict[tuple[str, str], list[Bytes]]:
        """The bytes in each phase of each FSDP module, in order. The root's name is empty."""
        return {
            (stats.mod_fqn.partition(".")[2], phase.value): [by_category(each, names) for each in snapshots]
            for stats in tracker.memory_tracking.values()
            for phase, snapshots in stats.snapshots.items()
        }

    def _check_phases(self, tracker: Any, reshards: bool, param_size: int = BYTES) -> None:
        """Each phase must occur once, with the bytes that are calculated by hand."""
        found = self._phases(tracker)
        for key, expected in expected_phases(reshards, param_size).items():
            (bytes_found,) = found[key]
            if key[1] == "After Post-Backward":  # a variable of the tracker keeps one gradient
                bytes_found["Unsharded Grad"] = 0
            self.assertEqual(bytes_found, expected, msg=f"{key}, {reshards=}, {param_size=}")


def expected_phases(reshards: bool, param_size: int = BYTES, reduce_size: int = BYTES) -> dict[tuple[str, str], Bytes]:
    """The bytes that FSDP has allocated in the phases of a forward and a backward. The sizes are bytes per element.

    In addition to the root's layer, forward keeps one block unsharded at a time. If nothing is resharded, it keeps all
    blocks that have run. The output of an all-gather is freed after the next one was copied out. Backward prefetches
    one block, and keeps the input of one reduce-scatter.
    """
    rest, block = REST * param_size, BLOCK * param_size
    units = [str(index) for index in range(BLOCKS)]
    unsharded = gathered = grad = reduced = sharded = 0
    expected: dict[tuple[str, str], Bytes] = {}

    def reach(unit: str, *phases: str) -> None:
        now = dict(zip(OURS, (unsharded, gathered, grad, reduced, sharded)))
        expected.update({(unit, phase): now for phase in phases})

    reach("", "Before Pre-Forward")
    unsharded = gathered = rest
    reach("", "After Pre-Forward")
    for unit in units:
        reach(unit, "Before Pre-Forward")
        unsharded, gathered = unsharded + block, block
        reach(unit, "After Pre-Forward", "Before Post-Forward")
        unsharded -= block if reshards else 0
        reach(unit, "After Post-Forward")
    reach("", "Before Post-Forward")
    unsharded, gathered = 0 if reshards else unsharded, 0
    reach("", "After Post-Forward", "Before Pre-Backward")
    if reshards:
        unsharded, gathered = rest, block
    reach("", "After Pre-Backward")
    for unit in reversed(units):
        reach(unit, "Before Pre-Backward")
        unsharded += block if reshards else 0
        gathered = 0 if unit == units[0] else gathered
        reach(unit, "After Pre-Backward")
        grad = block
        reach(unit, "Before Post-Backward")
        unsharded, grad, reduced, sharded = unsharded - block, 0, BLOCK * reduce_size, sharded + BYTES * BLOCK // 2
        reach(unit, "After Post-Backward")
    grad = rest
    reach("", "Before Post-Backward")
    unsharded, grad, reduced, sharded = 0, 0, REST * reduce_size, sharded + BYTES * REST // 2
    reach("", "After Post-Backward")
    return expected


class TestTrackerFullyShard1DTrainingCore(TrackerTest):
    @skip_if_lt_x_gpu(2)
    @subtests(pairwise=True, reshard_after_forward=[True, False], offload=[False, True], low_precision=[False, True])
    def test_tracker_multi_group_eager(self, reshard_after_forward, offload, low_precision):
        """Each phase has the expected bytes. After a step only shards, sharded gradients and states are left."""
        policy = MixedPrecisionPolicy(torch.float16, torch.float32) if low_precision else MixedPrecisionPolicy()
        model = self._sharded(
            reshard_after_forward=reshard_after_forward,
            mp_policy=policy,
            offload_policy=CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy(),
        )
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        shards = BYTES * (BLOCKS * BLOCK + REST) // 2
        states = 2 * shards + PARAMETERS * BYTES  # and a step count for each parameter
        tracker = self._tracker(model, optim)
        inp = self._input(tracker)
        with tracker:
            for iteration in range(2):
                optim.zero_grad()
                self.assertEqual(
                    self._now(tracker),
                    {"Sharded Param": shards} | ({"OptState": states} if iteration else {}),
                )
                self._train(model, inp)
                optim.step()
                self.assertEqual(
                    self._now(tracker),
                    {"Sharded Param": shards, "Sharded Grad": shards, "OptState": states},
                )
                self._check_phases(tracker, reshard_after_forward, 2 if low_precision else BYTES)
                tracker.reset_mod_stats()
            on_devices = tracker.get_tracker_snapshot()
        where = {device.type for device, found in on_devices.items() if found[tracker._ref_class.SHARDED_PARAM]}
        self.assertEqual(where, {"cpu" if offload else self.device.type})  # the CPU is the subject

    @skip_if_lt_x_gpu(2)
    def test_tracker_non_root_forward_backward(self):
        """If only the first child runs, only its bytes change. As a root it does not reshard after forward."""
        model = self._sharded()
        tracker = self._tracker(model)
        inp = self._input(tracker)
        block = BYTES * BLOCK
        shards = BYTES * (BLOCKS * BLOCK + REST) // 2
        with tracker:
            for _ in range(2):
                self._train(model[0], inp)
                self.assertEqual(self._now(tracker), {"Sharded Param": shards, "Sharded Grad": block // 2})
                actual = self._phases(tracker)
                self.assertEqual({name for name, _ in actual}, {""})
                for phase, unsharded, gathered, grad in (
                    ("Before Pre-Forward", 0, 0, 0),
                    ("After Pre-Forward", block, block, 0),
                    ("After Post-Forward", block, 0, 0),
                    ("After Pre-Backward", block, 0, 0),
                    ("Before Post-Backward", block, 0, block),
                ):
                    self.assertEqual(actual["", phase], [dict(zip(OURS, (unsharded, gathered, grad, 0, 0)))], msg=phase)
                model.zero_grad()
                tracker.reset_mod_stats()

    @skip_if_lt_x_gpu(2)
    @subtests(rows=[4, 5, 1])
    def test_uneven_shards(self, rows):
        """Shards of parameters and gradients are padded to the size of the largest shard, optimizer states are not."""
        model = nn.Linear(DIM, rows, bias=False, device=self.device)
        shard_each([model])
        internals.initialize_lazily(model)  # older versions of PyTorch allocate the padding again
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        row = DIM * BYTES
        padded = math.ceil(rows / 2) * row
        grad_row = row * len(range(rows)[self.rank * math.ceil(rows / 2) :][: math.ceil(rows / 2)])
        tracker = self._tracker(model, optim)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
            self.assertEqual(
                self._now(tracker, "Sharded Param", "Sharded Grad"), {"Sharded Param": padded, "Sharded Grad": padded}
            )
            optim.step()
            self.assertEqual(self._now(tracker, "OptState"), {"OptState": 2 * grad_row + BYTES})
        (gathered,) = self._phases(tracker)["", "After Pre-Forward"]
        self.assertEqual(gathered["Unsharded Param"], rows * row if rows % 2 == 0 else 2 * padded)
        self.assertEqual(gathered["All Gather"], 2 * padded)

    @skip_if_lt_x_gpu(2)
    def test_same_bytes_in_later_steps(self):
        """In the fifth step every phase has the bytes of the second, and the peak does not grow."""
        model = self._sharded()
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        tracker = self._tracker(model, optim)
        inp = self._input(tracker)
        everything = (*OURS, "Sharded Param", "Activation", "Temp", "OptState", "Buffer")
        seen: list[Any] = []
        with tracker:
            for _ in range(5):
                optim.zero_grad()
                self._train(model, inp)
                optim.step()
                seen.append(
                    (self._phases(tracker, everything), tracker.get_tracker_snapshot("peak"), self._now(tracker))
                )
                tracker.reset_mod_stats()
        self.assertEqual(seen[4], seen[1])
        self.assertEqual(len(seen[1][0]), 10 * (BLOCKS + 1))  # eight phases and two peaks of each module

    @needs(torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS)
    @skip_if_lt_x_gpu(2)
    @subtests(most=[1, 2, 3, 10])
    def test_reduce_scatter_buffers(self, most):
        """At most the set number of reduce-scatter inputs is kept in backward, and none after it."""
        model = self._sharded()
        model.set_reduce_scatter_max_input_buffers(most)
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
            self.assertEqual(self._now(tracker, "Reduce Scatter"), {"Reduce Scatter": 0})
        actual = self._phases(tracker)
        kept: list[int] = []
        for name, size in (*((str(index), BLOCK) for index in reversed(range(BLOCKS))), ("", REST)):
            kept = [*kept, size * BYTES][-most:]
            self.assertEqual(actual[name, "After Post-Backward"][0]["Reduce Scatter"], sum(kept), msg=name)

    @skip_if_lt_x_gpu(2)
    def test_frozen_parameters(self):
        """Frozen parameters are all-gathered like others, and have no gradient bytes."""
        model = self._plain()
        for block in model[:BLOCKS]:
            block.in_proj.requires_grad_(False)
        shard_each([*model[:BLOCKS], model])
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
            trained = BYTES * (4 * DIM * DIM + DIM)
            sharded = (BLOCKS * trained + BYTES * REST) // 2
            self.assertEqual(self._now(tracker, "Sharded Grad"), {"Sharded Grad": sharded})
        actual = self._phases(tracker)
        for index in range(BLOCKS):
            self.assertEqual(actual[f"{index}", "After Pre-Forward"][0]["All Gather"], BYTES * BLOCK)
            self.assertEqual(actual[f"{index}", "Before Post-Backward"][0]["Unsharded Grad"], trained)
            self.assertEqual(actual[f"{index}", "After Post-Backward"][0]["Reduce Scatter"], trained)

    @skip_if_lt_x_gpu(2)
    @subtests(low_precision=[False, True])
    def test_accumulation(self, low_precision):
        """Without gradient sync, one copy of the unsharded gradients is kept, in the dtype of the reduction."""
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if low_precision else MixedPrecisionPolicy()
        model = self._sharded(mp_policy=policy)
        whole = BYTES * (BLOCKS * BLOCK + REST)
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            for _ in range(3):
                model.set_requires_gradient_sync(False)
                self._train(model, inp)
                held = self._now(tracker)
                shards = held.pop("Sharded Param")
                self.assertEqual(shards, whole // 2)
                if low_precision:  # older versions of PyTorch cast them, and then the tracker calls them temporary
                    held = {"Unsharded Grad": sum(held.values())}
                self.assertEqual(held, {"Unsharded Grad": whole})
                tracker.reset_mod_stats()
            model.set_requires_gradient_sync(True)
            self._train(model, inp)
            self.assertEqual(self._now(tracker), {"Sharded Param": whole // 2, "Sharded Grad": whole // 2})

    @needs(torch_facts.REPLICATES_WITHOUT_SHARDS)
    @skip_if_lt_x_gpu(2)
    def test_replicate(self):
        """``replicate`` keeps full parameters and gradients, and a copy of the parameters from forward to backward."""
        model = self._plain()
        replicate_each([*model[:BLOCKS], model])
        whole = BYTES * (BLOCKS * BLOCK + REST)
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
            self.assertEqual(self._now(tracker), {"Sharded Param": whole, "Sharded Grad": whole})
        actual = self._phases(tracker)
        for index in range(BLOCKS):
            copies = BYTES * ((index + 1) * BLOCK + REST)
            self.assertEqual(actual[f"{index}", "After Post-Forward"], [dict(zip(OURS, (copies, 0, 0, 0, 0)))])
            self.assertEqual(actual[f"{index}", "Before Post-Backward"][0]["All Gather"], 0)
            self.assertEqual(actual[f"{index}", "After Post-Backward"][0]["Reduce Scatter"], 0)
        self.assertEqual(actual["", "After Post-Backward"][0]["Unsharded Param"], 0)

    @skip_if_lt_x_gpu(2)
    def test_agrees_with_storages(self):
        """The tracker counts the same bytes for shards and gradients as the tensors' storages hold."""
        model = self._sharded()
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
            actual = self._now(tracker, "Sharded Param", "Sharded Grad")
        params = [param.to_local() for param in model.parameters()]
        grads = [param.grad.to_local() for param in model.parameters()]
        self.assertEqual(actual, {"Sharded Param": bytes_of(params), "Sharded Grad": bytes_of(grads)})

    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False])
    def test_peak_is_the_largest_sum(self, reshard_after_forward):
        """The peak is the snapshot with the most bytes, of those after each operator of a training step."""
        model = self._sharded(reshard_after_forward=reshard_after_forward)
        tracker = self._tracker(model, torch.optim.Adam(model.parameters(), lr=1e-2))
        inp = self._input(tracker)
        with tracker, Totals(tracker, self.device) as totals:
            self._train(model, inp)
        peak = tracker.get_tracker_snapshot("peak")[self.device]
        self.assertEqual(peak["Total"], max(totals.seen))
        self.assertEqual(peak["Total"], sum(nbytes for name, nbytes in peak.items() if name != "Total"))
        kept, shards = BLOCKS * BLOCK + REST, (BLOCKS * BLOCK + REST) // 2
        unsharded = 2 * BLOCK + REST if reshard_after_forward else kept
        self.assertGreater(peak["Total"], BYTES * (shards + unsharded))

    @skip_if_lt_x_gpu(2)
    def test_second_iteration_without_reset(self):
        """The tracker raises if the root runs a second time without ``reset_mod_stats``."""
        model = self._sharded()
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
            with self.assertRaisesRegex(NotImplementedError, "reset_mod_stats"):
                model(inp)

    @skip_if_lt_x_gpu(2)
    def test_model_without_fsdp(self):
        """A model without any FSDP module is rejected."""
        with self.assertRaises(AssertionError):
            self._tracker(self._plain())

    @skip_if_lt_x_gpu(2)
    def test_group_of_modules(self):
        """A model with a group of modules is tracked, and then trains as before."""
        model = self._plain()
        shard_each([[model[0], model[1]], model])
        inp = self._input()
        train(model, inp)
        self.assertTrue(all(param.grad is not None for param in model.parameters()))
        with torch_defect("fsdp2_memory_tracker_breaks_groups"):
            with self._tracker(model):
                train(model, inp)
            for _ in range(2):
                model.zero_grad()
                train(model, inp)
                self.assertTrue(all(param.grad is not None for param in model.parameters()))


class TestTrackerFullyShard1DTrainingCompose(TrackerTest):
    @skip_if_lt_x_gpu(2)
    @subtests(reshard_after_forward=[True, False], checkpoint_impl=["composable", "wrapper", None])
    def test_tracker_with_activation_checkpointing(self, reshard_after_forward, checkpoint_impl):
        """A block keeps its output for backward, and without activation checkpointing also its hidden activation.

        FSDP allocates the same bytes in the phases that exist without checkpointing.
        """
        model = self._plain()
        if checkpoint_impl == "wrapper":
            internals.checkpoint_wrapping.apply_activation_checkpointing(
                model, check_fn=lambda module: isinstance(module, MLP)
            )
        elif checkpoint_impl == "composable":
            for block in model[:BLOCKS]:
                internals.composable.checkpoint(block)
        shard_each([*model[:BLOCKS], model], reshard_after_forward=reshard_after_forward)
        tracker = self._tracker(model)
        inp = self._input(tracker)
        with tracker:
            self._train(model, inp)
        found = self._phases(tracker, ("Activation", *OURS))
        output, hidden = (BYTES * BATCH * width for width in (DIM, 4 * DIM))
        per_block = output if checkpoint_impl else output + hidden
        for index in range(BLOCKS):
            (after,) = found[f"{index}", "After Post-Forward"]
            self.assertEqual(after["Activation"], (index + 1) * per_block)
        self._check_phases(tracker, reshard_after_forward)
        # The wrapper is inside the FSDP module, so the hooks of that module do not see the recomputation.
        recomputed = sorted(name for name, phase in found if phase == "Pre-Forward AC")
        self.assertEqual(
            recomputed,
            [str(index) for index in range(BLOCKS)] if checkpoint_impl == "composable" else [],
            may_be="empty",
        )


class TestTrackerInTraining(TrackerTest):
    fake_pg = False

    @skip_if_lt_x_gpu(2)
    def test_training_is_not_changed(self):
        """Under the tracker, and after it, a model trains the same as without it."""
        ref_model, model = self._plain(), self._sharded()

        def step(each: nn.Module, inp: torch.Tensor) -> torch.Tensor:
            tracked = each is model and next(turns)
            if not tracked:
                return train(each, inp)
            with self._tracker(model):
                return train(each, inp)

        turns = itertools.cycle([False, True])
        resize = torch.UntypedStorage.resize_
        methods = [(group.pre_backward, group.post_backward) for group in internals.groups_of(model)]
        self._check_training(
            ref_model,
            model,
            functools.partial(self._inputs, BATCH, DIM),
            Loop(step=step),
            optims=optimizers(ref_model, model, cls=torch.optim.Adam),
        )
        self.assertIs(torch.UntypedStorage.resize_, resize)
        actual = [(group.pre_backward, group.post_backward) for group in internals.groups_of(model)]
        self.assertEqual(actual, methods)


if __name__ == "__main__":
    run_tests()
