"""The cuTile backward of Gated DeltaNet on a GPU: every setting of every case against the float64 answer.

Outputs and workspace are NaN before each program runs: here, or in the folder that `gpu.ahead` filled. Without either
the compiler or the folder a case is skipped, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gpu.gdn_backward_programs import ENGINE, cases
from gpu.linear_programs import implementations
from gpu.poison import poisoned_outputs
from gpu.running import check_twice
from support.gdn_cases import BackwardCase


@pytest.fixture(autouse=True)
def _poison(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with poisoned_outputs(monkeypatch):
        yield


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_setting_is_right_and_repeats_its_bits(case: BackwardCase, rng: np.random.Generator) -> None:
    given = case.draw(rng)
    want = case.expected(given)
    names = implementations(case, ENGINE)
    assert names
    for name in names:
        check_twice(case, given, name, want)
