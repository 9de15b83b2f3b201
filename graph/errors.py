"""What the graph raises. Every message names the argument, what came, and the rule."""

from __future__ import annotations


def shown(value: object) -> str:
    """`value` in a message, on one line and cut: of an integer of many digits its size."""
    if isinstance(value, int) and abs(value) >= 2**128:
        return f"an integer of {value.bit_length()} bits"
    text = " ".join(repr(value).split())
    return text if len(text) <= 200 else f"{text[:197]}..."


class GraphValidationError(ValueError):
    """The graph, or a call that builds it, breaks a rule."""


class GraphFrozenError(RuntimeError):
    """A change of a graph that planning has closed."""


class GraphNotSupportedError(RuntimeError):
    """The graph is legal, and nothing at hand can run it."""
