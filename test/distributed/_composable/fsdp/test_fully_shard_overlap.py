"""FSDP2 overlaps its communication with compute, and different kinds of communication with each other.

Time is measured on the device. A device without streams gets virtual ones. Work on them takes no real time but adds to
a virtual time, which is exact: a missing overlap makes a step longer, and a missing wait makes it shorter.
"""

from __future__ import annotations

import contextlib
import copy
import statistics
import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.experimental import implicit_replication

from torch_fsdp_tests.common_distributed import at_most, needs, requires, requires_capability, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import (
    FSDPTest,
    check_sharded_parity,
    patch_all_gather,
    patch_all_reduce,
    patch_foreach_all_gather,
    patch_foreach_reduce,
    patch_reduce_scatter,
)
from torch_fsdp_tests.common_utils import device_sleep, get_cycles_per_ms, run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import collectives, internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.fsdp.training import shard_each
from torch_fsdp_tests.installed_torch import torch_facts

DIM = 4
LAYERS = 3

Collective = Callable[..., Any]


class VirtualStream:
    """A stream that records the time, in ms, when its work so far would be done."""

    all: weakref.WeakSet[VirtualStream] = weakref.WeakSet()
    current: VirtualStream

    def __init__(self, priority: int = 0) -> None:
        self.time = 0.0
        VirtualStream.all.add(self)

    @staticmethod
    @contextlib.contextmanager
    def made_current(stream: VirtualStream | None) -> Iterator[None]:
        """The counterpart of ``torch.cuda.stream``. None keeps the current stream."""
        before, VirtualStream.current = VirtualStream.current, stream or VirtualStream.current
        try:
            yield
        finally:
            VirtualStream.current = before

    def wait_stream(self, stream: VirtualStream) -> None:
        self.time = max(self.time, stream.time)

    def wait_event(self, event: VirtualEvent) -> None:
        self.time = max(self.time, event.time)

    def record_event(self) -> VirtualEvent:
        event = VirtualEvent()
        event.record(self)
        return event


class VirtualEvent:
    def __init__(self) -> None:
        self.time = 0.0

    def record(self, stream: VirtualStream | None = None) -> None:
        self.time = (stream or device_module().current_stream()).time


def is_virtual() -> bool:
    """Whether the device lacks streams or a sleep kernel, so that time has to be virtual."""
    return accelerator.current().lacks("streams", "sleep_kernel") is not None


def device_module() -> Any:
    return torch.get_device_module(accelerator.current().type)


@contextlib.contextmanager
def streams() -> Iterator[None]:
    """Use virtual streams within the context if the device has none."""
    with contextlib.ExitStack() as stack:
        if is_virtual():
            VirtualStream.current = VirtualStream()
            current: dict[str, Any] = {"current_stream": lambda *_: VirtualStream.current}
            kinds: dict[str, Any] = {"Stream": VirtualStream, "Event": VirtualEvent}
            kinds["stream"] = VirtualStream.made_current
            stack.enter_context(mock.patch.multiple(device_module(), **kinds, **current))
            # FSDP gets the current stream from here after an unused prefetch.
            stack.enter_context(mock.patch.multiple(torch.accelerator, **current))
        yield


def sleep(milliseconds: float) -> None:
    """Keep the current stream busy."""
    if is_virtual():
        device_module().current_stream().time += milliseconds
    else:
        kind = accelerator.current().type
        device_sleep(kind, int(milliseconds * get_cycles_per_ms(kind)))


def synchronize() -> None:
    """Wait until the work on all streams is done."""
    if is_virtual():
        latest = max(stream.time for stream in VirtualStream.all)
        for stream in VirtualStream.all:
            stream.time = latest
    else:
        device_module().synchronize()


