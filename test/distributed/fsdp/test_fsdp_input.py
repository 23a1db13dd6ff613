"""What a forward under FSDP1 may be given, and may return: containers, keywords, and tensors that are no floats."""

from __future__ import annotations

import dataclasses
from collections import Counter, OrderedDict
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp._flat_param import FlatParamHandle

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import parametrize, run_tests, subtest


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    second: Any


# Each makes a container of two tensors, and takes the two out of it again.
CONTAINERS = {
    "nested": (lambda a, b: [{"a": (a,)}, [b]], lambda c: (c[0]["a"][0], c[1][0])),
    "namedtuple": (Pair, lambda c: (c.first, c.second)),
    "dataclass": (Record, lambda c: (c.first, c.second)),
    "ordered dict": (lambda a, b: OrderedDict(a=[a], b=b), lambda c: (c["a"][0], c["b"])),
    "dict of dataclass": (lambda a, b: {"r": Record(a, [b])}, lambda c: (c["r"].first, c["r"].second[0])),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input):
        return self.layer(input[0] if isinstance(input, list) else input["in"])


class InContainers(nn.Module):
    """Two layers, whose inputs come, and whose outputs go, in a container."""

    def __init__(self, pack, unpack, wrap=lambda module: module):
        super().__init__()
        self.pack, self.unpack = pack, unpack
        self.first, self.second = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))

    def forward(self, container):
        a, b = self.unpack(container)
        return self.pack(self.first(a), self.second(b))


class ByKeyword(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x, scale):
        return self.layer(x) * scale["by"]


class Seen(nn.Module):
    """A layer that remembers the dtypes of what it was given."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, container, *, mask):
        self.dtypes = [container["x"].dtype, container["ids"].dtype, container["pair"].first.dtype]
        self.dtypes += [container["pair"].second.dtype, container["record"].first.dtype, mask[0].dtype]
        return self.layer(container["x"])


class Several(nn.Module):
    """A layer with three outputs of one result."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        y = self.layer(x)
        return {"sum": y + 1, "parts": [y * 2, (y * 3,)]}


class _InputBase(FSDPTest):
    def _pair(self, build, device, **fsdp_kwargs):
        """The same module twice: as it is, and in FSDP."""
        models = []
        for wrap in (lambda module: module, lambda module: FSDP(module, **fsdp_kwargs)):
            torch.manual_seed(0)
            models.append(wrap(build().to(device)))
        return models

    def _test_parity(self, reference, model, call, device, steps=5):
        """``call(model, x)`` has the output and the input gradient of the reference, at every step of SGD."""
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
        torch.manual_seed(10 + self.rank)
        for _ in range(steps):
            x = torch.rand(8, 4, device=device)
            outputs, grads = [], []
            for each, optim in zip((reference, model), optims):
                mine = x.clone().requires_grad_()
                optim.zero_grad()
                output = call(each, mine)
                output.sum().backward()
                outputs.append(output.detach())
                grads.append(mine.grad)
            for param in reference.parameters():
                dist.all_reduce(param.grad)
                param.grad.div_(self.world_size)
            for optim in optims:
                optim.step()
            self.assertIsNotNone(grads[0])
            self.assertEqual(outputs[1], outputs[0])
            self.assertEqual(grads[1], grads[0])


class TestInput(_InputBase):
    world_size = 1  # where FSDP shards nothing

    @skip_if_lt_x_gpu(1)
    @parametrize("input_cls", [subtest(dict, name="dict"), subtest(list, name="list")])
    def test_input_type(self, device, input_cls):
        """A list or a dict as the one argument, trained for some steps as without FSDP."""
        self._test_parity(*self._pair(Model, device), _packed(input_cls), device)


def _packed(input_cls):
    return lambda model, x: model([x] if input_cls is list else {"in": x})


