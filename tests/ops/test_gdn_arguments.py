"""What `cudnn_jax.gdn` and `gdn_step` refuse, by argument, value and rule."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from cudnn_jax.graph import GraphNotSupportedError

F32, BF16 = jnp.float32, jnp.bfloat16


def zeros(*shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.zeros(shape, dtype)


BATCHED = {
    "q": zeros(2, 5, 2, 4),
    "k": zeros(2, 5, 1, 4),
    "v": zeros(2, 5, 4, 3),
    "g": zeros(2, 5, 4),
    "beta": zeros(2, 5, 4),
}
PACKED = {name: x.reshape(10, *x.shape[2:]) for name, x in BATCHED.items()} | {"cu_seqlens": jnp.array([0, 4, 10])}
STEP = {name: x[:, 0] for name, x in BATCHED.items()} | {"state": zeros(2, 4, 3, 4)}

BAD = [
    (BATCHED, {"q": [1.0]}, TypeError, r"q is a list; the rule: an array of shape \(B, T, H, K\)"),
    (BATCHED, {"q": zeros(5, 2, 4)}, ValueError, r"q has shape \(5, 2, 4\); the rule: \(B, T, H, K\)"),
    (PACKED, {"q": zeros(2, 5, 2, 4)}, ValueError, r"q has shape \(2, 5, 2, 4\); the rule: \(total, H, K\)"),
    (BATCHED, {"q": zeros(2, 5, 2, 4, dtype=jnp.int32)}, TypeError, "q has dtype int32; the rule: bfloat16 or"),
    (BATCHED, {"k": zeros(2, 5, 1, 4, dtype=BF16)}, TypeError, "k has dtype bfloat16; the rule: q's dtype float32"),
    (BATCHED, {"k": zeros(2, 5, 1, 6)}, ValueError, r"k has shape \(2, 5, 1, 6\), expected \(2, 5, any, 4\)"),
    (BATCHED, {"v": zeros(2, 6, 4, 3)}, ValueError, r"v has shape \(2, 6, 4, 3\), expected \(2, 5, any, any\)"),
    (BATCHED, {"v": zeros(2, 5, 3, 3)}, ValueError, "q has 2 heads; the rule: .* divide HO = 3"),
    (BATCHED, {"k": zeros(2, 5, 3, 4)}, ValueError, "k has 3 heads; the rule: .* divide HO = 4"),
    (BATCHED, {"k": zeros(2, 5, 0, 4)}, ValueError, r"k has shape \(2, 5, 0, 4\); the rule: at least one head"),
    (BATCHED, {"g": zeros(2, 5, 2)}, ValueError, r"g has shape \(2, 5, 2\), expected \(2, 5, 4\)"),
    (BATCHED, {"g": zeros(2, 5, 4, 4)}, ValueError, r"g has shape .* the rule: \(B, T, HO\)"),
    (BATCHED, {"beta": zeros(2, 5, 4, dtype=BF16)}, TypeError, "beta has dtype bfloat16; the rule: float32 or q's"),
    (PACKED, {"cu_seqlens": [0, 10]}, TypeError, r"cu_seqlens is a list; the rule: .* shape \(n \+ 1,\), where"),
    (PACKED, {"cu_seqlens": jnp.array([0.0, 10.0])}, TypeError, "cu_seqlens has dtype float32; the rule: int32 or"),
    (PACKED, {"cu_seqlens": zeros(2, 2, dtype=jnp.int32)}, ValueError, r"cu_seqlens has shape \(2, 2\); the rule"),
    (PACKED, {"cu_seqlens": zeros(0, dtype=jnp.int32)}, ValueError, r"cu_seqlens has shape \(0,\); the rule"),
    (PACKED, {"cu_seqlens": np.array([0, 11])}, ValueError, "cu_seqlens is .* to at most the 10 rows of q"),
    (PACKED, {"cu_seqlens": np.array([0, 7, 4])}, ValueError, "cu_seqlens is .* rising"),
    (BATCHED, {"initial_state": zeros(2, 4, 4, 3)}, ValueError, r"initial_state has shape .*, expected \(2, 4, 3, 4\)"),
    (PACKED, {"initial_state": zeros(3, 4, 3, 4)}, ValueError, r"initial_state has shape .*, expected \(2, 4, 3, 4\)"),
    (
        BATCHED,
        {"initial_state": zeros(2, 4, 3, 4, dtype=jnp.float16)},
        TypeError,
        "initial_state has dtype float16; the rule: float32 or bfloat16",
    ),
    (BATCHED, {"scale": jnp.ones(())}, TypeError, "scale is an array; the rule: a Python number"),
    (BATCHED, {"scale": float("nan")}, ValueError, "scale is nan; the rule: a finite number"),
    (BATCHED, {"use_qk_l2norm": 1}, TypeError, "use_qk_l2norm is 1; the rule: True or False"),
    (BATCHED, {"output_final_state": None}, TypeError, "output_final_state is None; the rule: True or False"),
    (BATCHED, {"gate_domain": "exp"}, ValueError, "gate_domain is 'exp'; the rule: 'log' or 'linear'"),
    (BATCHED, {"safe_gate": True, "gate_domain": "linear"}, ValueError, "safe_gate came with gate_domain 'linear'"),
    (BATCHED, {"gate_lower_bound": -5.0}, ValueError, "gate_lower_bound is -5.0; the rule: None"),
    (BATCHED, {"a_log": zeros(4)}, ValueError, "a_log came without safe_gate"),
    (BATCHED, {"dt_bias": zeros(4)}, ValueError, "dt_bias came without safe_gate"),
    (BATCHED, {"safe_gate": True, "a_log": zeros(2)}, ValueError, r"a_log has shape \(2,\), expected \(4"),
    (
        BATCHED,
        {"safe_gate": True, "dt_bias": zeros(4, 4)},
        ValueError,
        r"dt_bias has shape \(4, 4\); the rule: \(HO,\)",
    ),
    (BATCHED, {"safe_gate": True, "a_log": zeros(4, dtype=BF16)}, TypeError, "a_log has dtype bfloat16; the rule"),
    (BATCHED, {"checkpoint_every_n_tokens": -1}, ValueError, "checkpoint_every_n_tokens is -1; the rule"),
    (BATCHED, {"checkpoint_every_n_tokens": 2**31}, ValueError, "is 2147483648; .* at least 0 and at most 2147483647$"),
    (PACKED, {"checkpoint_every_n_tokens": 10**400}, ValueError, "is an integer of 1329 bits; .* at most 2147483647$"),
    (BATCHED, {"scale": 10**400}, ValueError, "^scale is an integer of 1329 bits; the rule: a finite number, from"),
    (BATCHED, {"checkpoint_every_n_tokens": 2.0}, ValueError, "checkpoint_every_n_tokens is 2.0; the rule"),
    (BATCHED, {"implementation": 3}, TypeError, "implementation is 3; the rule"),
    (
        BATCHED,
        {"implementation": "flash"},
        GraphNotSupportedError,
        "gdn; .* cudnn, cutile, cutile_gdn, .*, xla, or a p",
    ),
    (BATCHED, {"implementation": "cudnn"}, GraphNotSupportedError, "cudnn: platform cpu"),
    (STEP, {"q": zeros(2, 1, 2, 4)}, ValueError, r"q has shape \(2, 1, 2, 4\); the rule: \(B, H, K\)"),
    (STEP, {"state": zeros(3, 4, 3, 4)}, ValueError, r"state has shape .*, expected \(2, 4, 3, 4\)"),
    (
        STEP,
        {"state": zeros(0, 4, 3, 4), "state_indices": zeros(2, dtype=jnp.int32)},
        ValueError,
        r"^state has shape \(0, 4, 3, 4\); the rule: a pool \(P, HO, V, K\) of at least one row$",
    ),
    (STEP, {"state_indices": zeros(2)}, TypeError, "state_indices has dtype float32; the rule: int32"),
    (STEP, {"state_indices": zeros(3, dtype=jnp.int32)}, ValueError, r"state_indices has shape \(3,\), expected \(2"),
]


@pytest.mark.parametrize(("base", "changes", "error", "words"), BAD, ids=[row[3][:40] for row in BAD])
def test_bad_arguments_are_named(base: Any, changes: Any, error: Any, words: str) -> None:
    fn = cudnn_jax.gdn_step if "state" in base else cudnn_jax.gdn
    with pytest.raises(error, match=words):
        fn(**(base | changes))


def test_other_derivatives_are_refused_by_name() -> None:
    def loss(q: jax.Array, **more: Any) -> jax.Array:
        return (cudnn_jax.gdn(**BATCHED | {"q": q}, **more)[0] ** 2).sum()

    q = BATCHED["q"]
    for derivative in (lambda: jax.jvp(loss, (q,), (q,)), lambda: jax.grad(lambda q: jax.grad(loss)(q).sum())(q)):
        with pytest.raises(NotImplementedError, match="use reverse mode"):
            derivative()


def test_a_derivative_through_a_pool_is_refused_by_name() -> None:
    pool = {"state_indices": jnp.array([0, 1], jnp.int32)}
    with pytest.raises(NotImplementedError, match="gdn_step has no derivative through a pool of states"):
        jax.grad(lambda q: cudnn_jax.gdn_step(**STEP | pool | {"q": q})[0].sum())(STEP["q"])


def test_vmap_of_more_packed_rows_than_offsets_count_is_refused() -> None:
    rows = {name: jax.ShapeDtypeStruct((4, 2**29, *x.shape[1:]), x.dtype) for name, x in PACKED.items()}
    rows |= {"cu_seqlens": jax.ShapeDtypeStruct((4, 3), jnp.int32)}
    with pytest.raises(NotImplementedError, match="vmap of 4 elements of 536870912 packed rows .* give it in int64"):
        jax.eval_shape(jax.vmap(lambda x: cudnn_jax.gdn(**x)[0]), rows)
