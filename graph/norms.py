"""The norms of the structured table, forward and backward. `normalised` says which axes each runs over."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from cudnn_jax.graph import kinds
from cudnn_jax.graph.layout import row_major
from cudnn_jax.graph.normalised import (
    AXES_RULES,
    CHANNEL_RULES,
    EPSILON_RULE,
    MOMENTUM_RULE,
    Rule,
    normalised_axes,
    running_statistics,
    statistics_dim,
    statistics_span_axes,
    weight_dim,
)
from cudnn_jax.graph.operation import Attribute, Input, Layout, Operation, Output, Symbols
from cudnn_jax.graph.shapes import has_dim, ordered_as, same_as
from cudnn_jax.graph.types import data_type

if TYPE_CHECKING:
    from cudnn_jax.graph.node import Node
    from cudnn_jax.graph.tensor import Tensor
    from cudnn_jax.graph.transposed import Term, Transposed

_When = Callable[[Mapping[str, Any], Mapping[str, "Tensor"]], bool]
_TYPES = {
    "rmsnorm": "RMS_NORM",
    "layernorm": "LAYER_NORM",
    "adalayernorm": "ADA_LAYER_NORM",
    "instancenorm": "INSTANCE_NORM",
    "batchnorm": "BATCH_NORM",
}


def _statistics(node: Node, symbols: Symbols) -> Layout:
    return ordered_as(statistics_dim(node), node.inputs["input"])


def _weight_gradient(node: Node, symbols: Symbols) -> Layout:
    if "scale" in node.inputs:
        return node.inputs["scale"].dim, node.inputs["scale"].stride
    dim = weight_dim(node)
    return dim, row_major(dim)


def _is_training(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return bool(params["norm_forward_phase"] == "TRAINING")


def _has_scale(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return "scale" in inputs


def _wants_dbias(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return bool(params["has_dbias"])


def _has_running_statistics(params: Mapping[str, Any], inputs: Mapping[str, Tensor]) -> bool:
    return "in_running_mean" in inputs


_FLOAT = data_type.FLOAT
_SPANNING = "The input's dims on the normalised axes, 1 elsewhere"
_CHANNELS = "(1, C, 1, ...)"
_STATISTICS = "1 on the normalised axes, the input's dims elsewhere, float32"
_INPUT = Input("input", "(N, C, ...).")
_EPSILON = Input("epsilon", "Added to the mean: a finite number, at least 0, or a tensor passed by value.", number=True)
_PEERS = Input("peer_stats", "Buffers through which devices exchange their sums.", optional=True, many=True)
_Y = Output("Y", "Dims and layout of input.", same_as("input"))
_PHASE = Attribute(
    "norm_forward_phase",
    kinds.choice("TRAINING", "INFERENCE"),
    "TRAINING makes the statistics, INFERENCE does not.",
    required=True,
)


def _weight(name: str, doc: str, optional: bool = False, types: tuple[data_type, ...] = ()) -> Input:
    return Input(name, f"{doc}.", optional=optional, types=types)


def _made(name: str, what: str, when: _When | None = _is_training) -> Output:
    return Output(name, f"{what}. {_STATISTICS}.", _statistics, when, _FLOAT)


def _mean(when: _When | None = _is_training) -> Output:
    return _made("mean", "The mean of the formula", when)


def _rsqrt(when: _When | None = _is_training) -> Output:
    return _made("inv_var", "The rsqrt of the formula", when)


_FORWARDS_MEAN = Input("mean", f"The forward's mean. {_STATISTICS}.", types=(_FLOAT,))
_FORWARDS_RSQRT = Input("inv_variance", f"The forward's inv_var. {_STATISTICS}.", types=(_FLOAT,))


def _forward(
    name: str,
    summary: str,
    inputs: tuple[Input, ...],
    rules: tuple[Rule, ...],
    made: tuple[Output, ...],
    attributes: tuple[Attribute, ...] = (_PHASE,),
) -> Operation:
    return Operation(
        name=name,
        type=_TYPES[name],
        summary=summary,
        inputs=(_INPUT, *inputs),
        outputs=(_Y, *made),
        attributes=attributes,
        rules=(*rules, EPSILON_RULE),
        derivative=_derivative,
        differentiated=MappingProxyType({"norm_forward_phase": "TRAINING"} if attributes else {}),
    )


def _backward(
    name: str,
    scale: Input,
    statistics: tuple[Input, ...],
    rules: tuple[Rule, ...],
    when: tuple[_When | None, _When | None] = (None, None),
    peers: tuple[Input, ...] = (),
    attributes: tuple[Attribute, ...] = (),
) -> Operation:
    """The gradients of a norm; `when` says of DScale and DBias whether they exist."""
    return Operation(
        name=f"{name}_backward",
        type=f"{_TYPES[name]}_BACKWARD",
        summary=f"The gradients of `{name}`.",
        inputs=(
            Input("grad", "Cotangent of Y, the input's dims."),
            Input("input", "The forward's input."),
            scale,
            *statistics,
            *peers,
        ),
        outputs=(
            Output("DX", "Gradient of input, laid out as input.", same_as("input")),
            Output("DScale", "Gradient of scale, laid out as scale.", _weight_gradient, when[0]),
            Output("DBias", f"Gradient of bias, laid out as scale. {_SPANNING}.", _weight_gradient, when[1]),
        ),
        attributes=attributes,
        rules=(
            has_dim("grad", lambda node: node.inputs["input"].dim, "the input's"),
            *rules[:1],
            *(statistics_span_axes(port.name) for port in statistics),
            *rules[1:],
        ),
    )


_NO_GRADIENT = ("in_running_mean", "in_running_var")


def _derivative(d: Transposed) -> Mapping[str, Term | None]:
    """Of Y by the norm's own backward, and of the statistics; running statistics take no gradient and have none."""
    made: dict[str, Term | None] = dict.fromkeys(d.wanted)
    if (given := d.cotangent("Y")) is not None:
        made |= _through_y(d, given)
    x, count = d["input"], 1.0 / prod(d.node.inputs["input"].dim[axis] for axis in normalised_axes(d.node))
    mean, r = d.cotangent("mean") if "mean" in d.node.outputs else None, d.cotangent("inv_var")
    slopes = [] if mean is None else [mean * count]
    if r is not None:
        centred = x - d["mean"] if "mean" in d.node.outputs else x
        slopes.append(-count * r * d["inv_var"] * d["inv_var"] * d["inv_var"] * centred)
    for slope in slopes if "input" in d.wanted else []:
        made["input"] = slope if made["input"] is None else made["input"] + slope
    return made


