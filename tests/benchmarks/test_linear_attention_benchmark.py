"""What the benchmarks of linear attention time, without a GPU: cases, plans and references."""

from __future__ import annotations

import math
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import gdn, harness, kda, linear_attention
from benchmarks.linear_attention import Case
from cudnn_jax.engines import cutile
from cudnn_jax.engines.target import named
from support import linear_attention as oracle
from support.linear_attention import Options, Sizes

H200 = named("h200")
CASES = (*gdn.CASES, *kda.CASES)
OPERATIONS = ("gdn", "kda", "gdn2")


def test_cases_have_names_of_their_own() -> None:
    assert len({str(case) for case in CASES}) == len(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if not case.decode], ids=str)
def test_work_moves_each_operand_and_result_once(case: Case) -> None:
    for direction, make in linear_attention.makers(case).items():
        _, tensors = make()
        tensors.pop("cu_seqlens")
        moved = sum(math.prod(tensor.dim) * tensor.data_type.itemsize_bits // 8 for tensor in tensors.values())
        assert case.work(direction)[1] == moved
    forward, back, both = (case.work(direction) for direction in linear_attention.DIRECTIONS)
    assert both == (forward[0] + back[0], forward[1] + back[1])


@pytest.mark.parametrize("operation", OPERATIONS)
def test_plans_are_those_that_planning_offers(operation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that programs that were built elsewhere are asked for by names that are known there."""
    try:
        cutile.available()
    except ImportError as error:
        pytest.skip(str(error))
    for name in ("GDN", "KDA"):
        monkeypatch.setenv(f"CUDNN_JAX_CUTILE_{name}", "1")
    for case in (CASES[0], CASES[4]):
        case = replace(case, operation=operation)
        for make in linear_attention.makers(case).values():
            graph, _ = make()
            graph.create_execution_plans(target=H200, implementation="cutile")
            assert linear_attention.plans(make()[0], H200) == [plan.name for plan in graph.plans]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("decode", [False, True])
def test_reference_against_float64(operation: str, decode: bool, rng, monkeypatch) -> None:
    monkeypatch.setattr(linear_attention, "to_jax", jnp.asarray)
    monkeypatch.setattr(linear_attention, "AT_ONCE", 1)
    case = Case("", (5, 9), 2, 4, dim=8, decode=decode, operation=operation)
    sizes = Sizes(case.lengths, (2, 2, 4), key_dim=8, value_dim=8)
    absent = () if decode else ("initial_state",)
    given = oracle.draw(rng, sizes, without=absent, operation=operation)
    given |= {"dO": rng.standard_normal((sizes.total, 4, 8)).astype(np.float32)}
    options = Options(use_qk_l2norm=True)
    operands = {name: x for name, x in given.items() if name != "dO"}
    want = oracle.forward(operands, options)
    if not decode:
        gradients = oracle.backward(operands, given["dO"], None, options)
        want |= {linear_attention.GRADIENTS[name]: x for name, x in gradients.items()}
    found = linear_attention.reference(case, given)
    assert set(found) == {"O", *(["final_state"] if decode else case.gradients)}
    for name, x in found.items():
        assert oracle.error(x, want[name]) <= 3e-5, name


@pytest.mark.parametrize(("asked", "timed"), [([], {"a", "b"}), (["--peers"], set()), (["--peers", "b"], {"b"})])
def test_peers_are_chosen_by_name(asked, timed, monkeypatch, tmp_path) -> None:
    seen = []
    monkeypatch.setattr(linear_attention.harness, "measure_ceilings", lambda quick: harness.Ceilings(1.0, 1.0))
    monkeypatch.setattr(linear_attention, "run_case", lambda case, peers_of, *_: seen.append({*peers_of(case, {})}))
    peers = {name: linear_attention.Peer({}) for name in ("a", "b")}
    arguments = ["--out", str(tmp_path), *asked]
    assert linear_attention.main("kda", kda.CASES[:2], lambda *_: peers, None, arguments) == 1
    assert seen == [timed, timed]
