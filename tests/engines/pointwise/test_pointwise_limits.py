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


@pytest.mark.parametrize(
    ("dim", "spread", "asked"),
    [
        ((1, 4, 8), (1, 1, 8), True),
        ((2, 4, 8), (1, 1, 8), False),
        ((2, 4, 8), (2, 1, 8), True),
        ((2, 4, 8, 3), (1, 4, 8, 1), False),
        ((4, 3, 8), (3, 8), False),
        ((4, 3, 8), (8,), False),
        ((1, 3, 8), (3, 8), True),
    ],
)
def test_an_operand_broadcast_along_the_first_axis(dim: tuple[int, ...], spread: tuple[int, ...], asked: bool) -> None:
    graph = pygraph(io_data_type="float32")
    graph.add(graph.scalar(1.0, rank=len(dim)), graph.add(graph.tensor(dim), graph.tensor(spread))).set_output(True)
    graph.freeze()
    said = backend_limits.mismatch(facts.analyze(graph), named("h200"))
    expected = f"b {spread} broadcast along axis 0, serves broadcasts along the others"
    assert said is None if asked else said is not None and said.endswith(expected)


def test_a_small_result_beside_a_large_one() -> None:
    graph = pygraph(io_data_type="float32")
    row = graph.exp(graph.tensor((8,)))
    graph.exp(graph.tensor((4, 3, 8))).set_output(True)
    graph.neg(row).set_output(True)
    graph.freeze()
    assert [len(tensor.dim) for tensor in graph.outputs] == [3, 1]
    assert backend_limits.mismatch(facts.analyze(graph), named("h200")) == "rank 1, asked from rank 3"


def test_the_first_axis_of_gen_index() -> None:
    assert reason((2, 4, 8), 0) == "gen_index along axis 0, asked from axis 1"


@pytest.mark.parametrize("axis", [None, 1, 2])
def test_the_rest_is_asked(axis: int | None) -> None:
    assert reason((2, 4, 8), axis) is None
