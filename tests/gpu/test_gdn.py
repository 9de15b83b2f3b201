"""The cuTile forwards of Gated DeltaNet on a GPU: drawn cases against float64, outputs and workspace filled with NaN."""

from __future__ import annotations

from collections.abc import Iterator

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
    text = child("gpu.gdn_once", environment={"XLA_FLAGS": "--xla_gpu_enable_command_buffer="}, prefix=sanitizer(tool))
    assert "0 errors" in text or "0 hazards" in text, text[-2000:]
