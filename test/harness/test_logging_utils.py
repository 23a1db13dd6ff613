"""``logging_utils`` and ``inductor_utils``: settings end with their block, and a missing compiler is detected."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import unittest.mock

import torch

from torch_fsdp_tests import inductor_utils
from torch_fsdp_tests.common_utils import TestCase, run_tests
from torch_fsdp_tests.logging_utils import LoggingTestCase, log_settings, logs_to_string

FSDP = logging.getLogger("torch.distributed.fsdp.fully_shard")


class SettingsTest(LoggingTestCase):
    """Without it, a log setting could outlive its test, or a test could look for log lines that are never written."""

    def test_settings_end_with_their_block(self):
        with log_settings("+fsdp"):
            self.assertTrue(FSDP.isEnabledFor(logging.DEBUG))
            self.assertEqual(os.environ["TORCH_LOGS"], "+fsdp")
        self.assertFalse(FSDP.isEnabledFor(logging.DEBUG))

    def test_artifacts_as_text(self):
        stream, context = logs_to_string("torch._dynamo.output_graph", "graph_code")
        logger = torch._logging.getArtifactLogger("torch._dynamo.output_graph", "graph_code")
        with contextlib.redirect_stderr(io.StringIO()), context():
            logger.debug("inside")
        self.assertEqual(stream.getvalue(), "inside\n")
        self.assertEqual([each for each in logger.handlers if getattr(each, "stream", None) is stream], [])

    def test_a_whole_process(self):
        code = "import logging, torch; logging.getLogger('torch.distributed.fsdp.fully_shard').debug('FSDP::line')"
        _, stderr = self.run_process_no_exception(code, env=os.environ | {"TORCH_LOGS": "+fsdp"})
        self.assertIn("FSDP::line", stderr.decode())


class InductorTest(TestCase):
    """Without it, tests that compile could run on a machine without a compiler, and fail instead of being skipped."""

    def setUp(self):
        super().setUp()
        for probe in (inductor_utils.why_no_host_compiler, inductor_utils.why_no_device_compiler):
            probe.cache_clear()
            self.addCleanup(probe.cache_clear)

    def test_a_compiler_is_asked_to_compile(self):
        for compiler, reason in (("no-such-compiler", "does not run"), ("false", "cannot build an extension")):
            inductor_utils.why_no_host_compiler.cache_clear()
            with self.subTest(compiler=compiler), unittest.mock.patch.dict(os.environ, {"CXX": compiler}):
                self.assertRegex(inductor_utils.why_no_host_compiler(), reason)

    def test_the_probe_runs_once(self):
        with unittest.mock.patch("subprocess.run", wraps=__import__("subprocess").run) as started:
            answers = {inductor_utils.why_no_host_compiler() for _ in range(3)}
        self.assertEqual((len(answers), started.call_count), (1, 1))

    def test_names_agree(self):
        self.assertEqual(inductor_utils.HAS_GPU, inductor_utils.why_no_device_compiler() is None)
        if not inductor_utils.HAS_GPU:
            self.assertFalse(inductor_utils.HAS_CUDA)


if __name__ == "__main__":
    run_tests()
