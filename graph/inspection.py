"""A graph as plain dicts, lists, strings and numbers: what was said, and what was inferred."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.canonical import is_input, is_output, ordered_tensors

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


def inspect(graph: pygraph) -> dict[str, Any]:
    """The graph, open or frozen, broken or not. Tensors are named by their uids."""
    return {
        "name": graph.name,
        "frozen": graph.frozen,
        "io_data_type": graph.io_data_type.value,
        "intermediate_data_type": graph.intermediate_data_type.value,
        "compute_data_type": graph.compute_data_type.value,
        "inputs": [tensor.uid for tensor in graph.inputs],
        "outputs": [tensor.uid for tensor in graph.outputs],
        "nodes": [_node(node) for node in graph.nodes],
        "tensors": {tensor.uid: _tensor(tensor) for tensor in (*ordered_tensors(graph), *graph.tensors)},
    }


def _node(node: Node) -> dict[str, Any]:
    return {
        "operation": node.operation.name,
        "type": node.type,
        "name": node.name,
        "inputs": {port: tensor.uid for port, tensor in node.inputs.items()},
        "outputs": {port: tensor.uid for port, tensor in node.outputs.items()},
        "params": dict(node.params),
        "compute_data_type": node.compute_data_type.value,
    }


def _role(tensor: Tensor) -> str:
    if tensor.is_pass_by_value:
        return "number"
    return "input" if is_input(tensor) else "output" if is_output(tensor) else "virtual"


def _tensor(tensor: Tensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "role": _role(tensor),
        "dim": tensor.dim,
        "stride": tensor.stride,
        "layout_is_user": tensor.layout_is_user,
        "data_type": tensor.data_type.value,
        "value": tensor.value,
        "ragged_offset": None if tensor.ragged_offset is None else tensor.ragged_offset.uid,
        "made_by": None if tensor.producer is None else tensor.producer.label,
    }
