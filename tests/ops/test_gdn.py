"""`cudnn_jax.gdn` and `gdn_step` on a CPU against the float64 oracle, and their two forms against each other."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import cudnn_jax
from support import linear_attention as oracle
from support.linear_attention import Sizes
from support.linear_calls import check_forms, check_step_over_a_pool, check_steps, split


def test_batched_and_packed_values_and_gradients(rng: np.random.Generator) -> None:
    check_forms("gdn", rng)


def test_as_many_states_are_kept_as_there_are(rng: np.random.Generator) -> None:
    given = oracle.draw(rng, Sizes((7, 0, 6, 2)))
    tokens, more = split("gdn", given)
    shapes = [
        cudnn_jax.gdn(*tokens, **(more | {"cu_seqlens": cu}), checkpoint_every_n_tokens=3)[2].shape[0]
        for cu in (given["cu_seqlens"], jnp.asarray(given["cu_seqlens"]))
    ]
    assert shapes == [3, 3]


def test_one_name_more() -> None:
    assert cudnn_jax.gated_delta_net is cudnn_jax.gdn


def test_steps_are_the_sequence_token_by_token(rng: np.random.Generator) -> None:
    check_steps("gdn", rng)


def test_a_step_over_a_pool_touches_its_rows_alone(rng: np.random.Generator) -> None:
    check_step_over_a_pool("gdn", rng)


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
