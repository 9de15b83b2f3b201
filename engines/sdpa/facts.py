"""What an attention graph is, read once after the freeze. Facts describe and never judge."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

from cudnn_jax.graph import Node, Tensor, data_type, pygraph

PLAIN_PORTS = frozenset({"q", "k", "v", "o", "dO", "stats", "bias", "seq_len_q", "seq_len_kv", "dStats"})
PLAIN_PARAMS = frozenset(
    {
        "generate_stats",
        "attn_scale",
        "use_padding_mask",
        "use_causal_mask",
        "use_causal_mask_bottom_right",
        "sliding_window_length",
        "diagonal_alignment",
        "diagonal_band_left_bound",
        "diagonal_band_right_bound",
        "use_deterministic_algorithm",
    }
)
PLAIN_RESULTS = frozenset({"O", "Stats", "dQ", "dK", "dV", "dBias"})
"""What `cudnn_jax.sdpa` and its backward are made of; anything else is one of `SdpaFacts.options`."""

_ROWS = frozenset({"q", "k", "v", "o", "dO", "O", "dQ", "dK", "dV"})
"""Ports and outputs of rows of a head; the others that may be ragged have one number for a row."""
HALF_BESIDE_BFLOAT16, SEVERAL_TYPES = "float16 beside bfloat16", "several types"
_RAGGED, _RAGGED_IN_PART, _RAGGED_STATISTICS = "ragged offsets", "ragged offsets in part", "ragged statistics"

BLOCK_MASK_TILE = 128
"""Rows and keys of the tiles that a block mask counts."""

Dims = tuple[int, int, int, int]


class Number(NamedTuple):
    """A port that takes a number, which is part of the graph."""

    value: float
    dim: Dims
    dtype: data_type


def _nothing() -> Mapping[str, Any]:
    return MappingProxyType({})


@dataclass(frozen=True)
class SdpaFacts:
    """One record for a forward or a backward attention graph.

    Dimensions follow the graph, (batch, heads, length, head dim). A query row i attends to the keys j with
    i - left <= j <= i + right (None is unbounded); under bottom_right alignment both bounds are shifted by
    kv length - q length of the sequence.

    Attributes:
      ports, results: name -> position in `graph.inputs` and `graph.outputs`.
      numbers: ports that take a number of the graph's own.
      types: the data types of the results.
      scale: of the logits; the port `attn_scale` is another factor.
      alibi: logits fall with the distance of row and key, at a slope for each head.
      base2: Stats is the logarithm in base 2.
      options: what `cudnn_jax.sdpa` and its backward do not have: ports, parameters, outputs and layouts.
      unexplained: what the record does not describe.
    """

    direction: str
    batch: int
    q_heads: int
    kv_heads: int
    q_len: int
    kv_len: int
    head_dim: int
    v_head_dim: int
    dtype: data_type
    scale: float
    alignment: str
    left: int | None
    right: int | None
    bias_dim: Dims | None
    bias_dtype: data_type | None
    mask_dim: Dims | None
    stats: bool
    deterministic: bool
    dtypes: tuple[data_type, ...]
    unexplained: tuple[str, ...]
    ports: Mapping[str, int] = field(hash=False)
    results: Mapping[str, int] = field(hash=False)
    numbers: Mapping[str, Number] = field(default_factory=_nothing, hash=False)
    types: Mapping[str, data_type] = field(default_factory=_nothing, hash=False)
    options: tuple[str, ...] = ()
    alibi: bool = False
    base2: bool = False
    block_mask_dim: tuple[int, ...] | None = None

    @property
    def ragged(self) -> bool:
        """Whether sequences are packed in a tensor."""
        return not {_RAGGED, _RAGGED_IN_PART, _RAGGED_STATISTICS}.isdisjoint(self.options)

    @property
    def causal(self) -> str:
        """ "none", "top_left" or "bottom_right": whether the right bound is the diagonal."""
        return self.alignment if self.right == 0 else "none"

    @property
    def padding(self) -> bool:
        return any(f"{kind}_{side}" in self.ports for kind in ("seq_len", "cu_seq_len") for side in ("q", "kv"))

    def describe(self) -> str:
        """One line for people."""
        words = [
            f"{self.direction} {self.dtype.value} B{self.batch} T{self.q_len} S{self.kv_len}",
            f"heads {self.q_heads}/{self.kv_heads} D{self.head_dim}",
        ]
        if self.v_head_dim != self.head_dim:
            words.append(f"DV{self.v_head_dim}")
        if self.right == 0 and self.left is None:
            words.append(f"causal {self.alignment}")
        elif self.left is not None or self.right is not None:
            words.append(f"window ({self.left}, {self.right}) {self.alignment}")
        words += [name for name in ("bias", "mask", "dStats") if name in self.ports]
        words += ["padding"] if self.padding else []
        words += ["dBias"] if "dBias" in self.results else []
        return " ".join([*words, *self.options])


def _dims(tensor: Tensor | None) -> Dims | None:
    return None if tensor is None else tuple(tensor.dim)  # type: ignore[return-value]


def _split_mask(bias: Tensor | None) -> tuple[Tensor | None, Tensor | None, Node | None]:
    """A boolean mask is written binary_select(bias or 0, -inf, mask) in front of the bias port."""
    node = bias.producer if bias is not None else None
    if node is None or node.params.get("mode") != "binary_select":
        return bias, None, None
    kept, dropped, mask = (node.inputs[port] for port in ("input0", "input1", "mask"))
    if not (dropped.is_pass_by_value and dropped.value == float("-inf")):
        return bias, None, None
    if kept.is_pass_by_value:
        return (None, mask, node) if kept.value == 0 else (bias, None, None)
    return kept, mask, node


_LEFT = ("diagonal_band_left_bound", "left_bound", "sliding_window_length", "sliding_window")
_RIGHT = ("diagonal_band_right_bound", "right_bound")


class Bounds(NamedTuple):
    """Of the keys that a query row may see; see `SdpaFacts`."""

    alignment: str
    left: int | None
    right: int | None


def bounds(params: Mapping[str, Any]) -> Bounds:
    """The bounds from the several ways in which cuDNN's keywords say them."""
    # The two older keywords also align the diagonal.
    bottom = params.get("use_causal_mask_bottom_right") or params.get("diagonal_alignment") == "BOTTOM_RIGHT"
    alignment = "bottom_right" if bottom and not params.get("use_causal_mask") else "top_left"
    causal = params.get("use_causal_mask") or params.get("use_causal_mask_bottom_right")
    right = 0 if causal else _first(params, _RIGHT)
    window = _first(params, _LEFT)
    # cuDNN's left bound is exclusive: key j is kept while j > i - bound.
    return Bounds(alignment, None if window is None else window - 1, right)


