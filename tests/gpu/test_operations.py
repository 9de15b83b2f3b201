"""Each operation on cuDNN's plan, against the reference on the CPU; what cuDNN declines is listed with its reason.

`CUDNN_JAX_RESULTS=FOLDER` has a table of what ran written there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import planning
from cudnn_jax.engines.target import CPU
from gpu.poison import poisoned_outputs
from support import float8, operations

DECLINES = json.loads((Path(__file__).parent / "operation_declines.json").read_text())
ERROR = {"bfloat16": 2**-7, "float32": 2e-3}
"""Of the norm of the answer: inputs are bfloat16, and sums of their products float32."""

TOLD: dict[str, str] = {}


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUDNN_JAX_CUDNN_UNPROVEN", "1")
    with poisoned_outputs(monkeypatch):
        yield


@pytest.fixture(autouse=True, scope="module")
def _table() -> Iterator[None]:
    yield
    if folder := os.environ.get("CUDNN_JAX_RESULTS"):
        (Path(folder) / "operations.json").write_text(
            json.dumps(TOLD | {k: f"declined: {v}" for k, v in DECLINES.items()})
        )


@pytest.mark.parametrize("name", [name for name in operations.GRAPHS if name not in DECLINES])
def test_an_operation_on_cudnn(name: str, rng: np.random.Generator) -> None:
    graph = operations.graph_of(name)
    arrays = operations.arrays_of(graph, rng)
    reference = jax.jit(planning.plan(graph, CPU, "xla").artifact.fn)
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        expected = [np.asarray(each, np.float64) for each in reference(*map(jnp.asarray, arrays))]
    made = jax.jit(lambda *given: cudnn_jax.call(graph, *given, implementation="cudnn"))(*map(jnp.asarray, arrays))
    errors = []
    for result, wanted in zip(made, expected, strict=True):
        error = np.linalg.norm(np.asarray(result, np.float64) - wanted) / np.linalg.norm(wanted)
        errors.append(f"{error:.1e}")
        assert error <= ERROR[result.dtype.name], f"{result.dtype}{result.shape}: {error}"
    TOLD[name] = f"ran, errors {', '.join(errors)}"


@pytest.mark.parametrize(
    ("name", "draw", "compute"),
    [
        ("sdpa_fp8", float8.drawn, float8.forward),
        ("sdpa_fp8_backward", float8.drawn_backward, float8.backward),
    ],
)
def test_attention_of_float8_on_cudnn(
    name: str, draw: Callable[..., float8.Arrays], compute: Callable[..., float8.Arrays], rng: np.random.Generator
) -> None:
    """Against float64, as it has no reference."""
    graph = operations.graph_of(name)
    (node,) = graph.nodes
    given = draw(rng)
    ports = {id(tensor): port for port, tensor in node.inputs.items()}
    arrays = [
        jnp.asarray(np.broadcast_to(given[ports[id(tensor)]], tensor.dim).astype(jnp.dtype(tensor.data_type.value)))
        for tensor in graph.inputs
    ]
    made = jax.jit(lambda *given: cudnn_jax.call(graph, *given, implementation="cudnn"))(*arrays)
    results = {id(tensor): array for tensor, array in zip(graph.outputs, made, strict=True)}
    errors = []
    for port, wanted in compute(given).items():
        result = np.asarray(results[id(node.outputs[port])], np.float64)
        error = np.linalg.norm(result - wanted) / np.linalg.norm(wanted)
        errors.append(f"{port} {error:.1e}")
        assert error <= float8.TOLERANCE, f"{port}: {error}"
    TOLD[name] = f"ran, errors {', '.join(errors)}"


@pytest.mark.parametrize("name", DECLINES)
def test_what_cudnn_declines_runs_on_the_reference(name: str, rng: np.random.Generator) -> None:
    graph = operations.graph_of(name)
    arrays = [jnp.asarray(each) for each in operations.arrays_of(graph, rng)]
    with pytest.raises(cudnn_jax.GraphNotSupportedError, match="cannot serve"):
        cudnn_jax.call(graph, *arrays, implementation="cudnn")
    if name in operations.GRAPHS and all(tensor.data_type.itemsize_bits >= 16 for tensor in graph.outputs):
        made = jax.jit(graph.as_jax())(*arrays)
        assert all(np.isfinite(np.asarray(each, np.float32)).all() for each in made)
