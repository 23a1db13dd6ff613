"""Why something cannot be done, in a sentence."""

from __future__ import annotations

from pathlib import Path


class Refusal(Exception):
    """What was asked for makes no sense, or does not exist; the message says so in a sentence."""


class CannotBeMade(Exception):
    """An environment could not be made although what was asked for makes sense: the network, the disk, a wheel."""

    def __init__(self, words: str, log: Path) -> None:
        super().__init__(words)
        self.log = log

    def at_length(self) -> str:
        return f"{self} (all of it: {self.log})"
