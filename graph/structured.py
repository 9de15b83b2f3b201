"""The structured table: operations whose ports each have a role. `matmul`'s builder is written out in `pygraph`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.block_scale import BLOCK_SCALES
from cudnn_jax.graph.convolution import CONVOLUTIONS
from cudnn_jax.graph.layout import broadcast, row_major
from cudnn_jax.graph.linear_attention import LINEAR_ATTENTION
from cudnn_jax.graph.moe import MOE
from cudnn_jax.graph.norms import NORMS
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.reductions import GENSTATS, REDUCTION
from cudnn_jax.graph.rope import ROPES
from cudnn_jax.graph.shape_ops import SHAPE_OPS
from cudnn_jax.graph.shapes import refuse

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed


def _matmul_layout(node: Node, symbols: Symbols) -> Layout:
    a, b = node.inputs["A"].dim, node.inputs["B"].dim
    batch = broadcast([a[:-2], b[:-2]])
    if min(len(a), len(b)) < 2 or a[-1] != b[-2] or batch is None:
        rule = "A (..., M, K), B (..., K, N), leading axes broadcast together"
        refuse(node, "dims", f"are A {a}, B {b}", rule)
    dim = (*batch, a[-2], b[-1])
    return dim, row_major(dim)


def _matmul_derivative(d: Transposed) -> Mapping[str, Term]:
    (*batch, m, n), k = d.node.outputs["C"].dim, d.node.inputs["A"].dim[-1]
    given = d.ct
    # What a product sums over cannot be narrow.
    given = given if given.dim[-2:] == (m, n) else d.full("C")
    made = {}
    if "A" in d.wanted:
        made["A"] = d.fold(given.mode("matmul", d["B"].flipped()), "A", (*batch, m, k))
    if "B" in d.wanted:
        made["B"] = d.fold(d["A"].flipped().mode("matmul", given), "B", (*batch, k, n))
    return made


MATMUL = Operation(
    name="matmul",
    type="MATMUL",
    summary="The matrix product of the last two axes; leading axes broadcast.",
    inputs=(Input("A", "(..., M, K)."), Input("B", "(..., K, N).")),
    outputs=(Output("C", "(..., M, N).", _matmul_layout),),
    attributes=(Attribute("padding", kinds.number, "What elements beyond an override length count as.", 0.0),),
    derivative=_matmul_derivative,
)

_TABLES = (
    (MATMUL,),
    NORMS,
    (GENSTATS, REDUCTION),
    BLOCK_SCALES,
    MOE,
    LINEAR_ATTENTION,
    CONVOLUTIONS,
    SHAPE_OPS,
    ROPES,
)

STRUCTURED = {operation.name: operation for table in _TABLES for operation in table}
