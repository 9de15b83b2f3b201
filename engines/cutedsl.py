"""CuTe-DSL at build time: a `@cute.jit` function compiled for a target to an object that a `cute` step runs.

A function to compile takes `cute.Pointer` arguments, in the order of the step's arguments, and the CUstream last; it
makes its tensors from static layouts inside. So the object's C interface is addresses alone.

The DSL keeps the architecture, the options and its tracing state in process-wide objects, and probes the CUDA driver
when no architecture is set. `compile_function` pins the architecture for the length of one compilation, under a lock;
it needs no GPU and touches none. The host part of an object is compiled for the baseline of the machine's ISA, so that
one object runs, and has the same bytes, whatever CPU compiled it.
"""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from cudnn_jax.engines import versions
from cudnn_jax.engines.kernels import CuteObject
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import GraphNotSupportedError, data_type

DISTRIBUTION = "nvidia-cutlass-dsl"
MINIMUM = (4, 8, 1)
"""The oldest version whose options, objects and runtime are the ones used here."""
_EXTRA = "the extra cutedsl brings it"
_HOSTS = {"x86_64": "llvm -mtriple=x86_64-unknown-linux-gnu", "aarch64": "linux-aarch64"}
"""Machine -> the baseline that the DSL compiles host code for."""

_TYPES = {
    data_type.FLOAT: "Float32",
    data_type.HALF: "Float16",
    data_type.BFLOAT16: "BFloat16",
    data_type.INT32: "Int32",
    data_type.INT64: "Int64",
}
_lock = threading.Lock()


def available() -> None:
    """Raises ImportError with the reason if objects cannot be compiled here. Loads nothing."""
    wanted = ".".join(map(str, MINIMUM))
    try:
        found = versions.cutedsl()
    except ImportError:
        raise ImportError(f"{DISTRIBUTION} is not installed, needs {wanted} or newer; {_EXTRA}") from None
    if tuple(int(part) for part in found.split(".")[:3] if part.isdigit()) < MINIMUM:
        raise ImportError(f"{DISTRIBUTION} {found}, needs {wanted} or newer")
    if importlib.util.find_spec("cutlass") is None:
        raise ImportError(f"{DISTRIBUTION} {found} is installed and its package cutlass is not on the path")
    if platform.machine() not in _HOSTS:
        raise ImportError(f"{DISTRIBUTION} on {platform.machine()}, serves {' and '.join(_HOSTS)}")


def kernels(module: str) -> ModuleType:
    """Imports a module of kernels, and the DSL with it; ImportError, with the reason, if the DSL cannot serve here."""
    available()
    with _unhooked():
        return importlib.import_module(module)


def element_type(dtype: data_type) -> Any:
    """The DSL's class of a data type."""
    import cutlass

    return getattr(cutlass, _TYPES[dtype])


def pointer(dtype: data_type, alignment: int = 16) -> Any:
    """Stands for an argument in device memory, aligned to `alignment` bytes as every operand of a program is."""
    from cutlass import cute
    from cutlass.cute.runtime import make_ptr

    return make_ptr(element_type(dtype), 0, cute.AddressSpace.gmem, assumed_align=alignment)


def architecture(target: Target) -> str:
    """The DSL's name of a CUDA target, with the features of its own generation: sm_90 -> "sm_90a"."""
    assert target.sm is not None
    return f"sm_{target.sm}a" if target.sm >= 90 else f"sm_{target.sm}"


def options(target: Target) -> str:
    """The DSL's options that pin the device and the host that an object is for."""
    return f"--gpu-arch {architecture(target)} --host-target '{_HOSTS[platform.machine()]}'"


def compile_function(fn: Callable[..., Any], args: Sequence[Any], target: Target, name: str) -> CuteObject:
    """Compiles a `@cute.jit` function for `target`.

    Args:
      fn: takes `args` and then a CUstream.
      args: what stands for the arguments, such as `pointer(data_type.HALF)`.
      target: a CUDA target, here or not.
      name: the prefix of the object's symbols; an identifier.

    Raises:
      ImportError: the DSL is not installed, or is too old.
      GraphNotSupportedError: the DSL does not know the target's architecture.
    """
    available()
    chip = architecture(target)
    with _lock, _unhooked():
        import cuda.bindings.driver as driver
        import cutlass
        from cutlass import cute
        from cutlass.base_dsl.enums import Arch

        if chip not in Arch.__members__:
            raise GraphNotSupportedError(f"architecture {chip}, unknown to {DISTRIBUTION} {versions.cutedsl()}")
        with _pinned(cutlass, chip):
            # Without an engine nothing is linked into this process, and the DSL's runtime is not loaded.
            compiled = cute.compile(fn, *args, driver.CUstream(0), options=options(target), no_jit_engine=True)
            data: bytes = compiled.dump_to_object(name)
    return CuteObject(data, name, versions.cutedsl())


@contextmanager
def _pinned(cutlass: Any, chip: str) -> Iterator[None]:
    """Sets the architecture that the DSL takes for the machine's own, which it would ask the driver for."""
    environment = cutlass.cutlass_dsl.CuTeDSL._get_dsl().envar
    before = environment._arch
    environment.arch = chip
    try:
        yield
    finally:
        environment._arch = before


@contextmanager
def _unhooked() -> Iterator[None]:
    """Keeps the process's excepthook, which importing the DSL replaces."""
    before = sys.excepthook
    try:
        yield
    finally:
        sys.excepthook = before
