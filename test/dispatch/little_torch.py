"""The source of a fake torch with a few small modules, which replaces the installed one."""

import textwrap
from pathlib import Path

from torch_fsdp_tests.extensions.reach.reach_map import Module

CORE = "torch.distributed.fsdp._core"
API = "torch.distributed.fsdp.api"

SOURCES = {
    "torch/__init__.py": "",
    "torch/version.py": "__version__ = '9.8.7+x'\n",
    "torch/distributed/__init__.py": "",
    "torch/distributed/fsdp/__init__.py": "from torch.distributed.fsdp._core import Unit, shard\n",
    "torch/distributed/fsdp/_core.py": """\
        import threading

        LIMIT = 1


        def shard(x):
            x += LIMIT
            return x


        def gather(x):
            return x


        class Unit:
            size = 1

            def step(self):
                return shard(self.size)

            def back(self):
                return 2


        gather(0)
        """,
    "torch/distributed/fsdp/api.py": "class Policy:\n    keep = False\n",
    "torch/distributed/tensor/__init__.py": "",
    "torch/distributed/tensor/used.py": "def place():\n    return 1\n",
    "torch/distributed/tensor/unused.py": "def other():\n    return 1\n",
}


def write_sources(folder: Path, **changed: tuple[str, str]) -> None:
    """Write a fake torch of small modules. With ``_core=(old, new)`` one text in that module is replaced."""
    for name, text in SOURCES.items():
        text = textwrap.dedent(text)
        old, new = changed.get(Path(name).stem, ("", ""))
        assert old in text
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace(old, new, 1) if old else text)


def modules_of(root: Path) -> dict[str, Module]:
    """The modules of the fake torch that a map of it has: all except ``tensor.unused``, which no test enters."""
    found = {}
    for name in ("fsdp", "fsdp._core", "fsdp.api", "tensor", "tensor.used"):
        path = root / "distributed" / name.replace(".", "/")
        content = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_bytes()
        found[f"torch.distributed.{name}"] = Module.of(content, f"torch.distributed.{name}")
    return found
