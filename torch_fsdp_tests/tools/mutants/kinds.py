"""All kinds of changes. Each of the three modules registers its own."""

from torch_fsdp_tests.tools.mutants import statements, tokens, values  # noqa: F401
from torch_fsdp_tests.tools.mutants.operators import OPERATORS

KINDS = {operator.name: operator.words for operator in OPERATORS}
