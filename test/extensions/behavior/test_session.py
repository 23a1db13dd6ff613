"""What a test does in its ranks is recorded, without an effect on it."""

import gc
import json
import tempfile
import unittest
import warnings
import weakref
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from torch_fsdp_tests.common_distributed import MultiThreadedTestCase, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.common_utils.seed import set_rng_seed
from torch_fsdp_tests.extensions.behavior import session
from torch_fsdp_tests.extensions.behavior.differences import Kind
from torch_fsdp_tests.extensions.behavior.values import digest
from torch_fsdp_tests.installed_torch import torch_facts


def recorded(rank: int, body: Any) -> dict[str, Any]:
    """The line that a rank writes about the block ``body``, with the events as texts."""
    with tempfile.TemporaryDirectory() as folder:
        with session.recorded(folder, "__main__.TestX.test_x", rank):
            body()
        (file,) = Path(folder).iterdir()
        line = json.loads(file.read_text())
    events = {kind: [line["words"][number] for number in numbers] for kind, numbers in line["events"].items()}
    return {**line, "events": {Kind(kind): [each.split("\t") for each in found] for kind, found in events.items()}}


class TestRecording(FSDPTest):
    """Without it, a record could lack what FSDP does, or be the same for two different trainings."""

    world_size = 2

    def _train(self, lr: float = 0.5) -> None:
        set_rng_seed(42)
        model = nn.Sequential(*(fully_shard(nn.Linear(4, 4, bias=False).to(self.device)) for _ in range(2)))
        optim = torch.optim.SGD(fully_shard(model).parameters(), lr=lr, momentum=0.5)
        for _ in range(2):
            model(torch.full((1, 4), 2.0, device=self.device)).sum().backward()
            optim.step()
            optim.zero_grad()
        self.assertEqual(len(model.state_dict()), 2)

    def _events(self, **settings: Any) -> dict[Kind, list[list[str]]]:
        line = recorded(self.rank, lambda: self._train(**settings))
        self.assertEqual((line["test"], line["rank"], line["left_out"]), ("TestX.test_x", self.rank, ""))
        return line["events"]

    @skip_if_lt_x_gpu(2)
    def test_training(self):
        events = self._events()
        gather, scatter = ("all_gather", "float32", "[8]", "over 2"), ("reduce_scatter", "float32", "[16]", "over 2")
        found = [tuple(each) for each in events[Kind.COLLECTIVES]]
        self.assertEqual(found[:6], [gather, gather, gather, gather, scatter, scatter])
        names = [name for name, *_ in events[Kind.VALUES]]
        self.assertEqual(names[:4], ["loss", "gradients", "parameters", "optimizer states"])
        self.assertEqual(names[-2:], ["state_dict of FSDPSequential", "assertEqual"])
        self.assertEqual([name for name, *_ in events[Kind.STATES]], [f"FSDPSequential.{n}.weight" for n in (0, 1)])

    @skip_if_lt_x_gpu(2)
    def test_memory(self):
        """Each layer has 64 bytes, and is freed after its forward and its backward."""
        ends = [each for each in self._events()[Kind.MEMORY] if each[0].startswith("end")]
        nothing = ["0 bytes of parameters", "0 bytes of gradients"]
        self.assertEqual(ends[1:3], [["end of backward", *nothing], ["end of step", *nothing]])
        measured = {each[1] for each in self._events()[Kind.MEMORY]}
        self.assertIn("64 bytes of parameters", measured)

    @skip_if_lt_x_gpu(2)
    def test_memory_of_what_fsdp_no_longer_holds(self):
        """A gradient that something else keeps is still alive at the end of backward."""
        kept: list[Any] = []

        def train() -> None:
            model = fully_shard(nn.Linear(4, 4, bias=False).to(self.device))
            model.unshard()
            model.weight.register_post_accumulate_grad_hook(lambda param: kept.append(param.grad))
            model(torch.ones(1, 4, device=self.device)).sum().backward()

        (*_, end) = recorded(self.rank, train)["events"][Kind.MEMORY]
        self.assertEqual(end, ["end of backward", "0 bytes of parameters", "64 bytes of gradients"])

    @skip_if_lt_x_gpu(2)
    def test_memory_of_an_earlier_model_in_a_cycle(self):
        """It is gone when the next model is measured, whether or not the garbage was collected in between."""

        def train() -> None:
            for _ in range(2):
                model = fully_shard(nn.Linear(4, 4, bias=False).to(self.device))
                model.cycle = [model]
                model.set_requires_gradient_sync(False)
                model(torch.ones(1, 4, device=self.device)).sum().backward()

        events = recorded(self.rank, train)["events"][Kind.MEMORY]
        gradients = [each[2] for each in events if each[0] == "end of backward"]
        self.assertEqual(gradients, ["64 bytes of gradients"] * 2)

    @skip_if_lt_x_gpu(2)
    @needs(torch_facts.RUNS_UNDER_FUNCTORCH)
    def test_forward_under_a_function_transform(self):
        """The unsharded parameters then have no storages of their own, and a DTensor may hide it."""

        def body() -> None:
            model = fully_shard(nn.Linear(4, 4).to(self.device), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
            inp = torch.ones(1, 4, device=self.device)
            torch.func.jvp(model, (inp,), (inp,))

        self.assertTrue(recorded(self.rank, body)["events"][Kind.COLLECTIVES])

    def test_it_repeats_and_shows_another_training(self):
        events = self._events()
        again = self._events()
        for kind in (Kind.COLLECTIVES, Kind.VALUES, Kind.MEMORY, Kind.STATES):
            self.assertEqual(again[kind], events[kind])
        other = self._events(lr=0.25)
        self.assertEqual(other[Kind.COLLECTIVES], events[Kind.COLLECTIVES])
        differing = [was[0] for was, now in zip(events[Kind.VALUES], other[Kind.VALUES]) if was != now]
        self.assertEqual(differing[:2], ["parameters", "loss"])

    @skip_if_lt_x_gpu(2)
    def test_fsdp1_and_groups(self):
        def train() -> None:
            model = FSDP(nn.Linear(4, 4).to(self.device))
            model(torch.ones(1, 4, device=self.device)).sum().backward()
            for rank in range(2):
                alone = dist.new_group([rank])
                if rank == self.rank:
                    dist.all_reduce(torch.ones(3, device=self.device), group=alone)

        events = recorded(self.rank, train)["events"]
        expected = [["all_gather", "float32", "[10]", "over 2"], ["reduce_scatter", "float32", "[20]", "over 2"]]
        self.assertEqual([each for each in events[Kind.COLLECTIVES] if each[2] in ("[10]", "[20]")], expected)
        self.assertIn(["all_reduce", "float32", "[3]", "over 1"], events[Kind.COLLECTIVES])
        self.assertEqual([each[1] for each in events[Kind.MEMORY][:1]], ["80 bytes of parameters"])


class TestThreads(MultiThreadedTestCase):
    """Without it, ranks that are threads could share a record, or lack their collectives."""

    world_size = 2

    def setUp(self):
        super().setUp()
        self._spawn_threads()

    def test_each_thread_has_its_collectives(self):
        line = recorded(self.rank, lambda: dist.all_reduce(torch.ones(3)))
        self.assertEqual(line["rank"], self.rank)
        self.assertEqual(line["events"][Kind.COLLECTIVES], [["all_reduce", "float32", "[3]", "over 2"]])

    def test_random_numbers_repeat_in_each_thread(self):
        """The threads share a generator. Without a record, each of them gets what the others leave."""
        found: list[Any] = []

        def sample() -> None:
            found.append([torch.rand(2).tolist() for _ in range(10)])
            torch.manual_seed(7)
            found.append(torch.randperm(100).tolist())

        for _ in range(2):
            recorded(self.rank, sample)
        self.assertEqual(found[:2], found[2:])
        dist.barrier()  # what is not recorded uses the generator of the threads that still are
        torch.manual_seed(7)
        self.assertNotEqual(found[0], [torch.rand(2).tolist() for _ in range(10)])

    def test_random_numbers_are_those_of_the_seed(self):
        found: list[Any] = []
        recorded(self.rank, lambda: found.extend([torch.manual_seed(7), torch.rand(3)]))
        self.assertEqual(found[1], torch.rand(3, generator=torch.Generator().manual_seed(7)))


class TestHooks(TestCase):
    """Without it, recording could change a test, or lack what it raises and warns about."""

    def test_exceptions_and_warnings(self):
        def body() -> None:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                warnings.warn("a word at 0x7f00", stacklevel=1)
            self.assertEqual(Path(caught[0].filename).name, Path(__file__).name)
            with self.assertRaises(KeyError):
                raise KeyError("x")

        events = recorded(0, body)["events"]
        self.assertEqual(events[Kind.EXCEPTIONS], [["warning", "a word at #"], ["KeyError", "'x'"]])

    def test_copies(self):
        line = recorded(0, lambda: torch.ones(2, 3).to(torch.bfloat16).clone())
        copies = [["_to_copy", "float32 to bfloat16", "[2, 3]"], ["clone", "bfloat16", "[2, 3]"]]
        self.assertEqual(line["events"][Kind.COPIES], copies)

    def test_a_test_that_compiles_is_left_out(self):
        for body in (
            lambda: torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)),
            lambda: torch._dynamo.optimize("eager")(lambda x: x + 1)(torch.ones(2)),
        ):
            self.assertEqual(recorded(0, body)["left_out"], "it compiles")

    def test_a_failure_leaves_no_mode(self):
        with tempfile.TemporaryDirectory() as folder, self.assertRaises(ZeroDivisionError):
            with session.recorded(folder, "t", 0):
                1 / 0  # noqa: B018
        self.assertEqual(torch._C._len_torch_dispatch_stack(), 0)

    def test_nothing_is_kept_alive(self):
        def body() -> None:
            tensor = torch.ones(3)
            reference = weakref.ref(tensor)
            self.assertEqual(tensor, torch.ones(3))
            tensor.clone()
            del tensor
            gc.collect()
            self.assertIsNone(reference())

        recorded(0, body)

    def test_values_are_read_without_an_effect_on_storages(self):
        tensor = torch.ones(3)
        digest(tensor)
        tensor.untyped_storage().resize_(0)
        self.assertEqual(digest(tensor)[2], "0")


