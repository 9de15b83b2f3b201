"""Layers for Flax NNX."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from cudnn_jax.flax import _delta_layers as shared

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]

_KERNEL_INIT = nnx.initializers.lecun_normal()


class _DeltaLayer(nnx.Module):
    kind: ClassVar[shared.Kind]

    def __init__(
        self,
        features: int,
        *,
        num_heads: int,
        head_dim: int,
        num_value_heads: int | None = None,
        value_head_dim: int | None = None,
        conv_size: int = 4,
        allow_neg_eigval: bool = False,
        norm_epsilon: float = 1e-6,
        dtype: Any = None,
        param_dtype: Any = jnp.float32,
        kernel_init: Any = _KERNEL_INIT,
        decode: bool = False,
        implementation: str | None = None,
        rngs: nnx.Rngs,
    ) -> None:
        self.sizes = shared.Sizes.of(
            self.kind, features, num_heads, head_dim, num_value_heads, value_head_dim, conv_size
        )
        self.allow_neg_eigval = allow_neg_eigval
        self.norm_epsilon = norm_epsilon
        self.dtype = dtype
        self.decode = decode
        self.implementation = implementation
        kinds = {"use_bias": False, "dtype": dtype, "param_dtype": param_dtype, "kernel_init": kernel_init}
        self.projections = nnx.Dict(
            {name: nnx.Linear(into, out, **kinds, rngs=rngs) for name, (into, out) in self.sizes.projections.items()}
        )
        self.convolutions = nnx.Dict(
            {
                name: nnx.Param(shared.init_conv(rngs.params(), (conv_size, heads * dim), param_dtype))
                for name, (heads, dim) in self.sizes.mixed.items()
            }
        )
        heads = (self.sizes.value_heads,)
        self.a_log = nnx.Param(self.kind.init_a_log(rngs.params(), heads, param_dtype))
        self.dt_bias = nnx.Param(self.kind.init_dt_bias(rngs.params(), self.sizes.decays, param_dtype))
        self.norm_scale = nnx.Param(jnp.ones((self.sizes.value_dim,), param_dtype))
        self.out = nnx.Linear(self.sizes.projections["gate"][-1], features, **kinds, rngs=rngs)
        self.cache = nnx.data(None)

    def init_cache(self, batch: int, dtype: Any = None) -> None:
        """Empties the cache, for `batch` sequences: every one starts from a state of 0."""
        made = self.sizes.cache(batch, dtype or self.dtype or jnp.float32)
        self.cache = nnx.data({name: nnx.Cache(array) for name, array in made.items()})

    def __call__(self, x: jax.Array, *, decode: bool | None = None) -> jax.Array:
        """With `decode`, x continues the sequences that earlier calls began: their prompt at once, or token by token.

        Raises:
          ValueError: x is not (B, T, features), or `decode` without a cache for B sequences.
        """
        if x.ndim != 3 or x.shape[-1] != self.sizes.features:
            raise ValueError(f"{self.kind.name}: x has shape {x.shape}; the rule: (B, T, {self.sizes.features})")
        cache = self._cache_for(x) if (self.decode if decode is None else decode) else None
        projected = shared.project(self.sizes, x, lambda name, y: self.projections[name](y))
        out, after = shared.mix(
            self.sizes,
            projected,
            {name: weight[...] for name, weight in self.convolutions.items()},
            self.a_log[...],
            self.dt_bias[...],
            cache,
            allow_neg_eigval=self.allow_neg_eigval,
            implementation=self.implementation,
        )
        if after is not None:
            for name, array in after.items():
                self.cache[name][...] = array
        out = shared.gated_norm(self.kind, out, projected["gate"], self.norm_scale[...], self.norm_epsilon)
        return self.out(out.reshape(*x.shape[:2], -1))

    def _cache_for(self, x: jax.Array) -> dict[str, jax.Array]:
        if self.cache is None or self.cache["state"].shape[0] != x.shape[0]:
            kept = "none" if self.cache is None else f"one for {self.cache['state'].shape[0]} sequences"
            raise ValueError(
                f"{self.kind.name}: decode with x of shape {x.shape} and {kept} as the cache; the rule: "
                f"init_cache({x.shape[0]}) first"
            )
        return {name: held[...] for name, held in self.cache.items()}


class GatedDeltaNet(_DeltaLayer):
    """The Gated DeltaNet layer: (B, T, features) to (B, T, features), causal, with a state in place of a cache of keys.

    It is that of "Gated Delta Networks: Improving Mamba2 with Delta Rule" (Yang, Kautz, Hatamizadeh, 2024).

    Args:
      features: of the input and the output.
      num_heads, head_dim: of q and k.
      num_value_heads: of v and the states, a multiple of num_heads; num_heads by default.
      value_head_dim: of v; 2 * head_dim by default, as in the paper.
      conv_size: inputs that each output of the short convolutions sees.
      allow_neg_eigval: the writing rate reaches 2 in place of 1.
      norm_epsilon: of the output's RMS norm.
      dtype: what projections and the operation compute in; what input and parameters promote to by default. States are
        float32.
      param_dtype: of the parameters.
      kernel_init: of the projections.
      decode: whether a call continues from the cache that `init_cache` makes; a call may say otherwise.
      implementation: as in `cudnn_jax.gdn`.
    """

    kind = shared.GATED_DELTA_NET


class KimiDeltaAttention(_DeltaLayer):
    """The Kimi Delta Attention layer: as `GatedDeltaNet`, with a decay for each channel of a head's keys.

    It is that of "Kimi Linear: An Expressive, Efficient Attention Architecture" (Kimi Team, 2025): decays and the
    output's gate come from the input through head_dim numbers, and the gate is a sigmoid. The decays' logarithms are
    bounded from below, by `cudnn_jax.kda`'s safe gate.

    Args:
      value_head_dim: of v; head_dim by default.
      features, num_heads, head_dim, num_value_heads, conv_size, allow_neg_eigval, norm_epsilon, dtype, param_dtype,
        kernel_init, decode, implementation: as those of `GatedDeltaNet`.
    """

    kind = shared.KIMI_DELTA_ATTENTION
