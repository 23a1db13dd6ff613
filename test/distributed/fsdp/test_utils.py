"""Helpers of FSDP that find, cast and move tensors in inputs and outputs, or replace prefixes of state dict keys."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_utils import TestCase, parametrize, run_tests, subtest
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.installed_torch import torch_names

utils = torch_names.module("torch.distributed.utils")

HOST = "cpu"  # the CPU is the subject
# If there is only the CPU, the second device is meta.
OTHER = "meta" if accelerator.current().is_cpu else accelerator.current().type


@dataclasses.dataclass
class SomeDataClass:
    some_key: str
    some_float: float
    some_tensor: list[torch.Tensor]


@dataclasses.dataclass(frozen=True)
class FrozenDataClass:
    some_key: str
    some_tensor: list[torch.Tensor]


class Point(NamedTuple):
    # Not in alphabetical order, so that sorting would be detected.
    y: torch.Tensor
    x: Any


class Nothing(NamedTuple):
    pass


class Registry(OrderedDict):
    pass


class Batch(dict):
    pass


class TestUtils(TestCase):
    @parametrize("device_list", [[HOST], [OTHER], subtest([HOST, OTHER], name=f"{HOST}_{OTHER}")])
    def test_apply_to_tensors(self, device_list):
        """Each tensor in nested data is visited once, and the containers keep their types."""
        shapes = itertools.cycle([(1,), (2, 3), (4, 5, 6), (7, 8, 9, 10)])
        devices = itertools.cycle(device_list)
        made: list[torch.Tensor] = []

        def get_a_tensor() -> torch.Tensor:
            # Skip a device after each round of shapes. Otherwise each shape would always get the same device.
            if len(made) % 4 == 0:
                next(devices)
            made.append(torch.empty(next(shapes), device=next(devices)))
            return made[-1]

        data: list[Any] = [
            1,
            "str",
            get_a_tensor(),
            {"key1": get_a_tensor(), "key2": {1: get_a_tensor()}, "key3": 3},
            {"one": SomeDataClass("some_key", 1.0, [get_a_tensor()]), 2: FrozenDataClass("key", [get_a_tensor()])},
            {get_a_tensor(), get_a_tensor(), "a string"},
            ["abc", (get_a_tensor(), [2, get_a_tensor()], {get_a_tensor(), 3})],
            OrderedDict([("k", "value"), ("list", [get_a_tensor(), get_a_tensor()])]),
            SomeDataClass("some_key", 1.0, [get_a_tensor(), get_a_tensor()]),
        ]
        self.assertEqual({tensor.device.type for tensor in made}, set(device_list))
        visited: list[torch.Tensor] = []

        def fn(tensor: torch.Tensor) -> torch.Tensor:
            visited.append(tensor)
            return tensor

        for container in (data, tuple(data)):
            visited.clear()
            new_data = utils._apply_to_tensors(fn, container)
            self.assertEqual(sum(tensor.numel() for tensor in visited), sum(tensor.numel() for tensor in made))
            self.assertEqual(sorted(map(id, visited)), sorted(map(id, made)))
            self.assertIs(type(new_data), type(container))
            self.assertEqual([type(value) for value in new_data], [type(value) for value in data])

    def test_replace_by_prefix(self):
        """Only a match at the start of a key is replaced, not a later one. No value is copied."""
        state_dict = {name: torch.ones(1) for name in ("layer.a", "abc.layer.def", "layer.b")}
        original = dict(state_dict)
        utils._replace_by_prefix(state_dict, "layer.", "module.layer.")
        renamed = {"module.layer.a": "layer.a", "abc.layer.def": "abc.layer.def", "module.layer.b": "layer.b"}
        self.assertEqual(state_dict.keys(), renamed.keys())
        for name, old_name in renamed.items():
            self.assertIs(state_dict[name], original[old_name])
        utils._replace_by_prefix(state_dict, "module.layer.", "layer.")
        self.assertEqual(state_dict.keys(), original.keys())
        for name, value in original.items():
            self.assertIs(state_dict[name], value)

    def test_replace_by_the_same_prefix(self):
        """Replacing a prefix by itself raises. An empty prefix works."""
        state_dict = {"layer.a": 1}
        with self.assertRaisesRegex(ValueError, "old_prefix and new_prefix must be distinct"):
            utils._replace_by_prefix(state_dict, "layer.", "layer.")
        self.assertEqual(state_dict, {"layer.a": 1})
        utils._replace_by_prefix(state_dict, "layer.", "")
        self.assertEqual(state_dict, {"a": 1})
        utils._replace_by_prefix(state_dict, "", "layer.")
        self.assertEqual(state_dict, {"layer.a": 1})

    def test_packed_sequence(self):
        """An in-place function changes the data of a packed sequence, and the same object is returned."""
        rnn = nn.RNN(5, 5)
        packed = pack_padded_sequence(torch.rand(5, 1, 5), torch.tensor([4]))
        output, _ = rnn(packed)
        self.assertGreater(pad_packed_sequence(output)[0].abs().sum().item(), 0)

        def fill_fn(tensor: torch.Tensor) -> None:
            tensor.fill_(0.0)

        self.assertIs(utils._apply_to_tensors(fill_fn, output), output)
        padded, lengths = pad_packed_sequence(output)
        self.assertEqual((padded.sum().item(), lengths.tolist()), (0.0, [4]))

    def test_types_fields_and_leaves_stay(self):
        """Named tuples and ordered dicts keep type and order. Other objects are unchanged."""
        leaf, tensor = object(), torch.ones(2)
        found = utils._apply_to_tensors(
            lambda each: each, [Point(tensor, leaf), Registry(z=tensor, a=leaf, m=[leaf]), leaf]
        )
        point, registry, last = found
        self.assertIs(type(point), Point)
        self.assertIs(type(registry), Registry)
        self.assertEqual(list(registry), ["z", "a", "m"])
        for value in (point.y, registry["z"]):
            self.assertIs(value, tensor)
        for value in (point.x, registry["a"], registry["m"][0], last):
            self.assertIs(value, leaf)

    def test_new_tensors_go_into_new_containers(self):
        """``_apply_to_tensors`` returns new containers with the function's results. Its argument does not change."""
        tensors = [torch.full((2,), float(value)) for value in range(7)]
        given: dict[str, Any] = {
            "z": tensors[0],
            "a": [tensors[1], (tensors[2],)],
            "m": Point(tensors[3], "x"),
            "b": FrozenDataClass("key", [tensors[4]]),
            "y": Registry(q=tensors[5]),
            "c": {tensors[6]},
        }
        found = utils._apply_to_tensors(lambda tensor: tensor + 10, given)
        self.assertEqual(list(found), list(given))
        leaves = [*_leaves(found)]
        self.assertEqual([tensor.tolist() for tensor in leaves], [[value + 10.0] * 2 for value in range(7)])
        for here, there in zip(_leaves(given), tensors, strict=True):
            self.assertIs(here, there)
            self.assertNotIn(id(here), [id(tensor) for tensor in leaves])
        self.assertEqual([tensor.tolist() for tensor in tensors], [[float(value)] * 2 for value in range(7)])

    def test_a_kind_of_dict_stays(self):
        """A subclass of ``dict`` keeps its type, like subclasses of ``list``, ``set`` and ``OrderedDict``."""
        batch = Batch(a=torch.ones(2))
        (cast,), _ = utils._cast_forward_inputs(torch.float16, batch)
        self.assertEqual(cast["a"].dtype, torch.float16)
        with torch_defect("fsdp1_inputs_lose_their_kind_of_dict"):
            self.assertIs(type(cast), Batch)

    def test_a_dataclass_cannot_compute_a_field(self):
        """``dataclasses.replace`` rejects a field that ``__init__`` does not take."""

        @dataclasses.dataclass
        class Masked:
            tensor: torch.Tensor
            count: int = dataclasses.field(init=False, default=0)

        with self.assertRaisesRegex((TypeError, ValueError), "init=False"):
            utils._apply_to_tensors(lambda tensor: tensor, Masked(torch.ones(2)))

    def test_cast_forward_inputs(self):
        """Floating-point tensors are cast in all containers. Nothing else is cast or copied."""
        whole, half, flag = torch.arange(2), torch.ones(2, dtype=torch.float16), torch.tensor([True])
        wave = torch.ones(2, dtype=torch.complex64)
        args, kwargs = utils._cast_forward_inputs(
            torch.float16, torch.ones(2), [torch.ones(2, dtype=torch.float64), whole], a={"b": torch.ones(2)}, c=half,
            d=(flag, wave, 1.5),
        )  # fmt: skip
        for cast in (args[0], args[1][0], kwargs["a"]["b"]):
            self.assertEqual(cast, half)
        for actual, given in ((args[1][1], whole), (kwargs["c"], half), (kwargs["d"][0], flag), (kwargs["d"][1], wave)):
            self.assertIs(actual, given)
        self.assertEqual(kwargs["d"][2], 1.5)
        tensor = torch.ones(2)
        args, kwargs = utils._cast_forward_inputs(None, tensor, c=tensor)
        self.assertIs(args[0], tensor)
        self.assertIs(kwargs["c"], tensor)
        # The cast data of a packed sequence are dropped. Its caller has to cast it.
        packed = pack_padded_sequence(torch.ones(2, 1, 1), torch.tensor([2]))
        self.assertIs(utils._cast_forward_inputs(torch.float16, packed)[0][0], packed)

    def test_cast_forward_inputs_propagates_gradients(self):
        """Gradients flow back through the cast, in the input's dtype."""
        given = {dtype: torch.ones(2, dtype=dtype, requires_grad=True) for dtype in (torch.float32, torch.float64)}
        constant = torch.ones(2)
        for dtype, tensor in given.items():
            args, kwargs = utils._cast_forward_inputs(torch.bfloat16, tensor, constant, also=tensor)
            self.assertEqual([each.requires_grad for each in (*args, kwargs["also"])], [True, False, True])
            (args[0] * 2 + kwargs["also"]).sum().backward()
            self.assertEqual(tensor.grad, torch.full((2,), 3.0, dtype=dtype))

    def test_to_kwargs(self):
        """Tensors in tuples, lists and dicts are moved. Containers keep their types; other objects are unchanged."""
        other = torch.device(accelerator.current().device(0) if OTHER != "meta" else OTHER)
        tensor, leaf = torch.ones(2), object()
        inputs = (tensor, [tensor, leaf], Point(tensor, leaf), ())
        kwargs = {"z": tensor, "a": {"b": (tensor,), "c": 1}, "m": Registry(q=tensor)}
        moved_inputs, moved_kwargs = utils._to_kwargs(inputs, kwargs, other, False)
        (found,), (found_kwargs,) = moved_inputs, moved_kwargs
        self.assertEqual([type(each) for each in found], [torch.Tensor, list, Point, tuple])
        self.assertEqual(list(found_kwargs), ["z", "a", "m"])
        self.assertEqual([type(each) for each in found_kwargs.values()], [torch.Tensor, dict, Registry])
        leaves = found[0], found[1][0], found[2].y, found_kwargs["z"], found_kwargs["a"]["b"][0], found_kwargs["m"]["q"]
        self.assertEqual([(each.device, each.shape) for each in leaves], [(other, tensor.shape)] * 6)
        for value in (found[1][1], found[2].x):
            self.assertIs(value, leaf)
        self.assertEqual((found[3], found_kwargs["a"]["c"]), ((), 1))
        # A tensor that is already on the device is not copied.
        ((there,),), _ = utils._to_kwargs((tensor,), None, tensor.device, False)
        self.assertIs(there, tensor)
        # Tensors in a dataclass are not looked for.
        given = SomeDataClass("", 1.0, [tensor])
        self.assertIs(utils._to_kwargs((given,), None, other, False)[0][0][0], given)
        # A dict is made anew from its items, and a ``defaultdict`` cannot be.
        with self.assertRaisesRegex(TypeError, "must be callable or None"):
            utils._to_kwargs((collections.defaultdict(list, a=tensor),), None, other, False)

    def test_to_kwargs_hands_on_containers_that_are_there(self):
        """A container is copied only if a tensor in it has to move."""
        other = torch.device(accelerator.current().device(0) if OTHER != "meta" else OTHER)
        here = torch.ones(2, device=HOST)
        for container in ([here, 1], (here, [here]), Point(here, 1), {"a": here}, Registry(q=[here])):
            with self.subTest(container=container):
                (((kept,),), _) = utils._to_kwargs((container,), None, here.device, False)
                with torch_defect("fsdp1_writes_to_inputs_are_lost"):
                    self.assertIs(kept, container)
                (((moved,),), _) = utils._to_kwargs((container,), None, other, False)
                self.assertIsNot(moved, container)
                self.assertIs(type(moved), type(container))

    def test_to_kwargs_fills_up(self):
        """Missing keyword arguments become an empty dict, missing positional ones an empty tuple."""
        device = torch.device(HOST)
        self.assertEqual(utils._to_kwargs((1, 2), None, device, False), (((1, 2),), ({},)))
        self.assertEqual(utils._to_kwargs((), {"a": 1, "b": 2}, device, False), (((),), ({"a": 1, "b": 2},)))
        self.assertEqual(utils._to_kwargs((1, 2, 3), {"a": 1}, device, False), (((1, 2, 3),), ({"a": 1},)))
        self.assertEqual(utils._to_kwargs((), {}, device, False), ((), ()), may_be="empty")

    def test_to_kwargs_keeps_the_inputs_beside_an_empty_named_tuple(self):
        """A named tuple without fields is an ordinary input."""
        actual = utils._to_kwargs((Nothing(), 1), {"a": 2}, torch.device(HOST), False)
        with torch_defect("fsdp1_empty_named_tuple_swallows_inputs"):
            self.assertEqual(actual, (((Nothing(), 1),), ({"a": 2},)))


def _leaves(container: Any) -> list[torch.Tensor]:
    """The tensors in the containers of these tests, in order."""
    if isinstance(container, torch.Tensor):
        return [container]
    if isinstance(container, dict):
        container = container.values()
    elif dataclasses.is_dataclass(container):
        container = vars(container).values()
    elif not isinstance(container, list | tuple | set):
        return []
    return [leaf for each in container for leaf in _leaves(each)]


instantiate_device_type_tests(TestUtils, globals())

if __name__ == "__main__":
    run_tests()
