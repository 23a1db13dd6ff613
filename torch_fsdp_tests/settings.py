"""All environment variables that a user may set, in one table, and the values of those that more than one part reads.

Does not import torch. The dispatcher and ``run_tests()`` check the variables at the start, the harness those it reads.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

DEVICE_VARIABLE = "TORCH_FSDP_TESTS_DEVICE"
BACKEND_VARIABLE = "TORCH_FSDP_TESTS_BACKEND"
RANKS_VARIABLE = "TORCH_FSDP_TESTS_RANKS"
TIMEOUT_VARIABLE = "DISTRIBUTED_TESTS_DEFAULT_TIMEOUT"
DEFAULT_TIMEOUT = 120  # seconds
LONGEST_TIMEOUT = 7 * 86400  # seconds; a longer limit counts as this one, because some waits cannot be longer
START_VARIABLE = "TORCH_FSDP_TESTS_START"
STARTS = ("fork", "spawn")
# A test fails if torch does not have a defect, or a fix, that its version should have.
STRICT_DEFECTS_VARIABLE = "TORCH_FSDP_TESTS_STRICT_DEFECTS"
# A test is an error, and not skipped, if torch lacks a private name or cannot answer a question about it. Otherwise a
# torch that renames half of FSDP could pass by skipping half of the tests.
STRICT_NAMES_VARIABLE = "TORCH_FSDP_TESTS_STRICT_NAMES"
# A test fails if it leaks.
STRICT_LEAKS_VARIABLE = "TORCH_FSDP_TESTS_STRICT_LEAKS"
# The names of extensions that work in the processes of test files, between commas.
EXTENSIONS_VARIABLE = "TORCH_FSDP_TESTS_EXTENSIONS"
SHOW_VARIABLE = "TORCH_FSDP_TESTS_SHOW_OUTPUT"
SEED_VARIABLE = "TORCH_FSDP_TESTS_SEED"
SLOW_VARIABLE = "PYTORCH_TEST_WITH_SLOW"
SHARD_VARIABLE, SHARDS_VARIABLE = "SHARD_NUMBER", "NUM_TEST_SHARDS"
MAX_SHARDS = 10_000
TESTS_VARIABLE = "TESTS_TO_INCLUDE"
MAX_RANKS = 65536  # of one test; more than any machine has


class ConfigurationError(ValueError):
    """The requested device, backend or number of ranks is not available. The message says what to do."""


@dataclasses.dataclass(frozen=True)
class Variable:
    """An environment variable that a user may set."""

    name: str
    says: str = ""  # what it does, if no option does the same
    option: str = ""  # the option of run_test.py that does the same
    default: str = ""
    is_upstreams: bool = False  # PyTorch's run_test.py or harness also has it
    is_repeated: bool = False  # whether it belongs in front of a command that repeats a test


def _upstreams(*names: str, says: str = "", option: str = "") -> list[Variable]:
    return [Variable(name, says, option, is_upstreams=True) for name in names]


VARIABLES = (
    *_upstreams("CI", says="means --pipe-logs, unless VERBOSE_TEST_LOGS is true"),
    *_upstreams("VERBOSE_TEST_LOGS", says="show the output of every file"),
    *_upstreams("CONTINUE_THROUGH_ERROR", option="--keep-going"),
    *_upstreams("NO_TEST_TIMEOUT", says="set the time limit of a file to a day"),
    *_upstreams("TEST_SHOWLOCALS", option="--showlocals"),
    *_upstreams("DISABLED_TESTS_FILE", option="--disabled-tests"),
    *_upstreams("SLOW_TESTS_FILE", option="--slow-tests"),
    Variable(SLOW_VARIABLE, "also run slow tests, and all combinations", is_upstreams=True, is_repeated=True),
    *_upstreams("PYTORCH_TEST_RERUN_DISABLED_TESTS", option="--rerun-disabled-tests"),
    *_upstreams("PYTORCH_TEST_SKIP_FAST", says="skip tests that are not slow"),
    *_upstreams("PYTORCH_TEST_RUN_EVERYTHING_IN_SERIAL", option="-j 1"),
    *_upstreams(TESTS_VARIABLE, says="of the selected files, run only these"),
    *_upstreams(SHARD_VARIABLE, SHARDS_VARIABLE, option="--shard"),
    *_upstreams("JOB_NAME", "BUILD_ENVIRONMENT", "TEST_CONFIG", says="select which recorded times are used"),
    Variable(
        TIMEOUT_VARIABLE,
        "time limit in seconds for the ranks of one test",
        default=str(DEFAULT_TIMEOUT),
        is_upstreams=True,
        is_repeated=True,
    ),
    Variable(DEVICE_VARIABLE, option="--device"),
    Variable(BACKEND_VARIABLE, option="--backend"),
    Variable(RANKS_VARIABLE, option="--ranks"),
    Variable(SEED_VARIABLE, "seed of a test file that is run alone", default="1234"),
    Variable(STRICT_DEFECTS_VARIABLE, option="--strict-defects"),
    Variable(STRICT_NAMES_VARIABLE, option="--strict-names"),
    Variable(STRICT_LEAKS_VARIABLE, option="--strict-leaks"),
    Variable(EXTENSIONS_VARIABLE, "extensions that work in the tests of a file that is run alone"),
    Variable(SHOW_VARIABLE, "1: show what ranks print, even if they pass"),
    Variable(START_VARIABLE, "spawn: start each rank as a fresh interpreter", default="fork", is_repeated=True),
)


# Variables of upstream's run_test.py and harness that have no effect here, with the value that has none there.
WITHOUT_EFFECT = {
    "NO_TD": "0",
    "PYTORCH_TEST_WITH_DYNAMO": "0",
    "PYTORCH_TEST_WITH_INDUCTOR": "0",
    "PYTORCH_TEST_WITH_CROSSREF": "0",
    "PYTORCH_TEST_CUDA_MEM_LEAK_CHECK": "0",
    "PYTORCH_PRINT_REPRO_ON_FAILURE": "1",
    "PYTORCH_MULTIGPU_SELECTION_COUNT_FILE": "",
    "NUM_PROCS": "",
}


def without_effect(environment: Mapping[str, str]) -> list[str]:
    """The variables of upstream that are set, and would change a run of upstream, but not one of this suite."""
    return [name for name, usual in WITHOUT_EFFECT.items() if environment.get(name, "") not in ("", usual)]


def tests_to_include(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The files that upstream's variable selects, between spaces or commas."""
    return tuple(environment.get(TESTS_VARIABLE, "").replace(",", " ").split())


