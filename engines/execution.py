"""`graph.execute`: a planned graph run on the caller's buffers, without JAX's jit.

What a call may cost is little, so all that does not change is settled once: which tensor is which operand, the
program, and the function that runs. A program is run by the C++ side in one crossing. The reference engine is run
under `jax.jit` on the CPU, and writes into the caller's buffers.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cudnn_jax import _ffi
from cudnn_jax.engines import libraries
from cudnn_jax.engines.base import Artifact, Inline, Program
from cudnn_jax.engines.target import CPU, Target, local
from cudnn_jax.graph import GraphNotSupportedError, Tensor, data_type, pygraph

if TYPE_CHECKING:
    import numpy as np

Run = Callable[[Mapping[Any, Any], Any, Any], None]

lock = threading.RLock()
"""Held while a graph's first execution plans and builds it."""


@dataclass(frozen=True)
class Execution:
    """How one graph runs: `run(buffers, workspace, handle)`, and the bytes of workspace that it takes."""

    run: Run
    workspace_size: int


def target_of(handle: _ffi.Handle | None) -> Target:
    """What a graph is planned for that runs with `handle`: the handle's device, or the CPU where there is no GPU."""
    if handle is not None:
        _ffi.get_stream(handle)  # refuses what is no handle, or a destroyed one
    libraries.locate()
    if _ffi.device_count() == 0:
        return CPU
    return local(0 if handle is None else handle.device)


def prepare(graph: pygraph, target: Target, artifact: Artifact) -> Execution:
    """The execution of a graph that was planned for `target`.

    Raises:
      GraphNotSupportedError: the artifact needs JAX around it.
    """
    operands = operands_of(graph, any_strides=artifact.any_strides)
    if isinstance(artifact, Program):
        return _of_program(operands, target, artifact)
    if target.platform != "cpu":
        raise GraphNotSupportedError(
            f"graph.execute runs the reference engine on the CPU only, and this graph was planned for "
            f"{target.describe()}: inside jax.jit, the operations of cudnn_jax run it there"
        )
    narrow = [tensor for tensor in (*graph.inputs, *graph.outputs) if tensor.data_type.itemsize_bits < 8]
    if narrow:
        raise GraphNotSupportedError(
            f"graph.execute cannot run the reference engine on {narrow[0].data_type.value}, which JAX keeps unpacked"
        )
    return Execution(_InlineRun(graph, operands, artifact), 0)


def operands_of(graph: pygraph, *, any_strides: bool = False) -> _ffi.GraphOperands:
    """The graph's inputs and outputs as the C++ side knows them, in the order of a program's operands."""
    inputs = graph.inputs
    operands = _ffi.GraphOperands([_row(tensor) for tensor in (*inputs, *graph.outputs)], any_strides)
    for made, over in graph.in_place.items():
        operands.write_over(len(inputs) + made, over)
    return operands


def _of_program(operands: _ffi.GraphOperands, target: Target, program: Program) -> Execution:
    if program.prepare is not None:
        notes = f" ({'; '.join(program.notes)})" if program.notes else ""
        raise GraphNotSupportedError(
            f"graph.execute makes no arrays, and the plan's operands are made from the graph's inputs{notes}: inside "
            "jax.jit, the operations of cudnn_jax do it"
        )
    if target.platform == "cpu":
        executable = _ffi.Executable(operands, program.data)
    else:
        device = 0 if target.ordinal is None else target.ordinal
        executable = _ffi.Executable(operands, program.data, device, target.device_kind)
    return Execution(executable.execute, executable.workspace_size)


def _row(tensor: Tensor) -> tuple[Any, ...]:
    label = f"tensor {tensor.name!r} (uid {tensor.uid})" if tensor.name else f"tensor of uid {tensor.uid}"
    is_output = tensor.producer is not None
    return tensor, label, tensor.uid, tensor.data_type.value, list(tensor.dim), list(tensor.stride), is_output


class _InlineRun:
    """Runs an inlined artifact on CPU buffers."""

    def __init__(self, graph: pygraph, operands: _ffi.GraphOperands, artifact: Inline) -> None:
        import jax

        self._operands = operands
        self._inputs = [tensor.uid for tensor in graph.inputs]
        self._outputs = [tensor.uid for tensor in graph.outputs]
        self._fn = jax.jit(artifact.fn)
        self._device = jax.local_devices(backend="cpu")[0]
        kinds = {tensor.data_type for tensor in graph.tensors} | {graph.compute_data_type}
        kinds |= {node.compute_data_type for node in graph.nodes}
        self._wide = any(kind.itemsize_bits == 64 for kind in kinds - {data_type.NOT_SET})

    def __call__(self, buffers: Mapping[Any, Any], workspace: Any, handle: Any) -> None:
        import jax
        import numpy as np

        if handle is not None:
            _ffi.get_stream(handle)  # what is no handle, or a destroyed one, is told here as for a program
        pack = self._operands.pack(buffers)
        views = {operand.uid: _view(operand) for operand in pack.operands}
        # Without 64-bit mode JAX would narrow operands in silence.
        with jax.default_device(self._device), jax.enable_x64(True) if self._wide else nullcontext():
            made = self._fn(*(views[uid] for uid in self._inputs))
        for uid, array in zip(self._outputs, made, strict=True):
            np.copyto(views[uid], np.asarray(array), casting="no")


def _view(operand: _ffi.PackOperand) -> np.ndarray[Any, Any]:
    """numpy's view of a buffer, for as long as the pack lives."""
    import jax.numpy as jnp
    import numpy as np

    dtype = np.dtype(jnp.dtype(operand.dtype))
    if 0 in operand.shape:
        return np.empty(operand.shape, dtype)
    strides = [dtype.itemsize * stride for stride in operand.stride]
    extent = dtype.itemsize + sum((dim - 1) * stride for dim, stride in zip(operand.shape, strides, strict=True))
    memory = (ctypes.c_char * extent).from_address(operand.pointer)
    return np.ndarray(operand.shape, dtype, memoryview(memory), strides=strides)
