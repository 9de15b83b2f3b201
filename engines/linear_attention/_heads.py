"""Heads in turn: a graph of many heads run as graphs of fewer, one after another, so that less is held at a time."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import lax

from cudnn_jax.engines.linear_attention import _ports
from cudnn_jax.graph.linear_attention import PER_HEAD

if TYPE_CHECKING:
    from cudnn_jax.engines.linear_attention.facts import LinearFacts

Array = jax.Array

_AT_ONCE = {"cpu": 1 << 18}
"""Elements of a turn's keys and values. Memory that a process has not touched yet costs a CPU more than the arithmetic
does; where there are thousands of cores, heads beside each other fill them."""
_FIRST_AXIS = (*PER_HEAD, *PER_HEAD.values())
_NO_HEADS = ("cu_seqlens", "state_indices")


def in_turn(make: Callable[[LinearFacts], _ports.Function], facts: LinearFacts, platform: str) -> _ports.Function:
    """`make`'s function of the facts, or one that runs it for groups of heads in turn, where there are too many.

    A head that several share stays with them.
    """
    turns = _turns(facts, platform)
    run = make(replace(facts, **{name: getattr(facts, name) // turns for name in _counts(facts)}))
    if turns == 1:
        return run
    ports = sorted(facts.ports, key=facts.ports.__getitem__)
    results = sorted(facts.results, key=facts.results.__getitem__)

    def turn(shared: dict[int, Array], split: dict[int, Array]) -> tuple[Array, ...]:
        arrays = shared | split
        return run(*(arrays[position] for position in range(len(ports))))

    def every(*arrays: Array) -> tuple[Array, ...]:
        shared = {at: x for at, x in enumerate(arrays) if ports[at] in _NO_HEADS}
        split = {at: _split(x, _axis(ports[at]), turns) for at, x in enumerate(arrays) if at not in shared}
        made = lax.map(lambda part: turn(shared, part), split)
        return tuple(_joined(x, _axis(name)) for name, x in zip(results, made, strict=True))

    return every


def _turns(facts: LinearFacts, platform: str) -> int:
    """The fewest of equal groups of heads that are small enough, or as many as there can be."""
    most = math.gcd(*_counts(facts).values())
    size = facts.total * facts.heads * (facts.key_dim + facts.value_dim)
    limit = _AT_ONCE.get(platform, size)
    return next((n for n in range(1, most) if most % n == 0 and size <= n * limit), most)


def _counts(facts: LinearFacts) -> dict[str, int]:
    return {name: getattr(facts, name) for name in ("heads_q", "heads_k", "heads_v", "heads")}


def _axis(name: str) -> int:
    return 0 if name in _FIRST_AXIS else 1


def _split(x: Array, axis: int, turns: int) -> Array:
    shape = (*x.shape[:axis], turns, x.shape[axis] // turns, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis, 0)


def _joined(x: Array, axis: int) -> Array:
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
