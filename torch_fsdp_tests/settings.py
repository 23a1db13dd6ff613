"""How long the ranks of a test may take, how they start and how many there are, by the environment; without torch.

The dispatcher and ``run_tests()`` check the variables before any test, and the harness does when it reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_fsdp_tests.vendors import RANKS_VARIABLE, ConfigurationError

TIMEOUT_VARIABLE = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
DEFAULT_TIMEOUT = 120  # seconds
LONGEST_TIMEOUT = 7 * 86400  # seconds
START_VARIABLE = "TORCH_FSDP_TESTS_START"
STARTS = ("fork", "spawn")
MOST_RANKS = 65536  # of one test; more than any launcher makes


def timeout(environment: Mapping[str, str]) -> int:
    """Seconds that the ranks of a test may take. Raises :class:`ConfigurationError` for what is no such number."""
    text = environment.get(TIMEOUT_VARIABLE)
    return whole(TIMEOUT_VARIABLE, text, LONGEST_TIMEOUT) if text else DEFAULT_TIMEOUT


def start(environment: Mapping[str, str]) -> str | None:
    """How ranks are to start, None where nothing is said. Raises :class:`ConfigurationError` for anything else."""
    asked = environment.get(START_VARIABLE) or None
    if asked not in (None, *STARTS):
        raise ConfigurationError(f"{START_VARIABLE} is {asked!r}: it can be fork or spawn")
    return asked


def ranks(environment: Mapping[str, str]) -> int | None:
    """Ranks of a test that states no number, None where nothing is said. Raises :class:`ConfigurationError`."""
    text = environment.get(RANKS_VARIABLE)
    return whole(RANKS_VARIABLE, text, MOST_RANKS) if text else None


def whole(variable: str, text: str, most: int) -> int:
    """The whole number from 1 to ``most`` in a variable. Raises :class:`ConfigurationError` for anything else."""
    if not (text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise ConfigurationError(f"{variable} is {text[:40]!r}: give a whole number from 1 to {most}")
    return int(text)


def check(environment: Mapping[str, str]) -> None:
    """Raise :class:`ConfigurationError` for a variable that any test with ranks would refuse."""
    timeout(environment), start(environment), ranks(environment)
