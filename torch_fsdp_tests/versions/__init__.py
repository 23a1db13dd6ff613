"""``python -m torch_fsdp_tests.versions 2.13.0 2.15.0 ...``: the suite over versions of torch, compared test by test.

Nothing here imports torch but :mod:`.facts`, which runs inside each version's environment.
"""
