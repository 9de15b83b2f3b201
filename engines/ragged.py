"""Tensors with ragged offsets, as the references read and write them. Loads no JAX.

Such a tensor has four axes, of which axis 2 counts the rows of a sequence. The elements of sequence b begin at
offset[b] of the tensor's memory, and its rows lie from there at the tensor's strides, up to offset[b + 1]. Inside of a
graph the tensor is padded: (B, N, T, D) with rows of 0 past the end of each sequence. In the memory of a result, what
belongs to no sequence is as a row that attends to nothing: 0, and -inf in a logsumexp.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any

from cudnn_jax.engines.program import is_dense, storage_order
from cudnn_jax.graph import Tensor, pygraph

if TYPE_CHECKING:
    import jax

Function = Callable[..., tuple[Any, ...]]
_ROWS = 2
_BLANK = {"Stats": float("-inf"), "score_max": float("-inf")}
"""Output port -> what stands where there is no sequence, if that is not 0."""
_NEEDS_LENGTHS = "use_padding_mask"


def reason(graph: pygraph) -> str | None:
    """Why the ragged tensors of a graph mean nothing here, or None."""
    for tensor in (*graph.inputs, *graph.outputs):
        if tensor.ragged_offset is None:
            continue
        if len(tensor.dim) != 4:
            return f"ragged tensor {tensor.label} of rank {len(tensor.dim)}, serves rank 4"
        if not is_dense(tensor):
            return f"ragged tensor {tensor.label} with strides {tensor.stride}, serves strides without gaps"
    for node in graph.nodes:
        if node.params.get(_NEEDS_LENGTHS, True):
            continue
        for port, tensor in (*node.inputs.items(), *node.outputs.items()):
            if tensor.ragged_offset is not None:
                return f"{node.label}: ragged {port} with {_NEEDS_LENGTHS} False, needs the sequences' lengths"
    return None


def padded(graph: pygraph, run: Function) -> Function:
    """`run`, which takes and gives padded arrays, as a function of a graph's buffers; itself where none is ragged.

    Both take arrays with the dims of `graph.inputs` and give those of `graph.outputs`. A ragged buffer under its
    tensor's dims is its memory, of as many elements as the tensor has.
    """
    inputs, outputs = list(graph.inputs), list(graph.outputs)
    if all(tensor.ragged_offset is None for tensor in (*inputs, *outputs)):
        return run
    position = {id(tensor): at for at, tensor in enumerate(inputs)}

    def unpacked(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        def starts(tensor: Tensor) -> jax.Array:
            return arrays[position[id(tensor.ragged_offset)]].reshape(-1)

        given = (
            array if tensor.ragged_offset is None else _gather(array, tensor, starts(tensor))
            for array, tensor in zip(arrays, inputs, strict=True)
        )
        made = run(*given)
        return tuple(
            array if tensor.ragged_offset is None else _scatter(array, tensor, starts(tensor))
            for array, tensor in zip(made, outputs, strict=True)
        )

    return unpacked


def _gather(array: jax.Array, tensor: Tensor, starts: jax.Array) -> jax.Array:
    """The padded array of a buffer."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if 0 in tensor.dim:
        return array
    memory = array.transpose(storage_order(tensor)).reshape(-1)
    order, length = _runs(tensor)
    where, inside = _where(tensor, starts, order, length)
    where = where.transpose(order)
    runs = jax.vmap(lambda at: jax.lax.dynamic_slice(memory, (at,), (length,)))(where.reshape(-1))
    rows = runs.reshape([tensor.dim[axis] for axis in order]).transpose(np.argsort(order))
    return jnp.where(inside, rows, jnp.zeros((), array.dtype))


def _scatter(array: jax.Array, tensor: Tensor, starts: jax.Array) -> jax.Array:
    """The buffer of a padded array."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    if 0 in tensor.dim:
        return array
    order, length = _runs(tensor)
    size = prod(tensor.dim)
    where, inside = _where(tensor, starts, order, length)
    where = jnp.where(inside, where, size).transpose(order)  # past the end nothing is written
    memory = jax.lax.scatter(
        jnp.full((size,), _blank(tensor), array.dtype),
        where.reshape(-1, 1),
        array.transpose(order).reshape(-1, length),
        jax.lax.ScatterDimensionNumbers(
            update_window_dims=(1,), inserted_window_dims=(), scatter_dims_to_operand_dims=(0,)
        ),
        mode=jax.lax.GatherScatterMode.FILL_OR_DROP,
    )
    stored = storage_order(tensor)
    return memory.reshape([tensor.dim[axis] for axis in stored]).transpose(np.argsort(stored))


def _blank(tensor: Tensor) -> float:
    made = tensor.producer.outputs.items() if tensor.producer is not None else ()
    return next((_BLANK.get(port, 0) for port, each in made if each is tensor), 0)


def _runs(tensor: Tensor) -> tuple[tuple[int, ...], int]:
    """An order of the axes whose last one is moved whole, and how many elements that are.

    It is one of stride 1 that is not the rows', if there is any: a run then is of one row.
    """
    beside = [axis for axis in (1, 3) if tensor.stride[axis] == 1 and tensor.dim[axis] > 1]
    if not beside:
        return (0, 1, 2, 3), 1
    last = beside[0]
    return (*(axis for axis in range(4) if axis != last), last), tensor.dim[last]


def _where(tensor: Tensor, starts: jax.Array, order: tuple[int, ...], length: int) -> tuple[jax.Array, jax.Array]:
    """Where in memory each run begins, in the tensor's axes with 1 in place of a run's, and whether a row exists."""
    import jax.numpy as jnp

    def steps(axis: int) -> jax.Array:
        shape = [1] * 4
        shape[axis] = -1
        count = 1 if length > 1 and axis == order[-1] else tensor.dim[axis]
        return jnp.arange(count, dtype=starts.dtype).reshape(shape) * tensor.stride[axis]

    first = starts[:-1].reshape(-1, 1, 1, 1)
    inside = steps(_ROWS) < (starts[1:] - starts[:-1]).reshape(-1, 1, 1, 1)
    return first + steps(1) + steps(_ROWS) + steps(3), inside