def _through_y(d: Transposed, given: Term) -> dict[str, Term | None]:
    statistics = {"inv_variance": d["inv_var"]} | ({"mean": d["mean"]} if "mean" in d.node.outputs else {})
    without = ("bias", "epsilon", "momentum", "norm_forward_phase", *_NO_GRADIENT)
    gradients = d.backward_node(f"{d.node.operation.name}_backward", {"grad": d.full("Y")} | statistics, without)
    ports = {"input": "DX", "scale": "DScale"} | ({"bias": "DBias"} if "scale" in d.node.inputs else {})
    made: dict[str, Term | None] = {port: gradients[name] for port, name in ports.items() if port in d.wanted}
    if "bias" in d.wanted and "bias" not in made:
        made["bias"] = d.fold(given, "bias", d.node.outputs["Y"].dim)
    return made


def _inference_derivative(d: Transposed) -> Mapping[str, Term]:
    slopes: dict[str, Callable[[], Term]] = {
        "input": lambda: d.ct * d["inv_variance"] * d["scale"],
        "mean": lambda: -d.ct * d["inv_variance"] * d["scale"],
        "inv_variance": lambda: d.ct * (d["input"] - d["mean"]) * d["scale"],
        "scale": lambda: d.ct * (d["input"] - d["mean"]) * d["inv_variance"],
        "bias": lambda: d.ct,
    }
    return {port: d.fold(slopes[port](), port) for port in d.wanted}


