"""FSDP1 issues all-gathers before the computation that they overlap with, and nothing waits for them early.

The order of all-gathers and computation is checked on every device. Real time savings can only be measured on devices
with streams and a kernel that keeps the device busy.
"""

from __future__ import annotations

import functools
import itertools
from contextlib import AbstractContextManager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import device_sleep, get_cycles_per_ms, host_time, run_tests
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.installed_torch import torch_facts, torch_names

limiter = torch_names.module("torch.distributed.fsdp._limiter_utils")
Event = tuple[str, int]  # the kind of event, and the number of the layer

LAYERS = 4
DELAY = 100  # milliseconds; long compared to an iteration without delays
FACTOR = 10  # the minimum ratio of long and short times


class Layer(nn.Module):
    """Keeps the device busy and adds its one-element parameter, if it has one. It records its runs in ``events``."""

    def __init__(self, cycles: int, has_params: bool, number: int = 0, events: list[Event] | None = None) -> None:
        super().__init__()
        self.cycles = cycles
        self.number = number
        self.events = [] if events is None else events
        self.weight = nn.Parameter(torch.full((1,), number + 1.0)) if has_params else None
        self.timing: tuple[torch.Event, torch.Event] | None = None  # with times, on devices that support them

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(("forward", self.number))
        if self.timing is not None:
            self.timing[0].record()
        if self.cycles > 0:
            device_sleep(accelerator.current().type, self.cycles)
        if self.timing is not None:
            self.timing[1].record()
        summed = x if self.weight is None else x + self.weight
        output = summed + 0.0
        # "reached": the gradient arrives, before FSDP looks at it. "backward": it is on its way to the parameter.
        output.register_hook(functools.partial(self._tell, "reached"))
        summed.register_hook(functools.partial(self._tell, "backward"))
        return output

    def _tell(self, what: str, grad: torch.Tensor) -> None:
        self.events.append((what, self.number))

    def elapsed(self) -> float:
        assert self.timing is not None
        start, end = self.timing
        return start.elapsed_time(end)


def _create_model(compute_cycles: int, has_params: bool, events: list[Event] | None = None, **fsdp_kwargs: Any) -> FSDP:
    """Layers that are each in FSDP, and a root around them without own parameters."""
    kwargs = {"limit_all_gathers": False, **fsdp_kwargs}
    device = torch.device(accelerator.current().type)
    layers = (Layer(compute_cycles, has_params, number, events).to(device) for number in range(LAYERS))
    return FSDP(nn.Sequential(*(FSDP(layer, **kwargs) for layer in layers)), **kwargs)


class Min10:
    """The average of the ten smallest values."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def add(self, value: float) -> None:
        self.values = sorted([*self.values, value])[:10]

    def avg(self) -> float:
        return sum(self.values) / len(self.values)


def _reported_all_gathers(events: list[Event], model: FSDP) -> AbstractContextManager[None]:
    """In the context, record each all-gather of a layer's parameters in ``events``."""
    numbers = {internals.handle(layer): layer.module.number for layer in model.module}
    return internals.recorded_gathers(lambda handle: events.append(("all-gather", numbers[handle])))


