"""Fast attention on NVIDIA GPUs for JAX, with gradients.

Importing this package loads neither JAX nor CUDA: every export is loaded when it is first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_EXPORTS = {
    "sdpa": "cudnn_jax.ops.sdpa",
    "gdn": "cudnn_jax.ops.gdn",
    "gated_delta_net": "cudnn_jax.ops.gdn",
    "gdn_step": "cudnn_jax.ops.gdn",
    "kda": "cudnn_jax.ops.kda",
    "kimi_delta_attention": "cudnn_jax.ops.kda",
    "kda_step": "cudnn_jax.ops.kda",
    "gdn2": "cudnn_jax.ops.gdn2",
    "gated_delta_net_v2": "cudnn_jax.ops.gdn2",
    "gdn2_step": "cudnn_jax.ops.gdn2",
    "rms_norm": "cudnn_jax.ops.rms_norm",
    "layer_norm": "cudnn_jax.ops.layer_norm",
    "rope": "cudnn_jax.ops.rope",
    "conv": "cudnn_jax.ops.conv",
    "block_scale_quantize": "cudnn_jax.ops.block_scale",
    "block_scale_dequantize": "cudnn_jax.ops.block_scale",
    "call": "cudnn_jax.ops.call",
    "pygraph": "cudnn_jax._graph",
    "explain": "cudnn_jax._explain",
    "Explanation": "cudnn_jax._explain",
    "autotune": "cudnn_jax._autotune",
    "AutotuneResult": "cudnn_jax._autotune",
    "Handle": "cudnn_jax._eager",
    "create_handle": "cudnn_jax._eager",
    "destroy_handle": "cudnn_jax._eager",
    "set_stream": "cudnn_jax._eager",
    "get_stream": "cudnn_jax._eager",
    "DeviceInfo": "cudnn_jax._eager",
    "device_info": "cudnn_jax._eager",
    "DeviceView": "cudnn_jax._eager",
    "versions": "cudnn_jax.engines.versions",
    "numerical_note": "cudnn_jax.engines.notes",
    "behavior_note": "cudnn_jax.engines.notes",
    "data_type": "cudnn_jax.graph",
    "GraphNotSupportedError": "cudnn_jax.graph",
}
_MODULES = ("aot", "engines", "flax", "graph", "ops")

if TYPE_CHECKING:
    from cudnn_jax._autotune import AutotuneResult as AutotuneResult
    from cudnn_jax._autotune import autotune as autotune
    from cudnn_jax._eager import DeviceInfo as DeviceInfo
    from cudnn_jax._eager import DeviceView as DeviceView
    from cudnn_jax._eager import Handle as Handle
    from cudnn_jax._eager import create_handle as create_handle
    from cudnn_jax._eager import destroy_handle as destroy_handle
    from cudnn_jax._eager import device_info as device_info
    from cudnn_jax._eager import get_stream as get_stream
    from cudnn_jax._eager import set_stream as set_stream
    from cudnn_jax._explain import Explanation as Explanation
    from cudnn_jax._explain import explain as explain
    from cudnn_jax._graph import pygraph as pygraph
    from cudnn_jax.engines.notes import behavior_note as behavior_note
    from cudnn_jax.engines.notes import numerical_note as numerical_note
    from cudnn_jax.engines.versions import versions as versions
    from cudnn_jax.graph import GraphNotSupportedError as GraphNotSupportedError
    from cudnn_jax.graph import data_type as data_type
    from cudnn_jax.ops.block_scale import block_scale_dequantize as block_scale_dequantize
    from cudnn_jax.ops.block_scale import block_scale_quantize as block_scale_quantize
    from cudnn_jax.ops.call import call as call
    from cudnn_jax.ops.conv import conv as conv
    from cudnn_jax.ops.gdn import gated_delta_net as gated_delta_net
    from cudnn_jax.ops.gdn import gdn as gdn
    from cudnn_jax.ops.gdn import gdn_step as gdn_step
    from cudnn_jax.ops.gdn2 import gated_delta_net_v2 as gated_delta_net_v2
    from cudnn_jax.ops.gdn2 import gdn2 as gdn2
    from cudnn_jax.ops.gdn2 import gdn2_step as gdn2_step
    from cudnn_jax.ops.kda import kda as kda
    from cudnn_jax.ops.kda import kda_step as kda_step
    from cudnn_jax.ops.kda import kimi_delta_attention as kimi_delta_attention
    from cudnn_jax.ops.layer_norm import layer_norm as layer_norm
    from cudnn_jax.ops.rms_norm import rms_norm as rms_norm
    from cudnn_jax.ops.rope import rope as rope
    from cudnn_jax.ops.sdpa import sdpa as sdpa


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _MODULES:
        return importlib.import_module(f"cudnn_jax.{name}")
    raise AttributeError(f"module 'cudnn_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(["__version__", *_EXPORTS, *_MODULES])
