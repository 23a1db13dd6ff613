"""The defects, one module each. Importing this package imports none of them."""
