"""Rotary position embedding of the structured table, and its gradient.

Of the last axis, the last `rope_dim` elements are rotated as two halves (lo, hi), and the rest is scaled alone:

    lo' = output_scale (lo cos - hi sin),  hi' = output_scale (hi cos + lo sin)

where cos and sin are of the angles `freqs`; the gradient rotates back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import broadcast
from cudnn_jax.graph.operation import Attribute, Input, Operation, Output, Symbols
from cudnn_jax.graph.shapes import refuse, same_as

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed


def rotated(node: Node) -> int:
    """How many of the last axis' elements are rotated."""
    (x, _) = node.inputs.values()
    return int(node.params["rope_dim"]) or x.dim[-1]


def _rotation(node: Node, symbols: Symbols) -> None:
    (port, x), (_, freqs) = node.inputs.items()
    width = node.params["rope_dim"]
    if not 0 <= width <= x.dim[-1] or rotated(node) % 2:
        refuse(node, "rope_dim", f"is {width}", f"even, 0 to {x.dim[-1]}, where 0 is the whole last axis of {port}")
    rotation = (*x.dim[:-1], rotated(node))
    if len(freqs.dim) != len(x.dim) or freqs.dim[-1] != rotated(node) or broadcast([freqs.dim, rotation]) != rotation:
        refuse(
            node, "freqs", f"has dim {freqs.dim}", f"the rank of {port}; broadcasts to {rotation}, the last axis whole"
        )


def _derivative(d: Transposed) -> Mapping[str, Term]:
    """Either operation is the transpose of the other, and a derivative by an angle is a turn by a right one more."""
    (port, _), (out,) = d.node.inputs, d.node.outputs
    forward = d.node.operation.name == "rope"
    given, made = d.full(out), {}
    if port in d.wanted:
        made[port] = d.term("rope_backward" if forward else "rope", given, d["freqs"], **d.options)
    if "freqs" in d.wanted:
        x, width = d[port], rotated(d.node)
        last = {len(x.dim) - 1: (x.dim[-1] - width, x.dim[-1])}
        one, other = (each.sliced(last) for each in ((x, given) if forward else (given, x)))
        scale = d.node.params["output_scale"]
        product = other * d.term("rope", one, d["freqs"] + math.pi / 2, output_scale=scale)
        made["freqs"] = d.fold(product, "freqs", (*x.dim[:-1], width))
    return made


def _rope(name: str, summary: str, port: Input, out: str) -> Operation:
    return Operation(
        name=name,
        type=name.upper(),
        summary=summary,
        inputs=(port, Input("freqs", "Angles in radians, (..., rope_dim), broadcast along the other axes.")),
        outputs=(Output("OUT_0", out, same_as(port.name)),),
        attributes=(
            Attribute("output_scale", kinds.number, "Multiplies the whole output.", default=1.0),
            Attribute("rope_dim", kinds.integer, "Elements that are rotated; 0 is all.", default=0),
        ),
        rules=(_rotation,),
        derivative=_derivative,
        rebuilt=True,
    )


ROPES = (
    _rope(
        "rope",
        "Rotates the halves of the last axis by angles.",
        Input("input", "(..., D)."),
        "Dims and layout of input.",
    ),
    _rope(
        "rope_backward", "The gradient of `rope`.", Input("dY", "Cotangent of the output, (..., D)."), "Laid out as dY."
    ),
)
