"""Names that people give graphs, tensors and nodes."""

from __future__ import annotations

from typing import Any

from cudnn_jax.graph.errors import GraphValidationError


def printable(name: str) -> str:
    """A name on one line, as a string's repr has it: what does not print is escaped, such as line ends."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in name)


def as_name(owner: str, value: Any) -> str:
    """`value` as a name, empty for None, or a GraphValidationError that names the owner."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise GraphValidationError(f"{owner}: name is {value!r}; the rule: a string")
    return value
