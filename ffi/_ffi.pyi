"""
The C++ runtime of cudnn_jax: programs, XLA handlers and the cuDNN backend.
"""

from collections.abc import Mapping, Sequence

class LibraryNotFound(ImportError):
    pass

PROGRAM_SPEC: str = ...

XLA_FFI_API_VERSION: tuple[int, int] = ...

CUDNN_FRONTEND_VERSION: int = 12800

def program_check(artifact: bytes) -> dict[str, object]:
    """
    Parses and checks an artifact as the handlers do, and tells what is in it. Raises ValueError naming the field.
    """

def ffi_targets() -> dict[str, dict[str, object]]:
    """
    Per platform, the handlers that jax.ffi.register_ffi_target takes, as capsules by stage.
    """

def ffi_type(platform: str) -> dict[str, object]:
    """
    The state type that jax.ffi.register_ffi_type takes; the type comes before its target.
    """

def counters() -> dict[str, int]:
    """
    Process-wide counts: programs, states, loads, executions and the host nanoseconds inside execute.
    """

def register_host_symbol(name: str, address: int) -> None:
    """
    Names a C function void f(void* const* args, const int64_t* nbytes, int64_t n) for "host" steps.
    """

def set_library_candidates(candidates: Mapping[str, Sequence[str]]) -> None:
    """
    Paths to try for "cudnn", "cuda", "cudart" and "nvrtc", before the bare sonames.
    """

def cuda_driver_version() -> int:
    """13000 for CUDA 13.0. Raises LibraryNotFound naming what was tried."""
