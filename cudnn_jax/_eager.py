"""What `graph.execute` takes beside buffers: handles, facts of devices, views of memory."""

from __future__ import annotations

from cudnn_jax._ffi import (
    DeviceInfo,
    DeviceView,
    Handle,
    create_handle,
    destroy_handle,
    device_info,
    get_stream,
    set_stream,
)
from cudnn_jax.engines import libraries

__all__ = [
    "DeviceInfo",
    "DeviceView",
    "Handle",
    "create_handle",
    "destroy_handle",
    "device_info",
    "get_stream",
    "set_stream",
]

# A handle opens cuDNN when its backend handle is asked for, and then has to find it.
libraries.locate()
