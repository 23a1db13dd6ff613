"""A group of ranks with a transport that has no processes. The group must handle events in any order."""

import collections
import selectors
import time
from typing import Any
from unittest import mock

from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests
from torch_fsdp_tests.processes.messages import MessageError
from torch_fsdp_tests.ranks import HarnessError, RankGroup, group, protocol
from torch_fsdp_tests.ranks.group import Stage
from torch_fsdp_tests.ranks.local import LocalRanks
from torch_fsdp_tests.ranks.server import ServerHandle
from torch_fsdp_tests.verdict import RankResult, State

MANY = 128  # ranks
LIMIT = 0.2  # seconds of a test that does not end by itself
AT_ONCE = 20  # seconds, even on a busy machine


def passed(rank: int) -> RankResult:
    return RankResult.report(rank, State.PASSED, at=1.0)


class Nowhere:
    """A transport without processes, whose events a test makes. It records what it has to send."""

    file_name = "nowhere"

    def __init__(self, starts: bool = True, ends: bool = True) -> None:
        self.starts, self.ends = starts, ends
        self.selector = selectors.DefaultSelector()
        self.events: list[Any] = []
        self.orders: dict[int, list[Any]] = collections.defaultdict(list)  # orders, by process
        self.requests: list[str] = []
        self.there = range(0)

    def start(self, task: protocol.Task, processes: range) -> None:
        self.there = processes
        if self.starts:
            pids = tuple(1000 + each for each in processes)
            self.events.append(protocol.Started(0, tuple(processes), "here", pids, time.monotonic()))

    def arrived(self) -> list[Any]:
        events, self.events = self.events, []
        return events

    def send(self, order: Any, index: int | None = None) -> None:
        if isinstance(order, protocol.AskForStacks):
            self.requests.append("stacks")
            self.events += [protocol.WroteStacks(each) for each in self.there]
        elif isinstance(order, protocol.EndRanks):
            self.requests.append("end")
            self.events += [protocol.Over(0, tuple(self.there))] if self.ends else []
        else:
            for each in self.there if index is None else [index]:
                self.orders[each].append(order)
                if isinstance(order, protocol.Continue | protocol.Leave):
                    self.passes(each)

    def passes(self, *processes: int) -> None:
        for each in processes:
            self.events += [passed(each), protocol.Ended(0, each, 0, 1.0)]

    def give_up(self) -> None:
        self.requests.append("give up")

    def collect(self, close: bool = False) -> protocol.Collected:
        self.requests += ["close"] if close else []
        return protocol.Collected(tuple(protocol.Remains(each, f"stack {each}", "") for each in self.there))


