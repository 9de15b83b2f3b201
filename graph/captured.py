"""The captured table: attention, whose many keywords are tensors, plain values, and outputs the caller makes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
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
    from cudnn_jax.graph.transposed import Term, Transposed


def _stats_wanted(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return bool(params["generate_stats"])


def _settle_stats(params: dict[str, Any]) -> None:
    """`is_inference` is a second spelling of `generate_stats`; the node keeps the latter alone."""
    inference, stats = params.pop("is_inference", None), params["generate_stats"]
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
    probability = node.params.get("dropout")
    if probability is not None and not 0 <= probability < 1:
        refuse(node, "dropout", f"has probability {probability}", "0 <= probability < 1")


def _padding(node: Node, symbols: Symbols) -> None:
    given = [port for port in node.inputs if port.startswith(("seq_len_", "cu_seq_len_"))]
    if given and not node.params["use_padding_mask"]:
        refuse(node, given[0], "came with use_padding_mask False", "lengths need use_padding_mask=True")
    for side in ("q", "kv"):
        if {f"seq_len_{side}", f"cu_seq_len_{side}"} <= set(given):
            refuse(node, f"cu_seq_len_{side}", f"came with seq_len_{side}", "one of the two")
    if node.params["use_padding_mask"] and {port.rpartition("_")[2] for port in given} != {"q", "kv"}:
        came = f"is True with {', '.join(given) or 'no lengths'}"
        refuse(node, "use_padding_mask", came, "it needs seq_len_q and seq_len_kv")


_BOUND_NAMES = (
    ("sliding_window_length", "diagonal_band_left_bound", "diagonal_band_right_bound"),
    ("sliding_window", "left_bound", "right_bound"),
)


def _bounds(node: Node, symbols: Symbols) -> None:
    params = node.params
    for one, other, rule in (
        *((window, left, "they are one bound, give one") for window, left, _ in _BOUND_NAMES),
        ("use_causal_mask", "use_causal_mask_bottom_right", "one alignment at a time"),
    ):
        if params.get(one) not in (None, False) and params.get(other) not in (None, False):
            refuse(node, one, f"came with {other}", rule)
    for name in chain(*_BOUND_NAMES):
        if params.get(name) is not None and params[name] < 0:
            refuse(node, name, f"is {params[name]}", "at least 0")


def _gradients_of_ports(node: Node, symbols: Symbols) -> None:
    for port, gradient in _OWN_GRADIENTS.items():
        if gradient in node.outputs and port not in node.inputs:
            refuse(node, gradient, f"came without {port}", f"it is the gradient of {port}")


def _derivative(d: Transposed) -> Mapping[str, Term | None]:
    """By `sdpa_backward`: of O and of Stats."""
    for port in d.node.outputs:
        if port not in ("O", "Stats") and d.cotangent(port) is not None:
            d.refuse(f"none of {port}")
    ports = {"o": d["O"], "stats": d["Stats"], "dO": d.full("O").typed(d.node.outputs["O"].data_type)}
    if d.cotangent("Stats") is not None:
        ports["dStats"] = d.full("Stats").typed(data_type.FLOAT)
    if d.node.params["stats_use_log2"]:  # the backward takes natural logarithms
        scales = {"stats": math.log(2), "dStats": math.log2(math.e)}
        ports |= {port: (ports[port] * scale).typed(data_type.FLOAT) for port, scale in scales.items() if port in ports}
    own = {port: gradient for port, gradient in _OWN_GRADIENTS.items() if port in d.wanted}
    tensors = {
        gradient: d.graph.tensor(x.dim, x.stride, x.data_type, is_virtual=True)
        for port, gradient in own.items()
        for x in (d.node.inputs[port],)
    }
    made = d.backward_node("sdpa_backward", ports, ("generate_stats", "stats_use_log2"), tensors)
    return {port: made[gradient] for port, gradient in (own | {"q": "dQ", "k": "dK", "v": "dV"}).items()}


_OWN_GRADIENTS = {"bias": "dBias", "sink_token": "dSink_token"}
"""Input port -> its gradient, which the caller makes."""

_RULES = (at_least_one("N", "NK", "D", "DV"), multiple("N", "NK"), _padding, _bounds, _dropout)


def _attention(
    name: str,
    summary: str,
    made: tuple[Output, ...],
    keywords: str,
    own: str,
    hidden: str,
    optional: str = "",
    **more: Any,
) -> Operation:
    """An entry: `keywords` in the surface's order, its `own` keyword-only ones, and ports without a keyword."""
    names = [*keywords.split(), *own.split()]
    ports = [PORTS[port] for port in (*names, *hidden.split()) if port in PORTS]
    return Operation(
        name=name,
        type=name.upper(),
        summary=summary,
        inputs=tuple(port._replace(optional=True) if port.name in optional.split() else port for port in ports),
        outputs=(*made, *(GIVEN[output] for output in names if output in GIVEN)),
        attributes=tuple(ATTRIBUTES[attribute] for attribute in names if attribute in ATTRIBUTES),
        keywords=tuple(keywords.split()),
        keyword_only=tuple(own.split()),
        expand=MappingProxyType({"dropout": _expand_dropout} if "dropout" in names else {}),
        **more,
    )


