"""The device under test: what it answers, and where the answers come from."""

import contextlib
import dataclasses
import io
import os
import signal
from collections.abc import Callable
from typing import Any
from unittest import SkipTest, mock

import torch
from samples import Processes, Threads, class_with, under_test

from torch_fsdp_tests import common_distributed, extension
from torch_fsdp_tests.common_distributed import (
    MultiProcContinuousTest,
    at_most,
    requires_capability,
    requires_nccl,
    skip_if_lt_x_gpu,
)
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.device import accelerator, accelerator_probe, machine, vendors
from torch_fsdp_tests.device.accelerator import Accelerator, ConfigurationError
from torch_fsdp_tests.device.vendors import Vendor
from torch_fsdp_tests.ranks import RanksErred, server
from torch_fsdp_tests.world_sizes import up_to

CLUSTER = Accelerator("xpu", "xccl", count=2, ranks=2, capabilities=frozenset({"device_index", "streams"}))
HOST = accelerator.from_torch("cpu", None, None)  # the CPU is the subject


def describe(backend: str | None, ranks: int | None) -> Accelerator:
    """A vendor's description of its device."""
    return Accelerator("abacus", backend or "beads", 8, ranks or 8)


def misspelt(backend: str | None, ranks: int | None) -> Accelerator:
    return Accelerator("foo", "foocl", 2, 2, frozenset({"streems", "fork"}))


class TestValue(TestCase):
    """Without it, a rank could get the wrong device, or a misspelt capability could turn tests into skips."""

    def test_ranks_share_devices_in_turn(self):
        """The CPU has no index."""
        self.assertEqual([CLUSTER.device(rank).index for rank in range(4)], [0, 1, 0, 1])
        self.assertEqual(HOST.device(3), torch.device("cpu"))
        self.assertTrue(HOST.is_cpu)

    def test_room(self):
        self.assertIsNone(CLUSTER.lacks_room_for(2))
        self.assertIn("needs 3 xpu devices, but sees only 2", CLUSTER.lacks_room_for(3))
        sharing = Accelerator("xpu", "gloo", 1, 2, frozenset({"shared_device"}))
        self.assertIsNone(sharing.lacks_room_for(8))
        self.assertIsNone(HOST.lacks_room_for(1000))

    def test_ranks_up_to_the_number_of_devices(self):
        of_three = Accelerator("xpu", "xccl", 3, 3, frozenset())
        self.assertEqual([up_to(4, CLUSTER), up_to(4, of_three), up_to(4, HOST)], [2, 3, 4])
        self.assertEqual(up_to(4, Accelerator("xpu", "xccl", 1, 2, frozenset())), 2)  # and the test skips
        self.assertEqual([up_to(8, CLUSTER, least=4), up_to(8, HOST, least=4)], [4, 8])
        # They share devices only if a test needs more ranks.
        sharing = Accelerator("xpu", "gloo", 2, 2, frozenset({"shared_device"}))
        self.assertEqual([up_to(4, sharing), up_to(4, sharing, least=3)], [2, 3])

    def test_ranks_up_to_what_the_user_asks_for(self):
        with mock.patch.dict(os.environ, {"TORCH_FSDP_TESTS_RANKS": "2"}):
            self.assertEqual([up_to(4, HOST), up_to(4, HOST, least=4)], [2, 4])
        for count, ranks, size in ((8, 2, 4), (2, 4, 4), (2, 8, 4)):
            sharing = Accelerator("xpu", "gloo", count, ranks, frozenset({"shared_device"}))
            self.assertEqual(up_to(4, sharing), size)

    def test_capabilities(self):
        self.assertIsNone(CLUSTER.lacks("streams"))
        self.assertRegex(CLUSTER.lacks("streams", "graphs"), r"needs graphs \(.*\); xpu with xccl does not have it$")
        self.assertRegex(HOST.lacks("streams", "graphs"), "^needs streams .*, graphs .* does not have them$")
        with self.assertRaisesRegex(KeyError, "unknown capability 'steams'"):
            CLUSTER.has("steams")


