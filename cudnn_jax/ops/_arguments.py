"""Checks of a user's arguments: each error names the argument, what came, and the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import index
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.manifest import EngineFamily
from cudnn_jax.engines.planner import check_implementation
from cudnn_jax.graph.errors import shown


def array(name: str, value: Any, *, rank: Sequence[int], layout: str) -> Any:
    """`value` as an array of one of the ranks in `rank`."""
    if not (hasattr(value, "shape") and hasattr(value, "dtype")):
        raise TypeError(f"{name} is a {type(value).__name__}; the rule: an array of shape {layout}")
    if len(value.shape) not in rank:
        raise ValueError(f"{name} has shape {tuple(value.shape)}; the rule: {layout}")
    if not all(isinstance(extent, int) for extent in value.shape):
        raise TypeError(f"{name} has shape {tuple(value.shape)}; the rule: dimensions known while tracing")
    return value if isinstance(value, jax.Array) else jnp.asarray(value)


def dtype(name: str, value: Any, allowed: Sequence[Any], rule: str = "") -> None:
    if value.dtype not in [jnp.dtype(each) for each in allowed]:
        words = rule or " or ".join(jnp.dtype(each).name for each in allowed)
        raise TypeError(f"{name} has dtype {value.dtype}; the rule: {words}")


def shape(name: str, value: Any, wanted: Sequence[int | None], rule: str) -> None:
    """Each axis equals `wanted`'s, None taking any."""
    if len(value.shape) != len(wanted) or any(
        want is not None and got != want for got, want in zip(value.shape, wanted, strict=True)
    ):
        expected = tuple("any" if want is None else want for want in wanted)
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {_tuple(expected)}; the rule: {rule}")


def broadcastable(name: str, value: Any, full: Sequence[int], rule: str) -> None:
    """Each axis is 1 or equals `full`'s."""
    if any(got not in (1, want) for got, want in zip(value.shape, full, strict=True)):
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, which does not broadcast to {tuple(full)}; the rule: {rule}"
        )


def static_number(name: str, value: Any, dtype: Any = jnp.float32) -> float:
    """`value` as a Python number that `dtype`, the type that is computed with, holds."""
    if isinstance(value, jax.core.Tracer | jax.Array) or getattr(value, "ndim", 0):
        raise TypeError(f"{name} is an array; the rule: a Python number, known while tracing")
    if not hasattr(value, "__float__"):
        raise TypeError(f"{name} is {value!r}; the rule: a Python number")
    largest = float(jnp.finfo(dtype).max)
    try:
        number = float(value)
    except OverflowError:  # of an integer or a fraction
        number = math.inf
    if not abs(number) <= largest:
        raise ValueError(f"{name} is {shown(value)}; the rule: a finite number, from -{largest} to {largest}")
    return number


def whole_number(name: str, value: Any, least: int, most: int = 2**63 - 1) -> int:
    """A static integer, from `least` to `most`."""
    if isinstance(value, bool | np.bool_) or not hasattr(value, "__index__") or not least <= index(value) <= most:
        raise ValueError(f"{name} is {shown(value)}; the rule: an integer, at least {least} and at most {most}")
    return index(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}; the rule: True or False, known while tracing")
    return bool(value)


def implementation(value: Any, family: EngineFamily | None, what: str) -> str | None:
    """What is to run `what`, graphs of a family: None, or a name that one of their engines or plans has."""
    if value is not None and not isinstance(value, str):
        raise TypeError(f"implementation is {value!r}; the rule: None or a string")
    check_implementation(value, family, what)
    return value


def _tuple(items: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, items)) + ")"
