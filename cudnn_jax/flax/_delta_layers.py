"""What the layers of linear attention share, in NNX and in Linen: everything but where parameters and caches live.

q, k and v are projected and pass a short causal convolution and a SiLU; the decay and the writing rate come from the
input; the output is normalised by head, gated, and projected back. A `Kind` says what a layer has of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax
from cudnn_jax.graph.linear_attention import GATE_LOWER_BOUND


@dataclass(frozen=True)
class Kind:
    """A layer.

    Attributes:
      name: of its class.
      operation: of `cudnn_jax`; `operation`_step decodes.
      channels: whether each channel of a head's keys has a decay.
      narrow: whether decay and gate come from the input through as many numbers as a head's keys have.
      value_dim: the default, in head_dims.
      gate: what the output is multiplied with, of the gate's projection.
      init_a_log, init_dt_bias: of the decay.
    """

    name: str
    operation: str
    channels: bool
    narrow: bool
    value_dim: int
    gate: Callable[[jax.Array], jax.Array]
    init_a_log: Callable[..., jax.Array]
    init_dt_bias: Callable[..., jax.Array]


@dataclass(frozen=True)
class Sizes:
    """B sequences of T tokens of `features` numbers; H heads of q and k with K numbers, HV of v with V."""

    kind: Kind
    features: int
    heads: int
    value_heads: int
    head_dim: int
    value_dim: int
    conv_size: int

    @classmethod
    def of(
        cls,
        kind: Kind,
        features: int,
        num_heads: int,
        head_dim: int,
        num_value_heads: int | None,
        value_head_dim: int | None,
        conv_size: int,
    ) -> Sizes:
        value_heads = num_heads if num_value_heads is None else num_value_heads
        value_dim = kind.value_dim * head_dim if value_head_dim is None else value_head_dim
        for name, size in (
            ("features", features),
            ("num_heads", num_heads),
            ("head_dim", head_dim),
            ("num_value_heads", value_heads),
            ("value_head_dim", value_dim),
            ("conv_size", conv_size),
        ):
            if size < 1:
                raise ValueError(f"{kind.name}: {name} is {size}; the rule: at least 1")
        if value_heads % num_heads:
            raise ValueError(
                f"{kind.name}: num_value_heads is {value_heads} and num_heads {num_heads}; the rule: a multiple"
            )
        return cls(kind, features, num_heads, value_heads, head_dim, value_dim, conv_size)

    @property
    def mixed(self) -> dict[str, tuple[int, int]]:
        """Projections that the convolution follows -> (heads, numbers of each)."""
        return {
            "query": (self.heads, self.head_dim),
            "key": (self.heads, self.head_dim),
            "value": (self.value_heads, self.value_dim),
        }

    @property
    def decays(self) -> tuple[int, ...]:
        """The shape of a token's decays."""
        return (self.value_heads, self.head_dim) if self.kind.channels else (self.value_heads,)

    @property
    def projections(self) -> dict[str, tuple[int, int]]:
        """Projection -> (numbers that go in, that come out). One that has a narrow one projects what that one makes."""
        made = {name: (self.features, heads * dim) for name, (heads, dim) in self.mixed.items()}
        into = self.features
        if self.kind.narrow:
            into = self.head_dim
            made |= {f"{name}_narrow": (self.features, into) for name in ("decay", "gate")}
        return made | {
            "decay": (into, math.prod(self.decays)),
            "rate": (self.features, self.value_heads),
            "gate": (into, self.value_heads * self.value_dim),
        }

    def cache(self, batch: int, dtype: Any) -> dict[str, jax.Array]:
        """An empty cache: the inputs that the convolutions still see, and the states (B, HV, V, K) in float32."""
        tails = {
            f"{name}_tail": jnp.zeros((batch, self.conv_size - 1, heads * dim), dtype)
            for name, (heads, dim) in self.mixed.items()
        }
        return {**tails, "state": jnp.zeros((batch, self.value_heads, self.value_dim, self.head_dim), jnp.float32)}


def project(sizes: Sizes, x: jax.Array, through: Callable[[str, jax.Array], jax.Array]) -> dict[str, jax.Array]:
    """Every projection of x, `through` running one by name."""
    made: dict[str, jax.Array] = {}
    for name in sizes.projections:
        made[name] = through(name, made.get(f"{name}_narrow", x))
    return made