class TestChoice(TestCase):
    """Without it, a run could use another device or backend than the user or the vendor named."""

    def chosen(self, declared: dict[str, Vendor], **variables: str) -> Accelerator:
        names = {f"TORCH_FSDP_TESTS_{name}": value for name, value in variables.items()}
        with mock.patch.object(vendors, "load", declared.get), mock.patch.dict(os.environ, names):
            accelerator._resolve.cache_clear()
            self.addCleanup(accelerator._resolve.cache_clear)
            return accelerator.current()

    def test_vendor_describes_its_own_device(self):
        declared = {"abacus": Vendor("abacus", describe=f"{__name__}:describe")}
        self.assertEqual(self.chosen(declared, DEVICE="abacus").backend, "beads")
        self.assertEqual(self.chosen(declared, DEVICE="abacus", RANKS="3").ranks, 3)

    def test_descriptions_that_fail(self):
        not_found = "cannot be imported: ModuleNotFoundError: .*; write it, or leave `describe` out"
        for name, words in (
            ("no_such_module:describe", not_found),
            (f"{__name__}:nothing", "cannot be imported: AttributeError: "),
            ("builtins:dict", "returned a dict; it must return an Accelerator"),
            ("builtins:len", "failed: TypeError: "),
            (f"{__name__}:misspelt", "reports: unknown capability 'streems'; nearest: streams$"),
        ):
            with self.subTest(name), self.assertRaisesRegex(ConfigurationError, f"describes the device 'foo' {words}"):
                self.chosen({"foo": Vendor("foo", describe=name)}, DEVICE="foo")

    def test_message_for_unknown_device_lists_those_of_torch(self):
        with mock.patch.object(torch.accelerator, "current_accelerator", lambda: None):
            with self.assertRaisesRegex(ConfigurationError, "^unknown device 'foo': torch .* know cpu$"):
                self.chosen({}, DEVICE="foo")

    def test_vendor_without_a_description(self):
        """The backend is that of its declaration, if torch knows none for the device."""
        declared = {"xpu": Vendor("xpu", backend="gloo")}
        answer = {"count": 3, "capabilities": ["streams"]}
        none_known = mock.patch.dict(torch.distributed.Backend.default_device_backend_map, clear=True)
        with none_known, mock.patch.object(accelerator, "_probe", lambda *_: answer):
            device = self.chosen(declared, DEVICE="xpu")
        self.assertEqual((device.backend, device.count, device.capabilities), ("gloo", 3, {"streams"}))

    def test_host_by_name(self):
        device = self.chosen({}, DEVICE="cpu", RANKS="6")
        self.assertEqual((device.type, device.backend, device.count, device.ranks), ("cpu", "gloo", 0, 6))

    def test_no_device_of_that_kind(self):
        absent = {"count": 0, "capabilities": []}
        with mock.patch.multiple(accelerator, _probe=lambda *_: absent, _checked_backend=lambda *_: "xccl"):
            with self.assertRaisesRegex(ConfigurationError, "sees none: check the driver"):
                accelerator.from_torch("xpu", None, None)

    def test_probe_runs_in_its_own_process(self):
        """If torch was built without a device type, the error is a sentence, and this process initializes no device."""
        with self.assertRaisesRegex(ConfigurationError, "the device 'abacus' cannot be used: .*abacus"):
            accelerator._probe("abacus", "gloo")
        self.assertFalse(accelerator.initialized())

    def test_probe_runs_once_and_its_result_is_recorded(self):
        answer = {"count": 1, "capabilities": ["fork"]}
        probe = accelerator._probe.__wrapped__
        with (
            mock.patch.dict(accelerator._answers, clear=True),
            mock.patch.object(accelerator_probe, "ask", return_value=answer) as ask,
            mock.patch.object(accelerator.events, "record") as recorded,
        ):
            self.assertEqual(probe("xpu", "xccl"), answer)
            recorded.assert_called_once_with(probed={"xpu xccl": answer})
            with mock.patch.dict(os.environ, accelerator.environment()):
                self.assertEqual(probe("xpu", "xccl"), answer)
            ask.assert_called_once_with("xpu", "xccl")


