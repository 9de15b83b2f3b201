"""The parts that a figure rests on: rounds, ratios, roofline and error norms."""

import time

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import harness
from benchmarks.harness import Ceilings, Effort, Timing
from benchmarks.report import Report, rounded


def test_ratio_is_taken_within_a_round():
    plan, peer = Timing(np.array([1.0, 2.0, 4.0])), Timing(np.array([1.5, 3.0, 6.0]))
    assert plan.ratio_to(peer) == (1.5, 0.0)
    assert plan.ms == 2.0
    assert plan.spread == pytest.approx(0.75)


def test_rounds_that_a_slow_candidate_left_out_do_not_count():
    plan, peer = Timing(np.array([1.0, 1.0, 1.0, 9.0])), Timing(np.array([2.0, 2.0, 2.0, np.nan]))
    assert plan.ratio_to(peer) == (2.0, 0.0)
    assert peer.ms == 2.0


def test_roofline_is_the_larger_of_two_floors():
    ceilings = Ceilings(copy_gb_s=1000.0, matmul_tflop_s=100.0)
    assert ceilings.roofline_ms(flops=2e11, nbytes=1e9) == pytest.approx(2.0)
    assert ceilings.roofline_ms(flops=2e11, nbytes=5e9) == pytest.approx(5.0)


def test_relative_error_against_numpy(rng):
    want = rng.standard_normal((4, 9)).astype(np.float32)
    got = want + 1e-2 * rng.standard_normal((4, 9)).astype(np.float32)
    expected = np.linalg.norm(got - want) / np.linalg.norm(want)
    assert harness.relative_error(jnp.asarray(got), jnp.asarray(want)) == pytest.approx(expected, rel=1e-4)
    zeros = np.zeros_like(want)
    floor = np.linalg.norm(got - want) / (1e-2 * want.size**0.5)
    assert harness.relative_error(jnp.asarray(got - want), jnp.asarray(zeros)) == pytest.approx(floor, rel=1e-4)


def test_unwritten_elements_never_pass(rng):
    want = jnp.asarray(rng.standard_normal(8), jnp.float32)
    assert np.isnan(harness.relative_error(want.at[3].set(jnp.nan), want))


def test_every_candidate_is_timed_in_turns_and_slow_ones_less_often():
    def sleeping(seconds):
        def run(x):
            time.sleep(seconds)
            return x

        return run

    effort = Effort(rounds=6, window_ms=2.0, slow_factor=5.0, slow_rounds=2)
    candidates = {"fast": sleeping(1e-4), "slow": sleeping(5e-2)}
    timings = harness.interleave(candidates, (jnp.ones(3),), effort, seed=0)
    assert np.isfinite(timings["fast"].rounds).all() and timings["fast"].rounds.size == 6
    np.testing.assert_array_equal(np.isfinite(timings["slow"].rounds), [True, True, False, False, False, False])
    assert timings["slow"].ms >= 50.0


def test_a_candidate_that_does_not_compile_is_named_with_its_reason():
    def broken(x):
        raise NotImplementedError("head dim 7\n is not served")

    compiled, failed = harness.compile_all({"double": lambda x: 2 * x, "broken": broken}, (jnp.ones(3),), threads=2)
    assert {name: harness.one_line(error) for name, error in failed.items()} == {"broken": "head dim 7 is not served"}
    np.testing.assert_array_equal(compiled["double"](jnp.ones(3)), 2 * np.ones(3))


def test_ceilings_are_positive_rates():
    ceilings = harness.measure_ceilings(quick=True)
    assert ceilings.copy_gb_s > 0.1
    assert ceilings.matmul_tflop_s > 1e-4


def test_rows_hold_one_peer_each_and_stand_alone_without_one():
    report = Report("sdpa", 0, Ceilings(1.0, 1.0))
    common = {"case": "c", "direction": "forward", "plan": "p", "clock": "wall"}
    plan, peer = Timing(np.array([2.0, 2.0])), Timing(np.array([3.0, 3.0]))
    report.add(plan, {"a": peer, "b": plan}, **common)
    report.add(plan, {}, **common)
    assert [(row.peer, row.peer_ms, row.ratio) for row in report.rows] == [
        ("a", 3.0, 1.5),
        ("b", 2.0, 1.0),
        (None, None, None),
    ]


def test_json_has_no_nan_and_six_digits():
    assert rounded({"a": [float("nan"), 1 / 3], "b": (1, "x")}) == {"a": [None, 0.333333], "b": [1, "x"]}


def test_verdict_counts_default_plans_that_are_slower_by_more_than_the_spread():
    report = Report("sdpa", 0, Ceilings(1.0, 1.0))
    plan = Timing(np.array([2.0, 2.0, 2.0]))
    for case, peer_ms in (("even", [1.9, 2.1, 2.0]), ("lost", [1.0, 1.0, 1.0]), ("won", [3.0, 3.0, 3.0])):
        common = {"case": case, "direction": "forward", "plan": "p", "clock": "wall"}
        report.add(plan, {"a": Timing(np.array(peer_ms))}, chosen=True, **common)
        report.add(plan, {"a": Timing(np.array([0.1, 0.1, 0.1]))}, chosen=False, **common)
    assert report._verdict("a") == (
        "default plans against a: slower in 1 of 3, lowest ratio 0.500 ±0.000 (lost, forward)"
    )
