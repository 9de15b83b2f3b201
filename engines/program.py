"""Builds the bytes of a `Program`. The layout has one source, `_ffi.PROGRAM_SPEC`, which the C++ parser reads too."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from operator import index
from typing import Any, SupportsIndex, cast

import msgpack

from cudnn_jax import _ffi
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.kernels import CubinImage, CuteObject
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import Tensor, pygraph
from cudnn_jax.graph.layout import memory_order

Argument = tuple[str, int] | tuple[str, tuple[str, int | float]]
"""("operand", index), ("workspace", offset) or ("immediate", (dtype, number))."""


@cache
def spec() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_ffi.PROGRAM_SPEC)
    return loaded


def immediate(number: int | float, dtype: str) -> Argument:
    """A number that a kernel takes by value.

    Args:
      dtype: "int32", "int64", "float32" or "float64". A float32 is passed as the nearest one to `number`.

    Raises:
      ValueError: no such dtype, or the number is not one of it; the message gives the limits.
    """
    limits = spec()["immediates"].get(dtype)
    if limits is None:
        raise ValueError(f"immediate: dtype {dtype!r}, the rule is one of {', '.join(spec()['immediates'])}")
    whole = limits["type"] == "integer"
    value = index(cast(SupportsIndex, number)) if whole else float(number)
    if not limits["min"] <= value <= limits["max"]:
        raise ValueError(f"immediate: {number!r} is no {dtype}, the rule is {limits['min']} to {limits['max']}")
    return ("immediate", (dtype, value))


def storage_shape(tensor: Tensor) -> tuple[int, ...]:
    """The row-major shape of a tensor's memory: its dims, outermost stride first."""
    return tuple(tensor.dim[axis] for axis in storage_order(tensor))


def storage_order(tensor: Tensor) -> tuple[int, ...]:
    """Axes of a tensor by falling stride, and 0 in front. Axes of length 1 carry no order and stay where they are."""
    axes = list(range(len(tensor.dim)))
    moving = [axis for axis in axes if tensor.dim[axis] != 1]
    ordered = iter(axis for axis in memory_order(tensor.dim, tensor.stride) if axis in moving)
    return tuple(axis if tensor.dim[axis] == 1 else next(ordered) for axis in axes)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gaps or overlaps, in whatever order of axes."""
    if 0 in tensor.dim:
        return True
    expected = 1
    for axis in reversed(storage_order(tensor)):
        if tensor.dim[axis] > 1:
            if tensor.stride[axis] != expected:
                return False
            expected *= tensor.dim[axis]
    return True


class ProgramBuilder:
    """Collects the steps of a program for one graph and target.

    Operands are numbered as the graph's inputs and then its outputs, in canonical order.

    Args:
      cudnn: the version that `cudnn` steps were made with, such as 91900.
      cutedsl: the version of the DSL that made the objects of `cute` steps. `cute` sets it as well.
    """

    def __init__(self, graph: pygraph, target: Target, *, cudnn: int | None = None, cutedsl: str | None = None) -> None:
        self._tensors = [*graph.inputs, *graph.outputs]
        self._requires = {"platform": target.platform, "arch": target.sm, "cudnn": cudnn, "cutedsl": cutedsl}
        self._payload: dict[str, Any] = {
            "requires": self._requires,
            "inputs": [_operand(tensor) for tensor in graph.inputs],
            "outputs": [_operand(tensor) for tensor in graph.outputs],
            "workspace": 0,
            "steps": [],
        }

    def operand(self, tensor: Tensor) -> Argument:
        """The argument that stands for a tensor that the caller gives or gets; ValueError for any other."""
        for position, known in enumerate(self._tensors):
            if known is tensor:
                return ("operand", position)
        raise ValueError(f"tensor {tensor.label} is neither an input nor an output of the graph")

    def workspace(self, size: int) -> int:
        """Reserves `size` bytes of workspace and returns their offset, aligned as the layout asks."""
        align = spec()["limits"]["workspace_alignment"]
        offset = math.ceil(self._payload["workspace"] / align) * align
        self._payload["workspace"] = offset + size
        return int(offset)

    def step(self, kind: str, **fields: Any) -> None:
        """Appends a step of one of the layout's kinds."""
        self._payload["steps"].append({"kind": kind, **fields})

    def cubin(self, image: CubinImage, grid: Sequence[int], args: Sequence[Argument]) -> None:
        """Appends the launch of a cuTile kernel on `grid` blocks (x, y, z), with `args` in the kernel's order."""
        self.step("cubin", kernel=image.kernel, image=image.data, grid=list(grid), args=list(args))

    def cute(self, function: CuteObject, args: Sequence[Argument]) -> None:
        """Appends the call of a CuTe-DSL function, whose stream comes last and is not among `args`.

        Raises:
          ValueError: another version of the DSL made an earlier step, and one process runs one runtime.
        """
        needed = self._requires["cutedsl"]
        if needed is not None and needed != function.version:
            raise ValueError(f"cute: {function.function} is of CuTe-DSL {function.version}, the program of {needed}")
        self._requires["cutedsl"] = function.version
        self.step("cute", function=function.function, object=function.data, args=list(args))

    def build(self) -> Program:
        """The finished program; ValueError names the field that breaks the layout."""
        payload = _pack(self._payload)
        digest = hashlib.sha256(payload)
        outer = {
            "magic": spec()["magic"],
            "version": spec()["version"],
            "sha256": digest.digest(),
            "payload": payload,
        }
        data = _pack(outer)
        _ffi.program_check(data)
        return Program(data, self._payload["workspace"], digest.hexdigest())


def program_of(data: bytes) -> Program:
    """The program of bytes that were checked when they were kept; whoever loads it checks it again.

    Raises:
      ValueError: they are of another layout.
    """
    outer = msgpack.unpackb(data)
    if (outer["magic"], outer["version"]) != (spec()["magic"], spec()["version"]):
        raise ValueError(f"program: {outer['magic']} {outer['version']}, reads {spec()['magic']} {spec()['version']}")
    return Program(data, msgpack.unpackb(outer["payload"])["workspace"], outer["sha256"].hex())


def arguments(graph: pygraph, canonical_indices: Sequence[int]) -> list[Argument]:
    """Operand arguments for tensors named by canonical index."""
    form = graph.canonical()
    position = {index: slot for slot, index in enumerate([*form["inputs"], *form["outputs"]])}
    return [("operand", position[index]) for index in canonical_indices]


def _operand(tensor: Tensor) -> Mapping[str, Any]:
    return {"dtype": tensor.data_type.value, "shape": list(storage_shape(tensor))}


def _pack(value: Any) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed
