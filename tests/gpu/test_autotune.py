"""`cudnn_jax.autotune` on the GPU that is here: no plan of ours is wrong, and the one that is kept runs."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.engines import planning

X = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.bfloat16)


def loss(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return cudnn_jax.sdpa(q, k, v, is_causal=True).astype(jnp.float32).sum()


def test_a_record_is_what_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rng: np.random.Generator) -> None:
    monkeypatch.setenv("CUDNN_JAX_CACHE_DIR", str(tmp_path))
    planning.clear_memo()
    fn = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
    arrays = [jnp.asarray(rng.standard_normal(X.shape), X.dtype) for _ in range(3)]
    before = fn(*arrays)
    tuned = cudnn_jax.autotune(fn, X, X, X, quiet=True)
    assert [row["operation"] for row in tuned.rows] == ["sdpa_fwd", "sdpa_bwd"]
    for row in tuned.rows:
        assert {plan["verdict"] for plan in row["plans"]} <= {"timed", "declined"}, str(tuned)
        assert row["recorded"] and row["against"] == "xla" and len(row["plans"]) > 1
    for _ in range(2):  # from what this process knows, and from the folder
        told = cudnn_jax.explain(fn, X, X, X).rows
        assert [row["plan"] for row in told] == [row["chosen"] for row in tuned.rows]
        assert all(row["origin"].startswith("autotune record, ") for row in told)
        planning.clear_memo()
    for got, want in zip(fn(*arrays), before, strict=True):
        np.testing.assert_allclose(np.float32(got), np.float32(want), atol=3e-2 * np.abs(np.float32(want)).max())
