"""Scaled dot-product attention: `cudnn_jax.sdpa`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

from cudnn_jax.engines.manifest import FAMILIES
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import Tensor, data_type
from cudnn_jax.graph.errors import shown
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._primitive import Avals, BuiltGraph, Operation, match_manual_axes, register
from cudnn_jax.ops._sharding import BATCH, HEADS, Axes

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)
_QKV_RULE = "query (B, T, N, D), key (B, S, NK, D), value (B, S, NK, DV)"
_SCORES_RULE = "4-D and broadcastable to (B, N, T, S), heads counted as query heads"


@dataclass(frozen=True)
class SdpaConfig:
    """Everything about a call that is known while tracing."""

    scale: float
    alignment: str
    left: int | None
    right: int | None
    deterministic: bool
    implementation: str | None
    stats: bool = False
    gradients: frozenset[str] = frozenset()


def sdpa(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    causal_alignment: str = "top_left",
    local_window_size: int | tuple[int | None, int | None] | None = None,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    cu_seqlens_q: Any = None,
    cu_seqlens_kv: Any = None,
    page_table_k: Any = None,
    page_table_v: Any = None,
    sinks: Any = None,
    logits_soft_cap: float | None = None,
    dropout_rate: float = 0.0,
    dropout_key: Any = None,
    deterministic: bool = False,
    return_residual: bool = False,
    implementation: str | None = None,
) -> Any:
    """Scaled dot-product attention, softmax(scale * query key^T + bias, masked) value, softmax in float32.

    Names follow `jax.nn.dot_product_attention`, so that one can stand for the other. B is the batch, T and S the query
    and key-value lengths, N the query heads, NK the key-value heads (N is a multiple of NK; query head n reads
    key-value head n // (N / NK)), D and DV the head dims.

    Args:
      query: (B, T, N, D) or (T, N, D); bfloat16, float16 or float32.
      key: (B, S, NK, D) or (S, NK, D), query's dtype.
      value: (B, S, NK, DV) or (S, NK, DV), query's dtype.
      bias: 4-D, broadcastable to (B, N, T, S), floating; added to the scaled logits. Its gradient is summed over the
        broadcast axes.
      mask: 4-D boolean, broadcastable to (B, N, T, S); True keeps.
      scale: multiplies the logits; D**-0.5 by default.
      is_causal: row i attends to keys j <= i (top_left), or j <= i + S_b - T_b (bottom_right) with the true lengths of
        batch b.
      causal_alignment: "top_left" or "bottom_right"; local windows follow it too.
      local_window_size: w or (left, right): i - left <= j <= i + right; None or -1 leaves a side unbounded.
      query_seq_lengths, key_value_seq_lengths: int32 (B,), true lengths, clipped to 0 and T or S; rows past one
        give 0 and take no gradient.
      deterministic: the same bits on every run.
      return_residual: also return the logsumexp of the masked logits, float32 (B, T, N), natural logarithm.
      implementation: None for the ranked plan list; "cudnn", "xla", or the name of an engine or plan.
      cu_seqlens_q, cu_seqlens_kv, page_table_k, page_table_v, sinks, logits_soft_cap, dropout_rate, dropout_key: not
        served by this release.

    Returns:
      (B, T, N, DV) in query's dtype, or that and the residual. A row with nothing to attend to gives 0, residual -inf
      and gradients 0.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: an option that this release does not serve, or a derivative that is not reverse mode.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    _refuse_unserved(
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_kv=cu_seqlens_kv,
        page_table_k=page_table_k,
        page_table_v=page_table_v,
        sinks=sinks,
        logits_soft_cap=logits_soft_cap,
        dropout_rate=dropout_rate or None,
        dropout_key=dropout_key,
    )
    query, key, value = _check_qkv(query, key, value)
    unbatched = query.ndim == 3
    if unbatched:
        query, key, value = query[None], key[None], value[None]
    operands = {"query": query, "key": key, "value": value}
    operands |= _check_scores(operands, bias, mask)
    operands |= _check_lengths(operands, query_seq_lengths, key_value_seq_lengths)
    left, right = _check_window(
        local_window_size, check.flag("is_causal", is_causal), operands["query"].shape[1] + operands["key"].shape[1]
    )
    config = SdpaConfig(
        scale=query.shape[-1] ** -0.5 if scale is None else check.static_number("scale", scale),
        alignment=_check_alignment(causal_alignment),
        left=left,
        right=right,
        deterministic=check.flag("deterministic", deterministic),
        implementation=check.implementation(implementation, FAMILIES["sdpa_fwd"], "sdpa"),
        stats=check.flag("return_residual", return_residual),
    )
    out, lse = _attend(config, match_manual_axes(operands))
    if unbatched:
        out, lse = out[0], lse if lse is None else lse[0]
    return (out, jnp.swapaxes(lse, -1, -2)) if return_residual else out


# Arguments


def _refuse_unserved(**options: Any) -> None:
    for name, value in options.items():
        if value is not None:
            raise NotImplementedError(f"sdpa: the option {name} is not served by this release")


def _check_qkv(query: Any, key: Any, value: Any) -> tuple[Any, Any, Any]:
    query = check.array("query", query, rank=(3, 4), layout="(B, T, N, D) or (T, N, D)")
    key = check.array("key", key, rank=(query.ndim,), layout=f"query's rank {query.ndim}: {_QKV_RULE}")
    value = check.array("value", value, rank=(query.ndim,), layout=f"query's rank {query.ndim}: {_QKV_RULE}")
    check.dtype("query", query, _DTYPES)
    check.dtype("key", key, (query.dtype,), f"query's dtype {query.dtype}")
    check.dtype("value", value, (query.dtype,), f"query's dtype {query.dtype}")
    lead = query.shape[:-3]
    length, kv_heads = key.shape[-3], key.shape[-2]
    check.shape("key", key, (*lead, None, None, query.shape[-1]), _QKV_RULE)
    check.shape("value", value, (*lead, length, kv_heads, None), _QKV_RULE)
    for name, array in (("query", query), ("key", key), ("value", value)):
        if 0 in array.shape[-2:]:
            raise ValueError(f"{name} has shape {array.shape}; the rule: at least one head and one head dim")
    if query.shape[-2] % kv_heads:
        raise ValueError(
            f"query has {query.shape[-2]} heads and key {kv_heads}; the rule: query heads are a multiple of key heads"
        )
    return query, key, value


def _check_scores(operands: Mapping[str, Any], bias: Any, mask: Any) -> dict[str, Any]:
    query, key = operands["query"], operands["key"]
    full = (query.shape[0], query.shape[2], query.shape[1], key.shape[1])
    checked = {}
    for name, given in (("bias", bias), ("mask", mask)):
        if given is not None:
            checked[name] = check.array(name, given, rank=(4,), layout=_SCORES_RULE)
            check.broadcastable(name, checked[name], full, _SCORES_RULE)
    if bias is not None:
        check.dtype("bias", checked["bias"], _DTYPES)
    if mask is not None:
        check.dtype("mask", checked["mask"], (jnp.bool_,), "boolean, True keeps (a floating mask is a bias)")
    return checked


def _check_lengths(operands: Mapping[str, Any], query_lengths: Any, kv_lengths: Any) -> dict[str, Any]:
    if query_lengths is None and kv_lengths is None:
        return {}
    batch = operands["query"].shape[0]
    checked = {}
    for name, argument, given, longest in (
        ("query_lengths", "query_seq_lengths", query_lengths, operands["query"].shape[1]),
        ("key_value_lengths", "key_value_seq_lengths", kv_lengths, operands["key"].shape[1]),
    ):
        if given is None:
            checked[name] = jnp.full((batch,), longest, jnp.int32)
            continue
        lengths = check.array(argument, given, rank=(1,), layout="(B,)")
        if not jnp.issubdtype(lengths.dtype, jnp.integer):
            raise TypeError(f"{argument} has dtype {lengths.dtype}; the rule: int32 (B,)")
        check.shape(argument, lengths, (batch,), "one length for each batch, (B,)")
        checked[name] = jnp.clip(lengths.astype(jnp.int32), 0, longest)
    return checked


def _check_window(window: Any, is_causal: bool, longest: int) -> tuple[int | None, int | None]:
    """(left, right); a side that reaches past `longest`, all that there is in either alignment, is unbounded."""
    rule = "an int w, or (left, right), each at least 0, with None or -1 for unbounded"
    sides = (window, window) if window is None or not isinstance(window, tuple | list) else tuple(window)
    if len(sides) != 2 or any(
        side is not None and (isinstance(side, bool) or not hasattr(side, "__index__") or side < -1) for side in sides
    ):
        raise ValueError(f"local_window_size is {shown(window)}; the rule: {rule}")
    left, right = (None if side is None or not -1 < side < longest else int(side) for side in sides)
    return left, 0 if is_causal else right


def _check_alignment(alignment: str) -> str:
    if alignment not in ("top_left", "bottom_right"):
        raise ValueError(f"causal_alignment is {alignment!r}; the rule: 'top_left' or 'bottom_right'")
    return alignment


# Derivative


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Perturbed:
    """Which operands are differentiated."""

    names: frozenset[str]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(config: SdpaConfig, operands: Mapping[str, jax.Array]) -> tuple[jax.Array, jax.Array | None]:
    out = FORWARD.bind(config, operands)
    return out["out"], out.get("lse")


def _attend_fwd(config: SdpaConfig, primals: Mapping[str, Any]) -> tuple[Any, Any]:
    operands = {name: primal.value for name, primal in primals.items()}
    perturbed = _Perturbed(frozenset(name for name, primal in primals.items() if primal.perturbed))
    made = FORWARD.bind(_replace(config, stats=True), operands)
    out = checkpoint_name(made["out"], "cudnn_jax.sdpa.out")
    lse = checkpoint_name(made["lse"], "cudnn_jax.sdpa.lse")
    return (out, lse if config.stats else None), (operands, out, lse, perturbed)


def _attend_bwd(config: SdpaConfig, residuals: Any, cotangents: Any) -> tuple[dict[str, Any]]:
    operands, out, lse, perturbed = residuals
    d_out, d_lse = cotangents
    if isinstance(d_out, SymbolicZero):
        d_out = jnp.zeros_like(out)
    operands = {**operands, "out": out, "lse": lse, "d_out": d_out}
    if d_lse is not None and not isinstance(d_lse, SymbolicZero):
        operands["d_lse"] = d_lse
    wanted = frozenset({"d_bias"}) if "bias" in perturbed.names else frozenset()
    made = BACKWARD.bind(_replace(config, stats=True, gradients=wanted), match_manual_axes(operands))
    return ({name: made.get(f"d_{name}") for name in residuals[0]},)


_attend.defvjp(_attend_fwd, _attend_bwd, symbolic_zeros=True)


def _replace(config: SdpaConfig, **changes: Any) -> SdpaConfig:
    return SdpaConfig(**{**config.__dict__, **changes})


# Graphs


def _heads_layout(shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(dim, stride) of an array (B, T, N, D) in memory, as cuDNN's (B, N, T, D)."""
    b, t, n, d = shape
    return (b, n, t, d), (max(t, 1) * n * d, d, n * d, 1)


def _heads_tensor(graph: pygraph, name: str, aval: Any) -> Tensor:
    dim, stride = _heads_layout(aval.shape)
    return graph.tensor(dim=dim, stride=stride, data_type=data_type.of(aval.dtype), name=name)


def _made(tensor: Tensor, dim: tuple[int, ...], stride: tuple[int, ...] | None = None) -> Tensor:
    """A result with the layout that the caller's buffer has, whatever a backend would infer."""
    return tensor.set_output(True).set_dim(dim).set_stride(stride or _row_major(dim))


def _row_major(dim: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for extent in reversed(dim[1:]):
        strides.append(strides[-1] * max(extent, 1))
    return tuple(reversed(strides))


def _plain_tensor(graph: pygraph, name: str, aval: Any) -> Tensor:
    """Row-major, with axes of 1 appended up to rank 4."""
    dim = (*aval.shape, *(1,) * (4 - len(aval.shape)))
    return graph.tensor(dim=dim, data_type=data_type.of(aval.dtype), name=name)


_TENSORS = {
    "query": ("q", _heads_tensor),
    "key": ("k", _heads_tensor),
    "value": ("v", _heads_tensor),
    "bias": ("bias", _plain_tensor),
    "mask": ("mask", _plain_tensor),
    "query_lengths": ("seq_len_q", _plain_tensor),
    "key_value_lengths": ("seq_len_kv", _plain_tensor),
    "out": ("o", _heads_tensor),
    "lse": ("stats", _plain_tensor),
    "d_out": ("dO", _heads_tensor),
    "d_lse": ("dStats", _plain_tensor),
}


def _start(config: SdpaConfig, avals: Avals) -> tuple[pygraph, dict[str, Tensor], dict[str, Any]]:
    """A graph with the operands' tensors, and the keywords that both directions share."""
    graph = pygraph(io_data_type=data_type.of(avals["query"].dtype))
    tensors = {name: _TENSORS[name][1](graph, _TENSORS[name][0], aval) for name, aval in avals.items()}
    ports: dict[str, Any] = {_TENSORS[name][0]: tensor for name, tensor in tensors.items()}
    if "mask" in ports:
        kept = ports.get("bias")
        dtype = kept.data_type if kept is not None else data_type.FLOAT
        ports["bias"] = graph.binary_select(
            kept if kept is not None else graph.scalar(0.0, dtype),
            graph.scalar(float("-inf"), dtype),
            ports.pop("mask"),
        )
    ports["attn_scale"] = config.scale
    if "query_lengths" in avals:
        ports["use_padding_mask"] = True
    if config.left is not None:
        # cuDNN's left bound is exclusive: key j is kept while j > i - bound.
        ports["diagonal_band_left_bound"] = config.left + 1
    if config.right is not None:
        ports["diagonal_band_right_bound"] = config.right
    if config.left is not None or config.right is not None:
        ports["diagonal_alignment"] = config.alignment.upper()
    return graph, tensors, ports


def _build_forward(config: SdpaConfig, avals: Avals) -> BuiltGraph:
    graph, tensors, ports = _start(config, avals)
    out, stats = graph.sdpa(**ports, generate_stats=config.stats)
    b, t, n, _ = avals["query"].shape
    results = {"out": _made(out, *_heads_layout((b, t, n, avals["value"].shape[3])))}
    if config.stats:
        results["lse"] = _made(stats, (b, n, t, 1)).set_data_type(data_type.FLOAT)
    return BuiltGraph(graph, tensors, results)


def _build_backward(config: SdpaConfig, avals: Avals) -> BuiltGraph:
    graph, tensors, ports = _start(config, avals)
    if "d_bias" in config.gradients:
        bias = tensors["bias"]
        ports["dBias"] = graph.tensor(dim=bias.dim, stride=bias.stride, data_type=bias.data_type, name="dBias")
    d_query, d_key, d_value = graph.sdpa_backward(**ports, use_deterministic_algorithm=config.deterministic)
    results = {
        f"d_{name}": _made(tensor, tensors[name].dim, tensors[name].stride)
        for name, tensor in (("query", d_query), ("key", d_key), ("value", d_value))
    }
    if "d_bias" in config.gradients:
        results["d_bias"] = ports["dBias"].set_output(True)
    return BuiltGraph(graph, tensors, results)


def _forward_results(config: SdpaConfig, avals: Avals) -> dict[str, jax.ShapeDtypeStruct]:
    b, t, n, _ = avals["query"].shape
    results = {"out": jax.ShapeDtypeStruct((b, t, n, avals["value"].shape[-1]), avals["query"].dtype)}
    if config.stats:
        results["lse"] = jax.ShapeDtypeStruct((b, n, t), jnp.float32)
    return results


def _backward_results(config: SdpaConfig, avals: Avals) -> dict[str, jax.ShapeDtypeStruct]:
    wanted = ["query", "key", "value"] + (["bias"] if "d_bias" in config.gradients else [])
    return {f"d_{name}": jax.ShapeDtypeStruct(avals[name].shape, avals[name].dtype) for name in wanted}


_ROWS = (BATCH, None, HEADS, None)
_AXES = {
    **dict.fromkeys(("query", "key", "value", "out", "d_out", "d_query", "d_key", "d_value"), _ROWS),
    **dict.fromkeys(("bias", "mask", "d_bias"), (BATCH, HEADS, None, None)),
    **dict.fromkeys(("lse", "d_lse"), (BATCH, HEADS, None)),
    **dict.fromkeys(("query_lengths", "key_value_lengths"), (BATCH,)),
}


def _axes(config: SdpaConfig, avals: Avals) -> Axes:
    return _AXES


_OF_BACKWARD = frozenset({"out", "lse", "d_out", "d_lse"})


def _sample(config: SdpaConfig, avals: Avals, arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Full lengths, and in the backward what the forward makes of the other operands."""
    full = {"query_lengths": avals["query"].shape[1], "key_value_lengths": avals["key"].shape[1]}
    made = {name: jnp.full(avals[name].shape, full[name], jnp.int32) for name in full if name in avals}
    if "lse" in avals:
        given = {name: array for name, array in {**made, **arrays}.items() if name not in _OF_BACKWARD}
        made |= FORWARD.bind(_replace(config, stats=True, gradients=frozenset(), implementation="xla"), given)
    return made


FORWARD = register(
    Operation(
        name="sdpa_fwd",
        build=_build_forward,
        results=_forward_results,
        lead="query",
        broadcast=frozenset({"bias", "mask"}),
        axes=_axes,
        sample=_sample,
    )
)
BACKWARD = register(
    Operation(
        name="sdpa_bwd",
        build=_build_backward,
        results=_backward_results,
        lead="query",
        broadcast=frozenset({"bias", "mask"}),
        gradients={f"d_{name}": name for name in ("query", "key", "value", "bias")},
        axes=_axes,
        sample=_sample,
    )
)
