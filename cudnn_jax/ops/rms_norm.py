"""Root-mean-square norm: `cudnn_jax.rms_norm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from cudnn_jax.ops._norm import normalise


def rms_norm(
    x: Any,
    scale: Any = None,
    bias: Any = None,
    *,
    axis: int | Sequence[int] = -1,
    epsilon: float = 1e-6,
    implementation: str | None = None,
) -> jax.Array:
    """Root-mean-square norm, x / sqrt(mean(x^2) + epsilon) * scale + bias, the mean over `axis`.

    As in Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), with epsilon under the root. Computed in
    float32, in float64 where x is.

    Args:
      x: any shape; bfloat16, float16, float32, or float64 in JAX's 64-bit mode.
      scale, bias: x's dims along `axis`, in x's order of axes: (D,) for the last; any of x's types. 1 and 0 by default.
      axis: the axes that are normalised, each at least 1 long.
      epsilon: a Python number, at least 0.
      implementation: None for the ranked plan list; "cutile", "cudnn", "xla", or the name of an engine or plan.

    Returns:
      x's shape and dtype. Gradients of x, scale and bias are each in its dtype, and need the forward's rsqrt besides,
      float32, which it then gives.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: forward mode or a second derivative, unless `implementation` is "xla"; or a `vmap` that no
        single call is, as with weights mapped, where `implementation` names anything else.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    return normalise("rmsnorm", x, scale, bias, axis=axis, epsilon=epsilon, implementation=implementation)
