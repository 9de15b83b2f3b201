"""The reference attention engine: pure JAX, inlined into the caller's program, every option on every platform."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import jax

    from cudnn_jax.engines.sdpa._blockwise import Problem
    from cudnn_jax.engines.sdpa.facts import SdpaFacts

Function = Callable[..., tuple[Any, ...]]
_GRADIENTS = {"dQ": "q", "dK": "k", "dV": "v", "dBias": "bias"}


def forward(facts: SdpaFacts, platform: str | None = None, tiles: tuple[int, int] | None = None) -> Function:
    """The function of a forward graph: arrays in the order of `facts.ports` to a tuple in that of `facts.results`.

    Arrays have the graph's logical dims, (batch, heads, length, head dim).

    Args:
      facts: the graph.
      platform: where it will run, "cpu" or another name; None is JAX's default. It decides the tile size alone.
      tiles: the most query rows and the most keys of a tile; None chooses.
    """
    import jax.numpy as jnp

    from cudnn_jax.engines.sdpa import _forward

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = {port: arrays[position] for port, position in facts.ports.items()}
        shape = (facts.batch, facts.q_heads, facts.q_len)
        if 0 in (*shape, facts.kv_len):
            o = jnp.zeros((*shape, facts.v_head_dim), given["q"].dtype)
            lse = jnp.full((*shape, 1), -jnp.inf, jnp.float32)
        else:
            grouped, stats = _forward.forward(_problem(facts, given, platform, tiles))
            o, lse = grouped.reshape(*shape, facts.v_head_dim), stats.reshape(*shape, 1).astype(jnp.float32)
        return _ordered(facts, {"O": o, "Stats": lse})

    return run


def backward(facts: SdpaFacts, platform: str | None = None, tiles: tuple[int, int] | None = None) -> Function:
    """The function of a backward graph, as `forward`. The gradients are written out: no autodiff is involved."""
    import jax.numpy as jnp

    from cudnn_jax.engines.sdpa import _backward

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        given = {port: arrays[position] for port, position in facts.ports.items()}
        wanted = {name: given[port] for name, port in _GRADIENTS.items() if name in facts.results}
        if 0 in (facts.batch, facts.q_heads, facts.q_len, facts.kv_len):
            return _ordered(facts, {name: jnp.zeros(x.shape, x.dtype) for name, x in wanted.items()})
        o, d_o, stats = (_grouped(given[port], facts.kv_heads) for port in ("o", "dO", "stats"))
        d_stats = _grouped(given["dStats"], facts.kv_heads) if "dStats" in given else None
        problem = _problem(facts, given, platform, tiles)
        gradients = _backward.backward(problem, o, d_o, stats, d_stats, "dBias" in facts.results)
        named = {name: made for name, made in zip(_GRADIENTS, gradients, strict=True) if made is not None}
        return _ordered(facts, {name: named[name].reshape(x.shape) for name, x in wanted.items()})

    return run


def _problem(
    facts: SdpaFacts, given: dict[str, jax.Array], platform: str | None, tiles: tuple[int, int] | None
) -> Problem:
    import jax

    from cudnn_jax.engines.sdpa import _blockwise, _tiling

    tiles = tiles or _tiling.choose(facts, platform or jax.default_backend())
    rows, keys = _tiling.Blocks.cut(facts.q_len, tiles[0]), _tiling.Blocks.cut(facts.kv_len, tiles[1])
    bias, mask = (_grouped(given[port], facts.kv_heads) if port in given else None for port in ("bias", "mask"))
    return _blockwise.Problem(
        q=_grouped(given["q"], facts.kv_heads),
        k=given["k"],
        v=given["v"],
        bias=bias,
        mask=mask,
        band=_tiling.Band.of(facts, rows, keys, given.get("seq_len_q"), given.get("seq_len_kv")),
        scale=facts.scale,
    )


def _grouped(array: jax.Array, kv_heads: int) -> jax.Array:
    """(b, N, ...) as (b, K, G, ...); a head axis of size 1 as (b, 1, 1, ...)."""
    batch, heads, *rest = array.shape
    split = (1, 1) if heads == 1 else (kv_heads, heads // kv_heads)
    return array.reshape(batch, *split, *rest)


def _ordered(facts: SdpaFacts, named: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(named[name] for name in sorted(facts.results, key=facts.results.__getitem__))
