"""Which tests a change reaches: a map of tests and the functions of torch that they enter, and queries on it.

``run_test.py --save-map FILE`` records one. Nothing here imports torch.
"""

from torch_fsdp_tests.reach.functions import Function, module_name, owners
from torch_fsdp_tests.reach.reachmap import Executed, MalformedMap, Reached, ReachMap, build
