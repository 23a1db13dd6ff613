"""The device under test as a value: what it answers, and where the answer comes from."""

import os
import unittest.mock

import torch

from torch_fsdp_tests import accelerator
from torch_fsdp_tests.accelerator import Accelerator, ConfigurationError
from torch_fsdp_tests.common_distributed import requires_capability, requires_nccl, skip_if_lt_x_gpu
from torch_fsdp_tests.common_utils import TestCase, run_tests

CLUSTER = Accelerator("xpu", "xccl", count=2, ranks=2, capabilities=frozenset({"device_index", "streams"}))
HOST = accelerator.from_torch("cpu", None, None)  # the CPU is the subject


class Vendor:
    """An entry point as a vendor's package would declare it."""

    def __init__(self, describe):
        self.load = lambda: describe


def under_test(value):
    return unittest.mock.patch.object(accelerator, "current", lambda: value)


class TestValue(TestCase):
    def test_ranks_share_devices_in_turn(self):
        self.assertEqual([CLUSTER.device(rank).index for rank in range(4)], [0, 1, 0, 1])

    def test_host_has_no_index(self):
        self.assertEqual(HOST.device(3), torch.device("cpu"))
        self.assertTrue(HOST.is_host)

    def test_room(self):
        self.assertIsNone(CLUSTER.lacks_room_for(2))
        self.assertIn("needs 3 xpu devices, 2 visible", CLUSTER.lacks_room_for(3))
        sharing = Accelerator("xpu", "gloo", 1, 2, frozenset({"shared_device"}))
        self.assertIsNone(sharing.lacks_room_for(8))
        self.assertIsNone(HOST.lacks_room_for(1000))

    def test_capabilities(self):
        self.assertIsNone(CLUSTER.lacks("streams"))
        self.assertIn("needs graphs", CLUSTER.lacks("streams", "graphs"))
        with self.assertRaisesRegex(KeyError, "unknown capability 'steams'"):
            CLUSTER.has("steams")

    def test_every_capability_of_the_host_was_named(self):
        self.assertLessEqual(HOST.capabilities, set(accelerator.CAPABILITIES))


class TestChoice(TestCase):
    def chosen(self, vendors, **variables):
        names = {f"TORCH_FSDP_TESTS_{name}": value for name, value in variables.items()}
        with unittest.mock.patch.object(accelerator, "_from_vendors", lambda: vendors):
            with unittest.mock.patch.dict(os.environ, names):
                accelerator._resolve.cache_clear()
                self.addCleanup(accelerator._resolve.cache_clear)
                return accelerator.current()

    def test_vendor_describes_its_own_device(self):
        def describe(backend, ranks):
            return Accelerator("abacus", backend or "beads", 8, ranks or 8)

        vendors = {"abacus": Vendor(describe)}
        self.assertEqual(self.chosen(vendors, DEVICE="abacus").backend, "beads")
        self.assertEqual(self.chosen(vendors, DEVICE="abacus", RANKS="3").ranks, 3)

    def test_host_by_name(self):
        found = self.chosen({}, DEVICE="cpu", RANKS="6")
        self.assertEqual((found.type, found.backend, found.count, found.ranks), ("cpu", "gloo", 0, 6))

    def test_no_device_of_that_kind(self):
        absent = {"count": 0, "capabilities": []}
        with unittest.mock.patch.object(accelerator, "_probe", lambda *_: absent):
            with unittest.mock.patch.object(accelerator, "_checked_backend", lambda *_: "xccl"):
                with self.assertRaisesRegex(ConfigurationError, "sees none: check the driver"):
                    accelerator.from_torch("xpu", None, None)

    def test_probe_asks_in_a_process_of_its_own(self):
        """A device type that torch was built without is told in one sentence, and nothing is initialised here."""
        with self.assertRaisesRegex(ConfigurationError, "the device 'abacus' cannot be used: .*abacus"):
            accelerator._probe("abacus", "gloo")
        self.assertFalse(accelerator.initialised())


class TestRequirements(TestCase):
    def reason(self, decorator, device):
        @decorator
        def test(self):
            return "ran"

        with under_test(device):
            try:
                return test(self)
            except unittest.SkipTest as skip:
                return str(skip)

    def test_devices(self):
        self.assertEqual(self.reason(skip_if_lt_x_gpu(2), CLUSTER), "ran")
        self.assertIn("needs 4 xpu devices", self.reason(skip_if_lt_x_gpu(4), CLUSTER))
        self.assertEqual(self.reason(skip_if_lt_x_gpu(4), HOST), "ran")
        self.assertIn("the device under test is the CPU", self.reason(skip_if_lt_x_gpu(4, allow_cpu=False), HOST))

    def test_capability(self):
        self.assertEqual(self.reason(requires_capability("streams"), CLUSTER), "ran")
        self.assertIn("needs streams", self.reason(requires_capability("streams"), HOST))

    def test_nccl_is_asked_for_only_where_it_is_under_test(self):
        self.assertEqual(self.reason(requires_nccl(), HOST), "ran")
        with unittest.mock.patch("torch.distributed.is_nccl_available", lambda: False):
            self.assertIn("without the backend nccl", self.reason(requires_nccl(), Accelerator("x", "nccl", 2, 2)))


if __name__ == "__main__":
    run_tests()
