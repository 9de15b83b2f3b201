"""Dims and strides as plain tuples: row-major order, memory order, broadcasting."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import index
from typing import Any

from cudnn_jax.graph.errors import shown

Dims = tuple[int, ...]


def as_dims(what: str, values: Any) -> Dims:
    """`values` as a tuple of non-negative integers, or a ValueError that names `what`."""
    try:
        dims = tuple(index(value) for value in values)
    except TypeError:
        dims = ()
    if not dims or min(dims) < 0:
        raise ValueError(f"{what} is {values!r}; the rule: a sequence of at least one integer, none negative")
    if max(dims) >= 2**63:
        raise ValueError(f"{what} is ({', '.join(map(shown, dims))}); the rule: integers below 2**63")
    return dims


def row_major(dim: Sequence[int]) -> Dims:
    """Strides with the last axis fastest."""
    return in_order(dim, range(len(dim)))


def in_order(dim: Sequence[int], order: Sequence[int]) -> Dims:
    """Dense strides for axes listed from slowest to fastest."""
    stride = [0] * len(dim)
    step = 1
    for axis in reversed(order):
        stride[axis] = step
        step *= dim[axis]
    return tuple(stride)


def memory_order(dim: Sequence[int], stride: Sequence[int]) -> Dims:
    """Axes from slowest to fastest. A stride of 0, of a broadcast axis or outside an empty one, counts as slowest."""
    return tuple(sorted(range(len(dim)), key=lambda axis: (stride[axis] != 0, -stride[axis])))


def broadcast(shapes: Iterable[Sequence[int]]) -> Dims | None:
    """The dims that all shapes broadcast to, aligned at the last axis; None if there are none."""
    shapes = list(shapes)
    rank = max(map(len, shapes))
    common = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, rank - len(shape)):
            if common[axis] == 1:
                common[axis] = size
            elif size not in (1, common[axis]):
                return None
    return tuple(common)
