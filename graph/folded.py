"""A graph over many elements at once: axis 0 of what differs between them becomes that many times as long."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

from cudnn_jax.graph import serial
from cudnn_jax.graph.block_scale import blocks_of, quantised_axis
from cudnn_jax.graph.canonical import is_output
from cudnn_jax.graph.layout import in_order, memory_order

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.pygraph import pygraph
    from cudnn_jax.graph.tensor import Tensor

_NORM = frozenset({"input"})
_NORM_BACKWARD = frozenset({"grad", "input", "mean", "inv_variance"})
_ROWS = {
    "rmsnorm": _NORM,
    "layernorm": _NORM,
    "rmsnorm_backward": _NORM_BACKWARD,
    "layernorm_backward": _NORM_BACKWARD,
    "rope": frozenset({"input"}),
    "rope_backward": frozenset({"dY"}),
    "conv_fprop": frozenset({"image"}),
    "conv_dgrad": frozenset({"loss"}),
    "block_scale_quantize": frozenset({"input"}),
    "block_scale_dequantize": frozenset({"input", "descale"}),
}
"""Operation -> the ports along whose axis 0 it computes row by row."""
_SPREAD = frozenset({"freqs"})
"""Ports that may be 1 long there, and are then read by every row."""
_SUMS = frozenset({"DScale", "DBias"})
"""Outputs that are sums over the rows."""


class Folded(NamedTuple):
    """A graph over many elements, with inputs and outputs in the order of the one that it is made of.

    Attributes:
      rows: how long axis 0 of each element is in what differs between elements.
      inputs, outputs: whether they differ; the others are one for all elements.
    """

    graph: pygraph
    rows: int
    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]


def fold(graph: pygraph, size: int, mapped: frozenset[int]) -> Folded:
    """The graph over `size` elements, of which the inputs at the positions `mapped` differ.

    Raises:
      NotImplementedError: elements cannot be told apart along axis 0, and why.
    """
    differ = {id(tensor): tensor for at, tensor in enumerate(graph.inputs) if at in mapped}
    count = 0
    while count < len(differ):  # what a later node needs row by row, an earlier one may have read
        count = len(differ)
        for node in graph.nodes:
            differ |= _differing(node, differ)
    lengths = {tensor.dim[0] for tensor in differ.values()}
    rows_of_one = 0 if 0 in lengths else max(lengths)
    for tensor in graph.outputs:
        if id(tensor) in differ and tensor.dim[0] != rows_of_one:
            raise NotImplementedError(f"tensor {tensor.label} has fewer rows than others")
    made = serial.changed(graph, lambda tensor: _said(tensor, size * rows_of_one) if id(tensor) in differ else {})
    inputs, outputs = (tuple(id(tensor) in differ for tensor in each) for each in (graph.inputs, graph.outputs))
    return Folded(made, rows_of_one, inputs, outputs)


def _differing(node: Node, differ: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """The tensors at a node's ports that differ between elements, as one of those that it reads does."""
    read = {port: tensor for port, tensor in node.inputs.items() if not tensor.is_pass_by_value}
    if not any(id(tensor) in differ for tensor in read.values()):
        return {}
    made: dict[int, Tensor] = {}
    rows, spread = _ports(node, read)
    for port, tensor in read.items():
        if port in rows or (port in spread and tensor.dim[0] != 1):
            if tensor.producer is not None and id(tensor) not in differ:
                raise NotImplementedError(f"{node.label}: {port} is computed once for all elements")
            made[id(tensor)] = tensor
        elif port not in spread and id(tensor) in differ:
            raise NotImplementedError(f"{node.label} reads {port} whole, which differs between elements")
    for port, tensor in node.outputs.items():
        if port not in _SUMS:
            made[id(tensor)] = tensor
        elif is_output(tensor):
            raise NotImplementedError(f"{node.label}: {port} is a sum over the rows of one element")
    return made


def _ports(node: Node, read: dict[str, Tensor]) -> tuple[frozenset[str], frozenset[str]]:
    """The ports that have rows, and those that may have them."""
    if node.type == "POINTWISE":
        ranks = {len(tensor.dim) for tensor in (*read.values(), *node.outputs.values())}
        if len(ranks) == 1 and node.operation.name != "gen_index":
            return frozenset(), frozenset(read)
    elif node.operation.name in _ROWS and all(_whole(node)):
        return _ROWS[node.operation.name], _SPREAD
    raise NotImplementedError(f"{node.label} is not computed row by row")


def _whole(node: Node) -> Iterator[bool]:
    """Whether what the node does along its axes leaves rows alone."""
    name = node.operation.name
    if name == "block_scale_quantize":
        yield quantised_axis(node) > 0
    if name == "block_scale_dequantize":
        yield blocks_of(node)[0] == 1
    if name.startswith("rope"):
        yield len(node.outputs["OUT_0"].dim) > 1
    for port in ("scale", "bias"):
        if port in node.inputs:
            yield node.inputs[port].dim[0] == 1


def _said(tensor: Tensor, rows: int) -> dict[str, tuple[int, ...]]:
    """What its user said of a tensor's dims and strides, with other rows."""
    dim = (rows, *tensor.dim[1:])
    made = {"dim": dim} if tensor._dim is not None else {}
    if tensor._stride is not None:
        made["stride"] = in_order(dim, memory_order(tensor.dim, tensor.stride))
    return made
