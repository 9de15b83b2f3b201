"""What a linear attention graph is, read once after the freeze. Facts describe and never judge."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from cudnn_jax.graph import Tensor, data_type, pygraph
from cudnn_jax.graph.layout import row_major

_TYPES = {
    f"{operation.upper()}{suffix}": (operation, direction)
    for operation in ("gdn", "kda", "gdn2")
    for suffix, direction in (("", "fwd"), ("_BWD", "bwd"))
}
"""Node type -> (operation, direction)."""


@dataclass(frozen=True)
class LinearFacts:
    """One record for a graph of a linear attention operation, forward or backward.

    Attributes:
      operation, direction: "gdn", "kda" or "gdn2"; "fwd" or "bwd".
      total: tokens, all sequences behind each other; those past cu_seqlens[-1] belong to none.
      sequences: how many; each may be empty.
      heads_q, heads_k, heads_v: heads of q, k and v; each divides `heads`.
      heads: of gates, outputs and states.
      key_dim, value_dim: of a head.
      scale: multiplies the output.
      use_qk_l2norm, use_beta_sigmoid, allow_neg_eigval, safe_gate: as the operation's attributes.
      gate_domain: "log" or "linear".
      gate_lower_bound: of a safe gate that is bounded, None where the operation's is not.
      checkpoint_every: tokens from one kept state to the next, 0 if none is kept.
      pool: whether initial_state holds a pool's rows, at state_indices.
      overwrite: whether final_state is initial_state with the final states written over its rows.
      batch_invariant: whether a sequence gives the same bits whatever else is packed.
      scattered: ports and results that are not row-major in memory.
      unexplained: what the record does not describe.
      dtypes: port or result -> data type.
      ports: port -> position in `graph.inputs`.
      results: result -> position in `graph.outputs`.
    """

    operation: str
    direction: str
    total: int
    sequences: int
    heads_q: int
    heads_k: int
    heads_v: int
    heads: int
    key_dim: int
    value_dim: int
    scale: float
    use_qk_l2norm: bool
    use_beta_sigmoid: bool
    allow_neg_eigval: bool
    safe_gate: bool
    gate_domain: str
    gate_lower_bound: float | None
    checkpoint_every: int
    pool: bool
    overwrite: bool
    batch_invariant: bool
    scattered: tuple[str, ...]
    unexplained: tuple[str, ...]
    dtypes: Mapping[str, data_type] = field(hash=False)
    ports: Mapping[str, int] = field(hash=False)
    results: Mapping[str, int] = field(hash=False)

    @property
    def dtype(self) -> data_type:
        """The type of q, k, v and the output."""
        return self.dtypes["q"]

    @property
    def mean_length(self) -> float:
        """Tokens of a sequence, rows of none counted in."""
        return self.total / max(self.sequences, 1)

    def describe(self) -> str:
        """One line for people."""
        words = [
            f"{self.operation} {self.direction} {self.dtype.value} N{self.sequences} T{self.total}",
            f"heads {self.heads_q}/{self.heads_k}/{self.heads_v} K{self.key_dim} V{self.value_dim}",
        ]
        flags = ("use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate", "overwrite", "batch_invariant")
        words += [name for name in flags if getattr(self, name)]
        words += [f"gate above {self.gate_lower_bound:g}"] if self.safe_gate and self.gate_lower_bound else []
        words += ["linear gate"] if self.gate_domain == "linear" else []
        words += [f"checkpoint every {self.checkpoint_every}"] if "state_checkpoints" in self.dtypes else []
        words += [name for name in ("initial_state", "state_indices", "d_final_state") if name in self.ports]
        words += [name for name in ("final_state",) if name in self.results]
        return " ".join(words)


def analyze(graph: pygraph) -> LinearFacts:
    """Parses a frozen graph that holds one node of `_TYPES`."""
    (node,) = [n for n in graph.nodes if n.type in _TYPES]
    operation, direction = _TYPES[node.type]
    tensors = {**node.inputs, **node.outputs}
    ports, results = _positions(node.inputs, graph.inputs), _positions(node.outputs, graph.outputs)
    q, k, v = (node.inputs[port] for port in ("q", "k", "v"))
    params = node.params
    unexplained = [n.name or n.type for n in graph.nodes if n is not node]
    unexplained += [f"port {name} that is no input" for name in node.inputs if name not in ports]
    unexplained += ["beta_guard"] if params.get("beta_guard") else []
    unexplained += ["ragged offsets"] if any(t.ragged_offset is not None for t in tensors.values()) else []
    return LinearFacts(
        operation=operation,
        direction=direction,
        total=q.dim[0],
        sequences=node.inputs["cu_seqlens"].dim[0] - 1,
        heads_q=q.dim[1],
        heads_k=k.dim[1],
        heads_v=v.dim[1],
        heads=node.inputs["beta"].dim[1],
        key_dim=q.dim[2],
        value_dim=v.dim[2],
        scale=q.dim[2] ** -0.5 if params["scale"] is None else float(params["scale"]),
        use_qk_l2norm=params["use_qk_l2norm"],
        use_beta_sigmoid=params["use_beta_sigmoid"],
        allow_neg_eigval=params["allow_neg_eigval"],
        safe_gate=params["safe_gate"],
        gate_domain=params["gate_domain"].lower(),
        gate_lower_bound=params.get("gate_lower_bound"),
        checkpoint_every=params["checkpoint_every_n_tokens"],
        pool="state_indices" in node.inputs,
        overwrite=params["overwrite_initial_state"],
        batch_invariant=params["batch_invariant"],
        scattered=tuple(name for name, tensor in tensors.items() if tensor.stride != row_major(tensor.dim)),
        unexplained=tuple(unexplained),
        dtypes=MappingProxyType({name: tensor.data_type for name, tensor in tensors.items()}),
        ports=MappingProxyType(ports),
        results=MappingProxyType(results),
    )


def _positions(named: Mapping[str, Tensor], ordered: Sequence[Tensor]) -> dict[str, int]:
    """name -> position in `ordered`, for the tensors that are in it."""
    position = {id(tensor): index for index, tensor in enumerate(ordered)}
    return {name: position[id(tensor)] for name, tensor in named.items() if id(tensor) in position}
