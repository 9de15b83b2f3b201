"""What a pointwise graph is, read once after the freeze. Facts describe and never judge."""

from __future__ import annotations

from dataclasses import dataclass

from cudnn_jax.engines.pointwise.bias_gelu import BiasGelu, find
from cudnn_jax.graph import data_type, pygraph


@dataclass(frozen=True)
class PointwiseFacts:
    """One record for a graph of pointwise and reduction nodes.

    Attributes:
      modes: the pointwise modes, in the order of the nodes.
      dim: dims of the first output.
      least_rank: the smallest rank of any node's output.
      dtypes: data types of tensors and of computation, each once.
      unexplained: nodes and options that this record does not describe.
      compute_types: the type that each node computes in, in the order of the nodes.
      index_axes: the axes of gen_index nodes.
      spread_first: an operand of a node that is broadcast along the first axis, "" if there is none.
      bias_gelu: the graph as residual + gelu(x + bias).
      not_bias_gelu: why it is none, in words, where `bias_gelu` is None.
    """

    modes: tuple[str, ...]
    dim: tuple[int, ...]
    least_rank: int
    dtypes: tuple[data_type, ...]
    unexplained: tuple[str, ...]
    compute_types: tuple[data_type, ...]
    index_axes: tuple[int, ...]
    spread_first: str
    bias_gelu: BiasGelu | None
    not_bias_gelu: str

    def describe(self) -> str:
        """One line for people."""
        if self.bias_gelu is not None:
            return self.bias_gelu.describe()
        return f"pointwise {self.dim} of {', '.join(dict.fromkeys(self.modes))}"


def analyze(graph: pygraph) -> PointwiseFacts:
    """Parses a frozen graph that holds pointwise and reduction nodes."""
    pointwise = [node for node in graph.nodes if node.type == "POINTWISE"]
    unexplained = [node.label for node in graph.nodes if node.type != "POINTWISE"]
    unexplained += ["ragged offsets"] if any(tensor.ragged_offset is not None for tensor in graph.tensors) else []
    own = [node.compute_data_type for node in graph.nodes]
    compute = tuple(graph.compute_data_type if kind is data_type.NOT_SET else kind for kind in own)
    tensors = [tensor for node in graph.nodes for tensor in (*node.inputs.values(), *node.outputs.values())]
    found = find(graph, compute) if not unexplained else f"holds {', '.join(unexplained)}"
    return PointwiseFacts(
        modes=tuple(node.params["mode"] for node in pointwise),
        dim=tuple(graph.outputs[0].dim),
        least_rank=min(len(made.dim) for node in graph.nodes for made in node.outputs.values()),
        dtypes=tuple(dict.fromkeys([*(tensor.data_type for tensor in tensors), *compute])),
        unexplained=tuple(unexplained),
        compute_types=compute,
        index_axes=tuple(node.params["axis"] for node in pointwise if node.params["mode"] == "gen_index"),
        spread_first=_spread_first(graph),
        bias_gelu=found if isinstance(found, BiasGelu) else None,
        not_bias_gelu=found if isinstance(found, str) else "",
    )


def _spread_first(graph: pygraph) -> str:
    for node in graph.nodes:
        (made,) = node.outputs.values()
        for port, tensor in node.inputs.items():
            # Axes are counted from the last: what an operand lacks in front is 1 long.
            first = tensor.dim[0] if len(tensor.dim) == len(made.dim) else 1
            if not tensor.is_pass_by_value and first == 1 != made.dim[0]:
                return f"{node.label}: {port} {tensor.dim}"
    return ""
