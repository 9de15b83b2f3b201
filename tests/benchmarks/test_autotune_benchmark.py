"""`python -m benchmarks autotune` in its quick form, and what it does where a new process would run another plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import autotune

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
TUNED = {
    "case": "c",
    "direction": "forward",
    "operation": "sdpa_fwd",
    "ranked": "a",
    "chosen": "b",
    "recorded": True,
    "plans": [{"plan": "a", "verdict": "wrong", "ms": None}, {"plan": "b", "verdict": "timed", "ms": 1.0}],
}


def test_a_quick_run_writes_what_was_tuned_and_what_a_new_process_runs(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "benchmarks", "autotune", "--quick", "--only", "S64 H4 D32 full"]
    done = subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("autotune-*.json")
    result = json.loads(path.read_text())
    assert [(row["direction"], row["operation"]) for row in result["rows"]] == [
        ("forward", "sdpa_fwd"),
        ("forward+backward", "sdpa_fwd"),
        ("forward+backward", "sdpa_bwd"),
    ]
    assert result["same"] == 3 and all(row["replayed"] == row["chosen"] == "xla" for row in result["rows"])
    assert "a new process runs what was chosen in 3 of 3 operations" in done.stdout


@pytest.mark.parametrize(
    ("plan", "origin", "same"),
    [
        ("b", "autotune record, 1 ms", True),
        ("a", "autotune record, 1 ms", False),
        ("b", "planned here", False),  # by the ranking, not from the database
    ],
)
def test_a_plan_that_is_not_replayed_is_told(
    plan: str, origin: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    where = {name: TUNED[name] for name in ("case", "direction", "operation")}
    monkeypatch.setattr(autotune, "tune", lambda *_: [TUNED])
    monkeypatch.setattr(autotune, "in_new_process", lambda *_: [{**where, "plan": plan, "origin": origin}])
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", "")  # is given back afterwards
    assert autotune.main(["--out", str(tmp_path)]) == (0 if same else 1)
    assert ("NOT REPLAYED" in capsys.readouterr().out) is not same
