"""Random programs over FSDP, compared with a plain model, and shrunk to a script."""
