"""What cuDNN is not asked for."""

from __future__ import annotations

import pytest

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.pointwise import backend_limits, facts
from cudnn_jax.engines.target import named


def reason(dim: tuple[int, ...], axis: int | None = None) -> str | None:
    graph = pygraph(io_data_type="float32")
    x = graph.tensor(dim)
    (graph.exp(x) if axis is None else graph.gen_index(x, axis=axis)).set_output(True)
    graph.freeze()
    return backend_limits.mismatch(facts.analyze(graph), named("h200"))


@pytest.mark.parametrize("dim", [(4,), (4, 8)])
def test_matrices_and_vectors(dim: tuple[int, ...]) -> None:
    assert reason(dim) == f"rank {len(dim)}, asked from rank 3"


def test_the_first_axis_of_gen_index() -> None:
    assert reason((2, 4, 8), 0) == "gen_index along axis 0, asked from axis 1"


@pytest.mark.parametrize("axis", [None, 1, 2])
def test_the_rest_is_asked(axis: int | None) -> None:
    assert reason((2, 4, 8), axis) is None
