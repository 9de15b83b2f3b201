"""A node as a graph of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from cudnn_jax.graph.copies import made_by_caller, node_again, tensor_again
from cudnn_jax.graph.pygraph import pygraph

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor


class Alone(NamedTuple):
    """A frozen graph that holds a copy of one node, and the tensors of that node for its inputs and outputs."""

    graph: pygraph
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def alone(node: Node) -> Alone:
    """The graph of one node, whose inputs and outputs are all the caller's, in the types that they have.

    None is ragged: it takes and gives what is inside of the node's graph, where such tensors are padded.
    """
    owner = node._graph
    graph = pygraph(
        io_data_type=owner.io_data_type,
        intermediate_data_type=owner.intermediate_data_type,
        compute_data_type=owner.compute_data_type,
    )
    copies: dict[int, Tensor] = {}
    origin: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if id(tensor) not in copies:
            made = copies[id(tensor)] = tensor_again(graph, tensor)
            origin[id(made)] = tensor
        return copies[id(tensor)]

    inputs = {port: copy(tensor) for port, tensor in node.inputs.items()}
    given = {port: copy(tensor) for port, tensor in made_by_caller(node).items()}
    made = node_again(graph, node, inputs, given)
    for port, tensor in node.outputs.items():
        made.outputs[port].set_output(True).set_data_type(tensor.data_type)
        if port not in given:
            origin[id(made.outputs[port])] = tensor
    graph.freeze()
    return Alone(graph, *(tuple(origin[id(each)] for each in side) for side in (graph.inputs, graph.outputs)))
