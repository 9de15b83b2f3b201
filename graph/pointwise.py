"""The pointwise table: 54 operations of one shape rule."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import broadcast, row_major
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import refuse

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

# name: (tensor ports, what it computes, attributes)
_TABLE: dict[str, tuple[str, str, str]] = {
    "abs": ("input", "|input|", ""),
    "add": ("a b", "a + b", ""),
    "add_square": ("a b", "a + b * b", ""),
    "bias": ("input bias", "input + bias", ""),
    "binary_select": ("input0 input1 mask", "input0 where mask is true, input1 elsewhere", ""),
    "ceil": ("input", "The smallest integer not below input", ""),
    "cmp_eq": ("input comparison", "input == comparison", ""),
    "cmp_ge": ("input comparison", "input >= comparison", ""),
    "cmp_gt": ("input comparison", "input > comparison", ""),
    "cmp_le": ("input comparison", "input <= comparison", ""),
    "cmp_lt": ("input comparison", "input < comparison", ""),
    "cmp_neq": ("input comparison", "input != comparison", ""),
    "cos": ("input", "cos(input)", ""),
    "div": ("a b", "a / b", ""),
    "elu": ("input", "input above 0, exp(input) - 1 below", ""),
    "elu_backward": ("loss input", "loss times the derivative of elu at input", ""),
    "erf": ("input", "erf(input)", ""),
    "exp": ("input", "exp(input)", ""),
    "floor": ("input", "The largest integer not above input", ""),
    "gelu": ("input", "input * Phi(input), Phi the normal distribution function", ""),
    "gelu_approx_tanh": ("input", "gelu(input) in its tanh approximation", ""),
    "gelu_approx_tanh_backward": ("loss input", "loss times the derivative of gelu_approx_tanh at input", ""),
    "gelu_backward": ("loss input", "loss times the derivative of gelu at input", ""),
    "identity": ("input", "input", ""),
    "log": ("input", "The natural logarithm of input", ""),
    "logical_and": ("a b", "a and b", ""),
    "logical_not": ("input", "not input", ""),
    "logical_or": ("a b", "a or b", ""),
    "max": ("input0 input1", "The larger of input0 and input1", ""),
    "min": ("input0 input1", "The smaller of input0 and input1", ""),
    "mod": ("input0 input1", "The remainder of input0 / input1, with the sign of input0", ""),
    "mul": ("a b", "a * b", ""),
    "neg": ("input", "-input", ""),
    "pow": ("input0 input1", "input0 ** input1", ""),
    "reciprocal": ("input", "1 / input", ""),
    "rsqrt": ("input", "1 / sqrt(input)", ""),
    "scale": ("input scale", "input * scale", ""),
    "sigmoid": ("input", "1 / (1 + exp(-input))", ""),
    "sigmoid_backward": ("loss input", "loss times the derivative of sigmoid at input", ""),
    "sin": ("input", "sin(input)", ""),
    "softplus": ("input", "log(1 + exp(input))", ""),
    "softplus_backward": ("loss input", "loss times the derivative of softplus at input", ""),
    "sqrt": ("input", "sqrt(input)", ""),
    "sub": ("a b", "a - b", ""),
    "tan": ("input", "tan(input)", ""),
    "tanh": ("input", "tanh(input)", ""),
    "tanh_backward": ("loss input", "loss times the derivative of tanh at input", ""),
    "relu": ("input", "max(input, 0), with optional slope and clips", "negative_slope lower_clip upper_clip"),
    "leaky_relu": ("input", "input above 0, negative_slope * input below", "slope"),
    "swish": ("input", "input * sigmoid(swish_beta * input)", "swish_beta"),
    "gen_index": ("input", "The index of each element along axis", "axis"),
    "relu_backward": (
        "loss input",
        "loss times the derivative of relu at input",
        "negative_slope lower_clip upper_clip",
    ),
    "leaky_relu_backward": ("loss input", "loss times the derivative of leaky_relu at input", "slope"),
    "swish_backward": ("loss input", "loss times the derivative of swish at input", "swish_beta"),
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


def _operation(name: str, ports: str, formula: str, attributes: str) -> Operation:
    return Operation(
        name=name,
        type="POINTWISE",
        summary=f"{formula}, element by element.",
        inputs=tuple(Input(port, "A tensor; inputs broadcast together.") for port in ports.split()),
        outputs=(Output("OUT_0", "Dims that the inputs broadcast to.", _broadcast_inputs),),
        attributes=tuple(_ATTRIBUTES[attribute] for attribute in attributes.split()),
        fixed=MappingProxyType({"mode": name}),
        rules=(_axis_in_range,) if attributes == "axis" else (),
    )


POINTWISE = {name: _operation(name, *entry) for name, entry in _TABLE.items()}