@instantiate_parametrized_tests
class TestGroup(TestCase):
    """Without it, a rank could pass after its limit, or a report could name the wrong rank as the cause."""

    def group(self, world_size: int, transport: Any, test: str | None = "test_x") -> RankGroup:
        made = RankGroup(type(self), test, world_size, transport=transport)
        self.addCleanup(made.close)
        return made

    def test_ranks_continue_when_all_have_arrived(self):
        transport = Nowhere()
        made = self.group(MANY, transport)
        transport.events += [protocol.Waits(each) for each in range(1, MANY)]
        made._receive(0)
        self.assertEqual(dict(transport.orders), {})
        transport.events.append(protocol.Waits(0))
        reports = made.wait(AT_ONCE)
        self.assertEqual(dict(transport.orders), {each: [protocol.Continue()] for each in range(MANY)})
        self.assertEqual([(each.rank, each.reported, each.exit_code) for each in reports],
                         [(rank, "passed", 0) for rank in range(MANY)])  # fmt: skip
        self.assertEqual(transport.requests, ["end"])
        made.close()
        self.assertEqual(transport.requests, ["end", "close"])

    def test_ranks_do_not_wait_for_one_whose_test_has_raised(self):
        """It may wait for them before it reports."""
        transport = Nowhere()
        made = self.group(2, transport)
        transport.events += [protocol.Waits(0), protocol.Raised(1)]
        made._receive(0)
        self.assertEqual(dict(transport.orders), {0: [protocol.Continue()]})
        error = RankResult.report(1, State.ERROR, at=1.0)
        transport.events += [error, protocol.Ended(0, 1, 0, 1.0)]
        self.assertEqual([report.reported for report in made.wait(AT_ONCE)], ["passed", "error"])

    def test_no_rank_continues_after_the_limit(self):
        """Rank 1 hangs, and rank 0 waits for it. Events after the request for stacks do not count."""
        transport = Nowhere()
        made = self.group(2, transport)
        transport.events.append(protocol.Waits(0))
        made._receive(0)
        send = transport.send

        def send_and_receive_of_rank_1(order, *index):
            send(order, *index)
            if isinstance(order, protocol.AskForStacks):
                transport.passes(1)

        with mock.patch.object(transport, "send", send_and_receive_of_rank_1):
            first, second = made.wait(LIMIT)
        self.assertEqual(dict(transport.orders), {})
        self.assertEqual((first.reported, first.exit_code), ("passed", 0))
        self.assertEqual((second.reported, second.killed, second.text), ("", True, "stack 1"))
        self.assertTrue(LIMIT <= second.at < LIMIT + AT_ONCE, second.at)

    def test_causes_are_in_the_order_of_time(self):
        """Events may arrive in another order."""
        transport = Nowhere(starts=False)
        made = self.group(2, transport)
        transport.events = [
            RankResult.report(0, State.ERROR, text="consequence", at=15.0),
            protocol.Started(0, (0,), "here", (1000,), 10.0),
            protocol.Started(0, (1,), "there", (None,), 11.0),
            protocol.Ended(0, 0, 0, 15.5),
            protocol.Ended(0, 1, 9, 14.0),
        ]
        reports = made.wait(LIMIT)
        self.assertEqual([(each.at, each.signal) for each in reports], [(5.0, None), (4.0, "SIGKILL")])
        self.assertEqual([process.pid for process in made.processes], [1000, None])
        self.assertEqual([each.host for each in reports], ["here", "there"])

    def test_the_limit_counts_from_the_start_of_the_last_rank(self):
        transport = Nowhere(starts=False)
        made = self.group(2, transport)
        began = time.monotonic()
        transport.events = [
            protocol.Started(0, (each,), "here", (1000 + each,), began - 10 * (1 - each)) for each in (0, 1)
        ]
        reports = made.wait(LIMIT)
        self.assertGreaterEqual(time.monotonic() - began, LIMIT)
        self.assertGreaterEqual(min(each.at for each in reports), LIMIT)

    @parametrize("ending", [0, 9])
    def test_ranks_that_stay(self, ending):
        transport = Nowhere()
        made = self.group(2, transport, test=None)
        for test in ("test_a", "test_b"):
            self.assertTrue(made.ready())
            made.begin(test)
            transport.events += [passed(each) for each in (0, 1)]
            self.assertEqual([each.exit_code for each in made.wait(LIMIT)], [0, 0])
        transport.events += [protocol.Ended(0, 1, ending, 2.0)] * bool(ending)
        self.assertEqual(made.ready(), not ending)
        made.close()
        words = ["rank 1 of 2 reported that it passed and then was killed by SIGKILL (out of memory?)"]
        self.assertEqual([each.reason for each in made.late_deaths], words if ending else [])
        run = [protocol.RunTest("test_a"), protocol.RunTest("test_b")]
        self.assertEqual(transport.orders[0], run if ending else [*run, protocol.Leave()])

    def test_broken_server_is_an_error_of_the_harness(self):
        transport = Nowhere()
        made = self.group(2, transport)
        transport.events += [protocol.Over(0, (0, 1)), protocol.Broken(0, "the server is gone")]
        with self.assertRaisesRegex(HarnessError, "the server is gone"):
            made.wait(LIMIT)
        made.close()
        self.assertEqual(transport.requests, ["close"])  # nothing was left to end

    def test_invalid_message_is_an_error_of_the_harness(self):
        made = self.group(1, Nowhere())
        with mock.patch.object(Nowhere, "arrived", side_effect=MessageError("this is not a message")):
            with self.assertRaisesRegex(HarnessError, "cannot be understood: this is not a message"):
                made.wait(LIMIT)

    def test_rank_that_never_ends(self):
        transport = Nowhere(ends=False)
        made = self.group(1, transport)
        transport.passes(0)
        with mock.patch.multiple(group, KILL_LIMIT=LIMIT, GRACE=LIMIT):
            with self.assertRaisesRegex(HarnessError, "did not end the ranks in time"):
                made.wait(LIMIT)
        self.assertEqual(transport.requests, ["end", "give up"])

    def test_stages_go_forward(self):
        back = {(a, b) for a in Stage for b in Stage if a > b and a.may_become(b)}
        self.assertEqual(back, {(Stage.IDLE, Stage.RUNNING)})
        made = self.group(1, Nowhere())
        made.close()
        with self.assertRaisesRegex(HarnessError, "cannot go from OVER to RUNNING"):
            made.begin("test_y")


class TestServerMail(TestCase):
    """Without it, a wait could overlook the end of a rank, and last until the limit of its test."""

    def test_messages_of_all_starts_are_taken_at_once(self):
        """A message of the first start may arrive while one of the last is read. Nothing else wakes a wait for it."""
        ended = [protocol.Ended(start, start, 0, 1.0) for start in (0, 1, 2)]
        news = [iter(ended), iter(())]
        connection = mock.Mock(closed=False, arrived=lambda: news.pop() if news else iter(()))
        handle = object.__new__(ServerHandle)
        handle.connection, handle._mail = connection, []
        transport = object.__new__(LocalRanks)
        process = mock.Mock(**{"read_words.return_value": False, "channel.arrived.return_value": ()})
        transport._server, transport._starts, transport._processes = handle, {0, 1}, {0: process, 1: process}
        transport.selector = selectors.DefaultSelector()
        self.addCleanup(transport.selector.close)
        self.assertEqual(transport.arrived(), [])
        self.assertEqual(transport.arrived(), ended[:2])
        self.assertEqual(handle.arrived({2}), ended[2:])


if __name__ == "__main__":
    run_tests()
