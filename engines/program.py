"""Builds the bytes of a `Program`. The layout has one source, `_ffi.PROGRAM_SPEC`, which the C++ parser reads too."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import msgpack

from cudnn_jax import _ffi
from cudnn_jax.engines.base import Program
from cudnn_jax.engines.target import Target
from cudnn_jax.graph import Tensor, pygraph

Argument = tuple[str, int | float]
"""("operand", index), ("workspace", offset) or ("immediate", number)."""


@cache
def spec() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(_ffi.PROGRAM_SPEC)
    return loaded


def storage_shape(tensor: Tensor) -> tuple[int, ...]:
    """The row-major shape of a tensor's memory: its dims, outermost stride first."""
    return tuple(tensor.dim[axis] for axis in storage_order(tensor))


def storage_order(tensor: Tensor) -> tuple[int, ...]:
    """Axes of a tensor by falling stride. Axes of length 1 carry no order and stay where they are."""
    axes = list(range(len(tensor.dim)))
    moving = [axis for axis in axes if tensor.dim[axis] != 1]
    ordered = iter(sorted(moving, key=lambda axis: -tensor.stride[axis]))
    return tuple(axis if tensor.dim[axis] == 1 else next(ordered) for axis in axes)


def is_dense(tensor: Tensor) -> bool:
    """Whether the tensor's elements fill its memory without gaps or overlaps, in whatever order of axes."""
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
    """

    def __init__(self, graph: pygraph, target: Target, *, cudnn: int | None = None) -> None:
        self._payload: dict[str, Any] = {
            "requires": {"platform": target.platform, "arch": target.sm, "cudnn": cudnn},
            "inputs": [_operand(tensor) for tensor in graph.inputs],
            "outputs": [_operand(tensor) for tensor in graph.outputs],
            "workspace": 0,
            "steps": [],
        }

    def workspace(self, size: int) -> int:
        """Reserves `size` bytes of workspace and returns their offset, aligned as the layout asks."""
        align = spec()["limits"]["workspace_alignment"]
        offset = math.ceil(self._payload["workspace"] / align) * align
        self._payload["workspace"] = offset + size
        return int(offset)

    def step(self, kind: str, **fields: Any) -> None:
        """Appends a step of one of the layout's kinds."""
        self._payload["steps"].append({"kind": kind, **fields})

    def build(self) -> Program:
        payload = _pack(self._payload)
        digest = hashlib.sha256(payload)
        outer = {
            "magic": spec()["magic"],
            "version": spec()["version"],
            "sha256": digest.digest(),
            "payload": payload,
        }
        return Program(_pack(outer), self._payload["workspace"], digest.hexdigest())


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
