"""Gated delta rules token by token in float64, forward and backward: numpy alone, heads beside each other.

One rule stands for all of them, S <- S diag(exp(g)); S <- S + (w v - S (beta k)) k^T; O = scale S q, whose g, beta and w
have one channel where an operation has none, and whose w is beta where it has no w.
"""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Arrays = dict[str, Array]

_SEGMENT = 64
"""Tokens between the states that the backward keeps; those between are made again."""


@dataclass(frozen=True)
class Options:
    """The operation's options; `scale` None is K**-0.5, `gate_lower_bound` the operation's own."""

    scale: float | None = None
    use_qk_l2norm: bool = False
    use_beta_sigmoid: bool = False
    allow_neg_eigval: bool = False
    safe_gate: bool = False
    gate_domain: str = "log"
    gate_lower_bound: float | None = None
    checkpoint_every_n_tokens: int = 0

    def attributes(self) -> dict[str, Any]:
        """As a graph's builder takes them."""
        return {name: value for name, value in asdict(self).items() if value is not None}


PLAIN = Options()


def forward(given: Arrays, options: Options = PLAIN) -> Arrays:
    """O, final_state and state_checkpoints of packed operands under their ports' names.

    q (T, H, K), k (T, HK, K), v (T, HV, V), the gates of `GATES`, cu_seqlens (n + 1); initial_state (n, HO, V, K),
    a_log (HO) and dt_bias (g's shape without T) may be absent.
    """
    rule = _Rule.of(given, options)
    total, heads, value_dim = rule.v.shape
    out = np.zeros((total, heads, value_dim))
    final, kept = rule.initial.copy(), []
    for s, (begin, end) in enumerate(rule.spans):
        state = final[s]
        for t in range(begin, end):
            state = rule.write(t, state)
            out[t] = rule.scale * _times(state, rule.q[t])
            passed = t + 1 - begin
            every = options.checkpoint_every_n_tokens
            if every and passed % every == 0 and t + 1 < end:
                kept.append(state)
        final[s] = state
    checkpoints = np.stack(kept) if kept else np.zeros((0, *final.shape[1:]))
    return {"O": out, "final_state": final, "state_checkpoints": checkpoints}


def backward(given: Arrays, d_o: Array, d_final: Array | None = None, options: Options = PLAIN) -> Arrays:
    """The gradients of <O, d_o> + <final_state, d_final> by every operand, under the operands' names."""
    rule = _Rule.of(given, options)
    grads = {name: np.zeros_like(getattr(rule, name)) for name in ("q", "k", "v", "g", "beta", "w")}
    d_initial = np.zeros_like(rule.initial) if d_final is None else _wide(d_final)
    for s, (begin, end) in enumerate(rule.spans):
        segments = [(start, min(start + _SEGMENT, end)) for start in range(begin, end, _SEGMENT)]
        entering, state = [], rule.initial[s]
        for segment in segments:
            entering.append(state)
            state = rule.run(*segment, state)[-1]
        d_state = d_initial[s]
        for (start, stop), state in zip(reversed(segments), reversed(entering), strict=True):
            states = rule.run(start, stop, state)
            for t in reversed(range(start, stop)):
                d_state = rule.back(t, states[t - start], d_o[t], d_state, grads)
        d_initial[s] = d_state
    named = rule.to_operands(grads)
    return named | ({"initial_state": d_initial} if "initial_state" in given else {})


def _wide(x: Array) -> Array:
    return np.array(x, dtype=np.float64)


def _times(state: Array, row: Array) -> Array:
    return (state @ row[..., None])[..., 0]


