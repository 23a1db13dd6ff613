"""The kinds of events that ranks record with ``--record-behavior``, and that the dispatcher compares."""

from __future__ import annotations

import enum


class Kind(str, enum.Enum):
    """A kind of events, the most important first. Its value names several of them."""

    VALUES = "values"
    COLLECTIVES = "collectives"
    MEMORY = "measurements of memory"
    STATES = "entries of states"
    EXCEPTIONS = "exceptions and warnings"
    COPIES = "copies and casts"
    OPERATORS = "operators"
