"""The race detector: what it reports as a race, and what it accepts."""

import contextlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import SkipTest, mock

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[2] / "harness"))

from samples import Threads

from torch_fsdp_tests import common_utils, settings
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.defects import registry, torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.extensions.races import explained, operator_calls, ordering
from torch_fsdp_tests.extensions.races.accesses import Race
from torch_fsdp_tests.extensions.races.operator_calls import CallSite


@instantiate_parametrized_tests
class TestOrdering(TestCase):
    """Without it, the race detector could overlook a missing wait between streams, or report a race that is none."""

    def setUp(self):
        super().setUp()
        self.device = accelerator.current().device()
        self.module = torch.get_device_module(self.device.type)
        self.here = self.module.current_stream()
        self.side, self.third = self.module.Stream(), self.module.Stream()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        self.recording = stack.enter_context(ordering.recorded())
        self.x = torch.zeros(8, device=self.device)

    def _races(self) -> list[tuple[str, str]]:
        return [(race.earlier, race.later) for race in self.recording.races]

    def read(self, stream: Any) -> None:
        with self.module.stream(stream):
            self.x + 1

    def write(self, stream: Any) -> None:
        with self.module.stream(stream):
            self.x.add_(1)

    def test_write_and_read(self):
        self.read(self.side)
        self.assertEqual(self._races(), [("aten::zeros on stream 0", "aten::add.Tensor on stream 1")])

    def test_read_and_write(self):
        self.side.wait_stream(self.here)
        self.read(self.side)
        self.write(self.here)
        self.assertEqual(self._races(), [("aten::add.Tensor on stream 1", "aten::add_.Tensor on stream 0")])

    def test_two_reads_are_no_race(self):
        self.side.wait_stream(self.here)
        self.read(self.side)
        self.read(self.here)
        self.assertEqual(self._races(), [])

    def test_waiting_for_a_stream(self):
        """The wait does not cover later work on the other stream."""
        self.side.wait_stream(self.here)
        self.write(self.side)
        self.here.wait_stream(self.side)
        self.write(self.here)
        self.assertEqual(self._races(), [])
        self.write(self.side)
        self.assertEqual(len(self._races()), 1)

    def test_waiting_for_an_event(self):
        """An event represents only the work that was issued before it was recorded."""
        event = self.here.record_event()
        self.side.wait_event(event)
        self.write(self.side)
        self.assertEqual(self._races(), [])
        self.x.mul_(2)
        self.here.wait_event(event)
        self.assertEqual(len(self._races()), 1)

    def test_order_by_way_of_a_third_stream(self):
        self.third.wait_stream(self.here)
        event = self.module.Event()
        event.record(self.third)
        event.wait(self.side)
        self.write(self.side)
        self.assertEqual(self._races(), [])

    def test_host_that_synchronizes(self):
        self.here.synchronize()
        self.write(self.side)
        self.assertEqual(self._races(), [])
        self.side.record_event().synchronize()
        self.write(self.here)
        self.assertEqual(self._races(), [])

    def test_host_that_reads_a_copy(self):
        """The host must wait for a non-blocking copy into its memory, but not for a blocking one."""
        for non_blocking in (False, True):
            copy = self.recording.move(self.x, non_blocking)
            copy + 1
            self.assertEqual(len(self._races()), int(non_blocking))
        self.assertEqual(self._races(), [("aten::clone on stream 0", "aten::add.Tensor on the host")])

    def test_host_that_waits_for_a_copy(self):
        copy = self.recording.move(self.x, non_blocking=True)
        self.here.record_event().synchronize()
        copy.add_(1)
        self.assertEqual(self._races(), [])

    def test_host_that_overwrites_what_is_copied(self):
        """A copy to the device follows what the host has done before, but not what it does later."""
        in_host = self.recording.move(self.x, non_blocking=False)
        in_host.add_(1)
        with self.module.stream(self.side):
            self.recording.move(in_host, non_blocking=True)
        self.assertEqual(self._races(), [])
        in_host.add_(1)
        self.assertEqual(self._races(), [("aten::clone on stream 1", "aten::add_.Tensor on the host")])

    def test_number_that_the_host_computes_with(self):
        """A number that is used together with the host's memory is there, although a CPU tensor does not show it."""
        number = self.x.sum()
        in_host = self.recording.move(self.x, non_blocking=False)
        in_host.mul_(number)
        number.add_(1)
        self.assertEqual(self._races(), [])
        self.assertTrue(self.recording.is_in_host(number))

    def test_other_bytes_are_no_race(self):
        first, second = self.x.chunk(2)
        self.side.wait_stream(self.here)
        with self.module.stream(self.side):
            first.add_(1)
        second.add_(1)
        self.assertEqual(self._races(), [])
        self.x[3:5].add_(1)
        self.assertEqual(len(self._races()), 1)

    def test_memory_that_is_freed(self):
        """The next allocation on the memory's stream must come after reads on other streams."""
        self.side.wait_stream(self.here)
        self.read(self.side)
        del self.x
        torch.ones(1, device=self.device) + 1  # the memory is freed when the next operator is called
        self.x = torch.ones(8, device=self.device)
        self.assertEqual(self._races()[0][0], "aten::add.Tensor on stream 1")
        self.assertIn("memory's next owner", self._races()[0][1])

    @parametrize("stream,waits,races", [("side", "never", 0), ("third", "after_the_read", 0), ("third", "early", 1)])
    def test_memory_that_is_kept_for_a_stream(self, stream, waits, races):
        """Memory that the side stream has read is kept for a stream and freed. This stream may wait for the other."""
        self.side.wait_stream(self.here)
        if waits == "early":
            self.third.wait_stream(self.side)
        self.read(self.side)
        if waits == "after_the_read":
            self.third.wait_stream(self.side)
        self.recording.keep_for(self.x, getattr(self, stream))
        self.x.untyped_storage().resize_(0)
        torch.ones(8, device=self.device)
        self.assertEqual(len(self._races()), races)

    def test_resized_memory(self):
        self.side.wait_stream(self.here)
        self.read(self.side)
        self.x.untyped_storage().resize_(0)
        self.x.untyped_storage().resize_(32)
        self.assertEqual(len(self._races()), 1)


