"""Inputs and outputs of a forward under FSDP1: containers, keyword arguments, and integer tensors."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import parametrize, run_tests, subtest
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.references import average_gradients
from torch_fsdp_tests.installed_torch import torch_names


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


@dataclasses.dataclass
class Record:
    first: torch.Tensor
    second: Any


Wrap = Callable[[nn.Module], nn.Module]
Call = Callable[[nn.Module, torch.Tensor], torch.Tensor]
Pack = Callable[[torch.Tensor, torch.Tensor], Any]
Unpack = Callable[[Any], tuple[torch.Tensor, torch.Tensor]]

# Each pair of functions puts two tensors into a container and takes them out again.
CONTAINERS: dict[str, tuple[Pack, Unpack]] = {
    "nested": (lambda a, b: [{"a": (a,)}, [b]], lambda c: (c[0]["a"][0], c[1][0])),
    "namedtuple": (Pair, lambda c: (c.first, c.second)),
    "dataclass": (Record, lambda c: (c.first, c.second)),
    "ordered dict": (lambda a, b: OrderedDict(a=[a], b=b), lambda c: (c["a"][0], c["b"])),
    "dict of dataclass": (lambda a, b: {"r": Record(a, [b])}, lambda c: (c["r"].first, c["r"].second[0])),
}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, input: Any) -> torch.Tensor:
        return self.layer(input[0] if isinstance(input, list) else input["in"])


class InContainers(nn.Module):
    """Two layers that take their inputs, and return their outputs, in a container."""

    def __init__(self, pack: Pack, unpack: Unpack, wrap: Wrap = lambda module: module) -> None:
        super().__init__()
        self.pack, self.unpack = pack, unpack
        self.first, self.second = wrap(nn.Linear(4, 4)), wrap(nn.Linear(4, 4))

    def forward(self, container: Any) -> Any:
        a, b = self.unpack(container)
        return self.pack(self.first(a), self.second(b))


class ByKeyword(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, *, x: torch.Tensor, scale: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.layer(x) * scale["by"]


class WithoutInput(nn.Module):
    """Returns its vector times the output of ``inner``, or its square. Neither module has an input."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.vector = nn.Parameter(torch.arange(1.0, 5.0))
        self.inner = inner

    def forward(self) -> torch.Tensor:
        return self.vector.square() if self.inner is None else self.vector * self.inner()


class Seen(nn.Module):
    """A layer that remembers the dtypes of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.dtypes: list[torch.dtype] = []

    def forward(self, container: dict[str, Any], *, mask: list[torch.Tensor]) -> torch.Tensor:
        self.dtypes = [container["x"].dtype, container["ids"].dtype, container["pair"].first.dtype]
        self.dtypes += [container["pair"].second.dtype, container["record"].first.dtype, mask[0].dtype]
        return self.layer(container["x"])


class Several(nn.Module):
    """A layer with three outputs that are computed from one result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        y = self.layer(x)
        return {"sum": y + 1, "parts": [y * 2, (y * 3,)]}


class Shifted(nn.Module):
    """Adds one to the output of its inner module."""

    def __init__(self, inner: nn.Module, in_place: bool) -> None:
        super().__init__()
        self.inner, self.in_place = inner, in_place

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = self.inner(x)
        return output.add_(1) if self.in_place else output + 1


class _InputBase(FSDPTest):
    def _pair(self, build: Callable[[], nn.Module], device: str) -> tuple[nn.Module, nn.Module]:
        """The same module twice: plain, and in FSDP."""
        torch.manual_seed(0)
        reference = build().to(device)
        return reference, FSDP(copy.deepcopy(reference))

    def _test_parity(self, models: tuple[nn.Module, nn.Module], call: Call, device: str, steps: int = 5) -> None:
        """``call(model, x)`` gives the same output and input gradient for both models, at every step of SGD."""
        optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in models]
        torch.manual_seed(10 + self.rank)
        for _ in range(steps):
            x = torch.rand(8, 4, device=device)
            outputs, grads = [], []
            for each, optim in zip(models, optims):
                mine = x.clone().requires_grad_()
                optim.zero_grad()
                output = call(each, mine)
                output.sum().backward()
                outputs.append(output.detach())
                grads.append(mine.grad)
            average_gradients(models[0])
            for optim in optims:
                optim.step()
            self.assertIsNotNone(grads[0])
            self.assertEqual(outputs[1], outputs[0])
            self.assertEqual(grads[1], grads[0])


class TestInput(_InputBase):
    world_size = 1  # FSDP shards nothing here

    @skip_if_lt_x_gpu(1)
    @parametrize("input_cls", [subtest(dict, name="dict"), subtest(list, name="list")])
    def test_input_type(self, device, input_cls):
        """A list or a dict as the only argument: training matches a model without FSDP."""
        self._test_parity(self._pair(Model, device), _packed(input_cls), device)


def _packed(input_cls: type) -> Call:
    return lambda model, x: model([x] if input_cls is list else {"in": x})


