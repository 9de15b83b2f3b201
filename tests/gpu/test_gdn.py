"""The cuTile forwards of Gated DeltaNet on a GPU: drawn cases against float64, outputs and workspace filled with NaN."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu import gdn_programs, gdn_recurrent_programs
from gpu.poison import poisoned_outputs
from gpu.running import child, run, sanitizer, skip_without_programs


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


CASES = [
    pytest.param(programs, number, id=f"{programs.ENGINE}-{gdn_programs.SEED}-{number}: {case}")
    for programs in (gdn_programs, gdn_recurrent_programs)
    for number, case in enumerate(programs.cases())
]


@pytest.mark.parametrize(("programs", "number"), CASES)
def test_a_drawn_case_computes_the_recurrence_and_repeats_its_bits(programs, number, rng) -> None:
    case = programs.cases()[number]
    given = case.draw(rng)
    graph = case.graph(given)
    names = programs.implementations(case.graph(given))
    arrays, name = [given[tensor.name] for tensor in graph.inputs], names[number % len(names)]
    first, second = (run(graph, arrays, name) for _ in range(2))
    case.check(graph, [np.asarray(array) for array in first], case.expected(given))
    for one, two in zip(first, second, strict=True):
        np.testing.assert_array_equal(np.asarray(one).view(np.uint8), np.asarray(two).view(np.uint8))


@pytest.mark.parametrize("tool", ["memcheck", "racecheck"])
def test_compute_sanitizer_is_clean(tool: str) -> None:
    skip_without_programs()
    environment = {"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}
    if folder := os.environ.get("CUDNN_JAX_PROGRAMS"):
        environment["CUDNN_JAX_PROGRAMS"] = str(Path(folder).with_name("sanitizer"))
    text = child("gpu.gdn_once", environment=environment, prefix=sanitizer(tool))
    assert "0 errors" in text or "0 hazards" in text, text[-2000:]


def test_more_chunks_than_a_grids_axis_takes_and_offsets_beyond_32_bits(rng) -> None:
    """One sequence over and over: each answer has the bits of the first. 67584 chunks, 2.2e9 elements of q."""
    case, times = gdn_programs.MANY, gdn_programs.TIMES
    given = {name: jnp.asarray(array) for name, array in case.draw(rng).items()}
    length = case.sizes.total
    tiled = {name: jnp.tile(array, (times, *(1,) * (array.ndim - 1))) for name, array in given.items()}
    tiled["cu_seqlens"] = jnp.arange(times + 1, dtype=jnp.int32) * length
    graph = gdn_programs.repeated(case, times)
    out, state = run(graph, [tiled[tensor.name] for tensor in graph.inputs], gdn_programs.implementations(graph)[0])
    case.check(case.graph(given), [np.asarray(out[:length]), np.asarray(state[:1])], case.expected(given))
    for array, rows in ((out, length), (state, 1)):
        same = jax.jit(lambda x, rows=rows: (x.reshape(times, rows, *x.shape[1:]) == x[:rows]).all())
        assert same(array)
