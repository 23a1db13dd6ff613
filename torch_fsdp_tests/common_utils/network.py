"""TCP ports of this machine, for tests whose ranks meet over TCP."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable, Iterable
from typing import Any

from torch_fsdp_tests.processes import host

ADDRESS_IN_USE = "Address already in use"

_ATTEMPTS = 10


def find_free_port() -> int:
    """Return a TCP port of the loopback interface that is free now.

    Another process may take it before the caller does: retry (:func:`retry_on_connect_failures`), or let a store choose
    its own port with port 0, or rendezvous over a file.
    """
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host.LOOPBACK, 0))
        return listener.getsockname()[1]


def retry_on_connect_failures(
    func: Callable[..., Any] | None = None, connect_errors: str | Iterable[str] = (ADDRESS_IN_USE,)
) -> Any:
    """Call the function up to ten times, as long as it raises a ``RuntimeError`` that mentions one of
    ``connect_errors``.

    For functions that take a new port at each call. Differs from upstream's: there is no pause between attempts,
    because a new port does not need one. A single string is one error, and not a list of letters.
    """
    if func is None:
        return functools.partial(retry_on_connect_failures, connect_errors=connect_errors)
    errors = (connect_errors,) if isinstance(connect_errors, str) else tuple(connect_errors)

    @functools.wraps(func)
    def retried(*args: Any, **kwargs: Any) -> Any:
        for attempt in range(1, _ATTEMPTS + 1):
            try:
                return func(*args, **kwargs)
            except RuntimeError as error:
                if not any(text in str(error) for text in errors):
                    raise
                if attempt == _ATTEMPTS:
                    raise RuntimeError(f"still failing after {_ATTEMPTS} attempts: {error}") from error

    return retried
