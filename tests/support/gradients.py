"""Gradients of graphs against those that JAX finds of a formula in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cudnn_jax

Array = np.ndarray[Any, Any]
Formula = Callable[..., Any]
QUICK = {"xla_backend_optimization_level": "0"}
"""For compiling what runs once."""
DOUBLE = {kind: "float64" for kind in ("io_data_type", "intermediate_data_type", "compute_data_type")}


def double() -> cudnn_jax.pygraph:
    return cudnn_jax.pygraph(**DOUBLE)


def outputs(made: Any) -> None:
    for tensor in made if isinstance(made, tuple | list) else (made,):
        if tensor is not None:
            tensor.set_output(True)


def draw(like: Any, rng: np.random.Generator) -> Any:
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), like)


def close(made: Any, expected: Any, tolerance: float) -> None:
    made, expected = (np.asarray(x, np.float64) for x in (made, expected))
    assert made.shape == expected.shape
    assert np.isfinite(expected).all()
    assert np.linalg.norm(made - expected) <= tolerance * max(np.linalg.norm(expected), 1e-3)


def check(
    graph: cudnn_jax.pygraph,
    formula: Formula,
    arrays: list[Any],
    rng: np.random.Generator,
    tolerance: float = 1e-12,
    *,
    twice: bool = False,
) -> None:
    """Values and gradients of the graph's floating inputs, from random cotangents of all its outputs.

    With `twice` also the gradients of these gradients, by the inputs and by the cotangents.
    """
    with jax.enable_x64(True):
        given = [jnp.asarray(array) for array in arrays]
        moving = {at: x for at, x in enumerate(given) if jnp.issubdtype(x.dtype, jnp.floating)}
        cotangents = draw([jnp.empty(tensor.dim, tensor.data_type.value) for tensor in graph.outputs], rng)
        second = draw(moving, rng)

        def pulled(fn: Formula) -> Any:
            def run(moving: dict[int, Any]) -> list[Any]:
                return list(fn(*(moving.get(at, x) for at, x in enumerate(given))))

            def gradient(cotangents: Any, moving: Any) -> Any:
                made, pull = jax.vjp(run, moving)
                return pull(cotangents)[0], made

            def both(*at: Any) -> Any:
                gradients, pull, made = jax.vjp(gradient, *at, has_aux=True)
                return made, gradients, pull(second)

            return jax.jit(both if twice else gradient, compiler_options=QUICK)(cotangents, moving)

        for x, y in zip(jax.tree.leaves(pulled(graph.as_jax())), jax.tree.leaves(pulled(formula)), strict=True):
            close(x, y, tolerance)


def in_order(graph: cudnn_jax.pygraph, formula: Formula, *tensors: Any) -> Formula:
    """The formula over `tensors`, as a function of the graph's inputs."""
    places = [next(at for at, each in enumerate(graph.inputs) if each is tensor) for tensor in tensors]
    return lambda *given: formula(*(given[at] for at in places))


def given_of(graph: cudnn_jax.pygraph, tensors: Any, arrays: list[Any]) -> list[Any]:
    """`arrays` of `tensors`, in the order of the graph's inputs."""
    known = {id(tensor): array for tensor, array in zip(tensors, arrays, strict=True)}
    return [known[id(tensor)] for tensor in graph.inputs]
