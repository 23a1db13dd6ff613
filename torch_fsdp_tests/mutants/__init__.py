"""What would the suite miss? Small changes to the installed torch's FSDP, one at a time, and the tests that notice.

``python -m torch_fsdp_tests.mutants`` makes the changes in memory, when FSDP is imported; README.md describes it.
"""
