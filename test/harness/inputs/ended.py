"""A test file for test_leaks.py, whose process gets SIGTERM while it makes or removes files or processes of ranks.

Discovery does not find this file.
"""

import os
import shutil
import signal
import socket

from torch_fsdp_tests.common_distributed import MultiProcessTestCase
from torch_fsdp_tests.common_utils import run_tests


class Terminated(MultiProcessTestCase):
    """Sends SIGTERM just before the test process calls ``place`` of ``module``."""

    world_size = 2

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        call = getattr(cls.module, cls.place)

        def terminated(*arguments, **options):
            os.kill(os.getpid(), signal.SIGTERM)
            return call(*arguments, **options)

        setattr(cls.module, cls.place, terminated)

    def setUp(self):
        super().setUp()
        self._spawn_processes()

    def test_passes(self):
        pass


class Making(Terminated):
    module, place = socket, "socketpair"


class Removing(Terminated):
    module, place = shutil, "rmtree"


del Terminated

if __name__ == "__main__":
    run_tests()
