"""The reference norm engine against the float64 answer, with random cotangents."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax.engines.base import Inline
from cudnn_jax.engines.capabilities import Capabilities
from cudnn_jax.engines.norm import facts
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError, data_type
from support.norms import Case

CASES = [
    Case((5, 7), (1,)),
    Case((5, 7), (1,), bias=True),
    Case((3, 1), (1,), bias=True),
    Case((2, 3, 5), (1, 2), statistics=False),
    Case((2, 3, 5), (2,), bias=True),
    Case((2, 3, 5), (1,), scale=False, bias=True),
    Case((2, 5, 3, 7), (1, 2, 3), bias=True),
    Case((2, 5, 3, 7), (1,), bias=True),
    Case((2, 5, 3, 7), (0, 3)),
    Case((2, 3, 2, 5, 3), (3, 4), bias=True),
    Case((2, 3, 2, 5, 3), (2,)),
    Case((0, 7), (1,), bias=True),
    Case((2, 0, 7), (2,)),
    Case((4, 33), (1,), epsilon=0.5),
    Case((129, 257), (1,), "bfloat16", bias=True),
    Case((129, 257), (1,), "float16", "float32", bias=True),
]


def answers(graph, arrays, names, case, drawn):
    graph.create_execution_plans(target=CPU, implementation="xla")
    config, artifact = graph.build_plans()
    assert isinstance(artifact, Inline) and config.name == "xla"
    got = jax.jit(artifact.fn)(*arrays)
    for array, tensor in zip(got, graph.outputs, strict=True):
        assert (array.shape, str(array.dtype)) == (tensor.dim, tensor.data_type.value)
    case.check(names, got, drawn)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_forward(case: Case, rng: np.random.Generator) -> None:
    drawn = case.draw(rng)
    answers(case.forward(), case.forward_inputs(drawn), case.forward_names, case, drawn)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_backward(case: Case, rng: np.random.Generator) -> None:
    drawn = case.draw(rng)
    answers(case.backward(), case.backward_inputs(drawn), case.backward_names, case, drawn)


def test_large_and_small_inputs_keep_their_scale(rng: np.random.Generator) -> None:
    """In bfloat16 a sum of squares would overflow or vanish long before the input does."""
    case = Case((4, 512), (1,), "bfloat16", epsilon=0.0)
    drawn = case.draw(rng)
    drawn["x"] = (drawn["x"].astype(np.float32) * [[1e15], [1e-15], [1e10], [1.0]]).astype(drawn["x"].dtype)
    answers(case.forward(), case.forward_inputs(drawn), case.forward_names, case, drawn)


def computing(compute: str | None, own: str | None = None, dtype: str = "float64") -> pygraph:
    """Y of a (3, 5) matrix, computed in a type that the graph, or the node itself, names."""
    graph = pygraph(io_data_type=dtype, compute_data_type=compute)
    x, scale = graph.tensor((3, 5)), graph.tensor((1, 5))
    y, _ = graph.rmsnorm(x, scale, None, 1e-5, "INFERENCE", compute_data_type=own)
    y.set_output(True)
    return graph


def errors(graph: pygraph, rng: np.random.Generator) -> float:
    """The largest, of what `graph.execute` gives."""
    x, scale, got = rng.standard_normal((3, 5)), rng.standard_normal((1, 5)), np.zeros((3, 5))
    (y,) = graph.outputs
    graph.execute(dict(zip(graph.inputs, (x, scale), strict=True)) | {y: got})
    return float(np.abs(got - x * (np.mean(x * x, 1, keepdims=True) + 1e-5) ** -0.5 * scale).max())


def test_the_compute_type_is_the_nodes_or_the_graphs(rng: np.random.Generator) -> None:
    for compute, own, wide in (
        ("float64", None, True),
        ("float32", "float64", True),
        ("float32", None, False),
        ("float64", "float32", False),
    ):
        graph = computing(compute, own)
        error = errors(graph, rng)
        assert facts.analyze(graph).compute is (data_type.DOUBLE if wide else data_type.FLOAT)
        assert (error < 1e-14) == wide and error < 1e-5


@pytest.mark.parametrize("compute", ["float16", "bfloat16", "int32"])
def test_other_compute_types_are_declined(compute: str) -> None:
    graph = computing(compute, dtype="float32")
    with pytest.raises(GraphNotSupportedError, match=f"xla: compute type {compute}, serves float32, float64"):
        graph.create_execution_plans(target=CPU, implementation="xla")
        graph.build_plans()
    row = Capabilities(compute=frozenset({data_type.FLOAT}))
    assert row.compute_type(facts.analyze(graph).compute) == f"compute type {compute}, serves float32"
    assert row.compute_type(data_type.FLOAT) is None is Capabilities().compute_type(data_type.INT32)


def test_64_bit_types_need_jaxs_64_bit_mode() -> None:
    for graph in (computing("float64"), computing("float64", dtype="float32"), computing("float32")):
        graph.create_execution_plans(target=CPU)
        run = graph.build_plans()[1].fn
        with pytest.raises(GraphNotSupportedError, match=r"data type float64, needs JAX's 64-bit mode \(jax_enable"):
            jax.jit(run)(jnp.zeros((3, 5)), jnp.zeros((1, 5)))
