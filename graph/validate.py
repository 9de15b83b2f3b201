"""The rules of a node and of a whole graph, read off the operations' entries."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cudnn_jax.graph.canonical import is_input, is_output
from cudnn_jax.graph.errors import GraphValidationError, shown
from cudnn_jax.graph.operation import Symbols
from cudnn_jax.graph.shapes import match, refuse
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor


def infer_node(node: Node) -> None:
    """Checks a node's dims and writes its outputs' inferred layout."""
    symbols: Symbols = {}
    for attribute in node.operation.attributes:
        if attribute.binds and node.params[attribute.name] is not None:
            symbols[attribute.binds] = node.params[attribute.name]
    for port, name, tensor in node.wired:
        if not tensor.dim:
            refuse(node, name, "has no dims yet", "set_dim says those of an output that its inputs do not tell")
        shape = port.replaced[1] if port.replaced and port.replaced[0] in node.inputs else port.shape
        if shape is not None:
            match(node, name, tensor, shape, symbols)
    for rule in node.operation.rules:
        rule(node, symbols)
    for output in node.operation.outputs:
        if output.name not in node.outputs:
            continue
        tensor = node.outputs[output.name]
        tensor._fixed_type = node.inputs[output.like].data_type if output.like in node.inputs else output.type
        if output.layout is not None:
            tensor._inferred_dim, tensor._inferred_stride = output.layout(node, symbols)
        elif output.shape is not None:
            match(node, output.name, tensor, output.shape, symbols)


def validate(graph: pygraph) -> None:
    """Raises GraphValidationError for the first rule that the graph breaks."""
    if not graph.nodes:
        raise GraphValidationError(f"graph {graph.name!r} has no operation; the rule: at least one")
    for node in graph.nodes:
        infer_node(node)
        for name, tensor in (*node.inputs.items(), *node.outputs.items()):
            _check_tensor(node, name, tensor)
        _check_ports(node)
    if not any(is_output(tensor) for node in graph.nodes for tensor in node.outputs.values()):
        raise GraphValidationError(
            f"graph {graph.name!r} gives nothing; the rule: at least one output tensor has set_output(True)"
        )


def _check_ports(node: Node) -> None:
    for port, port_name, tensor in node.wired:
        if tensor.producer is None and tensor.is_virtual:
            refuse(node, port_name, f"is the virtual {tensor.label}", "a virtual tensor is made by a node")
        types = [node.inputs[kind].data_type if isinstance(kind, str) else kind for kind in port.types]
        if types and tensor.data_type not in types:
            allowed = " or ".join(dict.fromkeys(kind.value for kind in types))
            refuse(node, port_name, f"has data type {tensor.data_type.value}", allowed)
    for name, tensor in node.outputs.items():
        if tensor._fixed_type not in (data_type.NOT_SET, tensor.data_type):
            refuse(node, name, f"was set to data type {tensor.data_type.value}", tensor._fixed_type.value)
        if tensor._inferred_dim and tensor.dim != tensor._inferred_dim:
            refuse(node, name, f"was set to dim {tensor.dim}", f"the operation makes {tensor._inferred_dim}")
    for name, over in node.written_over.items():
        # Asked for by set_output(True), whatever runs it: a buffer of the caller's changes.
        if node.outputs[name].is_virtual or not is_input(node.inputs[over]):
            rule = f"{name} is an output and {over} a tensor that the caller gives"
            refuse(node, name, f"is written over {over}", rule)


def _check_tensor(node: Node, name: str, tensor: Tensor) -> None:
    if not tensor.dim:
        refuse(node, name, "has no dims", "set_dim says them: the inputs do not tell")
    if len(tensor.stride) != len(tensor.dim):
        refuse(node, name, f"has dim {tensor.dim} and stride {tensor.stride}", "one stride for each dim")
    if tensor.data_type is data_type.NOT_SET:
        default = "intermediate_data_type" if tensor.is_inside else "io_data_type"
        refuse(node, name, f"({tensor.label}) has no data type", f"its own, or the graph's {default}")
    last = sum((size - 1) * step for size, step in zip(tensor.dim, tensor.stride, strict=True) if size)
    if max(*tensor.dim, last) >= 2**63:
        came = f"has dim {tensor.dim} and stride {tensor.stride}"
        refuse(node, name, came, "dims, and the place of the last element, below 2**63")
    _check_value(node, name, tensor)
    _check_ragged(node, name, tensor)


def _check_value(node: Node, name: str, tensor: Tensor) -> None:
    kind, value = tensor.data_type, tensor.value
    if not tensor.is_pass_by_value:
        if value is not None:
            refuse(node, name, f"has value {value!r}", "only a tensor passed by value has one")
        return
    if value is None or set(tensor.dim) != {1}:
        refuse(node, name, f"is by value with value {value!r}, dim {tensor.dim}", "one number, dims all 1")
    if tensor.producer is not None or tensor.is_virtual:
        refuse(node, name, f"is the number {tensor.label}", "a number is neither virtual nor made by a node")
    whole = not isinstance(value, float) or value.is_integer()
    if not kind.is_floating and not (whole and int(value) in kind.integers):
        refuse(node, name, f"has value {shown(value)}", f"an integer that {kind.value} holds")
    if kind.is_floating and isinstance(value, int) and abs(value) > sys.float_info.max:
        refuse(node, name, f"has value {shown(value)}", "a number that float64 holds")


def _check_ragged(node: Node, name: str, tensor: Tensor) -> None:
    offset = tensor.ragged_offset
    if offset is None:
        return
    expected = (tensor.dim[0] + 1, *(1,) * (len(tensor.dim) - 1))
    if offset.dim != expected:
        refuse(node, name, f"has a ragged_offset of dim {offset.dim}", f"(B + 1, 1, ...) = {expected}")
    if offset.data_type not in (data_type.INT32, data_type.INT64):
        refuse(node, name, f"has a ragged_offset of type {offset.data_type.value}", "int32 or int64")
    if not is_input(offset) or offset.ragged_offset is not None:
        refuse(node, name, f"has the ragged_offset {offset.label}", "a plain tensor that the caller gives")
