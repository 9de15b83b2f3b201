"""The reference pointwise engine: a graph evaluated node by node in JAX, inlined into the caller's program.

A node reads its inputs in its compute type, and writes its result in its output's data type, virtual or not. Where a
conversion meets values that the new type does not have, floating numbers become the nearest integer, halves to even;
integers and the floating types of 8 bits and less saturate; NaN becomes 0 in an integer; and all but 0 is true.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cudnn_jax.engines import wide_types
from cudnn_jax.engines.pointwise._functions import FUNCTIONS
from cudnn_jax.graph import Node, Tensor, data_type, pygraph

if TYPE_CHECKING:
    from cudnn_jax.engines.pointwise.facts import PointwiseFacts

Evaluator = Callable[..., tuple[Any, ...]]

_LARGEST = {data_type.FP8_E4M3: 448.0, data_type.FP8_E5M2: 57344.0, data_type.FP4_E2M1: 6.0}
_CONDITIONS = {"binary_select": "mask"}
"""Mode -> its port that chooses, which is read as true or false and not in the compute type."""


def evaluator(graph: pygraph, facts: PointwiseFacts) -> Evaluator:
    """The function of a frozen graph of pointwise nodes; see `node_by_node`."""
    typed = zip(graph.nodes, facts.compute_types, strict=True)
    return node_by_node(graph, facts.dtypes, [partial(_outputs, node, compute) for node, compute in typed])


def _outputs(node: Node, compute: data_type, given: dict[str, jax.Array]) -> dict[str, jax.Array]:
    (port,) = node.outputs
    return {port: pointwise_node(node, compute, given)}


def node_by_node(
    graph: pygraph,
    dtypes: Iterable[data_type],
    functions: Sequence[Callable[[dict[str, jax.Array]], Mapping[str, jax.Array]]],
) -> Evaluator:
    """The function of a frozen graph: arrays with the dims of `graph.inputs` to a tuple in the order of its outputs.

    Args:
      dtypes: data types of tensors and of computation. Tracing the function raises GraphNotSupportedError where there
        are 64-bit ones and JAX is not in its 64-bit mode.
      functions: one for each node, of the arrays at its ports to those at its outputs, in any type.
    """
    inputs, outputs = list(graph.inputs), list(graph.outputs)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        wide_types.check(dtypes)
        known = {id(tensor): jnp.asarray(array) for tensor, array in zip(inputs, arrays, strict=True)}
        for node, function in zip(graph.nodes, functions, strict=True):
            made = function({port: _read(tensor, known) for port, tensor in node.inputs.items()})
            for port, tensor in node.outputs.items():
                known[id(tensor)] = jnp.broadcast_to(convert(made[port], tensor.data_type), tensor.dim)
        return tuple(known[id(tensor)] for tensor in outputs)

    return run


def pointwise_node(node: Node, compute: data_type, given: dict[str, jax.Array]) -> jax.Array:
    """What a node makes of the arrays at its ports, in no particular type."""
    mode = node.params["mode"]
    kinds = {port: data_type.BOOLEAN if port == _CONDITIONS.get(mode) else compute for port in given}
    return FUNCTIONS[mode](node.params, *(convert(array, kinds[port]) for port, array in given.items()))


def _read(tensor: Tensor, known: dict[int, jax.Array]) -> jax.Array:
    """The array of a tensor, or its number as one."""
    if tensor.is_pass_by_value:
        # A number has the rank that its neighbours have.
        return jnp.asarray(tensor.value, tensor.data_type.value)
    return known[id(tensor)]


def largest(kind: data_type) -> float:
    """The largest number of a type that conversions saturate at."""
    return _LARGEST[kind]


def convert(array: jax.Array, kind: data_type) -> jax.Array:
    """`array` in another data type, by the rules in the module's documentation."""
    dtype = jnp.dtype(kind.value)
    if array.dtype == dtype:
        return array
    if kind is data_type.BOOLEAN:
        return array != 0
    floating = jnp.issubdtype(array.dtype, jnp.floating)
    if not kind.is_floating and floating:
        return jnp.rint(array).astype(dtype)  # XLA's conversion saturates, and NaN gives 0
    if not kind.is_floating and array.dtype != jnp.bool_:
        wanted, held = kind.integers, data_type.of(array.dtype).integers
        return jnp.clip(array, max(wanted[0], held[0]), min(wanted[-1], held[-1])).astype(dtype)
    if kind in _LARGEST:
        wide = array if floating else array.astype(jnp.float32)
        return jnp.clip(wide, -largest(kind), largest(kind)).astype(dtype)
    return array.astype(dtype)
