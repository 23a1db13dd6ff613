"""Names that a test class shares with the harness by accident are rejected when the class is created."""

from typing import Any

from torch_fsdp_tests.common_distributed import MultiProcContinuousTest, MultiThreadedTestCase
from torch_fsdp_tests.common_fsdp import FSDPTest
from torch_fsdp_tests.common_utils import TestCase, instantiate_parametrized_tests, parametrize, run_tests


@instantiate_parametrized_tests
class TestNames(TestCase):
    """Without it, a helper of a test could override a method of the harness, and failures of ranks could be lost."""

    def made(self, name: str, *bases: type) -> Any:
        return type("TestX", bases, {name: lambda self, *args: None})

    @parametrize(
        "base,name,owner",
        [
            (FSDPTest, "_record", "RankTestCase"),
            (FSDPTest, "_group", "RankTestCase"),
            (MultiThreadedTestCase, "_conclude", "RankTestCase"),
            (MultiProcContinuousTest, "_end_group", "MultiProcContinuousTest"),
            (TestCase, "_record_defects", "TestCase"),
        ],
    )
    def test_a_part_of_the_harness_is_not_replaced(self, base, name, owner):
        with self.assertRaisesRegex(TypeError, rf"TestX\.{name} would override {owner}\.{name}"):
            self.made(name, base)

    def test_mixins_cannot_replace_a_part_of_the_harness(self):
        mixin = type("Mixin", (), {"_close": lambda self, group: None})
        for bases in ((mixin, FSDPTest), (FSDPTest, mixin)):
            with self.assertRaisesRegex(TypeError, r"Mixin\._close would override RankTestCase\._close"):
                type("TestX", bases, {})

    @parametrize("name", ["_run", "_spawn_processes", "_init_pg", "_helper", "__private", "record", "test_record"])
    def test_upstreams_names_and_new_names_are_allowed(self, name):
        self.made(name, FSDPTest)

    def test_attributes_that_the_harness_sets_are_no_conflict(self):
        """A continuous class stores its ranks in an attribute while its tests run. unittest stores its clean-ups."""
        first = self.made("test_x", MultiProcContinuousTest)
        first._group = first._last_test = None
        first.addClassCleanup(lambda: None)
        self.made("test_y", first)


if __name__ == "__main__":
    run_tests()
