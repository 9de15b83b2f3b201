"""Grouped matmul of a mixture of experts, of the structured table, and the gradient of its weights.

R routed rows stand behind each other by expert: first_token_offset says where each expert's rows start. token_index
is the token of a routed row, token_ks the number of its expert among the token's `top_k`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import in_order, row_major
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import dims_of, multiple, refuse
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed

MODES = {
    "NONE": (),
    "GATHER": ("token_index",),
    "SCATTER": ("token_index", "token_ks"),
    "COMBINE": ("token_index", "token_ks", "top_k_scores"),
}
"""The ports that each mode takes."""

_OPTIONAL = MODES["COMBINE"]
_INT32 = (data_type.INT32,)
_OFFSET = Input("first_token_offset", "Where each expert's rows start, (E, 1, 1), int32.", "E 1 1", types=_INT32)


def _ports_of_mode(node: Node, symbols: Symbols) -> None:
    mode = node.params["mode"]
    for port in _OPTIONAL:
        if (port in node.inputs) != (port in MODES[mode]):
            came, rule = ("came", "does not take it") if port in node.inputs else ("is missing", "takes it")
            refuse(node, port, came, f"mode {mode} {rule}")
    symbols["R"] = symbols["R"] if mode == "GATHER" else symbols["M"]
    if mode != "GATHER" and "token_index" in node.inputs and node.inputs["token_index"].dim[1] != symbols["M"]:
        refuse(node, "token_index", f"has dim {node.inputs['token_index'].dim}", f"(1, {symbols['M']}, 1)")
    top_k = node.params["top_k"]
    if "token_ks" in MODES[mode] and (top_k is None or top_k < 1 or symbols["M"] % top_k):
        refuse(node, "top_k", f"is {top_k}", f"at least 1, and divides the {symbols['M']} rows of token")


def _routed(node: Node, symbols: Symbols) -> Layout:
    rows = symbols["M"] // node.params["top_k"] if node.params["mode"] == "COMBINE" else symbols["R"]
    dim = (1, rows, symbols["N"])
    return dim, row_major(dim)


def _dweight(node: Node, symbols: Symbols) -> Layout:
    # As the weights of a matmul whose rows are the fastest.
    dim = dims_of("E K N", symbols)
    return dim, in_order(dim, (0, 2, 1))


def _derivative(d: Transposed) -> Mapping[str, Term]:
    if (mode := d.node.params["mode"]) != "NONE":
        d.refuse(f"none of mode {mode}")
    given, offset, made = d.full("OUT_0"), d["first_token_offset"], {}
    if "token" in d.wanted:
        made["token"] = d.term("moe_grouped_matmul", given, d["weight"].flipped(), offset)
    if "weight" in d.wanted:
        experts, *matrix = d.node.inputs["weight"].dim
        each = d.term("moe_grouped_matmul_bwd", given, d["token"], offset)
        batches = each.dim[0] // experts
        summed = each.reshaped((batches, experts, *matrix)).total((1, experts, *matrix)) if batches > 1 else each
        made["weight"] = summed.reshaped((experts, *matrix))
    return made


def _weight_derivative(d: Transposed) -> Mapping[str, Term]:
    """Of the weights' gradient, which is linear in the rows on either side."""
    given, offset, made = d.full("dweight"), d["first_token_offset"], {}
    if "doutput" in d.wanted:
        made["doutput"] = d.term("moe_grouped_matmul", d["token"], given, offset)
    if "token" in d.wanted:
        made["token"] = d.term("moe_grouped_matmul", d["doutput"], given.flipped(), offset)
    return made


MOE = (
    Operation(
        name="moe_grouped_matmul",
        type="MOE_GROUPED_MATMUL",
        summary="Each routed row times the weights of its expert; the modes differ in where rows come from and go to.",
        inputs=(
            Input("token", "(1, R, K); GATHER: (1, S, K), row token_index[r] of it is routed.", "1 M K"),
            Input("weight", "(E, K, N).", "EXPERTS K N"),
            _OFFSET,
            Input("token_index", "Token of each routed row, (1, R, 1), int32.", "1 R 1", optional=True, types=_INT32),
            Input("token_ks", "Number of its expert, (1, R, 1), int32.", "1 R 1", optional=True, types=_INT32),
            Input("top_k_scores", "Factor of each routed row, (1, R, 1).", "1 R 1", optional=True),
        ),
        outputs=(
            Output(
                "OUT_0",
                "(1, R, N); SCATTER: row r goes to token_index[r] * top_k + token_ks[r]; COMBINE: (1, R / top_k, N), "
                "rows times their scores, summed over each token's experts.",
                _routed,
            ),
        ),
        attributes=(
            Attribute("mode", kinds.choice(*MODES), "Where rows come from and go to.", default="NONE"),
            Attribute("top_k", kinds.integer, "Experts of a token, for SCATTER and COMBINE."),
        ),
        rules=(_ports_of_mode, multiple("E", "EXPERTS")),
        derivative=_derivative,
    ),
    Operation(
        name="moe_grouped_matmul_bwd",
        type="MOE_GROUPED_MATMUL_BWD",
        summary="The gradient of `moe_grouped_matmul`'s weights: an expert's rows of token, transposed, times doutput.",
        inputs=(
            Input("doutput", "Cotangent of the routed rows, (1, R, N).", "1 R N"),
            Input("token", "(1, R, K).", "1 R K"),
            _OFFSET,
        ),
        outputs=(Output("dweight", "(E, K, N), K the fastest in memory.", _dweight),),
        derivative=_weight_derivative,
    ),
)
