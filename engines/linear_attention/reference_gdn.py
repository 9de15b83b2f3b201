"""The reference engine of Gated DeltaNet: pure JAX over chunks, inlined into the caller's program, float32 inside.

Of one chunk and head, with C tokens as rows, S (V, K) the state in front of it, a token's decay exp(g), G the sum of g
up to and with a token, D_ij = exp(G_i - G_j) for i >= j, E = exp(G), L = exp(G_last - G) and scale s:

    A = tril(D k k^T, -1)      T = (I + diag(beta) A)^-1      P = s tril(D q k^T)
    U = T diag(beta) (v - E (k S^T))      O = s E (q S^T) + P U      S' = exp(G_last) S + U^T (L k)

Backward, Z the gradient of S':

    W = T^T (P^T dO + L (k Z^T))      dv = beta W      dbeta = rowsum(W (v - E (k S^T) - A U))
    dS = exp(G_last) Z + s (E dO)^T q - (E dv)^T k
    dP = tril(dO U^T)      dA = -tril(dv U^T, -1)
    dq = s E (dO S) + s (D dP) k
    dk = s (D dP)^T q + (D dA) k + (D dA)^T k - E (dv S) + L (U Z)

The gradient of g_t sums, over every exponent that holds g_t, the term times its gradient. Nothing divides by beta.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from cudnn_jax.engines.linear_attention import _inputs, _ports
from cudnn_jax.engines.linear_attention._heads import in_turn
from cudnn_jax.engines.linear_attention._products import inverse, product
from cudnn_jax.engines.linear_attention._slots import Rows, Slots, slots_of

if TYPE_CHECKING:
    from cudnn_jax.engines.linear_attention.facts import LinearFacts

Array = jax.Array
_GRAIN = 1024.0
"""Sums of a chunk's gates in units of its reciprocal, at most 32 * 128 * 1024, are exact in float32."""


def forward(facts: LinearFacts, platform: str = "cpu", chunk: int | None = None) -> _ports.Function:
    """The function of a forward graph: arrays in the order of `facts.ports` to a tuple in that of `facts.results`.

    Arrays have the graph's logical dims.

    Args:
      facts: the graph.
      platform: where it will run. It decides alone how many heads and sequences run beside each other.
      chunk: tokens of a chunk, a power of two; None chooses.
    """
    return in_turn(lambda part: _forward(part, platform, chunk), facts, platform)


def _forward(facts: LinearFacts, platform: str, chunk: int | None) -> _ports.Function:
    def run(given: _ports.Arrays, initial: Array) -> _ports.Arrays:
        part = _Chunks.of(facts, given, platform, chunk)
        start, u = _forward_scan(part, initial)
        o = facts.scale * part.from_start[..., None] * product("nhck,nhvk->nhcv", part.q, start)
        o += product("nhcd,nhdv->nhcv", part.p, u)
        made = {"O": part.slots.joined(o)}

        def state(sequence: Array, tokens: Array) -> Array:
            """The state behind the first `tokens` of a sequence; of none, something."""
            slot, row = part.slots.place(sequence, tokens)
            k = part.k[slot] * part.decay[slot, :, row][..., None]
            before = part.from_start[slot, :, row][..., None, None] * start[slot]
            return before + product("rhcv,rhck->rhvk", u[slot], k)

        return made | _ports.kept_states(facts, part.slots, state, initial)

    return _ports.forward(facts, run)


def backward(facts: LinearFacts, platform: str = "cpu", chunk: int | None = None) -> _ports.Function:
    """The function of a backward graph, as `forward`. The gradients are written out: no autodiff is involved."""
    return in_turn(lambda part: _backward(part, platform, chunk), facts, platform)


def _backward(facts: LinearFacts, platform: str, chunk: int | None) -> _ports.Function:
    def run(given: _ports.Arrays, initial: Array, d_final: Array) -> _ports.Arrays:
        part = _Chunks.of(facts, given, platform, chunk)
        start, u = _forward_scan(part, initial)
        d_o = part.slots.cut(given["dO"]).astype(jnp.float32)
        end, w, d_initial = _backward_scan(part, d_o, d_final)
        return _gradients(part, start, u, d_o, end, w) | {"d_initial_state": d_initial}

    return _ports.backward(facts, run)


