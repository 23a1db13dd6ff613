"""``fsdp::chunk_cat_mixed_dtype``: how FSDP2 lays out gradients of any dtypes for a reduce-scatter.

Row ``i`` of the output is for rank ``i``. It holds the ``i``-th chunk of rows of each tensor, one tensor after the
other, in the dtype of the output. Short chunks are padded with zeros.
"""

from __future__ import annotations

import logging
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import DeviceType
from torch.profiler import profile, supported_activities

from torch_fsdp_tests.common_distributed import needs
from torch_fsdp_tests.common_fsdp import get_devtype
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.fsdp import internals
from torch_fsdp_tests.fsdp.combinations import subtests
from torch_fsdp_tests.installed_torch import torch_facts

BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
SHAPES = [(7, 3), (8,), (1, 2, 3), (2049, 2, 2)]  # only the second has four equal chunks
DTYPES = [
    [F32, F32, F32, F32],
    [BF16, BF16, BF16, BF16],
    [BF16, F32, F32, BF16],  # as in FSDP with bfloat16 weights and float32 norms
    [F32, F16, BF16, F64],
]


def chunk_cat(tensors: list[torch.Tensor], num_chunks: int, out: torch.Tensor, dim: int = 0) -> None:
    torch.ops.fsdp.chunk_cat_mixed_dtype(tensors, dim, num_chunks, out=out)


def kernels(trace: profile) -> list[str]:
    """The kernels that the device ran, without its copies of memory."""
    events = [event.name for event in trace.events() if event.device_type != DeviceType.CPU]
    return [name for name in events if not name.startswith(("Memcpy", "Memset"))]


def random_tensors(dtypes: list[torch.dtype], transposed: bool = False) -> list[torch.Tensor]:
    """Tensors of ``SHAPES``, with numbers that round differently in each dtype."""
    generator = torch.Generator().manual_seed(42)
    tensors = []
    for shape, dtype in zip(SHAPES, dtypes, strict=True):
        whole = torch.randn(shape[::-1] if transposed else shape, generator=generator, dtype=F64)
        whole = whole.to(get_devtype(), dtype)
        tensors.append(whole.permute(*reversed(range(whole.ndim))) if transposed else whole)
    return tensors


