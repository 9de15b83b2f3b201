"""Operands and results of the reference engines, in the order of a graph's ports and in its types."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cudnn_jax.engines import wide_types
from cudnn_jax.engines.linear_attention._slots import Slots
from cudnn_jax.graph.linear_attention import PER_HEAD, PER_TOKEN

if TYPE_CHECKING:
    from cudnn_jax.engines.linear_attention.facts import LinearFacts

Array = jax.Array
Arrays = dict[str, Array]
Function = Callable[..., tuple[Any, ...]]
"""Arrays in the order of `facts.ports`, with the graph's logical dims, to a tuple in that of `facts.results`."""


def wide(x: Array) -> Array:
    """(n,) or (n, HO) against states (n, HO, V, K)."""
    return x.reshape(*x.shape, *(1,) * (4 - x.ndim))


def _named(facts: LinearFacts, arrays: tuple[Array, ...]) -> Arrays:
    wide_types.check(facts.dtypes.values())
    return {port: arrays[position] for port, position in facts.ports.items()}


def _pool_rows(given: Arrays) -> Array:
    """Rows of the pool, out of range for a sequence without one."""
    indices, pool = given["state_indices"], given["initial_state"]
    return jnp.where(indices < 0, pool.shape[0], indices)


def _initial_state(facts: LinearFacts, given: Arrays) -> Array:
    """(n, HO, V, K)."""
    if "initial_state" not in given:
        return jnp.zeros((facts.sequences, facts.heads, facts.value_dim, facts.key_dim), jnp.float32)
    state = given["initial_state"]
    if facts.pool:
        state = state.at[_pool_rows(given)].get(mode="fill", fill_value=0)
    return state.astype(jnp.float32)


def _blank(facts: LinearFacts, given: Arrays) -> Arrays:
    """What a graph of no token or of no sequence makes, but for its states: zeros."""
    rows = facts.total // facts.checkpoint_every if facts.checkpoint_every else 0
    made = {
        "O": jnp.zeros((facts.total, facts.heads, facts.value_dim)),
        "state_checkpoints": jnp.zeros((rows, facts.heads, facts.value_dim, facts.key_dim)),
    }
    return made | {name: jnp.zeros_like(given[port]) for port, name in (PER_TOKEN | PER_HEAD).items() if port in given}


def _ordered(facts: LinearFacts, given: Arrays, made: Arrays) -> tuple[Array, ...]:
    """The results that the graph has, in its order and types."""
    made = {name: made[name].astype(facts.dtypes[name].value) for name in facts.results}
    if facts.pool and facts.overwrite and "final_state" in made:
        made["final_state"] = given["initial_state"].at[_pool_rows(given)].set(made["final_state"], mode="drop")
    return tuple(made[name] for name in sorted(facts.results, key=facts.results.__getitem__))


def kept_states(facts: LinearFacts, slots: Slots, state: Callable[[Array, Array], Array], initial: Array) -> Arrays:
    """final_state and state_checkpoints, where the graph has them.

    Args:
      state: (sequences, how many of their first tokens) to the states behind these; to anything behind none.
      initial: (n, HO, V, K).
    """
    made = {}
    if "final_state" in facts.results:
        last = state(jnp.arange(facts.sequences), slots.lengths)
        made["final_state"] = jnp.where(wide(slots.lengths > 0), last, initial)
    if "state_checkpoints" in facts.results:
        sequence, tokens = slots.checkpoints(facts.checkpoint_every, facts.total // facts.checkpoint_every)
        there = sequence < facts.sequences
        kept = state(jnp.where(there, sequence, 0), jnp.where(there, tokens, 1))
        made["state_checkpoints"] = jnp.where(wide(there), kept, 0)
    return made


def forward(facts: LinearFacts, run: Callable[[Arrays, Array], Arrays]) -> Function:
    """The function of a forward graph out of `run`, which takes the operands by port and the initial states, and gives
    the results by name. It is not run where there is no token."""

    def fn(*arrays: Array) -> tuple[Array, ...]:
        given = _named(facts, arrays)
        initial = _initial_state(facts, given)
        made = run(given, initial) if _has_tokens(facts) else _blank(facts, given) | {"final_state": initial}
        return _ordered(facts, given, made)

    return fn


def backward(facts: LinearFacts, run: Callable[[Arrays, Array, Array], Arrays]) -> Function:
    """As `forward`, of a backward graph; `run` also takes the final states' gradients, 0 where the graph has none."""

    def fn(*arrays: Array) -> tuple[Array, ...]:
        given = _named(facts, arrays)
        initial = _initial_state(facts, given)
        d_final = given["d_final_state"].astype(jnp.float32) if "d_final_state" in given else jnp.zeros_like(initial)
        made = (
            run(given, initial, d_final) if _has_tokens(facts) else _blank(facts, given) | {"d_initial_state": d_final}
        )
        return _ordered(facts, given, made)

    return fn


def _has_tokens(facts: LinearFacts) -> bool:
    return facts.total > 0 and facts.sequences > 0
