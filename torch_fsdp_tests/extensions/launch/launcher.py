"""Finds out whether a launcher has made the ranks: torchrun, srun, or another one with torchrun's variables.

This module only has the rule. :mod:`.launched` has what such ranks do for one test file, and :mod:`.workers` what they
do for a run of many files. The process belongs to a launch

- if torchrun's own ``TORCHELASTIC_RUN_ID`` is set, and so are the five variables of every launcher
  (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), or
- if srun made a step of several tasks; srun's own variables then replace those of the five that are not set, or
- if ``TORCH_FSDP_TESTS_LAUNCHED=1`` is set, for launchers that set the five and nothing of torchrun's;
- and never with ``TORCH_FSDP_TESTS_LAUNCHED=0``.

Any other set of variables counts as left in the shell by an earlier program, and has no effect on tests.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping

from torch_fsdp_tests.extensions.launch import LAUNCHED_VARIABLE
from torch_fsdp_tests.settings import ConfigurationError

_RUN_ID = "TORCHELASTIC_RUN_ID"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_ATTEMPT = "TORCHELASTIC_RESTART_COUNT"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_NODELIST", "SLURM_JOB_ID")
_SLURM_PORTS = range(20000, 30000)  # below the ports that Linux assigns automatically
_OTHERS = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")


class LaunchError(ConfigurationError):
    """The launcher's variables make no sense. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process' place among the ``world_size`` ranks that a launcher made, and where its store is."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent_store: bool = False  # torchrun's agent serves the store; otherwise rank 0 must
    attempt: str = "0"  # torchrun may restart all ranks with the same store
    one_host: bool = False  # all ranks are known to be on one machine

    def variables(self, attempt: str) -> dict[str, str]:
        """Return the variables that describe this launch to a process, with its store served by another process."""
        return {
            LAUNCHED_VARIABLE: "1",
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(self.local_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            _AGENT_STORE: "True",
            _ATTEMPT: attempt,
            **({"LOCAL_WORLD_SIZE": str(self.world_size)} if self.one_host else {}),
        }


def from_environment(environment: Mapping[str, str]) -> Launch | None:
    """Return the launch that the variables describe, or None. Raises :class:`LaunchError`, which says what to do."""
    requested = environment.get(LAUNCHED_VARIABLE)
    if requested not in (None, "", "0", "1"):
        raise LaunchError(
            f"{LAUNCHED_VARIABLE} is {requested!r}: it must be 1 (a launcher made the ranks) or 0 (none did)"
        )
    step = {} if environment.get("RANK") else _from_slurm(environment, requested == "1")
    environment = {**environment, **step}
    missing = [name for name in _NEEDED if not environment.get(name)]
    if requested == "0" or (requested != "1" and not step and (missing or not environment.get(_RUN_ID))):
        return None
    if missing:
        raise LaunchError(
            f"{LAUNCHED_VARIABLE}=1 says that a launcher made the ranks, but these variables are not set: "
            f"{', '.join(missing)}; set them, or unset {LAUNCHED_VARIABLE}"
        )
    numbers = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    wrong = [f"{name}={text!r}" for name, text in numbers.items() if not text.isdecimal() or len(text) > 9]
    if not wrong and int(numbers["MASTER_PORT"]) not in range(1, 65536):
        wrong = [f"MASTER_PORT={numbers['MASTER_PORT']}"]
    if wrong or int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        described = ", ".join(wrong) or f"RANK={numbers['RANK']} of WORLD_SIZE={numbers['WORLD_SIZE']}"
        raise LaunchError(f"{described} cannot be right; if no launcher made this process, set {LAUNCHED_VARIABLE}=0")
    return Launch(
        rank=int(numbers["RANK"]),
        world_size=int(numbers["WORLD_SIZE"]),
        local_rank=int(numbers["LOCAL_RANK"]),
        address=environment["MASTER_ADDR"],
        port=int(numbers["MASTER_PORT"]),
        agent_store=environment.get(_AGENT_STORE) == "True",
        attempt=environment.get(_ATTEMPT, "0"),
        one_host=environment.get("LOCAL_WORLD_SIZE") == environment["WORLD_SIZE"],
    )


def _from_slurm(environment: Mapping[str, str], is_meant: bool) -> dict[str, str]:
    """Return what torchrun would have set in this srun task. Empty for a single task, unless a launch ``is_meant``."""
    rank, tasks, local_rank, nodes, job = (environment.get(name, "") for name in _SLURM)
    if not (rank and nodes and tasks.isdecimal() and (is_meant or int(tasks) > 1)):
        return {}
    step = "".join(filter(str.isdecimal, job + environment.get("SLURM_STEP_ID", "")))
    made = {
        "RANK": rank,
        "WORLD_SIZE": tasks,
        "LOCAL_RANK": local_rank,
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or str(_SLURM_PORTS[int(step or 0) % len(_SLURM_PORTS)]),
    }
    return made | ({"LOCAL_WORLD_SIZE": tasks} if environment.get("SLURM_STEP_NUM_NODES") == "1" else {})


def first_host(nodes: str) -> str:
    """Return the first name in a Slurm list, such as ``a1`` in ``a[1-3,5],b7``."""
    match = re.match(r"(?:[^,\[]|\[[^\]]*\])*", nodes)
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0] if match else "")


def forget_variables() -> None:
    """Remove the launcher's variables from the environment, after the launch is known.

    They describe this process, and not a rank of a test with fewer ranks, or a program that a test starts.
    """
    for name in (*_NEEDED, *_OTHERS, *_SLURM[:2], *(name for name in os.environ if name.startswith("TORCHELASTIC_"))):
        os.environ.pop(name, None)
