"""The reference engine of Gated DeltaNet against the float64 oracle: every option, hard inputs, random cotangents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax.engines.linear_attention import _heads, _slots, reference_gdn
from cudnn_jax.engines.target import CPU, named
from cudnn_jax.graph import GraphNotSupportedError
from support import linear_attention as oracle
from support.linear_attention import KINDS, Options, Sizes
from support.linear_checks import FORWARD, check_backward, check_forward, compiled, pairs
from support.linear_graphs import graph, run

pytestmark = pytest.mark.once

PACKED = Sizes((100, 0, 3, 64, 65), heads=(2, 1, 4), tail=5)
SMALL = Sizes((9, 0, 12), heads=(2, 1, 2), key_dim=3, value_dim=2, tail=2)
"""For what runs op by op: equal sizes share what is compiled."""
EVERYTHING = Options(
    use_qk_l2norm=True, use_beta_sigmoid=True, allow_neg_eigval=True, safe_gate=True, checkpoint_every_n_tokens=10
)


@pytest.fixture(scope="module")
def forward() -> Any:
    return compiled(reference_gdn.forward)


@pytest.fixture(scope="module")
def backward() -> Any:
    return compiled(reference_gdn.backward)


@pytest.mark.parametrize("kind", KINDS)
def test_hard_inputs(kind: str, forward: Any, backward: Any, rng: np.random.Generator) -> None:
    given = oracle.draw(rng, PACKED, kind=kind)
    check_forward(forward, given, Options(), jit=True)
    check_backward(backward, given, Options(), rng, jit=True)


def test_every_option_at_once(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, PACKED, EVERYTHING)
    check_forward(reference_gdn.forward, given, EVERYTHING, jit=True)
    check_backward(reference_gdn.backward, given, EVERYTHING, rng, jit=True)


CHOICES = {
    "norm": (False, True),
    "beta": ((False, False), (True, False), (True, True), (False, True)),
    "gate": ("log", "linear", (), ("a_log",), ("dt_bias",), ("a_log", "dt_bias")),
    "initial": (False, True),
    "final": (False, True),
    "every": (0, 1, 5),
    "scale": (None, 0.3),
    "heads": ((2, 1, 2), (1, 2, 2)),
}


def test_options_in_pairs(rng: np.random.Generator) -> None:
    """Op by op, without compiling whole programs: what is compiled is shared between the rows."""
    for norm, (sigmoid, doubled), gate, initial, final, every, scale, heads in pairs(CHOICES):
        safe = isinstance(gate, tuple)
        options = Options(
            scale=scale,
            use_qk_l2norm=norm,
            use_beta_sigmoid=sigmoid,
            allow_neg_eigval=doubled,
            safe_gate=safe,
            gate_domain="log" if safe else gate,
            checkpoint_every_n_tokens=every,
        )
        absent = [name for name in ("a_log", "dt_bias") if not safe or name not in gate]
        absent += [] if initial else ["initial_state"]
        given = oracle.draw(rng, replace(SMALL, heads=heads), options, without=tuple(absent))
        check_forward(reference_gdn.forward, given, options)
        check_backward(reference_gdn.backward, given, options, rng, final)


@pytest.mark.parametrize("lanes", [3, 7])
def test_sequences_beside_each_other(lanes: int, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setattr(_slots, "_LANES", {"cpu": lanes})
    given = oracle.draw(rng, replace(SMALL, lengths=(3, 0, 8, 1, 5, 0, 4)))
    check_forward(reference_gdn.forward, given, Options())
    check_backward(reference_gdn.backward, given, Options(), rng)


@pytest.fixture
def heads_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_heads, "_AT_ONCE", {"cpu": 1})


@pytest.mark.usefixtures("heads_in_turn")
def test_heads_in_turn(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, replace(SMALL, heads=(2, 4, 4)), EVERYTHING)
    check_forward(reference_gdn.forward, given, EVERYTHING)
    check_backward(reference_gdn.backward, given, EVERYTHING, rng)


@pytest.mark.parametrize(("lengths", "tail"), [((), 0), ((), 3), ((0, 0), 0), ((0, 0, 0), SMALL.total)])
def test_hardly_anything(lengths: tuple[int, ...], tail: int, rng: np.random.Generator) -> None:
    given = oracle.draw(rng, replace(SMALL, lengths=lengths, tail=tail), EVERYTHING)
    check_forward(reference_gdn.forward, given, EVERYTHING)
    check_backward(reference_gdn.backward, given, EVERYTHING, rng)


def test_rows_of_no_sequence_may_hold_anything(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, SMALL, EVERYTHING)
    given["d_final_state"], given["dO"] = given["initial_state"], np.ones_like(given["v"])
    spoilt = {name: x.copy() for name, x in given.items()}
    for name in ("q", "k", "v", "g", "beta", "dO"):
        spoilt[name][-SMALL.tail :] = np.nan
    options = replace(EVERYTHING, checkpoint_every_n_tokens=0)
    clean, dirty = (run(reference_gdn.backward, *graph("bwd", each, options), each) for each in (given, spoilt))
    for name in clean:
        np.testing.assert_array_equal(clean[name], dirty[name])


@pytest.mark.parametrize(("dtype", "state"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_narrow_types(dtype: str, state: str, rng: np.random.Generator) -> None:
    drawn = oracle.draw(rng, SMALL, EVERYTHING)
    types = {"cu_seqlens": "int32", "initial_state": state, "g": "float32", "a_log": "float32"}
    given = {name: np.asarray(jnp.asarray(x, types.get(name, dtype))) for name, x in drawn.items()}
    check_forward(reference_gdn.forward, given, EVERYTHING, tolerance=8e-3)
    check_backward(reference_gdn.backward, given, EVERYTHING, rng, tolerance=1.5e-2)


@pytest.mark.usefixtures("heads_in_turn")
def test_a_pool_of_states(rng: np.random.Generator) -> None:
    """Rows outside the pool start from 0 and are written nowhere; rows that nobody names stay as they are."""
    sizes = replace(SMALL, lengths=(5, 0, 3, 4, 9), heads=(2, 2, 2))
    given = oracle.draw(rng, sizes)
    pool = rng.standard_normal((6, *sizes.states[1:])).astype(np.float32)
    indices = np.array([4, 2, -1, 0, 6], np.int32)
    starts = np.stack([pool[4], pool[2], 0 * pool[0], pool[0], 0 * pool[0]])
    wanted = oracle.forward(given | {"initial_state": starts})
    wired = given | {"initial_state": pool, "state_indices": indices}
    got = run(reference_gdn.forward, *graph("fwd", wired, output_final_state=True), wired)
    assert oracle.error(got["O"], wanted["O"]) <= FORWARD
    assert oracle.error(got["final_state"], wanted["final_state"]) <= FORWARD
    more = {"output_final_state": True, "overwrite_initial_state": True}
    got = run(reference_gdn.forward, *graph("fwd", wired, **more), wired)
    assert oracle.error(got["final_state"][[4, 2, 0]], wanted["final_state"][[0, 1, 3]]) <= FORWARD
    np.testing.assert_array_equal(got["final_state"][[1, 3, 5]], pool[[1, 3, 5]])


def test_memory_is_not_quadratic_in_the_tokens() -> None:
    total = 8192
    rows, gates = jax.ShapeDtypeStruct((total, 1, 16), jnp.float32), jax.ShapeDtypeStruct((total, 1), jnp.float32)
    avals = {name: rows for name in "qkv"} | {"g": gates, "beta": gates, "dO": rows}
    avals["cu_seqlens"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    made, _ = graph("bwd", avals)
    made.create_execution_plans(target=CPU)
    _, artifact = made.build_plans()
    compiled = jax.jit(artifact.fn).lower(*[avals[tensor.name] for tensor in made.inputs]).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < total * total


def test_the_reference_is_the_one_plan_and_says_why_not() -> None:
    given = oracle.draw(np.random.default_rng(0), Sizes((8,)))
    made, _ = graph("fwd", given)
    made.create_execution_plans(target=CPU)
    assert [plan.name for plan in made.plans] == ["xla"]
    made, _ = graph("fwd", given)
    made.create_execution_plans(target=named("h200"))
    assert made.plans[-1].name == "xla"
    assert [decline.reason for decline in made.declines if decline.engine == "cudnn"] == [
        "operation gdn, the backend has no linear attention"
    ]
    made, _ = graph("fwd", given, batch_invariant=True)
    with pytest.raises(GraphNotSupportedError, match="batch_invariant, sums may round otherwise"):
        made.create_execution_plans(target=CPU)
        made.build_plans()
