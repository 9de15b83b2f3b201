"""The reference norm engine against the float64 answer, with random cotangents."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from cudnn_jax.engines.base import Inline
from cudnn_jax.engines.target import CPU
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
