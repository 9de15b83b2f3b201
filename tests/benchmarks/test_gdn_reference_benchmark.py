"""The benchmark of Gated DeltaNet's reference engine runs, and both formulas of it agree."""

import pytest

from benchmarks import gdn_reference

pytestmark = pytest.mark.once


def test_a_small_run_agrees() -> None:
    rows = gdn_reference.measure(length=40, heads=1, width=4, rounds=1)
    assert [row["what"] for row in rows] == ["forward", "forward and backward"]
    assert all(row["error"] < 1e-5 for row in rows)
