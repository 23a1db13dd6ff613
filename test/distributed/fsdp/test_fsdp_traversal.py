"""``FSDP.fsdp_modules`` lists the FSDP1 instances below a module in depth-first order, or only the roots."""

from __future__ import annotations

from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP

from torch_fsdp_tests.common_device_type import instantiate_device_type_tests
from torch_fsdp_tests.common_distributed import skip_if_lt_x_gpu
from torch_fsdp_tests.common_fsdp import DEVICEInitMode, FSDPInitMode, FSDPTest, NestedWrappedModule
from torch_fsdp_tests.common_utils import run_tests


class TestTraversal(FSDPTest):
    world_size = 2

    def _nested(self) -> tuple[NestedWrappedModule, list[FSDP]]:
        """A model outside FSDP and its three FSDP instances, in the order of ``modules()``."""
        model = NestedWrappedModule.init(self.process_group, FSDPInitMode.RECURSIVE, DEVICEInitMode.DEVICE_BEFORE)
        first, second = model.module[1], model.module[2]
        return model, [first, first.module[0], second]

    def _assert_are(self, found: list[FSDP], expected: list[FSDP]) -> None:
        """The same instances, by identity, in the same order."""
        self.assertEqual([id(each) for each in found], [id(each) for each in expected])

    @skip_if_lt_x_gpu(2)
    def test_fsdp_modules(self):
        """The order is depth first. Roots are the instances that no other instance contains."""
        model, instances = self._nested()
        self._assert_are(FSDP.fsdp_modules(model), instances)
        first, _, second = instances
        self._assert_are(FSDP.fsdp_modules(model, root_only=True), [first, second])
        self._assert_are(FSDP.fsdp_modules(first), instances[:2])

    @skip_if_lt_x_gpu(2)
    def test_below_a_root(self):
        """If the whole model is in FSDP, it comes first and is the only root."""
        model, instances = self._nested()
        root = FSDP(model)
        self._assert_are(FSDP.fsdp_modules(root), [root, *instances])
        self._assert_are(FSDP.fsdp_modules(root, root_only=True), [root])
        self._assert_are(FSDP.fsdp_modules(root), [root, *instances])

    @skip_if_lt_x_gpu(2)
    def test_shared_instance(self):
        """An instance with two names is listed once, at its first position."""
        layer, other = (FSDP(nn.Linear(2, 2, device=self.device)) for _ in range(2))
        model = nn.ModuleDict({"one": layer, "two": nn.Sequential(other, layer), "three": layer})
        self._assert_are(FSDP.fsdp_modules(model), [layer, other])
        self._assert_are(FSDP.fsdp_modules(model, root_only=True), [layer, other])
        # Here it is found inside a child before it is found as a child.
        model = nn.ModuleDict({"one": nn.Sequential(other, layer), "two": layer})
        self._assert_are(FSDP.fsdp_modules(model), [other, layer])

    @skip_if_lt_x_gpu(2)
    def test_without_fsdp(self):
        """Without FSDP instances, the list is empty."""
        model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
        self.assertEqual(FSDP.fsdp_modules(model), [], may_be="empty")
        self.assertEqual(FSDP.fsdp_modules(model, root_only=True), [], may_be="empty")
        # With an instance below, the list is not empty.
        self.assertEqual(len(FSDP.fsdp_modules(nn.Sequential(model, FSDP(nn.Linear(2, 2))))), 1)


instantiate_device_type_tests(TestTraversal, globals(), allow_xpu=True)

if __name__ == "__main__":
    run_tests()
