"""Calls of `cudnn_jax.gdn`, `kda` and `gdn2` and of their steps, against the float64 oracle and each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import cudnn_jax
from support import linear_attention as oracle
from support.linear_attention import GATES, Options, Sizes

KEYWORDS = {name: True for name in ("use_qk_l2norm", "use_beta_sigmoid", "allow_neg_eigval", "safe_gate")}
OPTIONS = Options(**KEYWORDS, checkpoint_every_n_tokens=3)
SIZES = Sizes((7, 7), heads=(1, 2, 2), key_dim=4, value_dim=3)


def tokens(operation: str) -> tuple[str, ...]:
    """Operands whose rows are tokens, in the order of the function's parameters."""
    return ("q", "k", "v", *GATES[operation])


def batched(x: np.ndarray) -> np.ndarray:
    return x.reshape(len(SIZES.lengths), -1, *x.shape[1:])


def split(operation: str, given: oracle.Arrays) -> tuple[list[Any], dict[str, Any]]:
    """Positional and named arguments."""
    names = tokens(operation)
    return [given[name] for name in names], {name: x for name, x in given.items() if name not in names}


def check_forms(operation: str, rng: np.random.Generator, forms: Sequence[str] = ("packed", "batched")) -> None:
    """Values, kept states and gradients, with every option on."""
    given = oracle.draw(rng, SIZES, OPTIONS, operation=operation)
    want = oracle.forward(given, OPTIONS)
    d_o, d_final = (rng.standard_normal(want[name].shape).astype(np.float32) for name in ("O", "final_state"))
    wanted = oracle.backward(given, d_o, d_final, OPTIONS)

    @jax.jit
    def run(given: Any, cu_seqlens: Any, d_o: Any, d_final: Any) -> Any:
        def fn(given: Any) -> Any:
            rows, more = split(operation, given)
            options = {"output_final_state": True, "checkpoint_every_n_tokens": 3, **KEYWORDS}
            out, final, kept = getattr(cudnn_jax, operation)(*rows, **more, cu_seqlens=cu_seqlens, **options)
            return (out, final), kept

        made, pullback, kept = jax.vjp(fn, given, has_aux=True)
        return made, kept, pullback((d_o, d_final))[0]

    packed = {name: x for name, x in given.items() if name != "cu_seqlens"}
    for name in forms:
        form = packed
        if name == "batched":
            form = {n: batched(x) if n in tokens(operation) else x for n, x in packed.items()}
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


def check_steps(operation: str, rng: np.random.Generator) -> None:
    """Steps are the sequence, token by token."""
    given = oracle.draw(rng, SIZES, OPTIONS, operation=operation)
    want = oracle.forward(given, OPTIONS)
    heads = {name: given[name] for name in ("a_log", "dt_bias")}
    names = tokens(operation)
    one = getattr(cudnn_jax, f"{operation}_step")
    step = jax.jit(lambda *args: one(*args, **heads, **KEYWORDS), donate_argnums=len(names))
    state, outs = jnp.asarray(given["initial_state"]), []
    for t in range(7):
        out, state = step(*(batched(given[name])[:, t] for name in names), state)
        outs.append(out)
    assert oracle.error(jnp.stack(outs, 1).reshape(want["O"].shape), want["O"]) <= 5e-6
    assert oracle.error(state, want["final_state"]) <= 5e-6


def check_step_over_a_pool(operation: str, rng: np.random.Generator) -> None:
    """A step over a pool touches its rows alone."""
    given = oracle.draw(rng, Sizes((1, 1, 1), key_dim=4, value_dim=3), operation=operation)
    rows, _ = split(operation, given)
    one = getattr(cudnn_jax, f"{operation}_step")
    pool = jnp.asarray(rng.standard_normal((5, 2, 3, 4)), jnp.bfloat16)
    indices = jnp.array([3, 0, -1], jnp.int32)
    out, after = one(*rows, pool, state_indices=indices)
    starts = jnp.stack([pool[3], pool[0], jnp.zeros_like(pool[0])])
    want, states = one(*rows, starts)
    assert (after.shape, after.dtype, states.dtype) == (pool.shape, pool.dtype, pool.dtype)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(after[jnp.array([3, 0])], states[:2])
    np.testing.assert_array_equal(after[jnp.array([1, 2, 4])], pool[jnp.array([1, 2, 4])])
