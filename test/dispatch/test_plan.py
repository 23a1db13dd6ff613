"""Planning, selecting and lending, with numbers and names alone."""

import itertools
import json
import random
import time
import unittest
import unittest.mock
from pathlib import Path

from torch_fsdp_tests.dispatch import devices, plan
from torch_fsdp_tests.dispatch.devices import DATA, find, loads_extensions, parse_names
from torch_fsdp_tests.dispatch.discover import TestFile, needs_of
from torch_fsdp_tests.dispatch.expectations import Entry, Situation, version_fits
from torch_fsdp_tests.dispatch.plan import Job, ShardedTest, TestRun, calculate_shards
from torch_fsdp_tests.dispatch.pool import DevicePool
from torch_fsdp_tests.dispatch.select import UnknownTest, select


def jobs_of(*shapes):
    """Jobs from pairs of slots and seconds, in path order."""
    return [
        Job(ShardedTest(TestRun(f"f{number:05d}"), time=seconds), slots, slots)
        for number, (slots, seconds) in enumerate(shapes)
    ]


class TestShards(unittest.TestCase):
    def test_union_is_the_selection(self):
        tests = [TestRun(f"t{number}") for number in range(23)]
        draw = random.Random(7)
        for known in (0, 9, 23):
            times = {f"t{number}": draw.uniform(1, 2000) for number in range(known)}
            expected = sorted(map(str, plan.split(tests, times, {}, 600)))
            for shards in (1, 2, 5, 23, 60):
                with self.subTest(known=known, shards=shards):
                    dealt = calculate_shards(shards, tests, times)
                    self.assertEqual(sorted(str(part) for _, parts in dealt for part in parts), expected)
                    self.assertEqual(dealt, calculate_shards(shards, tests, times))

    def test_loads_are_even(self):
        tests = [TestRun(f"t{number}") for number in range(6)]
        dealt = calculate_shards(2, tests, dict(zip((t.file for t in tests), (60, 50, 40, 30, 20, 10), strict=True)))
        self.assertEqual([load for load, _ in dealt], [110, 100])

    def test_unknown_times_spread(self):
        dealt = calculate_shards(4, [TestRun(f"t{number}") for number in range(8)], {})
        self.assertEqual([len(parts) for _, parts in dealt], [2, 2, 2, 2])

    def test_long_file_is_split(self):
        dealt = calculate_shards(3, [TestRun("long"), TestRun("short")], {"long": 1300, "short": 10})
        parts = sorted((p.shard, p.num_shards, round(p.time)) for _, ps in dealt for p in ps if p.name == "long")
        self.assertEqual(parts, [(1, 3, 433), (2, 3, 433), (3, 3, 433)])

    def test_part_of_a_file_takes_its_classes_time(self):
        times = {"f": {"A": 5.0, "B": 7.0}}
        self.assertEqual(plan.estimate(TestRun("f", frozenset(["A"])), {"f": 12.0}, times), 5.0)
        self.assertEqual(plan.estimate(TestRun("f", excluded=frozenset(["A"])), {"f": 12.0}, times), 7.0)
        self.assertIsNone(plan.estimate(TestRun("f", frozenset(["C"])), {"f": 12.0}, times))

    def test_run_algebra(self):
        whole, a, b = TestRun("f"), TestRun("f", frozenset("A")), TestRun("f", frozenset("B"))
        self.assertEqual(a | b, TestRun("f", frozenset("AB")))
        self.assertEqual(a | whole, whole)
        self.assertEqual(whole - a, TestRun("f", excluded=frozenset("A")))
        self.assertEqual((whole - a) - b, TestRun("f", excluded=frozenset("AB")))
        self.assertEqual((a | b) - a, b)
        self.assertIsNone(a - a)
        self.assertIsNone(a - whole)
        with self.assertRaises(ValueError):
            a | TestRun("g")

    def test_parts_by_what_they_run(self):
        """Against sets of tests: nothing is lost, and nothing is too much where the terms allow to say it."""
        universe = {f"{cls}.{test}" for cls in "AB" for test in ("t1", "t2")}
        names = ["A", "B", "A.t1", "A.t2", "B.t1"]
        choices = [frozenset(c) for n in range(3) for c in itertools.combinations(names, n)]
        runs = [TestRun("f", included, excluded) for included in choices for excluded in choices]

        def names_run(run):
            return {name for name in universe if run is not None and run.contains(name)}

        for a, b in itertools.product(runs, runs):
            self.assertGreaterEqual(names_run(a | b), names_run(a) | names_run(b), f"{a} | {b}")
            self.assertGreaterEqual(names_run(a - b), names_run(a) - names_run(b), f"{a} - {b}")
            if not a.excluded and not b.excluded:
                self.assertEqual(names_run(a | b), names_run(a) | names_run(b), f"{a} | {b}")
            if not b.excluded or (b.excluded <= {"A", "B"} and not b.included):
                self.assertEqual(names_run(a - b), names_run(a) - names_run(b), f"{a} - {b}")
        nested = TestRun("f", frozenset(["A"]), frozenset(["A.t1"]))
        self.assertEqual(nested | TestRun("f", frozenset(["B"])), TestRun("f", frozenset("AB"), frozenset(["A.t1"])))


