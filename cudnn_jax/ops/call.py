"""`cudnn_jax.call`: any graph as a JAX function."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.engines.program import is_dense, storage_order
from cudnn_jax.graph import Tensor
from cudnn_jax.ops import _arguments as check
from cudnn_jax.ops._primitive import Avals, BuiltGraph, Operation, match_manual_axes, register


@dataclass(frozen=True)
class CallConfig:
    """A frozen graph, told apart by what it computes."""

    digest: str
    graph: pygraph = field(compare=False, repr=False)
    implementation: str | None = None


def call(graph: pygraph, *arrays: Any, implementation: str | None = None) -> tuple[jax.Array, ...]:
    """Runs a graph on JAX arrays, eagerly or under `jax.jit`.

    Arrays have the logical dims of their tensors. Where a tensor's strides are not row-major, the array is transposed
    on its way in or out, and `explain` says so. There is no derivative and no `vmap` rule.

    Args:
      graph: a `cudnn_jax.pygraph`; it is frozen by the call.
      *arrays: one for each of `graph.inputs`, in that order, with their dims and data types.
      implementation: None for the ranked plan list; else "cudnn", "cutedsl", "cutile", "xla", or the name of an
        engine or plan.

    Returns:
      One array for each of `graph.outputs`, in that order.

    Raises:
      TypeError, ValueError: an array does not fit its tensor; the message names both.
      GraphValidationError: the graph breaks a rule of its own.
      GraphNotSupportedError: no engine serves the graph; the message holds every engine's reason.
    """
    if not isinstance(graph, pygraph):
        raise TypeError(f"graph is {type(graph).__name__}; the rule: a cudnn_jax.pygraph")
    implementation = check.optional_name("implementation", implementation)
    graph.freeze()
    inputs, outputs = graph.inputs, graph.outputs
    if not inputs:
        raise ValueError("graph has no inputs; the rule: at least one")
    if len(arrays) != len(inputs):
        wanted = ", ".join(map(_label, inputs))
        raise ValueError(f"{len(arrays)} arrays came; the rule: one for each of {len(inputs)} inputs: {wanted}")
    for tensor in (*inputs, *outputs):
        _check_representable(tensor)
    pairs = enumerate(zip(arrays, inputs, strict=True))
    operands = {_name("in", at): _fitted(array, tensor) for at, (array, tensor) in pairs}
    notes = tuple(note for tensor in (*inputs, *outputs) if (note := _copied(tensor)))
    made = CALL.bind(CallConfig(graph.hash(), graph, implementation), match_manual_axes(operands), notes)
    return tuple(made[_name("out", at)] for at in range(len(outputs)))


def _name(side: str, position: int) -> str:
    return f"{side}{position}"


def _label(tensor: Tensor) -> str:
    name = f"{tensor.name} " if tensor.name else ""
    return f"{name}{tensor.data_type.value}{list(tensor.dim)}"


def _check_representable(tensor: Tensor) -> None:
    if not is_dense(tensor):
        raise ValueError(
            f"{_label(tensor)} has strides {tensor.stride}; the rule: strides without gaps, as a JAX array has none"
        )
    dtype = jnp.dtype(tensor.data_type.value)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise TypeError(f"{_label(tensor)} needs 64-bit types; the rule: jax_enable_x64 is set")


def _fitted(array: Any, tensor: Tensor) -> Any:
    array = check.array(_label(tensor), array, rank=(len(tensor.dim),), layout=f"dims {tensor.dim}")
    check.shape(_label(tensor), array, tensor.dim, f"the tensor's dims {tensor.dim}")
    check.dtype(_label(tensor), array, (jnp.dtype(tensor.data_type.value),))
    return array


def _copied(tensor: Tensor) -> str | None:
    if storage_order(tensor) == tuple(range(len(tensor.dim))):
        return None
    return f"{_label(tensor)} is transposed: its strides {tensor.stride} are not row-major"


def _build(config: CallConfig, avals: Avals) -> BuiltGraph:
    graph = config.graph
    operands = {_name("in", at): tensor for at, tensor in enumerate(graph.inputs)}
    results = {_name("out", at): tensor for at, tensor in enumerate(graph.outputs)}
    return BuiltGraph(graph, operands, results, logical=True)


def _results(config: CallConfig, avals: Avals) -> Mapping[str, jax.ShapeDtypeStruct]:
    return {
        _name("out", at): jax.ShapeDtypeStruct(tensor.dim, jnp.dtype(tensor.data_type.value))
        for at, tensor in enumerate(config.graph.outputs)
    }


CALL = register(
    Operation(
        name="call",
        build=_build,
        results=_results,
        lead=_name("in", 0),
        batched=False,
        derivative="derivative: wrap it in jax.custom_vjp with a graph for each direction",
    )
)
