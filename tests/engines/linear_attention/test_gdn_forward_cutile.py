"""The cuTile forward of Gated DeltaNet without a GPU: what it declines, and what its programs compute in NumPy."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import named
from support import cutile_numpy
from support.gdn_cases import Case
from support.linear_attention import Options, Sizes

H200 = named("h200")
SMALL = dataclasses.replace(H200, sm_count=3)
ENGINE = "cutile_gdn"

PACKED = Sizes((70, 0, 64, 1, 130), key_dim=32, value_dim=48, tail=67)
SHARED = Sizes((65, 3), heads=(2, 1, 4), key_dim=48, value_dim=16)
ONE = Sizes((150,), heads=(1, 1, 1), key_dim=16, value_dim=80)

CASES = [
    Case(PACKED, Options(use_qk_l2norm=True)),
    Case(PACKED, Options(), dtype="float16", gates="float16", cu="int64", without=("initial_state",)),
    Case(SHARED, Options(use_qk_l2norm=True, use_beta_sigmoid=True, safe_gate=True)),
    Case(
        SHARED,
        Options(use_beta_sigmoid=True, allow_neg_eigval=True, gate_domain="linear"),
        state="bfloat16",
        overwrite=True,
    ),
    Case(SHARED, Options(safe_gate=True), without=("a_log",)),
    Case(SHARED, Options(safe_gate=True), without=("dt_bias", "initial_state")),
    Case(ONE, Options(scale=0.7), kind="reset"),
    Case(ONE, Options(use_qk_l2norm=True), kind="strong"),
    Case(ONE, Options(use_qk_l2norm=True), kind="correlated"),
    Case(ONE, Options(use_qk_l2norm=True), kind="unwritten"),
    Case(ONE, Options(use_qk_l2norm=True), kind="zero_keys"),
    Case(Sizes((129, 300, 0, 64, 65), key_dim=16, value_dim=16), Options(checkpoint_every_n_tokens=64)),
    Case(Sizes((129, 300, 64), key_dim=16, value_dim=16), Options(checkpoint_every_n_tokens=128)),
    Case(PACKED, Options(use_qk_l2norm=True), pool=7),
    Case(SHARED, Options(use_qk_l2norm=True), pool=5, overwrite=True),
    Case(ONE, Options(), final=False),
]


WIDE = Sizes((70, 0, 66), key_dim=80, value_dim=48, tail=3)
OTHERS = [
    Case(WIDE, Options(use_qk_l2norm=True)),
    Case(WIDE, Options(), dtype="float16", without=("initial_state",)),
    Case(Sizes((65,), heads=(1, 1, 2), key_dim=256, value_dim=16), Options(use_qk_l2norm=True, safe_gate=True)),
    Case(SHARED, Options(use_beta_sigmoid=True)),
]
"""For the settings of architectures whose products read registers."""


def planned(graph: pygraph, target: Any = SMALL) -> pygraph:
    graph.create_execution_plans(target=target, implementation=ENGINE)
    return graph


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_setting_computes_the_recurrence(case, rng, monkeypatch) -> None:
    given = case.draw(rng)
    want = case.expected(given)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = planned(case.graph(given))
        assert 1 <= len(graph.plans) <= 4
        for at in range(len(graph.plans)):
            graph.select_plan(at)
            _, program = graph.build_plans()
            got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs], graph.in_place)
            case.check(graph, got, want, given)


@pytest.mark.parametrize("sm", [80, 120])
@pytest.mark.parametrize("case", OTHERS, ids=str)
def test_the_settings_of_other_architectures_compute_it_too(case, sm, rng, monkeypatch) -> None:
    given = case.draw(rng)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = planned(case.graph(given), dataclasses.replace(H200, sm=sm))
        assert len(graph.plans) == 1
        _, program = graph.build_plans()
        got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs])
    case.check(graph, got, case.expected(given), given)


@pytest.mark.parametrize("sm", [80, 86, 89, 120, 121])
@pytest.mark.parametrize(("key_dim", "values"), [(16, 32), (64, 32), (80, 16), (256, 16)])
def test_long_states_are_cut_narrower_where_registers_hold_operands(sm, key_dim, values) -> None:
    graph = planned(of(Sizes((5,), key_dim=key_dim, value_dim=64)), dataclasses.replace(H200, sm=sm))
    (plan,) = graph.plans
    assert dict(plan.knobs) == {"values": values, "blocks": 1}


def refused(graph: pygraph, target: Any = H200) -> str:
    graph.create_execution_plans(target=target)
    assert "cutile_gdn" not in {plan.engine for plan in graph.plans}
    (reason,) = [decline.reason for decline in graph.declines if decline.engine == ENGINE]
    return reason


def of(sizes: Sizes = SHARED, dtype: str = "bfloat16", **options: Any) -> pygraph:
    case = Case(sizes, Options(**options), dtype=dtype)
    return case.graph(case.draw(np.random.default_rng(0)))


def without_o() -> pygraph:
    graph = of()
    for tensor in graph.nodes[0].outputs.values():
        tensor.set_output(tensor is not graph.nodes[0].outputs["O"])
    return graph


@pytest.mark.parametrize(
    ("graph", "reason"),
    [
        (lambda: of(dtype="float32"), "q dtype float32, serves bfloat16, float16"),
        (lambda: of(Sizes((5,), key_dim=24)), "key_dim 24, serves multiples of 16 to 256"),
        (lambda: of(Sizes((5,), key_dim=272)), "key_dim 272, serves multiples of 16 to 256"),
        (lambda: of(Sizes((5,), key_dim=16, value_dim=8)), "value_dim 8, serves multiples of 16 to 256"),
        (
            lambda: of(Sizes((200,), key_dim=16, value_dim=16), checkpoint_every_n_tokens=100),
            "checkpoint_every_n_tokens 100, serves multiples of 64",
        ),
        (without_o, "O is not an output, serves graphs that give it"),
    ],
)
def test_a_decline_names_field_value_and_limit(graph, reason) -> None:
    assert refused(graph()) == reason


def test_a_target_out_of_reach_is_declined() -> None:
    target = dataclasses.replace(H200, sm=75)
    assert refused(of(), target) == "architecture sm_75, serves sm_80 to sm_129"


def test_an_h200_that_is_not_there_gets_a_program() -> None:
    planned = planning.plan(of(Sizes((128,), key_dim=64, value_dim=64)), H200, "cutile")
    assert isinstance(planned.artifact, Program) and planned.plan.engine == ENGINE
    told = _ffi.program_check(planned.artifact.data)
    assert (told["platform"], told["arch"], told["steps"]) == ("cuda", 90, ["cubin"] * 4)


def test_gates_in_the_io_type_are_read_as_such(rng) -> None:
    given = Case(SHARED, Options(), gates="bfloat16").draw(rng)
    assert given["g"].dtype == given["beta"].dtype == jnp.bfloat16
