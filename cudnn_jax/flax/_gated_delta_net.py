"""What the Gated DeltaNet layers of NNX and Linen share: everything but where parameters and caches live.

The layer is that of "Gated Delta Networks: Improving Mamba2 with Delta Rule" (Yang, Kautz, Hatamizadeh, 2024): q, k and
v are projected and pass a short causal convolution and a SiLU; the decay and the writing rate come from the input; the
output is normalised by head, gated, and projected back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import cudnn_jax


@dataclass(frozen=True)
class Sizes:
    """B sequences of T tokens of `features` numbers; H heads of q and k with K numbers, HV of v with V."""

    features: int
    heads: int
    value_heads: int
    head_dim: int
    value_dim: int
    conv_size: int

    @classmethod
    def of(
        cls,
        features: int,
        num_heads: int,
        head_dim: int,
        num_value_heads: int | None,
        value_head_dim: int | None,
        conv_size: int,
    ) -> Sizes:
        value_heads = num_heads if num_value_heads is None else num_value_heads
        value_dim = 2 * head_dim if value_head_dim is None else value_head_dim
        for name, size in (
            ("features", features),
            ("num_heads", num_heads),
            ("head_dim", head_dim),
            ("num_value_heads", value_heads),
            ("value_head_dim", value_dim),
            ("conv_size", conv_size),
        ):
            if size < 1:
                raise ValueError(f"GatedDeltaNet: {name} is {size}; the rule: at least 1")
        if value_heads % num_heads:
            raise ValueError(
                f"GatedDeltaNet: num_value_heads is {value_heads} and num_heads {num_heads}; the rule: a multiple"
            )
        return cls(features, num_heads, value_heads, head_dim, value_dim, conv_size)

    @property
    def mixed(self) -> dict[str, tuple[int, int]]:
        """Projections that the convolution follows -> (heads, numbers of each)."""
        return {
            "query": (self.heads, self.head_dim),
            "key": (self.heads, self.head_dim),
            "value": (self.value_heads, self.value_dim),
        }

    @property
    def projections(self) -> dict[str, int]:
        """Projections of the input -> numbers that come out."""
        mixed = {name: heads * dim for name, (heads, dim) in self.mixed.items()}
        return mixed | {
            "decay": self.value_heads,
            "rate": self.value_heads,
            "gate": self.value_heads * self.value_dim,
        }

    def cache(self, batch: int, dtype: Any) -> dict[str, jax.Array]:
        """An empty cache: the inputs that the convolutions still see, and the states (B, HV, V, K) in float32."""
        tails = {
            f"{name}_tail": jnp.zeros((batch, self.conv_size - 1, heads * dim), dtype)
            for name, (heads, dim) in self.mixed.items()
        }
        return {**tails, "state": jnp.zeros((batch, self.value_heads, self.value_dim, self.head_dim), jnp.float32)}


def init_a_log(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """log of rates drawn from (1, 16), as in the paper."""
    return jnp.log(jax.random.uniform(key, shape, jnp.float32, 1.0, 16.0)).astype(dtype)


def init_dt_bias(key: Any, shape: tuple[int, ...], dtype: Any = jnp.float32) -> jax.Array:
    """softplus^-1 of steps whose logarithm is drawn from (log 0.001, log 0.1), as in the paper."""
    low, high = jnp.log(1e-3), jnp.log(1e-1)
    step = jnp.exp(jax.random.uniform(key, shape, jnp.float32, low, high))
    return jnp.log(jnp.expm1(step)).astype(dtype)


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


def gated_norm(out: jax.Array, gate: jax.Array, scale: jax.Array, epsilon: float) -> jax.Array:
    """RMS norm of each head of `out` (B, T, HV, V) with scale (V,), times SiLU of the gate; float32 inside."""
    wide = out.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + epsilon)
    return (wide * scale * jax.nn.silu(gate.astype(jnp.float32))).astype(out.dtype)


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
    operands = (*arrays.values(), projected["decay"].astype(jnp.float32), projected["rate"].astype(jnp.float32))
    options = {
        "use_qk_l2norm": True,
        "use_beta_sigmoid": True,
        "allow_neg_eigval": allow_neg_eigval,
        "safe_gate": True,
        "a_log": a_log.astype(jnp.float32),
        "dt_bias": dt_bias.astype(jnp.float32),
        "implementation": implementation,
    }
    if cache is None:
        return cudnn_jax.gdn(*operands, **options)[0], None
    if length == 1:
        out, state = cudnn_jax.gdn_step(*(each[:, 0] for each in operands), cache["state"], **options)
        out = out[:, None]
    else:
        out, state = cudnn_jax.gdn(*operands, initial_state=cache["state"], output_final_state=True, **options)
    return out, {name: x.astype(cache[name].dtype) for name, x in {**after, "state": state}.items()}
