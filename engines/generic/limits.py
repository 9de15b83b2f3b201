"""Which nodes the generic reference runs, and why not the others. Loads no JAX.

Node types that name a family are run by that family's own reference engine, each node as a graph of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any, NamedTuple

from cudnn_jax.engines import ids, manifest
from cudnn_jax.engines.base import DECLINES, BaseEngine
from cudnn_jax.engines.generic import block_scales
from cudnn_jax.engines.pointwise.engines import domain
from cudnn_jax.engines.sdpa import facts
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
    "SDPA_FP8": "attention_fp8",
    "SDPA_FP8_BACKWARD": "attention_fp8_backward",
    "SDPA_MXFP8": "attention_mxfp8",
    "SDPA_MXFP8_BACKWARD": "attention_mxfp8_backward",
}
"""Node type -> the name of its function in `reference.FUNCTIONS`' modules."""

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

_ATTENDED = frozenset(
    "attn_scale attn_scale_prefolded bias use_alibi_mask sink_token paged_attention_k_table paged_attention_v_table "
    "paged_attention_max_seq_len_kv seq_len_q seq_len_kv cu_seq_len_q cu_seq_len_kv use_padding_mask use_causal_mask "
    "use_causal_mask_bottom_right diagonal_alignment sliding_window left_bound right_bound diagonal_band_left_bound "
    "diagonal_band_right_bound generate_stats stats_use_log2 score_max score_sum_exp dSink_token "
    # How the backend gets there.
    "max_total_seq_len_q max_total_seq_len_kv implementation unfuse_fma softmax_precision "
    "use_deterministic_algorithm".split()
)
"""Optional ports, parameters and outputs of attention of float8 tensors that its reference has."""

_QUANTISING = {data_type.FP8_E4M3, data_type.FP8_E5M2, data_type.FP4_E2M1}
_FLOAT8 = {data_type.FP8_E4M3, data_type.FP8_E5M2}
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


def _attends_with_numbers(node: Node, compute: data_type) -> str | None:
    scales = {port: tensor.dim for port, tensor in node.inputs.items() if port.startswith("descale_")}
    several = (f"{port} of dims {dim}, serves one number" for port, dim in scales.items() if prod(dim) != 1)
    return next(several, None) or _attends(node, compute)


def _attends_in_blocks(node: Node, compute: data_type) -> str | None:
    return _attends(node, compute) or block_scales.reason(node)


def _attends(node: Node, compute: data_type) -> str | None:
    for port in ("q", "k", "v", "dO"):
        if port in node.inputs and (kind := node.inputs[port].data_type) not in _FLOAT8:
            return f"{port} of type {kind.value}, one of {', '.join(sorted(each.value for each in _FLOAT8))}"
    operation, wired = node.operation, {**node.inputs, **node.outputs}
    optional = [port.name for port in operation.inputs if port.optional]
    optional += [output.name for output in operation.outputs if output.from_caller]
    given: dict[str, Any] = {name: wired[name].dim for name in optional if name in wired}
    given |= {name: value for name, value in node.params.items() if value != operation.defaults[name]}
    lacking = ", ".join(f"{name} {value}" for name, value in given.items() if name not in _ATTENDED)
    if lacking:
        return f"{lacking}: serves none"
    return next(facts.without_formula(node, facts.length_of_keys(node)), None) or _floating(node, compute)


_TYPE_RULES: dict[str, Callable[[Node, data_type], str | None]] = {
    "POINTWISE": domain,
    "MATMUL": _any_number,
    "REDUCTION": _any_number,
    "BLOCK_SCALE_QUANTIZE": _quantises,
    "SDPA_FP8": _attends_with_numbers,
    "SDPA_FP8_BACKWARD": _attends_with_numbers,
    "SDPA_MXFP8": _attends_in_blocks,
    "SDPA_MXFP8_BACKWARD": _attends_in_blocks,
    **dict.fromkeys(("RESHAPE", "SLICE", "TRANSPOSE", "CONCATENATE"), _moves),
}
