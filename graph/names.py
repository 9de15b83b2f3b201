"""Names that people give graphs, tensors and nodes."""

from __future__ import annotations

from typing import Any

from cudnn_jax.graph.errors import GraphValidationError


def as_name(owner: str, value: Any) -> str:
    """`value` as a name, empty for None, or a GraphValidationError that names the owner."""
    if value is None:
        return ""
    if not isinstance(value, str):
        raise GraphValidationError(f"{owner}: name is {value!r}; the rule: a string")
    return value
