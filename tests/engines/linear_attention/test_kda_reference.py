"""The reference engine of KDA and GDN-2 against the float64 oracle: every option, hard inputs, random cotangents; and
what becomes of their gates where these have no channels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from cudnn_jax.engines.linear_attention import reference_gdn, reference_kda
from cudnn_jax.engines.target import CPU
from cudnn_jax.graph import GraphNotSupportedError
from support import linear_attention as oracle
from support.linear_attention import KINDS, Options, Sizes
from support.linear_checks import FORWARD, check_backward, check_forward, compiled, pairs
from support.linear_collapse import collapsed, of_gates
from support.linear_graphs import graph, run

pytestmark = pytest.mark.once

OPERATIONS = ("kda", "gdn2")
PACKED = Sizes((40, 0, 3, 64, 65), heads=(2, 1, 4), tail=5)
SMALL = Sizes((9, 0, 12), heads=(2, 1, 2), key_dim=3, value_dim=2, tail=2)
"""For what runs op by op: equal sizes share what is compiled."""
EVERYTHING = Options(
    use_qk_l2norm=True,
    use_beta_sigmoid=True,
    allow_neg_eigval=True,
    safe_gate=True,
    gate_lower_bound=-3.0,
    checkpoint_every_n_tokens=10,
)
PLATFORMS = {"kda": "cpu", "gdn2": "cuda"}
"""What decides whether sequences run beside each other."""
FORWARDS, BACKWARDS = (
    {operation: compiled(partial(make, platform=platform)) for operation, platform in PLATFORMS.items()}
    for make in (reference_kda.forward, reference_kda.backward)
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_hard_inputs(operation: str, kind: str, rng: np.random.Generator) -> None:
    given = oracle.draw(rng, PACKED, kind=kind, operation=operation)
    check_forward(FORWARDS[operation], given, Options(), jit=True, operation=operation)
    check_backward(BACKWARDS[operation], given, Options(), rng, jit=True, operation=operation)


CHOICES = {
    "operation": OPERATIONS,
    "norm": (False, True),
    "sigmoid": (False, True),
    "gate": ("log", "linear", ("a_log",), ("dt_bias",)),
    "bound": (None, -2.0),
    "initial": (False, True),
    "final": (False, True),
    "every": (0, 5),
    "scale": (None, 0.3),
    "heads": ((2, 1, 2), (1, 2, 2)),
}


def test_options_in_pairs(rng: np.random.Generator) -> None:
    """Op by op, without compiling whole programs: what is compiled is shared between the rows."""
    for operation, norm, sigmoid, gate, bound, initial, final, every, scale, heads in pairs(CHOICES):
        safe = isinstance(gate, tuple)
        options = Options(
            scale=scale,
            use_qk_l2norm=norm,
            use_beta_sigmoid=sigmoid,
            allow_neg_eigval=sigmoid and not initial,
            safe_gate=safe,
            gate_domain="log" if safe else gate,
            gate_lower_bound=bound,
            checkpoint_every_n_tokens=every,
        )
        absent = [name for name in ("a_log", "dt_bias") if not safe or name not in gate]
        absent += [] if initial else ["initial_state"]
        sizes = replace(SMALL, heads=heads)
        given = oracle.draw(rng, sizes, options, without=tuple(absent), operation=operation)
        check_forward(reference_kda.forward, given, options, operation=operation)
        check_backward(reference_kda.backward, given, options, rng, final, operation=operation)


@pytest.mark.parametrize(("lengths", "tail"), [((), 3), ((0, 0), 0)])
def test_hardly_anything(lengths: tuple[int, ...], tail: int, rng: np.random.Generator) -> None:
    given = oracle.draw(rng, replace(SMALL, lengths=lengths, tail=tail), EVERYTHING, operation="gdn2")
    check_forward(reference_kda.forward, given, EVERYTHING, operation="gdn2")
    check_backward(reference_kda.backward, given, EVERYTHING, rng, operation="gdn2")


def test_rows_of_no_sequence_may_hold_anything(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, SMALL, EVERYTHING, operation="gdn2")
    given["d_final_state"], given["dO"] = given["initial_state"], np.ones_like(given["v"])
    spoilt = {name: x.copy() for name, x in given.items()}
    for name in ("q", "k", "v", "g", "beta", "w", "dO"):
        spoilt[name][-SMALL.tail :] = np.nan
    options = replace(EVERYTHING, checkpoint_every_n_tokens=0)
    clean, dirty = (run(reference_kda.backward, *graph("bwd", each, options, "gdn2"), each) for each in (given, spoilt))
    for name in clean:
        np.testing.assert_array_equal(clean[name], dirty[name])


def test_narrow_types(rng: np.random.Generator) -> None:
    drawn = oracle.draw(rng, SMALL, EVERYTHING, operation="gdn2")
    types = {"cu_seqlens": "int32", "g": "float32", "a_log": "float32"}
    given = {name: np.asarray(jnp.asarray(x, types.get(name, "bfloat16"))) for name, x in drawn.items()}
    check_forward(reference_kda.forward, given, EVERYTHING, tolerance=8e-3, operation="gdn2")
    check_backward(reference_kda.backward, given, EVERYTHING, rng, tolerance=1.5e-2, operation="gdn2")


def test_a_pool_of_states(rng: np.random.Generator) -> None:
    """Rows outside the pool start from 0 and are written nowhere; rows that nobody names stay as they are."""
    given = oracle.draw(rng, replace(SMALL, lengths=(5, 4, 9)), operation="kda")
    pool = rng.standard_normal((4, *given["initial_state"].shape[1:])).astype(np.float32)
    wanted = oracle.forward(given | {"initial_state": np.stack([pool[2], 0 * pool[0], pool[0]])})
    wired = given | {"initial_state": pool, "state_indices": np.array([2, -1, 0], np.int32)}
    more = {"output_final_state": True, "overwrite_initial_state": True}
    got = run(reference_kda.forward, *graph("fwd", wired, operation="kda", **more), wired)
    assert oracle.error(got["O"], wanted["O"]) <= FORWARD
    assert oracle.error(got["final_state"][[2, 0]], wanted["final_state"][[0, 2]]) <= FORWARD
    np.testing.assert_array_equal(got["final_state"][[1, 3]], pool[[1, 3]])


def test_gates_without_channels_make_gdn_of_kda_and_kda_of_gdn2(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, SMALL)
    given |= {"dO": rng.standard_normal((*given["v"].shape[:1], 2, 2)).astype(np.float32)}
    modules = {"gdn": reference_gdn, "kda": reference_kda, "gdn2": reference_kda}
    made = {}
    for operation, each in collapsed(given).items():
        forward = {name: x for name, x in each.items() if name != "dO"}
        got = run(modules[operation].forward, *graph("fwd", forward, operation=operation), forward)
        grads = run(modules[operation].backward, *graph("bwd", each, operation=operation), each)
        gates = of_gates(grads, given["g"].shape)
        made[operation] = got | {name: grads[name] for name in ("dQ", "dK", "dV")} | gates
    for finer, coarser in (("gdn2", "kda"), ("kda", "gdn")):
        for name, want in made[coarser].items():
            assert oracle.error(made[finer][name], want) <= 1e-5, (finer, name)


def test_no_state_is_kept_of_a_token() -> None:
    total, width = 512, 128
    rows, gates = jax.ShapeDtypeStruct((total, 1, width), jnp.float32), jax.ShapeDtypeStruct((total, 1), jnp.float32)
    avals = {name: rows for name in "qkvg"} | {"beta": gates, "dO": rows}
    avals["cu_seqlens"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    made, _ = graph("bwd", avals, operation="kda")
    made.create_execution_plans(target=CPU)
    _, artifact = made.build_plans()
    fn = jax.jit(artifact.fn).lower(*[avals[tensor.name] for tensor in made.inputs]).compile()
    assert fn.memory_analysis().temp_size_in_bytes < 4 * total * width * width


def test_a_guarded_beta_is_declined(rng: np.random.Generator) -> None:
    made, _ = graph("fwd", oracle.draw(rng, SMALL, operation="gdn2"), operation="gdn2", beta_guard=True)
    with pytest.raises(GraphNotSupportedError, match="cannot express beta_guard"):
        made.create_execution_plans(target=CPU)
        made.build_plans()
