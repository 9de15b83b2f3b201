"""`python -m benchmarks sdpa` in its quick form, and what it does with an engine that is wrong."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import __main__ as program
from benchmarks import harness, sdpa
from benchmarks.report import Report, Row
from cudnn_jax.engines import manifest
from support import standin

pytestmark = pytest.mark.once

ROOT = Path(__file__).parents[2]
ROW_KEYS = {"op", "case", "direction", "plan", "clock", "ms", "spread", "roofline_ms", "peer", "peer_ms", "ratio"}
SMALL = sdpa.Case(1, 32, 2, 1, 16, causal=True)
EFFORT = harness.Effort(rounds=3, window_ms=0.1, threads=1)


def plain_attention(case, q, k, v):
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    k, v = (np.repeat(x, case.heads // case.kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("btnd,bsnd->bnts", q, k) * case.head_dim**-0.5
    if case.causal:
        scores = np.where(np.tril(np.ones((case.length,) * 2, bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bnts,bsnd->btnd", weights / weights.sum(-1, keepdims=True), v)


def test_quick_run_writes_rows_of_every_case_and_direction(tmp_path):
    command = [sys.executable, "-m", "benchmarks", "sdpa", "--quick", "--out", str(tmp_path), "--only", "S64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.glob("sdpa-*.json")
    result = json.loads(path.read_text())
    assert set(result) >= {"device", "date", "versions", "seed", "rows"}
    assert path.name == f"sdpa-{result['date']}.json"
    assert result["versions"]["jax"] == jax.__version__
    assert {(row["case"], row["direction"]) for row in result["rows"]} == {
        (case, direction)
        for case in ("B2 S64 H4 D32 causal", "B2 S64 H4 D32 full")
        for direction in ("forward", "forward+backward")
    }
    for row in result["rows"]:
        assert set(row) >= ROW_KEYS
        assert (row["op"], row["clock"], row["peer"]) == ("sdpa", "wall", "jax.nn xla")
        assert min(row["ms"], row["peer_ms"], row["roofline_ms"], row["ratio"]) > 0
        assert all(error < sdpa.TOLERANCE[name] for name, error in row["error"].items())
    chosen = [row for row in result["rows"] if row["chosen"]]
    assert len(chosen) == 4
    assert {entry["name"] for entry in result["left_out"]} >= {"flash-attn3-jax", "jax.nn cudnn"}
    assert str(path) in done.stdout.replace("\n", "")


@pytest.mark.parametrize("causal", [True, False])
def test_reference_against_numpy(causal, rng):
    case = dataclasses.replace(SMALL, heads=4, kv_heads=2, batch=2, causal=causal)
    q, k, v, d_out = arguments = sdpa.draw(case, int(rng.integers(2**31)))
    want = sdpa.reference(case, arguments)
    arrays = [np.asarray(x, np.float64) for x in (q, k, v)]
    cotangent = np.asarray(d_out, np.float64)
    np.testing.assert_allclose(want["out"], plain_attention(case, *arrays), rtol=1e-4, atol=1e-5)

    def slope(position, direction, step=1e-5):
        """Directional derivative of <out, d_out> by central differences in float64."""
        ends = [[x + sign * step * direction if i == position else x for i, x in enumerate(arrays)] for sign in (1, -1)]
        above, below = ((plain_attention(case, *moved) * cotangent).sum() for moved in ends)
        return (above - below) / (2 * step)

    for position, name in enumerate(("d_query", "d_key", "d_value")):
        direction = rng.standard_normal(arrays[position].shape)
        got = (np.asarray(want[name], np.float64) * direction).sum()
        np.testing.assert_allclose(got, slope(position, direction), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("causal", [True, False])
def test_work_counts_kept_pairs(causal):
    case = dataclasses.replace(SMALL, heads=4, kv_heads=2, causal=causal)
    kept = np.tril(np.ones((32, 32))).sum() if causal else 32 * 32
    flops, nbytes = case.work(sdpa.FORWARD_ONLY)
    assert flops == 2 * 2 * 4 * kept * 16
    arrays = sdpa.draw(case, 0)
    q, k, v, d_out = (x.nbytes for x in arrays)
    assert nbytes == q + k + v + d_out
    assert case.work(sdpa.BOTH) == (3.5 * flops, 2 * (q + k + v + d_out))


def test_a_wrong_engine_is_reported_and_not_timed(tmp_path, monkeypatch):
    standin.register_symbol(tmp_path)
    monkeypatch.setattr(sdpa, "QUICK_SHAPES", ((1, 32, 2, 1, 16),))
    with standin.family(monkeypatch, "sdpa_fwd", manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))):
        assert program.main(["sdpa", "--quick", "--only", "causal", "--out", str(tmp_path)]) == 1
    (path,) = tmp_path.glob("sdpa-*.json")
    result = json.loads(path.read_text())
    assert {(entry["direction"], entry["name"]) for entry in result["wrong"]} == {
        ("forward", "mix"),
        ("forward+backward", "mix + xla"),
    }
    timed = {(row["direction"], row["plan"]) for row in result["rows"] if row["clock"] == "wall"}
    assert timed == {("forward", "xla"), ("forward+backward", "xla + xla")}


def test_host_clock_counts_the_handler(tmp_path, monkeypatch):
    standin.register_symbol(tmp_path)
    report = Report("sdpa", 0, harness.Ceilings(1.0, 1.0))
    with standin.family(monkeypatch, "sdpa_fwd", manifest.EngineSlot(1, "mix", ("support.standin", "Mix"))):
        sdpa.host_time(report, EFFORT, seed=1)
    forward = report.rows[0]
    assert (forward.plan, forward.clock, forward.peer) == ("mix", "host", None)
    assert 1e-5 < forward.ms < 5.0


def test_host_clock_is_left_out_where_no_handler_runs():
    report = Report("sdpa", 0, harness.Ceilings(1.0, 1.0))
    sdpa.host_time(report, EFFORT, seed=1)
    assert report.rows == []
    assert {entry["reason"] for entry in report.left_out} == {
        "no handler ran: the plan is inlined, or replayed from a captured graph"
    }


def test_a_plan_that_fails_to_compile_is_a_fault_and_one_that_declines_is_not(monkeypatch):
    def raising(error):
        def run(*arguments):
            raise error

        return run

    made = {"declines": raising(NotImplementedError("no")), "broken": raising(KeyError("dim"))}
    monkeypatch.setattr(sdpa, "plans", lambda *_: (made, "declines"))
    monkeypatch.setattr(sdpa, "PEERS", {})
    report = Report("sdpa", 0, harness.Ceilings(1.0, 1.0))
    sdpa.run_case(SMALL, report, EFFORT, seed=1)
    assert {entry["name"] for entry in report.left_out} == {"declines"}
    assert {entry["name"] for entry in report.wrong} == {"broken"}
    assert report.rows == []


def test_a_wrong_peer_is_left_out_and_is_no_fault_of_ours(monkeypatch):
    monkeypatch.setattr(sdpa, "PEERS", {"louder": lambda: lambda q, k, v, causal: 1.5 * v.repeat(2, axis=2)})
    report = Report("sdpa", 0, harness.Ceilings(1.0, 1.0))
    sdpa.run_case(SMALL, report, EFFORT, seed=1)
    assert {(entry["name"], entry["reason"][:14]) for entry in report.left_out} == {("louder", "relative error")}
    assert report.wrong == []
    assert {(row.plan, row.peer) for row in report.rows} == {("xla", None), ("xla + xla", None)}


def test_a_finished_case_holds_no_memory():
    report = Report("sdpa", 0, harness.Ceilings(1.0, 1.0))
    harness.free_memory()
    before = {id(x) for x in jax.live_arrays()}
    sdpa.run_case(SMALL, report, EFFORT, seed=1)
    harness.free_memory()
    sizes = [x.nbytes for x in jax.live_arrays() if id(x) not in before]
    assert max(sizes, default=0) < sdpa.draw(SMALL, 1)[1].nbytes


def test_a_peer_too_large_for_the_device_is_left_out(monkeypatch):
    class Device:
        def memory_stats(self):
            return {"bytes_limit": 1000}

    monkeypatch.setattr(jax, "devices", lambda: [Device()])
    found, left_out = sdpa.peers(SMALL, sdpa.FORWARD_ONLY)
    assert "jax.nn xla" not in found
    assert left_out["jax.nn xla"].startswith("holds score matrices")


def test_issue_cases_are_all_there():
    cases = {str(sdpa.Case(*shape, causal=causal)) for shape in sdpa.SHAPES for causal in (True, False)}
    assert cases == {
        f"{shape} {kind}"
        for shape in (
            "B4 S4096 H16 D128",
            "B4 S4096 H16 D64",
            "B4 S4096 H16 D256",
            "B1 S16384 H64/8 D128",
            "B16 S1024 H16 D128",
        )
        for kind in ("causal", "full")
    }


def test_unknown_benchmark_is_refused(capsys):
    assert program.main(["conv9"]) == 2
    assert "usage" in capsys.readouterr().err


def test_row_has_the_agreed_keys():
    assert ROW_KEYS <= {field.name for field in dataclasses.fields(Row)}


def test_inputs_are_drawn_from_the_seed():
    first, again, other = (sdpa.draw(SMALL, seed)[0] for seed in (1, 1, 2))
    assert jnp.array_equal(first, again)
    assert not jnp.array_equal(first, other)
