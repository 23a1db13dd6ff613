"""TCP ports of this machine, for tests whose ranks meet over TCP."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Sequence
from typing import Any

from torch_fsdp_tests.processes import system


def find_free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    Another process may take it before the caller does: retry, let a store choose with port 0, or use a file.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((system.LOOPBACK, 0))
        return listener.getsockname()[1]


CONNECT_ATTEMPTS = 10


def retry_on_connect_failures(
    func: Callable[..., Any] | None = None, connect_errors: str | Sequence[str] = ("Address already in use",)
) -> Any:
    """Call a test again, at most ten times, if it raises a ``RuntimeError`` whose text has one of ``connect_errors``.

    It works with and without parentheses. Differs from upstream's: without ``connect_errors`` only an address in use
    counts, where upstream repeats after any ``RuntimeError``, and there is no pause before the next attempt. So the
    test should choose a new port in each attempt.
    """
    if func is None:
        return functools.partial(retry_on_connect_failures, connect_errors=connect_errors)
    texts = (connect_errors,) if isinstance(connect_errors, str) else tuple(connect_errors)

    @functools.wraps(func)
    def retried(*args: Any, **kwargs: Any) -> Any:
        for left in reversed(range(CONNECT_ATTEMPTS)):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not left or not any(text in str(error) for text in texts):
                    raise

    return retried
