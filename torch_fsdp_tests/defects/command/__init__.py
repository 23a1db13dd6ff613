"""``python -m torch_fsdp_tests.defects``: finds, lists and tries defects. It needs torch only to try them."""
