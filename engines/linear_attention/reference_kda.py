"""The reference engine of Kimi Delta Attention and Gated DeltaNet 2: pure JAX over chunks, inlined into the caller's
program, float32 inside.

Both are one rule, S <- S diag(exp(g)); S <- S + (x - S e) k^T; O = s S q: e is beta k, and x is beta v, or w v where
there is a w. Of one chunk and head, with C tokens as rows, S (V, K) the state in front of it, G the sums of g up to and
with a token, by channel, E = exp(G) and L = exp(G_last - G):

    A_ij = <e_i exp(G_i - G_j), k_j> for i > j      T = (I + A)^-1      P_ij = s <q_i exp(G_i - G_j), k_j> for i >= j
    U = T (x - (E e) S^T)      O = s (E q) S^T + P U      S' = S diag(exp(G_last)) + U^T (L k)

Backward, Z the gradient of S': what a chunk makes of its operands alone takes

    W = T^T (P^T dO + (L k) Z^T)      dx = W      d(E e) = -W S      dA = -W U^T      dP = dO U^T
    d(s E q) = dO S      d(L k) = U Z      d(exp(G_last)) = columnsum(S Z)

and hands it on to them by its own derivative. Nothing divides by beta. The states and their gradients themselves are
scanned in one product a chunk, since they are linear:

    S' = S M + (T x)^T (L k)      dS = Z M^T + dO^T (s E q - P T E e)      M = diag(exp(G_last)) - (T E e)^T (L k)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.linear_attention import _inputs, _ports
from cudnn_jax.engines.linear_attention._heads import in_turn
from cudnn_jax.engines.linear_attention._products import inverse, product
from cudnn_jax.engines.linear_attention._slots import Rows, Slots, slots_of
from cudnn_jax.graph.linear_attention import PER_HEAD, PER_TOKEN

if TYPE_CHECKING:
    from cudnn_jax.engines.linear_attention.facts import LinearFacts

Array = jax.Array
Arrays = _ports.Arrays


def forward(facts: LinearFacts, platform: str = "cpu", chunk: int | None = None) -> _ports.Function:
    """The function of a forward graph, as `reference_gdn.forward`."""
    return in_turn(lambda part: _forward(part, platform, chunk), facts, platform)


def _forward(facts: LinearFacts, platform: str, chunk: int | None) -> _ports.Function:
    def run(given: Arrays, initial: Array) -> Arrays:
        slots = slots_of(facts, given["cu_seqlens"], platform, chunk)
        part, (g, k) = _chunks(facts, slots, _operands(slots, given))
        linear = _Linear.of(part)
        start = linear.states(slots, initial)
        u = linear.written(start)
        o = product("nhck,nhvk->nhcv", part["read"], start) + product("nhcd,nhdv->nhcv", part["p"], u)
        made = {"O": slots.joined(o)}

        def state(sequence: Array, tokens: Array) -> Array:
            """The state behind the first `tokens` of a sequence; of none, something."""
            slot, row = slots.place(sequence, tokens)
            inside = (jnp.arange(slots.chunk) <= row[:, None])[:, None, :, None]
            short = jnp.where(inside, g[slot], 0)
            behind = product("jt,rhtk->rhjk", jnp.triu(jnp.ones((slots.chunk,) * 2, jnp.float32), 1), short)
            written = jnp.where(inside, k[slot] * jnp.exp(behind), 0)
            kept = jnp.exp(jnp.sum(short, axis=2))[:, :, None] * start[slot]
            return kept + product("rhcv,rhck->rhvk", u[slot], written)

        return made | _ports.kept_states(facts, slots, state, initial)

    return _ports.forward(facts, run)


def backward(facts: LinearFacts, platform: str = "cpu", chunk: int | None = None) -> _ports.Function:
    """The function of a backward graph, as `forward`. It keeps a state for each chunk, and none for a token."""
    return in_turn(lambda part: _backward(part, platform, chunk), facts, platform)


def _backward(facts: LinearFacts, platform: str, chunk: int | None) -> _ports.Function:
    def run(given: Arrays, initial: Array, d_final: Array) -> Arrays:
        slots = slots_of(facts, given["cu_seqlens"], platform, chunk)
        part, back, _ = jax.vjp(partial(_chunks, facts, slots), _operands(slots, given), has_aux=True)
        d_o = slots.cut(given["dO"]).astype(jnp.float32)
        linear = _Linear.of(part)
        start = linear.states(slots, initial)
        end, d_initial = linear.state_gradients(slots, d_o, d_final)
        u = linear.written(start)
        d_u = product("nhdc,nhdv->nhcv", part["p"], d_o) + product("nhck,nhvk->nhcv", part["write"], end)
        w = product("nhdc,nhdv->nhcv", linear.t, d_u)
        (gradients,) = back(
            {
                "x": w,
                "erase": -product("nhcv,nhvk->nhck", w, start),
                "a": -product("nhcv,nhdv->nhcd", w, u),
                "p": product("nhcv,nhdv->nhcd", d_o, u),
                "read": product("nhcv,nhvk->nhck", d_o, start),
                "write": product("nhcv,nhvk->nhck", u, end),
                "whole": jnp.sum(start * end, axis=-2),
            }
        )
        made = {name: slots.joined(gradients[port]) for port, name in PER_TOKEN.items() if port in gradients}
        made |= {name: gradients[port] for port, name in PER_HEAD.items() if port in gradients}
        return made | {"d_initial_state": d_initial}

    return _ports.backward(facts, run)


def _operands(slots: Slots, given: Arrays) -> Arrays:
    """In float32; those with tokens by slot, heads and row."""
    cut = {port: slots.cut(given[port]).astype(jnp.float32) for port in PER_TOKEN if port in given}
    return cut | {port: given[port].astype(jnp.float32) for port in PER_HEAD if port in given}


def _chunks(facts: LinearFacts, slots: Slots, given: Arrays) -> tuple[Arrays, tuple[Array, Array]]:
    """What each chunk makes of its operands alone, and besides the gates and keys by slot, head of HO, row and channel.

    Returns:
      a, p: A and P, (slots, HO, C, C).
      x: (slots, HO, C, V).
      read, erase, write: s E q, E e and L k, (slots, HO, C, K).
      whole: exp(G_last), (slots, HO, K).
    """
    wide = dict(given)
    if facts.use_qk_l2norm:
        wide |= {port: _inputs.normalised(given[port])[0] for port in ("q", "k")}
    q, k, v = (jnp.repeat(wide[port], facts.heads // wide[port].shape[1], axis=1) for port in ("q", "k", "v"))
    beta = _inputs.strength(facts, given["beta"])[0]
    beta = beta if beta.ndim == 4 else beta[..., None]
    g = _log_gate(facts, slots, given)
    e, x = beta * k, given.get("w", beta) * v
    read = facts.scale * q
    p, a, from_start, to_end = _squares(g, read, e, k)
    made = {
        "a": a,
        "p": p,
        "x": x,
        "read": from_start * read,
        "erase": from_start * e,
        "write": to_end * k,
        "whole": from_start[:, :, -1],
    }
    return made, (g, k)


def _log_gate(facts: LinearFacts, slots: Slots, given: Arrays) -> Array:
    """The gates' logarithms, 0 in rows of no token."""
    a_log, dt_bias = given.get("a_log"), given.get("dt_bias")
    log, _ = _inputs.log_gate(
        facts,
        given["g"],
        None if a_log is None else a_log[:, None, None],
        None if dt_bias is None else dt_bias[:, None],
    )
    there = (slots.rows < facts.total)[:, None, :, None]
    return jnp.maximum(jnp.where(there, log, 0), _inputs.NEVER)


