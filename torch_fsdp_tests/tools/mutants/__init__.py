"""Finds the changes that the suite would miss: makes small changes to torch's FSDP, and runs the tests that reach them.

``python -m torch_fsdp_tests.tools.mutants`` makes the changes in memory, when FSDP is imported.
docs/changing-fsdp.md describes it.
"""
