"""Layers for Flax Linen."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from cudnn_jax.flax import _gated_delta_net as shared

__all__ = ["GatedDeltaNet"]


class GatedDeltaNet(nn.Module):
    """As `cudnn_jax.flax.nnx.GatedDeltaNet`. With `decode`, the collection "cache" holds what calls continue from.

    Initialising with `decode` makes an empty cache for as many sequences as the example has.
    """

    features: int
    num_heads: int
    head_dim: int
    num_value_heads: int | None = None
    value_head_dim: int | None = None
    conv_size: int = 4
    allow_neg_eigval: bool = False
    norm_epsilon: float = 1e-6
    dtype: Any = None
    param_dtype: Any = jnp.float32
    kernel_init: Any = nn.initializers.lecun_normal()
    decode: bool = False
    implementation: str | None = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        if x.ndim != 3 or x.shape[-1] != self.features:
            raise ValueError(f"GatedDeltaNet: x has shape {x.shape}; the rule: (B, T, {self.features})")
        sizes = shared.Sizes.of(
            self.features,
            self.num_heads,
            self.head_dim,
            self.num_value_heads,
            self.value_head_dim,
            self.conv_size,
        )
        kinds = {
            "use_bias": False,
            "dtype": self.dtype,
            "param_dtype": self.param_dtype,
            "kernel_init": self.kernel_init,
        }
        projected = {name: nn.Dense(out, name=name, **kinds)(x) for name, out in sizes.projections.items()}
        convolutions = {
            name: self.param(f"{name}_conv", shared.init_conv, (sizes.conv_size, heads * dim), self.param_dtype)
            for name, (heads, dim) in sizes.mixed.items()
        }
        heads = (sizes.value_heads,)
        a_log = self.param("a_log", shared.init_a_log, heads, self.param_dtype)
        dt_bias = self.param("dt_bias", shared.init_dt_bias, heads, self.param_dtype)
        scale = self.param("norm_scale", nn.initializers.ones, (sizes.value_dim,), self.param_dtype)
        held = self._cache(sizes, x.shape, projected["query"].dtype) if self.decode else None
        out, after = shared.mix(
            sizes,
            projected,
            convolutions,
            a_log,
            dt_bias,
            None if held is None else {name: variable.value for name, variable in held.items()},
            allow_neg_eigval=self.allow_neg_eigval,
            implementation=self.implementation,
        )
        if held is not None and after is not None and not self.is_initializing():
            for name, array in after.items():
                held[name].value = array
        out = shared.gated_norm(out, projected["gate"].reshape(out.shape), scale, self.norm_epsilon)
        return nn.Dense(self.features, name="out", **kinds)(out.reshape(*x.shape[:2], -1))

    def _cache(self, sizes: shared.Sizes, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
        made = sizes.cache(shape[0], dtype)
        held = {name: self.variable("cache", name, lambda array=array: array) for name, array in made.items()}
        kept = held["state"].value.shape[0]
        if kept != shape[0]:
            raise ValueError(
                f"GatedDeltaNet: decode with x of shape {shape} and a cache for {kept} sequences; the rule: as many "
                "as the cache was initialised with"
            )
        return held
