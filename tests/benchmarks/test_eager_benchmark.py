"""The eager benchmark runs to its end and writes what it says it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import eager
from cudnn_jax import _ffi
from cudnn_jax.engines import manifest


def test_a_quick_run_writes_every_kind_of_buffer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ffi, "device_count", lambda: 0)
    before = dict(manifest.FAMILIES)
    assert eager.main(["--quick", "--out", str(tmp_path)]) == 0
    assert manifest.FAMILIES == before
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["rows"][0]["op"] == "eager"
    rows = {row["plan"]: row for row in written["rows"]}
    assert set(rows) == {"numpy", "jax inputs", "DeviceView", "address"}
    assert all(row["ms"] > 0 and row["peer"] == "jax.jit" and row["clock"] == "host" for row in rows.values())
