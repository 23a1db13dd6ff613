"""The outcome of a test and of each of its ranks, as plain values with their descriptions. Standard library only.

A verdict goes from the ranks to unittest as an attribute of an exception, then over the event stream to the dispatcher
and into every report. No step parses text to find out what happened.
"""

from torch_fsdp_tests.verdict.of_rank import DefectBlock, RankResult, Subtest, by_cause, describe, joined, rank_rows
from torch_fsdp_tests.verdict.of_test import FILE_ITSELF, TestResult, Verdict
from torch_fsdp_tests.verdict.states import (
    COUNTED,
    Phase,
    Reason,
    Scope,
    SkipKind,
    State,
    closing_line,
    kinds_of,
    skip_rows,
    tally,
)
from torch_fsdp_tests.verdict.words import (
    clean,
    columns,
    death,
    first_few,
    first_line,
    in_one_line,
    plural,
    ranks_in_words,
    seconds,
)

VERDICT = "verdict"  # the attribute with the verdict of an exception
