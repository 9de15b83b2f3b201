"""The layers of linear attention: the formulas of their papers, NNX beside Linen, decoding beside one pass, gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import cudnn_jax.flax
import cudnn_jax.flax.linen

SIZES = {"num_heads": 2, "head_dim": 8, "num_value_heads": 4, "value_head_dim": 12}
FEATURES = 16


def layer(name="GatedDeltaNet", **options):
    return getattr(cudnn_jax.flax, name)(FEATURES, **{**SIZES, **options}, rngs=nnx.Rngs(0))


def linen_parameters(model):
    """The parameters of an NNX layer, as Linen names them."""
    made = {name: {"kernel": project.kernel[...]} for name, project in model.projections.items()}
    made |= {f"{name}_conv": weight[...] for name, weight in model.convolutions.items()}
    made |= {name: getattr(model, name)[...] for name in ("a_log", "dt_bias", "norm_scale")}
    return {"params": {**made, "out": {"kernel": model.out.kernel[...]}}}


def draw(batch=2, length=70):
    return jnp.asarray(np.random.default_rng().standard_normal((batch, length, FEATURES)), jnp.float32)


def silu(x):
    return x / (1 + np.exp(-x))


def sigmoid(x):
    return 1 / (1 + np.exp(-x))


def by_hand(model, x, double):
    """Token by token, in float64."""
    kimi = isinstance(model, cudnn_jax.flax.KimiDeltaAttention)
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), linen_parameters(model)["params"])
    x = np.asarray(x, np.float64)
    heads, dim, value_heads, value_dim = SIZES.values()
    out = np.zeros_like(x)
    for b in range(x.shape[0]):
        mixed = {}
        for name in ("query", "key", "value"):
            rows = x[b] @ p[name]["kernel"]
            seen = np.concatenate([np.zeros((3, rows.shape[1])), rows])
            mixed[name] = silu(sum(p[f"{name}_conv"][at] * seen[at : at + len(rows)] for at in range(4)))
        rate = (2 if double else 1) * sigmoid(x[b] @ p["rate"]["kernel"])
        raw, gate = (
            (x[b] @ p[f"{name}_narrow"]["kernel"] if kimi else x[b]) @ p[name]["kernel"] for name in ("decay", "gate")
        )
        gate = (sigmoid if kimi else silu)(gate.reshape(-1, value_heads, value_dim))
        if kimi:
            raw = raw.reshape(-1, value_heads, dim) + p["dt_bias"]
            decay = np.exp(-5 * sigmoid(np.exp(p["a_log"])[:, None] * raw))
        else:
            decay = np.exp(-np.exp(p["a_log"]) * np.log1p(np.exp(raw + p["dt_bias"])))
        state = np.zeros((value_heads, value_dim, dim))
        for t in range(x.shape[1]):
            row = np.zeros((value_heads, value_dim))
            for h in range(value_heads):
                at = h // (value_heads // heads)
                q, k = (mixed[name][t].reshape(heads, dim)[at] for name in ("query", "key"))
                q, k = (each / np.sqrt((each * each).sum() + 1e-6) for each in (q, k))
                state[h] *= decay[t, h]
                wanted = mixed["value"][t].reshape(value_heads, value_dim)[h]
                state[h] += rate[t, h] * np.outer(wanted - state[h] @ k, k)
                row[h] = state[h] @ q * dim**-0.5
            row /= np.sqrt((row * row).mean(-1, keepdims=True) + 1e-6)
            out[b, t] = (row * p["norm_scale"] * gate[t]).reshape(-1) @ p["out"]["kernel"]
    return out


@pytest.mark.parametrize(
    ("name", "double"), [("GatedDeltaNet", False), ("GatedDeltaNet", True), ("KimiDeltaAttention", False)]
)
def test_the_layer_is_the_papers(name, double) -> None:
    model, x = layer(name, allow_neg_eigval=double), draw(length=9)
    want = by_hand(model, x, double)
    np.testing.assert_allclose(
        nnx.jit(model.__class__.__call__)(model, x), want, rtol=0, atol=2e-5 * np.abs(want).max()
    )


@pytest.mark.parametrize("name", ["GatedDeltaNet", "KimiDeltaAttention"])
def test_linen_computes_what_nnx_does(name) -> None:
    model, x = layer(name), draw(length=9)
    other = getattr(cudnn_jax.flax.linen, name)(FEATURES, **SIZES)
    shapes = jax.eval_shape(other.init, jax.random.key(0), x)
    parameters = linen_parameters(model)
    assert jax.tree.map(jnp.shape, parameters) == jax.tree.map(jnp.shape, shapes)
    np.testing.assert_allclose(jax.jit(other.apply)(parameters, x), model(x), atol=2e-5)


@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *(("GatedDeltaNet", steps) for steps in ((70,), (1,) * 5 + (65,), (40, 1, 1, 28))),
        ("KimiDeltaAttention", (5, 1, 3)),
    ],
)
def test_decoding_in_pieces_is_one_pass(name, steps) -> None:
    model, x = layer(name), draw(length=sum(steps))
    want = np.asarray(model(x))
    model.init_cache(2)
    pieces = jnp.split(x, np.cumsum(steps)[:-1], axis=1)
    got = jnp.concatenate([model(piece, decode=True) for piece in pieces], axis=1)
    np.testing.assert_allclose(got, want, atol=2e-5 * np.abs(want).max())
    model.init_cache(2)
    np.testing.assert_allclose(model(pieces[0], decode=True), want[:, : steps[0]], atol=2e-5 * np.abs(want).max())


def test_linen_decodes_from_its_cache() -> None:
    model, x = layer(), draw()
    decoding = cudnn_jax.flax.linen.GatedDeltaNet(FEATURES, **SIZES, decode=True)
    parameters = linen_parameters(model)
    cache = decoding.init(jax.random.key(0), x)["cache"]
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(cache))
    step = jax.jit(lambda cache, piece: decoding.apply({**parameters, "cache": cache}, piece, mutable="cache"))
    made = []
    for piece in jnp.split(x, [40, 41, 42], axis=1):
        out, changed = step(cache, piece)
        cache = changed["cache"]
        made.append(out)
    np.testing.assert_allclose(jnp.concatenate(made, axis=1), model(x), atol=2e-5)
    with pytest.raises(ValueError, match="a cache for 2 sequences"):
        step(cache, x[:1])


def test_every_parameter_takes_a_gradient_and_no_output_sees_later_inputs() -> None:
    model, x = layer(dtype=jnp.bfloat16), draw()
    assert model(x).dtype == jnp.bfloat16
    model, mark = layer(), jnp.asarray(np.random.default_rng().standard_normal(x.shape), jnp.float32)
    grads = nnx.grad(lambda model, x: (model(x) * mark).sum())(model, x)
    leaves = jax.tree.leaves(grads)
    assert len(leaves) == len(model.projections) + 3 + 3 + 1 and all(np.abs(leaf).max() > 0 for leaf in leaves)
    seen = jax.grad(lambda x: model(x)[0, 30].sum())(x)
    assert np.abs(seen[0, :31]).min(axis=1).max() > 0 and not np.any(seen[0, 31:]) and not np.any(seen[1])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_value_heads": 3}, "num_value_heads is 3 and num_heads 2; the rule: a multiple"),
        ({"head_dim": 0}, "head_dim is 0; the rule: at least 1"),
    ],
)
def test_sizes_that_do_not_fit_are_named(options, message) -> None:
    with pytest.raises(ValueError, match=message):
        layer(**options)
    with pytest.raises(ValueError, match=message):
        cudnn_jax.flax.linen.GatedDeltaNet(FEATURES, **{**SIZES, **options}).init(jax.random.key(0), draw())


def test_calls_that_do_not_fit_are_named() -> None:
    model = layer()
    with pytest.raises(ValueError, match=r"x has shape \(2, 3\); the rule: \(B, T, 16\)"):
        model(jnp.ones((2, 3)))
    with pytest.raises(ValueError, match=r"none as the cache; the rule: init_cache\(2\) first"):
        model(draw(), decode=True)
    model.init_cache(3)
    with pytest.raises(ValueError, match="one for 3 sequences as the cache"):
        model(draw(), decode=True)


def test_linen_is_a_module_of_linen() -> None:
    assert issubclass(cudnn_jax.flax.linen.GatedDeltaNet, linen.Module)


def test_a_cache_keeps_its_types() -> None:
    x = draw(length=3).astype(jnp.bfloat16)
    for dtype in (None, jnp.bfloat16):
        model = cudnn_jax.flax.linen.GatedDeltaNet(FEATURES, **SIZES, decode=True, dtype=dtype)
        made = model.init(jax.random.key(0), x)
        _, changed = model.apply(made, x, mutable="cache")
        types = jax.tree.map(lambda leaf: leaf.dtype, made["cache"])
        assert jax.tree.map(lambda leaf: leaf.dtype, changed["cache"]) == types
