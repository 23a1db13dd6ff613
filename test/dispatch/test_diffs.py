"""Diffs: the forms that are read, the texts that are rejected, and how hunks are applied."""

import unittest

from torch_fsdp_tests.installed_torch.diffs import Edited, Hunk, ModeOnly, Moved, NotADiff, Opaque, parse, patched

HUNK = "@@ -3,3 +3,3 @@ def f(x):\n a\n-b\n+c\n \n"
PLAIN = f"--- a/torch/x.py\n+++ b/torch/x.py\n{HUNK}"
READ = Edited(("torch/x.py",), (Hunk(3, ("a", "b", ""), ("a", "c", ""), "def f(x):"),))
GIT = "diff --git a/torch/x.py b/torch/x.py\n"


def colored(text: str) -> str:
    return "\n".join(f"\x1b[1m\x1b[36m{line}\x1b[m" for line in text.split("\n"))


class TestParse(unittest.TestCase):
    """Without it, a misread diff would look like a change of other code, or of no code."""

    def test_forms_of_one_change(self):
        for form, text in {
            "plain": PLAIN,
            "git": f"{GIT}index 1..2 100644\n{PLAIN}",
            "with a mode": f"{GIT}old mode 100644\nnew mode 100755\nindex 1..2\n{PLAIN}",
            "with words around it": f"commit 1\n\n    words\n --- more\n\n{PLAIN}-- \n2.40.1\n",
            "colored": colored(PLAIN),
            "of Windows": PLAIN.replace("\n", "\r\n"),
            "with backslashes": PLAIN.replace("/x.py", "\\x.py").replace("a/", "a\\").replace("b/", "b\\"),
            "without prefixes": PLAIN.replace("a/", "").replace("b/", ""),
            "with other prefixes": PLAIN.replace("a/", "i/").replace("b/", "w/"),
            "with dates": PLAIN.replace("x.py\n", "x.py\t2026-01-01 00:00:00\n"),
            "quoted": PLAIN.replace("a/torch/x.py", '"a/torch/\\170.py"').replace("b/torch/x.py", '"b/torch/x.py"'),
            "without spaces in empty lines": PLAIN.replace("\n \n", "\n\n"),
        }.items():
            with self.subTest(form=form):
                self.assertEqual(parse(text), [READ])
        without_its_end = Edited(READ.paths, (Hunk(3, ("a", "b"), ("a", "c"), "def f(x):"),))
        self.assertEqual(parse(PLAIN.replace("\n \n", "")), [without_its_end])

    def test_files_without_lines(self):
        for text, file in {
            f"{GIT}old mode 100644\nnew mode 100755\n": ModeOnly("torch/x.py"),
            f"{GIT}new file mode 100644\nindex 0000000..e69de29\n": Opaque("torch/x.py"),
            f"{GIT}index 1..2 100644\nBinary files a/torch/x.py and b/torch/x.py differ\n": Opaque("torch/x.py"),
            "diff --git a/y b/z\nsimilarity index 100%\nrename from y\nrename to z\n": Moved("y", "z"),
            f"diff --git a/y b/z\nrename from y\nrename to z\n--- a/y\n+++ b/z\n{HUNK}": Moved("y", "z"),
            f"diff --git a/y b/z\ncopy from y\ncopy to z\n--- a/y\n+++ b/z\n{HUNK}": Opaque("z"),
            "Only in new/torch: y.py\n": Opaque("new/torch/y.py"),
            "Only in \udcff: y.py\n": Opaque("\ufffd/y.py"),
        }.items():
            with self.subTest(text=text):
                self.assertEqual(parse(text), [file])

    def test_several_files(self):
        text = f"{GIT}old mode 1\nnew mode 2\ndiff --git a/y b/z\nrename from y\nrename to z\n{PLAIN}{PLAIN}"
        text += "--- /dev/null\n+++ b/n.py\n@@ -0,0 +1 @@\n+x\n"
        text += "--- a/o.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n\\ No newline at end of file\n--- p.orig\n+++ p\n" + HUNK
        mode, moved, new = ModeOnly("torch/x.py"), Moved("y", "z"), Edited(("n.py",), (Hunk(1, (), ("x",)),))
        gone, other = Edited(("o.py",), (Hunk(1, ("x",), ()),)), Edited(("p.orig", "p"), READ.hunks)
        self.assertEqual(parse(text), [mode, moved, READ, READ, new, gone, other])

    def test_what_is_refused(self):
        words = "--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n [-b-]{+c+}\n"
        context = "*** a/x\n--- b/x\n***************\n*** 1,2 ****\n  a\n! b\n--- 1,2 ----\n  a\n! c\n"
        for text, why in {
            "words": "not a unified diff: make one with git diff",
            f"{words}": "a diff of words: leave out --word-diff",
            colored(words.replace("[-b-]{+c+}", "bc")): "a diff of words",
            words.replace(" [-b-]{+c+}", "~\n-b\n+c"): "a diff of words",
            f"{GIT}{words.replace(' [', '[')}": "a diff of words",
            words.replace("[-b-]{+c+}", "b"): "no complete unified diff: its hunk before line 6",
            context: "a context diff: make one with",
            "1,2c1,2\n< a\n---\n> b\n": "a diff without names of files",
            "diff --cc x\n--- a/x\n+++ b/x\n@@@ -1,2 -1,2 +1,2 @@@\n  a\n++b\n": "a combined diff of a merge",
            PLAIN.partition("+c")[0]: "no complete unified diff: its hunk before line 6",
            PLAIN.replace("+c\n", "c\n"): "no complete unified diff",
            PLAIN.replace(" \n", "+d\n"): "no complete unified diff",
            f"{PLAIN}+d\n": "no complete unified diff: its hunk before line 8",
            f"{PLAIN}@@ -8 @@\n": "no complete unified diff: its hunk before line 8",
            "--- a/x\n+++ b/x\n": "no complete unified diff: it has no lines of",
        }.items():
            with self.subTest(text=text), self.assertRaisesRegex(NotADiff, f"^{why}"):
                parse(text)


