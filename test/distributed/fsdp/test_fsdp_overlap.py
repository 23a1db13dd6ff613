"""FSDP1 issues all-gathers ahead of the computation that they are to run beside, and nothing waits for them early.

The order of all-gathers and computation is checked on every device. That time is really saved can be measured only
where work is queued on streams and a kernel can keep the device busy.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Iterator
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp._flat_param import FlatParamHandle
from torch.distributed.fsdp._limiter_utils import _FreeEventQueue

from torch_fsdp_tests import accelerator, torch_facts
from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import device_sleep, get_cycles_per_ms, run_tests

LAYERS = 4
DELAY = 100  # milliseconds; long beside what an iteration costs without one
FACTOR = 10  # by which short and long times differ at least


class Layer(nn.Module):
    """Keeps the device busy, and adds a parameter of one element if it has one; tells ``events`` when it computes."""

    def __init__(self, cycles, has_params, number=0, events=None):
        super().__init__()
        self.cycles = cycles
        self.number = number
        self.events = [] if events is None else events
        self.weight = nn.Parameter(torch.full((1,), number + 1.0)) if has_params else None
        self.timing = None  # a pair of events with times, on devices that have them

    def forward(self, x):
        self.events.append(("forward", self.number))
        if self.timing is not None:
            self.timing[0].record()
        if self.cycles > 0:
            device_sleep(accelerator.current().type, self.cycles)
        if self.timing is not None:
            self.timing[1].record()
        summed = x if self.weight is None else x + self.weight
        output = summed + 0.0
        # The gradient is here before FSDP looks at it, and then on its way to the parameter.
        output.register_hook(functools.partial(self._tell, "reached"))
        summed.register_hook(functools.partial(self._tell, "backward"))
        return output

    def _tell(self, what, grad):
        self.events.append((what, self.number))

    def elapsed(self):
        start, end = self.timing
        return start.elapsed_time(end)


def _create_model(compute_cycles, has_params, events=None, **fsdp_kwargs):
    """The layers, each in FSDP, and the root around them, which has no parameters of its own."""
    kwargs = {"limit_all_gathers": False, **fsdp_kwargs}
    device = torch.device(accelerator.current().type)
    layers = (Layer(compute_cycles, has_params, number, events).to(device) for number in range(LAYERS))
    return FSDP(nn.Sequential(*(FSDP(layer, **kwargs) for layer in layers)), **kwargs)


class Min10:
    """The average of the ten smallest of the values that were added."""

    def __init__(self):
        self.values = []

    def add(self, value):
        self.values = sorted([*self.values, value])[:10]

    def avg(self):
        return sum(self.values) / len(self.values)


@contextlib.contextmanager
def _told_all_gathers(events, model) -> Iterator[None]:
    """Inside the context ``events`` learns of each all-gather of a layer's parameters."""
    numbers = {layer._handle: layer.module.number for layer in model.module if layer._handle}
    original = FlatParamHandle._all_gather_flat_param

    def telling(handle, *args):
        events.append(("all-gather", numbers[handle]))
        return original(handle, *args)

    with mock.patch.object(FlatParamHandle, "_all_gather_flat_param", telling):
        yield


