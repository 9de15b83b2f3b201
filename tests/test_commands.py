"""`python -m cudnn_jax explain` and `build`, for a call that the command line describes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cudnn_jax import _autotune
from cudnn_jax.__main__ import main
from cudnn_jax._measure import Effort

QUERY, KEY = "2x64x4x32", "2x48x2x32"


def told(capsys: pytest.CaptureFixture[str], *words: str) -> list[dict[str, object]]:
    assert main(["explain", "sdpa", *words, "--json"]) == 0
    rows: list[dict[str, object]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_explain_describes_the_call(capsys: pytest.CaptureFixture[str]) -> None:
    (row,) = told(capsys, QUERY, "--set", "is_causal=True")
    assert (row["operation"], row["facts"]) == ("sdpa_fwd", "fwd bfloat16 B2 T64 S64 heads 4/4 D32 causal top_left")
    (row,) = told(capsys, QUERY, KEY, KEY, "--dtype", "float32", "--set", "implementation=xla")
    assert row["facts"] == "fwd float32 B2 T64 S48 heads 4/2 D32"
    rows = told(capsys, QUERY, "--gradient", "--target", "h200")
    assert [row["operation"] for row in rows] == ["sdpa_fwd", "sdpa_bwd"]


def test_explain_describes_a_function_over_a_graph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "rms_norm", "8x16", "16", "--gradient", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["facts"].partition(" bf")[0] for row in rows] == ["rmsnorm fwd", "rmsnorm bwd"]


def test_explain_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", "sdpa", QUERY]) == 0
    assert "operations on cpu" in capsys.readouterr().out


def test_autotune_prints_json_or_a_table(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_autotune, "EFFORT", Effort(rounds=2, window_ms=0.1))
    assert main(["autotune", "sdpa", QUERY, "--set", "is_causal=True", "--json", "--quiet"]) == 0
    out, err = capsys.readouterr()
    (row,) = json.loads(out)["rows"]
    assert (row["operation"], row["chosen"], row["recorded"]) == ("sdpa_fwd", "xla", False) and err.strip() == ""
    assert main(["autotune", "sdpa", QUERY]) == 0
    assert "* chosen, not recorded" in capsys.readouterr().out


def test_build_fills_a_folder(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "programs"
    assert main(["build", "sdpa", QUERY, "--gradient", "--target", "h200", "--out", str(out)]) == 0
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["sdpa_fwd", "sdpa_bwd"]
    assert len(list(out.rglob("plans/*"))) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "sdpa", "2x64x4x32", "2x48x3x32"], "error: "),
        (["explain", "sdpa", *[QUERY] * 4], "4 shapes came; the rule: at most 3, of query, key, value"),
        (["explain", "sdpa", QUERY, "--set", "dropout_rate=0.5"], "dropout_rate is not served"),
        (["explain", "sdpa", QUERY, "--target", "h300"], "known targets: h200"),
        (["build", "sdpa", QUERY, "--target", "h200", "--out", "/proc/none"], "error: "),
    ],
)
def test_a_mistake_is_one_line(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 1
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1


@pytest.mark.parametrize("words", [["2xx4"], [QUERY, "--set", "no-equals"], [QUERY, "--set", "a b=1"]])
def test_what_cannot_be_read_is_named(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["explain", "sdpa", *words])
    assert "the rule: " in capsys.readouterr().err
