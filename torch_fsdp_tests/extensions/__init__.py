"""What is optional in a run, one folder each. :mod:`torch_fsdp_tests.extension` says what an extension can do."""