class TestOrder(unittest.TestCase):
    def test_equal_or_unknown_estimates_keep_path_order(self):
        for seconds in (None, 3.0):
            jobs = jobs_of((1, seconds), (4, seconds), (2, seconds))
            self.assertEqual(plan.order(reversed(jobs), 4, 60), jobs)

    def test_longest_first(self):
        short, long = jobs_of((1, 1.0), (1, 9.0))
        self.assertEqual(plan.order([short, long], 2, 60), [long, short])

    def test_wide_job_does_not_starve(self):
        wide, *narrow = jobs_of((4, 5.0), *[(1, 3.0)] * 40)
        # One narrow job runs already, so the wide one cannot start; the others must not push it back for ever.
        placed = plan.simulate([narrow[0], wide, *narrow[1:]], 4, 60)
        start = {placement.job.key: placement.start for placement in placed}
        self.assertEqual(start[wide.key], 3.0)

    def test_narrow_jobs_fill_the_gap(self):
        first, wide, filler = jobs_of((3, 10.0), (4, 5.0), (1, 10.0))
        start = {p.job.key: p.start for p in plan.simulate([first, wide, filler], 4, 60)}
        self.assertEqual((start[filler.key], start[wide.key]), (0.0, 10.0))

    def test_a_gap_is_not_filled_past_the_promise(self):
        first, wide, too_long = jobs_of((3, 10.0), (4, 5.0), (1, 11.0))
        start = {p.job.key: p.start for p in plan.simulate([first, wide, too_long], 4, 60)}
        self.assertEqual((start[wide.key], start[too_long.key]), (10.0, 15.0))

    def test_nothing_overlaps(self):
        draw = random.Random(3)
        jobs = jobs_of(*((draw.choice((1, 2, 4, 8)), draw.uniform(1, 50)) for _ in range(120)))
        placed = plan.simulate(plan.order(jobs, 8, 60), 8, 60)
        self.assertEqual(sorted(p.job.key for p in placed), [job.key for job in jobs])
        for moment in (placement.start for placement in placed):
            self.assertLessEqual(sum(p.job.slots for p in placed if p.start <= moment < p.end), 8)
        self.assertLess(plan.makespan(placed), 1.1 * plan.lower_bound(jobs, 8, 60))

    def test_a_job_wider_than_the_pool_gets_all_of_it(self):
        part = ShardedTest(TestRun("f"))
        self.assertEqual(plan.make_jobs([part], {"f": 8}, 4), [Job(part, 4, 4)])
        self.assertEqual(plan.make_jobs([part], {"f": 8}, None), [Job(part, 0, 1)])
        self.assertEqual(plan.make_jobs([part], {"f": 8}, 0), [Job(part, 8, 1)])

    def test_ten_thousand_files(self):
        draw = random.Random(1)
        tests = [TestRun(f"t{number:05d}") for number in range(10_000)]
        times = {test.file: draw.expovariate(1 / 40) for test in tests}
        before = time.process_time()
        for _, parts in calculate_shards(256, tests, times):
            plan.order(plan.make_jobs(parts, dict.fromkeys(times, 2), 8), 8, 60)
        self.assertLess(time.process_time() - before, 4)  # half of it on an idle machine


class TestPool(unittest.TestCase):
    def test_nothing_is_lent_twice(self):
        pool, out, draw = DevicePool([str(n) for n in range(8)]), [], random.Random(5)
        for _ in range(500):
            if pool.free and draw.random() < 0.6:
                out.append(pool.lend(draw.randint(1, pool.free)))
            elif out:
                pool.give_back(out.pop(draw.randrange(len(out))))
            held = [slot for lent in out for slot in lent]
            self.assertEqual(len(held), len(set(held)))
            self.assertEqual(len(held) + pool.free, 8)

    def test_refusals(self):
        pool = DevicePool(["0", "1"])
        lent = pool.lend(2)
        with self.assertRaises(ValueError):
            pool.lend(1)
        pool.give_back(lent)
        with self.assertRaises(ValueError):
            pool.give_back(lent)


