"""``python -m torch_fsdp_tests.tools.benchmarks {harness,reaching,suite} [ARGUMENTS]``."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from torch_fsdp_tests.processes import host

BENCHMARKS = {
    "harness": "how long a test with ranks takes, compared with torch.testing._internal",
    "reaching": "how soon --reaching finds each of sixty changes to torch's FSDP",
    "suite": "where the time of a run went, from its report",
}


def main(argv: Sequence[str]) -> int:
    """Run the benchmark that the first argument names. Returns 2 for an unknown one."""
    known = "\n".join(f"  {name:8s} {words}" for name, words in BENCHMARKS.items())
    if argv and argv[0] in ("-h", "--help"):
        print(f"usage: python -m {__package__} BENCHMARK [options]\n\nRun one of the benchmarks:\n{known}")
        print("\nBENCHMARK --help shows its options.")
        return 0
    if not argv or argv[0] not in BENCHMARKS:
        wrong = f"there is no benchmark {argv[0]!r}" if argv else "no benchmark is named"
        print(f"benchmarks: {wrong}; name one of these:\n{known}", file=sys.stderr)
        return 2
    # Imported late: one benchmark needs torch, and another must not wait for it.
    module = importlib.import_module(f"{__package__}.{argv[0]}")
    return module.main(argv[1:]) or 0


if __name__ == "__main__":
    host.run_command("benchmarks", main)