class TestForwardOverlapWorldSizeOne(FSDPTest):
    @property
    def world_size(self):
        return 1

    @skip_if_lt_x_gpu(1)
    def test_forward_overlap(self):
        """A rank alone gathers nothing; where kernels can be slow, delays are the device's and not the host's."""
        self._test_forward_overlap()

    def _test_forward_overlap(self):
        self.run_subtests(
            {"has_params": [False, True], "forward_prefetch": [False, True], "limit_all_gathers": [False, True]},
            self._check_order,
        )
        if accelerator.current().lacks("streams", "sleep_kernel") is None:
            self._check_times()

    def _check_order(self, has_params, forward_prefetch, limit_all_gathers):
        events = []
        model = _create_model(
            0, has_params, events, forward_prefetch=forward_prefetch, limit_all_gathers=limit_all_gathers
        )
        gathers = has_params and self.world_size > 1
        inputs = torch.tensor([float(self.rank)], device=self.device, requires_grad=True)
        for iteration in range(3):
            model.zero_grad()
            events.clear()
            with _told_all_gathers(events, model):
                output = model(inputs)
            ahead = int(forward_prefetch and iteration > 0)  # the first iteration is the one that shows the order
            self.assertEqual(events, self._expected_forward(ahead) if gathers else self._expected_forward(None))
            self.assertEqual(output.item(), self.rank + (1 + 2 + 3 + 4) * has_params)
            (output * (self.rank + 1)).sum().backward()
            mean = (1 + self.world_size) / 2
            grads = [param.grad.tolist() for param in model.parameters()]
            # One element, and on the ranks behind the first only padding.
            self.assertEqual(grads, [[mean] if self.rank == 0 else [0.0]] * LAYERS * has_params)

    def _expected_forward(self, ahead):
        """Layers, and before each its all-gather and those of as many as are ``ahead``; None for no all-gathers."""
        events, gathered = [], 0
        for number in range(LAYERS):
            if ahead is not None:
                upto = min(number + ahead + 1, LAYERS)
                events += [("all-gather", each) for each in range(gathered, upto)]
                gathered = upto
            events.append(("forward", number))
        return events

    def _measure(self, compute_cycles, all_gather_cycles):
        """Averages in ms: iteration and the wait after it by the host's clock, layers and total by the device's."""
        device = accelerator.current().type
        has_params = all_gather_cycles > 0
        model = _create_model(compute_cycles, has_params)
        layers = [layer.module for layer in model.module]
        for layer in layers:
            layer.timing = tuple(torch.Event(device, enable_timing=True) for _ in range(2))
        begin, end = (torch.Event(device, enable_timing=True) for _ in range(2))
        inputs = torch.ones(1, device=self.device, requires_grad=True)
        calls = []
        original = getattr(dist, torch_facts.all_gather_name())

        def delayed_all_gather(*args, **kwargs):
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
                started = time.perf_counter()
                begin.record()
                output = model(inputs)
                end.record()
                issued = time.perf_counter()
                value = output.item()
                waited = time.perf_counter()
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

    def _check_times(self):
        cycles = int(DELAY * get_cycles_per_ms(accelerator.current().type))
        none, gather, compute, both = (
            self._measure(*delays) for delays in ((0, 0), (0, cycles), (cycles, 0), (cycles, cycles))
        )
        # Nothing is gathered by a rank alone, so a delay of all-gathers is felt by two or more only.
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
    @property
    def world_size(self):
        return 2

    @skip_if_lt_x_gpu(2)
    def test_forward_overlap(self):
        """The order in which all-gathers and layers run, and where they can overlap, how long they take."""
        self._test_forward_overlap()

    @skip_if_lt_x_gpu(2)
    def test_backward_order(self):
        """Beyond upstream: the next layer is gathered before this one's gradients, after them, or when needed."""
        self.run_subtests(
            {
                "backward_prefetch": [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
                "sharding_strategy": [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP],
                "limit_all_gathers": [False, True],
            },
            self._test_backward_order,
        )

    def _test_backward_order(self, backward_prefetch, sharding_strategy, limit_all_gathers):
        events = []
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
            with _told_all_gathers(events, model):
                output.sum().backward()
            expected = self._expected_backward(backward_prefetch)
            if sharding_strategy is ShardingStrategy.SHARD_GRAD_OP:  # all is there still
                expected = [event for event in expected if event[0] != "all-gather"]
            self.assertEqual(events, expected)

    def _expected_backward(self, backward_prefetch):
        events = []
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
    def test_limit_of_all_gathers(self):
        """Beyond upstream: an unshard waits for one of two outstanding frees; without the limit nobody asks."""
        self.run_subtests(
            {
                "limit_all_gathers": [True, False],
                "backward_prefetch": [None, BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST],
            },
            self._test_limit_of_all_gathers,
        )

    def _test_limit_of_all_gathers(self, limit_all_gathers, backward_prefetch):
        model = _create_model(0, True, limit_all_gathers=limit_all_gathers, backward_prefetch=backward_prefetch)
        pending, dequeued, waits = [], [], []
        original = _FreeEventQueue.dequeue_if_needed

        def recording(queue):
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
        with mock.patch.object(_FreeEventQueue, "dequeue_if_needed", recording):
            for _ in range(3):
                model(inputs).sum().backward()
        if not limit_all_gathers:
            self.assertEqual((pending, len(model._free_event_queue._queue)), ([], 0))
            return
        self.assertGreaterEqual(len(pending), 3 * 2 * LAYERS)
        self.assertEqual(pending[:LAYERS], [0, 1, 2, 2])
        # An unshard ahead of time comes without a free before it, which leaves one more to later ones, and no two.
        self.assertEqual(max(pending), 3 if backward_prefetch is BackwardPrefetch.BACKWARD_PRE else 2)
        self.assertEqual(dequeued, [number >= 2 for number in pending])
        self.assertEqual([wait.synchronize.call_count for wait in waits], [1] * sum(dequeued))

    @skip_if_lt_x_gpu(2)
    def test_frees_that_are_recorded(self):
        """Beyond upstream: only what is freed counts as such: under SHARD_GRAD_OP that is nothing of forward."""
        for strategy, in_forward in ((ShardingStrategy.FULL_SHARD, LAYERS), (ShardingStrategy.SHARD_GRAD_OP, 0)):
            with self.subTest(strategy=strategy):
                model = _create_model(0, True, limit_all_gathers=True, sharding_strategy=strategy)
                inputs = torch.ones(1, device=self.device, requires_grad=True)
                for _ in range(2):
                    with mock.patch.object(_FreeEventQueue, "enqueue", autospec=True) as freed:
                        output = model(inputs)
                        self.assertEqual(freed.call_count, in_forward)
                        output.sum().backward()
                    self.assertEqual(freed.call_count, in_forward + LAYERS)


instantiate_device_type_tests(TestForwardOverlapWorldSizeOne, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
