"""All-gather extensions of FSDP2: a local tensor defines what is gathered, and builds the parameter from the outputs.

The hooks are ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``, on the tensor's class or on the tensor itself.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.func import functional_call

from torch_fsdp_tests.common_distributed import RankTestCase, needs, skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import MLP, FSDPTest, FSDPTestMultiThread, check_sharded_parity
from torch_fsdp_tests.common_fsdp.training import check_losses
from torch_fsdp_tests.common_utils import run_tests
from torch_fsdp_tests.defects import torch_defect
from torch_fsdp_tests.device import accelerator
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.fsdp.meshes import make_mesh
from torch_fsdp_tests.fsdp.references import average, bytes_of
from torch_fsdp_tests.fsdp.seeded import filled, uniform
from torch_fsdp_tests.fsdp.shards import chunk_of
from torch_fsdp_tests.fsdp.training import backward, loss_of, shard_each, take_step
from torch_fsdp_tests.installed_torch import torch_facts, torch_names
from torch_fsdp_tests.two_tensor import TwoTensor

pytree = torch_names.module("torch.utils._pytree")

HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
_class_patch_lock = threading.Lock()  # the threads of a test share the class that they patch


def two_tensor_fsdp_pre_all_gather_v1(self: TwoTensor, mesh: DeviceMesh) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (self.a, self.b), None


def two_tensor_fsdp_pre_all_gather_v2(
    self: TwoTensor,
    mesh: DeviceMesh,
    outer_size: torch.Size,
    outer_stride: tuple[int, ...],
    module: nn.Module,
    mp_policy: MixedPrecisionPolicy,
) -> tuple[tuple[torch.Tensor, ...], Any]:
    return two_tensor_fsdp_pre_all_gather_v1(self, mesh)


def two_tensor_fsdp_post_all_gather(
    self: TwoTensor,
    all_gather_outputs: tuple[torch.Tensor, ...],
    metadata: Any,
    param_dtype: torch.dtype,
    *,
    out: torch.Tensor | None = None,
) -> tuple[TwoTensor, tuple[torch.Tensor, ...]] | None:
    assert metadata is None, metadata
    a, b = all_gather_outputs
    if out is None:
        whole = TwoTensor(a.to(param_dtype), b.to(param_dtype))
        return whole, (whole.a, whole.b)
    assert isinstance(out, TwoTensor), type(out)
    for gathered, part in ((a, out.a), (b, out.b)):
        assert part.dtype == param_dtype, (part.dtype, param_dtype)
        if gathered.dtype == param_dtype:  # the parts are the gathered tensors, so there is nothing to copy
            assert part.untyped_storage().data_ptr() == gathered.untyped_storage().data_ptr()
        else:
            with torch.no_grad(), internals.keeping_version(part):
                part.copy_(gathered)
    return None


TWO_TENSOR_PRE_ALL_GATHER = {1: two_tensor_fsdp_pre_all_gather_v1, 2: two_tensor_fsdp_pre_all_gather_v2}


class BFloat16AllGatherTensor(torch.Tensor):
    """A tensor that is gathered as bfloat16. Short shards are padded with NaN, so padding in a result is visible."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, pad_in_pre_all_gather: bool = True) -> BFloat16AllGatherTensor:
        return torch.Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), data.storage_offset(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: torch.Tensor, pad_in_pre_all_gather: bool = True) -> None:
        self._data = data
        self._pad_in_pre_all_gather = pad_in_pre_all_gather

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        assert mesh.ndim == 1, mesh
        shard = self._data.to(torch.bfloat16)
        if self._pad_in_pre_all_gather and outer_size[0] % mesh.size():
            padded = shard.new_full((math.ceil(outer_size[0] / mesh.size()), *outer_size[1:]), math.nan)
            padded[: shard.size(0)] = shard
            shard = padded
        return (shard,), None

    @torch.no_grad()
    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        (gathered,) = all_gather_outputs
        assert metadata is None and gathered.dtype == torch.bfloat16, (metadata, gathered.dtype)
        if out is None:
            whole = gathered.to(param_dtype)
            return whole, (gathered, whole)
        with internals.keeping_version(out):
            out.copy_(gathered[: out.size(0)])  # the gathered tensor includes the padding
        return None

    @classmethod
    def __torch_dispatch__(
        cls, func: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        pads = set()

        def unwrap(tensor: BFloat16AllGatherTensor) -> torch.Tensor:
            pads.add(tensor._pad_in_pre_all_gather)
            return tensor._data

        args, kwargs = pytree.tree_map_only(cls, unwrap, (args, kwargs or {}))
        assert len(pads) == 1, f"operands disagree about padding: {pads}"
        pad = pads.pop()
        return pytree.tree_map_only(torch.Tensor, lambda tensor: cls(tensor, pad), func(*args, **kwargs))

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_data"], None

    @staticmethod
    def __tensor_unflatten__(
        inner_tensors: dict[str, torch.Tensor], meta: None, outer_size: torch.Size, outer_stride: tuple[int, ...]
    ) -> torch.Tensor:
        return inner_tensors["_data"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._data!r})"