_CENTRED = "Y = (input - mean) * rsqrt(variance + epsilon) * scale + bias, mean and variance over"
_ALL = "Without weights every axis but the first is normalised"
_OPTIONAL = (
    _weight("scale", f"{_SPANNING}. {_ALL}", optional=True),
    _weight("bias", _SPANNING, optional=True),
)
_FORWARDS_SCALE = _weight("scale", f"The forward's scale. {_SPANNING}", optional=True)
_BATCHED = tuple(_weight(name, f"{_SPANNING}; along the first axis 1, or the batch") for name in ("scale", "bias"))
_OF_CHANNELS = tuple(_weight(name, _CHANNELS) for name in ("scale", "bias"))
_BOTH = (_FORWARDS_MEAN, _FORWARDS_RSQRT)

_RMS = (
    _forward(
        "rmsnorm",
        "Y = input * rsqrt(mean(input^2) + epsilon) * scale + bias, the mean over the normalised axes.",
        (*_OPTIONAL, _EPSILON),
        AXES_RULES,
        (_rsqrt(),),
    ),
    _backward(
        "rmsnorm",
        _FORWARDS_SCALE,
        (_FORWARDS_RSQRT,),
        AXES_RULES,
        (_has_scale, _wants_dbias),
        attributes=(Attribute("has_dbias", kinds.flag, "Whether DBias is an output.", default=True),),
    ),
)

_LAYER = (
    _forward(
        "layernorm",
        f"{_CENTRED} the normalised axes.",
        (*_OPTIONAL, _EPSILON),
        AXES_RULES,
        (_mean(), _rsqrt()),
    ),
    _backward("layernorm", _FORWARDS_SCALE, _BOTH, AXES_RULES, (_has_scale, _has_scale)),
)

_ADAPTIVE = (
    _forward(
        "adalayernorm",
        f"{_CENTRED} the normalised axes; weights may differ along the batch.",
        (*_BATCHED, _EPSILON),
        AXES_RULES,
        (_mean(), _rsqrt()),
    ),
    _backward("adalayernorm", _BATCHED[0], _BOTH, AXES_RULES),
)

_INSTANCE = (
    _forward(
        "instancenorm",
        f"{_CENTRED} all axes behind the channels.",
        (*_OF_CHANNELS, _EPSILON),
        CHANNEL_RULES,
        (_mean(), _rsqrt()),
    ),
    _backward("instancenorm", _OF_CHANNELS[0], _BOTH, CHANNEL_RULES),
)


def _next(name: str, what: str) -> Output:
    doc = f"(1 - momentum) in_running_{name} + momentum {what}"
    return _made(f"next_running_{name}", doc, _has_running_statistics)


_RUNNING = ("in_running_mean", "in_running_var")
_STATISTIC_PORTS = ("mean", "inv_variance")

_BATCH = (
    _forward(
        "batchnorm",
        f"{_CENTRED} all axes but the channels.",
        (
            *_OF_CHANNELS,
            *(_weight(name, f"{_CHANNELS}, float32", True, (_FLOAT,)) for name in _RUNNING),
            _EPSILON,
            Input(
                "momentum",
                "Of the running statistics: a number from 0 to 1, or a tensor passed by value.",
                number=True,
                optional=True,
            ),
            _PEERS,
        ),
        (
            *CHANNEL_RULES,
            *(has_dim(port, statistics_dim, "the channels") for port in _RUNNING),
            MOMENTUM_RULE,
            running_statistics,
        ),
        (_mean(None), _rsqrt(None), _next("mean", "mean"), _next("var", "n / (n - 1) variance, of n elements")),
        attributes=(),
    ),
    Operation(
        name="batchnorm_inference",
        type="BATCH_NORM_INFERENCE",
        summary="Y = (input - mean) * inv_variance * scale + bias, for each channel.",
        inputs=(_INPUT, *(_weight(name, _CHANNELS) for name in _STATISTIC_PORTS), *_OF_CHANNELS),
        outputs=(_Y,),
        rules=(*CHANNEL_RULES, *(has_dim(port, weight_dim, "the channels") for port in _STATISTIC_PORTS)),
        derivative=_inference_derivative,
        rebuilt=True,
    ),
    _backward("batchnorm", _OF_CHANNELS[0], _BOTH, CHANNEL_RULES, peers=(_PEERS,)),
)

NORMS = (*_RMS, *_LAYER, *_ADAPTIVE, *_INSTANCE, *_BATCH)
