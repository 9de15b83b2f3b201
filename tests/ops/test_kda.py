"""`cudnn_jax.kda`, `gdn2` and their steps on a CPU: against the float64 oracle, under transformations, and refusals."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import cudnn_jax
from support import linear_attention as oracle
from support.linear_attention import Options, Sizes
from support.linear_calls import check_forms, check_step_over_a_pool, check_steps, tokens

B, T, H, K, V = 2, 5, 2, 4, 3


@pytest.mark.parametrize(("operation", "form"), [("kda", "batched"), ("gdn2", "packed")])
def test_values_and_gradients(operation: str, form: str, rng: np.random.Generator) -> None:
    check_forms(operation, rng, (form,))


def test_steps_are_the_sequence_token_by_token(rng: np.random.Generator) -> None:
    check_steps("kda", rng)


def test_a_step_over_a_pool_touches_its_rows_alone(rng: np.random.Generator) -> None:
    check_step_over_a_pool("gdn2", rng)


def test_one_name_more() -> None:
    assert cudnn_jax.kimi_delta_attention is cudnn_jax.kda
    assert cudnn_jax.gated_delta_net_v2 is cudnn_jax.gdn2


OPTIONS = Options(use_qk_l2norm=True, use_beta_sigmoid=True, safe_gate=True)
KEYWORDS = {name: True for name in ("use_qk_l2norm", "use_beta_sigmoid", "safe_gate", "output_final_state")}


def fresh(rng: np.random.Generator) -> dict[str, jax.Array]:
    given = oracle.draw(rng, Sizes((T,) * B, heads=(H, H, 2 * H), key_dim=K, value_dim=V), OPTIONS, operation="gdn2")
    given.pop("cu_seqlens")
    return {n: jnp.asarray(x.reshape(B, T, *x.shape[1:]) if n in tokens("gdn2") else x) for n, x in given.items()}


def loss(given: Any, **more: Any) -> jax.Array:
    out, final = cudnn_jax.gdn2(**given, **KEYWORDS, **more)
    return (out**2).sum() + (final**2).sum()


GRADIENT = jax.jit(jax.grad(loss))
"""Compiled once for all tests of this file."""


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), got, want)


def test_vmap_of_a_gradient_equals_a_loop(rng: np.random.Generator) -> None:
    """What makes the gate is mapped, or is not and has a gradient for each element all the same; packed it is no other."""
    moved = ("g", "dt_bias", "initial_state")
    each = [fresh(rng) for _ in range(3)]
    rows = [each[0] | {name: one[name] for name in moved} for one in each]
    stacked = each[0] | {name: jnp.stack([row[name] for row in rows]) for name in moved}
    axes = {name: 0 if name in moved else None for name in stacked}
    got = jax.jit(jax.vmap(jax.grad(loss), in_axes=(axes,)))(stacked)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *map(GRADIENT, rows)))
    packed = dict(stacked)
    for name in tokens("gdn2"):
        first = axes[name] == 0
        packed[name] = stacked[name].reshape(*(3,) * first, B * T, *stacked[name].shape[2 + first :])
    cu = jnp.arange(B + 1) * T
    flat = jax.jit(jax.vmap(jax.grad(lambda x: loss(x, cu_seqlens=cu)), in_axes=(axes,)))(packed)
    close({name: x.reshape(got[name].shape) for name, x in flat.items()}, got)


def test_shard_map_over_batch_and_heads(rng: np.random.Generator) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices; tests/conftest.py asks XLA for them on a CPU")
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    given = fresh(rng)
    specs = {name: P("data", None, "heads") for name in tokens("gdn2")}
    specs |= {"initial_state": P("data", "heads"), "a_log": P("heads"), "dt_bias": P("heads")}
    mapped = jax.shard_map(jax.grad(loss), mesh=mesh, in_specs=(specs,), out_specs=specs)
    close(jax.jit(mapped)(given), GRADIENT(given))


def test_the_reference_has_further_derivatives(rng: np.random.Generator) -> None:
    given, direction = fresh(rng), fresh(rng)

    @jax.jit
    def run(given: Any, direction: Any) -> Any:
        _, pushed = jax.jvp(lambda x: loss(x, implementation="xla"), (given,), (direction,))
        grads, over = jax.jvp(jax.grad(lambda x: loss(x, implementation="xla")), (given,), (direction,))
        return pushed, sum(jnp.vdot(grads[name], direction[name]) for name in grads), over

    pushed, along, over = run(given, direction)
    np.testing.assert_allclose(pushed, along, rtol=1e-4, atol=1e-3)
    step = 1e-2
    ahead, back = (GRADIENT({name: x + sign * step * direction[name] for name, x in given.items()}) for sign in (1, -1))
    for name in over:
        assert oracle.error((ahead[name] - back[name]) / (2 * step), over[name]) <= 2e-2, name
    with pytest.raises(NotImplementedError, match="use reverse mode"):
        jax.jvp(loss, (given,), (direction,))


def zeros(*shape: int) -> jax.Array:
    return jnp.zeros(shape)


GIVEN = {"q": zeros(B, T, H, K), "k": zeros(B, T, H, K), "v": zeros(B, T, H, V), "g": zeros(B, T, H, K)}
BAD = [
    ("kda", {"g": zeros(B, T, H)}, r"g has shape \(2, 5, 2\); the rule: \(B, T, HO, K\)"),
    ("kda", {"g": zeros(B, T, H, V)}, r"g has shape \(2, 5, 2, 3\), expected \(2, 5, 2, 4\)"),
    ("kda", {"beta": zeros(B, T, H, K)}, r"beta has shape .* the rule: \(B, T, HO\)"),
    ("gdn2", {"beta": zeros(B, T, H)}, r"beta has shape .* the rule: \(B, T, HO, K\)"),
    ("gdn2", {"w": zeros(B, T, H, K)}, r"w has shape \(2, 5, 2, 4\), expected \(2, 5, 2, 3\)"),
    ("gdn2", {"w": zeros(B, T, H, V).astype(jnp.bfloat16)}, "w has dtype bfloat16; the rule: float32 or q's"),
    ("kda", {"safe_gate": True, "dt_bias": zeros(H)}, r"dt_bias has shape \(2,\); the rule: \(HO, K\)"),
    ("kda", {"gate_lower_bound": -1.0}, "gate_lower_bound came without safe_gate"),
    ("kda", {"gate_lower_bound": 1.0, "safe_gate": True}, "gate_lower_bound is 1.0; the rule: below 0"),
    ("gdn2", {"initial_state": zeros(B, H, K, V)}, r"initial_state has shape .*, expected \(2, 2, 3, 4\)"),
]


@pytest.mark.parametrize(("operation", "changes", "words"), BAD, ids=[row[2][:40] for row in BAD])
def test_bad_arguments_are_named(operation: str, changes: Any, words: str) -> None:
    more = {"kda": {"beta": zeros(B, T, H)}, "gdn2": {"beta": zeros(B, T, H, K), "w": zeros(B, T, H, V)}}[operation]
    with pytest.raises((TypeError, ValueError), match=words):
        getattr(cudnn_jax, operation)(**GIVEN | more | changes)


def test_autotune_draws_operands_that_mean_something() -> None:
    rows, cu = jax.ShapeDtypeStruct((40, 2, 16), jnp.float32), jax.ShapeDtypeStruct((5,), jnp.int32)
    told = cudnn_jax.autotune(lambda *x, cu: cudnn_jax.gdn2(*x, cu_seqlens=cu)[0], *[rows] * 6, cu=cu, quiet=True)
    (row,) = told.rows
    assert (row["operation"], row["chosen"], row["plans"][0]["verdict"]) == ("gdn2_fwd", "xla", "timed")


def test_64_bit_mode_changes_no_type(rng: np.random.Generator) -> None:
    given = fresh(rng)
    with jax.enable_x64(True):
        grads = jax.grad(loss)(given)
    assert {name: x.dtype for name, x in grads.items()} == {name: x.dtype for name, x in given.items()}
    close(grads, GRADIENT(given))