class TestForwardOverlapWorldSizeOne(FSDPTest):
    world_size = 1

    @skip_if_lt_x_gpu(1)
    def test_forward_overlap(self):
        """A single rank gathers nothing. A slow kernel delays the device and not the CPU."""
        self._test_forward_overlap()

    def _test_forward_overlap(self) -> None:
        self.run_subtests(
            {"has_params": [False, True], "forward_prefetch": [False, True], "limit_all_gathers": [False, True]},
            self._check_order,
        )
        if accelerator.current().lacks("streams", "sleep_kernel", "asynchronous_collectives") is None:
            self._check_times()

    def _check_order(self, has_params: bool, forward_prefetch: bool, limit_all_gathers: bool) -> None:
        events: list[Event] = []
        model = _create_model(
            0, has_params, events, forward_prefetch=forward_prefetch, limit_all_gathers=limit_all_gathers
        )
        gathers = has_params and self.world_size > 1
        inputs = torch.tensor([float(self.rank)], device=self.device, requires_grad=True)
        for iteration in range(3):
            model.zero_grad()
            events.clear()
            with _reported_all_gathers(events, model):
                output = model(inputs)
            ahead = int(forward_prefetch and iteration > 0)  # only after the first iteration, which records the order
            self.assertEqual(events, self._expected_forward(ahead) if gathers else self._expected_forward(None))
            self.assertEqual(output.item(), self.rank + (1 + 2 + 3 + 4) * has_params)
            (output * (self.rank + 1)).sum().backward()
            mean = (1 + self.world_size) / 2
            grads = [param.grad.tolist() for param in model.parameters()]
            # The gradient has one element. All ranks but the first have only padding.
            self.assertEqual(grads, [[mean] if self.rank == 0 else [0.0]] * LAYERS * has_params, may_be="empty")

    def _expected_forward(self, ahead: int | None) -> list[Event]:
        """The layers, each after its own all-gather and those of the ``ahead`` next ones. None: without all-gathers."""
        events: list[Event] = []
        gathered = 0
        for number in range(LAYERS):
            if ahead is not None:
                upto = min(number + ahead + 1, LAYERS)
                events += [("all-gather", each) for each in range(gathered, upto)]
                gathered = upto
            events.append(("forward", number))
        return events

    def _measure(self, compute_cycles: int, all_gather_cycles: int) -> dict[str, float]:
        """Averages in ms: iteration and final wait by the CPU's clock, layers and total by the device's."""
        device = accelerator.current().type
        has_params = all_gather_cycles > 0
        model = _create_model(compute_cycles, has_params)
        layers = [layer.module for layer in model.module]
        for layer in layers:
            layer.timing = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        inputs = torch.ones(1, device=self.device, requires_grad=True)
        calls = []
        original = internals.all_gather()

        def delayed_all_gather(*args: Any, **kwargs: Any) -> Any:
            calls.append(args)
            device_sleep(device, all_gather_cycles)
            return original(*args, **kwargs)

        times = {name: Min10() for name in ("iteration", "wait", "compute", "total")}
        for measured in itertools.chain([False], [True] * 20):
            output = None
            torch.accelerator.synchronize()
            dist.barrier()
            torch.accelerator.synchronize()
            calls.clear()
            with mock.patch.object(dist, torch_facts.all_gather_name(), delayed_all_gather):
                started = host_time()
                begin.record()
                output = model(inputs)
                end.record()
                issued = host_time()
                value = output.item()
                waited = host_time()
            torch.accelerator.synchronize()
            self.assertEqual(value, 1.0 + (1 + 2 + 3 + 4) * has_params)
            self.assertEqual(len(calls), LAYERS if has_params and self.world_size > 1 else 0)
            output.sum().backward()
            if measured:
                times["iteration"].add((issued - started) * 1000)
                times["wait"].add((waited - issued) * 1000)
                times["compute"].add(sum(layer.elapsed() for layer in layers))
                times["total"].add(begin.elapsed_time(end))
        return {name: values.avg() for name, values in times.items()}

    def _check_times(self) -> None:
        cycles = int(DELAY * get_cycles_per_ms(accelerator.current().type))
        none, gather, compute, both = (
            self._measure(*delays) for delays in ((0, 0), (0, cycles), (cycles, 0), (cycles, cycles))
        )
        # A single rank gathers nothing, so only two or more ranks see delayed all-gathers.
        gathers = self.world_size > 1
        short_waits, long_waits = [none["wait"]], [compute["wait"], both["wait"]]
        short = [none["compute"], none["total"], gather["compute"]]
        long = [each[name] for each in (compute, both) for name in ("compute", "total")]
        (long_waits if gathers else short_waits).append(gather["wait"])
        (long if gathers else short).append(gather["total"])
        short_waits += [each["iteration"] for each in (none, gather, compute)]
        self.assertLess(max(short_waits) * FACTOR, min(long_waits))
        self.assertLess(max(short) * FACTOR, min(long))
        if gathers:
            self.assertGreater(compute["compute"] + gather["total"], 1.1 * both["total"])


