"""`attention_fn` inside the attention layers of Flax NNX and of Linen."""

import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

from cudnn_jax.flax import attention_fn

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
FEATURES, HEADS, LENGTH = 32, 4, 12


def inputs(rng, *batch, length=LENGTH):
    return jnp.asarray(rng.standard_normal((*batch, length, FEATURES)), jnp.float32)


def nnx_layer(fn=None, **options):
    options = {"decode": False, **options, **({} if fn is None else {"attention_fn": fn})}
    return nnx.MultiHeadAttention(HEADS, FEATURES, rngs=nnx.Rngs(0), **options)


def linen_layer(fn=None, **options):
    options = {**options, **({} if fn is None else {"attention_fn": fn})}
    return linen.MultiHeadDotProductAttention(HEADS, **options)


def causal_mask(length=LENGTH):
    return jnp.tril(jnp.ones((1, 1, length, length)))


def nnx_loss_and_grads(layer, x, cotangent, **call):
    return nnx.jit(nnx.value_and_grad(lambda m: jnp.sum(m(x, **call) * cotangent)))(layer)


def assert_trees_near(got, want):
    got, want = jax.tree.leaves(got), jax.tree.leaves(want)
    assert len(got) == len(want) > 0
    for g, w in zip(got, want, strict=True):
        np.testing.assert_allclose(g, w, **TOLERANCE)


@pytest.mark.parametrize(
    "layer_options, call, batch",
    [
        ({}, {}, (2,)),
        ({}, {"is_causal": True}, (2,)),
        ({}, {"mask": causal_mask()}, (2, 3)),
        ({"num_kv_heads": 2}, {"is_causal": True}, (2,)),
        ({"normalize_qk": True}, {}, ()),
        ({"dropout_rate": 0.3}, {"deterministic": True}, (2,)),
        ({"precision": jax.lax.Precision.HIGHEST}, {}, (2,)),
    ],
)
def test_nnx_layer(layer_options, call, batch, rng):
    x = inputs(rng, *batch)
    cotangent = inputs(rng, *batch)
    assert_trees_near(
        nnx_loss_and_grads(nnx_layer(attention_fn, **layer_options), x, cotangent, **call),
        nnx_loss_and_grads(nnx_layer(**layer_options), x, cotangent, **call),
    )


@pytest.mark.parametrize(
    "layer_options, call, batch",
    [
        ({}, {}, (2,)),
        ({}, {"mask": causal_mask()}, (2, 3)),
        ({"normalize_qk": True}, {}, (2,)),
        ({"force_fp32_for_softmax": True}, {}, (2,)),
        ({"dropout_rate": 0.3, "deterministic": True}, {}, (2,)),
    ],
)
def test_linen_layer(layer_options, call, batch, rng):
    x, cotangent = inputs(rng, *batch), inputs(rng, *batch)
    variables = linen_layer(**layer_options).init(jax.random.key(0), x)

    def loss_and_grads(layer):
        return jax.jit(jax.value_and_grad(lambda v: jnp.sum(layer.apply(v, x, **call) * cotangent)))(variables)

    assert_trees_near(
        loss_and_grads(linen_layer(attention_fn, **layer_options)),
        loss_and_grads(linen_layer(**layer_options)),
    )


@pytest.mark.parametrize("options", [{"causal": True}, {"local_window_size": (-1, 0)}], ids=str)
def test_nnx_partial_pins_causal(options, rng):
    x = inputs(rng, 2)
    got = nnx_layer(functools.partial(attention_fn, **options))(x)
    np.testing.assert_allclose(got, nnx_layer()(x, is_causal=True), **TOLERANCE)


@pytest.mark.parametrize("options", [{"causal": True}, {"is_causal": True}], ids=str)
def test_linen_partial_pins_causal(options, rng):
    x = inputs(rng, 2)
    variables = linen_layer().init(jax.random.key(0), x)
    got = linen_layer(functools.partial(attention_fn, **options)).apply(variables, x)
    np.testing.assert_allclose(got, linen_layer().apply(variables, x, mask=causal_mask()), **TOLERANCE)


@pytest.mark.parametrize("fn", [attention_fn, functools.partial(attention_fn, causal=True)])
def test_nnx_decode_step_by_step_equals_the_whole_sequence(fn, rng):
    x = inputs(rng, 2)
    layer = nnx_layer(fn, decode=True, num_kv_heads=2)
    layer.init_cache(x.shape)
    step = nnx.jit(lambda m, token: m(token))
    got = jnp.concatenate([step(layer, x[:, t : t + 1]) for t in range(LENGTH)], axis=1)
    want = nnx_layer(num_kv_heads=2)(x, is_causal=True)
    np.testing.assert_allclose(got, want, **TOLERANCE)


@pytest.mark.parametrize("fn", [attention_fn, functools.partial(attention_fn, causal=True)])
def test_linen_decode_step_by_step_equals_the_whole_sequence(fn, rng):
    x = inputs(rng, 2, 3)
    layer = linen_layer(fn, decode=True)
    variables = layer.init(jax.random.key(0), x)
    cache, params = variables["cache"], variables["params"]
    step = jax.jit(lambda cache, token: layer.apply({"params": params, "cache": cache}, token, mutable=["cache"]))
    outs = []
    for t in range(LENGTH):
        out, changed = step(cache, x[..., t : t + 1, :])
        cache = changed["cache"]
        outs.append(out)
    want = linen_layer().apply({"params": params}, x, mask=causal_mask())
    np.testing.assert_allclose(jnp.concatenate(outs, axis=-2), want, **TOLERANCE)


def test_nnx_layer_refuses_to_sow_or_drop(rng):
    x = inputs(rng, 2)
    with pytest.raises(NotImplementedError, match=r"^module: "):
        nnx_layer(attention_fn)(x, sow_weights=True)
    with pytest.raises(NotImplementedError, match=r"^dropout_rate: "):
        nnx_layer(attention_fn, dropout_rate=0.1)(x, deterministic=False)


def test_linen_layer_refuses_to_sow_or_drop_or_replace_einsums(rng):
    x = inputs(rng, 2)
    variables = linen_layer().init(jax.random.key(0), x)
    with pytest.raises(NotImplementedError, match=r"^module: "):
        linen_layer(attention_fn).apply(variables, x, sow_weights=True)
    with pytest.raises(NotImplementedError, match=r"^dropout_rate: "):
        layer = linen_layer(attention_fn, dropout_rate=0.1, deterministic=False)
        layer.apply(variables, x, rngs={"dropout": jax.random.key(1)})
    einsum = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    with pytest.raises(NotImplementedError, match=r"^qk_attn_weights_einsum: "):
        linen_layer(attention_fn, **einsum).apply(variables, x)


def test_importing_the_module_loads_no_flax():
    code = "import sys, cudnn_jax.flax; sys.exit(any(m.partition('.')[0] == 'flax' for m in sys.modules))"
    subprocess.run([sys.executable, "-c", code], check=True)