class TestSharing(TestCase):
    """Without it, a machine with one device could skip tests that it can run, or replace the backend that the user
    requested.
    """

    def chosen(
        self, *, count: int, own: bool, staged: bool, backend: str | None = None, ranks: int | None = None
    ) -> tuple[Accelerator, list[str]]:
        facts = {"xccl": own, "staged": staged}
        probed = []

        def probe(device_type: str, name: str) -> dict[str, Any]:
            probed.append(name)
            return {"count": count, "capabilities": ["shared_device"] * facts[name]}

        with mock.patch.multiple(accelerator, _probe=probe, _checked_backend=lambda kind, name: name or "xccl"):
            return accelerator.from_torch("xpu", backend, ranks), probed

    def test_tests_with_more_ranks_than_devices(self):
        """They alone use the staged backend, if the device's own cannot share. A requested backend is kept."""
        device, _ = self.chosen(count=2, own=False, staged=True)
        backends = [device.for_ranks(ranks).backend for ranks in (1, 2, 3, 8)]
        self.assertEqual(backends, ["xccl", "xccl", "staged", "staged"])
        self.assertEqual((device.is_shared, device.lacks_room_for(8)), (False, None))
        self.assertEqual([up_to(4, device), up_to(4, device, least=4)], [2, 4])
        for requested in ({"own": False, "staged": False}, {"own": False, "staged": True, "backend": "xccl"}):
            device, _ = self.chosen(count=2, **requested)
            self.assertIs(device.for_ranks(4), device)
            self.assertIn("needs 4 xpu devices, but sees only 2", device.lacks_room_for(4))
        device, _ = self.chosen(count=2, own=True, staged=True)
        self.assertIs(device.for_ranks(4), device)

    def test_ranks_on_several_machines_do_not_share(self):
        """Each rank at such a place has a device, although one machine has fewer devices than there are ranks."""
        for one_host, backend in ((False, "xccl"), (True, "staged")):
            place = extension.Place()
            place.world_size, place.one_host = 16, one_host
            with mock.patch.object(extension, "place", return_value=place):
                device, _ = self.chosen(count=8, own=False, staged=True, ranks=16)
                self.assertEqual((device.backend, device.is_shared), (backend, one_host))
                self.assertEqual(device.for_ranks(16).backend, backend)

    def test_device_of_the_test_that_runs(self):
        device, _ = self.chosen(count=2, own=False, staged=True)
        self.addCleanup(accelerator.expect, 0)
        with mock.patch.object(accelerator, "_resolve", lambda *_: device):
            for ranks, backend in ((2, "xccl"), (4, "staged"), (0, "xccl")):
                accelerator.expect(ranks)
                self.assertEqual(accelerator.current().backend, backend)

    def test_backend_of_ranks_that_share_a_device(self):
        """It is the device's own backend if this can share, or else the staged one. A requested backend is kept."""
        no_room = "needs 2 xpu devices, but sees only 1; ranks that share"
        for count, own, staged, requested, backend, ranks, probed, lacking in (
            (1, True, True, {}, "xccl", 2, ["xccl"], None),
            (1, False, True, {}, "staged", 2, ["xccl", "staged", "staged"], None),
            (1, False, False, {}, "xccl", 2, ["xccl", "staged"], no_room),
            (1, False, True, {"backend": "xccl"}, "xccl", 2, ["xccl"], no_room),
            (8, False, True, {}, "xccl", 8, ["xccl"], None),  # there are enough devices
            (8, False, True, {"ranks": 16}, "staged", 16, ["xccl", "staged", "staged"], None),
        ):
            with self.subTest(count=count, own=own, staged=staged, requested=requested):
                device, probed_backends = self.chosen(count=count, own=own, staged=staged, **requested)
                self.assertEqual((device.backend, device.ranks, probed_backends), (backend, ranks, probed))
                self.assertEqual(device.is_shared, ranks > count)
                self.assertRegex(device.lacks_room_for(2) or "", lacking or "^$")


# What the probe tries, and the capabilities that follow.
ATTEMPTS = {
    "computes_after_fork": ["fork"],
    "_overlaps": ["asynchronous_collectives"],
    "_shares_a_device": ["shared_device"],
    "_has_symmetric_memory": ["symmetric_memory"],
    "_collective_works": ["bf16_collectives", "fp16_collectives", "premul_sum"],
}


class Module:
    """Replaces ``torch.get_device_module``, for a device with these capabilities."""

    def __init__(self, count: int, **parts: object) -> None:
        self.device_count = lambda: count
        vars(self).update(parts)


