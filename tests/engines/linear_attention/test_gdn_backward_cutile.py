"""The cuTile backward of Gated DeltaNet without a GPU: what its programs compute in NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.target import named
from support import cutile_numpy
from support.gdn_cases import BackwardCase
from support.linear_attention import Options, Sizes

H200 = named("h200")
ENGINE = "cutile_gdn"

PACKED = Sizes((70, 0, 64, 1, 130), key_dim=32, value_dim=48, tail=67)
SHARED = Sizes((65, 3), heads=(2, 1, 4), key_dim=48, value_dim=16)
VALUES = Sizes((66, 0), heads=(4, 4, 1), key_dim=80, value_dim=80, tail=1)
ONE = Sizes((150,), heads=(1, 1, 1), key_dim=16, value_dim=80)
NORMAL = Options(use_qk_l2norm=True)

CASES = [
    BackwardCase(PACKED, NORMAL),
    BackwardCase(PACKED, Options(), dtype="float16", gates="float16", cu="int64", without=("initial_state",)),
    BackwardCase(PACKED, Options(), final=False),
    BackwardCase(SHARED, Options(use_qk_l2norm=True, use_beta_sigmoid=True, safe_gate=True)),
    BackwardCase(SHARED, Options(use_beta_sigmoid=True, allow_neg_eigval=True, gate_domain="linear"), state="bfloat16"),
    BackwardCase(SHARED, Options(safe_gate=True), without=("a_log",), gates="bfloat16"),
    BackwardCase(SHARED, Options(safe_gate=True), without=("dt_bias", "initial_state")),
    BackwardCase(SHARED, Options(safe_gate=True), without=("a_log", "dt_bias", "initial_state"), final=False),
    BackwardCase(VALUES, NORMAL),
    BackwardCase(ONE, Options(scale=0.7), kind="reset"),
    *(BackwardCase(ONE, NORMAL, kind=kind) for kind in ("strong", "correlated", "unwritten", "zero_keys")),
    BackwardCase(Sizes((64,), (17, 17, 17), key_dim=16, value_dim=16), Options(safe_gate=True)),
]


OTHERS = [
    BackwardCase(VALUES, NORMAL),
    BackwardCase(VALUES, Options(), dtype="float16", final=False),
    BackwardCase(SHARED, Options(use_qk_l2norm=True, use_beta_sigmoid=True)),
    BackwardCase(Sizes((70, 64), heads=(1, 1, 1), key_dim=48, value_dim=80, tail=67), NORMAL, kind="strong"),
]
"""For the settings of architectures whose products read registers."""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_gives_the_gradients(case, rng, monkeypatch) -> None:
    given = case.draw(rng)
    want = case.expected(given)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = case.graph(given)
        graph.create_execution_plans(target=H200, implementation=ENGINE)
        assert graph.plans
        for at in range(len(graph.plans)):
            graph.select_plan(at)
            _, program = graph.build_plans()
            got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs])
            case.check(graph, got, want, given)


@pytest.mark.parametrize("sm", [80, 120])
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_the_settings_of_other_architectures_give_them_too(case, sm, rng, monkeypatch) -> None:
    given = case.draw(rng)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = case.graph(given)
        graph.create_execution_plans(target=dataclasses.replace(H200, sm=sm), implementation=ENGINE)
        (plan,) = graph.plans
        assert dict(plan.knobs) == {"values": 16, "blocks": 1, "keys": 16}
        _, program = graph.build_plans()
        got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs])
    case.check(graph, got, case.expected(given), given)


@pytest.mark.parametrize("sm", [80, 86, 89, 120, 121])
def test_every_architecture_serves_the_widest_keys(sm, rng) -> None:
    case = BackwardCase(Sizes((5,), key_dim=256, value_dim=256), NORMAL)
    graph = case.graph(case.draw(rng))
    graph.create_execution_plans(target=dataclasses.replace(H200, sm=sm), implementation=ENGINE)
    assert [plan.engine for plan in graph.plans] == [ENGINE]


def test_gradients_that_nobody_asks_for_are_not_outputs(rng, monkeypatch) -> None:
    case = BackwardCase(SHARED, Options(safe_gate=True))
    given = case.draw(rng)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = case.graph(given)
        outputs = graph.nodes[0].outputs
        for tensor in outputs.values():
            tensor.set_output(tensor is outputs["dBeta"])
        graph.create_execution_plans(target=H200, implementation=ENGINE)
        _, program = graph.build_plans()
        (got,) = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs])
    want = case.expected(given)["dBeta"]
    assert np.linalg.norm(np.asarray(got, np.float64) - want) <= 1.5e-2 * np.linalg.norm(want)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_of_no_sequence_are_never_read_as_numbers(poison, rng, monkeypatch) -> None:
    case = BackwardCase(dataclasses.replace(PACKED, tail=5), NORMAL)
    given = case.draw(rng)
    want = case.expected(given)
    for name in ("q", "k", "v", "g", "beta", "dO"):
        given[name][-5:] = poison
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = case.graph(given)
        graph.create_execution_plans(target=H200, implementation=ENGINE)
        _, program = graph.build_plans()
        with np.errstate(invalid="ignore"):
            got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs])
    case.check(graph, got, want, given)


def test_an_h200_that_is_not_there_gets_a_program(rng) -> None:
    case = BackwardCase(Sizes((128,), key_dim=64, value_dim=64), NORMAL)
    planned = planning.plan(case.graph(case.draw(rng)), H200, "cutile")
    assert isinstance(planned.artifact, Program) and planned.plan.engine == ENGINE
    told = _ffi.program_check(planned.artifact.data)
    assert (told["platform"], told["arch"], told["steps"]) == ("cuda", 90, ["cubin"] * 6)