class TestThreads(Threads):
    """Without it, ranks that are threads could change each other's current stream, or share a recording."""

    world_size = 2

    def test_each_rank_has_its_own_recording(self):
        module, x = torch.get_device_module(self.device.type), torch.zeros(8, device=self.device)
        with ordering.recorded() as recording:
            before, side = module.current_stream(), module.Stream()
            with module.stream(side):
                dist.barrier()
                self.assertIs(module.current_stream(), side)
                x.add_(self.rank)
                dist.barrier()
            self.assertIs(module.current_stream(), before)
            if self.rank == 0:
                x.add_(1)
            self.assertEqual(len(recording.races), 1 - self.rank)
            dist.barrier()


class TestChecked(FSDPTest):
    """Without it, ``run_test.py --check-streams`` could pass tests that have races."""

    world_size = 1

    def test_asynchronous_collective(self):
        """A collective that FSDP issues runs on a stream of the backend, for which the current stream has to wait."""
        for waits in (True, False):
            with ordering.recorded() as recording:
                x = torch.ones(4, device=self.device)
                with mock.patch.object(operator_calls, "call_site", return_value=CallSite("file", 1, "reduce")):
                    work = dist.all_reduce(x, async_op=True)
                if waits:
                    work.wait()
                x.add_(1)
                work.wait()
            self.assertEqual(len(recording.races), int(not waits))

    def test_function_that_waits_for_its_collectives(self):
        with ordering.recorded() as recording:
            x = torch.ones(4, device=self.device)
            with mock.patch.object(operator_calls, "call_site", return_value=CallSite("file", 1, "send")):
                dist._broadcast_coalesced(dist.group.WORLD, [x], 64, 0)
            x.add_(1)
        self.assertEqual(recording.races, [])

    def test_known_defect_explains_a_race(self):
        """The registry has words of such a race. ``test_whole_test`` has a race in a block that shows the defect."""
        known = "fsdp1_dropped_gradients_race_with_the_reduction"
        site = CallSite("file", 1, registry.defect(known).races[0].rstrip(")"))
        with common_utils.defect_blocks.recorded() as blocks:
            explained.conclude([Race("this", "that", (site, None))])
        self.assertEqual([block.defect["id"] for block in blocks], [known])
        other = Race("this", "that", (CallSite("file", 1, "other"), None))
        with self.assertRaisesRegex(AssertionError, r"^this \(file.py:1, other\) and that are not ordered$"):
            explained.conclude([other])

    def test_whole_test(self):
        """A test with a race fails. Those with streams of their own, and those that compile, skip."""
        module = torch.get_device_module(self.device.type)
        x = torch.ones(4, device=self.device)

        def race() -> None:
            x.add_(1)
            with module.stream(module.Stream()):
                x.add_(1)

        with self.assertRaisesRegex(AssertionError, "add_.Tensor on stream 1 are not ordered"):
            self._under_detector(race)

        def explained() -> None:
            with torch_defect("fsdp1_dropped_gradients_race_with_the_reduction"):
                race()
                self.assertEqual(x.sum(), 0)
            x.add_(1)

        with common_utils.defect_blocks.recorded():
            self._under_detector(explained)
        own_streams = mock.patch.object(module, "current_stream", object)
        with own_streams, self.assertRaisesRegex(SkipTest, "streams of its own"):
            self._under_detector(race)
        with self.assertRaisesRegex(SkipTest, "what compiled code does"):
            self._under_detector(lambda: torch.compile(race))

    def _under_detector(self, body: Callable[[], object]) -> None:
        """Run a body as the harness runs that of a test with ``--check-streams``."""
        with mock.patch.dict("os.environ", {settings.EXTENSIONS_VARIABLE: "races"}):
            with mock.patch.object(self, "body", body, create=True):
                self._run_body("body")


if __name__ == "__main__":
    run_tests()