_O = Output("O", "(B, N, T, DV), in q's memory order.", dense("B N T DV", like="q"))
_STATS = Output(
    "Stats", "Logsumexp of each row, (B, N, T, 1), float32.", dense("B N T 1"), _stats_wanted, data_type.FLOAT
)
_GRADIENTS = tuple(
    Output(f"d{port.upper()}", f"Gradient of {port}, laid out as {port}.", same_as(port)) for port in "qkv"
)
_SEEDED = "seed offset dropout_mask dropout_scale"
_OWN_PRECISION = "softmax_precision attn_scale_prefolded"


def _largest(*names: str) -> tuple[Output, ...]:
    """Outputs that help to choose the next scales."""
    return tuple(
        Output(
            name,
            f"The largest magnitude of {name.partition('_')[2]}, (1, 1, 1, 1), float32.",
            dense("1 1 1 1"),
            type=data_type.FLOAT,
        )
        for name in names
    )


SDPA = _attention(
    "sdpa",
    "Scaled dot-product attention: O = softmax(attn_scale * q k^T + bias, masked) v, softmax in float32.",
    (_O, _STATS),
    "q k v is_inference attn_scale bias block_mask use_alibi_mask use_padding_mask seq_len_q seq_len_kv "
    "use_causal_mask use_causal_mask_bottom_right sliding_window_length diagonal_alignment "
    "diagonal_band_left_bound diagonal_band_right_bound dropout rng_dump paged_attention_k_table "
    "paged_attention_v_table paged_attention_max_seq_len_kv max_total_seq_len_q max_total_seq_len_kv "
    "compute_data_type name score_mod generate_stats implementation score_max score_sum_exp sink_token "
    "unfuse_fma cu_seq_len_q cu_seq_len_kv stats_use_log2",
    f"kv_mask {_OWN_PRECISION}",
    _SEEDED,
    settle=_settle_stats,
    rules=_RULES,
    derivative=_derivative,
    differentiated=MappingProxyType({"generate_stats": True}),
)

SDPA_BACKWARD = _attention(
    "sdpa_backward",
    "The gradients of `sdpa`.",
    _GRADIENTS,
    "q k v o dO stats attn_scale bias dBias use_alibi_mask use_padding_mask seq_len_q seq_len_kv "
    "max_total_seq_len_q max_total_seq_len_kv use_causal_mask use_causal_mask_bottom_right "
    "sliding_window_length diagonal_alignment diagonal_band_left_bound diagonal_band_right_bound dropout "
    "rng_dump use_deterministic_algorithm compute_data_type name score_mod score_mod_bprop sink_token "
    "dSink_token",
    f"dStats {_OWN_PRECISION}",
    f"{_SEEDED} dropout_scale_inv",
    rules=(*_RULES, _gradients_of_ports),
)