def delayed(original: Collective, milliseconds: float, stream_of: Callable[[Any], Any] | None = None) -> Collective:
    """Delay the collective. It runs on the current stream, or on ``stream_of(group)`` with waits on both sides."""

    def late(*args: Any, **kwargs: Any) -> Any:
        if stream_of is None:
            sleep(milliseconds)
            return original(*args, **kwargs)
        current, stream = device_module().current_stream(), stream_of(kwargs.get("group"))
        stream.wait_stream(current)
        with device_module().stream(stream):
            sleep(milliseconds)
            result = original(*args, **kwargs)
        current.wait_stream(stream)
        return result

    return late


def delayed_collectives(milliseconds: float, stream_of: Callable[[Any], Any]) -> tuple[Collective, Collective]:
    """FSDP's all-gather and reduce-scatter with a delay."""
    gather, reduce = internals.all_gather(), internals.reduce_scatter()
    return delayed(gather, milliseconds, stream_of), delayed(reduce, milliseconds, stream_of)


class Matmul(torch.autograd.Function):
    """``input @ weight`` that takes ``sleep_ms`` in forward and twice that in backward."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, sleep_ms: float) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        ctx.sleep_ms = sleep_ms
        sleep(sleep_ms)
        return input @ weight

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        input, weight = ctx.saved_tensors
        sleep(2 * ctx.sleep_ms)
        return grad_output @ weight.T, input.T @ grad_output, None


class LinearWithSleep(nn.Module):
    def __init__(self, dim: int, sleep_ms: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim, dim))
        self.sleep_ms = sleep_ms

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(Matmul.apply(x, self.weight, self.sleep_ms))


overlaps = requires_capability("asynchronous_collectives")
exact_time = requires(lambda: None if is_virtual() else "time is real here, and not exact")


class OverlapTest(FSDPTest):
    """A test case that measures time on the device."""

    world_size = at_most(2)

    def _time_fn(self, fn: Callable[[], object]) -> float:
        """The time of the call on the device in ms: exact if virtual, otherwise the median of three runs."""
        times = []
        for _ in range(1 if is_virtual() else 3):
            dist.barrier()
            synchronize()
            if is_virtual():
                start = device_module().current_stream().time
                fn()
                times.append(device_module().current_stream().time - start)
            else:
                start, end = (device_module().Event(enable_timing=True) for _ in range(2))
                start.record()
                fn()
                end.record()
                synchronize()
                times.append(start.elapsed_time(end))
        return statistics.median(times)

    def _check_time(self, found: float, exactly: float, at_most: float | None = None) -> None:
        """Virtual time must equal ``exactly``. Any time, also real time, must be at most ``at_most``."""
        if is_virtual():
            self.assertEqual(found, exactly)
        if at_most is not None:
            self.assertLessEqual(found, at_most)

    def _inputs(self) -> torch.Tensor:
        torch.manual_seed(42 + self.rank + 1)
        return torch.rand((2, DIM), device=self.device)

    def _step(self, model: nn.Module) -> None:
        model(self._inputs()).sum().backward()

    def _models(self, compute_ms: float, layers: int = LAYERS, together: int = 1, **kwargs: Any) -> tuple[Any, Any]:
        """Return a plain model, and a sharded copy after one step. Each group has ``together`` one-parameter layers."""
        torch.manual_seed(42)
        ref_model = nn.Sequential(*(LinearWithSleep(DIM, compute_ms) for _ in range(layers))).to(self.device)
        for param in ref_model.parameters():
            param.data.abs_()  # with positive inputs every ReLU is active
        model = copy.deepcopy(ref_model)
        self.assertEqual([len(list(layer.parameters())) for layer in model], [1] * layers)
        groups = [[*model[first : first + together]] for first in range(0, layers, together)]
        shard_each([*(groups if together > 1 else model), model], reshard_after_forward=True, **kwargs)
        self._step(model)
        model.zero_grad()
        return ref_model, model

    def _check_gradients(self, ref_model: nn.Module, model: nn.Module) -> None:
        """Compare the gradients of a step with a plain model's. They differ if FSDP reads before a collective ends."""
        model.zero_grad()
        self._step(model)
        ref_model.zero_grad()
        self._step(ref_model)
        average_gradients(ref_model)
        synchronize()
        check_sharded_parity(self, ref_model, model)

    def _check_post_optim_event(self, **kwargs: Any) -> None:
        """With an event after the optimizer's step, the all-gather does not wait for later work."""
        compute_ms, comm_ms, iterations, slack_ms = 25, 10, 5, 4
        with streams():
            torch.manual_seed(42)
            ref_model = nn.Sequential(LinearWithSleep(DIM, compute_ms), nn.Linear(DIM, DIM)).to(self.device)
            model: Any = copy.deepcopy(ref_model)
            fully_shard(model[1], reshard_after_forward=False, **kwargs)
            optim = torch.optim.AdamW(model.parameters(), lr=1e-2)

            def train(with_event: bool) -> None:
                for _ in range(iterations):
                    self._step(model)
                    with implicit_replication():  # because of the defect optimizer_ignored_parameters_break_foreach
                        optim.step()
                    if with_event:
                        event = device_module().Event()
                        event.record()
                        model[1].set_post_optim_event(event)
                    optim.zero_grad()

            train(False)  # lazy initialization, and the optimizer's state
            gather = delayed(internals.all_gather(), comm_ms)
            with patch_all_gather(gather):
                without = self._time_fn(lambda: train(False))
                with_event = self._time_fn(lambda: train(True))
            step_ms = 3 * compute_ms
            self._check_time(without, iterations * (step_ms + comm_ms), iterations * (step_ms + comm_ms + slack_ms))
            # On a real device this is the median of three runs. The second and third begin with an event.
            self._check_time(with_event, iterations * step_ms + comm_ms, iterations * (step_ms + slack_ms) + comm_ms)
            self.assertGreater(without, with_event)


