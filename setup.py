from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).resolve().parent
LINTERS = (HERE / ".ci" / "lint.txt").read_text(encoding="utf-8").split()  # also installed alone, without torch
TESTS = (HERE / ".ci" / "test.txt").read_text(encoding="utf-8").splitlines()  # also installed beside any torch

setup(
    name="torch_fsdp_tests",
    version="0.1.0",
    description="A standalone test suite for the FSDP inside the installed PyTorch",
    long_description=(HERE / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="BSD-3-Clause",
    python_requires=">=3.10",
    # "test" stays out, since the standard library has a package of that name; the source distribution carries it.
    packages=find_packages(include=["torch_fsdp_tests", "torch_fsdp_tests.*"]),
    package_data={
        "torch_fsdp_tests": [
            *("dispatch/data/*", "defects/data/*", "defects/README.md", "reach/data/*"),
            *("mutants/data/*", "mutants/site/*", "mutants/README.md"),
            "py.typed",
        ]
    },
    install_requires=["torch>=2.9", "expecttest", "numpy"],
    extras_require={
        "dev": [*LINTERS, *TESTS],
        "ci": TESTS,
        "spmd": ["spmd-types"],
    },
    classifiers=[
        "Operating System :: POSIX :: Linux",
        "Operating System :: MacOS",
        "Programming Language :: Python :: 3",
        "Topic :: Software Development :: Testing",
    ],
)
