"""A node while it runs: what its function is handed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_jax.engines.pointwise.reference import convert
from cudnn_jax.graph import Node, data_type

if TYPE_CHECKING:
    import jax

Made = dict[str, Any]
"""Output port -> array, in any type: `reference` brings it into the tensor's."""


@dataclass(frozen=True)
class Step:
    """A node, the type that it computes in, and the arrays at its ports, as they came."""

    node: Node
    compute: data_type
    given: dict[str, jax.Array]

    def wide(self, port: str) -> jax.Array:
        """The port's array in the compute type."""
        return convert(self.given[port], self.compute)

    def maybe(self, port: str, otherwise: float) -> jax.Array | float:
        """The port's array in the compute type, or a number where nothing is wired."""
        return self.wide(port) if port in self.given else otherwise
