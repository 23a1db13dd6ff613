"""Time as evidence: what is called slower, from numbers alone."""

import sys
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from little_results import a_test, report_of

from torch_fsdp_tests.dispatch import compare, html_report


def test_of(median: float, width: float = 0.0, rounds: int = 0, name: str = "T.test_1") -> dict[str, Any]:
    """A test that took so many seconds. Half of its rounds took at most ``width`` more or less."""
    spread = {"least": 0.0, "low": median - width, "median": median, "high": median + width, "most": 99.0}
    record = {"rounds": rounds, "failed": 0, "outcomes": {}, "failures": [], "seconds": spread}
    return a_test(name, seconds=median, rounds=record if rounds else None)


def kinds(was: dict[str, Any], now: dict[str, Any], *others: tuple[float, float]) -> list[str]:
    """The kinds of differences of a test beside others, which took these seconds before and now."""
    sides = ([was], [now])
    for number, seconds in enumerate(others):
        for side, value in zip(sides, seconds, strict=True):
            side.append(test_of(value, name=f"T.other_{number}"))
    differing = compare.differences(*(report_of(*tests) for tests in sides))
    return [each.kind for each in differing if each.name == "T.test_1"]


class TestSlower(unittest.TestCase):
    """Without it, noise could be reported as slower, or a slower test be taken for noise."""

    def test_rounds_show_the_noise(self):
        for was, now, expected in (
            (test_of(1.0, 0.01, 40), test_of(1.3, 0.01, 40), ["slower"]),
            (test_of(1.3, 0.01, 40), test_of(1.0, 0.01, 40), ["faster"]),
            (test_of(1.0, 0.1, 40), test_of(1.3, 0.01, 40), []),  # it varied
            (test_of(1.0, 0.01, 40), test_of(1.3, 0.1, 40), []),
            (test_of(1.0, 0.0, 40), test_of(1.05, 0.0, 40), []),
            (test_of(0.1, 0.0, 40), test_of(0.14, 0.0, 40), []),
            (test_of(1.0, 0.01, 40), test_of(1.3, 0.01, 3), []),  # too few rounds
            (test_of(1.0, 0.01, 40), test_of(1.3), []),
            (test_of(1.0), test_of(2.6), ["slower"]),
        ):
            with self.subTest(was=was["seconds"], now=now["seconds"]):
                self.assertEqual(kinds(was, now), expected)

    def test_a_machine_that_is_slower_as_a_whole(self):
        """Tests are compared with the median of all, if there are many."""
        twice = [(1.0, 2.0)] * 20
        self.assertEqual(kinds(test_of(2.0), test_of(4.0), *twice), [])
        self.assertEqual(kinds(test_of(2.0), test_of(4.0), *twice[:5]), ["slower"])
        self.assertEqual(kinds(test_of(2.0), test_of(8.0), *twice), ["slower"])
        self.assertEqual(kinds(test_of(4.0), test_of(4.0), *twice), ["faster"])
        tests = [[test_of(seconds, name=f"T.test_{number}") for number in range(20)] for seconds in (1.0, 2.0)]
        reports = [report_of(*side) for side in tests]
        words = "the tests took 2.00 times as long as before (median)"
        self.assertIn(words, compare.lines(*reports)[1])
        self.assertEqual(compare.lines(reports[0], reports[0]), ["nothing differs from the earlier report"])

    def test_words_have_the_spread(self):
        sides = test_of(1.0, 0.02, 40), test_of(1.5, 0.03, 30)
        _, words = compare.lines(*(report_of(test) for test in sides))
        spread = "1.00s (0.98-1.02s, 40 rounds), now 1.50s (1.47-1.53s, 30 rounds)"
        self.assertEqual(words, f"slower: test_x::T.test_1: {spread}")
        page = html_report.render(report_of(test_of(1.0, 0.2, 40)))
        self.assertIn("1.0s<div class='dim small'>0.8s to 1.2s</div>", page)

    def test_a_report_without_rounds(self):
        """As those of earlier versions."""
        old = {key: value for key, value in test_of(1.0).items() if key != "rounds"}
        self.assertEqual(kinds(old, test_of(1.0, 0.1, 40)), [])


if __name__ == "__main__":
    unittest.main()
