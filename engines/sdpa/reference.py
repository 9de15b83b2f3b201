"""The reference attention engine: pure JAX, inlined into the caller's program, every option on every platform."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from cudnn_jax.engines.sdpa._forward import Results
    from cudnn_jax.engines.sdpa.facts import SdpaFacts

Function = Callable[..., tuple[Any, ...]]
_GRADIENTS = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias", "dSink_token": "sink_token"}


def forward(facts: SdpaFacts, platform: str | None = None, tiles: tuple[int, int] | None = None) -> Function:
    """The function of a forward graph: arrays in the order of `facts.ports` to a tuple in that of `facts.results`.

    Arrays have the graph's logical dims, (batch, heads, length, head dim).

    Args:
      facts: the graph.
      platform: where it will run, "cpu" or another name; None is JAX's default. It decides the tile size alone.
      tiles: the most query rows and the most keys of a tile; None chooses.
    """
    import jax.numpy as jnp

    from cudnn_jax.engines.sdpa import _forward, _operands

    rows = (facts.batch, facts.q_heads, facts.q_len)
    scores = not facts.results.keys().isdisjoint({"score_max", "score_sum_exp"})

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = _operands.named(facts, arrays)
        kind = facts.types.get("O")
        dtype = jnp.dtype(kind.value) if kind is not None and kind.is_floating and kind.itemsize_bits > 8 else None
        if 0 in (*rows, facts.kv_len):
            made = _keyless(facts, given)
        else:
            made = _forward.forward(_operands.problem(facts, given, _tiles(facts, platform, tiles)), dtype, scores)
        stats = made.lse * math.log2(math.e) if facts.base2 else made.lse
        named = {"O": made.o.reshape(*rows, facts.v_head_dim), "Stats": _of_rows(stats, rows)}
        if made.most is not None and made.total is not None:
            named |= {"score_max": _of_rows(made.most, rows), "score_sum_exp": _of_rows(made.total, rows)}
        return _ordered(facts, named)

    return run


def backward(facts: SdpaFacts, platform: str | None = None, tiles: tuple[int, int] | None = None) -> Function:
    """The function of a backward graph, as `forward`. The gradients are written out: no autodiff is involved."""
    import jax.numpy as jnp

    from cudnn_jax.engines.sdpa import _backward, _operands

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = _operands.named(facts, arrays)
        wanted = {name: given[port] for name, port in _GRADIENTS.items() if name in facts.results}
        if 0 in (facts.batch, facts.q_heads, facts.q_len, facts.kv_len):
            named = {name: jnp.zeros(x.shape, x.dtype) for name, x in wanted.items()}
            if "dSink_token" in wanted and "dStats" in given:
                # A row without keys has its sink for a logsumexp.
                seen = _keyless(facts, given).lse > -jnp.inf
                by_head = jnp.where(seen, given["dStats"], 0).sum((0, 2), keepdims=True)
                named["dSink_token"] = by_head.astype(wanted["dSink_token"].dtype)
        else:
            o, d_o, stats = (_operands.grouped(given[port], facts.kv_heads) for port in ("o", "dO", "stats"))
            d_stats = _operands.grouped(given["dStats"], facts.kv_heads) if "dStats" in given else None
            problem = _operands.problem(facts, given, _tiles(facts, platform, tiles))
            gradients = _backward.backward(problem, o, d_o, stats, d_stats, "dBias" in facts.results)
            made = dict(zip(_GRADIENTS, gradients, strict=True))
            named = {
                name: x.reshape(wanted[name].shape) for name, x in made.items() if x is not None and name in wanted
            }
        return _ordered(facts, named)

    return run


def _tiles(facts: SdpaFacts, platform: str | None, tiles: tuple[int, int] | None) -> tuple[int, int]:
    import jax

    from cudnn_jax.engines.sdpa import _tiling

    return tiles or _tiling.choose(facts, platform or jax.default_backend())


def _keyless(facts: SdpaFacts, given: dict[str, jax.Array]) -> Results:
    """The results where an axis is 0 long: no row has a key, and some may have a sink."""
    import jax.numpy as jnp

    from cudnn_jax.engines.sdpa import _forward, _operands

    rows = (facts.batch, facts.q_heads, facts.q_len)
    most = jnp.broadcast_to(given.get("sink_token", -jnp.inf), (*rows, 1))
    if (ends := _operands.lengths(given, "q")) is not None:
        most = jnp.where(jnp.arange(facts.q_len)[:, None] < ends.reshape(-1, 1, 1, 1), most, -jnp.inf)
    total = jnp.where(most == -jnp.inf, 0.0, 1.0)
    return _forward.Results(jnp.zeros((*rows, facts.v_head_dim), given["q"].dtype), most, most, total)


def _of_rows(stats: jax.Array, rows: tuple[int, ...]) -> jax.Array:
    return stats.reshape(*rows, 1).astype("float32")


def _ordered(facts: SdpaFacts, named: Mapping[str, Any]) -> tuple[Any, ...]:
    """The results in the graph's order and data types."""
    import jax.numpy as jnp

    from cudnn_jax.engines.pointwise.reference import convert

    if "rng_dump" in facts.results:  # of a dropout that drops nothing
        plane = (facts.batch, facts.q_heads, facts.q_len, facts.kv_len)
        named = {**named, "rng_dump": jnp.ones(plane, jnp.float32)}
    made = []
    for name in sorted(facts.results, key=facts.results.__getitem__):
        made.append(convert(named[name], facts.types[name]) if name in facts.types else named[name])
    return tuple(made)
