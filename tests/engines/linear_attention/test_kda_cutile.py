"""The cuTile engines of Kimi Delta Attention and Gated DeltaNet 2 without a GPU: what their programs compute in NumPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from cudnn_jax import _ffi
from cudnn_jax.engines import planning
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.linear_attention import samples
from cudnn_jax.engines.target import Target, named
from support import cutile_numpy
from support.gdn_cases import BackwardCase, Case
from support.linear_attention import Arrays, Options, Sizes

H200 = named("h200")
FEW_BLOCKS = dataclasses.replace(H200, sm_count=3)

PACKED = Sizes((70, 0, 64, 1), key_dim=32, value_dim=48, tail=67)
SHARED = Sizes((65, 3), heads=(2, 1, 4), key_dim=48, value_dim=16)
ONE = Sizes((100,), heads=(1, 1, 1), key_dim=16, value_dim=16)
WIDE = Sizes((65, 3), heads=(1, 1, 2), key_dim=128, value_dim=16)
MANY = Sizes((20, 70) * 5, heads=(1, 1, 3), key_dim=64, value_dim=16, tail=10)
SAFE = Options(use_qk_l2norm=True, use_beta_sigmoid=True, allow_neg_eigval=True, safe_gate=True)
UNBOUNDED = Options(safe_gate=True, gate_lower_bound=-30.0)
NORMAL = Options(use_qk_l2norm=True)
REFLECTING = Options(use_qk_l2norm=True, use_beta_sigmoid=True, allow_neg_eigval=True)
LINEAR = Options(use_beta_sigmoid=True, gate_domain="linear")

CHUNKED = [
    Case(PACKED, NORMAL, operation="kda"),
    Case(SHARED, SAFE, operation="kda"),
    Case(SHARED, UNBOUNDED, operation="kda", dtype="float16", without=("a_log",)),
    Case(SHARED, LINEAR, operation="kda", state="bfloat16", gates="bfloat16"),
    *(Case(ONE, Options(scale=0.7), operation="kda", kind=kind) for kind in ("steep", "strong", "reset", "unwritten")),
    Case(
        Sizes((129, 65), key_dim=16, value_dim=16),
        Options(checkpoint_every_n_tokens=64),
        operation="kda",
        without=("initial_state",),
    ),
    Case(SHARED, NORMAL, operation="kda", pool=5, overwrite=True),
    Case(WIDE, NORMAL, operation="kda", kind="steep"),
    Case(PACKED, NORMAL, operation="gdn2"),
    Case(SHARED, SAFE, operation="gdn2"),
    *(  # What float16 rounds is amplified there.
        Case(
            dataclasses.replace(ONE, lengths=(200,), key_dim=32),
            REFLECTING,
            operation=operation,
            kind="correlated",
            dtype="float16",
            without=("initial_state",),
        )
        for operation in ("kda", "gdn2")
    ),
]
BACKWARD = [
    BackwardCase(PACKED, NORMAL, operation="kda"),
    BackwardCase(SHARED, SAFE, operation="kda"),
    BackwardCase(SHARED, UNBOUNDED, operation="kda", dtype="float16", without=("a_log", "initial_state")),
    BackwardCase(SHARED, LINEAR, operation="kda", gates="bfloat16", final=False),
    *(BackwardCase(ONE, Options(), operation="kda", kind=kind) for kind in ("steep", "strong", "reset", "unwritten")),
    BackwardCase(WIDE, SAFE, operation="kda"),
    BackwardCase(WIDE, NORMAL, operation="kda", kind="steep"),
    BackwardCase(PACKED, Options(), operation="gdn2", final=False),
    BackwardCase(SHARED, SAFE, operation="gdn2"),
]
STEPS = [
    Case(Sizes((2, 0, 3), key_dim=32, value_dim=48, tail=3), NORMAL, operation="kda"),
    Case(Sizes((2, 1), heads=(2, 1, 4), key_dim=48, value_dim=16), SAFE, operation="kda", pool=4, overwrite=True),
    Case(Sizes((2, 1), heads=(2, 1, 4), key_dim=48, value_dim=16), LINEAR, operation="kda", dtype="float16"),
    Case(Sizes((2, 1), heads=(2, 1, 4), key_dim=48, value_dim=16), SAFE, operation="gdn2"),
]


def check(case: Case, engine: str, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting of an engine against float64."""
    check_given(case, engine, case.draw(rng), monkeypatch)