class TestFullyShardOverlap(OverlapTest):
    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_fully_shard_training_overlap(self):
        """Only the first all-gather and the last reduction add to the time of a step. Compute hides all others.

        The reference runs everything in turn. Gradients equal those of a run without delays.
        """
        compute_ms, comm_ms = 25, 10
        with streams():
            ref_model, model = self._models(compute_ms)
            stream = device_module().Stream()
            late_gather, late_reduce = delayed_collectives(comm_ms, lambda group: stream)
            shard, whole = torch.zeros(1, device=self.device), torch.zeros(self.world_size, device=self.device)

            def ref_forward() -> torch.Tensor:
                for _ in range(LAYERS):
                    late_gather(whole, shard)
                return ref_model(self._inputs())

            def ref_step() -> None:
                loss = ref_forward().sum()
                for _ in range(LAYERS):
                    late_gather(whole, shard)
                loss.backward()
                for _ in range(LAYERS):
                    late_reduce(shard, whole)

            with torch.no_grad():
                expected_forward = self._time_fn(ref_forward)
            expected_step = self._time_fn(ref_step)
            self._check_time(expected_forward, LAYERS * (comm_ms + compute_ms))
            self._check_time(expected_step, LAYERS * (3 * comm_ms + 3 * compute_ms))
            with patch_all_gather(late_gather), patch_reduce_scatter(late_reduce):
                step = self._time_fn(lambda: self._step(model))
                with torch.no_grad():
                    forward = self._time_fn(lambda: model(self._inputs()))
                self._check_time(step, 2 * comm_ms + 3 * LAYERS * compute_ms, expected_step)
                self._check_time(forward, comm_ms + LAYERS * compute_ms, expected_forward)
                self._check_gradients(ref_model, model)

    @exact_time
    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_groups_of_modules_overlap(self):
        """As with single modules, only the first all-gather and the last reduction add to the time of a step."""
        compute_ms, comm_ms, layers = 25, 10, 4
        with streams():
            ref_model, model = self._models(compute_ms, layers, together=2)
            stream = device_module().Stream()
            late_gather, late_reduce = delayed_collectives(comm_ms, lambda group: stream)
            with patch_all_gather(late_gather), patch_reduce_scatter(late_reduce):
                self._check_time(self._time_fn(lambda: self._step(model)), 2 * comm_ms + 3 * layers * compute_ms)
                self._check_gradients(ref_model, model)

    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_fully_shard_backward_comm_overlap(self):
        """If communication takes longer than compute, all-gathers and reduce-scatters overlap with each other.

        They cannot overlap on one stream, which represents one communicator.
        """
        compute_ms, comm_ms = 5, 15
        with streams():
            ref_model, model = self._models(compute_ms)
            shared, for_gathers, for_reductions = (device_module().Stream() for _ in range(3))

            def time_with(gather_stream: Any, reduce_stream: Any) -> float:
                gather = delayed(internals.all_gather(), comm_ms, gather_stream and (lambda group: gather_stream))
                reduce = delayed(internals.reduce_scatter(), comm_ms, reduce_stream and (lambda group: reduce_stream))
                with patch_all_gather(gather), patch_reduce_scatter(reduce):
                    time = self._time_fn(lambda: self._step(model))
                    self._check_gradients(ref_model, model)
                return time

            in_turn = time_with(shared, shared)
            self._check_time(in_turn, 9 * comm_ms)  # six all-gathers and three reduce-scatters hide all compute
            for own_streams in (time_with(None, None), time_with(for_gathers, for_reductions)):
                # The reduce-scatters follow without a gap after four all-gathers and the backward of the last layer.
                self._check_time(own_streams, 4 * comm_ms + 2 * compute_ms + 3 * comm_ms, in_turn)

    @needs(torch_facts.HAS_SEPARATE_REDUCE_SCATTER_GROUP)
    @skip_if_lt_x_gpu(2)
    def test_set_separate_reduce_scatter_group(self):
        """Reduce-scatters use one new group of the same ranks until it is disabled. Gradients stay bitwise the same."""
        with streams():
            (_, twin), (_, model) = self._models(0), self._models(0)
            shared = internals.group_of(model[0]).mesh_info.shard_process_group
            with mock.patch.object(dist, "new_group", wraps=dist.new_group) as new_group:
                model[0].set_separate_reduce_scatter_group(recurse=False)
                first, *others = self._reduce_scatter_groups(model)
                self.assertEqual(others, [shared] * (LAYERS - 1))
                model.set_separate_reduce_scatter_group()
                own = self._reduce_scatter_groups(model)[0]
                created = new_group.call_count
                model.set_separate_reduce_scatter_group(True)
                self.assertEqual(new_group.call_count, created)
            self.assertNotIn(shared, (first, own))
            self.assertEqual(dist.get_process_group_ranks(own), dist.get_process_group_ranks(shared))
            self._check_groups(twin, model, shared, own)
            model.set_separate_reduce_scatter_group(False)
            self._check_groups(twin, model, shared, shared)

    def _reduce_scatter_groups(self, model: nn.Module) -> list[Any]:
        return [group._reduce_scatter_process_group for group in internals.groups_of(model)]

    def _check_groups(self, twin: nn.Module, model: nn.Module, gathers_on: Any, reduces_on: Any) -> None:
        self.assertEqual(self._reduce_scatter_groups(model), [reduces_on] * LAYERS)
        self._step(twin)
        with collectives.recorded() as calls:
            self._step(model)
        self.assertEqual(set(calls.values("all_gather", "group")), {gathers_on})
        self.assertEqual(calls.values("reduce_scatter", "group"), [reduces_on] * LAYERS)
        for param, twin_param in zip(model.parameters(), twin.parameters()):
            self.assertTrue(torch.equal(param.grad.to_local(), twin_param.grad.to_local()))

    @needs(torch_facts.HAS_SEPARATE_REDUCE_SCATTER_GROUP)
    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_separate_reduce_scatter_group_overlap(self):
        """With a separate group, reduce-scatters do not wait for all-gathers.

        A communicator runs one collective at a time, so each group's delayed collectives run on one stream.
        """
        compute_ms, comm_ms = 5, 15
        with streams():
            ref_model, model = self._models(compute_ms)
            of_group: dict[Any, Any] = {}

            def stream_of(group: Any) -> Any:
                return of_group.setdefault(group, device_module().Stream())

            gather, reduce = delayed_collectives(comm_ms, stream_of)
            times = []
            for separate in (False, True, False):
                model.set_separate_reduce_scatter_group(separate)
                with patch_all_gather(gather), patch_reduce_scatter(reduce):
                    times.append(self._time_fn(lambda: self._step(model)))
                    self._check_gradients(ref_model, model)
            self._check_time(times[0], 9 * comm_ms)
            self._check_time(times[1], 7 * comm_ms + 2 * compute_ms, times[0])
            self._check_time(times[2], 9 * comm_ms)

    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_fully_shard_post_optim_event_overlap(self):
        self._check_post_optim_event()

    @skip_if_lt_x_gpu(2)
    def test_offload_post_accumulate_grad_hook_sees_reduced_grad(self):
        """With offloaded gradients, a post-accumulate-grad hook sees the average over ranks, on the CPU."""
        torch.manual_seed(42)
        ref_model = nn.Sequential(*(nn.Linear(DIM, DIM) for _ in range(LAYERS))).to(self.device)
        model = copy.deepcopy(ref_model)
        shard_each([*model, model], offload_policy=CPUOffloadPolicy())
        seen = {}
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda param, name=name: seen.update({name: param.grad.to_local() * 1})
            )
        self._step(model)
        self._step(ref_model)
        average_gradients(ref_model)
        expected = {name: param.grad.chunk(self.world_size)[self.rank] for name, param in ref_model.named_parameters()}
        self.assertEqual({grad.device.type for grad in seen.values()}, {"cpu"})
        with torch_defect("fsdp2_hooks_read_offloaded_gradients_too_early", sometimes=True):
            self.assertEqual(seen, {name: grad.cpu() for name, grad in expected.items()})

    @exact_time
    @skip_if_lt_x_gpu(2)
    def test_gathered_buffers_are_freed_in_time(self):
        """An all-gather waits for its copy-in. The copy-in waits for the copy-out two buffers earlier.

        The layers compute for 25 ms. The delay of a copy-in is in the allocation of its buffer.
        """
        copy_in_ms, comm_ms = 3, 10
        started: list[float] = []

        class LateGather(internals.fsdp2_collectives.DefaultAllGather):
            def allocate(self, *args: Any, **kwargs: Any) -> torch.Tensor:
                sleep(copy_in_ms)
                return super().allocate(*args, **kwargs)

            def __call__(self, *args: Any, **kwargs: Any) -> Any:
                started.append(device_module().current_stream().time - start)
                sleep(comm_ms)
                return super().__call__(*args, **kwargs)

        with streams():
            _, model = self._models(25, layers=4)
            for layer in model:
                layer.set_custom_all_gather(LateGather())
            for _ in range(2):
                synchronize()
                start = device_module().current_stream().time
                with torch.no_grad():
                    model(self._inputs())
                # The fourth copy-in begins at 38, when the second layer needs its all-gather and copies it out.
                self.assertEqual(started, [3, 13, 23, 38 + copy_in_ms])
                started.clear()

    @exact_time
    @skip_if_lt_x_gpu(2)
    @subtests(cap=lambda: [None, 1, 2, 3] if torch_facts.LIMITS_REDUCE_SCATTER_INPUT_BUFFERS else [None])
    def test_reduced_buffers_are_freed_in_time(self, cap):
        """A gradient's copy-in waits if all buffers are still being reduced, and only then.

        Each layer's backward takes 10 ms and its reduction 15. The third layer could begin after 20 ms. With one buffer
        it waits for the first reduction, which is done after 25. With two buffers it does not wait.
        """
        reduce = delayed(internals.reduce_scatter(), 15)
        backward = Matmul.backward
        started: list[float] = []

        def recorded(ctx: Any, grad: torch.Tensor) -> Any:
            started.append(device_module().current_stream().time)
            return backward(ctx, grad)

        with streams():
            _, model = self._models(0)
            for layer in model:
                layer.sleep_ms = 5
            if cap is not None:
                model.set_reduce_scatter_max_input_buffers(cap)
                internals.state_of(model)._init_shared_state()  # otherwise only the first forward does this
            with patch_reduce_scatter(reduce), mock.patch.object(Matmul, "backward", staticmethod(recorded)):
                for _ in range(2):
                    synchronize()
                    self._step(model)
                    times = [time - started[0] for time in started]
                    self.assertEqual(times, [0, 10, 25 if cap in (None, 1) else 20])
                    # The reductions run in turn, and the backward waits for all of them.
                    self.assertEqual(device_module().current_stream().time - started[0], 10 + 3 * 15)
                    started.clear()

    @requires(lambda: None if is_virtual() else "streams are real here, and cannot be mocked")
    @skip_if_lt_x_gpu(2)
    def test_post_optim_event_is_waited_for_once(self):
        """The all-gather streams wait once for the event, or for the current stream without one."""
        with streams():
            _, model = self._models(0)
            context = internals.iteration_context(model)
            names = ("all_gather_copy_in_stream", "all_gather_stream")
            for event in (None, VirtualEvent(), None, VirtualEvent(), VirtualEvent()):
                if event is not None:
                    model.set_post_optim_event(event)
                mocks = {name: mock.MagicMock(**{"record_event.return_value": VirtualEvent()}) for name in names}
                with mock.patch.multiple(internals.comm_context(model), **mocks), torch.no_grad():
                    model(self._inputs())
                for_current = mock.call.wait_stream(device_module().current_stream())
                first = for_current if event is None else mock.call.wait_event(event)
                for stream in mocks.values():
                    self.assertEqual(stream.mock_calls[0], first)
                    self.assertEqual(stream.mock_calls.count(first), 1)
                    self.assertEqual(stream.mock_calls.count(for_current), 1 if event is None else 0)
                self.assertIsNone(context.post_optim_event)

    @skip_if_lt_x_gpu(2)
    def test_host_order(self):
        """The CPU issues each all-gather before the compute that hides it, in backward one layer ahead."""
        with streams():
            _, model = self._models(0)
            events: list[str] = []

            def gather(fsdp_params: Any, *args: Any, **kwargs: Any) -> Any:
                events.append(f"gather {fsdp_params[0]._param_fqn[0]}")
                return internals.fsdp2_collectives.foreach_all_gather(fsdp_params, *args, **kwargs)

            def reduce(fsdp_params: Any, *args: Any, **kwargs: Any) -> Any:
                events.append(f"reduce {fsdp_params[0]._param_fqn[0]}")
                return internals.fsdp2_collectives.foreach_reduce(fsdp_params, *args, **kwargs)

            for index, layer in enumerate(model):
                layer.register_forward_hook(lambda *_, index=index: events.append(f"forward {index}"))
            backward = Matmul.backward
            order = iter("210" * 2)

            def recorded(ctx: Any, grad: torch.Tensor) -> Any:
                grads = backward(ctx, grad)
                events.append(f"backward {next(order)}")
                return grads

            with (
                patch_foreach_all_gather(gather),
                patch_foreach_reduce(reduce),
                mock.patch.object(Matmul, "backward", staticmethod(recorded)),
            ):
                for _ in range(2):
                    output = model(self._inputs())
                    self.assertEqual(events, [f"{what} {i}" for i in range(LAYERS) for what in ("gather", "forward")])
                    events.clear()
                    output.sum().backward()
                    expected = "gather 2, gather 1, backward 2, reduce 2, gather 0, backward 1, reduce 1, backward 0"
                    self.assertEqual(events, [*expected.split(", "), "reduce 0"])
                    events.clear()