def shard(environment: Mapping[str, str]) -> tuple[int, int]:
    """The number of the part to run and that of all parts, as ``--shard`` takes them; 1 of 1 if no variable is set.

    Raises :class:`ConfigurationError` for an invalid value, or if one of the two is missing.
    """
    texts = [environment.get(name) for name in (SHARD_VARIABLE, SHARDS_VARIABLE)]
    if not any(texts):
        return 1, 1
    if not all(texts):
        raise ConfigurationError(f"set both {SHARD_VARIABLE} and {SHARDS_VARIABLE}, or give --shard")
    shards = whole(SHARDS_VARIABLE, str(texts[1]), MAX_SHARDS)
    return whole(SHARD_VARIABLE, str(texts[0]), shards), shards


def table(variables: Iterable[Variable]) -> str:
    """The variables with what they do, as ``--help`` shows them."""
    heads = {
        True: "environment variables, as in PyTorch (options have priority):",
        False: "environment variables of the suite:",
    }
    rows: dict[bool, dict[str, str]] = {is_upstreams: {} for is_upstreams in heads}
    for each in variables:
        words = f"{each.says or f'as {each.option}'}{f' (default: {each.default})' if each.default else ''}"
        names = rows[each.is_upstreams].get(words)
        rows[each.is_upstreams][words] = f"{names}, {each.name}" if names else each.name
    width = max(len(names) for part in rows.values() for names in part.values())
    parts = []
    for is_upstreams, head in heads.items():
        parts += [head, *(f"  {names:{width}}  {words}" for words, names in rows[is_upstreams].items()), ""]
    return "\n".join(parts)


def timeout(environment: Mapping[str, str]) -> int:
    """The time limit for the ranks of a test in seconds. Raises :class:`ConfigurationError` for an invalid value."""
    text = environment.get(TIMEOUT_VARIABLE)
    return min(whole(TIMEOUT_VARIABLE, text, 10**9), LONGEST_TIMEOUT) if text else DEFAULT_TIMEOUT


def start(environment: Mapping[str, str]) -> str | None:
    """The start method for ranks, or None for the default. Raises :class:`ConfigurationError` for an invalid value."""
    method = environment.get(START_VARIABLE) or None
    if method not in (None, *STARTS):
        raise ConfigurationError(f"{START_VARIABLE} is {method!r}: it must be fork or spawn")
    return method


def ranks(environment: Mapping[str, str]) -> int | None:
    """The default number of ranks of a test, or None. Raises :class:`ConfigurationError` for an invalid value."""
    text = environment.get(RANKS_VARIABLE)
    return whole(RANKS_VARIABLE, text, MAX_RANKS) if text else None


def is_on(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether a switch is exactly ``1``. Upstream's ``PYTORCH_TEST_*`` are also read in this way."""
    return environment.get(variable) == "1"


def is_true(variable: str, environment: Mapping[str, str]) -> bool:
    """Whether a variable is set to a word for yes."""
    return environment.get(variable, "").lower() in ("1", "true", "yes", "on", "t", "y")


def whole(variable: str, text: str, most: int) -> int:
    """The whole number from 1 to ``most`` in a variable. Raises :class:`ConfigurationError` for an invalid value."""
    if not (text.isdecimal() and len(text) <= len(str(most)) and 1 <= int(text) <= most):
        raise ConfigurationError(f"{variable} is {text[:40]!r}: give a whole number from 1 to {most}")
    return int(text)


def check(environment: Mapping[str, str]) -> None:
    """Raise :class:`ConfigurationError` if a variable has a value that tests with ranks would reject."""
    timeout(environment), start(environment), ranks(environment)
