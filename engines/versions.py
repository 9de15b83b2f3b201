"""Versions of what programs run on: facts of the process, in one place, apart from those of devices."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from cudnn_jax import _ffi
from cudnn_jax.engines import libraries


@dataclass(frozen=True)
class Versions:
    """What is here.

    Attributes:
      cuda_driver: 13000 for CUDA 13.0, None without a driver.
      cudnn: 91900 for cuDNN 9.19.0, None without it.
      cutedsl: version of the distribution that brings CuTe-DSL and its runtime, such as "4.8.1", or None.
      cudnn_frontend: version of the headers that the extension was built with, as cuDNN's.
      xla_ffi: version of XLA's FFI that the extension was built for.
      missing: why each None above is one, by field name.
    """

    cuda_driver: int | None
    cudnn: int | None
    cutedsl: str | None
    cudnn_frontend: int
    xla_ffi: tuple[int, int]
    missing: Mapping[str, str]


def versions() -> Versions:
    """Looks at everything: opens CUDA and cuDNN where they are, and no DSL. Never raises."""
    found: dict[str, Any] = {}
    missing: dict[str, str] = {}
    for name, ask in _ASKED.items():
        try:
            found[name] = ask()
        except (ImportError, RuntimeError) as error:
            found[name] = None
            missing[name] = " ".join(str(error).split())
    return Versions(
        **found, cudnn_frontend=_ffi.CUDNN_FRONTEND_VERSION, xla_ffi=_ffi.XLA_FFI_API_VERSION, missing=missing
    )


def cuda_driver() -> int:
    """13000 for CUDA 13.0. Raises `_ffi.LibraryNotFound`, an ImportError, naming what was tried."""
    libraries.locate()
    return _ffi.cuda_driver_version()


def cudnn() -> int:
    """91900 for cuDNN 9.19.0. Raises `_ffi.LibraryNotFound`, an ImportError, naming what was tried."""
    libraries.locate()
    return _ffi.cudnn_version()


def cutedsl() -> str:
    """Such as "4.8.1". Raises PackageNotFoundError, an ImportError."""
    return importlib.metadata.version("nvidia-cutlass-dsl")


_ASKED: dict[str, Callable[[], int | str]] = {"cuda_driver": cuda_driver, "cudnn": cudnn, "cutedsl": cutedsl}