@dataclass
class _Rule:
    """The operands as the options make them: q, k, v of each head of HO, g the decay's logarithm, gates with channels."""

    given: Arrays
    options: Options
    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    w: Array
    initial: Array
    spans: list[tuple[int, int]]
    scale: float

    @classmethod
    def of(cls, given: Arrays, options: Options) -> _Rule:
        wide = {name: _wide(x) for name, x in given.items() if name != "cu_seqlens"}
        cu = [int(x) for x in given["cu_seqlens"]]
        heads = wide["g"].shape[1]
        shape = (len(cu) - 1, heads, wide["v"].shape[2], wide["q"].shape[2])
        qkv = {}
        for name in ("q", "k", "v"):
            x = wide[name]
            if options.use_qk_l2norm and name != "v":
                x = x / _norm(x)
            qkv[name] = np.repeat(x, heads // x.shape[1], axis=1)
        beta = _channels(wide["beta"])
        if options.use_beta_sigmoid:
            beta = _sigmoid(beta) * (2 if options.allow_neg_eigval else 1)
        g = wide["g"]
        if options.safe_gate and g.ndim == 3:
            g = _bound(options) * _sigmoid(_rate(wide) * (g + wide.get("dt_bias", 0.0)))
        elif options.safe_gate:
            g = -_rate(wide) * np.logaddexp(0, g + wide.get("dt_bias", 0.0))
        elif options.gate_domain == "linear":
            g = np.log(np.maximum(g, 1e-10))
        return cls(
            given=wide,
            options=options,
            **qkv,
            g=_channels(g),
            beta=beta,
            w=wide.get("w", beta),
            initial=wide.get("initial_state", np.zeros(shape)),
            spans=list(itertools.pairwise(cu)),
            scale=shape[-1] ** -0.5 if options.scale is None else options.scale,
        )

    def write(self, t: int, state: Array) -> Array:
        """The state behind token t."""
        state = np.exp(self.g[t])[:, None, :] * state
        written = self.w[t] * self.v[t] - _times(state, self.beta[t] * self.k[t])
        return state + written[:, :, None] * self.k[t][:, None, :]

    def run(self, begin: int, end: int, state: Array) -> list[Array]:
        """The states in front of each token and behind the last."""
        states = [state]
        for t in range(begin, end):
            states.append(self.write(t, states[-1]))
        return states

    def back(self, t: int, state: Array, d_o: Array, d_after: Array, grads: Arrays) -> Array:
        """The gradient of the state in front of token t, of the one behind it; fills the token's rows of `grads`."""
        q, k, v, beta, w = (getattr(self, name)[t] for name in ("q", "k", "v", "beta", "w"))
        alpha = np.exp(self.g[t])[:, None, :]
        decayed = alpha * state
        written = w * v - _times(decayed, beta * k)
        after = decayed + written[:, :, None] * k[:, None, :]
        d_o = _wide(d_o)
        grads["q"][t] = self.scale * _times(after.swapaxes(1, 2), d_o)
        d_after = d_after + self.scale * d_o[:, :, None] * q[:, None, :]
        d_written = _times(d_after, k)
        d_erased = -_times(decayed.swapaxes(1, 2), d_written)
        grads["w"][t] = _summed(d_written * v, w)
        grads["v"][t] = d_written * w
        grads["beta"][t] = _summed(d_erased * k, beta)
        grads["k"][t] = _times(d_after.swapaxes(1, 2), written) + beta * d_erased
        d_decayed = d_after - d_written[:, :, None] * (beta * k)[:, None, :]
        grads["g"][t] = _summed(np.sum(d_decayed * decayed, axis=1), self.g[t])
        return alpha * d_decayed

    def to_operands(self, grads: Arrays) -> Arrays:
        """From the gradients of what the options make to those of the operands."""
        given, options = self.given, self.options
        named: dict[str, Any] = {}
        for name in ("q", "k", "v"):
            total, heads, width = given[name].shape
            d_x = grads[name].reshape(total, heads, grads["g"].shape[1] // heads, width).sum(axis=2)
            if options.use_qk_l2norm and name != "v":
                x, r = given[name], 1 / _norm(given[name])
                d_x = r * d_x - r**3 * x * np.sum(x * d_x, axis=-1, keepdims=True)
            named[name] = d_x
        d_beta, d_g = (grads[name].reshape(given[name].shape) for name in ("beta", "g"))
        if "w" in given:
            named["w"] = grads["w"]
        else:
            d_beta = d_beta + grads["w"].reshape(d_beta.shape)
        if options.use_beta_sigmoid:
            half = _sigmoid(given["beta"])
            d_beta = d_beta * half * (1 - half) * (2 if options.allow_neg_eigval else 1)
        if options.safe_gate:
            raw, rate = given["g"] + given.get("dt_bias", 0.0), _rate(given)
            if d_g.ndim == 3:
                half = _sigmoid(rate * raw)
                d_raw = _bound(options) * half * (1 - half) * rate * d_g
                named["a_log"] = np.sum(d_raw * raw, axis=(0, 2))
            else:
                d_raw = -rate * _sigmoid(raw) * d_g
                named["a_log"] = np.sum(d_g * self.g[..., 0], axis=0)
            named["dt_bias"] = np.sum(d_raw, axis=0)
            d_g = d_raw
        elif options.gate_domain == "linear":
            d_g = np.where(given["g"] > 1e-10, d_g / np.maximum(given["g"], 1e-10), 0)
        named |= {"g": d_g, "beta": d_beta}
        return {name: x for name, x in named.items() if name in given}


def _channels(x: Array) -> Array:
    """(T, HO) as (T, HO, 1)."""
    return x if x.ndim == 3 else x[..., None]


def _summed(d_x: Array, x: Array) -> Array:
    """The gradient of x, which was broadcast over its last axis or was not."""
    return d_x if x.shape == d_x.shape else np.sum(d_x, axis=-1, keepdims=True)


def _rate(given: Arrays) -> Any:
    """exp(a_log) against g."""
    rate = np.exp(given.get("a_log", 0.0))
    return rate[:, None] if np.ndim(rate) and given["g"].ndim == 3 else rate


def _bound(options: Options) -> float:
    return -5.0 if options.gate_lower_bound is None else options.gate_lower_bound


def _norm(x: Array) -> Array:
    return np.sqrt(np.sum(x * x, axis=-1, keepdims=True) + 1e-6)


def _sigmoid(x: Array) -> Array:
    return 0.5 * (1 + np.tanh(0.5 * x))


def error(got: Array, want: Array, usual: float = 0.0, least: float = 0.0) -> float:
    """||got - want|| against want's norm, or `least`, or a hundredth of the norm that inputs of that scale give."""
    got, want = _wide(got), _wide(want)
    if want.size == 0 or not np.any(got != want):
        return 0.0
    return float(np.linalg.norm(got - want) / max(np.linalg.norm(want), least, 1e-2 * usual * np.sqrt(want.size)))


@dataclass(frozen=True)
class Sizes:
    """Packed sequences, `tail` rows behind them, heads of q, k and v, and widths."""

    lengths: tuple[int, ...]
    heads: tuple[int, int, int] = (2, 2, 2)
    key_dim: int = 12
    value_dim: int = 8
    tail: int = 0

    @property
    def total(self) -> int:
        return sum(self.lengths) + self.tail

    @property
    def gates(self) -> int:
        return max(self.heads[0], self.heads[2])

    @property
    def states(self) -> tuple[int, int, int, int]:
        return (len(self.lengths), self.gates, self.value_dim, self.key_dim)


GATES = {
    "gdn": {"g": "", "beta": ""},
    "kda": {"g": "K", "beta": ""},
    "gdn2": {"g": "K", "beta": "K", "w": "V"},
}
"""Operation -> gate -> its channels behind (T, HO): one for each column or row of a state, or none."""
KINDS = ("mild", "steep", "strong", "reset", "correlated", "reflecting", "unwritten", "zero_keys")
"""Inputs that go wrong in different ways: decays down to e^-5 everywhere, of safe gates down to their bound; decays of e^-50; resets of e^-10000 in front
of mild decays, of single channels and of all; keys that are nearly parallel, slowly forgotten; the same written twice
over (beta near 2); beta 0 and tiny; keys that are 0."""


def draw(
    rng: np.random.Generator,
    sizes: Sizes,
    options: Options = PLAIN,
    kind: str = "mild",
    without: tuple[str, ...] = (),
    operation: str = "gdn",
) -> Arrays:
    """Fresh float32 operands of `forward`, for the options, without the optional ones named."""
    total, (heads_q, heads_k, heads_v), gates = sizes.total, sizes.heads, sizes.gates
    channels = {"": (), "K": (sizes.key_dim,), "V": (sizes.value_dim,)}
    shapes = {name: (total, gates, *channels[axis]) for name, axis in GATES[operation].items()}

    def normal(*shape: int) -> Array:
        return rng.standard_normal(shape).astype(np.float32)

    q, k = normal(total, heads_q, sizes.key_dim), normal(total, heads_k, sizes.key_dim)
    if kind in ("correlated", "reflecting"):
        k = normal(1, heads_k, sizes.key_dim) + 0.2 * k
    if not options.use_qk_l2norm:
        q, k = q / _norm(q), k / _norm(k)
    if kind == "zero_keys":
        k[rng.random((total, heads_k)) < 0.3] = 0
    log = -rng.uniform(0, {"correlated": 0.02, "reflecting": 0.02, "steep": 5}.get(kind, 0.4), shapes["g"])
    log[rng.random(log.shape) < {"strong": 0.7}.get(kind, 0)] = -50
    for axes in (2, log.ndim):
        log[rng.random(log.shape[:axes]) < {"reset": 0.03}.get(kind, 0)] = -1e4
    raw = 8 if kind == "steep" else 1
    beta = rng.uniform(0, 1, shapes["beta"])
    if kind == "reflecting":
        beta = 2 - 0.1 * beta
    if kind == "unwritten":
        beta[rng.random(beta.shape) < 0.5] *= 1e-12
        beta[rng.random(beta.shape) < 0.5] = 0
    given = {
        "q": q,
        "k": k,
        "v": normal(total, heads_v, sizes.value_dim),
        "g": raw * normal(*shapes["g"])
        if options.safe_gate
        else np.exp(log)
        if options.gate_domain == "linear"
        else log,
        "beta": normal(*shapes["beta"]) if options.use_beta_sigmoid else beta,
        "initial_state": normal(*sizes.states),
    }
    if "w" in shapes:
        given["w"] = rng.uniform(0, 1, shapes["w"])
    if options.safe_gate:
        given |= {"a_log": normal(gates) / 2, "dt_bias": normal(*shapes["g"][1:])}
    made = {name: x.astype(np.float32) for name, x in given.items() if name not in without}
    return made | {"cu_seqlens": np.cumsum([0, *sizes.lengths]).astype(np.int32)}
