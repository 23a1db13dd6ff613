"""Build the device ``abacus`` for the installed torch, and install it into a folder.

    python test/harness/inputs/abacus/build.py FOLDER
    PYTHONPATH=FOLDER python run_test.py -i distributed

Needs a compiler for C++20 (``c++``, or the one that ``CXX`` names) and about a minute.
"""

import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent


def build(folder: Path) -> None:
    """Compile the library beside a copy of the package. Raises ``CalledProcessError`` if the compiler fails."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # of an older build that may be on the path
    import torch
    from torch.utils import cpp_extension

    for part in ("abacus_torch", "abacus_torch-1.0.dist-info"):
        shutil.copytree(HERE / part, folder / part, dirs_exist_ok=True)
    headers = [*cpp_extension.include_paths(), sysconfig.get_path("include")]
    flags = "-std=c++20 -O1 -shared -fPIC -DTORCH_EXTENSION_NAME=_C"
    command = [*shlex.split(os.environ.get("CXX", "c++")), *flags.split()]
    command += [word for path in headers for word in ("-isystem", path)]
    command += [str(HERE / "device.cpp"), "-o", str(folder / "abacus_torch" / "_C.so")]
    command += [f"-L{Path(torch.__file__).parent / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    try:
        build(Path(sys.argv[1]))
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the device was not built: {error}; CXX names another C++ compiler than c++")
