"""`cudnn_jax.gdn` under vmap, grad, remat and shard_map, against calls of itself, and its further derivatives."""

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

N, B, T = 3, 2, 5
OPTIONS = Options(use_qk_l2norm=True, use_beta_sigmoid=True, safe_gate=True)
KEYWORDS = {name: True for name in ("use_qk_l2norm", "use_beta_sigmoid", "safe_gate", "output_final_state")}
TOKENS = ("q", "k", "v", "g", "beta")


def fresh(rng: np.random.Generator) -> dict[str, jax.Array]:
    given = oracle.draw(rng, Sizes((T,) * B, heads=(2, 2, 4), key_dim=4, value_dim=3), OPTIONS)
    given.pop("cu_seqlens")
    return {name: jnp.asarray(x.reshape(B, T, *x.shape[1:]) if name in TOKENS else x) for name, x in given.items()}


def loss(given: Any, **more: Any) -> jax.Array:
    out, final = cudnn_jax.gdn(**given, **KEYWORDS, **more)
    return (out**2).sum() + (final**2).sum()


GRADIENT = jax.jit(jax.grad(loss))
"""Compiled once for all tests of this file."""


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), got, want)


@pytest.mark.parametrize("moved", [("q", "g"), ("a_log", "initial_state"), ()], ids=["tokens", "heads", "all"])
def test_vmap_of_a_gradient_equals_a_loop(moved: tuple[str, ...], rng: np.random.Generator) -> None:
    """Also where what makes the gate is mapped, or is not and has a gradient for each element all the same."""
    each = [fresh(rng) for _ in range(N)]
    moved = moved or tuple(each[0])
    rows = [each[0] | {name: one[name] for name in moved} for one in each]
    stacked = each[0] | {name: jnp.stack([row[name] for row in rows]) for name in moved}
    axes = {name: 0 if name in moved else None for name in stacked}
    got = jax.jit(jax.vmap(jax.grad(loss), in_axes=(axes,)))(stacked)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *map(GRADIENT, rows)))


def test_vmap_folds_into_the_batch() -> None:
    rows, gates = jax.ShapeDtypeStruct((N, B, T, 2, 4), jnp.float32), jax.ShapeDtypeStruct((N, B, T, 2), jnp.float32)
    told = cudnn_jax.explain(jax.vmap(lambda *x: cudnn_jax.gdn(*x)[0]), rows, rows, rows, gates, gates)
    assert [(row["operation"], row["facts"]) for row in told.rows] == [
        ("gdn_fwd", f"gdn fwd float32 N{N * B} T{N * B * T} heads 2/2/2 K4 V4")
    ]


@pytest.mark.parametrize("mapped", ["all", "tokens"])
def test_vmap_of_packed_sequences_equals_a_loop(mapped: str, rng: np.random.Generator) -> None:
    """With rows of no sequence, empty sequences, states in and out, and kept states."""
    sizes = [Sizes(lengths, (2, 2, 4), 4, 3, tail=7 - sum(lengths)) for lengths in ((4, 0, 1), (1, 3, 2), (0, 0, 7))]
    each = [{name: jnp.asarray(x) for name, x in oracle.draw(rng, size, OPTIONS).items()} for size in sizes]
    if mapped == "tokens":
        each = [each[0] | {name: one[name] for name in TOKENS} for one in each]
    axes = {name: None if mapped == "tokens" and name not in TOKENS else 0 for name in each[0]}

    def run(given: Any) -> Any:
        starts = {"cu_seqlens": given["cu_seqlens"]}
        rest = {name: x for name, x in given.items() if name not in starts}

        def outputs(rest: Any) -> Any:
            out, final, kept = cudnn_jax.gdn(**rest, **starts, **KEYWORDS, checkpoint_every_n_tokens=2)
            return (out**2).sum() + (final**2).sum(), (out, final, kept)

        return jax.grad(outputs, has_aux=True)(rest)

    given = {name: x if axes[name] is None else jnp.stack([one[name] for one in each]) for name, x in each[0].items()}
    got = jax.jit(jax.vmap(run, in_axes=(axes,)))(given)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *map(jax.jit(run), each)))


def test_vmap_of_pools_equals_a_loop(rng: np.random.Generator) -> None:
    """Indices outside of a pool are outside of every pool."""
    tokens = {name: x[:, 0] for name, x in fresh(rng).items() if name in TOKENS}
    pools = jnp.asarray(rng.standard_normal((N, 4, 4, 3, 4)), jnp.float32)
    indices = jnp.array([[3, 0], [-1, 2], [4, 1]], jnp.int32)

    def run(pool: jax.Array, rows: jax.Array) -> Any:
        return cudnn_jax.gdn_step(**tokens, state=pool, state_indices=rows)

    got = jax.jit(jax.vmap(run))(pools, indices)
    close(got, jax.tree.map(lambda *x: jnp.stack(x), *(run(*one) for one in zip(pools, indices, strict=True))))


