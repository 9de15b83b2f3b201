"""The command line: `python -m cudnn_jax COMMAND`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

from cudnn_jax._described import ARGUMENTS


class Command(NamedTuple):
    """A command: the words that call it, what it does, the module whose `run` runs it, and its arguments."""

    words: tuple[str, ...]
    help: str
    module: str
    arguments: tuple[tuple[str, dict[str, Any]], ...]
    run: str = "main"


_JSON = ("--json", {"dest": "as_json", "action": "store_true", "help": "print JSON instead of a table"})
COMMANDS = (
    Command(("doctor",), "what is installed, what is missing, and what that means", "_doctor", (_JSON,)),
    Command(
        ("program", "show"),
        "what a program holds: needs, operands, steps; runs nothing",
        "_program",
        (("file", {"metavar": "FILE", "help": "a program's bytes"}), _JSON),
    ),
    Command(
        ("explain",),
        "which plan runs a call, and why others do not",
        "_described",
        (*ARGUMENTS, ("--target", {"help": "a GPU that need not be here, such as h200"}), _JSON),
        run="explain",
    ),
    Command(
        ("autotune",),
        "times every plan of a call on this device, and keeps the fastest for later traces",
        "_described",
        (*ARGUMENTS, ("--quiet", {"action": "store_true", "help": "show no progress"}), _JSON),
        run="autotune",
    ),
    Command(
        ("build",),
        "builds a call's programs for a GPU, which need not be here, into a folder for CUDNN_JAX_PROGRAMS",
        "_described",
        (
            *ARGUMENTS,
            ("--target", {"required": True, "help": "the GPU, such as h200"}),
            ("--out", {"required": True, "metavar": "DIR", "help": "the folder"}),
        ),
        run="build",
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    arguments = vars(_parser().parse_args(argv))
    command: Command = arguments.pop("command")
    run = getattr(importlib.import_module(f"cudnn_jax.{command.module}"), command.run)
    status: int = run(**arguments)
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
