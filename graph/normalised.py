"""Which axes a norm runs over, the dims that follow from them, and the rules of its ports.

An RMS norm, a layer norm and an adaptive layer norm run over the axes where their scale is not 1 long; the adaptive
one's scale may differ along the first axis, the batch. An instance norm runs over all axes but the batch and the
channels, axis 1; a batch norm over all but the channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.operation import Symbols
from cudnn_jax.graph.shapes import has_dim, refuse

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node

Rule = Callable[["Node", Symbols], None]

_AXES_OF_RANK: dict[str, Callable[[int], Dims]] = {
    "INSTANCE_NORM": lambda rank: tuple(range(2, rank)),
    "BATCH_NORM": lambda rank: (0, *range(2, rank)),
}
"""The axes of norms whose rank alone tells them."""


def _kind(node: Node) -> str:
    return node.type.removesuffix("_BACKWARD").removesuffix("_INFERENCE")


def normalised_axes(node: Node) -> Dims:
    """The axes that a norm's node runs over.

    Where the rank does not tell them: where scale is not 1, or bias where there is no scale. Without either, those
    where the statistics are 1, and for want of these every axis but the first.
    """
    dim = node.inputs["input"].dim
    if _kind(node) in _AXES_OF_RANK:
        return _AXES_OF_RANK[_kind(node)](len(dim))
    weight = _weight(node)
    if weight:
        axes = tuple(axis for axis, size in enumerate(node.inputs[weight].dim) if size != 1)
        return tuple(axis for axis in axes if axis) if _kind(node) == "ADA_LAYER_NORM" else axes
    if "inv_variance" in node.inputs:
        kept = node.inputs["inv_variance"].dim
        return tuple(axis for axis, size in enumerate(dim) if size != 1 and kept[axis] == 1)
    return tuple(range(1, len(dim)))


def _weight(node: Node) -> str | None:
    return next((port for port in ("scale", "bias") if port in node.inputs), None)


def weight_dim(node: Node) -> Dims:
    """The dims of a norm's scale and bias."""
    dim, axes, port = node.inputs["input"].dim, normalised_axes(node), _weight(node)
    if _kind(node) in _AXES_OF_RANK:
        return tuple(size if axis == 1 else 1 for axis, size in enumerate(dim))
    if port:
        return node.inputs[port].dim
    return tuple(size if axis in axes else 1 for axis, size in enumerate(dim))


def statistics_dim(node: Node) -> Dims:
    """1 on the normalised axes, the input's dims elsewhere."""
    dim, axes = node.inputs["input"].dim, normalised_axes(node)
    return tuple(1 if axis in axes else size for axis, size in enumerate(dim))


def number_of(node: Node, name: str) -> float | None:
    """A number that is given plainly or as a tensor passed by value; None if the node has none."""
    given = node.inputs[name].value if name in node.inputs else node.params.get(name)
    return None if given is None else float(given)


def epsilon_of(node: Node) -> float | None:
    """The number that is added to the mean square or the variance; None if the node has none."""
    return number_of(node, "epsilon")


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


def _has_channels(node: Node, symbols: Symbols) -> None:
    dim = node.inputs["input"].dim
    if len(dim) < 2:
        refuse(node, "input", f"has dim {dim}", "(N, C, ...), rank at least 2")


def statistics_span_axes(port: str) -> Rule:
    """The rule of a port that takes statistics."""

    def rule(node: Node, symbols: Symbols) -> None:
        dim, kept = node.inputs["input"].dim, node.inputs[port].dim
        if len(kept) != len(dim) or kept != statistics_dim(node):
            refuse(node, port, f"has dim {kept}", f"1 on the normalised axes, the input's dims {dim} elsewhere")

    return rule


def is_number(name: str, most: float, what: str) -> Rule:
    """The rule of a port or attribute that holds a finite number from 0 to `most`, which is `what`."""

    def rule(node: Node, symbols: Symbols) -> None:
        if name in node.inputs and not node.inputs[name].is_pass_by_value:
            refuse(node, name, f"is {node.inputs[name]!r}", "a number, or a tensor passed by value")
        value = number_of(node, name)
        if value is not None and not (0 <= value <= most and value < math.inf):
            refuse(node, name, f"is {value}", what)

    return rule


def running_statistics(node: Node, symbols: Symbols) -> None:
    """The rule of a batch norm's running statistics."""
    given = [port for port in ("in_running_mean", "in_running_var") if port in node.inputs]
    if len(given) == 1:
        refuse(node, given[0], "came alone", "both running statistics, or neither")
    if given and number_of(node, "momentum") is None:
        refuse(node, given[0], "came without momentum", "momentum says how they move")


AXES_RULES: tuple[Rule, ...] = (
    _weight_spans_axes,
    _has_normalised_axes,
    _normalised_axes_are_not_empty,
    has_dim("bias", weight_dim, "the normalised axes"),
)
"""Of norms whose weights tell the axes."""

CHANNEL_RULES: tuple[Rule, ...] = (
    _has_channels,
    _normalised_axes_are_not_empty,
    *(has_dim(port, weight_dim, "the channels") for port in ("scale", "bias")),
)
"""Of norms whose rank tells the axes."""
EPSILON_RULE = is_number("epsilon", math.inf, "a finite number, at least 0")
MOMENTUM_RULE = is_number("momentum", 1.0, "a number from 0 to 1")
