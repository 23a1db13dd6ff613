"""``TwoTensor``: operations run on both parts, and the wrapper behaves like one tensor."""

from __future__ import annotations

import torch

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.two_tensor import TwoTensor


class TwoTensorTest(TestCase):
    """Without it, a bug of ``TwoTensor`` could look like a bug of FSDP with tensor subclasses."""

    def setUp(self):
        super().setUp()
        self.parts = torch.rand(4, 3), torch.rand(4, 3)

    def assertParts(self, two: TwoTensor, a: torch.Tensor, b: torch.Tensor) -> None:
        self.assertIs(type(two), TwoTensor)
        self.assertEqual(two.a, a)
        self.assertEqual(two.b, b)
        self.assertEqual(two.shape, a.shape)

    def test_operations_run_on_both_parts(self):
        a, b = self.parts
        two = TwoTensor(a, b)
        self.assertParts(two + 1, a + 1, b + 1)
        self.assertParts(two @ two.t(), a @ a.t(), b @ b.t())
        for part, of_a, of_b in zip(two.split(2), a.split(2), b.split(2), strict=True):
            self.assertParts(part, of_a, of_b)
        self.assertIs(two.get_elem_a(), a)
        self.assertEqual(repr(two), f"TwoTensor({a!r}, {b!r})")

    def test_views_and_updates_in_place(self):
        a, b = (part.clone() for part in self.parts)
        two = TwoTensor(a, b)
        self.assertIs(two.mul_(2), two)
        self.assertParts(two, self.parts[0] * 2, self.parts[1] * 2)
        two[1:].view(-1).zero_()
        self.assertEqual([a[1:].sum(), b[1:].sum()], [0.0, 0.0])
        for view in (two[1:], two.view(-1), two.detach()):
            self.assertTrue(torch._C._is_alias_of(view, two))

    def test_flatten_and_unflatten(self):
        two = TwoTensor(*self.parts)
        names, context = two.__tensor_flatten__()
        inner = {name: getattr(two, name) for name in names}
        again = TwoTensor.__tensor_unflatten__(inner, context, two.size(), two.stride())
        self.assertParts(again, *self.parts)
        wide = TwoTensor.__tensor_unflatten__(inner, context, torch.Size([8, 3]), (3, 1))
        self.assertEqual(wide.shape, (8, 3))
        with self.assertRaises(AssertionError):
            TwoTensor.__tensor_unflatten__(inner, "context", two.size(), two.stride())

    def test_parts_must_be_alike(self):
        a, b = self.parts
        for other, what in [
            (b.double(), "dtype"),
            (b[:2], "shape"),
            (b.t().contiguous().t(), "stride"),
            (b.clone().requires_grad_(), "requires_grad"),
            (torch.rand(5, 3)[1:], "storage_offset"),
            (b.to("meta"), "device"),
        ]:
            with self.subTest(what=what), self.assertRaisesRegex(AssertionError, what):
                TwoTensor(a, other)


if __name__ == "__main__":
    run_tests()
