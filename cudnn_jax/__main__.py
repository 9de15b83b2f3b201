"""The command line: `python -m cudnn_jax COMMAND`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m cudnn_jax", description="Tools of cudnn_jax.")
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="what is installed, what is missing, and what that means")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of a table")
    arguments = parser.parse_args(argv)
    from cudnn_jax import _doctor

    return _doctor.main(as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
