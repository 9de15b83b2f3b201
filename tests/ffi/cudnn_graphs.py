"""Graphs for the cuDNN tests."""

from __future__ import annotations

from typing import Any

from cudnn_jax.graph import Tensor, data_type, pygraph

Dims = tuple[int, ...]


def row_major(dim: Dims) -> Dims:
    stride, step = [], 1
    for size in reversed(dim):
        stride.append(step)
        step *= size
    return tuple(reversed(stride))


def packed(graph: pygraph, *dim: int, dtype: str | None = None) -> Tensor:
    return graph.tensor(dim, row_major(dim), data_type=dtype)


def heads(graph: pygraph, b: int, n: int, t: int, d: int, starts: Tensor | None = None) -> Tensor:
    """(B, N, T, D) as it lies in an array (B, T, N, D), or packed, each sequence where `starts` says."""
    return graph.tensor((b, n, t, d), (t * n * d, d, n * d, 1), ragged_offset=starts)


def attention(
    backward: bool = False,
    *,
    b: int = 2,
    n: int = 4,
    nk: int | None = None,
    t: int = 512,
    s: int | None = None,
    d: int = 128,
    dv: int | None = None,
    dtype: str = "bfloat16",
    stats: bool = True,
    bias: Dims | None = None,
    bias_dtype: str | None = None,
    gradient_of_bias: bool = False,
    mask: Dims | None = None,
    mask_dtype: str = "bool",
    lengths: bool = False,
    ragged: bool = False,
    sinks: bool = False,
    **options: Any,
) -> pygraph:
    """An attention graph, frozen. Options go to the builder as they are."""
    nk, s, dv = nk or n, s or t, dv or d
    graph = pygraph(io_data_type=dtype)
    starts_q, starts_kv, starts_rows = (
        packed(graph, b + 1, 1, 1, 1, dtype="int32") if ragged else None for _ in range(3)
    )
    q, k, v = (
        heads(graph, b, n, t, d, starts_q),
        heads(graph, b, nk, s, d, starts_kv),
        heads(graph, b, nk, s, dv, starts_kv),
    )
    lengths = lengths or ragged
    options = {"attn_scale": d**-0.5, **options}
    if bias is not None:
        options["bias"] = packed(graph, *bias, dtype=bias_dtype or dtype)
    if gradient_of_bias:
        options["dBias"] = packed(graph, *options["bias"].dim, dtype=bias_dtype or dtype)
    if mask is not None:
        kept = options.get("bias", graph.scalar(0.0, "float32"))
        minus_infinity = graph.scalar(float("-inf"), "float32")
        options["bias"] = graph.binary_select(kept, minus_infinity, packed(graph, *mask, dtype=mask_dtype))
    if lengths:
        options["use_padding_mask"] = True
        options["seq_len_q"], options["seq_len_kv"] = (packed(graph, b, 1, 1, 1, dtype="int32") for _ in range(2))
    if sinks:
        options["sink_token"] = packed(graph, 1, n, 1, 1, dtype="float32")
    stride = (t * n, 1, n, 1) if ragged else (n * t, t, 1, 1)
    if backward:
        if sinks:
            options["dSink_token"] = packed(graph, 1, n, 1, 1, dtype="float32")
        o, d_o = heads(graph, b, n, t, dv, starts_q), heads(graph, b, n, t, dv, starts_q)
        rows = graph.tensor((b, n, t, 1), stride, data_type="float32", ragged_offset=starts_rows)
        outputs = graph.sdpa_backward(q, k, v, o, d_o, rows, **options)[:3]
    else:
        outputs = graph.sdpa(q, k, v, generate_stats=stats, **options)
        if ragged and stats:
            outputs[1].set_dim((b, n, t, 1)).set_stride(stride)
    starts = (starts_q, starts_kv, starts_kv) if backward else (starts_q, starts_rows)
    for output, start in zip(outputs, starts, strict=True):
        if output is not None:
            output.set_output(True)
            if ragged:
                output.set_ragged_offset(start)
    graph.freeze()
    return graph


def paged(t: int, *, pages: int = 64, page: int = 64, table: int = 16, **options: Any) -> pygraph:
    """Attention of a few rows over keys and values in pages."""
    graph = pygraph(io_data_type="bfloat16")
    q, k, v = heads(graph, 4, 8, t, 128), heads(graph, pages, 2, page, 128), heads(graph, pages, 2, page, 128)
    tables = [packed(graph, 4, 1, table, 1, dtype="int32") for _ in range(2)]
    lengths = [packed(graph, 4, 1, 1, 1, dtype="int32") for _ in range(2)]
    o, _ = graph.sdpa(
        q,
        k,
        v,
        generate_stats=False,
        use_padding_mask=True,
        seq_len_q=lengths[0],
        seq_len_kv=lengths[1],
        paged_attention_k_table=tables[0],
        paged_attention_v_table=tables[1],
        paged_attention_max_seq_len_kv=page * table,
        **options,
    )
    o.set_output(True)
    graph.freeze()
    return graph


def pointwise(mode: str, ports: list[str], **options: Any) -> pygraph:
    """One node over channels-last images, the layout that cuDNN's pointwise engines ask for."""
    graph = pygraph(io_data_type="float32")
    dim, stride = (1, 64, 64, 64), (64**3, 1, 64**2, 64)
    inputs = [
        graph.tensor(dim, stride, data_type="bool" if port == "mask" or mode.startswith("logical") else "float32")
        for port in ports
    ]
    getattr(graph, mode)(*inputs, **options).set_output(True).set_stride(stride)
    graph.freeze()
    return graph


def matmul(m: int, n: int, k: int, *, bias: bool = False, activation: str | None = None) -> pygraph:
    graph = pygraph(io_data_type="bfloat16")
    out = graph.matmul(packed(graph, 1, m, k), packed(graph, 1, k, n))
    if bias:
        out = graph.bias(out, packed(graph, 1, 1, n))
    if activation is not None:
        out = getattr(graph, activation)(out)
    out.set_output(True).set_data_type(data_type.BFLOAT16)
    graph.freeze()
    return graph
