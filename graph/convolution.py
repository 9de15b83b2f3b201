"""Convolution of the structured table: forward, and the gradients of its image and of its filter.

Images are (N, C, spatial...), filters (K, C / groups, spatial...); the filter's channels tell the groups. Along each
spatial axis `out = 1 + (in + pre_padding + post_padding - dilation (filter - 1) - 1) // stride`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cudnn_jax.graph import kinds
from cudnn_jax.graph.errors import GraphValidationError
from cudnn_jax.graph.layout import Dims
from cudnn_jax.graph.operation import Attribute, Derivative, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import ordered_as, refuse, set_by_caller

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.transposed import Term, Transposed


class Window(NamedTuple):
    """How a filter moves over an image, one number for each spatial axis."""

    pre_padding: Dims
    post_padding: Dims
    stride: Dims
    dilation: Dims


_NEUTRAL = {"pre_padding": 0, "post_padding": 0, "stride": 1, "dilation": 1}
"""What each list holds where it is not given."""


def window_of(node: Node) -> Window:
    """The node's window, defaults filled in."""
    (first, *_) = node.inputs.values()
    spatial = len(first.dim) - 2
    return Window(*(node.params[name] or (neutral,) * spatial for name, neutral in _NEUTRAL.items()))


def _settle(params: dict[str, Any]) -> None:
    """`padding` is both paddings, and a list that holds nothing but the default is not given."""
    padding = params.pop("padding")
    for name, neutral in _NEUTRAL.items():
        if name.endswith("padding") and padding is not None:
            if params[name] not in (None, padding):
                raise GraphValidationError(f"padding is {padding} and {name} {params[name]}; the rule: give one")
            params[name] = padding
        if params[name] is not None and set(params[name]) <= {neutral}:
            params[name] = None


def _well_formed(node: Node, symbols: Symbols) -> None:
    ranks = {port: len(tensor.dim) for port, tensor in node.inputs.items()}
    if len(set(ranks.values())) > 1 or min(ranks.values()) < 3:
        came = ", ".join(f"{port} {tensor.dim}" for port, tensor in node.inputs.items())
        refuse(node, "dims", f"are {came}", "one rank, at least 3: (batch or filters, channels, spatial...)")
    spatial = min(ranks.values()) - 2
    for name, neutral in _NEUTRAL.items():
        given = node.params[name]
        if given is not None and (len(given) != spatial or min(given) < neutral):
            refuse(node, name, f"is {given}", f"{spatial} integers, at least {neutral}, one for each spatial axis")


