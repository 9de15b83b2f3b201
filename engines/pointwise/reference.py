"""The reference pointwise engine: a graph evaluated node by node in JAX, inlined into the caller's program.

A node reads its inputs in its compute type, and writes its result in its output's data type, virtual or not. Where a
conversion meets values that the new type does not have, floating numbers become the nearest integer, halves to even;
integers and the 8-bit floating types saturate; NaN becomes 0 in an integer; and all but 0 is true.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from cudnn_jax.engines import wide_types
from cudnn_jax.engines.pointwise._functions import FUNCTIONS
from cudnn_jax.graph import Node, Tensor, data_type, pygraph

if TYPE_CHECKING:
    from cudnn_jax.engines.pointwise.facts import PointwiseFacts

_LARGEST = {data_type.FP8_E4M3: 448.0, data_type.FP8_E5M2: 57344.0}
_CONDITIONS = {"binary_select": "mask"}
"""Mode -> its port that chooses, which is read as true or false and not in the compute type."""


def evaluator(graph: pygraph, facts: PointwiseFacts) -> Callable[..., tuple[Any, ...]]:
    """The function of a frozen graph: arrays with the dims of `graph.inputs` to a tuple in the order of its outputs.

    Tracing the function raises GraphNotSupportedError where the graph holds 64-bit types and JAX is not in its 64-bit
    mode.
    """
    inputs, outputs = list(graph.inputs), list(graph.outputs)

    def run(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        wide_types.check(facts.dtypes)
        known = {id(tensor): jnp.asarray(array) for tensor, array in zip(inputs, arrays, strict=True)}
        for node, compute in zip(graph.nodes, facts.compute_types, strict=True):
            (output,) = node.outputs.values()
            known[id(output)] = _evaluate(node, compute, output, known)
        return tuple(known[id(tensor)] for tensor in outputs)

    return run


def _evaluate(node: Node, compute: data_type, output: Tensor, known: dict[int, jax.Array]) -> jax.Array:
    mode = node.params["mode"]
    given = []
    for port, tensor in node.inputs.items():
        kind = data_type.BOOLEAN if port == _CONDITIONS.get(mode) else compute
        given.append(convert(_read(tensor, known), kind))
    made = FUNCTIONS[mode](node.params, *given)
    return jnp.broadcast_to(convert(made, output.data_type), output.dim)


def _read(tensor: Tensor, known: dict[int, jax.Array]) -> jax.Array:
    if tensor.is_pass_by_value:
        # A number has the rank that its neighbours have.
        return jnp.asarray(tensor.value, tensor.data_type.value)
    return known[id(tensor)]


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
        largest = _LARGEST[kind]
        wide = array if floating else array.astype(jnp.float32)
        return jnp.clip(wide, -largest, largest).astype(dtype)
    return array.astype(dtype)
