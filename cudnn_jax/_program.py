"""`python -m cudnn_jax program show FILE`: what a program holds. Nothing of it is loaded or run."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import msgpack
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from cudnn_jax import _ffi
from cudnn_jax.engines import trust


def main(*, file: str, as_json: bool = False) -> int:
    """Prints what is in `file`; 1 with one line on standard error if it cannot be read or is no sound program."""
    try:
        data = Path(file).read_bytes()
        content = describe(data)
        warning = trust.reason_against(file)
    except (OSError, ValueError, NotImplementedError) as error:
        print(f"{file}: {error.strerror if isinstance(error, OSError) else error}", file=sys.stderr)
        return 1
    if warning:
        print(f"warning: {warning}", file=sys.stderr)
    if as_json:
        print(json.dumps(content, indent=1))
    else:
        _print(content)
    return 0


def describe(data: bytes) -> dict[str, Any]:
    """A checked program in JSON's types, with the size and sha256 of binary fields in their place.

    Raises:
      ValueError: damaged, of a newer version, or no program; the message names the field.
      NotImplementedError: sound, with a kind of step that this build lacks.
    """
    checked = _ffi.program_check(data)
    envelope = msgpack.unpackb(data)
    payload = msgpack.unpackb(envelope["payload"])
    return {
        "version": envelope["version"],
        "bytes": len(data),
        "sha256": checked["sha256"],
        **payload,
        "steps": [{name: _plain(value) for name, value in step.items()} for step in payload["steps"]],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return {"bytes": len(value), "sha256": hashlib.sha256(value).hexdigest()}
    return value


def _print(content: dict[str, Any]) -> None:
    console = Console()
    head = Table(title=f"program {content['sha256'][:16]}", title_justify="left", show_header=False)
    needs = ", ".join(f"{name} {value}" for name, value in content["requires"].items() if value is not None)
    head.add_row("layout", f"version {content['version']}, {content['bytes']} bytes")
    head.add_row("sha256", content["sha256"])
    head.add_row("requires", escape(needs))
    head.add_row("workspace", f"{content['workspace']} bytes")
    console.print(head)

    operands = _table("operands", "index", "role", "dtype", "shape")
    for role in ("inputs", "outputs"):
        for operand in content[role]:
            shape = "x".join(map(str, operand["shape"])) or "scalar"
            operands.add_row(str(operands.row_count), role[:-1], operand["dtype"], shape)
    console.print(operands)

    steps = _table("steps", "index", "kind", "what", "arguments")
    for step in content["steps"]:
        what = "\n".join(f"{name}: {_short(value)}" for name, value in step.items() if name not in _APART)
        arguments = [*step.get("args", ()), *([step["dest"]] if "dest" in step else ())]
        steps.add_row(str(steps.row_count), step["kind"], escape(what), escape("\n".join(map(_argument, arguments))))
    console.print(steps)


_APART = ("kind", "args", "dest")


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left")
    for heading in headings:
        table.add_column(heading, overflow="fold")
    return table


def _argument(argument: Any) -> str:
    kind, what = argument
    return f"{kind} {' '.join(map(str, what))}" if kind == "immediate" else f"{kind} {what}"


def _short(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"bytes", "sha256"}:
        return f"{value['bytes']} bytes, sha256 {value['sha256'][:16]}"
    if isinstance(value, str):
        if len(value) > 80:
            return f"{len(value)} characters"
        return value if value.isprintable() else ascii(value)
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value)