def _first(params: Mapping[str, Any], names: Sequence[str]) -> int | None:
    return next((params[name] for name in names if params.get(name) is not None), None)


def _positions(named: Mapping[str, Tensor | None], ordered: Sequence[Tensor]) -> dict[str, int]:
    """name -> position in `ordered`, for the tensors that are in it."""
    position = {id(tensor): index for index, tensor in enumerate(ordered)}
    return {name: position[id(tensor)] for name, tensor in named.items() if id(tensor) in position}


def options_of(node: Node) -> Iterator[str]:
    """The `SdpaFacts.options` of a node."""
    for port, tensor in node.inputs.items():
        if port not in PLAIN_PORTS:
            yield port
        elif tensor.is_pass_by_value:
            yield f"{port} as a number"
    for name, value in node.params.items():
        if value and name not in PLAIN_PARAMS:
            yield name
    yield from (port for port in node.outputs if port not in PLAIN_RESULTS)
    rows, others = _held(node)
    ragged = [tensor.ragged_offset is not None for tensor in rows]
    if any(ragged):
        yield _RAGGED if all(ragged) else _RAGGED_IN_PART
    if any(tensor.ragged_offset is not None for tensor in others):
        yield _RAGGED_STATISTICS


def mixed_types(node: Node) -> str | None:
    """How buffers of rows, of queries, keys, values, outputs and gradients, are of several data types, if they are."""
    kinds = {tensor.data_type for tensor in _held(node)[0]}
    if {data_type.HALF, data_type.BFLOAT16} <= kinds:
        return HALF_BESIDE_BFLOAT16
    return SEVERAL_TYPES if len(kinds) > 1 else None


def _held(node: Node) -> tuple[list[Tensor], list[Tensor]]:
    """The node's tensors that are buffers: those of rows, and the others."""
    held = {port: tensor for port, tensor in {**node.inputs, **node.outputs}.items() if not tensor.is_virtual}
    others = [tensor for port, tensor in held.items() if port not in _ROWS]
    return [tensor for port, tensor in held.items() if port in _ROWS], others