class TestFullyShardHSDPStreamBehavior(OverlapTest):
    world_size = 4

    def _hsdp_models(self, compute_ms: float, **kwargs: Any) -> tuple[Any, Any]:
        return self._models(compute_ms, mesh=self._hsdp_mesh(), **kwargs)

    def _hsdp_mesh(self) -> DeviceMesh:
        return init_device_mesh(accelerator.current().type, (2, 2), mesh_dim_names=("replicate", "shard"))

    def _time_step(self, model: nn.Module, reduce_ms: float = 0, all_reduce_ms: float = 0) -> float:
        """The time of a step with delays of reduce-scatters and all-reduces, which run on streams of their own."""
        for_shards, for_replicas = (device_module().Stream() for _ in range(2))
        reduce = delayed(internals.reduce_scatter(), reduce_ms, lambda group: for_shards)
        all_reduce = delayed(dist.all_reduce, all_reduce_ms, lambda group: for_replicas)
        with patch_reduce_scatter(reduce), patch_all_reduce(all_reduce):
            return self._time_fn(lambda: self._step(model))

    @exact_time
    @skip_if_lt_x_gpu(4)
    def test_all_reduce_waits_on_reduce_scatter(self):
        """Compute hides all reductions but the last reduce-scatter and the all-reduce after it."""
        compute_ms, reduce_ms, all_reduce_ms = 25, 15, 10
        with streams():
            ref_model, model = self._hsdp_models(compute_ms)
            time = self._time_step(model, reduce_ms, all_reduce_ms)
            self._check_time(time, 3 * LAYERS * compute_ms + reduce_ms + all_reduce_ms)
            self._check_gradients(ref_model, model)

    @overlaps
    @skip_if_lt_x_gpu(4)
    def test_all_reduces_pipelined_across_layers(self):
        """All-reduces run in turn. They overlap with compute and all-gathers, and do not change gradients."""
        policy = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)
        with streams():
            (_, twin), (_, model) = (self._hsdp_models(1, mp_policy=policy) for _ in range(2))
            late = delayed(dist.all_reduce, 15)
            for _ in range(2):
                self._step(twin)
                with patch_all_reduce(late):
                    if is_virtual():
                        self._check_time(self._time_fn(lambda: self._step(model)), 3 + 2 + 3 * 15)
                    else:
                        self._step(model)
                        synchronize()
                for param, twin_param in zip(model.parameters(), twin.parameters()):
                    self.assertTrue(torch.equal(param.grad.to_local(), twin_param.grad.to_local()))
                    self.assertGreater(param.grad.to_local().abs().max().item(), 0)

    @exact_time
    @skip_if_lt_x_gpu(4)
    def test_set_requires_all_reduce_skips_ar_keeps_rs(self):
        """Without all-reduces, a step takes as long as its reduce-scatters in turn, after the first backward."""
        compute_ms, comm_ms = 5, 40
        with streams():
            _, model = self._hsdp_models(compute_ms)
            model.set_requires_all_reduce(False)
            before = (LAYERS + 2) * compute_ms
            self._check_time(self._time_step(model, all_reduce_ms=comm_ms), 3 * LAYERS * compute_ms)
            self._check_time(self._time_step(model, reduce_ms=comm_ms), before + LAYERS * comm_ms)

    @exact_time
    @skip_if_lt_x_gpu(4)
    def test_finalize_backward_syncs_default_stream_with_comm(self):
        """After backward, the current stream waits for all reductions, and there are no later ones."""
        with streams():
            _, model = self._hsdp_models(5)
            for delays in ((50, 0), (0, 50), (50, 50)):
                self._time_step(model, *delays)
                current = device_module().current_stream().time
                self.assertEqual(current, max(stream.time for stream in VirtualStream.all))

    @exact_time
    @skip_if_lt_x_gpu(4)
    def test_ar_and_rs_overlap_across_layers(self):
        """The all-reduce of a layer runs at the same time as the reduce-scatter of the next one."""
        compute_ms, comm_ms = 5, 50
        with streams():
            ref_model, model = self._hsdp_models(compute_ms)
            time = self._time_step(model, comm_ms, comm_ms)
            self._check_time(time, (LAYERS + 2) * compute_ms + (LAYERS + 1) * comm_ms)
            self._check_gradients(ref_model, model)

    @exact_time
    @skip_if_lt_x_gpu(4)
    def test_hsdp_training_overlap(self):
        """Only the first all-gather and the last reduce-scatter add to the time of a step, as without replicas."""
        compute_ms, comm_ms = 25, 10
        with streams():
            ref_model, model = self._hsdp_models(compute_ms)
            stream = device_module().Stream()
            gather, reduce = delayed_collectives(comm_ms, lambda group: stream)
            with patch_all_gather(gather), patch_reduce_scatter(reduce):
                time = self._time_fn(lambda: self._step(model))
                self._check_time(time, 2 * comm_ms + 3 * LAYERS * compute_ms)
                self._check_gradients(ref_model, model)

    @overlaps
    @skip_if_lt_x_gpu(4)
    def test_hsdp_post_optim_event_overlap(self):
        self._check_post_optim_event(mesh=self._hsdp_mesh())


