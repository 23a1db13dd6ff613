"""Helpers for tests of torch's logs, with settings as in ``TORCH_LOGS``.

torch keeps its log settings in ``torch._logging._internal``, which has no public way to save and restore
them; everything here goes through its functions ``_get_log_state``, ``_set_log_state`` and ``_init_logs``.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._logging import _internal as torch_logs

from torch_fsdp_tests import events
from torch_fsdp_tests.common_utils import TestCase

Records = list[logging.LogRecord]

_PREFIXES = {logging.DEBUG: "+", logging.INFO: "", logging.ERROR: "-"}


@contextlib.contextmanager
def preserve_log_state() -> Iterator[None]:
    """Start with torch's default log settings, and restore the previous ones afterwards."""
    before = torch_logs._get_log_state()
    torch_logs._set_log_state(torch_logs.LogState())
    try:
        yield
    finally:
        torch_logs._set_log_state(before)
        torch_logs._init_logs()


@contextlib.contextmanager
def log_settings(settings: str) -> Iterator[None]:
    """Log as with ``TORCH_LOGS=<settings>``, in this process and in those that the block starts."""
    with preserve_log_state(), unittest.mock.patch.dict(os.environ, {"TORCH_LOGS": settings}):
        torch_logs._init_logs()
        yield


@contextlib.contextmanager
def log_api(**settings: Any) -> Iterator[None]:
    """Log as after ``torch._logging.set_logs(**settings)``."""
    with preserve_log_state():
        torch._logging.set_logs(**settings)
        yield


def kwargs_to_settings(**kwargs: Any) -> str:
    """The ``TORCH_LOGS`` text that means the same as these arguments of ``torch._logging.set_logs``.

    Raises ``ValueError`` for a level other than DEBUG, INFO and ERROR, which the text cannot express.
    """
    modules = kwargs.pop("modules", {})
    words = []
    for name, value in (kwargs | modules).items():
        if isinstance(value, bool):
            words.append(name)
        elif value in _PREFIXES:
            words.append(_PREFIXES[value] + name)
        else:
            raise ValueError(f"TORCH_LOGS cannot express {name}={value!r}: give True, DEBUG, INFO or ERROR")
    return ",".join(words)


def make_logging_test(**kwargs: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run ``test(self, records)`` twice, with the settings from the environment and from the API.

    ``records`` is the list of what was logged since the test began.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(fn)
        def test(self: LoggingTestCase) -> None:
            from_environment = log_settings(kwargs_to_settings(**kwargs)) if kwargs else contextlib.nullcontext()
            for setting in (from_environment, log_api(**kwargs)):
                _run(self, fn, setting)

        del test.__wrapped__  # pytest would take "records" for a fixture
        return test

    return decorate


def make_settings_test(settings: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run ``test(self, records)`` with ``TORCH_LOGS=<settings>``."""

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(fn)
        def test(self: LoggingTestCase) -> None:
            _run(self, fn, log_settings(settings))

        del test.__wrapped__
        return test

    return decorate


def _run(case: LoggingTestCase, fn: Callable[..., None], setting: contextlib.AbstractContextManager[None]) -> None:
    import torch._dynamo

    torch._dynamo.reset()
    records: Records = []
    with setting, case._handler_watcher(records):
        events.check_returned(fn(case, records))  # type: ignore[func-returns-value]


class LoggingTestCase(TestCase):
    """Tests that look at log records. Compiled code is discarded before and after each test. For the log of a whole
    process use :meth:`run_process_no_exception` with ``TORCH_LOGS`` in its environment.
    """

    _exit_stack: contextlib.ExitStack

    @classmethod
    def setUpClass(cls) -> None:
        import torch._dynamo

        super().setUpClass()
        cls._exit_stack = contextlib.ExitStack()
        # While this variable is set, torch's log lines have no times and process ids.
        cls._exit_stack.enter_context(unittest.mock.patch.dict(os.environ, {"___LOG_TESTING": ""}))
        # A test of an error's log needs the error logged, and not raised.
        cls._exit_stack.enter_context(torch._dynamo.config.patch(suppress_errors=True, verbose=False))

    @classmethod
    def tearDownClass(cls) -> None:
        cls._exit_stack.close()
        super().tearDownClass()

    def setUp(self) -> None:
        import torch._dynamo

        super().setUp()
        torch._dynamo.reset()
        self.addCleanup(torch._dynamo.reset)

    def hasRecord(self, records: Records, m: str) -> bool:
        """Whether a record's message contains this text."""
        return any(m in record.getMessage() for record in records)

    def getRecord(self, records: Records, m: str) -> logging.LogRecord:
        """The only record whose message contains this text. Fails if there is none or more than one."""
        found = [record for record in records if m in record.getMessage()]
        if len(found) != 1:
            messages = [record.getMessage() for record in (found or records)]
            self.fail(f"expected one record with {m!r}, but {len(found)} have it, among {messages}")
        return found[0]

    @contextlib.contextmanager
    def _handler_watcher(self, record_list: Records) -> Iterator[None]:
        """Collect what torch's handlers print inside the block.

        Differs from upstream's: it is not printed too, because it would appear between the test's name and its outcome.
        """
        # Only the loggers that torch has registered have handlers, and a handler's filter decides which artifacts pass.
        # So the handlers stay, and only their last step is replaced.
        with contextlib.ExitStack() as stack:
            for name in torch_logs.log_registry.get_log_qnames():
                for handler in logging.getLogger(name).handlers:
                    stack.enter_context(unittest.mock.patch.object(handler, "emit", record_list.append))
            yield


LogContext = Callable[[], contextlib.AbstractContextManager[None]]


def logs_to_string(module: str, log_option: str) -> tuple[io.StringIO, LogContext]:
    """Return a stream, and a function whose context enables the artifact and writes ``module``'s logs of it there."""
    (stream,), context = multiple_logs_to_string(module, log_option)
    return stream, context


def multiple_logs_to_string(module: str, *log_options: str) -> tuple[list[io.StringIO], LogContext]:
    """Like :func:`logs_to_string`, for several artifacts with a stream each."""
    streams = [io.StringIO() for _ in log_options]

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with log_settings(",".join(log_options)), contextlib.ExitStack() as stack:
            for stream, option in zip(streams, log_options, strict=True):
                logger = torch._logging.getArtifactLogger(module, option)
                handler = logging.StreamHandler(stream)
                logger.addHandler(handler)
                stack.callback(logger.removeHandler, handler)
            yield

    return streams, context
