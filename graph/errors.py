"""What the graph raises. Every message names the argument, what came, and the rule."""

from __future__ import annotations


class GraphValidationError(ValueError):
    """The graph, or a call that builds it, breaks a rule."""


class GraphFrozenError(RuntimeError):
    """A change of a graph that planning has closed."""


class GraphNotSupportedError(RuntimeError):
    """The graph is legal, and nothing at hand can run it."""
