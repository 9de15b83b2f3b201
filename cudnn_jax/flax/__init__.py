"""What Flax models take from this package: `attention_fn` for its attention layers, and layers of linear attention.

`attention_fn` imports no Flax and serves both of its APIs. `GatedDeltaNet` and `KimiDeltaAttention` are the NNX layers;
Linen's are those of `cudnn_jax.flax.linen`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "attention_fn": "cudnn_jax.flax.attention",
    "GatedDeltaNet": "cudnn_jax.flax.nnx",
    "KimiDeltaAttention": "cudnn_jax.flax.nnx",
}
_MODULES = ("linen", "nnx")

if TYPE_CHECKING:
    from cudnn_jax.flax.attention import attention_fn as attention_fn
    from cudnn_jax.flax.nnx import GatedDeltaNet as GatedDeltaNet
    from cudnn_jax.flax.nnx import KimiDeltaAttention as KimiDeltaAttention


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"cudnn_jax.flax.{name}")
    raise AttributeError(f"module 'cudnn_jax.flax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*_EXPORTS, *_MODULES])
