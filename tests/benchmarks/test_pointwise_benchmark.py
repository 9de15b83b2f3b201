"""`python -m benchmarks pointwise` in its quick form, and what it does with a plan that is wrong."""

import json

import pytest

from benchmarks import pointwise


def quick(folder, *more: str):
    status = pointwise.main(["--quick", "--out", str(folder), "--seed", "1", "--only", "33 x 13", *more])
    (path,) = folder.glob("pointwise-*.json")
    return status, json.loads(path.read_text())


def test_quick_run_writes_a_row_of_every_plan(tmp_path):
    status, result = quick(tmp_path)
    assert status == 0
    (row,) = result["rows"]
    assert (row["op"], row["case"], row["peer"]) == ("pointwise", "33 x 13 float32 tanh", "jax.numpy")
    assert row["chosen"] and row["plan"] == "xla"
    assert min(row["ms"], row["peer_ms"], row["roofline_ms"], row["ratio"]) > 0
    assert row["error"]["out"] < pointwise.TOLERANCE["float32"]


def test_a_wrong_plan_is_named_and_not_timed(tmp_path, monkeypatch: pytest.MonkeyPatch):
    right = pointwise.plan

    def wrong(case, name):
        run = right(case, name)
        return lambda *arrays: [out * 1.001 for out in run(*arrays)]

    monkeypatch.setattr(pointwise, "plan", wrong)
    status, result = quick(tmp_path)
    assert status == 1 and result["rows"] == []
    (entry,) = result["wrong"]
    assert entry["name"] == "xla" and "relative error {'out': 0.001" in entry["reason"]


def test_bytes_are_two_matrices_read_one_written_and_a_row():
    assert pointwise.Case(10, 4, "float32").nbytes == 4 * (3 * 40 + 4)
