"""Makes the C++ runtime known to JAX: the custom call's target and its state type.

`register()` runs when an operation is first lowered, and `initialize()` is a `jax_plugins` entry point that
JAX calls in every process before its first backend: so an exported function or a cached executable that holds
one of our programs runs in a process that never imported cudnn_jax.
"""

from __future__ import annotations

import functools
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cudnn_jax import _ffi
from cudnn_jax.engines import libraries

TARGET = "cudnn_jax.program"

_lock = threading.Lock()
_registered = False


def register() -> None:
    """Registers target and type with JAX and tells the runtime where libraries are, once per process."""
    global _registered
    with _lock:
        if _registered:
            return
        _check_api_version(_running_api_version())
        libraries.locate()
        _register_cpu()
        _when_plugins_are_known(_register_cuda)
        _registered = True


def initialize() -> None:
    """The `jax_plugins` entry point."""
    register()


def _running_api_version() -> tuple[int, int] | None:
    """The XLA FFI version of the installed jaxlib, from the header in its wheel; None if it has none."""
    import jax

    header = Path(jax.ffi.include_dir(), "xla", "ffi", "api", "c_api.h")
    if not header.is_file():
        return None
    text = header.read_text(encoding="utf-8")
    found = [re.search(rf"#define XLA_FFI_API_{part} (\d+)", text) for part in ("MAJOR", "MINOR")]
    return (int(found[0][1]), int(found[1][1])) if found[0] and found[1] else None


def _check_api_version(running: tuple[int, int] | None) -> None:
    built = _ffi.XLA_FFI_API_VERSION
    # A handler newer than the jaxlib it runs in keeps the whole backend from starting.
    if running is not None and (running[0] != built[0] or running[1] < built[1]):
        raise RuntimeError(
            f"jaxlib speaks XLA FFI {running[0]}.{running[1]}, cudnn_jax is for {built[0]}.{built[1]}; "
            "the rule is the same major and no older minor version; install another jaxlib or cudnn_jax"
        )


def _register_cpu() -> None:
    # Before the CPU backend exists, jaxlib queues registrations and later flushes targets before types, but a
    # target whose type has no number yet is refused. With the handler in place the type is known at once.
    from jaxlib import xla_client

    register_type = getattr(getattr(xla_client, "_xla", None), "register_custom_type", None)
    if register_type is not None:
        xla_client.register_custom_type_handler("cpu", register_type)
    _register_platform("cpu", "cpu")


@functools.cache
def _register_cuda() -> None:
    _register_platform("cuda", "CUDA")


def _register_platform(platform: str, jax_name: str) -> None:
    import jax

    # The type comes first: a target carries its type's number.
    jax.ffi.register_ffi_type(f"{TARGET}.{platform}", _ffi.ffi_type(platform), platform=jax_name)
    jax.ffi.register_ffi_target(TARGET, _ffi.ffi_targets()[platform], platform=jax_name)


def _when_plugins_are_known(callback: Callable[[], None]) -> None:
    """Calls back when JAX's plugins have registered their handlers: at once, or as soon as they have."""
    from jax._src import xla_bridge

    def on_plugin(c_api: Any) -> None:
        callback()

    xla_bridge.register_plugin_callbacks(on_plugin)  # type: ignore[no-untyped-call]
