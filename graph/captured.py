"""The captured table: attention, whose many keywords are tensors, plain values, and outputs the caller makes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph.attention import ATTRIBUTES, GIVEN, PORTS
from cudnn_jax.graph.errors import GraphValidationError
from cudnn_jax.graph.operation import Operation, Output, Symbols
from cudnn_jax.graph.shapes import at_least_one, dense, multiple, refuse, same_as
from cudnn_jax.graph.tensor import Tensor
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node


def _stats_wanted(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return bool(params["generate_stats"])


def _settle_stats(params: dict[str, Any]) -> None:
    """`is_inference` is a second spelling of `generate_stats`; the node keeps the latter alone."""
    inference, stats = params.pop("is_inference"), params["generate_stats"]
    if inference is not None and inference == stats:
        raise GraphValidationError(
            f"is_inference is {inference} and generate_stats is {stats}; the rule: they are opposites"
        )
    params["generate_stats"] = bool(stats) if inference is None else not inference


def _expand_dropout(value: Any) -> Mapping[str, Any]:
    parts = tuple(value) if isinstance(value, tuple | list) else ()
    if len(parts) == 3 and not isinstance(parts[0], Tensor):
        return dict(zip(("dropout", "seed", "offset"), parts, strict=True))
    if len(parts) in (2, 3):
        return dict(zip(("dropout_mask", "dropout_scale", "dropout_scale_inv"), parts, strict=False))
    raise GraphValidationError(
        f"dropout is {value!r}; the rule: (probability, seed, offset), or (mask, scale) as tensors"
    )


def _dropout(node: Node, symbols: Symbols) -> None:
    probability = node.params["dropout"]
    if probability is not None and not 0 <= probability < 1:
        refuse(node, "dropout", f"has probability {probability}", "0 <= probability < 1")


def _padding(node: Node, symbols: Symbols) -> None:
    given = [port for port in node.inputs if port.startswith(("seq_len_", "cu_seq_len_"))]
    if given and not node.params["use_padding_mask"]:
        refuse(node, given[0], "came with use_padding_mask False", "lengths need use_padding_mask=True")
    if node.params["use_padding_mask"] and {port.rpartition("_")[2] for port in given} != {"q", "kv"}:
        came = f"is True with {', '.join(given) or 'no lengths'}"
        refuse(node, "use_padding_mask", came, "it needs seq_len_q and seq_len_kv")


def _bounds(node: Node, symbols: Symbols) -> None:
    params = node.params
    for one, other, rule in (
        ("sliding_window_length", "diagonal_band_left_bound", "they are one bound, give one"),
        ("use_causal_mask", "use_causal_mask_bottom_right", "one alignment at a time"),
    ):
        if params[one] not in (None, False) and params[other] not in (None, False):
            refuse(node, one, f"came with {other}", rule)
    for name in ("sliding_window_length", "diagonal_band_left_bound", "diagonal_band_right_bound"):
        if params[name] is not None and params[name] < 0:
            refuse(node, name, f"is {params[name]}", "at least 0")


def _gradients_of_ports(node: Node, symbols: Symbols) -> None:
    for gradient, port in (("dBias", "bias"), ("dSink_token", "sink_token")):
        if gradient in node.outputs and port not in node.inputs:
            refuse(node, gradient, f"came without {port}", f"it is the gradient of {port}")


_RULES = (at_least_one("N", "NK", "D", "DV"), multiple("N", "NK"), _padding, _bounds, _dropout)


def _attention(
    name: str, summary: str, made: tuple[Output, ...], keywords: str, own: str, hidden: str, **more: Any
) -> Operation:
    """An entry: `keywords` in the surface's order, its `own` keyword-only ones, and ports without a keyword."""
    names = [*keywords.split(), *own.split()]
    return Operation(
        name=name,
        type=name.upper(),
        summary=summary,
        inputs=tuple(PORTS[port] for port in (*names, *hidden.split()) if port in PORTS),
        outputs=(*made, *(GIVEN[output] for output in names if output in GIVEN)),
        attributes=tuple(ATTRIBUTES[attribute] for attribute in names if attribute in ATTRIBUTES),
        keywords=tuple(keywords.split()),
        keyword_only=tuple(own.split()),
        expand=MappingProxyType({"dropout": _expand_dropout}),
        **more,
    )


SDPA = _attention(
    "sdpa",
    "Scaled dot-product attention: O = softmax(attn_scale * q k^T + bias, masked) v, softmax in float32.",
    (
        Output("O", "(B, N, T, DV), in q's memory order.", dense("B N T DV", like="q")),
        Output(
            "Stats",
            "Logsumexp of each row, (B, N, T, 1), float32.",
            dense("B N T 1"),
            _stats_wanted,
            data_type.FLOAT,
        ),
    ),
    "q k v is_inference attn_scale bias block_mask use_alibi_mask use_padding_mask seq_len_q seq_len_kv "
    "use_causal_mask use_causal_mask_bottom_right sliding_window_length diagonal_alignment "
    "diagonal_band_left_bound diagonal_band_right_bound dropout rng_dump paged_attention_k_table "
    "paged_attention_v_table paged_attention_max_seq_len_kv max_total_seq_len_q max_total_seq_len_kv "
    "compute_data_type name score_mod generate_stats implementation score_max score_sum_exp sink_token "
    "unfuse_fma cu_seq_len_q cu_seq_len_kv stats_use_log2",
    "kv_mask softmax_precision attn_scale_prefolded",
    "seed offset dropout_mask dropout_scale",
    settle=_settle_stats,
    rules=_RULES,
)

SDPA_BACKWARD = _attention(
    "sdpa_backward",
    "The gradients of `sdpa`.",
    (
        Output("dQ", "Gradient of q, laid out as q.", same_as("q")),
        Output("dK", "Gradient of k, laid out as k.", same_as("k")),
        Output("dV", "Gradient of v, laid out as v.", same_as("v")),
    ),
    "q k v o dO stats attn_scale bias dBias use_alibi_mask use_padding_mask seq_len_q seq_len_kv "
    "max_total_seq_len_q max_total_seq_len_kv use_causal_mask use_causal_mask_bottom_right "
    "sliding_window_length diagonal_alignment diagonal_band_left_bound diagonal_band_right_bound dropout "
    "rng_dump use_deterministic_algorithm compute_data_type name score_mod score_mod_bprop sink_token "
    "dSink_token",
    "dStats softmax_precision attn_scale_prefolded",
    "seed offset dropout_mask dropout_scale dropout_scale_inv",
    rules=(*_RULES, _gradients_of_ports),
)

CAPTURED = {operation.name: operation for operation in (SDPA, SDPA_BACKWARD)}
