"""Writes `_methods.pyi` from the tables: `python -m cudnn_jax.graph.stubs`."""

from __future__ import annotations

import inspect
from pathlib import Path

from cudnn_jax.graph.builders import GENERATED, signature
from cudnn_jax.graph.operation import Operation

PATH = Path(__file__).with_name("_methods.pyi")

_HEAD = """# Made by `python -m cudnn_jax.graph.stubs` from the operation tables; not edited by hand.
from collections.abc import Sequence
from typing import Any

from cudnn_jax.graph.tensor import Tensor

class Methods:
"""


def render() -> str:
    """The stub's text."""
    return _HEAD + "".join(map(_method, GENERATED.values()))


def _method(operation: Operation) -> str:
    made = signature(operation)
    parts, named = [], False
    for name, parameter in made.parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY and not named:
            parts.append("*")
            named = True
        typed = "" if name == "self" else f": {parameter.annotation}"
        default = "" if parameter.default is inspect.Parameter.empty else f" = {_literal(parameter.default)}"
        parts.append(f"{name}{typed}{default}")
    line = f"    def {operation.name}({', '.join(parts)}) -> {made.return_annotation}: ..."
    if len(line) > 110:
        lines = "".join(f"        {part},\n" for part in parts)
        line = f"    def {operation.name}(\n{lines}    ) -> {made.return_annotation}: ..."
    return line + "\n"


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    PATH.write_text(render())
