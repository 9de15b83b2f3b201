"""The command line: `python -m cudnn_jax COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple


class Command(NamedTuple):
    """A command: the words that call it, what it does, the module whose `main` runs it, and its arguments."""

    words: tuple[str, ...]
    help: str
    module: str
    arguments: tuple[tuple[str, dict[str, Any]], ...]


_JSON = ("--json", {"dest": "as_json", "action": "store_true", "help": "print JSON instead of a table"})
COMMANDS = (
    Command(("doctor",), "what is installed, what is missing, and what that means", "_doctor", (_JSON,)),
    Command(
        ("program", "show"),
        "what a program holds: needs, operands, steps; runs nothing",
        "_program",
        (("file", {"metavar": "FILE", "help": "a program's bytes"}), _JSON),
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = vars(_parser().parse_args(argv))
    command: Command = arguments.pop("command")
    status: int = importlib.import_module(f"cudnn_jax.{command.module}").main(**arguments)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m cudnn_jax", description="Tools of cudnn_jax.")
    groups = {(): parser.add_subparsers(required=True, metavar="COMMAND")}
    for command in COMMANDS:
        for depth in range(1, len(command.words)):
            words = command.words[:depth]
            if words not in groups:
                parent = groups[words[:-1]].add_parser(words[-1], help=f"{words[-1]} commands")
                groups[words] = parent.add_subparsers(required=True, metavar="COMMAND")
        leaf = groups[command.words[:-1]].add_parser(command.words[-1], help=command.help, description=command.help)
        for name, options in command.arguments:
            leaf.add_argument(name, **options)
        leaf.set_defaults(command=command)
    return parser


if __name__ == "__main__":
    sys.exit(main())