class ReleasingTensor(BFloat16AllGatherTensor):
    """A ``BFloat16AllGatherTensor`` whose all-gather outputs FSDP frees right after the post-hook."""

    def fsdp_should_release_all_gather_outputs_after_post_all_gather(self) -> bool:
        return True


class Extension:
    """Hooks on one local tensor, not on its class. They record their arguments.

    ``encode(shard)`` returns the tensors to gather and the metadata. ``decode(gathered, metadata)`` returns the
    unsharded parameter.
    """

    def __init__(
        self,
        local: torch.Tensor,
        encode: Callable[[torch.Tensor], tuple[tuple[torch.Tensor, ...], Any]],
        decode: Callable[[tuple[torch.Tensor, ...], Any], torch.Tensor],
    ) -> None:
        self.local, self.encode, self.decode = local, encode, decode
        self.pre_arguments: list[tuple[Any, ...]] = []
        self.sent: list[Any] = []
        self.received: list[Any] = []
        self.param_dtypes: list[torch.dtype] = []
        self.outs: list[torch.Tensor | None] = []
        self.gathered_and_whole: tuple[torch.Tensor, ...] = ()
        local.fsdp_pre_all_gather, local.fsdp_post_all_gather = self.pre, self.post

    def pre(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any) -> tuple[Any, Any]:
        self.pre_arguments.append((mesh, outer_size, outer_stride, module, mp_policy))
        payload, metadata = self.encode(self.local.a if isinstance(self.local, TwoTensor) else self.local)
        self.sent.append(metadata)
        return payload, metadata

    @torch.no_grad()
    def post(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        self.received.append(metadata)
        self.param_dtypes.append(param_dtype)
        self.outs.append(out)
        whole = self.decode(all_gather_outputs, metadata).to(param_dtype)
        if out is None:
            self.gathered_and_whole = (*all_gather_outputs, whole)
            return whole, (whole,)  # FSDP also frees the all-gather outputs, which are not listed
        with internals.keeping_version(out):
            out.copy_(whole)
        return None

    def storage_sizes(self) -> list[int]:
        return [tensor.untyped_storage().size() for tensor in self.gathered_and_whole]


@dataclass
class Scaling:
    scale: float
    shape: tuple[int, ...]


def as_it_is(shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (shard,), None


def as_bfloat16(shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
    return (shard.to(torch.bfloat16),), None


def as_int8_and_scale(shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
    """Return two tensors of different dtypes to gather. Each rank has its own scale."""
    scale = shard.abs().amax().reshape(1) / 127
    return ((shard / scale).round().to(torch.int8), scale), None


def from_int8_and_scale(gathered: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
    values, scales = gathered
    return (values.view(len(scales), -1).float() * scales[:, None]).view(values.shape)


def the_only_one(gathered: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
    (whole,) = gathered
    return whole


positive = functools.partial(filled, low=0.25, high=0.75)  # with positive inputs every ReLU is active
moderate = functools.partial(filled, low=0.02, high=0.1)  # outputs of three MLPs are about as large as their inputs


def local_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param._local_tensor for name, param in module.named_parameters()}


def extend(module: nn.Module, encode: Callable = as_it_is, decode: Callable = the_only_one) -> dict[str, Extension]:
    """Put hooks on the local tensors of a sharded module. Returns the extensions by parameter name."""
    return {name: Extension(local, encode, decode) for name, local in local_tensors(module).items()}


def gather_rows(local: torch.Tensor) -> torch.Tensor:
    """The full tensor of which ``local`` is an even local shard in dimension 0, gathered without FSDP."""
    shards = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(shards, local.detach().contiguous())
    return torch.cat(shards)


class TestFullyShardAllGatherExtensionsCommon(RankTestCase):
    @property
    def world_size(self) -> int:
        return 2

    @contextlib.contextmanager
    def _patch_two_tensor_fsdp_all_gather(self, pre_all_gather_version: int) -> Iterator[None]:
        """Put the hooks on the class ``TwoTensor``. A rank that fails does not remove them, because other ranks, which
        may be threads of this process, still use them.
        """
        hooks = (TWO_TENSOR_PRE_ALL_GATHER[pre_all_gather_version], two_tensor_fsdp_post_all_gather)
        with _class_patch_lock:
            for name, hook in zip(HOOKS, hooks, strict=True):
                setattr(TwoTensor, name, hook)
        dist.barrier()
        yield
        dist.barrier()
        with _class_patch_lock:
            for name in HOOKS:
                if hasattr(TwoTensor, name):
                    delattr(TwoTensor, name)

    def _for_each_hook_version(self, test: Callable[..., None]) -> None:
        for version in TWO_TENSOR_PRE_ALL_GATHER:
            with self._patch_two_tensor_fsdp_all_gather(version):
                self.run_subtests({"reshard_after_forward": [True, False]}, test)

    def _init_two_tensor_mlp(self) -> nn.Module:
        # No bias, because its gradient would be a TwoTensor in a plain model and a plain tensor with FSDP.
        model = nn.Sequential(*(MLP(8, bias=False) for _ in range(3)))
        for mlp in model:
            for linear in (mlp.in_proj, mlp.out_proj):
                weight = linear.weight.detach()
                linear.weight = nn.Parameter(TwoTensor(weight, weight.clone()))
        return model

    def _input(self, dim: int, seed: int = 42) -> torch.Tensor:
        """Positive numbers of shape (2, dim), different on each rank."""
        return uniform(2, dim, seed=seed + self.rank + 1)

    def _fully_shard_all(self, model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
        return shard_each((*model, model), **kwargs)


class TestFullyShardAllGatherExtensionsMultiProcess(TestFullyShardAllGatherExtensionsCommon, FSDPTest):
    @skip_if_lt_x_gpu(2)
    def test_all_gather_extensions_train_parity(self):
        self._for_each_hook_version(self._test_all_gather_extensions_train_parity)

    def _test_all_gather_extensions_train_parity(self, reshard_after_forward: bool) -> None:
        # With upstream's initial weights and loss, all outputs of some ReLUs and thus gradients would soon be zero.
        with self.device:
            model = moderate(self._init_two_tensor_mlp())
        ref_model = copy.deepcopy(model)
        ref_optim = torch.optim.Adam(ref_model.parameters(), lr=1e-3, foreach=True)
        self._fully_shard_all(model, reshard_after_forward=reshard_after_forward)
        optim = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=True)
        check_sharded_parity(self, ref_model, model)
        inp = self._input(8)
        for step in range(10):
            ref_loss, loss = ((each(inp) - 1).square().mean() for each in (ref_model, model))
            self.assertGreater(ref_loss.a.item(), 0)
            self.assertIsInstance(loss, TwoTensor)  # a plain tensor would mean that the hooks were ignored
            self.assertEqual((loss.a, loss.b), (ref_loss.a, ref_loss.b))
            ref_loss.backward()
            loss.backward()
            average([part for param in ref_model.parameters() for part in (param.grad.a, param.grad.b)])
            self._check_parts(ref_model, model)
            take_step((ref_optim, optim), set_to_none=step % 2 == 0)
            self._check_parts(ref_model, model)
        check_sharded_parity(self, ref_model, model)

    def _check_parts(self, ref_model: nn.Module, model: nn.Module) -> None:
        """Compare both tensors of each TwoTensor. check_sharded_parity is slow, and compares only ``a``."""
        shard_of = functools.partial(chunk_of, index=self.rank, chunks=self.world_size)
        params = dict(model.named_parameters())
        self.assertEqual(list(params), [name for name, _ in ref_model.named_parameters()])
        for name, ref_param in ref_model.named_parameters():
            local, grad, ref_grad = params[name].to_local().detach(), params[name].grad, ref_param.grad
            self.assertEqual((local.a, local.b), (shard_of(ref_param.detach().a), shard_of(ref_param.detach().b)), name)
            self.assertEqual(grad is None, ref_grad is None, name)
            if grad is not None:  # a DTensor whose local tensor is plain, because only weights are TwoTensors
                self.assertEqual(grad.to_local(), shard_of(ref_grad.a), name, may_be="zero")  # after zero_grad

    @skip_if_lt_x_gpu(2)
    def test_one_hook_without_the_other(self):
        """``fully_shard`` raises if the tensor's class has only one hook. Forward raises if the local tensor does."""
        for name in HOOKS:
            half = type("HalfAnExtension", (TwoTensor,), {name: lambda self, *args, **kwargs: None})
            layer = nn.Linear(4, 4, bias=False, device=self.device)
            weight = layer.weight.detach()
            layer.weight = nn.Parameter(half(weight, weight.clone()))
            with self.assertRaisesRegex(AssertionError, "Both fsdp_pre_all_gather and fsdp_post_all_gather should be"):
                fully_shard(layer)
            layer = fully_shard(nn.Linear(4, 4, bias=False, device=self.device))
            setattr(local_tensors(layer)["weight"], name, lambda *args, **kwargs: None)
            with self.assertRaisesRegex(AssertionError, "Both fsdp_pre_all_gather and fsdp_post_all_gather should be"):
                layer(self._input(4))

    @skip_if_lt_x_gpu(2)
    def test_invalid_pre_signature(self):
        """A pre-hook has one parameter or five. With three, each rank raises before the all-gather."""
        layer = fully_shard(nn.Linear(4, 4, bias=False, device=self.device))
        (extension,) = extend(layer).values()
        extension.local.fsdp_pre_all_gather = lambda mesh, outer_size, outer_stride: ((extension.local,), None)
        with self.assertRaisesRegex(AssertionError, "Invalid fsdp_pre_all_gather"):
            layer(self._input(4))
        self.assertEqual(extension.received, [], may_be="empty")

    @skip_if_lt_x_gpu(2)
    def test_metadata_round_trip(self):
        """Each post-hook receives the metadata of its own all-gather, not of an earlier one."""
        layer = fully_shard(positive(nn.Linear(4, 6, bias=False, device=self.device)), reshard_after_forward=True)
        whole = positive(nn.Linear(4, 6, bias=False, device=self.device)).weight.detach()
        gathers = iter(range(1, 100))

        def scaled(shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
            scale = 2.0 ** next(gathers)  # exact; differs per all-gather, the same on all ranks
            return (shard * scale,), Scaling(scale, tuple(whole.shape))

        def unscaled(gathered: tuple[torch.Tensor, ...], metadata: Any) -> torch.Tensor:
            return gathered[0].view(metadata.shape) / metadata.scale

        (extension,) = extend(layer, scaled, unscaled).values()
        optim = torch.optim.SGD(layer.parameters(), lr=0.5)
        inp = self._input(4)
        for step in (1, 2):
            out = layer(inp)
            self.assertEqual(out, inp @ whole.T)
            self.assertEqual(len(extension.received), 2 * step - 1)
            out.sum().backward()
            self.assertEqual(len(extension.received), 2 * step)
            optim.step()
            optim.zero_grad()
            grad = torch.ones(2, 6, device=self.device).T @ inp
            average([grad])
            whole -= 0.5 * grad
        self.assertEqual([metadata.scale for metadata in extension.received], [2.0, 4.0, 8.0, 16.0])
        self.assertEqual([id(sent) for sent in extension.sent], [id(received) for received in extension.received])

    @skip_if_lt_x_gpu(2)
    def test_two_payloads_of_columns(self):
        """With ``Shard(1)``, FSDP joins the columns of the ranks in both tensors that the pre-hook returned."""
        plain = positive(nn.Linear(4, 6, bias=False, device=self.device))
        layer = fully_shard(copy.deepcopy(plain), shard_placement_fn=lambda param: Shard(1))
        extend(
            layer,
            lambda shard: ((3 * shard, shard), None),
            lambda gathered, metadata: (gathered[0] - 2 * gathered[1]).view(6, 4),
        )
        inp = self._input(4)
        for _ in range(2):
            output, expected = layer(inp), plain(inp)
            self.assertEqual(output, expected)
            for each in (output, expected):
                each.square().sum().backward()
        average([plain.weight.grad])
        self.assertEqual(layer.weight.grad.full_tensor(), plain.weight.grad)

    @skip_if_lt_x_gpu(2)
    def test_metadata_are_released(self):
        """FSDP releases the metadata after the post-hook, both in the first all-gather and in later ones."""
        layer = fully_shard(nn.Linear(4, 6, bias=False, device=self.device), reshard_after_forward=True)
        (extension,) = extend(
            layer, lambda shard: ((shard,), Scaling(1.0, (6, 4))), lambda gathered, metadata: gathered[0].view(6, 4)
        ).values()
        for _ in range(3):
            layer(self._input(4))
            used = weakref.ref(extension.sent.pop())
            extension.received.clear()
            self.assertIsNone(used())

    @skip_if_lt_x_gpu(2)
    def test_freed_storage(self):
        """Resharding frees the storages of the all-gather outputs and of the unsharded parameter. The next unshard
        fills the same parameter.
        """
        model = fully_shard(positive(MLP(4, bias=False, device=self.device)), reshard_after_forward=True)
        extensions = extend(model, as_bfloat16)
        used: dict[str, list[tuple[int, list[int]]]] = {"forward": [], "backward": []}
        first = extensions["in_proj.weight"]

        def note(where: str, *unused: Any) -> None:
            used[where].append((model.in_proj.weight, first.storage_sizes()))

        def note_in_backward(module: nn.Module, args: Any, out: torch.Tensor) -> None:
            out.register_hook(functools.partial(note, "backward"))

        model.in_proj.register_forward_pre_hook(functools.partial(note, "forward"))
        model.in_proj.register_forward_hook(note_in_backward)
        for _ in range(2):
            loss = model(self._input(4)).sum()
            self._check_freed(extensions)
            loss.backward()
            self._check_freed(extensions)
        self.assertEqual((len(used["forward"]), len(used["backward"])), (2, 2))
        param = used["forward"][0][0]
        for weight, sizes in used["forward"] + used["backward"]:
            self.assertIs(weight, param)
            self.assertEqual(sizes, [16 * 4 * 2, 16 * 4 * 4])  # bytes: gathered bfloat16, computed float32
        self.assertEqual(first.outs[0], None)
        self.assertEqual(len(first.outs), 4)
        self.assertTrue(all(out is param for out in first.outs[1:]))

    def _check_freed(self, extensions: dict[str, Extension]) -> None:
        self.assertEqual(len(extensions), 2)
        for name, extension in extensions.items():
            self.assertEqual(extension.storage_sizes(), [0, 0], name)


class TestFullyShardAllGatherExtensionsMultiThread(TestFullyShardAllGatherExtensionsCommon, FSDPTestMultiThread):
    world_size = 8

    @property
    def device(self) -> torch.device:
        return accelerator.current().device(0)  # the threads share one device

    def _meta_two_tensor_mlp(self, **kwargs: Any) -> nn.Module:
        """A model that is sharded on the meta device, then materialised. The ``a`` and ``b`` of its parameters differ,
        and the local shards differ by rank.
        """
        with torch.device("meta"):
            model = self._init_two_tensor_mlp()
        self.assertEqual({param.device.type for param in model.parameters()}, {"meta"})
        self._fully_shard_all(model, **kwargs).to_empty(device=self.device)
        for param in model.parameters():
            nn.init.trunc_normal_(param, mean=0.1, std=0.1)
        return model

    def _reference_output(self, part: str, inp: torch.Tensor, model: nn.Module, dtype: torch.dtype) -> torch.Tensor:
        """A plain model's output. Its weights are the ``part`` ("a" or "b") of the TwoTensors, rounded to ``dtype``."""
        plain = nn.Sequential(*(MLP(8, bias=False, device=self.device) for _ in range(3)))
        weights = {name: gather_rows(getattr(local, part)) for name, local in local_tensors(model).items()}
        self.assertEqual(list(weights), [name for name, _ in plain.named_parameters()])
        with torch.no_grad():
            rounded = {name: weight.to(dtype).to(inp.dtype) for name, weight in weights.items()}
            return functional_call(plain, rounded, inp)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extensions_end_to_end(self):
        self._for_each_hook_version(self._test_all_gather_extensions_end_to_end)

    def _test_all_gather_extensions_end_to_end(self, reshard_after_forward: bool) -> None:
        # With bfloat16 compute and float32 shards the post-hook has to copy into ``out``.
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        model = self._meta_two_tensor_mlp(mp_policy=policy, reshard_after_forward=reshard_after_forward)
        optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        inp, losses = self._input(8), []
        for _ in range(3):
            expected = [self._reference_output(part, inp.bfloat16(), model, torch.bfloat16) for part in ("a", "b")]
            before = {name: local.a.clone() for name, local in local_tensors(model).items()}
            out = model(inp)
            self.assertIsInstance(out, TwoTensor)
            self.assertEqual([out.a, out.b], expected)
            loss = (out - 1).square().mean()
            loss.backward()
            losses.append(loss.a)
            optim.step()
            optim.zero_grad()
            for name, local in local_tensors(model).items():
                self.assertNotEqual(local.a, before[name], name)
        check_losses(losses)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extensions_monkey_patch(self):
        model = self._meta_two_tensor_mlp()
        # Hooks go onto the local tensors that to_empty() created. No shard needs padding, so lazy initialization keeps
        # these tensors.
        extensions = extend(model, as_bfloat16)
        self.assertTrue(any("weight" in name for name in extensions))
        optim = torch.optim.Adam(model.parameters(), lr=1e-2, foreach=True)
        inp, losses = self._input(8), []
        for _ in range(3):
            expected = self._reference_output("a", inp, model, torch.bfloat16)
            out = model(inp)
            self.assertEqual(out, expected)
            losses.append(backward(loss_of(out)))
            optim.step()
            optim.zero_grad()
        check_losses(losses)
        for name, extension in extensions.items():  # gathered in forward and backward of three iterations
            self.assertEqual((len(extension.pre_arguments), len(extension.outs)), (6, 6), name)

    def _uneven_mlp(self, pad_in_pre_all_gather: bool = True, kind: type = BFloat16AllGatherTensor) -> MLP:
        """Weights of (9, 3) and (3, 9). On 8 ranks some local shards are full, some are short, some are empty."""
        model = positive(MLP(3, bias=False, dim_multiplier=3, device=self.device))
        for linear in (model.in_proj, model.out_proj):
            linear.weight = nn.Parameter(kind(linear.weight.detach(), pad_in_pre_all_gather))
        return model

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extension_outer_size_stride(self):
        self.assertGreaterEqual(self.world_size, 2)
        model = fully_shard(self._uneven_mlp(), reshard_after_forward=False)
        before = {name: local._data.clone() for name, local in local_tensors(model).items()}
        optim = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        loss = model(self._input(3)).sum()
        self.assertTrue(loss.isfinite())
        loss.backward()
        optim.step()
        optim.zero_grad()
        for name, local in local_tensors(model).items():
            self.assertEqual(local.shape, before[name].shape)
            # Adam's first step is about the learning rate, against the sign of the gradient. Here that is positive.
            self.assertEqual(local._data, before[name] * (1 - 1e-4) - 1e-2, name, rtol=0, atol=1e-5, may_be="empty")

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extension_hsdp_mesh(self):
        mesh = make_mesh(2, 4, names=("dp_replicate", "dp_shard"))
        with self.device:
            model = moderate(self._init_two_tensor_mlp())
            ref_model = nn.Sequential(*(MLP(8, bias=False) for _ in range(3)))
        ref_model.load_state_dict({name: param.detach().a for name, param in model.named_parameters()})
        extensions = extend(self._fully_shard_all(model, mesh=mesh))
        legacy = extensions["0.in_proj.weight"]
        legacy.local.fsdp_pre_all_gather = lambda mesh: legacy.pre(
            mesh, **dict.fromkeys(("outer_size", "outer_stride", "module", "mp_policy"))
        )
        inp = self._input(8)
        self.assertEqual(model(inp), ref_model(inp))
        self.assertEqual(len(extensions), 6)
        shard_ranks = [0, 1, 2, 3] if self.rank < 4 else [4, 5, 6, 7]
        for extension in extensions.values():
            ((received, *_),) = extension.pre_arguments
            self.assertEqual((received.ndim, received.size(), received.mesh_dim_names), (1, 4, ("dp_shard",)))
            self.assertEqual(received.mesh.tolist(), shard_ranks)

    @skip_if_lt_x_gpu(1)
    def test_unpadded_payload_is_refused(self):
        """A pre-hook must pad a short shard, or FSDP raises.

        The test reads ``all_gather_inputs`` of the ``FSDPParam``. In a forward only ranks with short shards would
        raise, and the others would hang.
        """
        for pad in (True, False):
            group = internals.group_of(fully_shard(self._uneven_mlp(pad)))
            self.assertEqual(len(group.fsdp_params), 2)
            for fsdp_param, padded_numel, full_ranks in zip(group.fsdp_params, (2 * 3, 1 * 9), (4, 3)):
                if pad or self.rank < full_ranks:
                    (payload,) = fsdp_param.all_gather_inputs
                    self.assertEqual((payload.numel(), payload.dtype), (padded_numel, torch.bfloat16))
                else:
                    with self.assertRaisesRegex(AssertionError, "all-gather inputs with the padded sharded size"):
                        _ = fsdp_param.all_gather_inputs

    @skip_if_lt_x_gpu(1)
    def test_one_unpadded_payload_of_two_is_refused(self):
        """A pre-hook must pad all the tensors that it returns for a short shard, not only the first."""
        layer = fully_shard(positive(nn.Linear(3, 9, bias=False, device=self.device)))
        internals.initialize_lazily(layer)  # without KEEPS_PADDED_STORAGE it replaces a short shard
        extend(layer, lambda shard: ((shard.new_zeros(2, 3), shard), None))
        (fsdp_param,) = internals.group_of(layer).fsdp_params
        fsdp_param._init_extensions()
        if self.rank < 4:
            self.assertEqual([payload.numel() for payload in fsdp_param.all_gather_inputs], [6, 6])
        else:
            with self.assertRaisesRegex(AssertionError, "all-gather inputs with the padded sharded size"):
                _ = fsdp_param.all_gather_inputs

    @skip_if_lt_x_gpu(1)
    @subtests(reshard_after_forward=[True, False])
    def test_bfloat16_all_gather_numerics(self, reshard_after_forward):
        """Forward uses weights rounded to bfloat16, and the optimizer updates the float32 shards."""
        gathered = self._test_bfloat16_all_gather_numerics(BFloat16AllGatherTensor, reshard_after_forward)
        self.assertEqual(len(gathered), 6)
        self.assertGreater(min(gathered), 0)

    @needs(torch_facts.EXTENSIONS_CAN_FREE_ALL_GATHER)
    @skip_if_lt_x_gpu(1)
    @subtests(reshard_after_forward=[True, False])
    def test_release_all_gather_outputs_after_post_all_gather(self, reshard_after_forward):
        """If the tensor's release hook returns True, the all-gather outputs are freed right after the post-hook."""
        gathered = self._test_bfloat16_all_gather_numerics(ReleasingTensor, reshard_after_forward)
        self.assertEqual(gathered, [0] * 6)

    @skip_if_lt_x_gpu(1)
    def test_offloaded_bfloat16_all_gather_numerics(self):
        """FSDP moves an offloaded shard to the device before its pre-hook runs."""
        policy = CPUOffloadPolicy(pin_memory=False)
        self._test_bfloat16_all_gather_numerics(BFloat16AllGatherTensor, True, offload_policy=policy)

    def _test_bfloat16_all_gather_numerics(self, kind: type, reshard_after_forward: bool, **kwargs: Any) -> list[int]:
        """Compare three training steps with those of a plain model. Returns the bytes that all-gather outputs occupy at
        the forward of each of the two layers.
        """
        model = fully_shard(self._uneven_mlp(kind=kind), reshard_after_forward=reshard_after_forward, **kwargs)
        group = internals.group_of(model)
        gathered: list[int] = []
        for linear in (model.in_proj, model.out_proj):
            linear.register_forward_pre_hook(
                lambda *_: gathered.append(
                    bytes_of(out for param in group.fsdp_params for out in param.all_gather_outputs)
                )
            )
        ref_model = positive(MLP(3, bias=False, dim_multiplier=3, device=self.device))
        optim, ref_optim = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, ref_model))
        seen = []
        for linear in (model.in_proj, model.out_proj):
            linear.register_forward_pre_hook(lambda module, args: seen.append(module.weight.detach().clone()))
        inp, losses = self._input(3), []
        for _ in range(3):
            seen.clear()
            rounded = {name: p.detach().bfloat16().float().requires_grad_() for name, p in ref_model.named_parameters()}
            out, ref_out = model(inp), functional_call(ref_model, rounded, inp)
            self.assertEqual(seen, list(rounded.values()), rtol=0, atol=0)
            self.assertEqual(out, ref_out)
            backward(loss_of(out))
            losses.append(backward(loss_of(ref_out)))
            for name, param in ref_model.named_parameters():
                param.grad = rounded[name].grad
            average([param.grad for param in ref_model.parameters()])
            take_step((optim, ref_optim))
            for name, local in local_tensors(model).items():
                self.assertIsInstance(local, kind)
                expected = chunk_of(ref_model.get_parameter(name).detach(), self.rank, self.world_size)
                self.assertEqual(local._data, expected.to(local.device), name, may_be="empty")
        check_losses(losses)
        return gathered

    @needs(torch_facts.EXTENSIONS_CAN_FREE_ALL_GATHER)
    @skip_if_lt_x_gpu(1)
    def test_release_that_is_refused(self):
        """The release hook is rejected without the other hooks, if it returns no bool, or with an int
        ``reshard_after_forward``.
        """
        name = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
        hooks = dict(zip(HOOKS, (two_tensor_fsdp_pre_all_gather_v1, two_tensor_fsdp_post_all_gather), strict=True))
        cases: list[tuple[dict[str, Any], bool | int, type[Exception], str]] = [
            ({name: lambda self: True}, True, AssertionError, "requires fsdp_pre_all_gather and fsdp_post_all_gather"),
            (hooks | {name: lambda self: 1}, True, AssertionError, "must return a bool"),
            (hooks | {name: lambda self: True}, 4, NotImplementedError, "when reshard_after_forward is an int"),
        ]
        for attributes, reshard_after_forward, error, text in cases:
            with self.subTest(text):
                layer = nn.Linear(8, 8, bias=False, device=self.device)
                weight = layer.weight.detach()
                layer.weight = nn.Parameter(type("Releasing", (TwoTensor,), attributes)(weight, weight.clone()))
                with self.assertRaisesRegex(error, text):
                    fully_shard(layer, reshard_after_forward=reshard_after_forward)

    @skip_if_lt_x_gpu(1)
    @subtests(param_dtype=[None, torch.bfloat16])
    def test_payload_of_two_dtypes(self, param_dtype):
        """One parameter gathers int8 values and float32 scales, beside a parameter without hooks in the same group."""
        layer = positive(nn.Linear(4, 16, device=self.device))
        weight, bias = (param.detach().clone() for param in layer.parameters())
        fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=param_dtype), reshard_after_forward=True)
        local = local_tensors(layer)
        Extension(local["weight"], as_int8_and_scale, from_int8_and_scale)
        inp = self._input(4).to(param_dtype)
        for _ in range(2):
            rows = [from_int8_and_scale(*as_int8_and_scale(shard)) for shard in weight.chunk(self.world_size)]
            rounded = torch.cat(rows).to(param_dtype)
            self.assertNotEqual(rounded, weight.to(param_dtype), rtol=0, atol=0)
            self.assertEqual(layer(inp), nn.functional.linear(inp, rounded, bias.to(param_dtype)))
            for tensor in (weight, bias, *local.values()):
                tensor.mul_(3)

    @skip_if_lt_x_gpu(1)
    def test_hook_arguments(self):
        """The pre-hook gets the mesh, the size and stride of the full tensor, its module and the policy. The post-hook
        gets the dtype of the unsharded parameter.
        """
        mesh = make_mesh(self.world_size)
        for param_dtype in (None, torch.bfloat16):
            policy = MixedPrecisionPolicy(param_dtype=param_dtype)
            model = positive(MLP(8, bias=False, dim_multiplier=2, device=self.device))
            extensions = extend(fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=True))
            model(self._input(8)).sum().backward()
            self.assertEqual(list(extensions), ["in_proj.weight", "out_proj.weight"])
            wholes = (((16, 8), (8, 1), model.in_proj), ((8, 16), (16, 1), model.out_proj))
            for extension, (size, stride, module) in zip(extensions.values(), wholes):
                self.assertEqual(len(extension.pre_arguments), 2)
                for arguments in extension.pre_arguments:
                    self.assertEqual(arguments[:3], (mesh, size, stride))
                    self.assertIs(arguments[3], module)
                    self.assertIs(arguments[4], policy)
                self.assertEqual(extension.param_dtypes, [param_dtype or torch.float32] * 2)

    @skip_if_lt_x_gpu(1)
    def test_no_smaller_mesh(self):
        """After a reshard to a smaller mesh, backward raises for a parameter with hooks."""
        layer = fully_shard(positive(nn.Linear(8, 8, bias=False, device=self.device)), reshard_after_forward=4)
        (extension,) = extend(layer).values()
        loss = layer(self._input(8)).sum()
        with self.assertRaisesRegex(NotImplementedError, "^$"):  # other errors have a message
            loss.backward()
        self.assertEqual(len(extension.pre_arguments), 1)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extension_smaller_payload(self):
        """A payload may be shorter than in the first all-gather. It fills the first elements of the output."""
        lengths = iter([4, 4, 2])
        tags: list[list[float]] = []

        def encode(shard: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], Any]:
            length = next(lengths)
            return (shard, torch.arange(length, device=shard.device) + 10.0 * self.rank), length

        def decode(gathered: tuple[torch.Tensor, ...], length: int) -> torch.Tensor:
            tags.append(gathered[1][: length * self.world_size].tolist())
            return gathered[0].view(16, 8)

        layer = filled(nn.Linear(8, 16, bias=False)).to(self.device)
        weight = layer.weight.detach().clone()
        extend(fully_shard(layer, reshard_after_forward=True), encode, decode)
        for seed in range(3):
            inp = uniform(2, 8, seed=seed)
            self.assertEqual(layer(inp), inp @ weight.T)
        expected = [[10.0 * rank + tag for rank in range(self.world_size) for tag in range(n)] for n in (4, 4, 2)]
        self.assertEqual(tags, expected)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extension_zero_size_trailing_dim(self):
        """A payload without columns is rejected: its rows cannot be inferred from the number of its elements."""
        layer = fully_shard(nn.Linear(16, 8, bias=False, device=self.device))
        extend(layer, lambda shard: ((shard, shard.new_empty(len(shard), 0)), None), lambda gathered, _: gathered[0])
        with self.assertRaisesRegex(RuntimeError, "cannot reshape tensor of 0 elements"):
            layer(uniform(2, 16, seed=0))

    def _alone(self, encode: Callable, decode: Callable) -> tuple[nn.Module, Extension]:
        """A layer sharded over a mesh of only this rank, so FSDP runs no all-gather. Weights differ by rank."""
        mesh = make_mesh(self.world_size, 1, names=("others", "alone"))
        layer = positive(nn.Linear(4, 16, bias=False, device=self.device))
        layer.weight.data.mul_(self.rank + 1)
        fully_shard(layer, mesh=mesh["alone"], reshard_after_forward=True)
        (extension,) = extend(layer, encode, decode).values()
        return layer, extension

    @skip_if_lt_x_gpu(1)
    def test_mesh_of_one_rank(self):
        """The hooks run even without a collective."""
        layer, extension = self._alone(as_bfloat16, the_only_one)
        inp = self._input(4)
        for _ in range(2):
            rounded = extension.local.bfloat16().float()
            self.assertNotEqual(rounded, extension.local, rtol=0, atol=0)
            self.assertEqual(layer(inp), inp @ rounded.T, rtol=1e-6, atol=0)
            self.assertEqual(extension.storage_sizes(), [0, 0])
            extension.local.mul_(3)
        self.assertEqual(len(extension.outs), 2)

    @skip_if_lt_x_gpu(1)
    def test_all_gather_extension_single_rank_payloads(self):
        """On a mesh of one rank the post-hook receives both tensors that the pre-hook returned."""
        layer, extension = self._alone(lambda shard: ((shard, shard), None), lambda gathered, metadata: sum(gathered))
        output = layer(inp := self._input(4))
        with torch_defect("fsdp2_extension_gets_one_payload"):
            self.assertEqual(output, inp @ (2 * extension.local).T)


if __name__ == "__main__":
    run_tests()
