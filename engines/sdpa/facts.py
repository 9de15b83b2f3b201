"""What an attention graph is, read once after the freeze. Facts describe and never judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cudnn_jax.graph import Node, Tensor, data_type, pygraph

_FORWARD_PORTS = ("q", "k", "v", "bias", "seq_len_q", "seq_len_kv")
_BACKWARD_PORTS = ("q", "k", "v", "o", "dO", "stats", "bias", "seq_len_q", "seq_len_kv", "dStats")
_DESCRIBED_PARAMS = frozenset(
    {
        "is_inference",
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

Dims = tuple[int, int, int, int]


@dataclass(frozen=True)
class SdpaFacts:
    """One record for a forward or a backward attention graph.

    Dimensions follow the graph, (batch, heads, length, head dim). `ports` and `results` map names to positions in
    `graph.inputs` and `graph.outputs`. A query row i attends to the keys j with i - left <= j <= i + right (None is
    unbounded); under bottom_right alignment both bounds are shifted by kv length - q length of the sequence.
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

    @property
    def causal(self) -> str:
        """ "none", "top_left" or "bottom_right": whether the right bound is the diagonal."""
        return self.alignment if self.right == 0 else "none"

    @property
    def padding(self) -> bool:
        return "seq_len_q" in self.ports or "seq_len_kv" in self.ports

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
        return " ".join(words)


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


def _bounds(params: Mapping[str, Any]) -> tuple[str, int | None, int | None]:
    """(alignment, left, right) from the several ways in which cuDNN's keywords say them."""
    alignment = "top_left"
    named = params.get("diagonal_alignment")
    if params.get("use_causal_mask_bottom_right") or (named is not None and "BOTTOM" in str(named).upper()):
        alignment = "bottom_right"
    causal = params.get("use_causal_mask") or params.get("use_causal_mask_bottom_right")
    right = 0 if causal else params.get("diagonal_band_right_bound")
    window = params.get("diagonal_band_left_bound")
    if window is None:
        window = params.get("sliding_window_length")
    # cuDNN's left bound is exclusive: key j is kept while j > i - bound.
    return alignment, None if window is None else window - 1, right


def _positions(named: Mapping[str, Tensor | None], ordered: Sequence[Tensor]) -> dict[str, int]:
    """name -> position in `ordered`, for the tensors that are in it."""
    position = {id(tensor): index for index, tensor in enumerate(ordered)}
    return {name: position[id(tensor)] for name, tensor in named.items() if id(tensor) in position}


def analyze(graph: pygraph) -> SdpaFacts:
    """Parses a frozen graph that holds one SDPA or SDPA_BACKWARD node."""
    (node,) = [n for n in graph.nodes if n.type in ("SDPA", "SDPA_BACKWARD")]
    backward = node.type == "SDPA_BACKWARD"
    bias, mask, mask_node = _split_mask(node.inputs.get("bias"))

    wired = {port: node.inputs.get(port) for port in (_BACKWARD_PORTS if backward else _FORWARD_PORTS)}
    wired |= {"bias": bias, "mask": mask}
    ports = _positions(wired, graph.inputs)
    results = _positions(node.outputs, graph.outputs)

    unexplained = [n.name or n.type for n in graph.nodes if n is not node and n is not mask_node]
    unexplained += [f"port {port}" for port, tensor in node.inputs.items() if tensor is not None and port not in wired]
    unexplained += [f"option {key}" for key, value in node.params.items() if value and key not in _DESCRIBED_PARAMS]
    unexplained += [f"output {port}" for port in node.outputs if port not in ("O", "Stats", "dQ", "dK", "dV", "dBias")]
    unexplained += ["ragged offsets"] if any(t.ragged_offset is not None for t in graph.inputs) else []

    q, k, v = (node.inputs[port] for port in ("q", "k", "v"))
    scale = node.params.get("attn_scale")
    alignment, left, right = _bounds(node.params)
    return SdpaFacts(
        direction="bwd" if backward else "fwd",
        batch=q.dim[0],
        q_heads=q.dim[1],
        kv_heads=k.dim[1],
        q_len=q.dim[2],
        kv_len=k.dim[2],
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
    )