class TestDevices(unittest.TestCase):
    def test_names(self):
        self.assertEqual(parse_names("0-2,5,GPU-ab"), ("0", "1", "2", "5", "GPU-ab"))
        for text in ("", "3-1", "1,1", "0-2,1"):
            with self.subTest(text=text), self.assertRaises(ValueError):
                parse_names(text)

    def test_callers_variable_is_the_pool_and_is_what_jobs_see(self):
        for device, variable in (("cuda", "CUDA_VISIBLE_DEVICES"), ("xpu", "ZE_AFFINITY_MASK")):
            found = find(device, None, {variable: "4,6,7"})
            self.assertEqual((found.names, found.environment((0, 2))), (("4", "6", "7"), {variable: "4,7"}))

    def test_every_vendors_variables(self):
        """The caller's own variable is the pool, is what jobs see, and marks the vendor's extension as present."""
        for device, vendor in json.loads((DATA / "devices.json").read_text()).items():
            for variable in vendor["variables"]:
                with self.subTest(device, variable=variable), self.built_for(device):
                    for wish in ({None, device} - {"hip"}) if device not in ("cuda",) else {None, "cuda"}:
                        found = find(wish, None, {variable: "3,5"})
                        shown = "cuda" if device == "hip" else device
                        self.assertEqual((found.type, found.names), (shown, ("3", "5")))
                        self.assertEqual(found.environment((1,)), {variable: "5"})
                        self.assertEqual(found.backend, vendor["backend"])
                    self.assertEqual(find(None, None, {variable: "-1"}).type, "cpu")  # the CPU is the subject

    @staticmethod
    def built_for(device):
        """A torch that was built for a device; extensions need none of torch's own."""
        built = {device: "1"} if device in ("cuda", "hip", "xpu") else {}
        return unittest.mock.patch.object(devices, "_torch_versions", lambda: {"__version__": "2.13.0", **built})

    def test_a_negative_index_ends_the_list(self):
        self.assertEqual(find("cuda", None, {"CUDA_VISIBLE_DEVICES": "4,-1,5"}).names, ("4",))

    def test_by_hand(self):
        found = find("npu", ("0", "1"), {})
        self.assertEqual(found.environment((1,)), {"ASCEND_RT_VISIBLE_DEVICES": "1"})

    def test_an_extension_that_torch_imports_may_bring_a_device(self):
        with unittest.mock.patch("importlib.metadata.entry_points", lambda group: [group]):
            self.assertTrue(loads_extensions({}))
            self.assertFalse(loads_extensions({"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}))
        with unittest.mock.patch("importlib.metadata.entry_points", lambda group: []):
            self.assertFalse(loads_extensions({}))

    def test_host_lends_nothing(self):
        self.assertIsNone(find("cpu", ("0",), {}).lendable)  # the CPU is the subject


class TestNeeds(unittest.TestCase):
    def ranks(self, source):
        return needs_of(source).ranks(4)

    def test_largest_literal(self):
        self.assertEqual(self.ranks("@skip_if_lt_x_gpu(2)\n@skip_if_lt_x_gpu(6)\n# skip_if_lt_x_gpu(9)"), 6)
        self.assertEqual(
            self.ranks("class T(FSDPTest):\n    @property\n    def world_size(self) -> int:\n        return 2\n"), 2
        )
        self.assertEqual(self.ranks("@requires_world_size(3)"), 3)

    def test_default(self):
        self.assertEqual(self.ranks("class T(FSDPTest):\n    def test_x(self): pass"), 4)
        self.assertEqual(
            self.ranks("    def world_size(self) -> int:\n        return torch.accelerator.device_count()"), 4
        )
        self.assertEqual(self.ranks("class T(TestCase):\n    def test_x(self): pass"), 1)
        self.assertEqual(self.ranks("class T(common_fsdp.FSDPTest, Other):\n    pass"), 4)
        self.assertEqual(self.ranks("class T(\n    Mixin,\n    MultiThreadedTestCase,\n):\n    pass"), 4)

    def test_words_that_are_no_class(self):
        self.assertEqual(self.ranks('"""A test of the class T(FSDPTest): it is said."""\n'), 1)
        self.assertEqual(self.ranks("    # class T(FSDPTest):\n"), 1)

    def test_properties(self):
        text = "class T(FSDPTest):\n    @property\n    def world_size(self) -> int:\n        return {}\n"
        self.assertEqual(self.ranks(text.format("min(6, device_count())")), 6)
        self.assertEqual(self.ranks(text.format("device_count()")), 4)
        # One class has a property of its own; the other has the default.
        self.assertEqual(self.ranks(text.format(2) + "class U(FSDPTest):\n    pass\n"), 4)
        self.assertEqual(self.ranks("@skip_if_lt_x_gpu(x=3)\n"), 3)
        self.assertEqual(self.ranks("@skip_if_lt_x_gpu(WORLD)\n"), 4)


class TestSelect(unittest.TestCase):
    names = (
        "distributed/fsdp/test_core",
        "distributed/fsdp/test_comm",
        "distributed/_composable/fsdp/test_x",
        "test_top",
    )

    def chosen(self, include, exclude=()):
        files = [TestFile(name, Path(f"{name}.py")) for name in sorted(self.names)]
        source = "class TestA(TestCase):\n    def test_one(self):\nclass TestB(TestCase):\n    def test_two(self):\n"
        return select(files, include, exclude, Path("/somewhere/test"), lambda name: source)

    def test_ways_to_name(self):
        for word in (
            "distributed/fsdp/test_core",
            "test/distributed/fsdp/test_core.py",
            "./distributed/fsdp/test_core",
            "/somewhere/test/distributed/fsdp/test_core.py",
            "distributed/fsdp/*core",
        ):
            with self.subTest(word=word):
                self.assertEqual(self.chosen([word]), [TestRun("distributed/fsdp/test_core")])
        self.assertEqual(len(self.chosen(["distributed/fsdp/"])), 2)
        self.assertEqual(len(self.chosen(["distributed/_composable/*"])), 1)
        self.assertEqual(len(self.chosen(["test"])), 4)
        self.assertEqual(len(self.chosen([])), 4)

    def test_inside(self):
        one = self.chosen(["test_top::TestA::test_one"])
        self.assertEqual(one, [TestRun("test_top", frozenset(["TestA.test_one"]))])
        self.assertEqual(self.chosen(["test_top::TestA", "test_top"]), [TestRun("test_top")])
        self.assertEqual(self.chosen(["test_top::TestA::test_one_generated"])[0].included, {"TestA.test_one_generated"})

    def test_exclude(self):
        self.assertEqual([t.file for t in self.chosen([], ["distributed"])], ["test_top"])
        self.assertEqual(self.chosen(["test_top"], ["test_top::TestB"])[0].excluded, {"TestB"})

    def test_unknown_names_its_neighbours(self):
        for word, near in (
            ("distributed/fsdp/test_cor", "test_core"),
            ("test_comn", "test_comm"),
            ("test_top::TestC", "TestA"),
            ("distributed/fdsp", "distributed/fsdp"),
        ):
            with self.subTest(word=word), self.assertRaisesRegex(UnknownTest, f"nearest: .*{near}"):
                self.chosen([word])
        with self.assertRaises(UnknownTest):
            self.chosen([], ["nothing_like_it"])


class TestLists(unittest.TestCase):
    def test_versions(self):
        for version, conditions, expected in (
            ("2.13.0+cpu", ">=2.10", True), ("2.9.1", ">=2.10", False), ("2.10.0", ">=2.9,<2.11", True),
            ("2.13.0a0+git", "==2.13", True), ("2.13.1", "!=2.13.1", False),
        ):  # fmt: skip
            with self.subTest(version=version, conditions=conditions):
                self.assertEqual(version_fits(version, conditions), expected)

    def test_names_and_conditions(self):
        entry = Entry("a/test_x::TestA::test_*", "fail", "why", device="cuda", torch=">=2.11", world_size=2)
        self.assertTrue(entry.names("a/test_x", "TestA.test_one"))
        self.assertFalse(entry.names("a/test_y", "TestA.test_one"))
        self.assertFalse(entry.names("a/test_x", "TestB.test_one"))
        self.assertTrue(entry.applies(Situation("cuda", "2.11.0", 2)))
        for other in (Situation("xpu", "2.11.0", 2), Situation("cuda", "2.10.0", 2), Situation("cuda", "2.11.0", None)):
            self.assertFalse(entry.applies(other))


if __name__ == "__main__":
    unittest.main()
