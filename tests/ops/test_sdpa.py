"""`cudnn_jax.sdpa` on every attention case, values and gradients, against the float64 oracle."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from support import public
from support.attention.harness import CASES, Case, arrays, check, expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values_and_gradients(case: Case) -> None:
    given = arrays(case)
    check(case, public.run(case, given), expected(case, given))


def test_it_stands_for_jax_nn_dot_product_attention(rng: np.random.Generator) -> None:
    q, k, v, bias = (
        jnp.asarray(rng.standard_normal(shape), jnp.float32)
        for shape in ((2, 9, 4, 16), (2, 11, 2, 16), (2, 11, 2, 16), (1, 4, 9, 11))
    )
    mask = jnp.asarray(rng.random((2, 1, 9, 11)) < 0.8).at[..., 0].set(True)
    lengths = {"query_seq_lengths": jnp.array([9, 5]), "key_value_seq_lengths": jnp.array([11, 7])}
    for options in (
        {},
        {"bias": bias, "mask": mask, "scale": 0.2},
        {"is_causal": True},
        {"is_causal": True, "local_window_size": (3, 0)},
        {"local_window_size": 2},
        {"key_value_seq_lengths": lengths["key_value_seq_lengths"]},
    ):
        got = cudnn_jax.sdpa(q, k, v, **options)  # type: ignore[arg-type]
        want = jax.nn.dot_product_attention(q, k, v, **options)  # type: ignore[arg-type]
        np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5, err_msg=str(options))


def test_the_residual_is_the_logsumexp_in_float32(rng: np.random.Generator) -> None:
    q, k = (jnp.asarray(rng.standard_normal((1, 6, 2, 8)), jnp.bfloat16) for _ in "qk")
    _, lse = cudnn_jax.sdpa(q, k, k, scale=0.5, return_residual=True)
    logits = 0.5 * jnp.einsum("btnd,bsnd->btns", q, k, precision="highest", preferred_element_type=jnp.float32)
    assert lse.dtype == jnp.float32
    np.testing.assert_allclose(lse, jax.nn.logsumexp(logits, -1), rtol=1e-5)


def test_gradients_have_their_inputs_dtypes(rng: np.random.Generator) -> None:
    q, k, v = (jnp.asarray(rng.standard_normal((1, 6, 2, 8)), jnp.bfloat16) for _ in "qkv")
    bias = jnp.zeros((1, 1, 6, 6), jnp.float32)
    gradients = jax.grad(lambda *x: cudnn_jax.sdpa(*x).astype(jnp.float32).sum(), argnums=(0, 1, 2, 3))(q, k, v, bias)
    assert [g.dtype for g in gradients] == [jnp.bfloat16] * 3 + [jnp.float32]
