"""The pointwise table: 54 operations of one shape rule."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import broadcast, row_major
from cudnn_jax.graph.operation import Attribute, Derivative, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import refuse
from cudnn_jax.graph.slopes import (
    FLAT,
    PRODUCT,
    SUM,
    Slope,
    backward,
    chosen,
    elu_curvature,
    exponent_slope,
    gelu_curvature,
    gelu_tanh_curvature,
    power_slope,
    same,
    sigmoid_curvature,
    softplus_curvature,
    swish_curvature,
    tanh_curvature,
    through,
)

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node

_ATTRIBUTES = {
    "negative_slope": Attribute("negative_slope", kinds.number, "Slope below 0."),
    "lower_clip": Attribute("lower_clip", kinds.number, "Where the lower part starts, and its value there; 0 if none."),
    "upper_clip": Attribute("upper_clip", kinds.number, "Upper bound of the result; none by default."),
    "swish_beta": Attribute("swish_beta", kinds.number, "Factor inside the sigmoid; 1 by default."),
    "axis": Attribute("axis", kinds.integer, "The axis whose index is written.", required=True),
    "slope": Attribute("negative_slope", kinds.number, "Slope below 0.", required=True),
}

# name: (tensor ports, what it computes, attributes, slopes by port)
_TABLE: dict[str, tuple[str, str, str, dict[str, Slope]]] = {
    "abs": ("input", "|input|", "", {"input": lambda d: d.ct * d["input"].sign()}),
    "add": ("a b", "a + b", "", SUM),
    "add_square": ("a b", "a + b * b", "", {"a": same, "b": lambda d: 2.0 * d.ct * d["b"]}),
    "bias": ("input bias", "input + bias", "", {"input": same, "bias": same}),
    "binary_select": (
        "input0 input1 mask",
        "input0 where mask is true, input1 elsewhere",
        "",
        {"input0": lambda d: d["mask"].where(d.ct, 0.0), "input1": lambda d: d["mask"].where(0.0, d.ct)},
    ),
    "ceil": ("input", "The smallest integer not below input", "", FLAT),
    "cmp_eq": ("input comparison", "input == comparison", "", FLAT),
    "cmp_ge": ("input comparison", "input >= comparison", "", FLAT),
    "cmp_gt": ("input comparison", "input > comparison", "", FLAT),
    "cmp_le": ("input comparison", "input <= comparison", "", FLAT),
    "cmp_lt": ("input comparison", "input < comparison", "", FLAT),
    "cmp_neq": ("input comparison", "input != comparison", "", FLAT),
    "cos": ("input", "cos(input)", "", {"input": lambda d: -d.ct * d["input"].sin()}),
    "div": ("a b", "a / b", "", {"a": lambda d: d.ct / d["b"], "b": lambda d: -d.ct * d["a"] / (d["b"] * d["b"])}),
    "elu": ("input", "input above 0, exp(input) - 1 below", "", {"input": through("elu_backward")}),
    "elu_backward": (
        "loss input",
        "loss times the derivative of elu at input",
        "",
        backward("elu_backward", elu_curvature),
    ),
    "erf": (
        "input",
        "erf(input)",
        "",
        {"input": lambda d: d.ct * (2.0 / math.sqrt(math.pi)) * (-d["input"] * d["input"]).exp()},
    ),
    "exp": ("input", "exp(input)", "", {"input": lambda d: d.ct * d["OUT_0"]}),
    "floor": ("input", "The largest integer not above input", "", FLAT),
    "gelu": (
        "input",
        "input * Phi(input), Phi the normal distribution function",
        "",
        {"input": through("gelu_backward")},
    ),
    "gelu_approx_tanh": (
        "input",
        "gelu(input) in its tanh approximation",
        "",
        {"input": through("gelu_approx_tanh_backward")},
    ),
    "gelu_approx_tanh_backward": (
        "loss input",
        "loss times the derivative of gelu_approx_tanh at input",
        "",
        backward("gelu_approx_tanh_backward", gelu_tanh_curvature),
    ),
    "gelu_backward": (
        "loss input",
        "loss times the derivative of gelu at input",
        "",
        backward("gelu_backward", gelu_curvature),
    ),
    "identity": ("input", "input", "", {"input": same}),
    "log": ("input", "The natural logarithm of input", "", {"input": lambda d: d.ct / d["input"]}),
    "logical_and": ("a b", "a and b", "", FLAT),
    "logical_not": ("input", "not input", "", FLAT),
    "logical_or": ("a b", "a or b", "", FLAT),
    "max": ("input0 input1", "The larger of input0 and input1", "", chosen("cmp_gt", "cmp_ge")),
    "min": ("input0 input1", "The smaller of input0 and input1", "", chosen("cmp_lt", "cmp_le")),
    "mod": (
        "input0 input1",
        "The remainder of input0 / input1, with the sign of input0",
        "",
        {"input0": same, "input1": lambda d: d.ct * (d["OUT_0"] - d["input0"]) / d["input1"]},
    ),
    "mul": ("a b", "a * b", "", PRODUCT),
    "neg": ("input", "-input", "", {"input": lambda d: -d.ct}),
    "pow": ("input0 input1", "input0 ** input1", "", {"input0": power_slope, "input1": exponent_slope}),
    "reciprocal": ("input", "1 / input", "", {"input": lambda d: -d.ct * d["OUT_0"] * d["OUT_0"]}),
    "rsqrt": ("input", "1 / sqrt(input)", "", {"input": lambda d: -0.5 * d.ct * d["OUT_0"] / d["input"]}),
    "scale": (
        "input scale",
        "input * scale",
        "",
        {"input": lambda d: d.ct * d["scale"], "scale": lambda d: d.ct * d["input"]},
    ),
    "sigmoid": ("input", "1 / (1 + exp(-input))", "", {"input": through("sigmoid_backward")}),
    "sigmoid_backward": (
        "loss input",
        "loss times the derivative of sigmoid at input",
        "",
        backward("sigmoid_backward", sigmoid_curvature),
    ),
    "sin": ("input", "sin(input)", "", {"input": lambda d: d.ct * d["input"].cos()}),
    "softplus": ("input", "log(1 + exp(input))", "", {"input": through("softplus_backward")}),
    "softplus_backward": (
        "loss input",
        "loss times the derivative of softplus at input",
        "",
        backward("softplus_backward", softplus_curvature),
    ),
    "sqrt": ("input", "sqrt(input)", "", {"input": lambda d: 0.5 * d.ct / d["OUT_0"]}),
    "sub": ("a b", "a - b", "", {"a": same, "b": lambda d: -d.ct}),
    "tan": ("input", "tan(input)", "", {"input": lambda d: d.ct * (1.0 + d["OUT_0"] * d["OUT_0"])}),
    "tanh": ("input", "tanh(input)", "", {"input": through("tanh_backward")}),
    "tanh_backward": (
        "loss input",
        "loss times the derivative of tanh at input",
        "",
        backward("tanh_backward", tanh_curvature),
    ),
    "relu": (
        "input",
        "max(input, 0), with optional slope and clips",
        "negative_slope lower_clip upper_clip",
        {"input": through("relu_backward")},
    ),
    "leaky_relu": (
        "input",
        "input above 0, negative_slope * input below",
        "slope",
        {"input": through("leaky_relu_backward")},
    ),
    "swish": ("input", "input * sigmoid(swish_beta * input)", "swish_beta", {"input": through("swish_backward")}),
    "gen_index": ("input", "The index of each element along axis", "axis", FLAT),
    "relu_backward": (
        "loss input",
        "loss times the derivative of relu at input",
        "negative_slope lower_clip upper_clip",
        backward("relu_backward"),
    ),
    "leaky_relu_backward": (
        "loss input",
        "loss times the derivative of leaky_relu at input",
        "slope",
        backward("leaky_relu_backward"),
    ),
    "swish_backward": (
        "loss input",
        "loss times the derivative of swish at input",
        "swish_beta",
        backward("swish_backward", swish_curvature),
    ),
}


def _broadcast_inputs(node: Node, symbols: Symbols) -> Layout:
    # A number takes the rank of the tensors beside it.
    shapes = [tensor.dim for tensor in node.inputs.values() if not tensor.is_pass_by_value]
    dim = broadcast(shapes or [tensor.dim for tensor in node.inputs.values()])
    if dim is None:
        came = ", ".join(f"{port} {tensor.dim}" for port, tensor in node.inputs.items())
        refuse(node, "dims", f"are {came}", "inputs broadcast together: along each axis equal, or 1")
    return dim, row_major(dim)


def _axis_in_range(node: Node, symbols: Symbols) -> None:
    axis, dim = node.params["axis"], node.inputs["input"].dim
    if not 0 <= axis < len(dim):
        refuse(node, "axis", f"is {axis}", f"an axis of input, 0 to {len(dim) - 1}")


def _derivative(slopes: Mapping[str, Slope]) -> Derivative:
    """Gradients of all inputs: summed over the axes along which one is broadcast, and 0 without a slope."""
    return lambda d: {port: d.fold(slopes[port](d), port) if port in slopes else None for port in d.wanted}


def _operation(name: str, ports: str, formula: str, attributes: str, slopes: Mapping[str, Slope]) -> Operation:
    return Operation(
        name=name,
        type="POINTWISE",
        summary=f"{formula}, element by element.",
        inputs=tuple(Input(port, "A tensor; inputs broadcast together.") for port in ports.split()),
        outputs=(Output("OUT_0", "Dims that the inputs broadcast to.", _broadcast_inputs),),
        attributes=tuple(_ATTRIBUTES[attribute] for attribute in attributes.split()),
        fixed=MappingProxyType({"mode": name}),
        rules=(_axis_in_range,) if attributes == "axis" else (),
        derivative=_derivative(slopes),
        rebuilt=True,
    )


POINTWISE = {name: _operation(name, *entry) for name, entry in _TABLE.items()}