def _forward_dim(node: Node, image: Dims, weight: Dims) -> Dims:
    """The dims of the forward's output, or a refusal that names what does not fit."""
    came = f"are image {image}, filter {weight}"
    if weight[1] == 0 or image[1] % weight[1] or weight[0] % (image[1] // weight[1] or 1):
        refuse(node, "dims", came, "the image's channels are a multiple of the filter's, its filters one of the groups")
    spatial = []
    for at, (size, taps) in enumerate(zip(image[2:], weight[2:], strict=True)):
        pre, post, stride, dilation = (each[at] for each in window_of(node))
        room = size + pre + post - dilation * (taps - 1) - 1
        if taps < 1 or room < 0:
            refuse(node, "dims", came, "the filter is at least 1 long and fits into the padded image")
        spatial.append(1 + room // stride)
    return (image[0], weight[0], *spatial)


def _y(node: Node, symbols: Symbols) -> Layout:
    image, weight = node.inputs["image"], node.inputs["weight"]
    return ordered_as(_forward_dim(node, image.dim, weight.dim), image)


def _fits_loss(output: str, arrange: Callable[[Mapping[str, Dims], Dims], tuple[Dims, Dims]]) -> Callable[..., None]:
    """The check that a gradient's dims, with those of the inputs, give the dims of loss."""

    def check(node: Node, dim: Dims) -> None:
        inputs = {port: tensor.dim for port, tensor in node.inputs.items()}
        if len(dim) != len(inputs["loss"]):
            refuse(node, output, f"has dim {dim}", f"the rank of loss {inputs['loss']}")
        made = _forward_dim(node, *arrange(inputs, dim))
        if made != inputs["loss"]:
            refuse(node, output, f"has dim {dim}", f"the forward of these dims makes {made}, loss has {inputs['loss']}")

    return check


def _derivative(output: str, **gradients: tuple[str, tuple[str, str]]) -> Derivative:
    """Of an operation that is linear in both inputs, as the two others are.

    Args:
      output: the operation's.
      gradients: input port -> (the operation that makes its gradient, what that takes: inputs of this one by their
        ports, or the cotangent, by the output's).
    """

    def rule(d: Transposed) -> Mapping[str, Term]:
        made = {}
        for port, (name, wired) in gradients.items():
            if port in d.wanted:
                operands = [d.full(output) if each == output else d[each] for each in wired]
                made[port] = d.term(name, *operands, **d.options)
                made[port].tensor.set_dim(d.node.inputs[port].dim)
        return made

    return rule


_ATTRIBUTES = (
    Attribute("padding", kinds.integers, "Both paddings, where they are alike."),
    Attribute("pre_padding", kinds.integers, "Zeros in front of each spatial axis; none if absent."),
    Attribute("post_padding", kinds.integers, "Zeros behind each spatial axis; none if absent."),
    Attribute("stride", kinds.integers, "Steps of the filter; 1 if absent."),
    Attribute("dilation", kinds.integers, "Distance of the filter's elements; 1 if absent."),
    Attribute(
        "convolution_mode",
        kinds.choice("CROSS_CORRELATION", "CONVOLUTION"),
        "CONVOLUTION mirrors the filter.",
        default="CROSS_CORRELATION",
    ),
)


def _convolution(
    name: str, summary: str, inputs: tuple[Input, Input], output: Output, derivative: Derivative
) -> Operation:
    return Operation(
        name=name,
        type=name.upper(),
        summary=summary,
        inputs=inputs,
        outputs=(output,),
        attributes=_ATTRIBUTES,
        settle=_settle,
        rules=(_well_formed,),
        derivative=derivative,
    )


_IMAGE = Input("image", "(N, C, spatial...).")
_FILTER = "(K, C / groups, spatial...)."
_LOSS = Input("loss", "Cotangent of the forward's Y.")

CONVOLUTIONS = (
    _convolution(
        "conv_fprop",
        "The convolution of an image with a filter.",
        (_IMAGE, Input("weight", _FILTER)),
        Output("Y", "(N, K, spatial...), in the image's memory order.", _y),
        _derivative("Y", image=("conv_dgrad", ("Y", "weight")), weight=("conv_wgrad", ("image", "Y"))),
    ),
    _convolution(
        "conv_dgrad",
        "The gradient of a convolution's image.",
        (_LOSS, Input("filter", _FILTER)),
        Output(
            "DX",
            "(N, C, spatial...): the caller sets the dims, in loss's memory order.",
            set_by_caller("DX", _fits_loss("DX", lambda inputs, dim: (dim, inputs["filter"])), like="loss"),
        ),
        _derivative("DX", loss=("conv_fprop", ("DX", "filter")), filter=("conv_wgrad", ("DX", "loss"))),
    ),
    _convolution(
        "conv_wgrad",
        "The gradient of a convolution's filter.",
        (_IMAGE, _LOSS),
        Output(
            "DW",
            "(K, C / groups, spatial...): the caller sets the dims, in the image's memory order.",
            set_by_caller("DW", _fits_loss("DW", lambda inputs, dim: (inputs["image"], dim)), like="image"),
        ),
        _derivative("DW", image=("conv_dgrad", ("loss", "DW")), loss=("conv_fprop", ("image", "DW"))),
    ),
)
