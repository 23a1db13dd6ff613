"""Environment variables for the time limit, the start method, the number of ranks, and what is expected of torch.

This module does not import torch. The dispatcher and ``run_tests()`` check the variables before any test. The harness
checks them when it reads them.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_fsdp_tests.vendors import RANKS_VARIABLE, ConfigurationError

TIMEOUT_VARIABLE = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
DEFAULT_TIMEOUT = 120  # seconds
LONGEST_TIMEOUT = 7 * 86400  # seconds
START_VARIABLE = "TORCH_FSDP_TESTS_START"
STARTS = ("fork", "spawn")
STRICT_DEFECTS_VARIABLE = "TORCH_FSDP_TESTS_STRICT_DEFECTS"  # if set, a torch better or worse than known is a failure
STRICT_NAMES_VARIABLE = "TORCH_FSDP_TESTS_STRICT_NAMES"  # if set, a test for whose names torch changed is an error
STRICT_LEAKS_VARIABLE = "TORCH_FSDP_TESTS_STRICT_LEAKS"  # if set, a test that leaves something behind fails
MOST_RANKS = 65536  # of one test; more than any launcher makes
# Of a test that does not set its own number, on the CPU. On other devices it is lent at most as many devices.
USUAL_RANKS = 4
FEW_RANKS = 2  # of a test for which a few are enough, on the CPU


def timeout(environment: Mapping[str, str]) -> int:
    """The time limit for the ranks of a test in seconds. Raises :class:`ConfigurationError` for an invalid value."""
    text = environment.get(TIMEOUT_VARIABLE)
    return whole(TIMEOUT_VARIABLE, text, LONGEST_TIMEOUT) if text else DEFAULT_TIMEOUT


def start(environment: Mapping[str, str]) -> str | None:
    """The start method for ranks, or None for the default. Raises :class:`ConfigurationError` for an invalid value."""
    asked = environment.get(START_VARIABLE) or None
    if asked not in (None, *STARTS):
        raise ConfigurationError(f"{START_VARIABLE} is {asked!r}: it must be fork or spawn")
    return asked


def ranks(environment: Mapping[str, str]) -> int | None:
    """The default number of ranks of a test, or None. Raises :class:`ConfigurationError` for an invalid value."""
    text = environment.get(RANKS_VARIABLE)
    return whole(RANKS_VARIABLE, text, MOST_RANKS) if text else None


def default_ranks(devices: int) -> int:
    """The number of ranks of a test that does not set its own, if the process sees this many devices (0: the CPU)."""
    return max(devices, 2) if devices else USUAL_RANKS


def strict_defects(environment: Mapping[str, str]) -> bool:
    """Whether a test fails if torch does not have a defect, or a repair, that its version should have."""
    return environment.get(STRICT_DEFECTS_VARIABLE) == "1"


def strict_names(environment: Mapping[str, str]) -> bool:
    """Whether a test is an error, and not skipped, if torch lacks a private name or cannot answer a question about it.

    Then a torch that renames half of FSDP cannot pass by skipping half of the tests.
    """
    return environment.get(STRICT_NAMES_VARIABLE) == "1"


def strict_leaks(environment: Mapping[str, str]) -> bool:
    """Whether a test fails if it leaves something behind."""
    return environment.get(STRICT_LEAKS_VARIABLE) == "1"


def whole(variable: str, text: str, most: int) -> int:
    """The whole number from 1 to ``most`` in a variable. Raises :class:`ConfigurationError` for an invalid value."""
    if not (text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise ConfigurationError(f"{variable} is {text[:40]!r}: give a whole number from 1 to {most}")
    return int(text)


def check(environment: Mapping[str, str]) -> None:
    """Raise :class:`ConfigurationError` if a variable has a value that tests with ranks would refuse."""
    timeout(environment), start(environment), ranks(environment)
