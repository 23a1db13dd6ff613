"""Errors whose message is one sentence."""

from __future__ import annotations

from pathlib import Path


class Refusal(Exception):
    """The arguments are wrong, or name something that does not exist."""


class CannotBeMade(Exception):
    """An environment could not be made because of the network, the disk or a wheel."""

    def __init__(self, words: str, log: Path) -> None:
        super().__init__(words)
        self.log = log

    def at_length(self) -> str:
        return f"{self} (full output: {self.log})"