class TestInputSharded(_InputBase):
    world_size = 2

    @skip_if_lt_x_gpu(2)
    @subtests(input_cls=[dict, list])
    def test_input_type_sharded(self, device, input_cls):
        """The same holds with shards, and with data that differs by rank."""
        self._test_parity(self._pair(Model, device), _packed(input_cls), device, steps=2)

    @skip_if_lt_x_gpu(2)
    @subtests(kind=list(CONTAINERS))
    def test_containers(self, device, kind):
        """Nested containers, also as outputs. The pre-backward logic of each unit runs once."""
        pack, unpack = CONTAINERS[kind]
        torch.manual_seed(0)
        reference = InContainers(pack, unpack).to(device)
        torch.manual_seed(0)
        model = FSDP(InContainers(pack, unpack, lambda module: FSDP(module.to(device))).to(device))

        def call(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            a, b = unpack(each(pack(x, 2 * x)))
            return a + 3 * b

        with self._prepared() as handles:
            self._test_parity((reference, model), call, device, steps=2)
        self.assertEqual([handles.count(handle) for handle in internals.handles(model)], [2] * 2)

    @contextlib.contextmanager
    def _prepared(self) -> Iterator[list[internals.Handle]]:
        """The units whose pre-backward logic runs in the context."""
        handles: list[internals.Handle] = []
        handle_class = internals.flat_param.FlatParamHandle
        prepare = handle_class.prepare_gradient_for_backward

        def recording(handle: internals.Handle) -> None:
            handles.append(handle)
            prepare(handle)

        with torch_names.patched(handle_class, "prepare_gradient_for_backward", recording):
            yield handles

    @skip_if_lt_x_gpu(2)
    @subtests(used=["all", "sum", "first", "second"])
    def test_several_outputs(self, device, used):
        """A unit with several outputs prepares its backward once, whichever outputs are used."""

        def call(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            output = each(x)
            total, first, second = output["sum"], output["parts"][0], output["parts"][1][0]
            return {"all": total + first * second, "sum": total, "first": first, "second": second}[used]

        with self._prepared() as handles:
            self._test_parity(self._pair(Several, device), call, device, steps=2)
        self.assertEqual(len(handles), 2)

    @skip_if_lt_x_gpu(2)
    def test_keyword_only(self, device):
        """Training matches with inputs that are passed only by keyword."""

        def call(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            return each(x=x, scale={"by": 2 * x.detach()})

        self._test_parity(self._pair(ByKeyword, device), call, device, steps=2)

    @skip_if_lt_x_gpu(2)
    @subtests(
        sharding_strategy=[ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD],
        mixed_precision=[None, MixedPrecision(torch.float16)],
    )
    def test_no_inputs(self, device, **kwargs):
        """A root and an inner unit may have no inputs at all, also with mixed precision."""
        reference = WithoutInput(WithoutInput()).to(device)
        model = FSDP(WithoutInput(FSDP(WithoutInput().to(device), **kwargs)).to(device), **kwargs)
        # The first step's values are exact in half precision.
        steps = 3 if kwargs["mixed_precision"] is None else 1
        self._test_parity((reference, model), lambda each, x: each().float() * x.mean(0), device, steps=steps)
        if steps > 1:
            self.assertEqual(model(), reference())

    @skip_if_lt_x_gpu(2)
    @subtests(in_place=[True, False], is_view=[True, False], wraps_inner=[True, False])
    def test_output_changed_in_place(self, device, in_place, is_view, wraps_inner):
        """The output of an inner instance may be changed in place, also if it is a view."""
        torch.manual_seed(0)
        wrap = FSDP if wraps_inner else lambda module: module
        view = [nn.Unflatten(0, (1, -1))] if is_view else []
        reference = Shifted(nn.Sequential(nn.Linear(4, 4), *view), in_place).to(device)
        model = FSDP(Shifted(wrap(copy.deepcopy(reference.inner)), in_place))
        shows = torch_defect("fsdp1_in_place_change_of_output_raises", when=in_place and is_view and wraps_inner)
        with shows:
            self._test_parity((reference, model), lambda each, x: each(x), device, steps=2)

    @skip_if_lt_x_gpu(2)
    @subtests(is_root=[True, False])
    def test_cast_in_containers(self, device, is_root):
        """With fp16 parameters, root and unit cast floats in containers to fp16, but not integers."""
        precision = MixedPrecision(
            param_dtype=torch.float16, cast_root_forward_inputs=is_root, cast_forward_inputs=not is_root
        )
        seen = Seen().to(device)
        model = FSDP(seen, mixed_precision=precision)
        if not is_root:
            # The outer instance casts nothing, so the inner one has to do it.
            nowhere = MixedPrecision(cast_forward_inputs=False, cast_root_forward_inputs=False)
            inner, model = model, nn.Module()
            model.inner, model.own = inner, nn.Parameter(torch.ones(3, device=device))
            model.forward = lambda *args, **kwargs: inner(*args, **kwargs)
            model = FSDP(model, mixed_precision=nowhere)
        x, ids = torch.rand(2, 4, device=device), torch.arange(4, device=device)
        given: dict[str, Any] = {"x": x, "ids": ids, "pair": Pair(x, ids), "record": Record(x, None)}
        output = model(given, mask=[x])
        half, long = torch.float16, torch.int64
        self.assertEqual(seen.dtypes, [half, long, half, long, half, half])
        self.assertEqual(output.dtype, half)
        # The caller's own containers are unchanged.
        kept = [given["x"].dtype, given["pair"].first.dtype, given["record"].first.dtype]
        self.assertEqual(kept, [torch.float32] * 3)


instantiate_device_type_tests(TestInput, globals(), allow_xpu=True)
instantiate_device_type_tests(TestInputSharded, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
