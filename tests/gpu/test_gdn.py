"""The cuTile forward of Gated DeltaNet on a GPU: drawn cases against float64, outputs and workspace filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import cache, cutile
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import GraphNotSupportedError
from gpu.gdn_programs import SEED, cases, implementations
from gpu.poison import poisoned_outputs


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


def run(graph: pygraph, arrays: Any, implementation: str) -> tuple[tuple[jax.Array, ...], ...]:
    """The outputs of two runs."""
    fn = jax.jit(lambda *given: cudnn_jax.call(graph, *given, implementation=implementation))
    try:
        return tuple(fn(*map(jnp.asarray, arrays)) for _ in range(2))
    except GraphNotSupportedError as error:
        try:
            cutile.available()
        except ImportError as missing:
            if cache.ahead_of_time_store() is None:
                pytest.skip(f"{missing}; CUDNN_JAX_PROGRAMS names no folder")
        raise error


@pytest.mark.parametrize("number", range(len(cases())), ids=[f"{SEED}-{n}: {c}" for n, c in enumerate(cases())])
def test_a_drawn_case_computes_the_recurrence_and_repeats_its_bits(number, rng) -> None:
    case = cases()[number]
    given = case.draw(rng)
    graph = case.graph(given)
    names = implementations(case.graph(given))
    first, second = run(graph, [given[tensor.name] for tensor in graph.inputs], names[number % len(names)])
    case.check(graph, [np.asarray(array) for array in first], case.expected(given))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(two).view(np.uint8))
