"""Where the libraries that the C++ side opens at run time are, as far as installed wheels tell."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterator
from pathlib import Path

from cudnn_jax import _ffi

_WHEELS = {
    "cudnn": (("nvidia.cudnn", "nvidia.cudnn_jit"), "libcudnn.so*"),
    "cudart": (("nvidia.cu13", "nvidia.cuda_runtime"), "libcudart.so.*"),
    "cute_dsl_runtime": (("nvidia_cutlass_dsl.cu13", "nvidia_cutlass_dsl.cu12"), "libcute_dsl_runtime.so"),
    "nvrtc": (("nvidia.cu13", "nvidia.cuda_nvrtc"), "libnvrtc.so.*"),
}
"""Library -> the packages of the wheels that bring it, the preferred one first, and its file in their lib/.

The driver, "cuda", comes with the machine and has no wheel.
"""


@functools.cache
def locate() -> None:
    """Tells the C++ side, once per process, where to look. Imports none of the wheels and opens nothing."""
    _ffi.set_library_candidates(candidates())


def candidates() -> dict[str, list[str]]:
    """Absolute paths by library."""
    return {
        name: [str(path) for package in packages for path in _files_of(package, pattern)]
        for name, (packages, pattern) in _WHEELS.items()
    }


def _files_of(package: str, pattern: str) -> Iterator[Path]:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # no parent package
        return
    for folder in (spec.submodule_search_locations or []) if spec else []:
        yield from sorted(Path(folder, "lib").glob(pattern), reverse=True)