class TestForwardOverlapWorldSizeTwo(TestForwardOverlapWorldSizeOne):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_forward_overlap(self):
        """The order of all-gathers and layers and, on devices where they can overlap, their times."""
        self._test_forward_overlap()

    @skip_if_lt_x_gpu(2)
    @subtests(
        backward_prefetch=[None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
        limit_all_gathers=[False, True],
    )
    def test_backward_order(self, backward_prefetch, sharding_strategy, limit_all_gathers):
        """The next layer is all-gathered before this layer's gradients, after them, or when its backward begins."""
        events: list[Event] = []
        model = _create_model(
            0,
            True,
            events,
            backward_prefetch=backward_prefetch,
            sharding_strategy=sharding_strategy,
            limit_all_gathers=limit_all_gathers,
        )
        inputs = torch.ones(1, device=self.device, requires_grad=True)
        for _ in range(2):
            output = model(inputs)
            events.clear()
            with _reported_all_gathers(events, model):
                output.sum().backward()
            expected = self._expected_backward(backward_prefetch)
            if sharding_strategy is ShardingStrategy.SHARD_GRAD_OP:  # all layers are still unsharded
                expected = [event for event in expected if event[0] != "all-gather"]
            self.assertEqual(events, expected)

    def _expected_backward(self, backward_prefetch: BackwardPrefetch | None) -> list[Event]:
        events: list[Event] = []
        for number in reversed(range(LAYERS)):
            is_last = number == LAYERS - 1
            following = [("all-gather", number - 1)] if number > 0 else []
            events.append(("reached", number))
            if is_last or backward_prefetch is None:
                events.append(("all-gather", number))
            if backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
                events += following
            events.append(("backward", number))
            if backward_prefetch is BackwardPrefetch.BACKWARD_POST:
                events += following
        return events

    @skip_if_lt_x_gpu(2)
    @subtests(
        limit_all_gathers=[True, False],
        backward_prefetch=[None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
    )
    def test_limit_of_all_gathers(self, limit_all_gathers, backward_prefetch):
        """With two outstanding frees, an unshard waits for one. Without the limit, none waits."""
        model = _create_model(0, True, limit_all_gathers=limit_all_gathers, backward_prefetch=backward_prefetch)
        pending, dequeued, waits = [], [], []
        original = limiter._FreeEventQueue.dequeue_if_needed

        def recording(queue: Any) -> Any:
            pending.append(len(queue._queue))
            oldest = queue._queue[0] if queue._queue else None
            event = original(queue)
            dequeued.append(event is not None)
            if event is None:
                return None
            self.assertIs(event, oldest)
            waits.append(mock.Mock(wraps=event))
            return waits[-1]

        inputs = torch.ones(1, device=self.device, requires_grad=True)
        with torch_names.patched(limiter._FreeEventQueue, "dequeue_if_needed", recording):
            for _ in range(3):
                model(inputs).sum().backward()
        if not limit_all_gathers:
            self.assertEqual((pending, len(model._free_event_queue._queue)), ([], 0))
            return
        self.assertGreaterEqual(len(pending), 3 * 2 * LAYERS)
        self.assertEqual(pending[:LAYERS], [0, 1, 2, 2])
        # A prefetched unshard comes before the next free, so one later unshard may find a third pending free.
        self.assertEqual(max(pending), 3 if backward_prefetch is BackwardPrefetch.BACKWARD_PRE else 2)
        self.assertEqual(dequeued, [number >= 2 for number in pending])
        self.assertEqual([wait.synchronize.call_count for wait in waits], [1] * sum(dequeued))

    @skip_if_lt_x_gpu(2)
    @subtests(strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP])
    def test_frees_that_are_recorded(self, strategy):
        """Only real frees are recorded. Under SHARD_GRAD_OP, forward frees nothing."""
        in_forward = LAYERS if strategy is ShardingStrategy.FULL_SHARD else 0
        model = _create_model(0, True, limit_all_gathers=True, sharding_strategy=strategy)
        inputs = torch.ones(1, device=self.device, requires_grad=True)
        for _ in range(2):
            with torch_names.patched(limiter._FreeEventQueue, "enqueue", autospec=True) as freed:
                output = model(inputs)
                self.assertEqual(freed.call_count, in_forward)
                output.sum().backward()
            self.assertEqual(freed.call_count, in_forward + LAYERS)


instantiate_device_type_tests(TestForwardOverlapWorldSizeOne, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
