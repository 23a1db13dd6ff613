"""The parts of the build that pyproject.toml cannot describe."""

import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from torch_fsdp_tests import installation  # noqa: E402

# The tests of the suite itself stay in the checkout.
TRAVELLING = ("test/*.*", "test/distributed/**/*.*", "*.md", "docs/*.md")


def _write_commit(root: Path) -> None:
    path = root / installation.PACKAGE.name / installation.COMMIT
    path.write_text(f"{installation.commit() or ''}\n", encoding="utf-8")


class BuildWithTests(build_py):
    """Puts the tests and the documents into the package, and the commit beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout is what is installed
            return
        package = Path(self.build_lib, installation.PACKAGE.name)
        for folder in ("test", "docs"):
            shutil.rmtree(package / folder, ignore_errors=True)  # of an earlier build
        for path in (path for pattern in TRAVELLING for path in sorted(HERE.glob(pattern))):
            is_left = path.suffix == ".pyc" or any(part.startswith(".") for part in path.relative_to(HERE).parts)
            if path.is_file() and not is_left:
                target = package / path.relative_to(HERE)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))
        _write_commit(Path(self.build_lib))


class SourcesWithCommit(sdist):
    """Writes the commit into the source distribution, which has no repository."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        super().make_release_tree(base_dir, list(files))
        _write_commit(Path(base_dir))


setup(cmdclass={"build_py": BuildWithTests, "sdist": SourcesWithCommit})
