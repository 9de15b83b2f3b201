"""One operation on cuDNN's plan: `python -m gpu.operation_once NAME SEED`, a process that a broken kernel ends alone.

Prints {"errors": {port: error}, "limits": {port: limit}}, the errors relative to the norm of what is right: the
reference's results on the CPU. For float8 attention it is the formula in float64, which rounds nothing inside: the
reference rounds as often as cuDNN does, and an error would be that of both. Where cuDNN declines, prints {"declined":
reason, "finite": whether the reference, which serves then, makes numbers; null where that is not asked}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax import pygraph
from cudnn_jax.engines import planning
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError
from gpu.poison import poisoned_outputs
from support import float8, operations

LIMITS = {"bfloat16": 2**-7, "float32": 2e-3}
"""Of the norm of the answer: inputs are bfloat16, and sums of their products float32."""
FORMULAS = {
    "sdpa_fp8": (float8.drawn, float8.forward),
    "sdpa_fp8_backward": (float8.drawn_backward, float8.backward),
}
Arrays = list[np.ndarray[Any, Any]]


def ports_of(graph: pygraph) -> list[str]:
    """The port that each of the graph's outputs comes from, and a number where several come from one of that name."""
    ports = {id(tensor): port for node in graph.nodes for port, tensor in node.outputs.items()}
    named = [ports[id(tensor)] for tensor in graph.outputs]
    return [name if named.count(name) == 1 else f"{name} {at}" for at, name in enumerate(named)]


def of_the_reference(graph: pygraph, rng: np.random.Generator) -> tuple[Arrays, dict[str, Any], dict[str, float]]:
    arrays = operations.arrays_of(graph, rng)
    reference = jax.jit(planning.plan(graph, CPU, "xla").artifact.fn)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        made = reference(*map(jnp.asarray, arrays))
    limits = {port: LIMITS[array.dtype.name] for port, array in zip(ports_of(graph), made, strict=True)}
    return arrays, dict(zip(ports_of(graph), made, strict=True)), limits


def of_the_formula(
    name: str, graph: pygraph, rng: np.random.Generator
) -> tuple[Arrays, dict[str, Any], dict[str, float]]:
    draw, compute = FORMULAS[name]
    given = draw(rng)
    ports = {id(tensor): port for node in graph.nodes for port, tensor in node.inputs.items()}
    arrays = [
        np.broadcast_to(given[ports[id(tensor)]], tensor.dim).astype(jnp.dtype(tensor.data_type.value))
        for tensor in graph.inputs
    ]
    wanted = compute(given)
    return arrays, wanted, dict.fromkeys(wanted, float8.TOLERANCE)


def error_of(result: Any, wanted: Any) -> float:
    right = np.asarray(wanted, np.float64)
    return float(np.linalg.norm(np.asarray(result, np.float64) - right) / np.linalg.norm(right))


def error_of_rows(result: Any, wanted: Any, exact: bool) -> float:
    """As `error_of`; infinite unless what is -inf, and with `exact` the rows of 0, are just these: rows that see
    nothing. A gradient's may be 0 for another reason, as where a row sees one key, and is rounded."""
    made, right = (np.asarray(array, np.float64) for array in (result, wanted))
    blank = ~right.any(axis=-1)
    if not np.array_equal(np.isneginf(made), np.isneginf(right)) or (exact and made[blank].any()):
        return float("inf")
    return error_of(*(np.where(np.isneginf(array), 0, array) for array in (made, right)))


def compared(name: str, graph: pygraph, rng: np.random.Generator, run: Callable[..., Any]) -> dict[str, Any]:
    known = of_the_formula(name, graph, rng) if name in FORMULAS else of_the_reference(graph, rng)
    arrays, wanted, limits = known
    made = dict(zip(ports_of(graph), run(*map(jnp.asarray, arrays)), strict=True))

    def error(port: str) -> float:
        if name in operations.ATTENTION:
            return error_of_rows(made[port], wanted[port], exact=not port.startswith("d"))
        return error_of(made[port], wanted[port])

    return {"errors": {port: error(port) for port in wanted}, "limits": limits}


def served(name: str, graph: pygraph, rng: np.random.Generator) -> bool | None:
    """Whether what runs where cuDNN declines makes numbers; None of outputs too narrow for NaN, and of float8 attention."""
    if name in operations.FLOAT8 or any(tensor.data_type.itemsize_bits < 16 for tensor in graph.outputs):
        return None
    made = jax.jit(graph.as_jax())(*map(jnp.asarray, operations.arrays_of(graph, rng)))
    blank = {"Stats", "score_max"} if name in operations.ATTENTION else set()
    return all(
        bool((np.isfinite(array) | (np.isneginf(array) & (port in blank))).all())
        for port, array in zip(ports_of(graph), (np.asarray(each, np.float32) for each in made), strict=True)
    )


def main(name: str, seed: int, implementation: str = "cudnn") -> dict[str, Any]:
    graph, rng = operations.graph_of(name), np.random.default_rng(seed)
    shapes = [jax.ShapeDtypeStruct(tensor.dim, jnp.dtype(tensor.data_type.value)) for tensor in graph.inputs]
    run = jax.jit(lambda *given: cudnn_jax.call(graph, *given, implementation=implementation))
    with pytest.MonkeyPatch.context() as patch, poisoned_outputs(patch):
        try:
            compiled = run.lower(*shapes).compile()
        except GraphNotSupportedError as error:
            return {"declined": str(error), "finite": served(name, graph, rng)}
        return compared(name, graph, rng, compiled)


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])))
