"""Gated DeltaNet token by token without a GPU: what it declines, and what its programs compute when NumPy runs them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.target import CPU, Target, named
from cudnn_jax.graph import GraphNotSupportedError
from support import cutile_numpy, linear_graphs
from support.linear_attention import PLAIN, Options, Sizes, draw, error, forward

ENGINE = "cutile_gdn_recurrent"
H200 = named("h200")
CASES = [
    (Sizes((1, 1, 1)), PLAIN, ()),
    (Sizes((1, 0, 5, 2), (1, 1, 4), 48, 24, tail=18), Options(use_qk_l2norm=True, use_beta_sigmoid=True), ()),
    (Sizes((3, 1), (4, 2, 4), 16, 80), Options(scale=0.3, use_beta_sigmoid=True, allow_neg_eigval=True), ()),
    (Sizes((2, 2), (2, 2, 2), 256, 16), Options(safe_gate=True), ()),
    (Sizes((2, 0), (2, 1, 2), 20, 7), Options(safe_gate=True), ("a_log", "initial_state")),
    (Sizes((4,), (2, 2, 6), 33, 130, tail=1), Options(gate_domain="linear"), ("initial_state",)),
]


def planned(made: pygraph, target: Target = H200) -> pygraph:
    made.create_execution_plans(target=target, implementation=ENGINE)
    return made


@pytest.mark.parametrize(("sizes", "options", "without"), CASES, ids=str)
def test_every_setting_computes_the_rule(sizes, options, without, rng, monkeypatch) -> None:
    given = draw(rng, sizes, options, without=without)
    want = forward(given, options)
    with cutile_numpy.uncompiled(monkeypatch) as known:
        made, outputs = linear_graphs.graph("fwd", given, options, output_final_state=True)
        planned(made)
        assert len(made.plans) == 2
        for at in range(len(made.plans)):
            made.select_plan(at)
            _, program = made.build_plans()
            got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in made.inputs])
            named = {id(tensor): array for tensor, array in zip(made.outputs, got, strict=True)}
            for name, tensor in outputs.items():
                assert error(named[id(tensor)], want[name], 1.0) < 5e-6, name


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_pool_is_read_and_written_at_its_indices(overwrite, rng, monkeypatch) -> None:
    """Of three sequences the last has no row: it starts from 0, and is written nowhere."""
    given = draw(rng, Sizes((1, 2, 1), (2, 2, 2), 16, 16))
    pool = rng.standard_normal((5, 2, 16, 16)).astype(np.float32)
    rows = np.asarray([3, 0, 5], np.int32)
    starts = np.concatenate([pool[[3, 0]], np.zeros((1, 2, 16, 16), np.float32)])
    want = forward({**given, "initial_state": starts}, PLAIN)
    given |= {"initial_state": pool, "state_indices": rows}
    with cutile_numpy.uncompiled(monkeypatch) as known:
        made, outputs = linear_graphs.graph("fwd", given, output_final_state=True, overwrite_initial_state=overwrite)
        _, program = planned(made).build_plans()
        got = cutile_numpy.run(program, known, [given[tensor.name] for tensor in made.inputs], made.in_place)
    named = {id(tensor): array for tensor, array in zip(made.outputs, got, strict=True)}
    assert error(named[id(outputs["O"])], want["O"], 1.0) < 5e-6
    final = want["final_state"]
    if overwrite:
        final = pool.astype(np.float64)
        final[[3, 0]] = want["final_state"][:2]
    assert error(named[id(outputs["final_state"])], final, 1.0) < 5e-6


def refusal(given: dict[str, Any], direction: str = "fwd", target: Target = H200, **more: Any) -> str:
    made, _ = linear_graphs.graph(direction, given, **more)
    with pytest.raises(GraphNotSupportedError) as refused:
        planned(made, target).build_plans()
    return str(refused.value)


def test_each_limit_is_told_in_one_line(rng) -> None:
    given = draw(rng, Sizes((2,)))
    wide = draw(rng, Sizes((2,), key_dim=257))
    assert "platform cpu, serves cuda" in refusal(given, target=CPU)
    assert "sm_75" in refusal(given, target=dataclasses.replace(H200, sm=75))
    assert "K 257, serves at most 256" in refusal(wide)
    assert "checkpoint_every_n_tokens 1, serves 0" in refusal(given, options=Options(checkpoint_every_n_tokens=1))
    assert "direction bwd, serves fwd" in refusal({**given, "dO": given["v"]}, "bwd")


def test_a_step_writes_over_the_pool_that_it_is_given(rng, monkeypatch) -> None:
    """In the lowered module the state's result is its operand's buffer."""
    with cutile_numpy.uncompiled(monkeypatch), cudnn_jax.aot.target("h200"):
        shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in [(3, 2, 16)] * 3]
        gates = [jax.ShapeDtypeStruct((3, 2), jnp.float32)] * 2
        pool, rows = jax.ShapeDtypeStruct((5, 2, 16, 16), jnp.float32), jax.ShapeDtypeStruct((3,), jnp.int32)

        def step(q, k, v, g, beta, pool, rows):
            return cudnn_jax.gdn_step(q, k, v, g, beta, pool, state_indices=rows, implementation=ENGINE)

        lowered = jax.jit(step).trace(*shapes, *gates, pool, rows).lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("output_operand_alias<") == 1
