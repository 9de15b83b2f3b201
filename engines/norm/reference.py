"""The reference norm engine: pure JAX, inlined into the caller's program, any rank and axes.

Computes in the node's compute type, float32 or float64; 64-bit types need JAX's 64-bit mode when a function is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from cudnn_jax.engines import wide_types

if TYPE_CHECKING:
    import jax

    from cudnn_jax.engines.norm.facts import NormFacts

Function = Callable[..., tuple[Any, ...]]


def forward(facts: NormFacts) -> Function:
    """The function of a forward graph: arrays in the order of `facts.ports` to a tuple in that of `facts.results`.

    Arrays have the graph's logical dims.
    """
    import jax
    import jax.numpy as jnp

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = _widened(facts, arrays)
        x = given["input"]
        r = jax.lax.rsqrt(jnp.mean(x * x, axis=facts.axes, keepdims=True) + jnp.asarray(facts.epsilon, x.dtype))
        y = x * r
        if "scale" in given:
            y = y * given["scale"]
        if "bias" in given:
            y = y + given["bias"]
        return _narrowed(facts, {"Y": y, "inv_var": r})

    return run


def backward(facts: NormFacts) -> Function:
    """The function of a backward graph, as `forward`. The gradients are written out: no autodiff is involved."""
    import jax.numpy as jnp

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = _widened(facts, arrays)
        grad, r = given["grad"], given["inv_variance"]
        normal = given["input"] * r
        kept = tuple(axis for axis in range(len(facts.dim)) if axis not in facts.axes)
        inner = grad * given["scale"] if "scale" in given else grad
        d_x = r * (inner - normal * jnp.mean(inner * normal, axis=facts.axes, keepdims=True))
        d_scale = jnp.sum(grad * normal, axis=kept, keepdims=True)
        d_bias = jnp.sum(grad, axis=kept, keepdims=True)
        return _narrowed(facts, {"DX": d_x, "DScale": d_scale, "DBias": d_bias})

    return run


def _widened(facts: NormFacts, arrays: tuple[jax.Array, ...]) -> dict[str, jax.Array]:
    """Arrays by port in the type that is computed in."""
    wide_types.check((facts.compute, *facts.dtypes.values()))
    return {port: arrays[position].astype(facts.compute.value) for port, position in facts.ports.items()}


def _narrowed(facts: NormFacts, made: Mapping[str, jax.Array]) -> tuple[jax.Array, ...]:
    """The results that the graph has, in its order and types."""
    ordered = sorted(facts.results, key=facts.results.__getitem__)
    return tuple(made[name].astype(facts.dtypes[name].value) for name in ordered)
