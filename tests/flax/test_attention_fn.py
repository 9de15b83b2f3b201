"""`cudnn_jax.flax.attention_fn` against Flax's own attention function, called directly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from cudnn_jax.flax import attention_fn

FORWARD = 5e-6
GRADIENT = 3e-5


def normal(rng, *shape, dtype=np.float32):
    return jnp.asarray(rng.standard_normal(shape), dtype)


def qkv(rng, batch=(2,), q_len=24, kv_len=24, heads=4, kv_heads=None, depth=16, dtype=np.float32):
    kv_heads = kv_heads or heads
    return (
        normal(rng, *batch, q_len, heads, depth, dtype=dtype),
        normal(rng, *batch, kv_len, kv_heads, depth, dtype=dtype),
        normal(rng, *batch, kv_len, kv_heads, depth, dtype=dtype),
    )


def assert_near(got, want, tolerance):
    got, want = (np.asarray(x, np.float64) for x in (got, want))
    assert got.shape == want.shape
    error = np.linalg.norm(got - want) / max(np.linalg.norm(want), 1e-2 * want.size**0.5)
    assert error <= tolerance


def value_and_grads(fn, arrays, cotangent):
    def run(arrays, cotangent):
        out, pull = jax.vjp(fn, *arrays)
        return out, pull(cotangent.astype(out.dtype))

    return jax.jit(run)(arrays, cotangent)


def assert_same(ours, flaxs, arrays, rng, forward=FORWARD, gradient=GRADIENT):
    """Values, and gradients of every array under one random cotangent."""
    cotangent = normal(rng, *jax.eval_shape(flaxs, *arrays).shape)
    got_out, got_grads = value_and_grads(ours, arrays, cotangent)
    want_out, want_grads = value_and_grads(flaxs, arrays, cotangent)
    assert got_out.dtype == want_out.dtype
    assert_near(got_out, want_out, forward)
    for got, expected in zip(got_grads, want_grads, strict=True):
        assert got.dtype == expected.dtype
        assert_near(got, expected, gradient)


def keeping_mask(rng, *shape):
    """A random boolean mask in which every row keeps something: there the two definitions agree."""
    mask = rng.random(shape) < 0.6
    mask[..., 0] = True
    return jnp.asarray(mask)


@pytest.mark.parametrize("flax_fn", [nnx.dot_product_attention, linen.dot_product_attention])
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_batch_dims(flax_fn, batch, rng):
    arrays = qkv(rng, batch)
    assert_same(attention_fn, flax_fn, arrays, rng)


@pytest.mark.parametrize(
    "lead, dtype", [((2, 3), bool), ((1, 1), np.float32), ((1, 3), bool), ((3,), np.float32), ((), bool)], ids=str
)
def test_mask_with_two_batch_dims(lead, dtype, rng):
    arrays = qkv(rng, (2, 3))
    mask = keeping_mask(rng, *lead, 1, 24, 24).astype(dtype)
    assert_same(
        lambda q, k, v: attention_fn(q, k, v, mask=mask),
        lambda q, k, v: linen.dot_product_attention(q, k, v, mask=mask),
        arrays,
        rng,
    )


@pytest.mark.parametrize("shape", [(4, 24, 24), (1, 24, 24), (3, 1, 1, 24), (2, 3, 4, 24, 24)], ids=str)
def test_bias_and_its_gradient(shape, rng):
    arrays = (*qkv(rng, (2, 3)), normal(rng, *shape))
    assert_same(attention_fn, linen.dot_product_attention, arrays, rng)


def test_bias_and_mask_together(rng):
    arrays = (*qkv(rng), normal(rng, 2, 4, 24, 24))
    mask = keeping_mask(rng, 2, 1, 24, 24)
    assert_same(lambda *a: attention_fn(*a, mask), lambda *a: linen.dot_product_attention(*a, mask), arrays, rng)


def test_causal_and_grouped_heads_as_nnx_passes_them(rng):
    arrays = qkv(rng, kv_heads=2, q_len=20, kv_len=28)
    assert_same(
        functools.partial(attention_fn, is_causal=True),
        functools.partial(nnx.dot_product_attention, is_causal=True),
        arrays,
        rng,
    )


def test_cross_attention_of_unequal_lengths(rng):
    assert_same(attention_fn, nnx.dot_product_attention, qkv(rng, q_len=7, kv_len=33), rng)


@pytest.mark.parametrize("q_len", [24, 8, 1])
def test_causal_places_the_queries_at_the_end_of_the_keys(q_len, rng):
    arrays = qkv(rng, q_len=q_len)
    mask = np.tril(np.ones((24, 24), bool))[24 - q_len :]
    assert_same(
        functools.partial(attention_fn, causal=True),
        lambda q, k, v: linen.dot_product_attention(q, k, v, mask=jnp.asarray(mask)),
        arrays,
        rng,
    )


def test_window(rng):
    arrays = qkv(rng)
    distance = np.arange(24)[:, None] - np.arange(24)
    assert_same(
        functools.partial(attention_fn, causal=True, local_window_size=(5, 0)),
        lambda q, k, v: linen.dot_product_attention(q, k, v, mask=jnp.asarray((distance >= 0) & (distance <= 5))),
        arrays,
        rng,
    )


def test_dtype_casts_the_inputs_and_the_softmax_stays_in_float32(rng):
    arrays = qkv(rng)
    got = attention_fn(*arrays, dtype=jnp.bfloat16)
    assert got.dtype == jnp.bfloat16
    exact = nnx.dot_product_attention(*(x.astype(jnp.bfloat16).astype(jnp.float32) for x in arrays))
    assert_near(got, exact, 5e-3)
    assert attention_fn(*arrays, dtype=jnp.bfloat16, force_fp32_for_softmax=True).dtype == jnp.float32


def test_mixed_input_dtypes_promote(rng):
    q, k, v = qkv(rng)
    arrays = (q, k.astype(jnp.bfloat16), v)
    assert_same(attention_fn, linen.dot_product_attention, arrays, rng, gradient=5e-3)


def test_promote_dtype_of_the_caller_is_used(rng):
    arrays = qkv(rng)

    def halve(xs, dtype=None):
        return tuple(0.5 * x for x in xs)

    assert_near(attention_fn(*arrays, promote_dtype=halve), attention_fn(*(0.5 * x for x in arrays)), FORWARD)


def test_row_that_keeps_nothing_gives_zero(rng):
    arrays = qkv(rng)
    mask = jnp.ones((24, 24), bool).at[3].set(False)
    out, grads = value_and_grads(lambda q, k, v: attention_fn(q, k, v, mask=mask), arrays, normal(rng, 2, 24, 4, 16))
    assert not np.any(np.asarray(out)[:, 3])
    assert np.any(np.asarray(out)[:, 4])
    assert not np.any(np.asarray(grads[0])[:, 3])
    assert all(np.isfinite(np.asarray(g)).all() for g in grads)


@pytest.mark.parametrize(
    "name, options",
    [
        ("dropout_rate", {"dropout_rate": 0.1, "dropout_rng": jax.random.PRNGKey(0)}),
        ("module", {"module": object()}),
        ("einsum_dot_general", {"einsum_dot_general": jax.lax.dot_general}),
        ("qk_attn_weights_einsum", {"qk_attn_weights_einsum": jnp.einsum}),
        ("attn_weights_value_einsum", {"attn_weights_value_einsum": jnp.einsum}),
        ("input_positions", {"input_positions": jnp.arange(24)}),
        ("precision", {"precision": jax.lax.DotAlgorithmPreset.BF16_BF16_F32}),
        ("precision", {"precision": "F16_F16_F32"}),
    ],
)
def test_option_that_cannot_be_honoured(name, options, rng):
    with pytest.raises(NotImplementedError, match=f"^{name}: "):
        attention_fn(*qkv(rng), **options)


def test_dropout_that_is_switched_off_is_taken(rng):
    arrays = qkv(rng)
    got = attention_fn(*arrays, dropout_rate=0.5, deterministic=True, precision=jax.lax.Precision.HIGHEST)
    assert_near(got, attention_fn(*arrays), FORWARD)


@pytest.mark.parametrize(
    "message, change, options",
    [
        ("query must be", lambda q, k, v: (q[0, 0], k, v), {}),
        ("key batch dims", lambda q, k, v: (q, k[0], v), {}),
        ("value batch dims", lambda q, k, v: (q, k, v[:1]), {}),
        ("mask must broadcast", lambda q, k, v: (q, k, v), {"mask": np.ones((1, 1, 1, 24, 24), bool)}),
        ("bias batch dims", lambda q, k, v: (q, k, v), {"bias": np.ones((3, 1, 24, 24), np.float32)}),
        ("local_window_size with", lambda q, k, v: (q[:, :5], k, v), {"local_window_size": 3}),
        ("is_causal", lambda q, k, v: (q[:, :5], k, v), {"is_causal": True, "causal": True}),
    ],
)
def test_wrong_input_is_named(message, change, options, rng):
    with pytest.raises(ValueError, match=f"^{message}"):
        attention_fn(*change(*qkv(rng)), **options)
