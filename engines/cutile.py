"""cuTile: whether it can compile here, and images from kernels. No GPU is asked for anything.

Engines import this module freely: it loads the DSL only inside `compile_kernel`.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import inspect
import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType
from typing import Any

from cudnn_jax.engines.base import TransientDecline
from cudnn_jax.engines.kernels import CubinImage
from cudnn_jax.engines.program import Argument, immediate
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import data_type
from cudnn_jax.graph.layout import row_major

MINIMUM = (1, 7)
"""The oldest cuda-tile whose export interface is the one used here."""
MINIMUM_COMPILER = (13, 4)
"""The oldest tileiras whose loads and stores can leave bounds unchecked."""
ARCHITECTURES = (80, 86, 87, 88, 89, 90, 100, 103, 110, 120, 121)
"""What tileiras 13.4 compiles for."""

_COMPILER = ("nvidia-cuda-tileiras", "nvidia-cuda-nvcc", "nvidia-nvvm")
_EXTRA = "the extra cutile brings it"


def available() -> None:
    """Returns where kernels can be compiled; looks at installed wheels and loads none.

    Raises:
      ImportError: something is missing or too old; the message names it, with the versions.
    """
    if _first_folder("cuda.tile") is None:
        raise ImportError(f"cuda-tile is not installed; {_EXTRA}")
    _at_least("cuda-tile", MINIMUM)
    versions = {name: _at_least(name, MINIMUM_COMPILER) for name in _COMPILER}
    # cuTile takes wheels of one release only, and else whatever compiler the machine happens to have.
    if len({version[:2] for version in versions.values()}) != 1:
        told = ", ".join(f"{name} {_text(version)}" for name, version in versions.items())
        raise ImportError(f"{told}; the rule: one release")
    # Where several installations lie on the path, cuTile looks into the first alone.
    folder = _first_folder("nvidia.cu13")
    if folder is None or not any(Path(folder, "bin").glob("tileiras*")):
        raise ImportError(f"tileiras is not under {folder}, the first folder of the package nvidia.cu13")


def gpu_code(target: Target) -> str:
    """The compiler's name for the target's architecture, such as "sm_90".

    Raises:
      NotImplementedError: no image can be made for it.
    """
    if target.sm not in ARCHITECTURES:
        served = ", ".join(f"sm_{sm}" for sm in ARCHITECTURES)
        raise NotImplementedError(f"cutile: architecture sm_{target.sm}, compiles for {served}")
    return f"sm_{target.sm}"


def compiler_versions() -> dict[str, str]:
    """The versions that an image depends on, for the keys of caches."""
    return {name: importlib.metadata.version(name) for name in ("cuda-tile", *_COMPILER)}


@dataclass(frozen=True)
class Array:
    """A row-major array that a kernel takes: what the compiler may assume of it, and what a launch passes for it."""

    dtype: data_type
    shape: tuple[int, ...]

    def args(self, argument: Argument) -> list[Argument]:
        """The launch's arguments for this parameter when `argument` is its memory."""
        return array_args(argument, self.shape, row_major(self.shape))

    def assumptions(self) -> tuple[Any, ...]:
        """Sizes and strides are known only by their divisor, so that one image serves many sizes."""
        whole = 8 * 16 // self.dtype.itemsize_bits
        shape = tuple(_divisor(size, whole) for size in self.shape)
        stride = tuple(_divisor(step, whole) for step in row_major(self.shape)[:-1])
        return (self.dtype, shape, stride)


def array_args(argument: Argument, shape: Sequence[int], strides: Sequence[int]) -> list[Argument]:
    """An array parameter in cuTile's calling convention 1: pointer, every dimension, every stride in elements."""
    return [argument, *(immediate(number, "int32") for number in (*shape, *strides))]


Parameter = Array | bool | int | float
"""An array, or a constant that the image is compiled for and no launch passes."""


