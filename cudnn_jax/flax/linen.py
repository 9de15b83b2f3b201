"""Layers for Flax Linen."""

from __future__ import annotations

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn

from cudnn_jax.flax import _delta_layers as shared

__all__ = ["GatedDeltaNet", "KimiDeltaAttention"]


class _DeltaLayer(nn.Module):
    kind: ClassVar[shared.Kind]

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
            raise ValueError(f"{self.kind.name}: x has shape {x.shape}; the rule: (B, T, {self.features})")
        sizes = shared.Sizes.of(
            self.kind,
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
        widths = {name: out for name, (_, out) in sizes.projections.items()}
        projected = shared.project(sizes, x, lambda name, y: nn.Dense(widths[name], name=name, **kinds)(y))
        convolutions = {
            name: self.param(f"{name}_conv", shared.init_conv, (sizes.conv_size, heads * dim), self.param_dtype)
            for name, (heads, dim) in sizes.mixed.items()
        }
        a_log = self.param("a_log", self.kind.init_a_log, (sizes.value_heads,), self.param_dtype)
        dt_bias = self.param("dt_bias", self.kind.init_dt_bias, sizes.decays, self.param_dtype)
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
        out = shared.gated_norm(self.kind, out, projected["gate"], scale, self.norm_epsilon)
        return nn.Dense(self.features, name="out", **kinds)(out.reshape(*x.shape[:2], -1))

    def _cache(self, sizes: shared.Sizes, shape: tuple[int, ...], dtype: Any) -> dict[str, Any]:
        made = sizes.cache(shape[0], dtype)
        held = {name: self.variable("cache", name, lambda array=array: array) for name, array in made.items()}
        kept = held["state"].value.shape[0]
        if kept != shape[0]:
            raise ValueError(
                f"{self.kind.name}: decode with x of shape {shape} and a cache for {kept} sequences; the rule: as many "
                "as the cache was initialised with"
            )
        return held


class GatedDeltaNet(_DeltaLayer):
    """As `cudnn_jax.flax.nnx.GatedDeltaNet`. With `decode`, the collection "cache" holds what calls continue from.

    Initialising with `decode` makes an empty cache for as many sequences as the example has.
    """

    kind = shared.GATED_DELTA_NET


class KimiDeltaAttention(_DeltaLayer):
    """As `cudnn_jax.flax.nnx.KimiDeltaAttention`, and with a cache as `GatedDeltaNet`."""

    kind = shared.KIMI_DELTA_ATTENTION
