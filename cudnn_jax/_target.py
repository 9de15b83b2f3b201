"""Which target a lowering plans for."""

from __future__ import annotations

from typing import Any

import jax

from cudnn_jax.engines.target import CPU, Target, local

_CUDA_PLATFORMS = ("cuda", "gpu")

ahead_of_time = jax.make_user_context(None)
"""The target set by `aot.target`; part of JAX's own cache keys, so that a changed target is lowered again."""


def of_lowering(ctx: Any) -> Target:
    """The target of a lowering rule's context: `aot.target`'s, else the first local device of its platform."""
    platforms = ctx.platforms or ctx.module_context.platforms
    if len(platforms) > 1:
        return Target(platform="any")
    if platforms[0] not in _CUDA_PLATFORMS:
        return of_platform(platforms[0])
    if ahead_of_time.value is None:
        backend = ctx.module_context.get_backend(optional=True)
        if backend is not None and backend.platform in _CUDA_PLATFORMS:
            return _of_device(backend.local_devices()[0])
    return of_platform("cuda")


def of_platform(platform: str) -> Target:
    """The target of a platform, without a lowering at hand.

    Raises:
      RuntimeError: "cuda" with no GPU here and no `aot.target`.
    """
    if platform not in _CUDA_PLATFORMS:
        return CPU if platform == "cpu" else Target(platform=platform)
    if ahead_of_time.value is not None:
        return ahead_of_time.value  # type: ignore[no-any-return]
    try:
        devices = jax.local_devices(backend="cuda")
    except RuntimeError:
        raise RuntimeError(
            "lowering for cuda with no GPU on this machine: name the GPU, as in `with cudnn_jax.aot.target('h200'):`"
        ) from None
    return _of_device(devices[0])


def current() -> Target:
    """The target of a call made now with the default backend."""
    if ahead_of_time.value is not None:
        return ahead_of_time.value  # type: ignore[no-any-return]
    return of_platform(jax.default_backend())


def _of_device(device: Any) -> Target:
    return local(device.local_hardware_id)
