import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from torch_fsdp_tests import __version__, installation  # noqa: E402

LINTERS = (HERE / ".ci" / "lint.txt").read_text(encoding="utf-8").split()  # also installed alone, without torch
TESTS = (HERE / ".ci" / "test.txt").read_text(encoding="utf-8").splitlines()  # also installed beside any torch
COMPLETION = ["argcomplete"]
TRAVELLING = ("test/*.*", "test/distributed/**/*.*")  # the tests of the suite itself stay in the checkout


def _write_commit(root: Path) -> None:
    path = root / installation.PACKAGE.name / installation.COMMIT
    path.write_text(f"{installation.commit() or ''}\n", encoding="utf-8")


class BuildWithTests(build_py):
    """Puts the tests into the package, where the installed suite looks for them, and the commit beside them."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:  # the checkout is what is installed
            return
        package = Path(self.build_lib, installation.PACKAGE.name)
        shutil.rmtree(package / "test", ignore_errors=True)  # of an earlier build
        for path in (path for pattern in TRAVELLING for path in sorted(HERE.glob(pattern))):
            is_left = path.suffix == ".pyc" or any(part.startswith(".") for part in path.relative_to(HERE).parts)
            if path.is_file() and not is_left and not path.is_symlink():  # the links to the harness are for checkouts
                target = package / path.relative_to(HERE)
                self.mkpath(str(target.parent))
                self.copy_file(str(path), str(target))
        _write_commit(Path(self.build_lib))


class SourcesWithCommit(sdist):
    """Keeps links, which it would copy, and writes down the commit, since the repository stays behind."""

    def make_release_tree(self, base_dir: str, files: Sequence[str]) -> None:
        super().make_release_tree(base_dir, list(files))
        for file in filter(os.path.islink, files):
            Path(base_dir, file).unlink()
            Path(base_dir, file).symlink_to(os.readlink(file))
        _write_commit(Path(base_dir))


setup(
    name="torch_fsdp_tests",
    version=__version__,
    description="A standalone test suite for the FSDP inside the installed PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    packages=find_packages(include=["torch_fsdp_tests", "torch_fsdp_tests.*"]),
    package_data={
        "torch_fsdp_tests": [
            *("dispatch/data/*", "defects/data/*", "reach/data/*", "mutants/data/*", "mutants/site/*"),
            *("*.md", "*/*.md", "py.typed"),
        ]
    },
    cmdclass={"build_py": BuildWithTests, "sdist": SourcesWithCommit},
    entry_points={"console_scripts": [f"{installation.COMMAND} = torch_fsdp_tests.__main__:main"]},
    # Not torch: which one is tested is up to the user, and no installation of the suite may replace it.
    install_requires=["expecttest", "numpy"],
    extras_require={
        "dev": [*LINTERS, *TESTS, *COMPLETION],
        "ci": TESTS,
        "completion": COMPLETION,
        "spmd": ["spmd-types"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3",
        "Topic :: Software Development :: Testing",
    ],
)