def without_formula(node: Node, kv_len: int) -> Iterator[str]:
    """What of a node has no meaning here, and why."""
    params, inputs = node.params, node.inputs
    if params.get("dropout"):
        yield f"dropout {params['dropout']}, whose random numbers are those of cuDNN's kernels"
    if "rng_dump" in node.outputs and params["dropout"] != 0:
        yield "output rng_dump, the random numbers of cuDNN's kernels"
    if params["attn_scale_prefolded"] and (params["attn_scale"] is not None or "attn_scale" in inputs):
        yield "attn_scale beside attn_scale_prefolded, which says that q holds it"
    for side in ("k", "v"):
        if (table := inputs.get(f"paged_attention_{side}_table")) is not None:
            held = table.dim[2] * inputs[side].dim[2]
            if held < kv_len:
                yield f"length {kv_len} of {side} in pages, where paged_attention_{side}_table holds {held}"


def length_of_keys(node: Node) -> int:
    """The length of keys and values: what tensors say, the bound of paged ones, or all that their pages hold."""
    tables = {side: node.inputs.get(f"paged_attention_{side}_table") for side in ("k", "v")}
    for side, table in tables.items():
        if table is None:
            return node.inputs[side].dim[2]
    bound: int | None = node.params["paged_attention_max_seq_len_kv"]
    if bound is not None:
        return bound
    planes = [node.inputs.get(port) for port in ("bias", "kv_mask", "dropout_mask")] + [node.outputs.get("rng_dump")]
    told = [tensor.dim[3] for tensor in planes if tensor is not None and tensor.dim[3] != 1]
    return told[0] if told else min(table.dim[2] * node.inputs[side].dim[2] for side, table in tables.items() if table)


def analyze(graph: pygraph) -> SdpaFacts:
    """Parses a frozen graph that holds one SDPA or SDPA_BACKWARD node."""
    (node,) = [n for n in graph.nodes if n.type in ("SDPA", "SDPA_BACKWARD")]
    backward = node.type == "SDPA_BACKWARD"
    bias, mask, mask_node = _split_mask(node.inputs.get("bias"))

    wired = {**node.inputs, "bias": bias, "mask": mask}
    ports = _positions(wired, graph.inputs)
    results = _positions(node.outputs, graph.outputs)
    numbers = {
        port: Number(float(tensor.value or 0), tuple(tensor.dim), tensor.data_type)  # type: ignore[arg-type]
        for port, tensor in wired.items()
        if tensor is not None and tensor.is_pass_by_value
    }

    kv_len = length_of_keys(node)
    unexplained = [n.name or n.type for n in graph.nodes if n is not node and n is not mask_node]
    if mask_node is not None and len(results) < len(graph.outputs):
        unexplained.append(f"output of {mask_node.label}")
    unexplained += without_formula(node, kv_len)

    q, k, v = (node.inputs[port] for port in ("q", "k", "v"))
    scale = node.params["attn_scale"]
    if node.params["attn_scale_prefolded"]:
        scale = math.log(2)  # q holds attn_scale * log2(e)
    block_mask = node.inputs.get("block_mask")
    alignment, left, right = bounds(node.params)
    return SdpaFacts(
        direction="bwd" if backward else "fwd",
        batch=q.dim[0],
        q_heads=q.dim[1],
        kv_heads=k.dim[1],
        q_len=q.dim[2],
        kv_len=kv_len,
        head_dim=q.dim[3],
        v_head_dim=v.dim[3],
        dtype=q.data_type,
        scale=1.0 if scale is None else float(scale),
        alignment=alignment,
        left=left,
        right=right,
        bias_dim=_dims(bias),
        bias_dtype=None if bias is None else bias.data_type,
        mask_dim=_dims(mask),
        stats="Stats" in results or backward,
        deterministic=bool(node.params.get("use_deterministic_algorithm")),
        dtypes=tuple(dict.fromkeys(t.data_type for t in (q, k, v))),
        unexplained=tuple(unexplained),
        ports=MappingProxyType(ports),
        results=MappingProxyType(results),
        numbers=MappingProxyType(numbers),
        types=MappingProxyType({name: node.outputs[name].data_type for name in results}),
        options=tuple(options_of(node)),
        alibi=node.params["use_alibi_mask"],
        base2=bool(node.params.get("stats_use_log2")),
        block_mask_dim=None if block_mask is None else block_mask.dim,
    )