class TwoWeights(LinearWithSleep):
    """A layer with two weights, of which the second may be sharded over another mesh."""

    def __init__(self, dim: int, sleep_ms: float) -> None:
        super().__init__(dim, sleep_ms)
        self.other = nn.Parameter(torch.randn(dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(Matmul.apply(x, self.weight + self.other, self.sleep_ms))


class Residual(nn.Sequential):
    """Layers whose inputs need no gradient, so FSDP reduces their gradients at the end of backward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = x + layer(x.detach())
        return x


@needs(torch_facts.HAS_MESH_PER_PARAMETER)
class TestFullyShardPerParamMeshOverlap(OverlapTest):
    """The reductions of one layer over two meshes run at the same time. Each layer waits for those of the previous."""

    def _late(self, milliseconds: float) -> Callable[..., Any]:
        """FSDP's reduction of a group that ends later, with one stream for each process group."""
        original = internals.fsdp2_param_group.foreach_reduce
        streams_of: dict[Any, Any] = {}

        def late(params: Any, grads: Any, group: Any, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
            reduced, event, *others = original(params, grads, group, *args, **kwargs)
            stream = streams_of.setdefault(group, device_module().Stream())
            stream.wait_event(event)
            with device_module().stream(stream):
                sleep(milliseconds)
                return reduced, stream.record_event(), *others

        return late

    def _check_overlap(self, model: nn.Sequential, exactly: float, at_most: float, comm_ms: float) -> None:
        model.to(self.device)
        other = internals.fsdp2_common.FSDPMeshInfo(
            DeviceMesh.from_group(dist.new_group(), self.device.type), shard_mesh_dim=0
        )
        result = internals.fsdp2_common.ShardPlacementResult(Shard(0), other)
        others = {layer.other for layer in model}
        for layer in model:
            fully_shard(layer, shard_placement_fn=lambda param: result if param in others else None)
        fully_shard(model)
        self._step(model)
        with patch_foreach_reduce(self._late(comm_ms)):
            self._check_time(self._time_fn(lambda: self._step(model)), exactly, at_most)

    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_fully_shard_per_param_mesh_training_overlap(self):
        compute_ms, comm_ms = 5, 40
        with streams():
            model = nn.Sequential(*(TwoWeights(DIM, compute_ms) for _ in range(LAYERS)))
            # Forward and the backward of the last layer come before the first reduction.
            before, in_turn = (LAYERS + 2) * compute_ms, LAYERS * comm_ms
            self._check_overlap(model, before + in_turn, before + 1.5 * in_turn, comm_ms)

    @overlaps
    @skip_if_lt_x_gpu(2)
    def test_fully_shard_per_param_mesh_no_grad_input_overlap(self):
        """The same holds for reductions at the end of backward."""
        compute_ms, comm_ms = 5, 40
        with streams():
            model = Residual(*(TwoWeights(DIM, compute_ms) for _ in range(LAYERS)))
            before, in_turn = 3 * LAYERS * compute_ms, LAYERS * comm_ms
            self._check_overlap(model, before + in_turn, before + 1.5 * in_turn, comm_ms)


if __name__ == "__main__":
    run_tests()
