"""Sums and other folds of the structured table: reduction, and the statistics of a batch norm's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import ordered_as, refuse, set_by_caller
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node

MODES = ("ADD", "MUL", "MIN", "MAX", "AMAX", "AVG", "NORM1", "NORM2", "MUL_NO_ZEROS")
_FOLDED = "each 1, which is folded, or the input's {dim}"


def _check_reduced(node: Node, dim: Dims) -> None:
    full = node.inputs["input"].dim
    rule = _FOLDED.format(dim=full)
    if "group_offset" in node.inputs:
        # The groups stand on the first axis, which the input has 1 long.
        full = (node.inputs["group_offset"].dim[0], *full[1:])
        rule += " but the first, one for each group"
    if len(dim) != len(full) or any(size not in (1, whole) for size, whole in zip(dim, full, strict=True)):
        refuse(node, "OUT_0", f"has dim {dim}", rule)


def _channels(node: Node, symbols: Symbols) -> Layout:
    x = node.inputs["input"]
    if len(x.dim) < 2:
        refuse(node, "input", f"has dim {x.dim}", "(N, C, ...), rank at least 2")
    return ordered_as(tuple(size if axis == 1 else 1 for axis, size in enumerate(x.dim)), x)


REDUCTION = Operation(
    name="reduction",
    type="REDUCTION",
    summary="The input folded along the axes where the output, whose dims the caller sets, is 1 long.",
    inputs=(
        Input("input", "A tensor."),
        Input(
            "group_offset",
            "Where each group of rows starts, (groups, 1, 1), int32: rows are folded within their group.",
            "GROUPS 1 1",
            optional=True,
            types=(data_type.INT32,),
        ),
    ),
    outputs=(
        Output(
            "OUT_0",
            "1 on the folded axes, the input's dims elsewhere.",
            set_by_caller("OUT_0", _check_reduced, "input"),
        ),
    ),
    attributes=(
        Attribute(
            "mode",
            kinds.choice(*MODES),
            "AMAX is the largest |x|, NORM1 the sum of |x|, NORM2 the root of the sum of squares.",
            required=True,
        ),
    ),
)

GENSTATS = Operation(
    name="genstats",
    type="GENSTATS",
    summary="The sum and the sum of squares of each channel.",
    inputs=(Input("input", "(N, C, ...)."),),
    outputs=(
        Output("SUM", "(1, C, 1, ...), float32.", _channels, type=data_type.FLOAT),
        Output("SQ_SUM", "(1, C, 1, ...), float32.", _channels, type=data_type.FLOAT),
    ),
)
