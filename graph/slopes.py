"""Slopes of the pointwise operations, in the graph's own operations: what `pointwise` names in its table.

A slope is written with operators over `Term`s; what it does not read, no backward holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cudnn_jax.graph.transposed import Transposed

Slope = Callable[["Transposed"], Any]
"""A node whose output has the cotangent `d.ct` -> the gradient of one input, before broadcast axes are summed."""

FLAT: dict[str, Slope] = {}
"""Slopes of what is constant between its steps: all gradients are 0."""
_ROOT_2_OVER_PI, _CUBIC = math.sqrt(2 / math.pi), 0.044715


def same(d: Transposed) -> Any:
    return d.ct


def through(name: str, port: str = "input") -> Slope:
    """The cotangent through the backward mode `name`, at a port."""
    return lambda d: d.ct.through(name, d[port])


def backward(name: str, second: Slope | None = None) -> dict[str, Slope]:
    """Of a backward mode, which is linear in loss; `second` is the second derivative of the mode that it belongs to."""
    slopes: dict[str, Slope] = {"loss": through(name)}
    return slopes if second is None else slopes | {"input": lambda d: d.ct * d["loss"] * second(d)}


def power_slope(d: Transposed) -> Any:
    """Of 0 where the exponent is, whatever the base."""
    base, exponent = d["input0"], d["input1"]
    return d.ct * exponent * base.pow(exponent.cmp_eq(0.0).where(1.0, exponent - 1.0))


def exponent_slope(d: Transposed) -> Any:
    """Of 0 where the base is."""
    base = d["input0"]
    return d.ct * d["OUT_0"] * base.cmp_eq(0.0).where(1.0, base).log()


def tanh_curvature(d: Transposed) -> Any:
    y = d["input"].tanh()
    return -2.0 * y * (1.0 - y * y)


def sigmoid_curvature(d: Transposed) -> Any:
    share = d["input"].sigmoid()
    return share * (1.0 - share) * (1.0 - 2.0 * share)


def softplus_curvature(d: Transposed) -> Any:
    share = d["input"].sigmoid()
    return share * (1.0 - share)


def elu_curvature(d: Transposed) -> Any:
    x = d["input"]
    return x.cmp_lt(0.0).where(x.min(0.0).exp(), 0.0)


def gelu_curvature(d: Transposed) -> Any:
    x = d["input"]
    return (-0.5 * x * x).exp() * (2.0 - x * x) * (1.0 / math.sqrt(2 * math.pi))


def gelu_tanh_curvature(d: Transposed) -> Any:
    """Of x sigmoid(v), where v = 2 sqrt(2 / pi) (x + 0.044715 x^3)."""
    x = d["input"]
    v = 2.0 * _ROOT_2_OVER_PI * (x + _CUBIC * x * x * x)
    first = 2.0 * _ROOT_2_OVER_PI * (1.0 + 3.0 * _CUBIC * x * x)
    second = 12.0 * _ROOT_2_OVER_PI * _CUBIC * x
    share = v.sigmoid()
    steep = share * (1.0 - share)
    return steep * (2.0 * first + x * (first * first * (1.0 - 2.0 * share) + second))


def swish_curvature(d: Transposed) -> Any:
    x, given = d["input"], d.node.params["swish_beta"]
    beta = 1.0 if given is None else float(given)
    share = (beta * x).sigmoid()
    return beta * share * (1.0 - share) * (2.0 + beta * x * (1.0 - 2.0 * share))


def chosen(beyond: str, reached: str) -> dict[str, Slope]:
    """Of the larger or the smaller of two; equal ones share evenly."""

    def share(port: str, other: str) -> Slope:
        def slope(d: Transposed) -> Any:
            x, y = d[port], d[other]
            return 0.5 * d.ct * (x.mode(beyond, y) + x.mode(reached, y))

        return slope

    return {"input0": share("input0", "input1"), "input1": share("input1", "input0")}


SUM: dict[str, Slope] = {"a": same, "b": same}
PRODUCT: dict[str, Slope] = {"a": lambda d: d.ct * d["b"], "b": lambda d: d.ct * d["a"]}
