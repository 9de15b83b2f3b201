"""What the operations that are graphs of one node share: each is a function of arrays over `call`.

Such a function builds its graph from shapes and data types, once for each in this process, so that plans, gradients and
refusals are those of any graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from cudnn_jax.engines.planning import pygraph
from cudnn_jax.graph import data_type
from cudnn_jax.graph.errors import shown
from cudnn_jax.ops import _arguments as check

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
RANKS = tuple(range(1, 9))


def floating(name: str, value: Any, *, rank: Sequence[int], layout: str) -> Any:
    """An array of a type to compute with."""
    made = check.array(name, value, rank=rank, layout=layout)
    check.dtype(name, made, FLOATS)
    return made


def wide(dtype: Any) -> Any:
    """The type that arrays of a type are computed with: float64 for itself, float32 for all others."""
    return jnp.promote_types(dtype, jnp.float32)


def graph_of(dtype: Any) -> pygraph:
    """An empty graph for arrays of a type, which computes in the wide one."""
    inner = data_type.of(wide(dtype))
    return pygraph(io_data_type=data_type.of(jnp.dtype(dtype)), intermediate_data_type=inner, compute_data_type=inner)


def axis_of(value: Any, rank: int, name: str = "axis") -> int:
    """One axis, counted from the front."""
    if isinstance(value, bool) or not hasattr(value, "__index__") or not -rank <= int(value) < rank:
        raise ValueError(f"{name} is {shown(value)}; the rule: an axis of x, {-rank} to {rank - 1}")
    return int(value) % rank


def kind_of(name: str, value: Any, allowed: Sequence[str]) -> data_type:
    """A data type, one of the names in `allowed`."""
    try:
        made = data_type.of(value)
    except ValueError:
        made = data_type.NOT_SET
    if made.value not in allowed:
        raise TypeError(f"{name} is {value!r}; the rule: {' or '.join(allowed)}")
    return made