@dataclass(frozen=True)
class _Chunks:
    """Operands by slot, head of HO and row, as the options make them, and what a chunk makes of them alone.

    Attributes:
      q, k, v: (slots, HO, C, K or V).
      beta: (slots, HO, C).
      decay: D, (slots, HO, C, C), 0 above the diagonal.
      from_start, to_end: E and L, (slots, HO, C).
      whole: exp(G_last), (slots, HO).
      a, t, p: A, T and P.
      back: port -> what takes the gradient by slots, heads of HO and rows to the ports' gradients.
    """

    facts: LinearFacts
    slots: Slots
    q: Array
    k: Array
    v: Array
    beta: Array
    decay: Array
    from_start: Array
    to_end: Array
    whole: Array
    a: Array
    t: Array
    p: Array
    back: dict[str, Callable[[Array], dict[str, Array]]]

    @classmethod
    def of(cls, facts: LinearFacts, given: dict[str, Array], platform: str, chunk: int | None) -> _Chunks:
        slots = slots_of(facts, given["cu_seqlens"], platform, chunk)
        cut = {port: slots.cut(given[port]).astype(jnp.float32) for port in ("q", "k", "v", "g", "beta")}
        back: dict[str, Callable[[Array], dict[str, Array]]] = {}
        for port in ("q", "k", "v"):
            cut[port], back[port] = _shared(facts, slots, port, cut[port])
        beta, to_logits = _inputs.strength(facts, cut["beta"])
        back["beta"] = lambda d_beta: {"dBeta": slots.joined(to_logits(d_beta))}
        g, back["g"] = _gate(facts, slots, cut["g"], given)

        decay, from_start, to_end = _decays(g)
        a = jnp.tril(decay * product("nhck,nhdk->nhcd", cut["k"], cut["k"]), -1)
        p = facts.scale * decay * product("nhck,nhdk->nhcd", cut["q"], cut["k"])
        return cls(
            facts=facts,
            slots=slots,
            q=cut["q"],
            k=cut["k"],
            v=cut["v"],
            beta=beta,
            decay=decay,
            from_start=from_start,
            to_end=to_end,
            whole=from_start[..., -1],
            a=a,
            t=inverse(beta[..., None] * a),
            p=p,
            back=back,
        )


def _forward_scan(part: _Chunks, initial: Array) -> tuple[Array, Array]:
    """The state in front of each slot (slots, HO, V, K), and U."""
    slots = part.slots
    rows = part.beta[..., None] * jnp.concatenate([part.from_start[..., None] * part.k, part.v], axis=-1)
    w, u = jnp.split(product("nhcd,nhdx->nhcx", part.t, rows), [part.k.shape[-1]], axis=-1)
    arrays = {
        "w": w,
        "u": u,
        "k": part.to_end[..., None] * part.k,
        "whole": part.whole,
        "opens": slots.opens,
        "sequence": slots.sequence,
    }

    def step(state: Array, at: Rows) -> tuple[Array, Rows]:
        state = jnp.where(_ports.wide(at["opens"]), initial[at["sequence"]], state)
        own = at["u"] - product("lhck,lhvk->lhcv", at["w"], state)
        after = _ports.wide(at["whole"]) * state + product("lhcv,lhck->lhvk", own, at["k"])
        return after, {"start": state, "u": own}

    made = slots.scan(step, _blank_states(part), arrays)
    return made["start"], made["u"]


def _backward_scan(part: _Chunks, d_o: Array, d_final: Array) -> tuple[Array, Array, Array]:
    """The gradient Z of the state behind each slot, W, and the gradient of the initial states."""
    slots = part.slots
    rows = jnp.concatenate([part.to_end[..., None] * part.k, product("nhdc,nhdv->nhcv", part.p, d_o)], axis=-1)
    w_z, w_o = jnp.split(product("nhdc,nhdx->nhcx", part.t, rows), [part.k.shape[-1]], axis=-1)
    read = product("nhcv,nhck->nhvk", d_o, part.facts.scale * part.from_start[..., None] * part.q)
    arrays = {
        "w_z": w_z,
        "w_o": w_o,
        "read": read,
        "erased": (part.beta * part.from_start)[..., None] * part.k,
        "whole": part.whole,
        "closes": slots.closes,
        "sequence": slots.sequence,
    }

    def before(end: Array, w: Array, at: Rows) -> Array:
        """The gradient of the state in front of a slot."""
        return _ports.wide(at["whole"]) * end + at["read"] - product("lhcv,lhck->lhvk", w, at["erased"])

    def step(end: Array, at: Rows) -> tuple[Array, Rows]:
        end = jnp.where(_ports.wide(at["closes"]), d_final[at["sequence"]], end)
        w = at["w_o"] + product("lhck,lhvk->lhcv", at["w_z"], end)
        return before(end, w, at), {"end": end, "w": w}

    made = slots.scan(step, _blank_states(part), arrays, reverse=True)
    first = jnp.clip(slots.first[:-1], 0, slots.sequence.shape[0] - 1)
    opened = before(made["end"][first], made["w"][first], {name: x[first] for name, x in arrays.items()})
    return made["end"], made["w"], jnp.where(_ports.wide(slots.lengths > 0), opened, d_final)


def _blank_states(part: _Chunks) -> Array:
    """The carry of each lane, (lanes, HO, V, K)."""
    facts = part.facts
    return jnp.zeros((part.slots.lanes.shape[0] - 1, facts.heads, facts.value_dim, facts.key_dim), jnp.float32)


