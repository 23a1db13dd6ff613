"""The exit statuses of the dispatcher. Scripts depend on these numbers, so they do not change."""

from __future__ import annotations

import enum


class ExitStatus(enum.IntEnum):
    """A number for the shell, with the sentence that ``--help`` shows."""

    sentence: str

    def __new__(cls, number: int, sentence: str = "") -> ExitStatus:
        status = int.__new__(cls, number)
        status._value_ = number
        status.sentence = sentence
        return status

    OK = (
        0,
        "every test that ran had the expected outcome, or there was nothing to run: in this shard, in a module without "
        "tests, or for an option that selects other parts of PyTorch",
    )
    FAILED = (
        1,
        "a test or a file failed (with --fail-on-flaky also: passed only when it was repeated), or what else an option "
        "makes a failure",
    )
    USAGE_ERROR = 2, "bad arguments, an unknown test, malformed input, or a path that cannot be written to"
    BROKEN = (
        3,
        "the dispatcher itself could not continue: a report could not be written, or a process of the launch was lost",
    )
    HOST = 4, "tests failed, and some of the failures began on one host of the launch and none on the others"
    NOTHING_RAN = (
        5,
        "nothing ran: the selection is empty (also by -k, where PyTorch's own run_test.py exits with 0), none of its "
        "tests was executed or compared, or none is known to enter what changed",
    )
    HUNG_UP = 129, "the terminal was closed, or the connection was lost (SIGHUP)"
    INTERRUPTED = 130, "interrupted (SIGINT)"
    NOT_READ = 141, "the program that read the output ended (SIGPIPE)"
    TERMINATED = 143, "terminated (SIGTERM)"

    @property
    def is_from_signal(self) -> bool:
        """Whether a signal asked the run to end."""
        return self in (ExitStatus.HUNG_UP, ExitStatus.INTERRUPTED, ExitStatus.TERMINATED)
