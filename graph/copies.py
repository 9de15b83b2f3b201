"""Nodes and tensors of one graph, made again in another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.call import Call

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


def tensor_again(graph: pygraph, tensor: Tensor) -> Tensor:
    """A tensor of `graph` that the caller gives, or a number, as `tensor` is; without its ragged offset."""
    return graph.tensor(tensor.dim, tensor.stride, tensor.data_type, tensor.name, value=tensor.value)


def node_again(
    graph: pygraph, node: Node, inputs: Mapping[str, Tensor], given: Mapping[str, Tensor], **params: Any
) -> Node:
    """The node in `graph`, over other tensors; `given` are its outputs that the caller makes, `params` what differs.

    Outputs that were not there before are virtual. The others have the dims and the data types that they had.
    """
    call = Call(node.label, node.name, node.compute_data_type, dict(inputs), dict(given), {**node.params, **params})
    made = graph._place(node.operation, call)
    for port, tensor in node.outputs.items():
        if port not in given:
            made.outputs[port].set_data_type(tensor.data_type).set_dim(tensor.dim)
    return made


def made_by_caller(node: Node) -> dict[str, Tensor]:
    """The node's outputs that the caller made."""
    own = {output.name for output in node.operation.outputs if output.from_caller}
    return {port: tensor for port, tensor in node.outputs.items() if port in own}
