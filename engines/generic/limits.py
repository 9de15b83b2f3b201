"""Which nodes the generic reference runs, and why not the others. Loads no JAX.

Node types that name a family are run by that family's own reference engine, each node as a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cudnn_jax.engines import ids, manifest
from cudnn_jax.engines.base import DECLINES, BaseEngine
from cudnn_jax.engines.pointwise.engines import domain
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import Node, data_type
from cudnn_jax.graph.alone import Alone, alone

FLOATS = frozenset({data_type.FLOAT, data_type.HALF, data_type.BFLOAT16, data_type.DOUBLE})

FUNCTIONS = {
    "POINTWISE": "pointwise",
    "MATMUL": "matmul",
    "REDUCTION": "reduction",
    "GENSTATS": "genstats",
    "LAYER_NORM": "norm",
    "ADA_LAYER_NORM": "norm",
    "INSTANCE_NORM": "norm",
    "BATCH_NORM": "norm",
    "BATCH_NORM_INFERENCE": "norm_inference",
    "LAYER_NORM_BACKWARD": "norm_backward",
    "ADA_LAYER_NORM_BACKWARD": "norm_backward",
    "INSTANCE_NORM_BACKWARD": "norm_backward",
    "BATCH_NORM_BACKWARD": "norm_backward",
    "CONV_FPROP": "conv_fprop",
    "CONV_DGRAD": "conv_dgrad",
    "CONV_WGRAD": "conv_wgrad",
    "RESHAPE": "reshape",
    "SLICE": "slice_",
    "TRANSPOSE": "transpose",
    "CONCATENATE": "concatenate",
    "ROPE": "rope",
    "ROPE_BACKWARD": "rope_backward",
    "BLOCK_SCALE_DEQUANTIZE": "dequantize",
    "BLOCK_SCALE_QUANTIZE": "quantize",
    "MOE_GROUPED_MATMUL": "grouped_matmul",
    "MOE_GROUPED_MATMUL_BWD": "grouped_matmul_backward",
}
"""Node type -> the name of its function in `reference.FUNCTIONS`' modules."""

_QUANTISED = "the softmax is quantised as the backend's kernels do it, which no formula says"
BACKEND_ONLY = {
    "SDPA_FP8": _QUANTISED,
    "SDPA_FP8_BACKWARD": _QUANTISED,
    "SDPA_MXFP8": _QUANTISED,
    "SDPA_MXFP8_BACKWARD": _QUANTISED,
}
"""Node types whose meaning is the backend's own."""

_EXCHANGED = "sums are exchanged between devices in buffers of the backend's own layout"
_PORTS = {
    ("BLOCK_SCALE_QUANTIZE", "group_offset"): "scales within groups lie where the backend's layout has them",
    ("BATCH_NORM", "peer_stats[0]"): _EXCHANGED,
    ("BATCH_NORM_BACKWARD", "peer_stats[0]"): _EXCHANGED,
}
"""(node type, port) -> why a node with that port is the backend's."""

_PARAMS = {
    ("BLOCK_SCALE_DEQUANTIZE", "is_negative_scale"): "what a negative scale is, the backend alone says",
    ("MATMUL", "padding"): "it counts with override lengths, which this graph does not have",
}
"""(node type, parameter) -> why a node where it is set is the backend's."""

_QUANTISING = {data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1}
_SCALES = {data_type.FP8_E8M0, data_type.FP8_E4M3, data_type.FLOAT}


class Delegate(NamedTuple):
    """A node as a graph of its own, and the family's reference engine that runs it."""

    engine: BaseEngine
    family: manifest.EngineFamily
    alone: Alone


def delegate(node: Node) -> Delegate | None:
    """Who runs a node whose type names a family with a reference; None for other nodes."""
    for family in manifest.FAMILIES.values():
        for slot in family.slots:
            if node.type in family.anchors and slot.slot == ids.REFERENCE_SLOT:
                return Delegate(manifest.instantiate(family, slot), family, alone(node))
    return None


def reason(node: Node, compute: data_type, target: Target) -> str | None:
    """Why the node is not run here, or None."""
    if node.type in BACKEND_ONLY:
        return BACKEND_ONLY[node.type]
    for port in node.inputs:
        if (node.type, port) in _PORTS:
            return f"{port}: {_PORTS[node.type, port]}"
    defaults = node.operation.defaults
    for name, value in node.params.items():
        if (node.type, name) in _PARAMS and value != defaults[name]:
            return f"{name}: {_PARAMS[node.type, name]}"
    if node.type in FUNCTIONS:
        return _TYPE_RULES.get(node.type, _floating)(node, compute)
    other = delegate(node)
    if other is None:
        return f"no function of type {node.type}"
    try:
        other.engine.configs(other.alone.graph, manifest.facts_of(other.alone.graph, other.family), target)
    except DECLINES as error:
        return str(error)
    return None


def _floating(node: Node, compute: data_type) -> str | None:
    return None if compute in FLOATS else f"compute type {compute.value}, needs a floating type to compute in"


def _any_number(node: Node, compute: data_type) -> str | None:
    integer = not compute.is_floating and compute is not data_type.BOOLEAN
    return None if integer else _floating(node, compute)


def _moves(node: Node, compute: data_type) -> str | None:
    return None


def _quantises(node: Node, compute: data_type) -> str | None:
    for port, allowed in (("Y", _QUANTISING), ("scale", _SCALES)):
        kind = node.outputs[port].data_type
        if kind not in allowed:
            return f"{port} of type {kind.value}, one of {', '.join(sorted(each.value for each in allowed))}"
    return _floating(node, compute)


_TYPE_RULES: dict[str, Callable[[Node, data_type], str | None]] = {
    "POINTWISE": domain,
    "MATMUL": _any_number,
    "REDUCTION": _any_number,
    "BLOCK_SCALE_QUANTIZE": _quantises,
    **dict.fromkeys(("RESHAPE", "SLICE", "TRANSPOSE", "CONCATENATE"), _moves),
}
