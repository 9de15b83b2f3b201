"""`cudnn_jax.sdpa` under jit, vmap, grad, remat and shard_map, against unrolled calls of itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import cudnn_jax

V, B, T, S, N, NK, D = 3, 2, 5, 7, 4, 2, 8
SHAPES = {
    "query": (B, T, N, D),
    "key": (B, S, NK, D),
    "value": (B, S, NK, D),
    "bias": (B, N, T, S),
    "mask": (B, 1, 1, S),
    "key_value_seq_lengths": (B,),
}


def fresh(shape: tuple[int, ...], name: str, rng: np.random.Generator) -> jax.Array:
    if name == "mask":
        return jnp.asarray(rng.random(shape) < 0.7)
    if name.endswith("lengths"):
        return jnp.asarray(rng.integers(0, S + 1, shape), jnp.int32)
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def close(got: Any, want: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=3e-5, atol=3e-5), got, want)


def value_and_vjp(operands: dict[str, jax.Array], cotangent: jax.Array, **options: Any) -> Any:
    moving = {name: x for name, x in operands.items() if jnp.issubdtype(x.dtype, jnp.floating)}
    still = {name: x for name, x in operands.items() if name not in moving}
    out, pullback = jax.vjp(lambda moving: cudnn_jax.sdpa(**moving, **still, **options), moving)
    return out, pullback(cotangent)[0]


BATCHED = [
    {"query"},
    {"key", "value"},
    {"query", "key", "value"},
    {"query", "key", "value", "bias"},
    {"bias"},
    {"mask"},
    {"query", "key_value_seq_lengths"},
    set(SHAPES),
]


@pytest.mark.parametrize("bias_batch", [1, B])
@pytest.mark.parametrize("batched", BATCHED, ids=lambda names: "+".join(sorted(names)))
def test_vmap_of_a_vjp_equals_a_loop(batched: set[str], bias_batch: int, rng: np.random.Generator) -> None:
    shapes = SHAPES | {"bias": (bias_batch, *SHAPES["bias"][1:])}
    operands = {name: fresh((V, *shape) if name in batched else shape, name, rng) for name, shape in shapes.items()}
    cotangent = fresh((V, B, T, N, D), "", rng)
    axes = {name: 0 if name in batched else None for name in shapes}
    got = jax.vmap(value_and_vjp, in_axes=(axes, 0))(operands, cotangent)
    slices = [
        value_and_vjp({name: x[i] if name in batched else x for name, x in operands.items()}, cotangent[i])
        for i in range(V)
    ]
    close(got, jax.tree.map(lambda *each: jnp.stack(each), *slices))


def test_vmap_over_other_axes_and_twice(rng: np.random.Generator) -> None:
    q = fresh((B, T, V, N, D, 2), "", rng)
    k, v = (fresh((2, B, S, NK, D), "", rng) for _ in "kv")
    got = jax.vmap(jax.vmap(cudnn_jax.sdpa, in_axes=(2, None, None), out_axes=1), in_axes=(5 - 0, 0, 0))(q, k, v)
    for i in range(2):
        for j in range(V):
            close(got[i][:, j], cudnn_jax.sdpa(q[:, :, j, :, :, i], k[i], v[i]))


def test_jacobian_equals_the_vjp_row_by_row(rng: np.random.Generator) -> None:
    q, k, v = (fresh((1, 2, 1, 4), "", rng) for _ in "qkv")
    jacobian = jax.jacrev(lambda q: cudnn_jax.sdpa(q, k, v))(q)
    _, pullback = jax.vjp(lambda q: cudnn_jax.sdpa(q, k, v), q)
    for index in np.ndindex(q.shape):
        close(jacobian[index], pullback(jnp.zeros(q.shape).at[index].set(1.0))[0])


def test_an_axis_that_vmap_must_copy_is_said(rng: np.random.Generator) -> None:
    q, k, v = fresh((V, B, T, N, D), "", rng), fresh(SHAPES["key"], "", rng), fresh(SHAPES["value"], "", rng)
    told = cudnn_jax.explain(jax.vmap(cudnn_jax.sdpa, in_axes=(0, None, None)), q, k, v)
    assert [note.split(":")[0] for note in told.rows[0]["notes"]] == ["vmap copies key", "vmap copies value"]
    bias = fresh((1, 1, T, S), "", rng)
    told = cudnn_jax.explain(
        jax.vmap(lambda q, k, v: cudnn_jax.sdpa(q, k, v, bias)), q, *(jnp.stack([x] * V) for x in (k, v))
    )
    assert told.rows[0]["notes"] == []


def test_three_dimensional_operands_are_one_batch(rng: np.random.Generator) -> None:
    q, k, v = fresh((T, N, D), "", rng), fresh((S, NK, D), "", rng), fresh((S, NK, D), "", rng)
    out, lse = cudnn_jax.sdpa(q, k, v, is_causal=True, return_residual=True)
    assert (out.shape, lse.shape) == ((T, N, D), (T, N))
    batched = cudnn_jax.sdpa(q[None], k[None], v[None], is_causal=True, return_residual=True)
    close((out, lse), jax.tree.map(lambda x: x[0], batched))


def test_jit_eager_and_remat_agree_bit_for_bit(rng: np.random.Generator) -> None:
    q, k, v = (fresh(SHAPES[name], "", rng) for name in ("query", "key", "value"))

    def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return (cudnn_jax.sdpa(q, k, v, is_causal=True) ** 2).sum()

    grad: Callable[..., Any] = jax.grad(loss, argnums=(0, 1, 2))
    saved = jax.checkpoint(
        loss, policy=jax.checkpoint_policies.save_only_these_names("cudnn_jax.sdpa.out", "cudnn_jax.sdpa.lse")
    )
    results = [jax.jit(grad)(q, k, v), jax.jit(jax.grad(saved, argnums=(0, 1, 2)))(q, k, v)]
    for each in results[1:]:
        jax.tree.map(np.testing.assert_array_equal, results[0], each)
    close(grad(q, k, v), results[0])


def test_remat_by_name_does_not_run_the_forward_again() -> None:
    shapes = [jax.ShapeDtypeStruct(SHAPES[name], jnp.float32) for name in ("query", "key", "value")]

    def count(policy: Any) -> int:
        fn = jax.checkpoint(lambda *qkv: cudnn_jax.sdpa(*qkv).sum(), policy=policy)
        rows = cudnn_jax.explain(jax.grad(fn), *shapes).rows
        return sum(row["count"] for row in rows if row["operation"] == "sdpa_fwd")

    named = jax.checkpoint_policies.save_only_these_names("cudnn_jax.sdpa.out", "cudnn_jax.sdpa.lse")
    assert count(jax.checkpoint_policies.nothing_saveable) == 2
    assert count(named) == 1


def test_gradients_nobody_asked_for_are_not_computed() -> None:
    avals = {name: jax.ShapeDtypeStruct(SHAPES[name], jnp.float32) for name in ("query", "key", "value", "bias")}

    def loss(query: Any, bias: Any, rest: Any) -> Any:
        return cudnn_jax.sdpa(query, rest["key"], rest["value"], bias).sum()

    def backward(argnums: Any) -> str:
        told = cudnn_jax.explain(jax.grad(loss, argnums), avals["query"], avals["bias"], avals)
        return next(row["facts"] for row in told.rows if row["operation"] == "sdpa_bwd")

    assert "dBias" not in backward(0)
    assert "dBias" in backward((0, 1))


def test_the_cotangent_of_the_residual_counts_only_when_it_exists(rng: np.random.Generator) -> None:
    q, k, v = (fresh(SHAPES[name], "", rng) for name in ("query", "key", "value"))

    def facts(fn: Callable[..., Any]) -> str:
        return str(next(r["facts"] for r in cudnn_jax.explain(jax.grad(fn), q).rows if r["operation"] == "sdpa_bwd"))

    assert "dStats" not in facts(lambda q: cudnn_jax.sdpa(q, k, v, return_residual=True)[0].sum())
    assert "dStats" in facts(lambda q: cudnn_jax.sdpa(q, k, v, return_residual=True)[1].sum())


@pytest.mark.parametrize("checked", [True, False])
def test_shard_map_over_batch_and_heads(checked: bool, rng: np.random.Generator) -> None:
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices; tests/conftest.py asks XLA for them on a CPU")
    mesh = jax.make_mesh((2, 2), ("data", "heads"), axis_types=(AxisType.Auto,) * 2)
    arrays = [fresh(SHAPES[name], "", rng) for name in ("query", "key", "value", "bias")]
    arrays[3] = arrays[3][:1]
    split = P("data", None, "heads")
    specs = (split, split, split, P(None, "heads"))

    def grads(*operands: jax.Array) -> Any:
        def loss(*operands: jax.Array) -> jax.Array:
            return (cudnn_jax.sdpa(*operands, is_causal=True) ** 2).sum()

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*operands)

    def sharded(*operands: jax.Array) -> Any:
        out = grads(*operands)
        return out if checked else (*out[:3], jax.lax.psum(out[3], "data"))

    mapped = jax.shard_map(sharded, mesh=mesh, in_specs=specs, out_specs=specs, check_vma=checked)
    close(jax.jit(mapped)(*arrays), grads(*arrays))


def test_it_runs_with_jit_disabled(rng: np.random.Generator) -> None:
    q, k, v = (fresh(SHAPES[name], "", rng) for name in ("query", "key", "value"))
    want = cudnn_jax.sdpa(q, k, v)
    with jax.disable_jit():
        close(cudnn_jax.sdpa(q, k, v), want)


def test_lengths_are_clipped_to_the_operands(rng: np.random.Generator) -> None:
    q, k, v = (fresh(SHAPES[name], "", rng) for name in ("query", "key", "value"))
    got = cudnn_jax.sdpa(q, k, v, key_value_seq_lengths=jnp.array([-3, 9000]))
    close(got, cudnn_jax.sdpa(q, k, v, key_value_seq_lengths=jnp.array([0, S])))
