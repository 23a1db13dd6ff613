"""The outcome of each mutant, and the file that stores it: one line for each mutant, as soon as it has been tried."""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch_fsdp_tests.dispatch.atomic import set_aside, write_text
from torch_fsdp_tests.processes.messages import from_data


class MutantOutcome(str, enum.Enum):
    KILLED = "killed"
    SURVIVED = "survived"
    NOT_REACHED = "not reached"  # no test runs the changed statement
    EQUIVALENT = "equivalent"  # the list says that no test can kill it
    UNDECIDED = "undecided"  # the harness failed

    @property
    def counts(self) -> bool:
        """Whether it counts in the share of killed mutants."""
        return self in (MutantOutcome.KILLED, MutantOutcome.SURVIVED)


@dataclasses.dataclass(frozen=True)
class MutantResult:
    id: str
    module: str
    family: str
    operator: str
    outcome: MutantOutcome
    path: str = ""
    line: int = 0
    change: str = ""
    code: str = ""  # of the function; in the list of equivalent mutants it tells when an entry is out of date
    by: str = ""  # the test that killed it, as file::Class.test
    how: str = ""  # its state: failed, error, crashed, timed out
    why: str = ""  # one line: the test's message, the argument, or why it was not reached
    seconds: float = 0.0
    executed: int = 0  # tests
    tests: tuple[str, ...] = ()  # the tests that ran and did not kill it

    def as_json(self) -> dict[str, Any]:
        data = {**dataclasses.asdict(self), "outcome": self.outcome.value}
        return {key: value for key, value in data.items() if value not in ("", (), 0)}


class ResultFile:
    """The file of findings. Its first line describes the selection. An incomplete line at the end is ignored."""

    def __init__(self, path: Path, facts: Mapping[str, Any]) -> None:
        self._path, self.facts = path, dict(facts)

    def start(self) -> list[MutantResult]:
        """Start a new file, and rename an old one. Returns the findings so far: none. Raises ``OSError``."""
        set_aside(self._path, self._path.with_suffix(".before.jsonl").name)
        write_text(self._path, json.dumps(self.facts) + "\n")
        return []

    def resume(self) -> list[MutantResult]:
        """Return the findings so far. Raises ``ValueError`` if they belong to another selection."""
        if not self._path.exists():
            return self.start()
        lines = self._path.read_text(encoding="utf-8").splitlines(keepends=True)
        whole = [line for line in lines if line.endswith("\n")]
        facts = json.loads(whole[0]) if whole else {}
        for name, value in self.facts.items():
            if facts.get(name) != value:
                raise ValueError(
                    f"{self._path} is about {name} {facts.get(name)!r}, not {value!r}: leave out --resume to start anew"
                )
        write_text(self._path, "".join(whole))
        return [from_data(MutantResult, json.loads(line)) for line in whole[1:]]

    def add(self, finding: MutantResult) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(finding.as_json()) + "\n")