def test_remat_and_grad_of_jit(rng: np.random.Generator) -> None:
    given = fresh(rng)
    got = jax.jit(lambda x: [jax.grad(fn)(x) for fn in (jax.jit(loss), jax.checkpoint(loss))])(given)
    close(got, [GRADIENT(given)] * 2)


def test_what_a_policy_may_save_has_a_name() -> None:
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in fresh(np.random.default_rng(0)).items()}

    def kept(*names: str) -> int:
        policy = jax.checkpoint_policies.save_only_these_names(*(f"cudnn_jax.gdn.{name}" for name in names))

        def fn(given: Any) -> Any:
            doubled = jax.tree.map(lambda x: 2 * x, given)
            return jnp.sin(cudnn_jax.gdn(**doubled, **KEYWORDS)[0])

        made = jax.make_jaxpr(lambda given: jax.vjp(jax.checkpoint(fn, policy=policy), given)[1])(given)
        return len(made.out_avals)

    # A doubled key that is kept stands for the key.
    assert [kept(), kept("out"), kept("out", "k")] == [8, 9, 9]


def test_only_gradients_that_are_asked_for_are_made() -> None:
    given = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in fresh(np.random.default_rng(0)).items()}

    def results(*names: str) -> str:
        def part(moving: Any, rest: Any) -> jax.Array:
            return loss(rest | moving)

        moving = {name: given[name] for name in names}
        jaxpr = str(jax.make_jaxpr(jax.grad(part))(moving, given))
        return jaxpr[jaxpr.index("cudnn_jax.gdn_bwd") :]

    assert "d_a_log" not in results("q") and "d_initial_state" not in results("q")
    assert "d_a_log" in results("q", "a_log") and "d_dt_bias" not in results("q", "a_log")


def test_a_cotangent_counts_only_where_it_exists() -> None:
    given = fresh(np.random.default_rng(0))

    def facts(result: int) -> str:
        told = cudnn_jax.explain(jax.grad(lambda x: cudnn_jax.gdn(**x, **KEYWORDS)[result].sum()), given)
        return str(next(row["facts"] for row in told.rows if row["operation"] == "gdn_bwd"))

    assert "d_final_state" not in facts(0)
    assert "d_final_state" in facts(1)


@pytest.mark.parametrize("checked", [True, False])
def test_shard_map_over_batch_and_heads(checked: bool, rng: np.random.Generator) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices; tests/conftest.py asks XLA for them on a CPU")
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    given = fresh(rng)
    specs = {name: P("data", None, "heads") for name in TOKENS}
    specs |= {"initial_state": P("data", "heads"), "a_log": P("heads"), "dt_bias": P("heads")}

    def sharded(given: Any) -> Any:
        grads = jax.grad(loss)(given)
        if not checked:
            grads |= {name: jax.lax.psum(grads[name], "data") for name in ("a_log", "dt_bias")}
        return grads

    mapped = jax.shard_map(sharded, mesh=mesh, in_specs=(specs,), out_specs=specs, check_vma=checked)
    close(jax.jit(mapped)(given), GRADIENT(given))


def test_the_reference_has_every_derivative(rng: np.random.Generator) -> None:
    given, direction = fresh(rng), fresh(rng)
    gradient = jax.grad(lambda x: loss(x, implementation="xla"))

    def inner(x: Any, y: Any) -> Any:
        return sum(jnp.vdot(x[name], y[name]) for name in x)

    @jax.jit
    def run(given: Any, direction: Any) -> Any:
        _, pushed = jax.jvp(lambda x: loss(x, implementation="xla"), (given,), (direction,))
        grads, over = jax.jvp(gradient, (given,), (direction,))
        twice = jax.grad(lambda x: inner(gradient(x), direction))(given)
        return pushed, inner(grads, direction), over, twice

    pushed, along, over, twice = run(given, direction)
    np.testing.assert_allclose(pushed, along, rtol=1e-4, atol=1e-3)
    for name in over:
        assert oracle.error(over[name], twice[name]) <= 1e-4, name
    step = 1e-2
    ahead, back = (GRADIENT({name: x + sign * step * direction[name] for name, x in given.items()}) for sign in (1, -1))
    for name in over:
        assert oracle.error((ahead[name] - back[name]) / (2 * step), over[name]) <= 2e-2, name
