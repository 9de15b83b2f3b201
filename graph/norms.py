"""The norms of the structured table. A norm runs over the axes where its scale is not 1 long."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import Dims, in_order, memory_order, row_major
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import refuse, same_as
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor


def normalised_axes(node: Node) -> tuple[int, ...]:
    """The axes that a norm's node runs over: where scale is not 1, or bias where there is no scale.

    Without either, those where the statistics are 1, and for want of these every axis but the first.
    """
    weight = _weight(node)
    if weight:
        return tuple(axis for axis, size in enumerate(node.inputs[weight].dim) if size != 1)
    if "inv_variance" in node.inputs:
        dim, kept = node.inputs["input"].dim, node.inputs["inv_variance"].dim
        return tuple(axis for axis, size in enumerate(dim) if size != 1 and kept[axis] == 1)
    return tuple(range(1, len(node.inputs["input"].dim)))


def _weight(node: Node) -> str | None:
    return next((port for port in ("scale", "bias") if port in node.inputs), None)


def _weight_dim(node: Node) -> Dims:
    """The input's dims on the normalised axes, 1 elsewhere."""
    dim, axes = node.inputs["input"].dim, normalised_axes(node)
    return tuple(size if axis in axes else 1 for axis, size in enumerate(dim))


def _statistics_dim(node: Node) -> Dims:
    """1 on the normalised axes, the input's dims elsewhere."""
    dim, axes = node.inputs["input"].dim, normalised_axes(node)
    return tuple(1 if axis in axes else size for axis, size in enumerate(dim))


def _statistics(node: Node, symbols: Symbols) -> Layout:
    model, dim = node.inputs["input"], _statistics_dim(node)
    return dim, in_order(dim, memory_order(model.dim, model.stride))


def _weight_gradient(node: Node, symbols: Symbols) -> Layout:
    if "scale" in node.inputs:
        return node.inputs["scale"].dim, node.inputs["scale"].stride
    dim = _weight_dim(node)
    return dim, row_major(dim)


def _weight_spans_axes(node: Node, symbols: Symbols) -> None:
    dim, port = node.inputs["input"].dim, _weight(node)
    if port:
        weight = node.inputs[port].dim
        if len(weight) != len(dim) or any(size not in (1, full) for size, full in zip(weight, dim, strict=True)):
            rule = f"the input's dims {dim} on the normalised axes, 1 elsewhere"
            refuse(node, port, f"has dim {weight}", rule)


def _normalised_axes_are_not_empty(node: Node, symbols: Symbols) -> None:
    dim = node.inputs["input"].dim
    if any(dim[axis] == 0 for axis in normalised_axes(node)):
        refuse(node, "input", f"has dim {dim}", "normalised axes are at least 1 long")


def _has_normalised_axes(node: Node, symbols: Symbols) -> None:
    """A scale of one element names no axis; it is right where all that it could name are 1 long."""
    dim = node.inputs["input"].dim
    if not normalised_axes(node) and any(size != 1 for size in dim[1:] or dim):
        port = _weight(node) or ("inv_variance" if "inv_variance" in node.inputs else "input")
        rule = f"at least one axis is normalised, or every axis of the input {dim} but the first is 1 long"
        refuse(node, port, f"has dim {node.inputs[port].dim}", rule)


def _has_dim(port: str, expected: Callable[[Node], Dims], what: str) -> Callable[[Node, Symbols], None]:
    def rule(node: Node, symbols: Symbols) -> None:
        if port in node.inputs and node.inputs[port].dim != expected(node):
            refuse(node, port, f"has dim {node.inputs[port].dim}", f"{expected(node)}, {what}")

    return rule


def _statistics_span_axes(node: Node, symbols: Symbols) -> None:
    dim, kept = node.inputs["input"].dim, node.inputs["inv_variance"].dim
    rule = f"1 on the normalised axes, the input's dims {dim} elsewhere"
    if len(kept) != len(dim) or kept != _statistics_dim(node):
        refuse(node, "inv_variance", f"has dim {kept}", rule)


def epsilon_of(node: Node) -> float | None:
    """The number that is added to the mean, given plainly or as a tensor passed by value; None if the node has none."""
    given = node.inputs["epsilon"].value if "epsilon" in node.inputs else node.params.get("epsilon")
    return None if given is None else float(given)


def _epsilon_is_a_number(node: Node, symbols: Symbols) -> None:
    if "epsilon" in node.inputs and not node.inputs["epsilon"].is_pass_by_value:
        refuse(node, "epsilon", f"is {node.inputs['epsilon']!r}", "a number, or a tensor passed by value")
    epsilon = epsilon_of(node)
    if epsilon is not None and not 0 <= epsilon < math.inf:
        refuse(node, "epsilon", f"is {epsilon}", "a finite number, at least 0")


def _is_training(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return bool(params["norm_forward_phase"] == "TRAINING")


def _has_scale(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return "scale" in inputs


def _wants_dbias(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return bool(params["has_dbias"])


_WEIGHT = "The input's dims on the normalised axes, 1 elsewhere"
_STATISTICS = "1 on the normalised axes, the input's dims elsewhere, float32"
_AS_INPUT = "the input's"

RMSNORM = Operation(
    name="rmsnorm",
    type="RMS_NORM",
    summary="Y = input * rsqrt(mean(input^2) + epsilon) * scale + bias, the mean over the normalised axes.",
    inputs=(
        Input("input", "(N, C, ...)."),
        Input("scale", f"{_WEIGHT}. Without weights every axis but the first is normalised.", optional=True),
        Input("bias", f"{_WEIGHT}.", optional=True),
        Input("epsilon", "Added to the mean: a finite number, at least 0, or a tensor passed by value.", number=True),
    ),
    outputs=(
        Output("Y", "Dims and layout of input.", same_as("input")),
        Output("inv_var", f"The rsqrt of the formula. {_STATISTICS}.", _statistics, _is_training, data_type.FLOAT),
    ),
    attributes=(
        Attribute(
            "norm_forward_phase",
            kinds.choice("TRAINING", "INFERENCE"),
            "TRAINING makes inv_var, INFERENCE does not.",
            required=True,
        ),
    ),
    rules=(
        _weight_spans_axes,
        _has_normalised_axes,
        _normalised_axes_are_not_empty,
        _has_dim("bias", _weight_dim, "the normalised axes"),
        _epsilon_is_a_number,
    ),
)

RMSNORM_BACKWARD = Operation(
    name="rmsnorm_backward",
    type="RMS_NORM_BACKWARD",
    summary="The gradients of `rmsnorm`.",
    inputs=(
        Input("grad", "Cotangent of Y, the input's dims."),
        Input("input", "The forward's input."),
        Input("scale", f"The forward's scale. {_WEIGHT}.", optional=True),
        Input("inv_variance", f"The forward's inv_var. {_STATISTICS}.", types=(data_type.FLOAT,)),
    ),
    outputs=(
        Output("DX", "Gradient of input, laid out as input.", same_as("input")),
        Output("DScale", "Gradient of scale, laid out as scale.", _weight_gradient, _has_scale),
        Output("DBias", f"Gradient of bias, laid out as scale. {_WEIGHT}.", _weight_gradient, _wants_dbias),
    ),
    attributes=(Attribute("has_dbias", kinds.flag, "Whether DBias is an output.", default=True),),
    rules=(
        _has_dim("grad", lambda node: node.inputs["input"].dim, _AS_INPUT),
        _weight_spans_axes,
        _statistics_span_axes,
        _has_normalised_axes,
        _normalised_axes_are_not_empty,
    ),
)

NORMS = (RMSNORM, RMSNORM_BACKWARD)
