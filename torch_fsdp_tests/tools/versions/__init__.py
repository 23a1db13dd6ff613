"""The suite over versions of torch."""