class TestDigest(unittest.TestCase):
    """Without it, a wrong sign or order could pass as a rounding error of a device."""

    def signs(self, *numbers: float) -> list[float]:
        _, _, norm, signed = digest(torch.tensor(numbers))
        return [float(norm), float(signed)]

    def test_signs_and_order(self):
        norm, signed = self.signs(1.0, 2.0, 3.0)
        self.assertEqual(norm, 6.0)
        for others in ((-1.0, 2.0, 3.0), (2.0, 1.0, 3.0), (1.0, 3.0, 2.0)):
            self.assertGreater(abs(self.signs(*others)[1] - signed), 0.1)

    def test_an_error_of_each_element_changes_it_by_no_more(self):
        exact = torch.linspace(-3, 5, 100)
        norm, signed = self.signs(*exact.tolist())
        other = self.signs(*(exact * (1 + 1e-3 * torch.sign(torch.sin(torch.arange(100.0))))).tolist())
        self.assertLess(max(abs(other[0] - norm), abs(other[1] - signed)), 1.01e-3 * norm)

    def test_kinds_of_values(self):
        for value, kinds in (
            ([torch.ones(2, dtype=torch.bfloat16), torch.ones(1)], "1 bfloat16 1 float32"),
            ({"a": 1, "b": "x"}, "1 number 1 object"),
            ([id(s) for s in "ab"], "2 address"),
            (torch.ones(2, device="meta"), "1 float32"),
            (nn.LazyLinear(2).state_dict(), "2 object"),
            (torch.ones(2, dtype=torch.complex64), "1 complex64"),
        ):
            self.assertEqual(digest(value)[0], kinds)
        self.assertNotEqual(digest("x"), digest("y"))


if __name__ == "__main__":
    run_tests()
