"""Mutation testing of torch's FSDP: makes small changes to it, and runs the tests that reach them.

``python -m torch_fsdp_tests.tools.mutants`` makes the changes in memory, when FSDP is imported.
docs/changing-fsdp.md describes it.
"""