class TestInputSharded(_InputBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    def test_input_type_sharded(self, device):
        """Beyond upstream: the same with shards, and data that differs by rank."""
        for input_cls in (dict, list):
            with self.subTest(input_cls=input_cls):
                self._test_parity(*self._pair(Model, device), _packed(input_cls), device, steps=2)

    @skip_if_lt_x_gpu(2)
    def test_containers(self, device):
        """Beyond upstream: containers in containers, also as outputs; each unit's pre-backward logic runs once."""
        self.run_subtests({"kind": list(CONTAINERS)}, self._test_containers, device=device)

    def _test_containers(self, kind, device):
        pack, unpack = CONTAINERS[kind]
        torch.manual_seed(0)
        reference = InContainers(pack, unpack).to(device)
        torch.manual_seed(0)
        model = FSDP(InContainers(pack, unpack, lambda module: FSDP(module.to(device))).to(device))

        def call(each, x):
            a, b = unpack(each(pack(x, 2 * x)))
            return a + 3 * b

        ran: Counter[FlatParamHandle] = Counter()
        prepare = FlatParamHandle.prepare_gradient_for_backward

        def counted(handle):
            ran[handle] += 1
            prepare(handle)

        with mock.patch.object(FlatParamHandle, "prepare_gradient_for_backward", counted):
            self._test_parity(reference, model, call, device, steps=2)
        handles = internals.handles(model)
        self.assertEqual([ran[handle] for handle in handles], [2] * 2)

    @skip_if_lt_x_gpu(2)
    def test_several_outputs(self, device):
        """Beyond upstream: a unit with several outputs prepares its backward once, whichever of them are used."""
        self.run_subtests({"used": ["all", "sum", "first", "second"]}, self._test_several_outputs, device=device)

    def _test_several_outputs(self, used, device):
        def call(each, x):
            output = each(x)
            total, first, second = output["sum"], output["parts"][0], output["parts"][1][0]
            return {"all": total + first * second, "sum": total, "first": first, "second": second}[used]

        reference, model = self._pair(Several, device)
        prepare = FlatParamHandle.prepare_gradient_for_backward
        with mock.patch.object(FlatParamHandle, "prepare_gradient_for_backward", autospec=True) as counted:
            counted.side_effect = prepare
            self._test_parity(reference, model, call, device, steps=2)
        self.assertEqual(counted.call_count, 2)

    @skip_if_lt_x_gpu(2)
    def test_keyword_only(self, device):
        """Beyond upstream: inputs that are given by keyword alone."""
        self._test_parity(
            *self._pair(ByKeyword, device), lambda model, x: model(x=x, scale={"by": 2 * x.detach()}), device, steps=2
        )

    @skip_if_lt_x_gpu(2)
    def test_cast_in_containers(self, device):
        """Beyond upstream: with fp16 parameters floats in containers are cast, by root and unit, and no integers."""
        self.run_subtests({"is_root": [True, False]}, self._test_cast_in_containers, device=device)

    def _test_cast_in_containers(self, is_root, device):
        half = MixedPrecision(
            param_dtype=torch.float16, cast_root_forward_inputs=is_root, cast_forward_inputs=not is_root
        )
        seen = Seen().to(device)
        model = FSDP(seen, mixed_precision=half)
        if not is_root:
            # The outer one casts nothing, and the inner one is left to it alone.
            nowhere = MixedPrecision(cast_forward_inputs=False, cast_root_forward_inputs=False)
            inner, model = model, nn.Module()
            model.inner, model.own = inner, nn.Parameter(torch.ones(3, device=device))
            model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
            model = FSDP(model, mixed_precision=nowhere)
        x, ids = torch.rand(2, 4, device=device), torch.arange(4, device=device)
        given = {"x": x, "ids": ids, "pair": Pair(x, ids), "record": Record(x, None)}
        output = model(given, mask=[x])
        half, long = torch.float16, torch.int64
        self.assertEqual(seen.dtypes, [half, long, half, long, half, half])
        self.assertEqual(output.dtype, half)
        # The caller's own containers are left as they were.
        kept = [given["x"].dtype, given["pair"].first.dtype, given["record"].first.dtype]
        self.assertEqual(kept, [torch.float32] * 3)


instantiate_device_type_tests(TestInput, globals(), allow_xpu=True)
instantiate_device_type_tests(TestInputSharded, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
