"""``python -m torch_fsdp_tests.tools.benchmarks {dispatch,harness,reaching} [ARGUMENTS]``."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    "dispatch": "how close the plan of run_test.py comes to the shortest possible one",
    "harness": "seconds of a test with ranks, side by side with torch.testing._internal",
    "reaching": "ten changes to torch's FSDP, and how soon --reaching finds each",
}


def main(argv: list[str]) -> int:
    """Run the benchmark that the first argument names. Returns 2 for an unknown one."""
    if not argv or argv[0] not in BENCHMARKS:
        known = "\n".join(f"  {name:9s} {words}" for name, words in BENCHMARKS.items())
        asked = f"unknown benchmark {argv[0]!r}" if argv and argv[0] not in ("-h", "--help") else "which benchmark?"
        print(f"{asked}\n{known}", file=sys.stderr)
        return 2
    # Imported late: one benchmark needs torch, and another must not wait for it.
    module = importlib.import_module(f"{__package__}.{argv[0]}")
    return module.main(argv[1:]) or 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
