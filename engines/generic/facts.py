"""What any graph is, read once after the freeze. Facts describe and never judge."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_jax.graph import data_type, pygraph


@dataclass(frozen=True)
class GenericFacts:
    """One record for any graph.

    Attributes:
      operations: the names of the nodes' operations, in their order.
      compute_types: the type that each node computes in, in the order of the nodes.
      dtypes: data types of tensors and of computation, each once.
    """

    operations: tuple[str, ...]
    compute_types: tuple[data_type, ...]
    dtypes: tuple[data_type, ...]

    def describe(self) -> str:
        """One line for people."""
        return f"a graph of {', '.join(dict.fromkeys(self.operations))}"


def analyze(graph: pygraph) -> GenericFacts:
    """Parses a frozen graph."""
    tensors = [tensor for node in graph.nodes for tensor in (*node.inputs.values(), *node.outputs.values())]
    own = [node.compute_data_type for node in graph.nodes]
    compute = tuple(graph.compute_data_type if kind is data_type.NOT_SET else kind for kind in own)
    return GenericFacts(
        operations=tuple(node.operation.name for node in graph.nodes),
        compute_types=compute,
        dtypes=tuple(dict.fromkeys([*(tensor.data_type for tensor in tensors), *compute])),
    )
