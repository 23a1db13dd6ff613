"""What users may rely on is what the stored list says, so that each change of it is a decision."""

import difflib
from pathlib import Path

from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.tools import public_names

STORED = Path(__file__).with_name("inputs") / "public.txt"


class TestPublicNames(TestCase):
    """Without it, an option, a status or a parameter of a vendor's hook could go without notice."""

    def test_names_are_those_of_the_list(self):
        stored, now = STORED.read_text().splitlines(), public_names.text().splitlines()
        changes = [line for line in difflib.unified_diff(stored, now, n=0, lineterm="") if not line.startswith("@@")]
        self.assertEqual(changes, [], "see docs/stability.md; the first line of the list says how it is made")

    def test_experimental_names_are_not_stable(self):
        stable, experimental = set(public_names.stable()), set(public_names.experimental())
        self.assertEqual(stable & experimental, set())
        self.assertIn("option run_test.py --reaching", experimental)
        self.assertIn("option run_test.py --report", stable)


if __name__ == "__main__":
    run_tests()
