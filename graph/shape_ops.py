"""The operations of the structured table that move elements and compute nothing."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import Dims, row_major
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import ordered_as, refuse, set_by_caller
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed


def _same_elements(node: Node, dim: Dims) -> None:
    x, full = node.inputs["input"], node.inputs["input"].dim
    moving = [axis for axis, size in enumerate(full) if size != 1]
    if node.params["reshape_mode"] == "VIEW_ONLY" and any(x.stride[at] != row_major(full)[at] for at in moving):
        refuse(node, "input", f"has dim {full} and stride {x.stride}", "row-major, or reshape_mode LOGICAL")
    if prod(dim) != prod(full):
        refuse(node, "OUT_0", f"has dim {dim}", f"as many elements as the input {full}")


def bounds(node: Node) -> tuple[tuple[int, int, int], ...]:
    """(start, stop, step) of each axis; of the axes that `slices` leaves out the whole."""
    given = node.params["slices"]
    return (*given, *((0, size, 1) for size in node.inputs["input"].dim[len(given) :]))


def _sliced(node: Node, symbols: Symbols) -> Layout:
    x = node.inputs["input"]
    if len(node.params["slices"]) > len(x.dim):
        refuse(node, "slices", f"has {len(node.params['slices'])} entries", f"at most one for each axis of {x.dim}")
    for axis, ((start, stop, step), size) in enumerate(zip(bounds(node), x.dim, strict=True)):
        if not 0 <= start <= stop <= size or step < 1:
            came = f"has ({start}, {stop}, {step}) at axis {axis}"
            refuse(node, "slices", came, f"0 <= start <= stop <= {size} and step at least 1")
    return ordered_as(tuple(len(range(*each)) for each in bounds(node)), x)


def _permuted(node: Node, symbols: Symbols) -> Layout:
    x, order = node.inputs["input"], node.params["permutation"]
    if sorted(order) != list(range(len(x.dim))):
        refuse(node, "permutation", f"is {order}", f"each axis of input, 0 to {len(x.dim) - 1}, once")
    return tuple(x.dim[axis] for axis in order), tuple(x.stride[axis] for axis in order)


def _joined(node: Node, symbols: Symbols) -> Layout:
    tensors, axis = list(node.inputs.values()), node.params["axis"]
    first = tensors[0].dim
    if not 0 <= axis < len(first):
        refuse(node, "axis", f"is {axis}", f"an axis of inputs, 0 to {len(first) - 1}")
    for port, tensor in node.inputs.items():
        if tensor.dim[:axis] + tensor.dim[axis + 1 :] != first[:axis] + first[axis + 1 :]:
            refuse(node, port, f"has dim {tensor.dim}", f"the dims of the first, {first}, but for axis {axis}")
    index = node.params["in_place_index"]
    if index is not None and not 0 <= index < len(tensors):
        refuse(node, "in_place_index", f"is {index}", f"one of the inputs, 0 to {len(tensors) - 1}")
    return ordered_as((*first[:axis], sum(tensor.dim[axis] for tensor in tensors), *first[axis + 1 :]), tensors[0])


def _one_type(node: Node, symbols: Symbols) -> None:
    first = node.inputs["inputs[0]"].data_type
    for port, tensor in node.inputs.items():
        kind = tensor.data_type
        if kind is not first and data_type.NOT_SET not in (kind, first):
            refuse(node, port, f"has data type {kind.value}", f"{first.value}, the type of the first")


def _reshape_derivative(d: Transposed) -> Mapping[str, Term]:
    return {"input": d.full("OUT_0").reshaped(d.node.inputs["input"].dim)}


def _transpose_derivative(d: Transposed) -> Mapping[str, Term]:
    order = d.node.params["permutation"]
    return {"input": d.ct.permuted(sorted(range(len(order)), key=order.__getitem__))}


def _slice_derivative(d: Transposed) -> Mapping[str, Term]:
    """The cotangent where it was taken from, 0 around it."""
    made, x = d.full("OUT_0"), d["input"]

    def between(axis: int, size: int) -> Term:
        """Zeros in the dims of what is made, but for `size` along an axis."""
        dim = made.dim
        return x.sliced({at: (0, size if at == axis else dim[at]) for at in range(len(dim))}).zeros()

    for axis, ((start, _, step), size) in enumerate(zip(bounds(d.node), x.dim, strict=True)):
        count = made.dim[axis]
        if count == 0:
            return {"input": x.zeros()}
        if step > 1 and count > 1:
            # All but the last element with the gap behind it.
            front, last = made.sliced({axis: (0, count - 1)}), made.sliced({axis: (count - 1, count)})
            before, after = made.dim[:axis], made.dim[axis + 1 :]
            gaps = between(axis, (count - 1) * (step - 1)).reshaped((*before, count - 1, step - 1, *after))
            spaced = front.reshaped((*before, count - 1, 1, *after)).joined(axis + 1, gaps)
            made = spaced.reshaped((*before, (count - 1) * step, *after)).joined(axis, last)
        behind = size - start - made.dim[axis]
        if start:
            made = between(axis, start).joined(axis, made)
        if behind:
            made = made.joined(axis, between(axis, behind))
    return {"input": made}


def _concatenate_derivative(d: Transposed) -> Mapping[str, Term]:
    axis, given, start = d.node.params["axis"], d.ct, 0
    narrow = given.dim[axis] != d.node.outputs["OUT_0"].dim[axis]
    made = {}
    for port, tensor in d.node.inputs.items():
        stop = start + tensor.dim[axis]
        if port in d.wanted:
            made[port] = given if narrow else given.sliced({axis: (start, stop)})
        start = stop
    return made


_INPUT = Input("input", "A tensor.")

SHAPE_OPS = (
    Operation(
        name="reshape",
        type="RESHAPE",
        summary="The input's elements, in row-major order, under the dims that the caller sets on the output.",
        inputs=(_INPUT,),
        outputs=(
            Output("OUT_0", "The caller sets the dims.", set_by_caller("OUT_0", _same_elements, "input"), like="input"),
        ),
        attributes=(
            Attribute(
                "reshape_mode",
                kinds.choice("VIEW_ONLY", "LOGICAL"),
                "VIEW_ONLY refuses what would move elements in memory; LOGICAL moves them.",
                default="VIEW_ONLY",
            ),
        ),
        derivative=_reshape_derivative,
        rebuilt=True,
    ),
    Operation(
        name="slice",
        type="SLICE",
        summary="A part of the input.",
        inputs=(_INPUT,),
        outputs=(Output("OUT_0", "Dense, in the input's memory order.", _sliced, like="input"),),
        attributes=(
            Attribute("slices", kinds.slices, "(start, stop) or (start, stop, step) of each axis.", required=True),
        ),
        derivative=_slice_derivative,
        rebuilt=True,
    ),
    Operation(
        name="transpose",
        type="TRANSPOSE",
        summary="The input with its axes in another order; where it lies in memory does not change.",
        inputs=(_INPUT,),
        outputs=(Output("OUT_0", "Dims and strides of the input, permuted.", _permuted, like="input"),),
        attributes=(
            Attribute("permutation", kinds.integers, "The input's axis for each of the output's.", required=True),
        ),
        derivative=_transpose_derivative,
        rebuilt=True,
    ),
    Operation(
        name="concatenate",
        type="CONCATENATE",
        summary="The inputs behind each other along one axis.",
        inputs=(Input("inputs", "Tensors of one rank, whose dims differ along axis alone.", many=True),),
        outputs=(Output("OUT_0", "Dense, in the memory order of the first input.", _joined, like="inputs[0]"),),
        attributes=(
            Attribute("axis", kinds.integer, "Along which.", required=True),
            Attribute("in_place_index", kinds.integer, "The input that the output's buffer holds already."),
        ),
        rules=(_one_type,),
        derivative=_concatenate_derivative,
        rebuilt=True,
    ),
)