def _squares(g: Array, q: Array, e: Array, k: Array) -> tuple[Array, Array, Array, Array]:
    """P, A, and the factors of the gates up to and with each row and behind it.

    A chunk is halved again and again. A row i of a second half and a row j of its first have between them the gates up
    to i in the one and those behind j in the other: sums of nothing else, so that every factor is at most 1, and what a
    reset leaves is as good as if the reset were not there. Each pair of rows is apart in one of the halvings.
    """
    sums, pairs = _halvings(g.shape[2])
    factors = jnp.exp(product("lit,nhtk->lnhik", sums, g))
    halved, keys = factors[2:], factors[2:] * k

    def met(rows: Array) -> Array:
        return jnp.sum(jnp.where(pairs[:, None, None], product("lnhik,lnhjk->lnhij", halved * rows, keys), 0), axis=0)

    diagonal = jnp.eye(g.shape[2], dtype=jnp.float32) * jnp.sum(q * k, axis=-1, keepdims=True)
    return diagonal + met(q), met(e), factors[0], factors[1]


def _halvings(chunk: int) -> tuple[np.ndarray, np.ndarray]:
    """Which gates are summed for each row, and which pairs of rows meet: constants.

    Returns:
      sums: (2 + L, C, C) of a row and a gate: the gates up to and with the row, those behind it, and of each of the L
        halvings those up to and with a row of a second half inside it, or behind a row of a first half inside it.
      pairs: (L, C, C), the rows of second halves with those of their first halves.
    """
    row, other = np.arange(chunk)[:, None], np.arange(chunk)
    sums, pairs = [other <= row, other > row], []
    size = 1
    while size < chunk:
        second = row // size % 2 == 1
        sums.append((row // size == other // size) & np.where(second, other <= row, other > row))
        pairs.append(second & (row // size == other // size + 1))
        size *= 2
    return np.array(sums, np.float32), np.array(pairs, bool).reshape(-1, chunk, chunk)


@dataclass(frozen=True)
class _Linear:
    """What a chunk does to a state, which is linear: S' = S through + added, and O = reads S^T + what S is not in.

    Attributes:
      t: T, (slots, HO, C, C).
      w, u: T of E e and of x, (slots, HO, C, K or V): U = u - w S^T.
      reads: (slots, HO, C, K).
      through: (slots, HO, K, K).
      added: (slots, HO, V, K).
    """

    t: Array
    w: Array
    u: Array
    reads: Array
    through: Array
    added: Array

    @classmethod
    def of(cls, part: Arrays) -> _Linear:
        t = inverse(part["a"])
        w, u = (product("nhcd,nhdx->nhcx", t, part[name]) for name in ("erase", "x"))
        return cls(
            t=t,
            w=w,
            u=u,
            reads=part["read"] - product("nhcd,nhdk->nhck", part["p"], w),
            through=part["whole"][..., None] * jnp.eye(w.shape[-1], dtype=jnp.float32)
            - product("nhck,nhcj->nhkj", w, part["write"]),
            added=product("nhcv,nhck->nhvk", u, part["write"]),
        )

    def written(self, start: Array) -> Array:
        """U, (slots, HO, C, V)."""
        return self.u - product("nhck,nhvk->nhcv", self.w, start)

    def states(self, slots: Slots, initial: Array) -> Array:
        """The state in front of each slot, (slots, HO, V, K)."""

        def step(state: Array, at: Rows) -> tuple[Array, Rows]:
            state = jnp.where(_ports.wide(at["opens"]), initial[at["sequence"]], state)
            return product("lhvj,lhjk->lhvk", state, at["through"]) + at["added"], {"start": state}

        arrays = {"through": self.through, "added": self.added, "opens": slots.opens, "sequence": slots.sequence}
        return slots.scan(step, _blank_states(slots, initial), arrays)["start"]

    def state_gradients(self, slots: Slots, d_o: Array, d_final: Array) -> tuple[Array, Array]:
        """The gradient Z of the state behind each slot, (slots, HO, V, K), and that of the initial states."""
        read = product("nhcv,nhck->nhvk", d_o, self.reads)

        def before(end: Array, through: Array, read: Array) -> Array:
            """The gradient of the state in front of a slot."""
            return product("lhvj,lhkj->lhvk", end, through) + read

        def step(end: Array, at: Rows) -> tuple[Array, Rows]:
            end = jnp.where(_ports.wide(at["closes"]), d_final[at["sequence"]], end)
            return before(end, at["through"], at["read"]), {"end": end}

        arrays = {"through": self.through, "read": read, "closes": slots.closes, "sequence": slots.sequence}
        end = slots.scan(step, _blank_states(slots, d_final), arrays, reverse=True)["end"]
        first = jnp.clip(slots.first[:-1], 0, slots.sequence.shape[0] - 1)
        opened = before(end[first], self.through[first], read[first])
        return end, jnp.where(_ports.wide(slots.lengths > 0), opened, d_final)


def _blank_states(slots: Slots, like: Array) -> Array:
    """The carry of each lane, (lanes, HO, V, K)."""
    return jnp.zeros((slots.lanes.shape[0] - 1, *like.shape[1:]), jnp.float32)
