"""`python -m benchmarks NAME ...`: one benchmark a name, and `picture` to draw a result."""

from __future__ import annotations

import importlib
import sys

BENCHMARKS = {
    name: f"benchmarks.{name}"
    for name in (
        *("sdpa", "norm", "pointwise", "gdn", "gdn_reference", "kda", "autotune", "placement"),
        *("eager", "runtime", "scaling", "startup", "peers_call", "picture", "train_lm"),
    )
}


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in BENCHMARKS:
        print(f"usage: python -m benchmarks {{{','.join(BENCHMARKS)}}} --help", file=sys.stderr)
        return 2
    return int(importlib.import_module(BENCHMARKS[argv[0]]).main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
