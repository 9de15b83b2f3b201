"""Sums and other folds of the structured table: reduction, and the statistics of a batch norm's input."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import ordered_as, refuse, set_by_caller
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed

Slope = Callable[["Transposed", "Term", int], "Term"]
"""(a reduction, its cotangent, how many elements make one) -> the gradient of its input; it may be narrow."""


def _extreme(mode: str, of: Callable[[Term], Term], sign: Callable[[Term], Term] | None = None) -> Slope:
    """Of the largest or smallest of the elements, which equal ones share evenly."""

    def slope(d: Transposed, ct: Term, count: int) -> Term:
        x = d["input"]
        values = of(x)
        # Folded again, in the type of the elements: the output may be rounded to another.
        found = values.total(_made_dim(d), mode)
        found.tensor.set_data_type(values.tensor.data_type)
        hits = values.mode("cmp_eq", found)
        share = ct * hits / hits.total(_made_dim(d))
        return share if sign is None else share * sign(x)

    return slope


def _made_dim(d: Transposed) -> Dims:
    return d.node.outputs["OUT_0"].dim


def _product_slope(d: Transposed, ct: Term, count: int) -> Term:
    """The product of all other elements, of which some may be 0: halves times halves, and back."""
    x, gradient = d["input"], d.full("OUT_0")
    made = _made_dim(d)
    halved = []
    for axis in (at for at, size in enumerate(x.dim) if size != made[at]):
        while (size := x.dim[axis]) > 1:
            half = size // 2
            first, second = x.sliced({axis: (0, half)}), x.sliced({axis: (half, 2 * half)})
            x = (first * second).joined(axis, *_behind(x, axis, 2 * half))
            halved.append((axis, first, second))
    for axis, first, second in reversed(halved):
        size = first.dim[axis]
        inner, rest = gradient.sliced({axis: (0, size)}), _behind(gradient, axis, size)
        gradient = (inner * second).joined(axis, inner * first, *rest)
    return gradient


def _behind(x: Term, axis: int, start: int) -> list[Term]:
    """The part of x from `start`, if there is one."""
    return [x.sliced({axis: (start, x.dim[axis])})] if start < x.dim[axis] else []


def _product_of_others(d: Transposed, ct: Term, count: int) -> Term:
    x = d["input"]
    others = ct * x.total(_made_dim(d), "MUL_NO_ZEROS") / x.mode("cmp_eq", 0.0).where(1.0, x)
    return x.mode("cmp_eq", 0.0).where(0.0, others)


_SLOPES: dict[str, Slope] = {
    "ADD": lambda d, ct, count: ct,
    "AVG": lambda d, ct, count: ct * (1.0 / max(count, 1)),
    "MUL": _product_slope,
    "MUL_NO_ZEROS": _product_of_others,
    "MAX": _extreme("MAX", lambda x: x),
    "MIN": _extreme("MIN", lambda x: x),
    "AMAX": _extreme("MAX", lambda x: x.abs(), lambda x: x.sign()),
    "NORM1": lambda d, ct, count: ct * d["input"].sign(),
    "NORM2": lambda d, ct, count: ct * d["input"] / d["input"].total(_made_dim(d), "NORM2"),
}


def _reduction_derivative(d: Transposed) -> Mapping[str, Term]:
    if "group_offset" in d.node.inputs:
        d.refuse("it folds within groups")
    count = prod(d.node.inputs["input"].dim) // max(prod(_made_dim(d)), 1)
    return {"input": _SLOPES[d.node.params["mode"]](d, d.ct, count)}


def _genstats_derivative(d: Transposed) -> Mapping[str, Term]:
    total, squares = d.cotangent("SUM"), d.cotangent("SQ_SUM")
    parts = [] if total is None else [total]
    parts += [] if squares is None else [2.0 * squares * d["input"]]
    return {"input": parts[0] if len(parts) == 1 else parts[0] + parts[1]}


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
    derivative=_reduction_derivative,
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
    derivative=_genstats_derivative,
)
