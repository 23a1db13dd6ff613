"""Helpers for tests of torch's logs, with settings as in ``TORCH_LOGS``.

torch has no public way to save and restore its log settings. This module uses the functions ``_get_log_state``,
``_set_log_state`` and ``_init_logs`` of ``torch._logging._internal``.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import unittest.mock
from collections.abc import Callable, Iterator

import torch
from torch._logging import _internal as torch_logs

from torch_fsdp_tests.common_utils import TestCase
from torch_fsdp_tests.installed_torch import upstream_names

__all__ = [
    "LoggingTestCase",
    "logs_to_string",
]

__getattr__ = upstream_names.complete(__name__)


@contextlib.contextmanager
def log_settings(settings: str) -> Iterator[None]:
    """Log as with ``TORCH_LOGS=<settings>``, in this process and in those that the block starts.

    The previous settings are restored afterwards.
    """
    before = torch_logs._get_log_state()
    torch_logs._set_log_state(torch_logs.LogState())
    try:
        with unittest.mock.patch.dict(os.environ, {"TORCH_LOGS": settings}):
            torch_logs._init_logs()
            yield
    finally:
        torch_logs._set_log_state(before)
        torch_logs._init_logs()


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


LogContext = Callable[[], contextlib.AbstractContextManager[None]]


def logs_to_string(module: str, log_option: str) -> tuple[io.StringIO, LogContext]:
    """Return a stream, and a function whose context enables the artifact and writes ``module``'s logs of it there."""
    stream = io.StringIO()

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with log_settings(log_option):
            logger = torch._logging.getArtifactLogger(module, log_option)
            handler = logging.StreamHandler(stream)
            logger.addHandler(handler)
            try:
                yield
            finally:
                logger.removeHandler(handler)

    return stream, context
