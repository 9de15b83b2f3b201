"""What the options make of the operands, and the gradients back through it. All in float32."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

if TYPE_CHECKING:
    from cudnn_jax.engines.linear_attention.facts import LinearFacts

Array = jax.Array
Back = Callable[[Array], Array]
GateBack = Callable[[Array], dict[str, Array]]

NORM_EPSILON = 1e-6
GATE_FLOOR = 1e-10
"""The least factor that a gate in the linear domain stands for."""
NEVER = -128.0
"""exp of it is 0 in float32."""


def normalised(x: Array) -> tuple[Array, Back]:
    """Rows divided by sqrt(sum x^2 + 1e-6)."""
    r = jax.lax.rsqrt(jnp.sum(x * x, axis=-1, keepdims=True) + NORM_EPSILON)
    y = x * r

    def back(d_y: Array) -> Array:
        return r * (d_y - y * jnp.sum(y * d_y, axis=-1, keepdims=True))

    return y, back


def strength(facts: LinearFacts, beta: Array) -> tuple[Array, Back]:
    """How much of each token is written."""
    if not facts.use_beta_sigmoid:
        return beta, lambda d_beta: d_beta
    most = 2.0 if facts.allow_neg_eigval else 1.0
    half = jax.nn.sigmoid(beta)
    return most * half, lambda d_beta: d_beta * most * half * jax.nn.sigmoid(-beta)


def log_gate(facts: LinearFacts, g: Array, a_log: Array | None, dt_bias: Array | None) -> tuple[Array, GateBack]:
    """The logarithm of a head's decay, and what takes its gradient to those of g, a_log and dt_bias.

    a_log and dt_bias come with g's axes, and their gradients are not yet summed over the tokens.
    """
    if facts.gate_domain == "linear":
        floored = jnp.maximum(g, GATE_FLOOR)
        return jnp.log(floored), lambda d_g: {"g": jnp.where(g > GATE_FLOOR, d_g / floored, 0)}
    if not facts.safe_gate:
        return g, lambda d_g: {"g": d_g}
    rate = jnp.exp(a_log) if a_log is not None else jnp.float32(1)
    raw = g if dt_bias is None else g + dt_bias
    if facts.gate_lower_bound is not None:
        return _bounded(facts.gate_lower_bound, rate, raw)
    decay = -rate * jax.nn.softplus(raw)

    def back(d_g: Array) -> dict[str, Array]:
        d_raw = -rate * jax.nn.sigmoid(raw) * d_g
        return {"g": d_raw, "dt_bias": d_raw, "a_log": d_g * decay}

    return decay, back


def _bounded(bound: float, rate: Array, raw: Array) -> tuple[Array, GateBack]:
    share = jax.nn.sigmoid(rate * raw)

    def back(d_g: Array) -> dict[str, Array]:
        d_raw = bound * share * jax.nn.sigmoid(-rate * raw) * rate * d_g
        return {"g": d_raw, "dt_bias": d_raw, "a_log": d_raw * raw}

    return bound * share, back
