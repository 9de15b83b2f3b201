"""Block scaling of the structured table: values that share a scale in blocks along an axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import Dims, in_order, memory_order
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import ordered_as, refuse, same_as
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed


def blocks_of(node: Node) -> Dims:
    """How many neighbours along each axis share a scale, of a node that dequantises.

    Several sizes are those of the last axes. A single one is of the one axis along which descale is shorter.
    """
    dim, scales = node.inputs["input"].dim, node.inputs["descale"].dim
    sizes: Dims = node.params["block_size"]
    if len(sizes) > 1:
        return (1,) * (len(dim) - len(sizes)) + sizes
    shorter = [axis for axis, (size, scale) in enumerate(zip(dim, scales, strict=True)) if size != scale]
    return tuple(sizes[0] if axis in shorter[:1] else 1 for axis in range(len(dim)))


def _descale_spans_blocks(node: Node, symbols: Symbols) -> None:
    x, descale, sizes = node.inputs["input"], node.inputs["descale"], node.params["block_size"]
    if not sizes or min(sizes) < 1 or len(sizes) > len(x.dim):
        refuse(
            node, "block_size", f"is {sizes}", f"one integer, or one for each of the last axes of {x.dim}, at least 1"
        )
    if len(descale.dim) != len(x.dim):
        refuse(node, "descale", f"has dim {descale.dim}", f"the rank of input {x.dim}")
    expected = tuple(-(-size // block) for size, block in zip(x.dim, blocks_of(node), strict=True))
    if descale.dim != expected:
        refuse(node, "descale", f"has dim {descale.dim}", f"one for each block of {sizes} of input {x.dim}: {expected}")


def quantised_axis(node: Node) -> int:
    """The axis whose blocks share a scale, of a node that quantises: the last if not given."""
    axis = node.params["axis"]
    return len(node.inputs["input"].dim) - 1 if axis is None else int(axis)


def _quantised(node: Node, symbols: Symbols) -> None:
    dim, axis, size = node.inputs["input"].dim, quantised_axis(node), node.params["block_size"]
    if not 0 <= axis < len(dim):
        refuse(node, "axis", f"is {axis}", f"an axis of input, 0 to {len(dim) - 1}")
    if size < 1:
        refuse(node, "block_size", f"is {size}", "at least 1")


def _laid_out(node: Node, dim: Dims) -> Layout:
    """As the input, or, transposed, with its memory order turned until the blocks' axis is the fastest."""
    x = node.inputs["input"]
    if not node.params["transpose"]:
        return ordered_as(dim, x)
    order = memory_order(x.dim, x.stride)
    turn = order.index(quantised_axis(node)) + 1
    return dim, in_order(dim, order[turn:] + order[:turn])


def _values(node: Node, symbols: Symbols) -> Layout:
    return _laid_out(node, node.inputs["input"].dim)


def _scales(node: Node, symbols: Symbols) -> Layout:
    dim, at, size = node.inputs["input"].dim, quantised_axis(node), node.params["block_size"]
    return _laid_out(node, (*dim[:at], -(-dim[at] // size), *dim[at + 1 :]))


def _block_sums(term: Term, blocks: Dims) -> Term:
    """One sum for each block."""
    for axis, block in enumerate(blocks):
        size = term.dim[axis]
        block = min(block, size)
        if block < 2:
            continue
        if short := -size % block:
            term = term.joined(axis, term.sliced({axis: (0, short)}).zeros())
        before, after = term.dim[:axis], term.dim[axis + 1 :]
        count = term.dim[axis] // block
        summed = term.reshaped((*before, count, block, *after)).total((*before, count, 1, *after))
        term = summed.reshaped((*before, count, *after))
    return term


def _dequantize_derivative(d: Transposed) -> Mapping[str, Term]:
    if d.node.params["is_negative_scale"]:
        d.refuse("is_negative_scale is the backend's alone")
    given, made = d.full("OUT_0"), {}
    if "input" in d.wanted:
        made["input"] = d.term("block_scale_dequantize", given, d["descale"], **d.options)
    if "descale" in d.wanted:
        made["descale"] = _block_sums(given * d["input"], blocks_of(d.node))
    return made


def _quantize_derivative(d: Transposed) -> Mapping[str, Term | None]:
    """Straight through: rounding has the slope 1, and scales count as constants."""
    if "group_offset" in d.node.inputs:
        d.refuse("its blocks end with their group")
    if d.cotangent("Y") is None:
        return {"input": None}
    scale = d["scale"]
    # Where nothing is but zeros, the scale is 0, or the least that float8_e8m0fnu has: a machine may take it for 0.
    inverse = scale.mode("cmp_le", 2.0**-126).where(0.0, scale.mode("reciprocal"))
    size = d.node.params["block_size"]
    return {"input": d.term("block_scale_dequantize", d.full("Y"), inverse, block_size=size)}


BLOCK_SCALES = (
    Operation(
        name="block_scale_dequantize",
        type="BLOCK_SCALE_DEQUANTIZE",
        summary="OUT_0 = input * descale, each of descale for a block of neighbours.",
        inputs=(Input("input", "Quantised values."), Input("descale", "One scale for each block.")),
        outputs=(Output("OUT_0", "Dims and layout of input.", same_as("input")),),
        attributes=(
            Attribute("block_size", kinds.integers_or_one, "Neighbours that share a scale.", required=True),
            Attribute("is_negative_scale", kinds.flag, "Whether descale holds the scale's inverse.", default=False),
        ),
        rules=(_descale_spans_blocks,),
        derivative=_dequantize_derivative,
        rebuilt=True,
    ),
    Operation(
        name="block_scale_quantize",
        type="BLOCK_SCALE_QUANTIZE",
        summary="Y = input / scale, rounded to nearest; scale = the largest |input| of its block over Y's largest "
        "number, rounded up.",
        inputs=(
            Input("input", "Values."),
            Input(
                "group_offset",
                "Where each group of rows starts, (groups, 1, 1), int32: blocks end with their group.",
                "GROUPS 1 1",
                optional=True,
                types=(data_type.INT32,),
            ),
        ),
        outputs=(
            Output("Y", "Dims of input.", _values),
            Output("scale", "One for each block along axis.", _scales),
        ),
        attributes=(
            Attribute("block_size", kinds.integer, "Neighbours along axis that share a scale.", required=True),
            Attribute("axis", kinds.integer, "Along which blocks run; the last if absent."),
            Attribute("transpose", kinds.flag, "Whether axis is the fastest in memory.", default=False),
        ),
        rules=(_quantised,),
        derivative=_quantize_derivative,
    ),
)