def by_hand(tensors: list[torch.Tensor], num_chunks: int, dtype: torch.dtype) -> torch.Tensor:
    """The expected output for ``dim=0``, computed with slices."""
    rows: list[list[torch.Tensor]] = [[] for _ in range(num_chunks)]
    for tensor in tensors:
        length = -(-len(tensor) // num_chunks)
        for index, row in enumerate(rows):
            chunk = torch.zeros((length, *tensor.shape[1:]), dtype=dtype, device=tensor.device)
            found = tensor[index * length : (index + 1) * length]
            chunk[: len(found)] = found.to(dtype)
            row.append(chunk.flatten())
    return torch.stack([torch.cat(row) for row in rows])


def empty_output(num_chunks: int, dtype: torch.dtype) -> torch.Tensor:
    """An output of the right shape for tensors of ``SHAPES``, filled with NaN: every element must be written."""
    like = by_hand([torch.zeros(shape) for shape in SHAPES], num_chunks, dtype)
    return torch.full_like(like, float("nan"), device=get_devtype())


@needs(torch_facts.HAS_MIXED_DTYPE_CHUNK_CAT)
class TestFullyShardChunkCatMixedDtype(TestCase):
    @subtests(dtypes=DTYPES, out_dtype=[F32, BF16, F64], num_chunks=[1, 4], transposed=[False, True])
    def test_numerics(self, dtypes, out_dtype, num_chunks, transposed):
        """The output is bitwise equal to ``by_hand``, and to ``torch._chunk_cat`` of inputs that are cast first."""
        tensors = random_tensors(dtypes, transposed)
        self.assertEqual(tensors[0].is_contiguous(), not transposed)
        out = empty_output(num_chunks, out_dtype)
        chunk_cat(tensors, num_chunks, out)
        self.assertEqual(out, by_hand(tensors, num_chunks, out_dtype), rtol=0, atol=0)
        cast = [tensor.to(out_dtype) for tensor in tensors]
        self.assertEqual(out, torch._chunk_cat(cast, 0, num_chunks), rtol=0, atol=0)

    @subtests(dtypes=[(F32, F32), (BF16, BF16), (BF16, F32, BF16)])
    def test_kernels(self, dtypes):
        """Inputs of one dtype are cast while they are copied. A device's own kernel does so for each dtype."""
        tensors = [torch.ones(8, 3, dtype=dtype, device=get_devtype()) for dtype in dtypes]
        out = torch.empty(2, 12 * len(tensors), device=get_devtype())
        with profile(activities=supported_activities()) as trace:
            chunk_cat(tensors, 2, out)
            torch.get_device_module(get_devtype()).synchronize()
        of_one_dtype, has_own = (
            len(set(dtypes)) == 1,
            internals.has_own_kernel("fsdp::chunk_cat_mixed_dtype", get_devtype()),
        )
        casts = [event for event in trace.events() if event.name == "aten::_to_copy"]
        self.assertEqual(len(casts), 0 if of_one_dtype or has_own else sum(dtype != F32 for dtype in dtypes))
        if has_own:
            self.assertEqual(len(kernels(trace)), len(set(dtypes)))

    @subtests(dtypes=[(F32, BF16), (BF16, BF16)])
    def test_second_dimension(self, dtypes):
        """With ``dim=1`` each row is split into chunks of columns."""
        shapes = (2, 3), (2, 5)
        tensors = [torch.rand(shape, device=get_devtype()).to(dtype) for shape, dtype in zip(shapes, dtypes)]
        out = torch.empty(2, 2, 5, device=get_devtype())
        chunk_cat(tensors, 2, out, dim=1)
        expected = torch.stack([by_hand([each[row].float() for each in tensors], 2, F32) for row in range(2)])
        self.assertEqual(out, expected, rtol=0, atol=0)

    @subtests(dtypes=DTYPES)
    def test_output_inside_a_larger_tensor(self, dtypes):
        """The output may be a view with gaps. The gaps do not change."""
        tensors = random_tensors(dtypes)
        expected = by_hand(tensors, 4, F32)
        whole = torch.full((4, 2 * expected.size(1)), 7.0, device=get_devtype())
        chunk_cat(tensors, 4, whole[:, ::2])
        self.assertEqual(whole[:, ::2], expected, rtol=0, atol=0)
        self.assertEqual(whole[:, 1::2], torch.full_like(expected, 7.0))

    @subtests(dtypes=DTYPES)
    def test_version_counter(self, dtypes):
        """Writing the output bumps its version, so autograd rejects a backward that needs the old values."""
        tensors, out = random_tensors(dtypes), empty_output(4, F32)
        versions = [tensor._version for tensor in tensors]
        factor = torch.ones_like(out, requires_grad=True)
        product = (factor * out).sum()
        before = out._version
        chunk_cat(tensors, 4, out)
        self.assertGreater(out._version, before)
        self.assertEqual([tensor._version for tensor in tensors], versions)
        with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
            product.backward()

    @subtests(dtypes=[(F32, F32), (F32, BF16)])
    def test_wrong_inputs(self, dtypes):
        """Wrong inputs are rejected before anything is written."""
        tensors = [torch.ones(shape, dtype=dtype, device=get_devtype()) for shape, dtype in zip(((3, 2), (4,)), dtypes)]
        out = torch.full((2, 6), 7.0, device=get_devtype())
        no_rows = [tensors[0], tensors[1][:0]]
        other_rows = [tensor.expand(rows, *tensor.shape) for rows, tensor in zip((1, 2), tensors)]
        elsewhere = [tensors[0], tensors[1].to("meta")]
        wrong: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = [
            ("non-empty input tensor list", ([], 2, out), {}),
            ("non-empty tensor", (no_rows, 2, out), {}),
            ("positive num_chunks", (tensors, 0, out), {}),
            ("positive num_chunks", (tensors, -1, out), {}),
            ("dim < ndim", (tensors, 2, out), {"dim": 1}),
            ("non-negative dim", (tensors, 2, out), {"dim": -1}),
            ("same sizes of 0,...,dim-1 dimensions", (other_rows, 2, out), {"dim": 1}),
            ("on the same device", (elsewhere, 2, out), {}),
        ]
        for message, args, kwargs in wrong:
            with self.assertRaisesRegex(RuntimeError, message):
                chunk_cat(*args, **kwargs)
            self.assertEqual(out, torch.full_like(out, 7.0), msg=message)
        integers = torch.full((2, 6), 7, device=get_devtype())
        with self.assertRaisesRegex((RuntimeError, TypeError), "can't (be )?cast"):
            chunk_cat(tensors, 2, integers)
        self.assertEqual(integers, torch.full_like(integers, 7))

    def test_wrong_shape_of_output(self):
        """The output is resized to the right shape, with a warning unless it was empty, as with other operators."""
        tensors = random_tensors(DTYPES[2])
        expected = by_hand(tensors, 4, F32)
        out = torch.empty(3, device=get_devtype())
        with self.assertWarnsRegex(UserWarning, "was resized"):
            chunk_cat(tensors, 4, out)
        self.assertEqual(out, expected, rtol=0, atol=0)
        out = torch.empty(0, device=get_devtype())
        chunk_cat(tensors, 4, out)
        self.assertEqual(out, expected, rtol=0, atol=0)

    @subtests(dtypes=DTYPES)
    def test_fake_tensors(self, dtypes):
        """On fake tensors the operator has the same effect on shapes and versions, and raises the same errors."""
        out_shape = empty_output(4, F32).shape
        with FakeTensorMode():
            tensors = [torch.empty(shape, dtype=dtype, device=get_devtype()) for shape, dtype in zip(SHAPES, dtypes)]
            out = torch.empty(out_shape, device=get_devtype())
            chunk_cat(tensors, 4, out)
            self.assertEqual((out.shape, out.dtype, out._version), (out_shape, F32, 1))
            out = torch.empty(0, device=get_devtype())
            chunk_cat(tensors, 4, out)
            self.assertEqual((out.shape, out.dtype), (out_shape, F32))
            logger = logging.getLogger("torch._subclasses.fake_tensor")  # it would print the stack
            with mock.patch.object(logger, "disabled", True):
                with self.assertRaisesRegex(RuntimeError, "positive num_chunks"):
                    chunk_cat(tensors, 0, out)

    @subtests(dtypes=[DTYPES[0], DTYPES[2]], out_is_input=[True, False])
    def test_compile(self, dtypes, out_is_input):
        """In a compiled function the output is written in place, and later reads see the new values."""

        def layout(tensors: list[torch.Tensor], given: torch.Tensor) -> torch.Tensor:
            out = given if out_is_input else torch.zeros_like(given)
            before = out + 1
            chunk_cat(tensors, 4, out)
            return torch.stack([before, 2 * out])

        tensors = random_tensors(dtypes)
        expected = by_hand(tensors, 4, F32)
        given = torch.zeros_like(expected)
        actual = torch.compile(layout, backend="aot_eager", fullgraph=True)(tensors, given)
        self.assertEqual(actual, torch.stack([torch.ones_like(expected), 2 * expected]), rtol=0, atol=0)
        self.assertEqual(given, expected if out_is_input else torch.zeros_like(expected), rtol=0, atol=0, may_be="zero")


if __name__ == "__main__":
    run_tests()
