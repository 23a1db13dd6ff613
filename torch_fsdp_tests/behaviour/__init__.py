"""Records what a test does in a rank: values, collectives, memory, states, exceptions and warnings, copies.

``run_test.py --record-behaviour``, ``--against-behaviour`` and ``--compare-behaviour`` ask for it. Each rank of a test
appends a line of JSON to a file of its own; :mod:`torch_fsdp_tests.dispatch.behaviour` reads and compares them.

- ``recording``: the session of a test in a rank, and the mode and hooks that fill it;
- ``values``: tensors and other values as a few numbers;
- ``memory``: the unsharded parameters and gradients that are alive.
"""