SDPA_FP8 = _attention(
    "sdpa_fp8",
    "`sdpa` of float8 tensors, each with one scale; the softmax is quantised too.",
    (_O, _STATS, *_largest("Amax_S", "Amax_O")),
    "q k v descale_q descale_k descale_v descale_s scale_s scale_o is_inference attn_scale bias use_alibi_mask "
    "use_padding_mask seq_len_q seq_len_kv use_causal_mask use_causal_mask_bottom_right sliding_window "
    "diagonal_alignment left_bound right_bound dropout rng_dump paged_attention_k_table paged_attention_v_table "
    "paged_attention_max_seq_len_kv max_total_seq_len_q max_total_seq_len_kv compute_data_type name fn "
    "generate_stats score_max score_sum_exp sink_token unfuse_fma implementation cu_seq_len_q cu_seq_len_kv "
    "stats_use_log2",
    f"{_OWN_PRECISION} sf_o",
    _SEEDED,
    settle=_settle_stats,
    rules=_RULES,
)

SDPA_FP8_BACKWARD = _attention(
    "sdpa_fp8_backward",
    "The gradients of `sdpa_fp8`.",
    (*_GRADIENTS, *_largest("amax_dQ", "amax_dK", "amax_dV", "amax_dP")),
    "q k v o dO stats descale_q descale_k descale_v descale_o descale_dO descale_s descale_dP scale_s scale_dQ "
    "scale_dK scale_dV scale_dP attn_scale use_padding_mask seq_len_q seq_len_kv use_causal_mask "
    "use_causal_mask_bottom_right diagonal_alignment left_bound right_bound use_deterministic_algorithm dropout "
    "compute_data_type name sink_token dSink_token max_total_seq_len_q max_total_seq_len_kv",
    _OWN_PRECISION,
    f"{_SEEDED} dropout_scale_inv",
    rules=(*_RULES, _gradients_of_ports),
)

SDPA_MXFP8 = _attention(
    "sdpa_mxfp8",
    "`sdpa` of float8 tensors with a scale for each block of 32.",
    (_O, _STATS, *_largest("Amax_O")),
    "q k v descale_q descale_k descale_v attn_scale use_causal_mask use_causal_mask_bottom_right "
    "diagonal_alignment diagonal_band_left_bound diagonal_band_right_bound compute_data_type name generate_stats "
    "sink_token unfuse_fma implementation use_padding_mask seq_len_q seq_len_kv max_total_seq_len_q "
    "max_total_seq_len_kv cu_seq_len_q cu_seq_len_kv paged_attention_k_table paged_attention_v_table "
    "paged_attention_max_seq_len_kv",
    f"scale_o {_OWN_PRECISION} sf_o",
    "",
    optional="scale_o",
    settle=_settle_stats,
    rules=_RULES,
)

SDPA_MXFP8_BACKWARD = _attention(
    "sdpa_mxfp8_backward",
    "The gradients of `sdpa_mxfp8`.",
    (*_GRADIENTS, *_largest("amax_dQ", "amax_dK", "amax_dV")),
    "q q_T k k_T v o_f16 dO_f16 dO dO_T stats descale_q descale_q_T descale_k descale_k_T descale_v descale_dO "
    "descale_dO_T attn_scale use_padding_mask seq_len_q seq_len_kv use_causal_mask use_causal_mask_bottom_right "
    "diagonal_alignment left_bound right_bound use_deterministic_algorithm dropout compute_data_type name "
    "sink_token dSink_token max_total_seq_len_q max_total_seq_len_kv",
    _OWN_PRECISION,
    f"{_SEEDED} dropout_scale_inv",
    rules=(*_RULES, _gradients_of_ports),
)

CAPTURED = {
    operation.name: operation
    for operation in (SDPA, SDPA_BACKWARD, SDPA_FP8, SDPA_FP8_BACKWARD, SDPA_MXFP8, SDPA_MXFP8_BACKWARD)
}