def check_given(case: Case, engine: str, given: Arrays, monkeypatch: pytest.MonkeyPatch, target: Target = H200) -> None:
    want = case.expected(given)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = case.graph(given)
        graph.create_execution_plans(target=target, implementation=engine)
        assert graph.plans
        for at in range(len(graph.plans)):
            graph.select_plan(at)
            _, program = graph.build_plans()
            got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs], graph.in_place)
            case.check(graph, got, want, given)


@pytest.mark.parametrize("case", CHUNKED, ids=str)
def test_every_setting_computes_the_recurrence(case, rng, monkeypatch) -> None:
    check(case, f"cutile_{case.operation}", rng, monkeypatch)


@pytest.mark.parametrize("case", BACKWARD, ids=str)
def test_every_setting_gives_the_gradients(case, rng, monkeypatch) -> None:
    check(case, f"cutile_{case.operation}", rng, monkeypatch)


@pytest.mark.parametrize("case", STEPS, ids=str)
def test_token_by_token_computes_the_recurrence(case, rng, monkeypatch) -> None:
    check(case, f"cutile_{case.operation}_recurrent", rng, monkeypatch)


@pytest.mark.parametrize("form", [Case, BackwardCase])
def test_few_blocks_take_turns_at_many_strong_chunks(form, rng, monkeypatch) -> None:
    """Gates are strong in some sequences and heads, of more chunks than one block of the list works on."""
    from cudnn_jax.engines.linear_attention import _kda_strong_cutile

    monkeypatch.setattr(_kda_strong_cutile, "TILE", 16)
    case = form(MANY, NORMAL, operation="kda")
    lengths, heads = case.sizes.lengths, case.sizes.gates
    given = case.draw(rng)
    strong = rng.random((len(lengths), heads)) < 0.4
    given["g"][: -case.sizes.tail][np.repeat(strong, lengths, 0)] = -20
    check_given(case, "cutile_kda", given, monkeypatch, FEW_BLOCKS)


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_rows_of_no_sequence_are_never_read_as_numbers(poison, rng, monkeypatch) -> None:
    case = BackwardCase(dataclasses.replace(PACKED, tail=5), NORMAL, operation="kda")
    given = case.draw(rng)
    want = case.expected(given)
    for name in ("q", "k", "v", "g", "beta", "dO"):
        given[name][-5:] = poison
    with cutile_numpy.uncompiled(monkeypatch) as known:
        graph = case.graph(given)
        graph.create_execution_plans(target=H200, implementation="cutile_kda")
        _, program = graph.build_plans()
        with np.errstate(invalid="ignore"):
            got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in graph.inputs])
    case.check(graph, got, want, given)


@pytest.mark.parametrize("make", [samples.forward, samples.backward])
def test_chunks_need_not_fit_on_the_second_axis_of_a_grid(make, monkeypatch) -> None:
    with cutile_numpy.uncompiled(monkeypatch):
        planned = planning.plan(make((64 * 65536,), 1, 16, 16, operation="kda"), H200, "cutile_kda")
    assert isinstance(planned.artifact, Program)
    assert _ffi.program_check(planned.artifact.data)["arch"] == 90


def test_bounded_gates_need_no_second_pass(rng, monkeypatch) -> None:
    steps = []
    with cutile_numpy.uncompiled(monkeypatch):
        for bound in (-5.0, -5.5):
            case = Case(ONE, dataclasses.replace(SAFE, gate_lower_bound=bound), operation="kda")
            planned = planning.plan(case.graph(case.draw(rng)), H200, "cutile_kda")
            assert isinstance(planned.artifact, Program)
            steps.append(len(_ffi.program_check(planned.artifact.data)["steps"]))
    assert steps == [4, 6]
