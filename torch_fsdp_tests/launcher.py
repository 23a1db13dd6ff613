"""Whether somebody else has made the ranks already: torchrun, or another launcher that sets the same variables.

Only the rule is here; what such ranks then do is in :mod:`torch_fsdp_tests.ranks.launched`. A launch is meant

- when torchrun's own ``TORCHELASTIC_RUN_ID`` stands in the environment beside the five variables of every launcher
  (``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR``, ``MASTER_PORT``), or
- when ``TORCH_FSDP_TESTS_LAUNCHED=1`` says so, for launchers that set the five and nothing of torchrun's;
- and never with ``TORCH_FSDP_TESTS_LAUNCHED=0``.

Anything less is taken for what some earlier program left in the shell, and has no effect on tests.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Mapping

LAUNCHED_VARIABLE = "TORCH_FSDP_TESTS_LAUNCHED"
_RUN_ID = "TORCHELASTIC_RUN_ID"
_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
_NEEDED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_OTHERS = ("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME")


class LaunchError(ValueError):
    """The launcher's variables make no sense. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Launch:
    """This process' place among the ``world_size`` ranks that a launcher made, and where its store is."""

    rank: int
    world_size: int
    local_rank: int
    address: str
    port: int
    agent_store: bool = False  # torchrun's agent serves the store; otherwise rank 0 has to
    attempt: str = "0"  # torchrun may start all ranks anew over the same store


def from_environment(environment: Mapping[str, str]) -> Launch | None:
    """The launch that the variables describe, None where none is meant. Raises :class:`LaunchError` with the remedy."""
    wish = environment.get(LAUNCHED_VARIABLE)
    if wish not in (None, "", "0", "1"):
        raise LaunchError(f"{LAUNCHED_VARIABLE} is {wish!r}: it can be 1 (a launcher made the ranks) or 0 (none did)")
    missing = [name for name in _NEEDED if not environment.get(name)]
    if wish == "0" or (wish != "1" and (missing or not environment.get(_RUN_ID))):
        return None
    if missing:
        raise LaunchError(
            f"{LAUNCHED_VARIABLE}=1 says that a launcher made the ranks, and {', '.join(missing)} is not set"
        )
    numbers = {name: environment[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    wrong = [f"{name}={text!r}" for name, text in numbers.items() if not text.isdecimal()]
    if wrong or int(numbers["RANK"]) >= int(numbers["WORLD_SIZE"]):
        described = ", ".join(wrong) or f"RANK={numbers['RANK']} of WORLD_SIZE={numbers['WORLD_SIZE']}"
        raise LaunchError(f"a launcher cannot have meant {described}; {LAUNCHED_VARIABLE}=0 ignores its variables")
    return Launch(
        rank=int(numbers["RANK"]),
        world_size=int(numbers["WORLD_SIZE"]),
        local_rank=int(numbers["LOCAL_RANK"]),
        address=environment["MASTER_ADDR"],
        port=int(numbers["MASTER_PORT"]),
        agent_store=environment.get(_AGENT_STORE) == "True",
        attempt=environment.get("TORCHELASTIC_RESTART_COUNT", "0"),
    )


@functools.cache
def found() -> Launch | None:
    """The launch that this process is part of, by its environment when this was first asked."""
    return from_environment(os.environ)


def forget_variables() -> None:
    """Take the launcher's variables out of the environment, once the launch is known.

    They describe this process for its whole life; a rank of a test that wants fewer, and a program that a test starts,
    would read them as their own.
    """
    for name in (*_NEEDED, *_OTHERS, *(name for name in os.environ if name.startswith("TORCHELASTIC_"))):
        os.environ.pop(name, None)