class TestProbe(TestCase):
    """Without it, tests could run, and fail or hang, on a device that lacks what they need.

    The device is a fake.
    """

    def described(self, module: object, backend: str = "nccl", /, **answers: bool) -> dict[str, Any]:
        attempts = {name: mock.Mock(return_value=answers.get(name, False)) for name in ATTEMPTS}
        module_of_device = mock.patch.object(torch, "get_device_module", lambda kind: module)
        with module_of_device, mock.patch.multiple(accelerator_probe, **attempts):
            return accelerator_probe.describe("xpu", backend)

    def test_nothing_is_taken_for_granted(self):
        actual = self.described(Module(2))
        self.assertNotIn("accelerator", actual.pop("machine"))
        self.assertEqual(actual, {"count": 2, "capabilities": [], "variables": {}})
        self.assertEqual(self.described(Module(0)), {"count": 0, "capabilities": []})

    def test_each_capability_has_its_own_attempt(self):
        for attempt, names in ATTEMPTS.items():
            self.assertEqual(self.described(Module(2), **{attempt: True})["capabilities"], names)
        able = Module(2, set_device=lambda index: None, graph=object, can_device_access_peer=lambda a, b: True)
        self.assertEqual(self.described(able)["capabilities"], ["device_index", "peer_access", "graphs"])

    def test_one_device_has_no_peers(self):
        able = Module(1, can_device_access_peer=lambda a, b: True)
        self.assertEqual(self.described(able, _has_symmetric_memory=True)["capabilities"], [])

    def test_sharing_sets_the_needed_variables(self):
        variables = {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        shared = self.described(Module(1), _shares_a_device=True)
        self.assertEqual(shared["variables"], variables)
        self.assertEqual(self.described(Module(1), "gloo", _shares_a_device=True)["variables"], {})
        # With enough devices this is not probed, because the probe starts the device's runtime twice.
        self.assertEqual(self.described(Module(8), _shares_a_device=True)["capabilities"], [])
        with mock.patch.dict(accelerator._answers, {"xpu nccl": shared}, clear=True):
            self.assertLessEqual(variables.items(), accelerator.environment().items())

    def test_a_forked_process_is_tried_and_has_a_limit(self):
        self.assertTrue(accelerator_probe.computes_after_fork("cpu"))  # the CPU is the subject
        self.assertFalse(accelerator_probe.computes_after_fork("xyz"))
        with mock.patch.multiple(accelerator_probe, FORK_LIMIT=0.05, _works=lambda attempt: signal.pause()):
            self.assertFalse(accelerator_probe.computes_after_fork("cpu"))

    def test_ranks_are_fresh_if_forks_of_this_process_cannot_compute(self):
        """An import may have started the runtime of the device. The file says why it takes longer."""
        able = dataclasses.replace(CLUSTER, capabilities=frozenset({"fork"}))
        for works, method, words in ((True, "fork", ""), (False, "spawn", "has started the runtime of xpu")):
            attempt = mock.patch.object(accelerator_probe, "computes_after_fork", return_value=works)
            with self.subTest(method), under_test(able), attempt, contextlib.redirect_stderr(io.StringIO()) as stderr:
                server.forks_work.cache_clear()
                self.addCleanup(server.forks_work.cache_clear)
                self.assertEqual((server.start_method(), server.start_method()), (method, method))
                self.assertEqual(stderr.getvalue().count("\n"), int(not works))
                self.assertIn(words, stderr.getvalue())

    def test_collectives_of_the_processor(self):
        """The built-in capabilities of the CPU with gloo equal the results of a probe."""
        capabilities = accelerator._probe("cpu", "gloo")["capabilities"]  # the CPU is the subject
        self.assertEqual(accelerator._OF_THE_CPU & set(capabilities), HOST.capabilities)


class TestMachine(TestCase):
    """Without it, a report could not tell why a test fails on one machine and passes on another."""

    FACTS = {"cpu": "Beads", "instruction_sets": "AVX2", "blas": "mkl", "threads": 2, "memory": 8.0}

    def test_of_the_host(self):
        facts = machine.of_host()
        self.assertIn(torch.backends.cpu.get_cpu_capability(), facts["instruction_sets"])
        self.assertTrue(facts["cpu"])
        self.assertEqual(facts["threads"], torch.get_num_threads())

    def test_model_of_the_cpu(self):
        x86 = "cpu family\t: 6\nmodel\t\t: 167\nmodel name\t: Xeon 9\nflags\t\t: fpu avx2 amx_bf16 bf16x\n"
        arm = "Features\t: fp sve\nCPU implementer\t: 0x41\nCPU part\t: 0xd40\n"
        self.assertEqual(machine.cpu_model(x86), "Xeon 9 (family 6, model 167)")
        self.assertRegex(machine.cpu_model(arm), r"^\S+ \(implementer 0x41, part 0xd40\)$")
        self.assertTrue(machine.cpu_model(""))
        self.assertEqual([machine._extensions(info) for info in (x86, arm, "")], [["amx_bf16"], ["sve"], []])

    def test_of_devices(self):
        """Facts that the device's module does not offer are left out."""
        properties = mock.Mock(driver_version="1.2")
        able = Module(
            2,
            get_device_name=lambda index: "Nine",
            get_device_properties=lambda index: properties,
            mem_get_info=lambda index: ((index + 3) << 30, 0),
            beads=mock.Mock(version=lambda: (2, 27, 5)),
        )
        with mock.patch.object(torch, "get_device_module", lambda kind: able):
            facts = machine.of_device("xpu", "beads")
        self.assertEqual([facts[name] for name in ("accelerator", "driver", "device_memory")], ["2 x Nine", "1.2", 3.0])
        self.assertEqual(facts["libraries"]["beads"], "2.27.5")
        with mock.patch.object(torch, "get_device_module", lambda kind: Module(1)):
            self.assertLessEqual(machine.of_device("xpu").keys(), {"libraries", "driver"})

    def test_facts_reach_the_device(self):
        """The probe's facts become part of the value, and then of the report."""
        answer = {"count": 1, "capabilities": [], "machine": {"accelerator": "1 x Nine"}}
        with mock.patch.object(accelerator, "_probe", lambda *_: answer):
            self.assertEqual(accelerator.from_torch("xpu", "gloo", 1).machine, answer["machine"])

    def test_in_words(self):
        libraries = {"cuda": "12.8", "nccl": "2.27"}
        facts = {**self.FACTS, "accelerator": "8 x Nine", "driver": "550", "libraries": libraries}
        words = "Beads, AVX2, BLAS mkl, 2 threads, 8 x Nine, driver 550, cuda 12.8, nccl 2.27"
        self.assertEqual(machine.in_one_line(facts), words)
        self.assertEqual(machine.in_one_line({}), "")
        self.assertEqual(machine.titled(facts)["free memory"], "8.0 GiB")

    def test_differences(self):
        other = self.FACTS | {"cpu": "Stones", "memory": 5.0}
        self.assertEqual(machine.differing({"a": self.FACTS, "b": other}), {"CPU": {"a": "Beads", "b": "Stones"}})
        short = {"a": self.FACTS, "b": self.FACTS | {"memory": 3.9}}
        self.assertEqual(machine.differing(short), {"free memory": {"a": "8.0 GiB", "b": "3.9 GiB"}})
        self.assertEqual(machine.differing({"a": self.FACTS}), {})


class TestRequirements(TestCase):
    """Without it, a test could run on a device that lacks what it needs, or be skipped on one that has it."""

    def reason(
        self, decorator: Callable[[Callable], Callable], device: Accelerator, body: Callable[[], object] = lambda: None
    ) -> str:
        @decorator
        def test(self):
            body()
            return "ran"

        with under_test(device):
            try:
                return test(self)
            except SkipTest as skip:
                return str(skip)

    def test_devices(self):
        self.assertEqual(self.reason(skip_if_lt_x_gpu(2), CLUSTER), "ran")
        self.assertIn("needs 4 xpu devices", self.reason(skip_if_lt_x_gpu(4), CLUSTER))
        self.assertEqual(self.reason(skip_if_lt_x_gpu(4), HOST), "ran")
        self.assertIn("the device under test is the CPU", self.reason(skip_if_lt_x_gpu(4, allow_cpu=False), HOST))

    def test_ranks_of_a_class_that_has_one_for_each_device(self):
        """Where there is one device, or the CPU, a test for two devices skips. Threads need no device of their own."""
        wants = {CLUSTER: "ran", HOST: "needs 2 or more ranks, but the world size of T is 1 here"}
        for base in (Processes, Threads, MultiProcContinuousTest):
            for device, want in wants.items():
                cls, _ = class_with(skip_if_lt_x_gpu(2), base=base)
                cls.world_size = 1
                with self.subTest(base=base, device=device), under_test(device):
                    self.assertEqual(self.set_up(cls), want)
                    cls.world_size = 2
                    self.assertEqual(self.set_up(cls), "ran")
        cls.world_size = 0
        with under_test(HOST):
            self.assertIn("the world size of T is 0 here", self.set_up(cls))

    def test_a_class_without_ranks_has_computed_their_number(self):
        """It counts devices of a type that this machine lacks. A number in the class is a mistake, as on a device."""
        cls = type("T", (Processes,), {"world_size": property(lambda self: 0), "test_x": lambda self: None})
        with under_test(HOST):
            self.assertEqual(self.set_up(cls), "needs 1 or more ranks, but the world size of T is 0 here")
        wrong = type("T", (Processes,), {"world_size": 0, "test_x": lambda self: None})
        negative = type("T", (Processes,), {"world_size": -1, "test_x": skip_if_lt_x_gpu(2)(lambda self: None)})
        for device, each, size in ((CLUSTER, cls, 0), (HOST, wrong, 0), (HOST, negative, -1)):
            with under_test(device), self.assertRaisesRegex(RanksErred, f"T has a world size of {size}"):
                self.set_up(each)

    def set_up(self, cls: Any) -> str:
        """Set up the test of a class, as far as its requirements. Returns why it skips."""
        case = cls("test_x")
        self.addCleanup(case.doCleanups)
        try:
            case._ask_requirements(case.world_size)
        except SkipTest as skip:
            return str(skip)
        return "ran"

    def test_capability(self):
        self.assertEqual(self.reason(requires_capability("streams"), CLUSTER), "ran")
        self.assertIn("needs streams", self.reason(requires_capability("streams"), HOST))

    def test_number_of_ranks_of_a_test(self):
        """A test has a rank for each device, at most as many as its class says, and at least as many as it needs."""

        class Sized:
            def __init__(self, method: str) -> None:
                self._testMethodName = method

            world_size = at_most(4)
            of_two = skip_if_lt_x_gpu(2)(lambda self: None)
            of_four = skip_if_lt_x_gpu(4)(lambda self: None)
            of_eight = common_distributed.requires_world_size(8)(lambda self: None)
            of_four_to_eight = common_distributed.requires_world_size(8, least=4)(lambda self: None)

        needed, actual = common_distributed.get_required_world_size, {}
        for count in (1, 2, 4, 8):
            with under_test(Accelerator("xpu", "xccl", count, max(count, 2))):
                sizes = [Sized(method).world_size for method in ("of_two", "of_four")]
                sizes += [needed(Sized(method), 2) for method in ("of_eight", "of_four_to_eight", "of_two")]
                actual[count] = sizes
        self.assertEqual(actual, {1: [2, 4, 8, 4, 2], 2: [2, 4, 8, 4, 2], 4: [4, 4, 8, 4, 2], 8: [4, 4, 8, 8, 2]})

    def test_power_of_two_ranks(self):
        """A class whose tests halve their meshes takes 4 of 6 devices, and 2 of 3."""

        class Halved:
            _testMethodName = ""
            power_of_two_ranks = True
            world_size = at_most(8)

        sizes = []
        for count in (2, 3, 4, 6, 8):
            with under_test(Accelerator("xpu", "xccl", count, count)):
                sizes.append(Halved().world_size)
        self.assertEqual(sizes, [2, 2, 4, 4, 8])

    def test_nccl_is_required_only_if_it_is_under_test(self):
        self.assertEqual(self.reason(requires_nccl(), HOST), "ran")
        with mock.patch("torch.distributed.is_nccl_available", lambda: False):
            self.assertIn("without the backend nccl", self.reason(requires_nccl(), Accelerator("x", "nccl", 2, 2)))

    def test_a_test_that_names_nccl_skips_without_it(self):
        def named() -> None:
            raise RuntimeError("Distributed package doesn't have NCCL built in")

        with mock.patch("torch.distributed.is_nccl_available", lambda: False):
            self.assertIn("without the backend nccl", self.reason(requires_nccl(), HOST, named))
        with mock.patch("torch.distributed.is_nccl_available", lambda: True), self.assertRaises(RuntimeError):
            self.reason(requires_nccl(), HOST, named)


if __name__ == "__main__":
    run_tests()
