"""Convolution: `cudnn_jax.conv`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph.layout import in_order
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._functions import floating, graph_of
from cudnn_jax.ops.call import run

_Pairs = tuple[tuple[int, int], ...]


def conv(
    image: Any,
    weight: Any,
    *,
    stride: int | Sequence[int] = 1,
    padding: int | Sequence[int | tuple[int, int]] = 0,
    dilation: int | Sequence[int] = 1,
    channels_last: bool = False,
    implementation: str | None = None,
) -> jax.Array:
    """Convolution of images with filters, which are not mirrored (cross-correlation, as in `jax.lax.conv`),

        y[n, k, p] = sum over c, r of image[n, group(k) + c, stride p + dilation r - padding] weight[k, c, r]

    where p and r count along each spatial axis, and what lies outside of the image is 0. Sums are in float32, in
    float64 where the image is.

    Args:
      image: (N, C, *spatial), 1 to 3 spatial axes; bfloat16, float16, float32, or float64 in JAX's 64-bit mode.
      weight: (K, C / groups, *taps), image's dtype; its channels tell the groups, which divide C and K.
      stride: steps of the filter, an integer, or one for each spatial axis; at least 1.
      padding: zeros around the image, an integer, or for each spatial axis one, or (in front, behind).
      dilation: distance of the filter's elements, as stride.
      channels_last: image, weight and result are (N, *spatial, C), (K, *taps, C / groups) and (N, *spatial, K), the
        order that GPUs favour.
      implementation: None for the ranked plan list; "cudnn", "xla", or the name of an engine or plan.

    Returns:
      (N, K, *spatial) in image's dtype; along each spatial axis
      1 + (size + padding in front and behind - dilation (taps - 1) - 1) // stride. Gradients of image and weight are in
      their dtype, and convolutions as well, with derivatives of their own.

    Raises:
      TypeError, ValueError: an argument breaks its rule; the message names it.
      NotImplementedError: forward mode, unless `implementation` is "xla"; or a `vmap` that no single call is, where
        `implementation` names anything else.
      GraphNotSupportedError: `implementation` names no engine, or one that declines; the message holds the names, or
        the reason.
    """
    channels_last = check.flag("channels_last", channels_last)
    spatial = "*spatial, C" if channels_last else "C, *spatial"
    image = floating("image", image, rank=(3, 4, 5), layout=f"(N, {spatial}), 1 to 3 spatial axes")
    taps = "*taps, C / groups" if channels_last else "C / groups, *taps"
    weight = check.array("weight", weight, rank=(image.ndim,), layout=f"(K, {taps}), image's rank {image.ndim}")
    check.dtype("weight", weight, (image.dtype,), f"image's dtype {image.dtype}")
    count = image.ndim - 2
    if channels_last:
        image, weight = (jnp.moveaxis(each, -1, 1) for each in (image, weight))
    graph = _graph(
        image.shape,
        weight.shape,
        jnp.dtype(image.dtype),
        _each("stride", stride, count, 1),
        _padding(padding, count),
        _each("dilation", dilation, count, 1),
        channels_last,
    )
    (y,) = run(graph, image, weight, implementation=implementation, by_rows=True)
    return jnp.moveaxis(y, 1, -1) if channels_last else y


def _each(name: str, value: Any, count: int, least: int) -> tuple[int, ...]:
    given = (value,) * count if not isinstance(value, tuple | list) else tuple(value)
    if len(given) != count:
        raise ValueError(f"{name} is {value!r}; the rule: an integer, or one for each of {count} spatial axes")
    return tuple(check.whole_number(name, each, least) for each in given)


def _padding(value: Any, count: int) -> _Pairs:
    given = (value,) * count if not isinstance(value, tuple | list) else tuple(value)
    pairs = [tuple(each) if isinstance(each, tuple | list) else (each, each) for each in given]
    if len(pairs) != count or any(len(pair) != 2 for pair in pairs):
        rule = f"an integer, or for each of {count} spatial axes one, or (in front, behind)"
        raise ValueError(f"padding is {value!r}; the rule: {rule}")
    whole = partial(check.whole_number, "padding", least=0)
    return tuple((whole(pre), whole(post)) for pre, post in pairs)


@lru_cache(maxsize=1024)
def _graph(
    image: tuple[int, ...],
    weight: tuple[int, ...],
    dtype: np.dtype,
    stride: tuple[int, ...],
    padding: _Pairs,
    dilation: tuple[int, ...],
    channels_last: bool,
) -> pygraph:
    graph = graph_of(dtype)
    order = (0, *range(2, len(image)), 1) if channels_last else range(len(image))
    x, taps = (
        graph.tensor(dim, in_order(dim, order), name=name) for name, dim in (("image", image), ("weight", weight))
    )
    pre, post = zip(*padding, strict=True)
    y = graph.conv_fprop(x, taps, pre_padding=pre, post_padding=post, stride=stride, dilation=dilation)
    y.set_output(True)
    graph.freeze()
    return graph
