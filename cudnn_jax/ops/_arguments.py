"""Checks of a user's arguments: each error names the argument, what came, and the rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


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


def static_number(name: str, value: Any) -> float:
    if isinstance(value, jax.core.Tracer) or isinstance(value, jax.Array):
        raise TypeError(f"{name} is an array; the rule: a Python number, known while tracing")
    try:
        number = float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r}; the rule: a Python number") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!r}; the rule: a finite number")
    return number


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(f"{name} is {value!r}; the rule: True or False, known while tracing")
    return bool(value)


def optional_name(name: str, value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}; the rule: None or a string")
    return value


def _tuple(items: Sequence[Any]) -> str:
    return "(" + ", ".join(map(str, items)) + ")"