def init_a_log(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """log of rates drawn from (1, 16), as in the paper."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)


def init_dt_bias(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """softplus^-1 of steps whose logarithm is drawn from (log 0.001, log 0.1), as in the paper."""
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return jnp.log(jnp.expm1(step)).astype(dtype)


def init_zeros(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


def init_bounded(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Of bounded gates whose a_log is 0: decays e^-x whose log x is drawn from (log 0.001, 0)."""
    share = jnp.exp(jax.random.uniform(key, shape, jnp.float32, jnp.log(1e-3), 0.0)) / -GATE_LOWER_BOUND
    return (jnp.log(share) - jnp.log1p(-share)).astype(dtype)


def init_conv(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """Uniform within 1 / sqrt(size of the window), (window, channels)."""
    bound = shape[0] ** -0.5
    return jax.random.uniform(key, shape, dtype, -bound, bound)


def short_convolution(x: jax.Array, weight: jax.Array, tail: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """SiLU of the causal depthwise convolution of x (B, T, C) with weight (window, C), and the next call's tail.

    `tail` (B, window - 1, C) holds the inputs before x, 0 where it is None.
    """
    before = weight.shape[0] - 1
    if tail is None:
        tail = jnp.zeros((x.shape[0], before, x.shape[2]), x.dtype)
    seen = jnp.concatenate([tail.astype(x.dtype), x], axis=1)
    taps = [weight[at].astype(x.dtype) * seen[:, at : at + x.shape[1]] for at in range(weight.shape[0])]
    return jax.nn.silu(sum(taps[1:], start=taps[0])), seen[:, seen.shape[1] - before :]


GATED_DELTA_NET = Kind(
    name="GatedDeltaNet",
    operation="gdn",
    channels=False,
    narrow=False,
    value_dim=2,
    gate=jax.nn.silu,
    init_a_log=init_a_log,
    init_dt_bias=init_dt_bias,
)
KIMI_DELTA_ATTENTION = Kind(
    name="KimiDeltaAttention",
    operation="kda",
    channels=True,
    narrow=True,
    value_dim=1,
    gate=jax.nn.sigmoid,
    init_a_log=init_zeros,
    init_dt_bias=init_bounded,
)


def gated_norm(kind: Kind, out: jax.Array, gate: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm of each head of `out` (B, T, HV, V) with scale (V,), times what the gate makes; float32 inside."""
    wide = out.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * kind.gate(gate.reshape(out.shape).astype(jnp.float32))).astype(out.dtype)


def mix(
    sizes: Sizes,
    projected: dict[str, jax.Array],
    convolutions: dict[str, jax.Array],
    a_log: jax.Array,
    dt_bias: jax.Array,
    cache: dict[str, jax.Array] | None,
    *,
    allow_neg_eigval: bool,
    implementation: str | None,
) -> tuple[jax.Array, dict[str, jax.Array] | None]:
    """(B, T, HV, V) from the projections (B, T, numbers), and the cache behind the last token if one came."""
    batch, length = projected["query"].shape[:2]
    arrays, after = {}, {}
    for name, (heads, dim) in sizes.mixed.items():
        tail = f"{name}_tail"
        mixed, after[tail] = short_convolution(
            projected[name], convolutions[name], None if cache is None else cache[tail]
        )
        arrays[name] = mixed.reshape(batch, length, heads, dim)
    decay = projected["decay"].reshape(batch, length, *sizes.decays)
    operands = (*arrays.values(), decay.astype(jnp.float32), projected["rate"].astype(jnp.float32))
    options = {
        "use_qk_l2norm": True,
        "use_beta_sigmoid": True,
        "allow_neg_eigval": allow_neg_eigval,
        "safe_gate": True,
        "a_log": a_log.astype(jnp.float32),
        "dt_bias": dt_bias.astype(jnp.float32),
        "implementation": implementation,
    }
    run, step = (getattr(cudnn_jax, f"{sizes.kind.operation}{suffix}") for suffix in ("", "_step"))
    if cache is None:
        return run(*operands, **options)[0], None
    if length == 1:
        out, state = step(*(each[:, 0] for each in operands), cache["state"], **options)
        out = out[:, None]
    else:
        out, state = run(*operands, initial_state=cache["state"], output_final_state=True, **options)
    return out, {name: x.astype(cache[name].dtype) for name, x in {**after, "state": state}.items()}
