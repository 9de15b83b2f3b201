"""Graphs, nodes and tensors as text for people: one line a node."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_jax.graph.canonical import given_params, is_input, is_output, ordered_tensors
from cudnn_jax.graph.names import printable
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


def _tag(tensor: Tensor) -> str:
    return f"%{printable(tensor.name) or tensor.uid}"


def typed(tensor: Tensor) -> str:
    """Name, type and dims of a tensor, or its number."""
    if tensor.is_pass_by_value:
        return f"{tensor.value}:{tensor.data_type.value}"
    return f"{_tag(tensor)}:{tensor.data_type.value}{list(tensor.dim)}"


def tensor_line(tensor: Tensor) -> str:
    words = [f"Tensor {typed(tensor)} uid={tensor.uid} stride={list(tensor.stride)}"]
    words += ["virtual"] if tensor.is_inside else []
    words += ["by value"] if tensor.is_pass_by_value else []
    words += [f"ragged by {_tag(tensor.ragged_offset)}"] if tensor.ragged_offset is not None else []
    words += [f"made by {tensor.producer.label}"] if tensor.producer is not None else []
    return f"<{', '.join(words)}>"


def node_line(node: Node) -> str:
    made = ", ".join(f"{port}={typed(tensor)}" for port, tensor in node.outputs.items())
    taken = [f"{port}={typed(t) if t.is_pass_by_value else _tag(t)}" for port, t in node.inputs.items()]
    fixed = node.operation.fixed
    taken += [f"{name}={value!r}" for name, value in given_params(node).items() if name not in fixed]
    compute = node.compute_data_type
    taken += [f"compute={compute.value}"] if compute is not data_type.NOT_SET else []
    named = f"  # {printable(node.name)}" if node.name else ""
    return f"{made} = {node.operation.name}({', '.join(taken)}){named}"


def graph_text(graph: pygraph) -> str:
    tensors = ordered_tensors(graph)
    state = "frozen" if graph.frozen else "open"
    kinds = (graph.io_data_type, graph.intermediate_data_type, graph.compute_data_type)
    io, intermediate, compute = (kind.value for kind in kinds)
    lines = [f"pygraph {graph.name!r} ({state}; io {io}, intermediate {intermediate}, compute {compute})"]
    lines += [f"  in   {typed(tensor)}" for tensor in tensors if is_input(tensor)]
    lines += [f"  {node_line(node)}" for node in graph.nodes]
    lines += [f"  out  {typed(tensor)}" for tensor in tensors if is_output(tensor)]
    return "\n".join(lines)