class TestPatched(unittest.TestCase):
    """Without it, a change could count for a function that looks like the changed one."""

    LINES = ["def f():", "  a", "  b", "def g():", "  a", "  b"]

    def test_the_nearest_place(self):
        for start, place in ((1, 1), (2, 1), (5, 4), (90, 4)):
            made = patched(self.LINES, [Hunk(start, ("  a", "  b"), ("  c", "  b"))])
            self.assertEqual((made.lines.index("  c"), made.misfits), (place, []))
            self.assertEqual(made.distance, abs(start - 1 - place))

    def test_what_moved_one_hunk_moved_the_next(self):
        """Of several places that fit, a hunk gets the one that is as far off as that of the hunk before it."""
        lines = ["first", *["same"] * 8]
        for longer in (0, 3):
            made = patched(["#"] * longer + lines, [Hunk(1, ("first",), ("a", "b")), Hunk(5, ("same",), ("new",))])
            self.assertEqual((made.lines.index("new"), made.distance), (5 + longer, longer))

    def test_what_fits_nowhere_is_left(self):
        misfit, fitting = Hunk(1, ("no",), ("yes",)), Hunk(5, ("  a", "  b"), ("  b",))
        made = patched(self.LINES, [misfit, fitting])
        self.assertEqual((made.lines, made.misfits), ([*self.LINES[:4], "  b"], [misfit]))

    def test_what_a_hunk_names(self):
        hunk = Hunk(1, ("    async def g(self):", "  x"), ("class C(B):",), "def f(x):")
        self.assertEqual(hunk.defined(), {"f", "g", "C"})


if __name__ == "__main__":
    unittest.main()
