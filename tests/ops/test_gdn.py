"""`cudnn_jax.gdn` and `gdn_step` on a CPU against the float64 oracle, and their two forms against each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from support import linear_attention as oracle
from support.linear_attention import Options, Sizes

OPTIONS = Options(
    use_qk_l2norm=True, use_beta_sigmoid=True, allow_neg_eigval=True, safe_gate=True, checkpoint_every_n_tokens=3
)
KEYWORDS = {name: True for name in ("use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate")}
SIZES = Sizes((7, 7), heads=(1, 2, 2), key_dim=4, value_dim=3)
TOKENS = ("q", "k", "v", "g", "beta")


def batched(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(SIZES.lengths), -1, *x.shape[1:])


def split(given: oracle.Arrays) -> tuple[list[Any], dict[str, Any]]:
    return [given[name] for name in TOKENS], {name: x for name, x in given.items() if name not in TOKENS}


def test_batched_and_packed_values_and_gradients(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, SIZES, OPTIONS)
    want = oracle.forward(given, OPTIONS)
    d_o, d_final = (rng.standard_normal(want[name].shape).astype(np.float32) for name in ("O", "final_state"))
    wanted = oracle.backward(given, d_o, d_final, OPTIONS)

    @jax.jit
    def run(given: Any, cu_seqlens: Any, d_o: Any, d_final: Any) -> Any:
        def fn(given: Any) -> Any:
            tokens, more = split(given)
            out, final, kept = cudnn_jax.gdn(
                *tokens, **more, cu_seqlens=cu_seqlens, output_final_state=True, checkpoint_every_n_tokens=3, **KEYWORDS
            )
            return (out, final), kept

        made, pullback, kept = jax.vjp(fn, given, has_aux=True)
        return made, kept, pullback((d_o, d_final))[0]

    packed = {name: x for name, x in given.items() if name != "cu_seqlens"}
    for name, form in (
        ("packed", packed),
        ("batched", {n: batched(x) if n in TOKENS else x for n, x in packed.items()}),
    ):
        cu = given["cu_seqlens"] if name == "packed" else None
        (out, final), kept, grads = run(form, cu, d_o if name == "packed" else batched(d_o), d_final)
        assert oracle.error(out.reshape(want["O"].shape), want["O"]) <= 5e-6
        assert oracle.error(final, want["final_state"]) <= 5e-6
        rows = len(want["state_checkpoints"])
        # Where cu_seqlens is traced, the count of kept states is not known.
        assert kept.shape[0] == (14 // 3 if name == "packed" else rows) and not kept[rows:].any()
        assert oracle.error(kept[:rows], want["state_checkpoints"]) <= 5e-6
        for each, gradient in grads.items():
            assert gradient.shape == form[each].shape
            assert oracle.error(gradient.reshape(wanted[each].shape), wanted[each]) <= 3e-5, each


def test_as_many_states_are_kept_as_there_are(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, Sizes((7, 0, 6, 2)))
    tokens, more = split(given)
    shapes = [
        cudnn_jax.gdn(*tokens, **(more | {"cu_seqlens": cu}), checkpoint_every_n_tokens=3)[2].shape[0]
        for cu in (given["cu_seqlens"], jnp.asarray(given["cu_seqlens"]))
    ]
    assert shapes == [3, 3]


def test_one_name_more() -> None:
    assert cudnn_jax.gated_delta_net is cudnn_jax.gdn


def test_steps_are_the_sequence_token_by_token(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, SIZES, OPTIONS)
    want = oracle.forward(given, OPTIONS)
    heads = {name: given[name] for name in ("a_log", "dt_bias")}
    step = jax.jit(lambda *args: cudnn_jax.gdn_step(*args, **heads, **KEYWORDS), donate_argnums=5)
    state, outs = jnp.asarray(given["initial_state"]), []
    for t in range(7):
        out, state = step(*(batched(given[name])[:, t] for name in TOKENS), state)
        outs.append(out)
    assert oracle.error(jnp.stack(outs, 1).reshape(want["O"].shape), want["O"]) <= 5e-6
    assert oracle.error(state, want["final_state"]) <= 5e-6


def test_a_step_over_a_pool_touches_its_rows_alone(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, Sizes((1, 1, 1), key_dim=4, value_dim=3))
    tokens = [given[name] for name in TOKENS]
    pool = jnp.asarray(rng.standard_normal((5, 2, 3, 4)), jnp.bfloat16)
    indices = jnp.array([3, 0, -1], jnp.int32)
    out, after = cudnn_jax.gdn_step(*tokens, pool, state_indices=indices)
    rows = jnp.stack([pool[3], pool[0], jnp.zeros_like(pool[0])])
    want, states = cudnn_jax.gdn_step(*tokens, rows)
    assert (after.shape, after.dtype, states.dtype) == (pool.shape, pool.dtype, pool.dtype)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(after[jnp.array([3, 0])], states[:2])
    np.testing.assert_array_equal(after[jnp.array([1, 2, 4])], pool[jnp.array([1, 2, 4])])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_types_of_results(dtype: str) -> None:
    avals = [jax.ShapeDtypeStruct((2, 5, 2, 4), dtype)] * 3 + [jax.ShapeDtypeStruct((2, 5, 2), "float32")] * 2
    state = jax.ShapeDtypeStruct((2, 2, 4, 4), "bfloat16")
    options: dict[str, Any] = {"output_final_state": True, "checkpoint_every_n_tokens": 2}
    out, final, kept = jax.eval_shape(lambda *x: cudnn_jax.gdn(*x, **options), *avals)
    assert [x.dtype.name for x in (out, final, kept)] == [dtype, "float32", dtype]
    _, final, _ = jax.eval_shape(lambda s, *x: cudnn_jax.gdn(*x, initial_state=s, **options), state, *avals)
    assert final.dtype == "bfloat16"
    assert jax.eval_shape(cudnn_jax.gdn, *avals)[1] is None


def test_autotune_draws_operands_that_mean_something() -> None:
    rows, gates = jax.ShapeDtypeStruct((40, 2, 64), jnp.float32), jax.ShapeDtypeStruct((40, 2), jnp.float32)
    cu = jax.ShapeDtypeStruct((5,), jnp.int32)
    told = cudnn_jax.autotune(
        lambda *x, cu: cudnn_jax.gdn(*x, cu_seqlens=cu)[0], rows, rows, rows, gates, gates, cu=cu, quiet=True
    )
    (row,) = told.rows
    assert (row["operation"], row["chosen"], row["plans"][0]["verdict"]) == ("gdn_fwd", "xla", "timed")
