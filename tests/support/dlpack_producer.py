"""DLPack producers written by hand, through ctypes and to the letter of dlpack.h, that count what is done to them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np

CPU, CUDA = 1, 2
FLOAT32 = (2, 32, 1)


class _Version(ctypes.Structure):
    _fields_ = [("major", ctypes.c_uint32), ("minor", ctypes.c_uint32)]


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _DataType(ctypes.Structure):
    _fields_ = [("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16)]


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    _fields_ = [("dl_tensor", _Tensor), ("manager_ctx", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class _ManagedVersioned(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _Tensor),
    ]


class _Exchange(ctypes.Structure):
    _fields_ = [
        ("version", _Version),
        ("previous", ctypes.c_void_p),
        ("allocate", ctypes.c_void_p),
        ("managed_from_object", ctypes.c_void_p),
        ("object_from_managed", ctypes.c_void_p),
        ("tensor_from_object", ctypes.c_void_p),
        ("current_stream", ctypes.c_void_p),
    ]


# A library of our own: others set the types of the one that ctypes shares.
_new_capsule = ctypes.PyDLL(None).PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
_Deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_forever: list[Any] = []


class Source:
    """An array, and what a producer says of it. `deleted` counts the calls of deleters."""

    def __init__(
        self,
        array: np.ndarray[Any, Any],
        *,
        dtype: tuple[int, int, int] = FLOAT32,
        device: tuple[int, int] = (CPU, 0),
        strides: bool = True,
        offset: int = 0,
        flags: int = 0,
        version: tuple[int, int] = (1, 1),
        shape: tuple[int, ...] | None = None,
    ) -> None:
        self.array, self.device, self.flags, self.version = array, device, flags, version
        self.given = 0
        self.deleted = 0
        dims = array.shape if shape is None else shape
        self._shape = (ctypes.c_int64 * len(dims))(*dims)
        self._strides = (ctypes.c_int64 * len(dims))(*(step // array.itemsize for step in array.strides[: len(dims)]))
        self._tensor = _Tensor(
            data=array.ctypes.data - offset,
            device=_Device(*device),
            ndim=len(dims),
            dtype=_DataType(*dtype),
            shape=ctypes.cast(self._shape, ctypes.POINTER(ctypes.c_int64)),
            strides=ctypes.cast(self._strides, ctypes.POINTER(ctypes.c_int64)) if strides else None,
            byte_offset=offset,
        )
        self._deleter = _Deleter(self._delete)
        self._made: list[Any] = []

    def _delete(self, _: int) -> None:
        self.deleted += 1

    def managed(self, versioned: bool) -> Any:
        """The structure that a capsule holds."""
        self.given += 1
        deleter = ctypes.cast(self._deleter, ctypes.c_void_p)
        if versioned:
            made = _ManagedVersioned(_Version(*self.version), None, deleter, self.flags, self._tensor)
        else:
            made = _Managed(self._tensor, None, deleter)
        self._made.append(made)
        return made

    def capsule(self, versioned: bool, name: bytes | None = None) -> Any:
        names = {True: b"dltensor_versioned", False: b"dltensor"}
        return _new_capsule(ctypes.addressof(self.managed(versioned)), name or names[versioned], None)


class Versioned(Source):
    """What numpy 2 and torch do."""

    keywords: dict[str, Any]

    def __dlpack__(self, **keywords: Any) -> Any:
        self.keywords = keywords
        return self.capsule(versioned=True)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


class Unversioned(Source):
    """What came before DLPack 1: no max_version."""

    def __dlpack__(self, stream: Any = None) -> Any:
        self.keywords = {"stream": stream}
        return self.capsule(versioned=False)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


def exchange_type(
    *, borrowed: bool = True, major: int = 1, stream: Callable[[], int] = lambda: 0, failing: bool = False
) -> type[Source]:
    """A type with the table of C functions.

    Args:
      borrowed: whether the table has the function that lends a tensor.
      major: the table's version; behind one of another major version stands a table of version 1.
      stream: the library's current stream.
      failing: whether the functions fail, without a reason: ctypes lets no exception through.
    """

    def tensor_from_object(source: Source, out: Any) -> int:
        if failing:
            return -1
        source.given += 1
        source.deleted += 1
        ctypes.memmove(out, ctypes.addressof(source._tensor), ctypes.sizeof(_Tensor))
        return 0

    def managed_from_object(source: Source, out: Any) -> int:
        if failing:
            return -1
        ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = ctypes.addressof(source.managed(versioned=True))
        return 0

    def current_stream(device_type: int, device: int, out: Any) -> int:
        asked.append((device_type, device))
        ctypes.cast(out, ctypes.POINTER(ctypes.c_void_p))[0] = stream()
        return 0

    asked: list[tuple[int, int]] = []
    from_object = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object, ctypes.c_void_p)
    of_stream = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_int32, ctypes.c_int32, ctypes.c_void_p)
    lend, give, tell = from_object(tensor_from_object), from_object(managed_from_object), of_stream(current_stream)
    table = _Exchange(
        _Version(1, 3),
        None,
        None,
        ctypes.cast(give, ctypes.c_void_p),
        None,
        ctypes.cast(lend, ctypes.c_void_p) if borrowed else None,
        ctypes.cast(tell, ctypes.c_void_p),
    )
    newest = table if major == 1 else _Exchange(_Version(major, 0), ctypes.addressof(table))
    capsule = _new_capsule(ctypes.addressof(newest), b"dlpack_exchange_api", None)
    _forever.extend((lend, give, tell, table, newest))  # a table lives as long as the process
    members = {"__dlpack_c_exchange_api__": capsule, "asked": asked}
    return type("Exchanging", (Source,), members)
