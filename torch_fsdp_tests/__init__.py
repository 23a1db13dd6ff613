import os

__version__ = "0.1.0"

# The folders of tests hold links to this file, called torch_fsdp_tests.py, so that a test file which is run by its path
# finds the harness of its own checkout, without an installation. Read through such a link, this is the package too.
__path__ = [os.path.dirname(os.path.realpath(__file__))]