def compile_kernel(function: FunctionType, parameters: Sequence[Parameter], target: Target, **hints: int) -> CubinImage:
    """Compiles an undecorated kernel for the target's architecture, once for each different image in this process.

    Args:
      function: the kernel. It and the functions beside it are known to the image by their module's name, not by their
        path, so that equal sources make equal bytes on every machine.
      parameters: one for each parameter of the function. Memory starts at multiples of 16 bytes.
      hints: of `cuda.tile.kernel`: num_worker_warps, num_ctas, occupancy.

    Raises:
      NotImplementedError: the compiler has no such feature or architecture, or ran past the time that the user's
        CUDA_TILE_COMPILER_TIMEOUT_SEC gives it. Whatever else cuTile raises is a fault of the kernel or the compiler.
    """
    keys = tuple(p.assumptions() if isinstance(p, Array) else (type(p), p) for p in parameters)
    return _compile(function, keys, gpu_code(target), tuple(sorted(hints.items())))


@functools.lru_cache(maxsize=256)
def _compile(
    function: FunctionType, keys: tuple[tuple[Any, ...], ...], code: str, hints: tuple[tuple[str, int], ...]
) -> CubinImage:
    import cuda.tile as ct
    from cuda.tile.compilation import CallingConvention, KernelSignature, export_kernel

    _name_sources_by_module(function)
    constraints = [_constraint(key) for key in keys]
    signature = KernelSignature(constraints, CallingConvention.cutile_python_v1(), function.__name__)
    image = io.BytesIO()
    try:
        export_kernel(ct.kernel(function, **dict(hints)), [signature], image, gpu_code=code, output_format="cubin")
    except ct.TileUnsupportedFeatureError as error:
        raise NotImplementedError(f"cutile: {function.__name__} for {code}: {error.message}") from error
    except ct.TileCompilerTimeoutError as error:
        raise TransientDecline(f"cutile: {function.__name__} for {code}: {error.message}") from error
    return CubinImage(image.getvalue(), function.__name__)


def _constraint(key: tuple[Any, ...]) -> Any:
    import cuda.tile as ct
    from cuda.tile.compilation import ArrayConstraint, ConstantConstraint

    if len(key) == 2:
        return ConstantConstraint(key[1])
    dtype, shape, stride = key
    return ArrayConstraint(
        getattr(ct, dtype.value),
        len(shape),
        index_dtype=ct.int32,
        stride_lower_bound_incl=0,
        # A program's outputs and workspace overlap nothing that the same step reads.
        alias_groups=(),
        may_alias_internally=False,
        stride_constant=(*(None for _ in stride), 1),
        stride_divisible_by=(*stride, 1),
        shape_divisible_by=shape,
        base_addr_divisible_by=16,
    )


def _name_sources_by_module(function: FunctionType) -> None:
    """Line tables in an image hold file names. Sources are still found, by the module's loader."""
    package = function.__module__.partition(".")[0]
    modules, named = [function.__module__], set()
    while modules:
        module = modules.pop()
        named.add(module)
        name = module.replace(".", "/") + ".py"
        for each in filter(inspect.isfunction, vars(sys.modules[module]).values()):
            if each.__module__ == module and each.__code__.co_filename != name:
                each.__code__ = each.__code__.replace(co_filename=name)
            elif each.__module__.partition(".")[0] == package and each.__module__ not in named:
                modules.append(each.__module__)


def _divisor(number: int, most: int) -> int:
    """The largest power of two up to `most` that divides the number."""
    return most if number == 0 else min(number & -number, most)


def _first_folder(package: str) -> str | None:
    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # no parent package
        return None
    return next(iter(spec.submodule_search_locations or []), None) if spec else None


def _at_least(name: str, minimum: tuple[int, ...]) -> tuple[int, ...]:
    try:
        found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"{name} is not installed; {_EXTRA}") from None
    version = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    if version < minimum:
        raise ImportError(f"{name} {found}, at least {_text(minimum)} is needed")
    return version


def _text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))
