"""What this machine is: CPU, instruction sets, BLAS, threads and memory, and the accelerator with driver and libraries.

Results depend on these facts, so every report has them. ``python -m torch_fsdp_tests.device.machine [DEVICE]`` prints
them. torch is imported late, because the dispatcher only shows facts that other processes have collected.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch_fsdp_tests.device import vendors
from torch_fsdp_tests.processes import system

Facts = Mapping[str, Any]

HOST = "cpu"
LIMIT = 50  # seconds; the first start of a device runtime on a large machine can take half a minute
GIB = 1 << 30

# What each fact is called. ``memory`` and ``device_memory`` are what is free, in GiB.
TITLES = {
    "cpu": "CPU",
    "instruction_sets": "instruction sets",
    "blas": "BLAS",
    "threads": "threads",
    "memory": "free memory",
    "accelerator": "accelerator",
    "driver": "driver",
    "libraries": "libraries",
    "device_memory": "free device memory",
}
_CHANGING = ("memory", "device_memory")  # these differ from minute to minute
# Extensions with which libraries compute products in another way. torch's own name of the instruction set lacks them.
_EXTENSIONS = ("avx512_bf16", "avx512_fp16", "amx_bf16", "amx_fp16", "sve", "sve2", "bf16", "i8mm")


def of_host() -> dict[str, Any]:
    """The facts about the CPU and its libraries. This starts no device runtime."""
    import torch

    info = _read("/proc/cpuinfo")
    blas = re.search(r"\bBLAS_INFO=(\w+)", torch.__config__.show())
    free = re.search(r"^MemAvailable:\s*(\d+) kB", _read("/proc/meminfo"), re.MULTILINE)
    return {
        "cpu": cpu_model(info),
        "instruction_sets": ", ".join([torch.backends.cpu.get_cpu_capability(), *_extensions(info)]),
        "blas": blas[1] if blas else "unknown",
        "threads": torch.get_num_threads(),
        "memory": round(int(free[1]) * 1024 / GIB, 1) if free else None,
    }


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def cpu_model(info: str) -> str:
    """The model of the CPU, from the text of ``/proc/cpuinfo``, with its numbers: virtual machines hide the name."""
    values = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in info.splitlines())}
    name = values.get("model name") or platform.processor() or platform.machine()
    numbers = ("cpu family", "model", "CPU implementer", "CPU part")
    known = [f"{number.split()[-1]} {values[number]}" for number in numbers if number in values]
    return f"{name} ({', '.join(known)})" if known else name


def _extensions(info: str) -> list[str]:
    flags = re.search(r"^(?:flags|Features)\s*:(.*)$", info, re.MULTILINE)
    names = set(flags[1].split()) if flags else set()
    return [name for name in _EXTENSIONS if name in names]


def of_device(device_type: str, backend: str | None = None) -> dict[str, Any]:
    """The facts about all visible devices of a type. This starts their runtime, so no process that forks may call it.

    What torch or the vendor does not report is left out.
    """
    import torch

    module: Any = torch.get_device_module(device_type)
    devices = range(module.device_count())
    names = _answer(lambda: collections.Counter(module.get_device_name(index) for index in devices)) or {}
    facts = {
        "accelerator": ", ".join(f"{count} x {name}" for name, count in names.items()),
        "driver": _driver(device_type, module),
        "libraries": dict(_libraries(module, backend)),
        "device_memory": _answer(lambda: round(min(module.mem_get_info(index)[0] for index in devices) / GIB, 1)),
    }
    return {name: value for name, value in facts.items() if value}


def _answer(ask: Callable[[], Any]) -> Any:
    """An answer, or None: modules of devices have different functions, and some raise."""
    with contextlib.suppress(Exception):
        return ask()
    return None


def _driver(device_type: str, module: Any) -> str | None:
    version = _answer(lambda: str(module.get_device_properties(0).driver_version))
    places = [vendor.driver for vendor in vendors.of_type(device_type) if vendor.driver]
    return version or next(filter(None, (_read(place).strip() for place in places)), None)


def _libraries(module: Any, backend: str | None) -> Iterator[tuple[str, str]]:
    import importlib.metadata

    import torch

    for name in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, name, None):
            yield name, str(version)
    if version := _answer(lambda: getattr(module, backend or "").version()):
        yield str(backend), ".".join(map(str, version)) if isinstance(version, tuple) else str(version)
    if version := _answer(torch.backends.cudnn.version):
        yield "cudnn", str(version)
    for entry in importlib.metadata.entry_points(group="torch.backends"):
        if entry.dist is not None:
            yield entry.dist.name, entry.dist.version


def ask(device_type: str, backend: str | None = None) -> dict[str, Any]:
    """All facts about this machine, for a process that has imported torch and must not start a device's runtime."""
    if device_type == HOST:
        return of_host()
    command = [sys.executable, "-m", __name__, device_type, *filter(None, [backend])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError, IndexError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, env=environment, check=True)
        facts: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return facts
    return of_host()


def titled(facts: Facts) -> dict[str, str]:
    """The facts as texts, by their titles. Unknown ones are left out."""
    texts = {}
    for name, title in TITLES.items():
        if value := facts.get(name):
            parts = value.items() if isinstance(value, dict) else ()
            text = ", ".join(f"{part} {version}" for part, version in parts) or str(value)
            texts[title] = f"{text} GiB" if name in _CHANGING else text
    return texts


def in_one_line(facts: Facts) -> str:
    """The facts that do not change while tests run, such as ``AMD EPYC 7B13, AVX2, BLAS mkl, 4 threads``."""
    texts = titled({name: value for name, value in facts.items() if name not in _CHANGING})
    if threads := texts.pop("threads", ""):
        texts["BLAS"] = f"{texts.get('BLAS', 'unknown')}, {threads} thread{'' if threads == '1' else 's'}"
    return ", ".join(f"{title} {text}" if title in ("BLAS", "driver") else text for title, text in texts.items())


def differing(machines: Mapping[str, Facts]) -> dict[str, dict[str, str]]:
    """The facts in which machines differ, by title, with the text of each. Free memory must differ twofold."""
    rows = {}
    for name, title in TITLES.items():
        texts = {machine: titled(facts).get(title, "unknown") for machine, facts in machines.items()}
        amounts = [facts.get(name) or 0.0 for facts in machines.values()] if name in _CHANGING else []
        differs = 2 * min(amounts) < max(amounts) if amounts else len({*texts.values()}) > 1
        if differs:
            rows[title] = texts
    return rows


def main(arguments: Sequence[str]) -> int:
    facts = of_host()
    device_type = arguments[0] if arguments else HOST
    if device_type != HOST:
        facts |= of_device(*arguments[:2])
    print(json.dumps(facts), flush=True)
    return 0


if __name__ == "__main__":
    system.run_command("machine", main)
