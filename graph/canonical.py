"""The canonical form: what a graph computes, free of names and uids, the same in every process."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor

VERSION = 1


def ordered_tensors(graph: pygraph) -> list[Tensor]:
    """The tensors that nodes touch, by node, then inputs and outputs by the table's port order.

    A ragged offset follows the tensor that it belongs to.
    """
    order: dict[int, Tensor] = {}
    for node in graph.nodes:
        for tensor in (*node.inputs.values(), *node.outputs.values()):
            order.setdefault(id(tensor), tensor)
            if tensor.ragged_offset is not None:
                order.setdefault(id(tensor.ragged_offset), tensor.ragged_offset)
    return list(order.values())


def is_input(tensor: Tensor) -> bool:
    """Whether the caller gives the tensor's buffer."""
    return tensor.producer is None and not tensor.is_virtual and not tensor.is_pass_by_value


def is_output(tensor: Tensor) -> bool:
    """Whether the caller gets the tensor's buffer."""
    return tensor.producer is not None and not tensor.is_inside


def canonical(graph: pygraph) -> dict[str, Any]:
    """The canonical form as plain lists, dicts, strings and numbers; infinities and NaN as strings."""
    tensors = ordered_tensors(graph)
    index = {id(tensor): position for position, tensor in enumerate(tensors)}
    return {
        "version": VERSION,
        "io_data_type": _type(graph.io_data_type),
        "intermediate_data_type": _type(graph.intermediate_data_type),
        "compute_data_type": _type(graph.compute_data_type),
        "tensors": [_tensor(tensor, index) for tensor in tensors],
        "nodes": [_node(node, index) for node in graph.nodes],
        "inputs": [position for position, tensor in enumerate(tensors) if is_input(tensor)],
        "outputs": [position for position, tensor in enumerate(tensors) if is_output(tensor)],
    }


def to_json(form: dict[str, Any]) -> str:
    import json  # slow to import, and needed by planning alone

    return json.dumps(form, sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(text: str) -> str:
    import hashlib  # as json

    return hashlib.sha256(text.encode()).hexdigest()


def _tensor(tensor: Tensor, index: dict[int, int]) -> dict[str, Any]:
    return {
        "dim": list(tensor.dim),
        "stride": list(tensor.stride),
        "data_type": tensor.data_type.value,
        "virtual": tensor.is_inside,
        "value": _value(tensor),
        "layout": _layout(tensor),
        "ragged_offset": None if tensor.ragged_offset is None else index[id(tensor.ragged_offset)],
    }


def _layout(tensor: Tensor) -> str:
    """What of dims and strides the user settled: "user" both, "dims" those alone, of an output; else "inferred"."""
    if tensor._stride is None and tensor._inferred_dim:
        return "inferred" if tensor._dim is None else "dims"
    return "user"


def _node(node: Node, index: dict[int, int]) -> dict[str, Any]:
    return {
        "type": node.type,
        "inputs": {port: index[id(tensor)] for port, tensor in node.inputs.items()},
        "outputs": {port: index[id(tensor)] for port, tensor in node.outputs.items()},
        "params": {name: plain(value) for name, value in given_params(node).items()},
        "compute_data_type": _type(node.compute_data_type),
    }


def given_params(node: Node) -> dict[str, Any]:
    """The parameters that differ from "not given", so that a new option moves no older graph's hash."""
    defaults = node.operation.defaults
    absent = object()
    return {name: value for name, value in node.params.items() if value != defaults.get(name, absent)}


def _type(kind: data_type) -> str | None:
    return None if kind is data_type.NOT_SET else kind.value


def _value(tensor: Tensor) -> Any:
    if tensor.value is None:
        return None
    if tensor.data_type is data_type.BOOLEAN:
        return bool(tensor.value)
    return plain(float(tensor.value) if tensor.data_type.is_floating else int(tensor.value))


def plain(value: Any) -> Any:
    """Sequences are lists. JSON has no infinities and no NaN: they are the strings "inf", "-inf" and "nan"."""
    if isinstance(value, tuple):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