def _gradients(part: _Chunks, start: Array, u: Array, d_o: Array, end: Array, w: Array) -> dict[str, Array]:
    scale, q, k = part.facts.scale, part.q, part.k
    from_start, to_end = part.from_start[..., None], part.to_end[..., None]
    d_v = part.beta[..., None] * w
    p_inner = product("nhcv,nhdv->nhcd", d_o, u)
    a_inner = -jnp.tril(product("nhcv,nhdv->nhcd", d_v, u), -1)
    d_p, d_a = scale * part.decay * p_inner, part.decay * a_inner

    q_read = scale * from_start * product("nhcv,nhvk->nhck", d_o, start)
    k_read = -from_start * product("nhcv,nhvk->nhck", d_v, start)
    k_write = to_end * product("nhcv,nhvk->nhck", u, end)
    d_q = q_read + product("nhcd,nhdk->nhck", d_p, k)
    d_k = k_read + k_write + product("nhdc,nhdk->nhck", d_p, q)
    d_k += product("nhcd,nhdk->nhck", d_a + d_a.mT, k)

    held = part.v - from_start * product("nhck,nhvk->nhcv", k, start) - product("nhcd,nhdv->nhcv", part.a, u)
    d_beta = jnp.sum(w * held, axis=-1)
    d_g = (
        product("nhi,ti->nht", jnp.sum(q * q_read + k * k_read, axis=-1), _upper(w.shape[2]))
        + product("nhj,tj->nht", jnp.sum(k * k_write, axis=-1), 1 - _upper(w.shape[2]))
        + (part.whole * jnp.sum(start * end, axis=(-2, -1)))[..., None]
        + _sum_across(p_inner * part.p + a_inner * part.a)
    )
    named: dict[str, Array] = {}
    for port, gradient in {"q": d_q, "k": d_k, "v": d_v, "beta": d_beta, "g": d_g}.items():
        named |= part.back[port](gradient)
    return named


def _upper(chunk: int) -> Array:
    """(C, C) ones on and above the diagonal: as a product, the sum over a row and those behind it.

    A product rather than `cumsum`, which compiles to as many operations as there are bits in C.
    """
    return jnp.triu(jnp.ones((chunk, chunk), jnp.float32))


def _sum_across(x: Array) -> Array:
    """Of (..., C, C), for each t the sum over rows i >= t and columns j < t: the pairs that token t stands between."""
    return jnp.sum(jnp.tril(product("nhij,jt->nhit", x, jnp.triu(jnp.ones(x.shape[-2:], jnp.float32), 1))), axis=-2)


def _decays(g: Array) -> tuple[Array, Array, Array]:
    """D, E and L of gates (slots, HO, C).

    A gate is a multiple of 1/1024, whose sums are exact, and a rest, whose sums are small: a segment's sum is as good
    as if it were added up by itself, whatever stands in front of it.
    """
    g = jnp.maximum(g, _inputs.NEVER)
    coarse = jnp.round(g * _GRAIN) / _GRAIN
    sums = product("pnhc,ci->pnhi", jnp.stack([coarse, g - coarse]), _upper(g.shape[-1]))
    pairs = jnp.sum(sums[..., :, None] - sums[..., None, :], axis=0)
    lower = jnp.tril(jnp.ones(pairs.shape[-2:], bool))
    decay = jnp.exp(jnp.where(lower, pairs, -jnp.inf))
    return decay, jnp.exp(jnp.sum(sums, axis=0)), decay[..., -1, :]


def _gate(
    facts: LinearFacts, slots: Slots, g: Array, given: dict[str, Array]
) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
    """The gates' logarithms by slot, 0 in rows of no token."""
    there = (slots.rows < facts.total)[:, None, :]
    a_log, dt_bias = (
        given[port].astype(jnp.float32)[:, None] if port in given else None for port in ("a_log", "dt_bias")
    )
    log, to_raw = _inputs.log_gate(facts, g, a_log, dt_bias)

    def back(d_g: Array) -> dict[str, Array]:
        made = to_raw(jnp.where(there, d_g, 0))
        heads = {f"d_{port}": jnp.sum(made[port], axis=(0, 2)) for port in ("a_log", "dt_bias") if port in made}
        return {"dG": slots.joined(made["g"]), **heads}

    return jnp.where(there, log, 0), back


def _shared(facts: LinearFacts, slots: Slots, port: str, x: Array) -> tuple[Array, Callable[[Array], dict[str, Array]]]:
    """q, k or v by slot for each head of HO, and their gradient summed over the heads that share them."""
    heads = x.shape[1]
    normal = facts.use_qk_l2norm and port != "v"
    made, to_given = _inputs.normalised(x) if normal else (x, lambda d_x: d_x)

    def back(d_x: Array) -> dict[str, Array]:
        n, _, *rest = d_x.shape
        d_heads = d_x.reshape(n, heads, facts.heads // heads, *rest).sum(axis=2)
        return {f"d{port.upper()}": slots.joined(to_given(d_heads))}

    return jnp.repeat(made, facts.heads // heads, axis=1), back
