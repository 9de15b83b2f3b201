"""Runs an attention case through `cudnn_jax.sdpa`, values and gradients with the case's random cotangents."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax
from support.attention.harness import Case

Answer = dict[str, jax.Array]


def traced(case: Case, implementation: str | None = None) -> Callable[[dict[str, Any]], Answer]:
    """inputs of `harness.arrays` -> {"o", "lse", "d_query", ...}."""
    options = case.options() | {"implementation": implementation}

    def run(given: dict[str, Any]) -> Answer:
        moving = {name: given[name] for name in ("query", "key", "value", "bias") if name in given}
        still = {name: given[name] for name in ("mask",) if name in given}

        def call(moving: dict[str, Any]) -> Any:
            return cudnn_jax.sdpa(**moving, **still, **options, return_residual=True)

        if "d_lse" in given:
            (o, lse), pullback = jax.vjp(call, moving)
            gradients = pullback((given["d_o"], given["d_lse"]))[0]
        else:
            o, pullback, lse = jax.vjp(call, moving, has_aux=True)
            gradients = pullback(given["d_o"])[0]
        return {"o": o, "lse": lse, **{f"d_{name}": value for name, value in gradients.items()}}

    return run


def run(case: Case, given: dict[str, Any], implementation: str | None = None) -> Answer:
    """The case's answer, jitted."""
    return jax.jit(traced(case, implementation))(jax.tree.map(jnp.asarray, given))
