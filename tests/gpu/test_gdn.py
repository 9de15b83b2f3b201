"""The cuTile forwards of Gated DeltaNet on a GPU: drawn cases against float64, outputs and workspace filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gpu import gdn_programs, gdn_recurrent_programs
from gpu.linear_programs import in_turn
from gpu.poison import poisoned_outputs
from gpu.running import check_twice, run


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
    check_twice(case, given, in_turn(case, programs.ENGINE, number), case.expected(given))


def test_more_chunks_than_a_grids_axis_takes_and_offsets_beyond_32_bits(rng) -> None:
    """One sequence over and over: each answer has the bits of the first. 67584 chunks, 2.2e9 elements of q."""
    case, times = gdn_programs.MANY, gdn_programs.TIMES
    given = {name: jnp.asarray(array) for name, array in case.draw(rng).items()}
    length = case.sizes.total
    tiled = {name: jnp.tile(array, (times, *(1,) * (array.ndim - 1))) for name, array in given.items()}
    tiled["cu_seqlens"] = jnp.arange(times + 1, dtype=jnp.int32) * length
    graph, name = gdn_programs.many()
    out, state = run(graph, [tiled[tensor.name] for tensor in graph.inputs], name)
    case.check(case.graph(given), [np.asarray(out[:length]), np.asarray(state[:1])], case.expected(given))
    for array, rows in ((out, length), (state, 1)):
        same = jax.jit(lambda x, rows=rows: (x.reshape(times, rows, *x.shape[1:]) == x[:rows]).all())
        assert same(array)
