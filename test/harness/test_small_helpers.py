"""Small helpers under upstream's names: ``TwoTensor``, settings of logs, and compilers that do not work."""

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
from torch_fsdp_tests.two_tensor import TwoTensor

FSDP = logging.getLogger("torch.distributed.fsdp.fully_shard")


class TwoTensorTest(TestCase):
    """Without it, a ``TwoTensor`` could have parts that differ, or lose its size when the compiler unflattens it."""

    def setUp(self):
        super().setUp()
        self.parts = torch.rand(4, 3), torch.rand(4, 3)

    def test_flatten_and_unflatten(self):
        two = TwoTensor(*self.parts)
        names, context = two.__tensor_flatten__()
        inner = {name: getattr(two, name) for name in names}
        again = TwoTensor.__tensor_unflatten__(inner, context, torch.Size([8, 3]), (3, 1))
        self.assertEqual((again.a, again.b, again.shape), (*self.parts, (8, 3)))

    def test_parts_must_be_alike(self):
        a, b = self.parts
        for other, what in [
            (b.double(), "dtype"),
            (b[:2], "shape"),
            (b.t().contiguous().t(), "stride"),
            (b.clone().requires_grad_(), "requires_grad"),
            (torch.rand(5, 3)[1:], "storage_offset"),
            (b.to("meta"), "device"),
        ]:
            with self.subTest(what=what), self.assertRaisesRegex(AssertionError, what):
                TwoTensor(a, other)


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


class InductorTest(TestCase):
    """Without it, tests that compile could run on a machine without a compiler, and fail instead of being skipped."""

    def test_a_compiler_is_asked_to_compile(self):
        for compiler, reason in (("no-such-compiler", "does not run"), ("false", "cannot build an extension")):
            inductor_utils.why_no_host_compiler.cache_clear()
            self.addCleanup(inductor_utils.why_no_host_compiler.cache_clear)
            with self.subTest(compiler=compiler), unittest.mock.patch.dict(os.environ, {"CXX": compiler}):
                self.assertRegex(inductor_utils.why_no_host_compiler(), reason)


if __name__ == "__main__":
    run_tests()
