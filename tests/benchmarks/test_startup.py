"""The startup benchmark measures fresh processes that share a filled cache, and says what it could not measure."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import startup

pytestmark = pytest.mark.once


def test_a_short_run_writes_every_figure_with_its_first_call(tmp_path: Path) -> None:
    startup.main(["--processes", "1", "--out", str(tmp_path)])
    (path,) = tmp_path.iterdir()
    rows = {row["name"]: row for row in json.loads(path.read_text())["rows"]}
    figures = set(startup.AIMS) - {"cold cuDNN plan"}  # only where some libcuda is
    assert figures <= set(rows) and {f"{name}, first call" for name in figures} <= set(rows)
    assert all(rows[name]["aim"] == startup.AIMS[name] and rows[name]["ms"] > 0 for name in figures)


def test_a_trace_that_was_planned_is_no_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(startup, "process", lambda cache: {"missed": 1, "took": {"import": 1.0}})
    with pytest.raises(RuntimeError, match="2 operations were not found in the cache"):
        startup.measure(2)
