"""The scaling benchmark trains on one device and on two, and writes both losses and rates."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks import scaling


def test_a_quick_run_on_two_devices(tmp_path: Path) -> None:
    assert scaling.main(["--quick", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.iterdir()
    written = json.loads(path.read_text())
    assert written["devices"] == 2 and written["ratio"] > 0
    assert set(written["engines"]) == {"sdpa_fwd", "sdpa_bwd"}
    one, every = (written["losses"][name] for name in ("one device", "all devices"))
    assert len(one) == len(every) == 2 and one[0] != one[1]
